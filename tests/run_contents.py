"""What a run folder says, but for times and the process that wrote it: two runs of one recipe have to say the same.

Left out, and nothing else:
- `.lock`, which names the process;
- `seconds` and `finished` of a manifest;
- in the log of a training (`trainer_state.json`, `training.log`): names that end in `_runtime` or `_per_second`, and
  `time`; in the first line of `training.log` also `process`, `host` and `step`, at which that process began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMES = ("_runtime", "_per_second")
OF_THE_PROCESS = ("process", "host", "time")


def contents(folder: Path) -> dict[str, Any]:
    """Every file below `folder` by its path in it: bytes, or for files that hold times, what else they hold."""
    return {
        path.relative_to(folder).as_posix(): content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def content(path: Path) -> Any:
    """One file's bytes, or what it holds beside times."""
    if path.name == "manifest.json":
        return _without(json.loads(path.read_bytes()), "seconds", "finished")
    if path.name == "trainer_state.json":
        state = json.loads(path.read_bytes())
        return {**state, "log_history": [untimed(line) for line in state["log_history"]]}
    if path.name == "training.log":
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [
            _without(untimed(line), *OF_THE_PROCESS, *(["step"] if line["event"] == "start" else [])) for line in lines
        ]
    return path.read_bytes()


def untimed(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a training log without what depends on the clock."""
    return {name: value for name, value in line.items() if not name.endswith(TIMES)}


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


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
