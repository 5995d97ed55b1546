"""Every verb and reader on rows and files that nobody would write: documented exit codes, good rows survive.

`make fuzz` runs more of it, with other draws each time: `make fuzz CASES=1000`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regretless.cli.app import main
from regretless.core.errors import DataError, RegretlessError
from regretless.core.files import write_jsonl
from regretless.core.text_cleaning import one_line
from regretless.data.columns import COLUMN_TYPES
from regretless.data.preferences import parse_pairs, read_pairs
from regretless.data.prompts import PromptSource, read_prompts
from regretless.data.rejected_rows import Refusal
from regretless.data.responses import read_responses
from regretless.data.rows import read_rows, write_records
from regretless.data.schema import PAIR as PAIR_SCHEMA
from regretless.data.schema import RESPONSE
from regretless.evaluation.chat.judge_prompts import _parse as parse_template
from regretless.evaluation.chat.style_control import style
from regretless.evaluation.chat.verdicts import _bracketed as bracketed
from regretless.labeling.judge_prompt import _check_layout
from regretless.labeling.judge_replies import parse_ratings
from regretless.training.log import LOG_FILE
from regretless.world.local_judge import serving

CASES = int(os.environ.get("REGRETLESS_FUZZ", "0"))
"""Cases of each verb and reader; 0: few, and always the same ones."""
COUNTS: Counter[str] = Counter()
DOCUMENTED = {0, *(kind.exit_code for kind in RegretlessError.__subclasses__())}
PROMPT = "Tom has 7 apples. Tom buys 2. How many?\n"
PAIR = {"prompt": PROMPT, "chosen": "7+2=9\n\\boxed{9}", "rejected": "7-2=5\n\\boxed{5}"}
RIGHT = {"prompt": PROMPT, "response": "7+2=9\n\\boxed{9}", "answer": "9", "verdict": "correct", "score": 1.0}
WRONG = {**RIGHT, "response": "7-2=5\n\\boxed{5}", "verdict": "wrong", "score": 0.5}
GOOD_PAIRS = [{**PAIR, "pair_id": f"good-{number}", "prompt_id": "good"} for number in range(3)]
GOOD_RESPONSES = [
    {**row, "response_id": f"good-{row['verdict']}", "prompt_id": "good", "response": row["response"] + " " * number}
    for number, row in enumerate((RIGHT, WRONG, RIGHT, WRONG))
]


def cases(few: int) -> settings:
    """`few` cases unless more are asked for."""
    return settings(
        max_examples=CASES or few,
        derandomize=not CASES,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


# ---- what nobody would write ----------------------------------------------------------------------------------------

TEXTS = st.text(max_size=8) | st.sampled_from(
    [
        "",
        " ",
        "\ud800",
        "a\udfffb",
        "\x00",
        "\x1b[31mred\x1b[0m",
        "\x9b2J",
        "\u202e",
        "x" * 3000,
        "[bold]",
        "[/x]",
        "\\boxed{",
    ]
)
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([-1, 0, 1.5, 2**31, 2**63, -(2**63), 10**400, -1e39, 1e308, -0.0, math.nan, math.inf, -math.inf])
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXTS | st.sampled_from(["role", "content", "tokens", "logprobs"]), inner, max_size=3)
    ),
    max_leaves=5,
)
LISTS = st.lists(NUMBERS | st.none() | st.booleans() | TEXTS | st.lists(NUMBERS, max_size=2), max_size=4)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", ""]) | TEXTS, "content": TEXTS}
    ),
    max_size=3,
)


def deep(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = [value]
    return value


def bad_row(good: Mapping[str, Any], names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """A good row with some columns changed, taken out or added."""
    changes = st.dictionaries(
        st.sampled_from(names) | TEXTS,
        VALUES | LISTS | MESSAGES | st.builds(deep, st.sampled_from([70, 900])),
        min_size=1,
        max_size=4,
    )
    gone = st.sets(st.sampled_from(names), max_size=2)
    return st.builds(
        lambda change, less: {
            key: value for key, value in {**good, "prompt_id": "bad", **change}.items() if key not in less
        },
        changes,
        gone,
    )


BAD_PAIRS = bad_row(PAIR, ["prompt", "chosen", "rejected", "messages", "metadata", *PAIR_SCHEMA.names])
BAD_RESPONSES = bad_row(RIGHT, [*RESPONSE.names, "id"])
BAD_LINES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"[1, 2]",
            b"null",
            b'{"prompt": "\xff"}',
            b'{"prompt": "\xed\xa0\x80"}',
            b'{"prompt": "x", "chosen"',
            b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}",
            b'{"a": ' + b"1" * 4301 + b"}",
            b"\xef\xbb\xbf{}",
            b"\x00" * 10,
        ]
    ),
).map(lambda line: line.replace(b"\n", b" ").replace(b"\r", b" "))


def line_of(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).encode()


def mixed(
    good: list[dict[str, Any]], bad: st.SearchStrategy[dict[str, Any]], most: int = 3
) -> st.SearchStrategy[list[Any]]:
    """Good rows, each at its place among bad rows and broken lines, at most so many."""
    wrong = st.lists(bad | BAD_LINES, min_size=1, max_size=most)

    def place(rows: list[Any], order: list[int]) -> list[Any]:
        result: list[Any] = list(good)
        for row, position in zip(rows, order, strict=False):
            result.insert(position % (len(result) + 1), row)
        return result

    return st.builds(place, wrong, st.lists(st.integers(0, 9), min_size=most, max_size=most))


@st.composite
def files(draw: st.DrawFn, good: list[dict[str, Any]]) -> tuple[str, bytes]:
    """Suffix and bytes of a file that is damaged as a whole."""
    suffix = draw(st.sampled_from([".parquet", ".jsonl", ".json", ".ndjson", ".txt", ""]))
    if suffix == ".parquet":
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(good), buffer, row_group_size=2)
        content = bytearray(buffer.getvalue())
    else:
        content = bytearray(json.dumps(good).encode() if suffix == ".json" else b"\n".join(map(line_of, good)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "empty"]))
        if kind == "cut":
            del content[place:]
        elif kind == "insert":
            content[place:place] = draw(st.binary(max_size=5))
        elif kind == "flip" and content:
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "empty":
            content.clear()
    return suffix, bytes(content)


# ---- what must hold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def counted() -> Iterator[None]:
    """Say at the end how many cases ran."""
    COUNTS.clear()
    yield
    total = ", ".join(f"{name} {count}" for name, count in sorted(COUNTS.items()))
    print(f"\nfuzz: {COUNTS.total()} cases ({total})")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def command(name: str, *arguments: object) -> tuple[int, str]:
    """Exit code of a command and what it said. Fails when the code is none of the documented ones or on an escape."""
    COUNTS[name] += 1
    said = io.StringIO()
    code = 0
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main([name, *map(str, arguments)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    text = said.getvalue()
    assert code in DOCUMENTED, text
    assert "Traceback" not in text and "\x1b" not in text and "\x9b" not in text
    text.encode()
    assert text.count("\nerror: ") + text.startswith("error: ") == (code != 0), text
    return code, text


def fresh(place: Path) -> Path:
    """An empty folder for what a case writes."""
    shutil.rmtree(place / "case", ignore_errors=True)
    (place / "case").mkdir()
    return place / "case"


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def check_outputs(folder: Path) -> None:
    """Every file parses with strict readers, holds whole characters, and no NaN or infinity in a known column."""
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix == ".json" and not file.name.startswith("in."):
            strict(file.read_bytes().decode())
        elif file.is_file() and file.suffix == ".jsonl" and not file.name.startswith("in."):
            for line in file.read_bytes().splitlines():  # of bytes: a text may hold U+0085, which ends no line here
                json.dumps(strict(line.decode()), ensure_ascii=False).encode()
        elif file.is_file() and file.suffix == ".parquet" and not file.name.startswith("in."):
            for row in pq.read_table(file).to_pylist():
                for name in COLUMN_TYPES.keys() & row.keys():
                    values = row[name] if isinstance(row[name], list) else [row[name]]
                    assert all(math.isfinite(value) for value in values if isinstance(value, float)), name
    assert not list(folder.rglob("*.tmp"))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(file) if isinstance(row, dict)]


def write(folder: Path, rows: list[Any]) -> Path:
    (folder / "in.jsonl").write_bytes(b"\n".join(map(line_of, rows)) + b"\n")
    return folder / "in.jsonl"


# ---- verbs that read responses --------------------------------------------------------------------------------------


@pytest.mark.slow
@cases(20)  # many rows in each, because most cases start a process for algebra
@given(rows=mixed(GOOD_RESPONSES, BAD_RESPONSES, most=9), suffix=st.sampled_from([".jsonl", ".parquet"]))
def test_verify_and_pair_when_rows_are_bad_then_good_ones_come_through(
    place: Path, rows: list[Any], suffix: str
) -> None:
    folder = fresh(place)
    file = write(folder, rows)
    code, said = command("verify", "--responses", file, "--output", folder / f"out{suffix}", "workers=1")
    assert code == 0, said
    verified = [row for row in rows_of(folder / f"out{suffix}") if str(row.get("response_id")).startswith("good-")]
    assert [row["verdict"] for row in verified] == ["correct", "wrong"] * 2
    code, said = command("pair", "--responses", file, "--output", folder / f"pairs{suffix}", "max_correct=1")
    assert code == 0, said
    made = [row for row in rows_of(folder / f"pairs{suffix}") if row["prompt_id"] == "good"]
    assert made and all(row["chosen"].startswith("7+2") for row in made)
    check_outputs(folder)


@cases(8)
@given(rows=mixed(GOOD_RESPONSES, BAD_RESPONSES))
def test_judge_when_rows_are_bad_then_good_ones_are_scored(place: Path, rows: list[Any]) -> None:
    folder = fresh(place)
    with serving() as server:
        code, said = command(
            "judge",
            "--responses",
            write(folder, rows),
            "--output",
            folder / "out.parquet",
            "model=judge",
            f"server.base_url={server.url}",
        )
    assert code == 0, said
    scored = [row for row in rows_of(folder / "out.parquet") if row["prompt_id"] == "good"]
    assert len(scored) == 4
    check_outputs(folder)


# ---- verbs that read pairs ------------------------------------------------------------------------------------------


@cases(60)
@given(rows=mixed(GOOD_PAIRS, BAD_PAIRS), suffix=st.sampled_from([".jsonl", ".parquet"]))
def test_mask_when_rows_are_bad_then_good_ones_come_through(
    place: Path, model: Path, rows: list[Any], suffix: str
) -> None:
    folder = fresh(place)
    arguments = ("--pairs", write(folder, rows), "--output", folder / f"out{suffix}", f"tokenizer={model}")
    code, said = command("mask", *arguments, "count=0")
    assert code == 0, said
    kept = [row["pair_id"] for row in rows_of(folder / f"out{suffix}") if str(row["pair_id"]).startswith("good-")]
    assert kept == [row["pair_id"] for row in GOOD_PAIRS]
    check_outputs(folder)


@cases(30)
@given(rows=mixed(GOOD_PAIRS, BAD_PAIRS))
def test_inspect_when_rows_are_bad_then_good_ones_are_counted(place: Path, model: Path, rows: list[Any]) -> None:
    folder = fresh(place)
    arguments = ("--pairs", write(folder, rows), "--model", model, "--output", folder / "out", "sample=0")
    code, said = command("inspect", *arguments)
    assert code == 0, said
    assert strict((folder / "out" / "inspect.json").read_text())["data"]["pairs"] >= 3
    check_outputs(folder)


@pytest.mark.slow
@cases(6)
@given(rows=mixed(GOOD_PAIRS, BAD_PAIRS))
def test_train_and_analyze_when_rows_are_bad_then_good_ones_train(place: Path, model: Path, rows: list[Any]) -> None:
    folder = fresh(place)
    given_files = ("--pairs", write(folder, rows), "--model", model)
    options = ("objective=dpo", "max_steps=1", "lora.r=2", "model.dtype=float32", "save_strategy=no")
    code, said = command("train", *given_files, "--output", folder / "dpo", *options)
    assert code == 0, said
    assert strict((folder / "dpo" / "manifest.json").read_text())["summary"]["pairs"] >= 3
    arguments = ("--policy", f"dpo={folder / 'dpo'}", "--output", folder / "analyze", "pairs=1", "sample=2")
    code, said = command("analyze", *given_files, *arguments)
    assert code == 0, said
    check_outputs(folder)


# ---- verbs that read prompts ----------------------------------------------------------------------------------------

PROMPTS = [{"prompt": f"{number} {PROMPT}", "prompt_id": f"good-{number}", "answer": "9"} for number in range(4)]


@pytest.mark.slow
@cases(12)
@given(rows=mixed(PROMPTS, bad_row(PROMPTS[0], ["prompt", "prompt_id", "id", "answer"])))
def test_sample_when_rows_are_bad_then_good_ones_are_answered(place: Path, model: Path, rows: list[Any]) -> None:
    folder = fresh(place)
    arguments = ("--prompts", write(folder, rows), "--model", model, "--output", folder / "out.parquet")
    code, said = command("sample", *arguments, "n=1", "max_new_tokens=2")
    assert code == 0, said
    answered = {row["prompt_id"] for row in rows_of(folder / "out.parquet")}
    assert answered >= {row["prompt_id"] for row in PROMPTS}
    check_outputs(folder)


@cases(6)
@given(rows=mixed(PROMPTS, bad_row(PROMPTS[0], ["prompt", "prompt_id", "id", "answer"])))
def test_evaluate_when_rows_are_bad_then_it_says_so(place: Path, model: Path, rows: list[Any]) -> None:
    """A benchmark with a hole in it is another one: here a bad row ends the command."""
    folder = fresh(place)
    arguments = ("--model", model, "--benchmark", f"b={write(folder, rows)}", "--output", folder / "out")
    code, _ = command("evaluate", *arguments, "max_new_tokens=2")
    assert code in {0, 3}
    check_outputs(folder)


# ---- damaged files, run folders and arguments -----------------------------------------------------------------------


@cases(80)
@given(data=st.data(), verb=st.sampled_from(["verify", "pair", "mask", "inspect", "sample"]))
def test_file_when_damaged_then_each_verb_ends_with_a_documented_code(
    place: Path, model: Path, data: st.DataObject, verb: str
) -> None:
    folder = fresh(place)
    flag, good = ("--pairs", GOOD_PAIRS) if verb in ("mask", "inspect") else ("--responses", GOOD_RESPONSES)
    suffix, content = data.draw(files(good))
    file = folder / f"in{suffix}"
    file.write_bytes(content)
    more: dict[str, tuple[object, ...]] = {
        "verify": ("workers=1",),
        "mask": ("count=0",),
        "inspect": ("--model", model, "sample=0"),
        "sample": ("--model", model, "n=1", "max_new_tokens=1"),
    }
    command(
        verb, "--prompts" if verb == "sample" else flag, file, "--output", folder / "out.jsonl", *more.get(verb, ())
    )
    check_outputs(folder)


# Bytes of a file name that are not UTF-8 are the characters U+DC80 to U+DCFF in Python.
NAMES = st.text(
    st.characters(exclude_characters="/\x00", codec="utf-8") | st.sampled_from("\udcff\udc80\x1b\n"), max_size=12
)


@cases(20)
@given(name=NAMES, out=NAMES)
def test_names_when_strange_then_files_are_read_and_written_or_refused(place: Path, name: str, out: str) -> None:
    folder = fresh(place)
    (folder / f"in{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD_RESPONSES))
    for verb in ("verify", "pair"):
        code, _ = command(
            verb, "--responses", folder / f"in{name}.jsonl", "--output", folder / f"out{out}.{verb}.jsonl"
        )
        assert code in (0, 7)
        if code == 0:
            assert rows_of(folder / f"out{out}.{verb}.jsonl")


@pytest.fixture(scope="module")
def run_folder(place: Path, model: Path) -> Path:
    """What `train` and `verify` leave, laid out as in a run."""
    folder = place / "run"
    write_jsonl(place / "in-pairs.jsonl", GOOD_PAIRS)
    given_files = ("--pairs", place / "in-pairs.jsonl", "--model", model, "--output", folder / "train" / "dpo")
    assert command("train", *given_files, "objective=dpo", "max_steps=1", "lora.r=2", "save_strategy=no")[0] == 0
    (folder / "recipe.yaml").write_text("train: {objective: [dpo]}\n")
    return folder


@cases(40)
@given(data=st.data())
def test_run_folder_when_damaged_then_report_and_watch_end_with_a_documented_code(
    place: Path, run_folder: Path, data: st.DataObject
) -> None:
    folder = fresh(place) / "run"
    shutil.copytree(run_folder, folder)
    texts = [
        folder / "recipe.yaml",
        *(folder / "train" / "dpo" / name for name in (LOG_FILE, "manifest.json", "trainer_state.json")),
    ]
    file = data.draw(st.sampled_from(texts))
    content = file.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    inserted = data.draw(
        st.binary(max_size=6) | st.sampled_from([b"[]", b"null", b'{"event": "log"}\n', b"1e999", b"\xff"])
    )
    file.write_bytes(content[:cut] + inserted + (content[cut:] if data.draw(st.booleans()) else b""))
    command("report", folder)
    command("watch", folder, "--once")


@cases(40)
@given(
    st.lists(
        TEXTS | st.sampled_from(["world", "pair", "--output", "seed=1", "seed=nan", "=", "a.b=[", "--help"]), max_size=4
    )
)
def test_arguments_when_strange_then_a_documented_code(place: Path, arguments: list[str]) -> None:
    usable = [text.replace("\x00", "") for text in arguments]
    with contextlib.chdir(fresh(place)):
        COUNTS["arguments"] += 1
        code = 0
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                main(usable)
            except SystemExit as ended:
                code = int(ended.code or 0)
        assert code in DOCUMENTED, said.getvalue()


# ---- readers, on rows in memory and on bytes ------------------------------------------------------------------------


@cases(150)
@given(rows=st.lists(BAD_PAIRS | VALUES, max_size=4))
def test_pairs_in_memory_when_bad_then_each_is_kept_or_refused_and_what_is_kept_can_be_written(
    place: Path, rows: list[Any]
) -> None:
    COUNTS["parse_pairs"] += 1
    for need_rejected in (True, False):
        kept, refused = parse_pairs([*rows, *GOOD_PAIRS], need_rejected=need_rejected)
        assert len(kept) + len(refused) == len(rows) + 3
        assert [pair.pair_id for pair in kept[-3:]] == [row["pair_id"] for row in GOOD_PAIRS]
        folder = fresh(place)
        write_jsonl(folder / "refused.jsonl", [vars(refusal) for refusal in refused])
        write_records(folder / "pairs.jsonl", kept)
        assert read_pairs(folder / "pairs.jsonl", need_rejected=need_rejected) == (kept, [])
        check_outputs(folder)


READERS: dict[str, Callable[[Path], Any]] = {
    "read_rows": lambda file: list(read_rows(file)),
    "read_responses": read_responses,
    "read_pairs": read_pairs,
    "read_prompts": lambda file: read_prompts(PromptSource(dataset=str(file))),
}


@cases(150)
@given(data=st.data(), name=st.sampled_from(sorted(READERS)))
def test_reader_when_bytes_are_damaged_then_rows_or_refusals_or_one_error(
    place: Path, data: st.DataObject, name: str
) -> None:
    COUNTS[name] += 1
    folder = fresh(place)
    suffix, content = data.draw(files(GOOD_PAIRS))
    file = folder / f"in{suffix}"
    file.write_bytes(content)
    try:
        READERS[name](file)
    except (DataError, RegretlessError):
        return


@cases(150)
@given(lines=st.lists(BAD_LINES | BAD_RESPONSES.map(line_of), max_size=4))
def test_responses_when_lines_are_bad_then_every_line_is_counted(place: Path, lines: list[bytes]) -> None:
    COUNTS["read_responses"] += 1
    file = write(fresh(place), [*lines, *GOOD_RESPONSES])
    kept, refused = read_responses(file)
    filled = [line for line in lines if line.strip()]
    assert len(kept) + len(refused) == len(filled) + len(GOOD_RESPONSES)
    assert len([row for row in kept if row.response_id.startswith("good-")]) == 4
    assert all(isinstance(refusal, Refusal) and one_line(str(refusal)) == str(refusal) for refusal in refused)


def rated(text: str) -> None:
    reply = f"Output for text 1\nRationale: good\noutput for text 1{text}x\nRating: 4"
    assert parse_ratings(reply, ["a text"], None, not_applicable=False)[0].value == 4


def check_layout(text: str) -> None:
    _check_layout(f"output for text 1\noutput for text 2\n{text}", "here")


TIMED: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "list items": (style, "\n"),
    "rationale with a heading with a long end": (rated, " "),
    "layout of a judge's prompt": (check_layout, "\n"),
    "verdict behind a code": (lambda text: bracketed(text, "AB12"), "AB12 "),
    "ChatML without an end": (lambda text: parse_template("prompt.txt", text), "<|im_start|>user\n"),
}
"""What reads a text from outside, and a piece that the text repeats."""


@pytest.mark.parametrize("name", TIMED)
def test_text_when_it_repeats_what_a_pattern_begins_with_then_work_grows_with_its_length_and_not_faster(
    name: str,
) -> None:
    read, piece = TIMED[name]

    def work(length: int) -> float:
        """Seconds of the processor, the least of three."""
        times = []
        for _ in range(3):
            text, start = (piece * length)[:length], time.process_time()
            with contextlib.suppress(RegretlessError):
                read(text)
            times.append(time.process_time() - start)
        return min(times)

    # A pattern that backtracks takes 16 times as long for 4 times the text.
    assert work(48_000) < 8 * work(12_000) + 0.02
