"""What a run folder says, but for times, costs and codes drawn at random: two runs of one recipe have to say the same.

All files are compared by their bytes. Left out of them, and nothing else:

- Times. `.lock`, which names the process. `seconds` and `finished` of a manifest, and the report's copy of them. In the
  log of a training (`trainer_state.json`, `training.log`) names that end in `_runtime` or `_per_second`, and `time`; in
  the first line of `training.log` also `process`, `host` and `step`, at which that process began. The times in the
  files of kept replies.
- Costs, to which requests that were under way at a kill belong: what `COSTS` names in a judge's summary and results and
  in the report, and the counts in the files of kept replies.
- Codes. Each file of kept replies draws the codes that are shown to the judge, which the replies repeat.
- What is computed from these: key and size in the report's manifest, and the note in a table of responses about what it
  was sampled from.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TIMES = ("_runtime", "_per_second")
OF_THE_PROCESS = ("process", "host", "time")
COSTS = ("requests", "prompt_tokens", "completion_tokens", "dollars", "dollars_at_most", "replies_reused")
CODE = re.compile(r"\b[0-9a-f]{12}\b")
IN_THE_PAGE = (
    re.compile(r"stages in [\d.]+ (seconds|minutes), finished [\d: -]+"),
    re.compile(r'<td class="number time" style="--share: [\d.]+">[\d.]+</td>'),
    re.compile(rf"<span><i>({'|'.join(COSTS)})</i> <b>[^<]*</b></span>".replace("_", " ")),
    re.compile(r"in [\d,]+ requests"),
)


def contents(folder: Path) -> dict[str, Any]:
    """Every file below `folder` by its path in it: its bytes, or what it holds beside what is left out."""
    return {
        path.relative_to(folder).as_posix(): content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def content(path: Path) -> Any:
    """One file's bytes, or what it holds beside what is left out."""
    read = READERS.get(path.name) or READERS.get(path.suffix) or Path.read_bytes
    return read(path)


def _manifest(path: Path) -> Any:
    found = _without(json.loads(path.read_bytes()), "seconds", "finished")
    if path.parent.name == "report":
        found = _without({**found, "summary": _without(found["summary"], "bytes")}, "key")
    return _free(found)


def _state(path: Path) -> Any:
    state = json.loads(path.read_bytes())
    return {**state, "log_history": [untimed(line) for line in state["log_history"]]}


def _log(path: Path) -> Any:
    lines = [untimed(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return [_without(line, *OF_THE_PROCESS, *(["step"] if line["event"] == "start" else [])) for line in lines]


def _page(path: Path) -> bytes:
    page = path.read_text(encoding="utf-8")
    for pattern in IN_THE_PAGE:
        page = pattern.sub("", page)
    return page.encode()


def _replies(path: Path) -> Any:
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT key, label, reply FROM replies ORDER BY key").fetchall()
    return [[key, label, CODE.sub("", reply)] for key, label, reply in rows]


def untimed(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a training log without what depends on the clock."""
    return {name: value for name, value in line.items() if not name.endswith(TIMES)}


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _free(value: Any) -> Any:
    """The value without costs, at any depth."""
    if isinstance(value, dict):
        return {key: _free(item) for key, item in value.items() if key not in COSTS}
    return [_free(item) for item in value] if isinstance(value, list) else value


def _table(path: Path) -> bytes:
    table = pq.read_table(path)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


READERS: Mapping[str, Callable[[Path], Any]] = {
    "manifest.json": _manifest,
    "results.json": lambda path: _free(json.loads(path.read_bytes())),
    "chat_result.json": lambda path: _free(json.loads(path.read_bytes())),
    "trainer_state.json": _state,
    "training.log": _log,
    "report.html": _page,
    ".parquet": _table,
    ".sqlite": _replies,
}
"""Files that are not compared as they are, by name or suffix."""


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A line for each file that is missing, new or different."""
    lines = [f"missing: {name}" for name in expected if name not in found]
    lines += [f"new: {name}" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        if not _same(expected[name], found[name]):
            lines.append(f"differs: {name}: {_first(expected[name], found[name])}")
    return sorted(lines)


def _same(expected: Any, found: Any) -> bool:
    """Whether two values are equal; NaN equals itself, and the order of keys does not count."""
    if isinstance(expected, bytes) or isinstance(found, bytes):
        return bool(expected == found)
    return json.dumps(expected, sort_keys=True) == json.dumps(found, sort_keys=True)


def _first(expected: Any, found: Any) -> str:
    """Where two values differ first, in short."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *found]:
            if not _same(expected.get(key), found.get(key)):
                return f"{key}: {_first(expected.get(key), found.get(key))}"
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{len(expected)} entries, now {len(found)}"
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            if not _same(one, other):
                return f"{number}: {_first(one, other)}"
    if isinstance(expected, bytes) and isinstance(found, bytes):
        at = next((i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
        if at is None:
            return f"{len(expected)} bytes, now {len(found)}"
        return f"byte {at}: {expected[max(0, at - 30) : at + 30]!r}, now {found[max(0, at - 30) : at + 30]!r}"
    return f"{expected!r}, now {found!r}"
