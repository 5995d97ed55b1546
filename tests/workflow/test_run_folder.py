"""Names that become folders, locks, and folders that somebody else wrote to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from unit_of_work import kill_before_each_write, write_rows

from regretless.cli.app import main
from regretless.core.errors import ConfigError, DataError, storage_error
from regretless.core.files import write_text
from regretless.core.settings import dump
from regretless.modeling.load import ModelConfig
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import Recipe, parse_recipe
from regretless.workflow.run_folder import RunFolder, Unit, content, lock_beside
from run_contents import contents, differences
from single_unit import do_unit

OUTSIDE = (
    *("../../../escape", "..", ".", "a/b", "/tmp/escape", ".hidden", "-f", "", "a\\b", "a\nb", "a\x00b", "x" * 101),
    *("a b", "a\u202eb", "a\u2028b", "a\x9bb", "a\ud800", "\U0001f600" * 26),
)
WORLD = {"prompts": 3, "test": 2, "policies": {"a": {"demonstrations": 2}}}


def recipe_with(place: str, name: str) -> dict[str, Any]:
    """A recipe with a name of the user's in one of the places that take one."""
    model = {"name_or_path": "m"}
    problems = {"dataset": "p.jsonl"}
    sections: dict[str, dict[str, Any]] = {
        "name": {"name": name},
        "pretrain": {"pretrain": {name: {"model": model, "data": "d.jsonl"}}},
        "prompts": {"prompts": {name: problems}},
        "world.policies": {"world": {**WORLD, "policies": {name: {}}}},
        "evaluate.benchmarks": {"model": model, "evaluate": {"benchmarks": {name: problems}}},
        "evaluate.chat": {
            "model": model,
            "evaluate": {"chat": {name: {"benchmark": "mt_bench", "questions": "q.jsonl", "judge": "j"}}},
        },
    }
    return {"name": "x", **sections[place]}


PLACES = ("name", "pretrain", "prompts", "world.policies", "evaluate.benchmarks", "evaluate.chat")


@pytest.mark.parametrize("place", PLACES)
def test_name_that_becomes_a_folder_when_it_could_lead_elsewhere_then_the_recipe_is_refused(place: str) -> None:
    for good in (
        "gsm8k",
        "MATH-500",
        "v0.1",
        "größer_2",
        "a+b",
        "run\U0001f600",
        "e\u0301t\u0939\u093f\u0928\u094d\u0926\u0940",
    ):
        assert isinstance(parse_recipe(recipe_with(place, good), "x"), Recipe)
    for bad in OUTSIDE:
        with pytest.raises(ConfigError, match="expected a name of letters, digits") as caught:
            parse_recipe(recipe_with(place, bad), "x")
        assert place in str(caught.value)


def test_label_of_a_benchmark_when_it_leads_out_of_the_output_folder_then_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "evaluate",
        "--model",
        "m",
        "--benchmark",
        "../../escape=t.jsonl",
        "--output",
        str(tmp_path / "a" / "b"),
    ]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "benchmarks" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_lock_when_a_symbolic_link_lies_in_its_place_then_it_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (tmp_path / "out.cache").mkdir()
    (tmp_path / "out.cache" / ".lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="symbolic link"), lock_beside(tmp_path / "out"):
        raise AssertionError("locked through a link")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="symbolic link"), RunFolder(tmp_path / "run").locked():
        raise AssertionError("locked through a link")
    assert precious.read_text() == "years of work"


def test_lock_beside_a_folder_when_held_then_others_are_refused_and_it_is_gone_afterwards(tmp_path: Path) -> None:
    output, cache = tmp_path / "out", tmp_path / "out.cache"
    with held(f"lock_beside(Path({str(output)!r}))") as other:
        with pytest.raises(ConfigError, match=f"out: another run uses it .process {other.pid} "), lock_beside(output):
            raise AssertionError("locked twice")
        (cache / ".lock").unlink()
        with pytest.raises(ConfigError, match="out: another run uses it, whose lock file was removed"):
            lock_beside(output).__enter__()
    (cache / ".lock").unlink()
    with lock_beside(output):
        assert [path.name for path in tmp_path.rglob("*")] == ["out.cache", ".lock"]
    assert list(tmp_path.iterdir()) == []
    write_text(cache / "replies", "paid for")
    with lock_beside(output):
        pass
    assert [path.name for path in cache.iterdir()] == ["replies"]


@pytest.mark.parametrize("is_new", [False, True], ids=["an earlier run was there", "a new folder"])
@pytest.mark.parametrize(
    "inner", ["lock_beside(Path({!r}) / 'inspect')", "RunFolder(Path({!r}) / 'evaluate').locked()"], ids=["unit", "run"]
)
def test_run_folder_when_a_command_works_in_a_folder_of_it_then_one_of_the_two_is_refused(
    inner: str, is_new: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    outer, inner = f"RunFolder(Path({str(run)!r})).locked()", inner.format(str(run))
    if not is_new:
        with RunFolder(run).locked():
            assert f"{run}: another run uses it (process {os.getpid()} on " in refusal(inner)
    with held(inner):
        assert f"{run}" in (said := refusal(outer)) and "another run uses it (" in said
        if not is_new:
            assert "(a command whose output is in it)" in said
            # Other commands, elsewhere in it, are in nobody's way.
            assert refusal(f"lock_beside(Path({str(run / 'analyze')!r}))") == ""
    with RunFolder(run).locked():
        pass


@pytest.mark.parametrize("lost", ["file", "folder before", "folder behind"])
def test_lock_when_it_was_removed_while_it_was_opened_then_it_is_taken_anew(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.cache" / ".lock"
    opened: list[int] = []

    def open_and_lose(*arguments: Any) -> int:
        """What its owner does at that moment, at the end of its own work."""
        opened.append(0)
        if len(opened) == 1 and lost == "folder before":
            file.parent.rmdir()
        descriptor = os_open(*arguments)
        if len(opened) == 1 and lost != "folder before":
            file.unlink()
            if lost == "folder behind":
                file.parent.rmdir()
        return descriptor

    os_open = os.open
    monkeypatch.setattr(os, "open", open_and_lose)
    with lock_beside(tmp_path / "out"):
        # Each time the file, and its folder where that is still there.
        assert len(opened) == {"file": 4, "folder before": 3, "folder behind": 4}[lost]
        assert f"(process {os.getpid()} on " in refusal(f"lock_beside(Path({str(tmp_path / 'out')!r}))")


LOCKING = "import sys; from pathlib import Path; from regretless.workflow.run_folder import RunFolder, lock_beside\n"


@contextlib.contextmanager
def held(what: str) -> Iterator[subprocess.Popen[str]]:
    """For the block, another process that holds a lock."""
    command = [sys.executable, "-c", f"{LOCKING}with {what}: print('in', flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "in\n"
        yield other
        other.stdin.close()
        assert other.wait() == 0


def refusal(what: str, before: str = "") -> str:
    """The error of another process that takes a lock, or nothing; it executes `before` first."""
    command = [sys.executable, "-c", f"{LOCKING}{before}with {what}: pass"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stderr


@pytest.mark.parametrize("event", ["unit finished", "locked twice"])
def test_lock_of_a_run_folder_when_its_process_goes_on_in_it_then_others_are_refused_still(
    event: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    with run.locked():
        if event == "unit finished":
            do_unit(run, "unit", {}, lambda output: {})
        else:
            with RunFolder(tmp_path).locked():
                pass
        second = refusal(f"RunFolder(Path({str(tmp_path)!r})).locked()")
        assert f"another run uses it (process {os.getpid()} on " in second


def test_report_verb_when_used_before_the_runs_own_report_then_the_run_goes_on_and_makes_it(tmp_path: Path) -> None:
    values = {"name": "x", "output_dir": str(tmp_path / "run"), "world": WORLD}
    run_recipe(parse_recipe(values, "x"))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "run"), "title=So far"])
    assert ended.value.code == 0
    page = tmp_path / "run" / "report" / "report.html"
    assert "So far" in page.read_text(encoding="utf-8")
    whole = parse_recipe({**values, "report": {"title": "At the end"}}, "x")
    assert run_recipe(whole).outcomes["report"].ran
    assert "At the end" in page.read_text(encoding="utf-8")
    # A page of other settings in the place of the run's own does not pass for it either.
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run"), "title=Mine"])
    assert run_recipe(whole).outcomes["report"].ran
    assert "At the end" in page.read_text(encoding="utf-8")
    assert not run_recipe(whole).outcomes["report"].ran


def test_report_verb_when_a_run_works_in_the_folder_then_it_is_refused_and_a_page_elsewhere_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_recipe(parse_recipe({"name": "x", "output_dir": str(tmp_path / "run"), "world": WORLD}, "x"))
    script = Path(__file__).with_name("hold_run.py")
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "run")], stdin=-1, stdout=-1) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        for output, code in ((tmp_path / "run" / "report", 2), (tmp_path / "page", 0)):
            with pytest.raises(SystemExit) as ended:
                main(["report", str(tmp_path / "run"), "--output", str(output)])
            assert ended.value.code == code
            assert (output / "report.html").exists() == (code == 0)
        assert "another run uses it" in capsys.readouterr().err
        other.stdin.close()


def test_stage_when_a_library_does_not_say_which_file_cannot_be_written_then_the_error_names_the_run_folder(
    tmp_path: Path,
) -> None:
    def full(folder: Path) -> dict[str, Any]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path / "run")
    with folder.locked(), pytest.raises(OSError, match="No space left") as error:
        do_unit(folder, "stage", {}, full)
    assert str(storage_error(error.value)) == (
        f"{tmp_path / 'run'}: No space left on device; free space there; then the same command resumes"
    )


def test_report_verb_when_the_folder_is_no_run_then_it_names_those_inside_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> str:
        before = list(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main(["report", str(folder)])
        assert ended.value.code == 2 and list(tmp_path.rglob("*")) == before
        return " ".join(capsys.readouterr().err.split())

    assert refused(tmp_path).endswith(
        f"{tmp_path}: expected a run folder or a training's, found no recipe.yaml and no finished stage in it"
    )
    for name in ("b", "a"):
        run_recipe(parse_recipe({"name": "x", "output_dir": str(tmp_path / name), "world": WORLD}, "x"))
    capsys.readouterr()
    assert f"there are 2 in it: {tmp_path / 'a'}, {tmp_path / 'b'}" in refused(tmp_path)
    assert refused(tmp_path / "beta=0.3").endswith("beta=0.3: no such run folder")
    (tmp_path / "a" / "recipe.yaml").unlink()
    (tmp_path / "b").rename(tmp_path / "beta=0.3")
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "beta=0.3"):
        with pytest.raises(SystemExit) as ended:
            main(["report", folder])
        assert ended.value.code == 0, (
            "a folder of stages without a recipe has a page, and so has one named like a setting"
        )


def test_report_verb_when_the_folder_report_is_somebody_elses_then_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "report").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("name: x")
    (tmp_path / "run" / "report" / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "run")])
    assert ended.value.code == 2 and "not made by regretless" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run" / "report").iterdir()] == ["thesis.txt"]


def killed(folder: Path, replacing: bool = False) -> list[Path]:
    """Run folders in which the work was killed before each write in turn; in the last one it ended."""
    # Not the server of forks: a process has one, which other tests start with more than this one needs.
    process = multiprocessing.get_context("spawn").Process(target=kill_before_each_write, args=(folder, replacing))
    process.start()
    process.join()
    assert process.exitcode == 0
    return sorted(folder.iterdir(), key=lambda path: int(path.name))


def test_unit_when_killed_before_any_write_then_the_next_run_leaves_what_an_undisturbed_one_does(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    assert expected.keys() == {"unit/manifest.json", "unit/rows.jsonl"}
    folders = killed(tmp_path / "killed")
    for folder in folders:
        write_rows(folder)
        assert not differences(expected, contents(folder)), f"killed before write {folder.name}"
    assert int(folders[-1].name) >= 8


@pytest.mark.parametrize("seed", [1, 2])
def test_finished_unit_when_its_replacement_is_killed_before_any_write_then_it_is_kept_or_replaced_as_a_whole(
    tmp_path: Path, seed: int
) -> None:
    """Seed 1 is finished, the work of seed 2 is killed, and `seed` is asked for next."""
    write_rows(tmp_path / "whole", seed=seed)
    expected = contents(tmp_path / "whole")
    folders = killed(tmp_path / "killed", replacing=True)
    for folder in folders:
        write_rows(folder, seed=seed)
        # What a killed process has written is known to nobody, and so not deleted.
        shutil.rmtree(folder / "unused", ignore_errors=True)
        assert not differences(expected, contents(folder)), f"killed before write {folder.name}"
    assert int(folders[-1].name) >= 12


def test_finished_unit_when_other_work_fails_in_its_place_then_it_comes_back_and_disk_space_does_too(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path)

    def ran(seed: int, work: Callable[[Path], dict[str, Any]]) -> bool:
        return do_unit(RunFolder(tmp_path), "unit", {"seed": seed}, work).ran

    rows, kept = tmp_path / "unit" / "rows.jsonl", tmp_path / "unit.cache" / "replaced"

    def work(output: Path) -> dict[str, Any]:
        write_text(output / "rows.jsonl", "new")
        return {}

    def fails(output: Path) -> dict[str, Any]:
        raise InterruptedError

    with run.locked():
        assert ran(1, work)
        for seed in (2, 3):  # the second one begins where nothing is finished
            with pytest.raises(InterruptedError):
                ran(seed, fails)
            assert (kept / "rows.jsonl").read_text() == "new" and not rows.exists()
            assert run.manifests() == []
        assert not ran(1, fails)
        assert rows.read_text() == "new" and not kept.parent.exists()
        with pytest.raises(InterruptedError):
            ran(2, fails)
        assert ran(2, work)
        assert not kept.parent.exists()
        assert ran(1, work), "a result that was replaced is gone"


def test_unit_when_a_file_that_its_settings_name_changes_then_its_key_does_also_of_a_copy_of_settings(
    tmp_path: Path,
) -> None:
    adapter = tmp_path / "adapter.safetensors"
    model = ModelConfig(name_or_path="m").model_copy(update={"adapter": str(adapter)})
    keys = set()
    for weights in ("first", "second"):
        write_text(adapter, weights)
        keys.add(RunFolder(tmp_path).stage_folder(Unit("evaluate/a", {"models": [dump(model)]})).key)
    assert len(keys) == 2


def test_unit_when_it_was_interrupted_under_other_settings_or_inputs_then_it_finds_nothing_of_that(
    tmp_path: Path,
) -> None:
    run, source = RunFolder(tmp_path / "run"), tmp_path / "input.txt"
    source.write_text("1")
    found: list[list[str]] = []

    def work(output: Path) -> dict[str, Any]:
        found.append([path.name for path in output.glob("*.parts")])
        write_text(output / "rows.parts" / "000", "unfinished")
        raise InterruptedError

    with run.locked():
        for settings, text in (({"seed": 1}, "1"), ({"seed": 1}, "1"), ({"seed": 2}, "1"), ({"seed": 2}, "2")):
            source.write_text(text)
            with pytest.raises(InterruptedError):
                do_unit(run, "unit", settings, work, {"input": source})
    assert found == [[], ["rows.parts"], [], []]


def test_run_folder_when_a_process_of_a_killed_run_is_still_at_work_then_the_next_run_waits_for_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The lock's file does not exist: somebody may remove it in mid-run.
    script = Path(__file__).with_name("work_of_children.py")
    with subprocess.Popen([sys.executable, str(script), str(tmp_path), "1"]) as left_over:
        while not (tmp_path / "held").exists() and left_over.poll() is None:
            time.sleep(0.01)
        with RunFolder(tmp_path).locked():
            assert (tmp_path / "left").exists()
    assert "processes of an earlier run are about to end" in " ".join(capsys.readouterr().err.split())


def test_folders_when_moved_aside_and_back_then_each_move_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    aside = tmp_path / "unused" / "train" / "dpo"
    for name in ("dpo", "ipo"):
        do_unit(folder, f"train/{name}", {}, lambda output: {})
    (tmp_path / "train" / "theirs").mkdir()
    capsys.readouterr()
    folder.select("train", ["ipo"])
    assert aside.is_dir() and (tmp_path / "train" / "theirs").is_dir()
    assert capsys.readouterr().err == f"moved {tmp_path / 'train' / 'dpo'} to {aside}: not part of this recipe\n"
    folder.select("train", ["ipo", "dpo"])
    assert capsys.readouterr().err == f"moved {aside} to {tmp_path / 'train' / 'dpo'}: asked for again\n"
    shutil.copytree(tmp_path / "train" / "dpo", aside)
    (aside / "notes.txt").write_text("mine")
    folder.select("train", ["ipo"])
    assert f"to {aside}.1: not part of this recipe, and in the place of an earlier one" in capsys.readouterr().err
    assert [path.name for path in aside.iterdir()] == ["notes.txt"], "only what was written by a unit is deleted"


def test_methods_when_set_aside_one_after_the_other_then_all_come_back_as_they_were(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for name in ("dpo", "ipo"):
        do_unit(run, f"train/{name}", {}, lambda output: {})
    run.select("train", ["dpo"])
    run.select("", [], {"train"})  # a recipe that trains nothing
    assert sorted(path.name for path in (tmp_path / "unused" / "train").iterdir()) == ["dpo", "ipo"]
    run.select("", ["train"], {"train"})
    run.select("train", ["dpo", "ipo"])
    for name in ("dpo", "ipo"):
        assert not do_unit(RunFolder(tmp_path), f"train/{name}", {}, lambda output: {}).ran


def test_content_of_a_model_when_a_further_chat_template_changes_then_it_is_another(tmp_path: Path) -> None:
    template = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    found = []
    for text in ("a", "bb"):
        template.write_text(text, encoding="utf-8")
        found.append(content(tmp_path))
    assert found[0] != found[1]


@pytest.mark.parametrize("on_nfs", [False, True])
def test_lock_file_when_removed_in_mid_run_then_no_two_runs_go_on_in_the_folder(
    on_nfs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_folders(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    if on_nfs:
        monkeypatch.setattr(fcntl, "flock", no_folders)
    # The second run is a process of its own, on the same file system.
    refusing = "import fcntl\ndef flock(*_): raise OSError(9, 'no')\nfcntl.flock = flock\n" if on_nfs else ""
    run = RunFolder(tmp_path)

    def work(output: Path) -> dict[str, Any]:
        (tmp_path / ".lock").unlink()
        for _ in range(2):  # what a refused run leaves is no reason to wait, or to let another one in
            second = refusal(f"RunFolder(Path({str(tmp_path)!r})).locked()", refusing)
            assert ("another run uses it, whose lock file was removed" in second) != on_nfs
            assert not (on_nfs and second)
        return {}

    with (
        run.locked(),
        pytest.raises(ConfigError, match="another run has begun") if on_nfs else contextlib.nullcontext(),
    ):
        do_unit(run, "unit", {}, work)
    with RunFolder(tmp_path).locked():
        assert (tmp_path / "unit" / "manifest.json").is_file() != on_nfs


@pytest.mark.parametrize("kind", ["pipe", "folder", "text"])
def test_lock_when_something_else_lies_in_its_place_then_it_is_refused_and_kept(kind: str, tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    {"pipe": lambda: os.mkfifo(file), "folder": file.mkdir, "text": lambda: file.write_text("packages: 7")}[kind]()
    with (
        pytest.raises(ConfigError, match=r"\.lock: expected a lock file, found .*; remove it"),
        RunFolder(tmp_path).locked(),
    ):
        raise AssertionError("locked")
    assert file.exists() and (kind != "text" or file.read_text() == "packages: 7")


def test_unit_when_its_settings_name_what_no_stage_has_made_then_that_is_said_before_it_begins(tmp_path: Path) -> None:
    model = ModelConfig(name_or_path="org/on-the-hub", adapter="{run}/train/ipo")
    unit = Unit("evaluate/ipo", dump(model), {})
    with pytest.raises(DataError, match=r"train/ipo not found; its stage has not run"):
        RunFolder(tmp_path).stage_folder(unit)
    (tmp_path / "train" / "ipo").mkdir(parents=True)
    assert not RunFolder(tmp_path).stage_folder(unit).is_done()
