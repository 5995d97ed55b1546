"""Files and folders that cannot be read or written: one line that says what to do, and what was there stays whole."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flat_pairs import pair_of
from regretless.cli.app import main
from regretless.core.errors import DataError, storage_error
from regretless.core.files import write_jsonl
from regretless.data.rows import read_rows, write_records
from tiny_model import save_tiny_model

PROMPT = "Tom has 7 apples. Tom buys 2. How many?\n"
PAIR = {"prompt": PROMPT, "chosen": "7+2=9\n\\boxed{9}", "rejected": "7-2=5\n\\boxed{5}"}
RESPONSES = [
    {"prompt": PROMPT, "response": "\\boxed{9}", "answer": "9", "verdict": "correct"},
    {"prompt": PROMPT, "response": "\\boxed{5}", "answer": "9", "verdict": "wrong"},
]
VERBS = ("verify", "pair", "mask", "inspect", "train", "sample", "evaluate", "analyze", "world")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a tiny model, pairs and responses."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_model(folder / "model")
    write_jsonl(folder / "pairs.jsonl", [PAIR] * 3)
    write_jsonl(folder / "responses.jsonl", RESPONSES)
    return folder


def arguments(verb: str, inputs: Path, output: Path) -> list[str]:
    """A command that works, but for where it writes; most write a file, some a folder."""
    model = ("--model", inputs / "model")
    pairs, responses = ("--pairs", inputs / "pairs.jsonl"), ("--responses", inputs / "responses.jsonl")
    rest: dict[str, tuple[object, ...]] = {
        "verify": (*responses, "workers=1"),
        "pair": responses,
        "mask": (*pairs, "count=0"),
        "inspect": (*pairs, *model, "sample=0"),
        "train": (*pairs, *model, "objective=dpo", "max_steps=1", "lora.r=2"),
        "sample": ("--prompts", inputs / "responses.jsonl", *model, "n=1", "max_new_tokens=2"),
        "evaluate": ("--benchmark", f"b={inputs / 'responses.jsonl'}", *model, "max_new_tokens=2"),
        "analyze": (*pairs, *model, "--policy", f"a={inputs / 'model'}", "pairs=1", "sample=2"),
        "world": ("policies.weak.demonstrations=400", "prompts=5", "test=5"),
    }
    target = output if verb in ("verify", "pair", "mask", "sample") else output.with_suffix("")
    return [verb, "--output", str(target), *map(str, rest[verb])]


def said(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code of a command, and the lines of its error."""
    capsys.readouterr()
    code = 0
    try:
        main(command)
    except SystemExit as ended:
        code = int(ended.code or 0)
    lines = capsys.readouterr().err.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("error: ")), len(lines))
    return code, lines[start:]


def damaged(kind: str, folder: Path) -> Path:
    """A file of pairs that cannot be read as a whole."""
    pairs = [pair_of(**PAIR, pair_id=str(number)) for number in range(50)]  # type: ignore[arg-type]
    write_records(folder / "good.parquet", pairs)
    whole = (folder / "good.parquet").read_bytes()
    contents: dict[str, tuple[str, bytes]] = {
        "empty": ("parquet", b""),
        "junk": ("parquet", b"PAR1" + bytes(range(256)) + b"PAR1"),
        "cut": ("parquet", whole[: len(whole) // 2]),
        "corrupt": ("parquet", whole[:60] + bytes(byte ^ 0xFF for byte in whole[60:80]) + whole[80:]),
        "not UTF-8": ("json", b'[{"prompt": "\xff"}]'),
        "not JSON": ("json", b'[{"prompt": '),
        "deep": ("json", b"[" * 100_000),
        "long integer": ("json", b"[" + b"1" * 5000 + b"]"),
    }
    suffix, content = contents[kind]
    file = folder / f"{kind}.{suffix}"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    "kind", ["empty", "junk", "cut", "corrupt", "not UTF-8", "not JSON", "deep", "long integer", "folder", "dangling"]
)
@pytest.mark.parametrize("verb", ["mask", "inspect", "train"])
def test_input_when_it_cannot_be_read_then_the_error_names_it(
    verb: str, kind: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "folder":
        (tmp_path / "pairs.jsonl").mkdir()
        file = tmp_path / "pairs.jsonl"
    elif kind == "dangling":
        (tmp_path / "pairs.jsonl").symlink_to(tmp_path / "nowhere")
        file = tmp_path / "pairs.jsonl"
    else:
        file = damaged(kind, tmp_path)
    command = [text.replace(str(inputs / "pairs.jsonl"), str(file)) for text in arguments(verb, inputs, tmp_path / "o")]
    code, error = said(command, capsys)
    # A path that leads nowhere is a mistake in the command, found before anything is read.
    assert code == (2 if kind == "dangling" else 3)
    assert str(file) in " ".join(error) and len(error) <= 2, error


def test_row_group_when_corrupt_then_its_rows_are_refused_and_the_others_are_read(tmp_path: Path) -> None:
    table = pa.table({"prompt": [f"{'x' * 200} {number}" for number in range(30)]})
    options = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10, **options)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    column = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0)
    content[column.data_page_offset + column.total_compressed_size - 10] ^= 1
    (tmp_path / "a.parquet").write_bytes(content)
    rows = list(read_rows(tmp_path / "a.parquet"))
    assert [number for number, row in rows if isinstance(row, dict)] == [*range(1, 11), *range(21, 31)]
    (refusal,) = [row for _, row in rows if not isinstance(row, dict)]
    assert str(refusal).startswith(f"{tmp_path / 'a.parquet'}:11: rows 11 to 20 cannot be read")


def test_texts_of_a_table_when_not_utf8_then_that_row_is_refused(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff\xfe", b"too"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "a.parquet")
    (_, first), (_, second), (_, third) = read_rows(tmp_path / "a.parquet")
    assert (first, third) == ({"prompt": "fine"}, {"prompt": "too"})
    assert "prompt: not valid UTF-8" in str(second)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "a file where a folder goes": lambda folder: _file(folder / "taken") / "out.parquet",
    "a link that leads nowhere": lambda folder: _link(folder / "link", Path("/proc/nowhere")) / "out.parquet",
    "a place that takes no files": lambda folder: Path("/proc/out.parquet"),
    "a name that is too long": lambda folder: folder / f"{'x' * 300}.parquet",
}


def _file(path: Path) -> Path:
    path.write_text("mine")
    return path


def _link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


@pytest.mark.parametrize("fault", FOLDERS)
@pytest.mark.parametrize("verb", VERBS)
def test_output_when_it_cannot_be_made_then_one_line_says_what_to_do(
    verb: str, fault: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = said(arguments(verb, inputs, FOLDERS[fault](tmp_path)), capsys)
    assert (code, len(error)) == (7, 1), error
    assert "; " in error[0]
    if fault.startswith("a file"):
        assert (tmp_path / "taken").read_text() == "mine"


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The operating system refuses to write more than `size` bytes to a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("verb", VERBS)
def test_disk_when_full_then_one_line_says_so_what_was_there_is_whole_and_the_same_command_goes_on(
    verb: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(verb, inputs, tmp_path / "out.parquet")
    if verb in ("verify", "pair", "mask", "sample"):
        (tmp_path / "out.parquet").write_text("of an earlier run")
    failed = 0
    for size in (0, 300, 3000, 30_000):
        with no_file_above(size):
            code, error = said(command, capsys)
        if code == 0:
            break
        failed += 1
        assert (code, len(error)) == (7, 1), error
        assert "File too large" in error[0] or "No space left" in error[0]
        if (tmp_path / "out.parquet").is_file():
            assert (tmp_path / "out.parquet").read_text() == "of an earlier run"
        assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    assert failed
    assert said(command, capsys)[0] == 0


@pytest.mark.parametrize(
    ("options", "verbs"),
    # 260 kB take a training's first files, and no whole checkpoint.
    [("size=16k", ("sample", "train")), ("size=260k", ("train",)), ("size=1m,ro", ("sample", "train"))],
)
def test_file_system_when_full_or_read_only_then_one_line_says_so(
    options: str, verbs: tuple[str, ...], inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        for verb in verbs:
            more = ["save_steps=1", "lora.r=64"] if options == "size=260k" else []
            code, error = said([*arguments(verb, inputs, tmp_path / verb / "out.parquet"), *more], capsys)
            assert (code, len(error)) == (7, 1), error
            assert "No space left on device" in error[0] or "Read-only file system" in error[0]
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)  # a training's tables may be mapped still


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device", "a"), "a: No space left on device; free space"),
        (Exception("I/O error: No space left on device (os error 28)"), "a file cannot be written: No space left"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), "a file cannot be"),
        (ConnectionRefusedError(111, "Connection refused"), None),
        (
            UnicodeEncodeError("utf-8", "na\udcffme", 2, 3, "surrogates not allowed"),
            "na\udcffme: not valid UTF-8; rename",
        ),
        (
            UnicodeEncodeError("utf-8", "a\ud800b", 1, 2, "surrogates not allowed"),
            "a\ud800b: half of a character, which",
        ),
        (RuntimeError("shape mismatch"), None),
        (KeyError("x"), None),
    ],
)
def test_exception_when_of_the_file_system_then_it_is_told_from_a_bug(error: Exception, expected: str | None) -> None:
    found: Any = storage_error(error)
    assert (found is None) if expected is None else str(found).startswith(expected)


def test_names_that_are_not_utf8_when_given_then_files_are_read_and_shown_as_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(bytes(tmp_path) + b"/na\xff\x1b[31mme.jsonl")
    Path(name).write_text("{}\n" + "".join(json.dumps(row) + "\n" for row in RESPONSES))
    assert said(["pair", "--responses", name, "--output", str(tmp_path / "out.jsonl")], capsys)[0] == 0
    assert len(list(read_rows(tmp_path / "out.jsonl"))) == 1
    with pytest.raises(DataError, match="no such file"):
        list(read_rows(Path(name + "l")))
    (refused,) = read_rows(tmp_path / "out.refused.jsonl")
    assert isinstance(refused[1], dict) and refused[1]["source"].endswith("\ufffd\x1b[31mme.jsonl")
