"""Whose folder it is: only what this package has written is ever deleted."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regretless.core.errors import ConfigError
from regretless.core.files import write_text
from regretless.workflow.run_folder import RunFolder, Unit
from regretless.workflow.stage_folder import MANIFEST, PENDING, StageFolder, check_ours, read_mark
from single_unit import do_unit

KEY = "0123456789abcdef" * 2
EARLIER = {
    **{"stage": "unit", "key": KEY, "settings": {}, "summary": {}, "seconds": 1.0},
    **{"finished": "2026-11-20T10:00:00+0000", "versions": {}},
}
"""A manifest of versions that did not list their files."""


def result(output: Path) -> dict[str, Any]:
    """The work of a unit."""
    write_text(output / "rows.jsonl", "1\n")
    write_text(output / "parts" / "0.json", "[]")
    return {}


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fifo(path: Path) -> None:
    """A pipe in the place of a file."""
    os.mkfifo(path)


THEIRS: dict[str, tuple[str, str | Callable[[Path], None]]] = {
    "browser extension": (MANIFEST, '{"manifest_version": 3, "name": "x", "version": "1.0", "key": "MIIBIjAN"}'),
    "web app": (MANIFEST, '{"name": "x", "icons": [], "start_url": "/"}'),
    "empty object": (MANIFEST, "{}"),
    "list": (MANIFEST, '["a"]'),
    "null": (MANIFEST, "null"),
    "empty file": (MANIFEST, ""),
    "cut": (MANIFEST, json.dumps(EARLIER)[:50]),
    "key alone": (MANIFEST, json.dumps({"key": KEY})),
    "not UTF-8": (MANIFEST, "\x00"),
    "nested": (MANIFEST, "[" * 100_000),
    "pipe": (MANIFEST, fifo),
    "folder": (MANIFEST, Path.mkdir),
    "list that leads out": (MANIFEST, json.dumps({**EARLIER, "files": ["../../precious"]})),
    "other program's queue": (PENDING, '{"key": "order-17", "files": []}'),
    "more than a mark": (PENDING, json.dumps({"key": KEY, "user": "x"})),
    "empty mark": (PENDING, ""),
    "list for a mark": (PENDING, "[]"),
    "npm project": ("package.json", '{"name": "x"}'),
}


@pytest.mark.parametrize("case", THEIRS)
def test_folder_when_its_marks_are_not_of_this_package_by_content_then_it_is_left_alone_with_advice(
    case: str, tmp_path: Path
) -> None:
    name, content = THEIRS[case]
    unit = tmp_path / "unit"
    write_text(unit / "src" / "a", "years of work")
    content(unit / name) if callable(content) else (unit / name).write_text(content)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"unit: (its|exists) .*choose another output folder, or move it away"):
        do_unit(RunFolder(tmp_path), "unit", {}, result)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("content", [EARLIER, {**EARLIER, "files": ["rows.jsonl"]}])
def test_folder_when_its_manifest_is_of_any_version_of_this_package_then_it_is_ours(
    content: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    assert read_mark(tmp_path / MANIFEST) == content
    check_ours(tmp_path)


def test_folder_when_a_kill_left_the_start_of_its_first_file_then_it_is_taken_as_empty(tmp_path: Path) -> None:
    (tmp_path / f".{PENDING}.79991202657d.regretless").touch()
    check_ours(tmp_path)
    (tmp_path / ".thesis.tmp").touch()
    with pytest.raises(ConfigError, match="not made by regretless"):
        check_ours(tmp_path)


@pytest.mark.parametrize("state", ["finished", "failed", "given up", "resumed", "of an earlier version", "lost list"])
def test_strangers_files_in_a_units_folder_when_it_is_emptied_then_they_are_moved_to_unused_and_named(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, unit = RunFolder(tmp_path), tmp_path / "unit"

    def fails(output: Path) -> dict[str, Any]:
        result(output)
        raise InterruptedError

    if state in ("failed", "resumed"):
        with pytest.raises(InterruptedError):
            do_unit(run, "unit", {"seed": 1}, fails)
    else:
        do_unit(run, "unit", {"seed": 1}, result)
    if state == "of an earlier version":
        (unit / MANIFEST).write_text(json.dumps(EARLIER))
    if state == "lost list":
        (unit / MANIFEST).unlink()
        (unit / PENDING).write_text(json.dumps({"key": KEY}))
    if state == "given up":
        StageFolder(unit, "none").give_up()
    theirs = {"notes.txt": b"1", "parts/notes.txt": b"2", "theirs/deep/notes.txt": b"3"}
    for name, text in theirs.items():
        write_text(unit / name, text.decode())
    (unit / "link").symlink_to(tmp_path / "elsewhere")
    capsys.readouterr()
    do_unit(run, "unit", {"seed": 1 if state == "resumed" else 2}, result)
    aside = tree(tmp_path / "unused" / "unit")
    assert theirs.items() <= aside.items() and (tmp_path / "unused" / "unit" / "link").is_symlink()
    known = state not in ("of an earlier version", "lost list")
    assert (aside == theirs) == known, "what is not known to be ours is kept, too"
    assert tree(unit).keys() == {"rows.jsonl", "parts/0.json", MANIFEST}
    assert f" to {tmp_path / 'unused/unit/notes.txt'}: not known to be written" in capsys.readouterr().err
    do_unit(run, "unit", {"seed": 3}, result)
    assert tree(tmp_path / "unused" / "unit") == aside, "and what was written there is deleted"


@pytest.mark.parametrize("ends", [True, False])
def test_strangers_files_that_came_while_a_unit_worked_when_it_is_emptied_then_they_are_moved_to_unused(
    ends: bool, tmp_path: Path
) -> None:
    run, theirs = RunFolder(tmp_path), {"notes.txt": b"1", "mine/inspect.json": b"2"}

    def work(output: Path) -> dict[str, Any]:
        write_text(output / "inspect.json", "{}")
        for name, text in theirs.items():
            write_text(output / name, text.decode())
        if not ends:
            raise InterruptedError
        return {}

    first, second = (Unit("inspect", {"sample": sample}, writes=("inspect.json",)) for sample in (1, 2))
    with contextlib.nullcontext() if ends else pytest.raises(InterruptedError):
        run.do_together([first], lambda todo: [work(path) for path in todo.values()])
    run.do_together([second], lambda todo: [{}])
    assert tree(tmp_path / "unused" / "inspect") == theirs


def test_unit_in_the_folder_of_another_when_that_is_done_again_then_it_is_no_strangers(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in ("greedy", "greedy/seed-1"):
        do_unit(run, name, {"workers": 1}, result)
    write_text(tmp_path / "greedy" / "seed-1" / "notes.txt", "1")
    do_unit(run, "greedy", {"workers": 2}, result)
    assert tree(tmp_path / "unused").keys() == {"greedy/seed-1/notes.txt"}
    assert do_unit(run, "greedy/seed-1", {"workers": 1}, result).ran


def test_strangers_files_when_others_of_their_names_were_moved_before_then_both_are_kept(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        do_unit(RunFolder(tmp_path), "unit", {"seed": seed}, result)
        write_text(tmp_path / "unit" / "notes.txt", str(seed))
    assert tree(tmp_path / "unused" / "unit") == {"notes.txt": b"1", "notes.txt.1": b"2"}


def test_leftovers_when_a_run_starts_then_only_its_forms_are_deleted_and_none_of_another_run_below(
    tmp_path: Path,
) -> None:
    mine = ".rows.jsonl.0123456789ab.regretless"
    theirs = [".notes.123.tmp", ".notes.1.old", ".project.old", ".a.regretless", "b/.lock", f"b/{mine}"]
    for name in (*theirs, mine, f"unit/{mine}"):
        write_text(tmp_path / name, "" if name.endswith("lock") else "x")
    with RunFolder(tmp_path).locked():
        pass
    assert set(theirs) <= tree(tmp_path).keys() <= {*theirs, ".lock"}


@pytest.mark.parametrize("lost", ["rows.jsonl", "parts/0.json", "training.log"])
def test_finished_unit_when_its_result_is_gone_then_it_is_done_again_and_not_for_other_files(
    lost: str, tmp_path: Path
) -> None:
    def work(output: Path) -> dict[str, Any]:
        write_text(output / "training.log", "")
        return result(output)

    do_unit(RunFolder(tmp_path), "unit", {}, work)
    (tmp_path / "unit" / lost).unlink()
    assert do_unit(RunFolder(tmp_path), "unit", {}, work).ran == (lost == "rows.jsonl")
    assert not do_unit(RunFolder(tmp_path), "unit", {}, work).ran
    assert (tmp_path / "unit" / "rows.jsonl").is_file()


def test_folder_when_it_has_the_result_of_another_stage_then_it_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    do_unit(run, "out", {}, result, label="train")
    with pytest.raises(ConfigError, match="out: holds the result of train; choose another output folder"):
        do_unit(run, "out", {}, result, label="inspect")
    assert not do_unit(RunFolder(tmp_path), "out", {}, result, label="train").ran


def test_folder_when_it_is_a_link_then_it_is_not_emptied(tmp_path: Path) -> None:
    write_text(tmp_path / "precious" / "thesis.txt", "years of work")
    (tmp_path / "unit").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="found a symbolic link"):
        do_unit(RunFolder(tmp_path), "unit", {}, result)
    assert tree(tmp_path / "precious") == {"thesis.txt": b"years of work"}
