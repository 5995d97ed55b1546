"""Parts of a stage at the same time: the same bytes, the same errors, and no process that outlives its run."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from forked import started
from regretless.core.errors import ConfigError, DataError, RegretlessError
from regretless.core.progress import Advance, Tally
from regretless.runs import side_by_side
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import Recipe, parse_recipe
from regretless.runs.side_by_side import LocalWorkers, SideBySide, cores, parallel_problems, places
from regretless.training.log import LOG_FILE, read
from regretless.workflow.workers import Need
from run_contents import contents, differences
from small_runs import small

MANY_BATCHES = "sample.batch_size=4"


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where a run was made part by part, and its contents; the folder is free again, because files name it."""
    folder = tmp_path_factory.mktemp("serial") / "run"
    run_recipe(small(folder, MANY_BATCHES))
    found = contents(folder)
    folder.rename(folder.with_name("undisturbed"))
    return folder, found


@pytest.mark.slow
def test_run_when_parts_run_side_by_side_then_files_and_outcomes_are_those_of_one_after_the_other(
    serial: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = serial
    recipe = small(folder, "parallel=2", MANY_BATCHES)
    run = run_recipe(recipe)
    assert differences(expected, contents(folder)) == []
    assert {name for name, outcome in run.outcomes.items() if not outcome.ran} == set()
    logs = {name: read(folder / name / LOG_FILE) for name in ("pretrain/base", "pretrain/behavior", "train/dpo")}
    trained_by = {log.start["process"] for log in logs.values() if log is not None}
    assert len(trained_by) == 3 and os.getpid() not in trained_by
    said = capsys.readouterr().err.splitlines()
    for name in ("pretrain/base", "train/repo", "evaluate/samples/dpo/arithmetic/greedy", "evaluate/base/arithmetic"):
        assert sum(line.startswith(f"{name}: ") and " s; " in line for line in said) == 1, name
    assert [line for line in said if re.match(r"pretrain/behavior: train sft .* (\d+)/\1 ", line)]
    assert not [line for line in said if line.endswith(": unchanged, skipped")]

    assert {name for name, outcome in run_recipe(recipe).outcomes.items() if outcome.ran} == set()
    with SideBySide(recipe, run, 2) as idle:
        idle.prepare(["pretrain", "sample", "train", "evaluate"])
        assert not idle._children, "nothing to do needs no process"


def test_part_when_it_fails_then_the_error_is_that_of_a_run_one_after_the_other_and_others_are_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: dict[int, str] = {}
    for count in (1, 2):
        folder = tmp_path / "run"
        data = tmp_path / "demonstrations.jsonl"
        data.write_text('{"prompt": 3}')
        with pytest.raises(DataError) as caught:
            run_recipe(small(folder, f"parallel={count}", f"pretrain.base.data={data}"))
        errors[count] = str(caught.value)
        assert (folder / "pretrain" / "behavior" / "manifest.json").is_file() == (count == 2)
        folder.rename(tmp_path / f"parallel-{count}")
    assert errors[1] == errors[2] and "no usable row is left" in errors[1]
    said = capsys.readouterr().err
    assert "pretrain/base failed: " in said and "what runs beside it is finished first" in said


def test_part_when_its_process_is_killed_then_the_run_ends_with_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "do_groups", die)
    with pytest.raises(RegretlessError, match=r"^pretrain/base: its process ended by SIGKILL, .*the same command"):
        run_recipe(small(tmp_path / "run", "parallel=2"), ["world", "pretrain"])


def die(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_run_when_killed_while_parts_are_at_work_then_they_end_and_the_same_command_ends_as_undisturbed(
    serial: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, expected = serial
    recipe = small(folder, "parallel=2", MANY_BATCHES)
    command = ["run", str(folder.parent / "run.yaml")]
    command += ["parallel=2", MANY_BATCHES, "pretrain.base.save_steps=20", "pretrain.base.logging_steps=15"]
    if folder.exists():
        folder.rename(folder.with_name("side by side"))
    for parts, begun in (
        (("pretrain/base", "pretrain/behavior"), "{part}/pending.json"),
        (("sample",), "{part}*/*.parts/*.parquet"),
    ):
        with started(*command, log=tmp_path / "log") as process:
            while not all(any(folder.glob(begun.format(part=part))) for part in parts):
                assert process.is_alive(), f"it ended with {process.exitcode} before {parts} were at work together"
                time.sleep(0.001)
            below = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL
        _, alive = psutil.wait_procs(below, timeout=60)
        assert len(below) >= 3 and not alive
        assert not [part for part in parts if (folder / part / "manifest.json").is_file()]
    run_recipe(recipe)
    assert differences(expected, contents(folder)) == []


class Unit:
    """A worker that writes its process's number to the file named by the unit, unless the name says what else to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, unit: str, advance: Advance) -> None:
        if unit == "refused":
            raise ConfigError("model m: 4 of 5 prompts are too long")
        if unit == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / unit).write_text(str(os.getpid()))
        advance(3, 8)


def test_responses_when_divided_then_two_other_processes_do_every_unit_once(tmp_path: Path) -> None:
    tally = Tally()
    units = [f"{number}" for number in range(5)]
    LocalWorkers(2, threads=1).run(Need("sample"), functools.partial(Unit, tmp_path), units, tally)
    done_by = [int((tmp_path / unit).read_text()) for unit in units]
    assert len(set(done_by)) == 2 and os.getpid() not in done_by
    assert done_by[0::2] == [done_by[0]] * 3 and (tally.done, tally.tokens) == (15, 40)


def test_responses_when_there_is_one_unit_or_other_work_then_this_process_does_it(tmp_path: Path) -> None:
    for need, units in ((Need("sample"), ["a"]), (Need("verify"), ["b", "c"])):
        LocalWorkers(2, threads=1).run(need, functools.partial(Unit, tmp_path), units, Tally())
    assert {int((tmp_path / unit).read_text()) for unit in "abc"} == {os.getpid()}


@pytest.mark.parametrize(
    ("unit", "kind", "message"),
    [
        ("refused", ConfigError, r"^model m: 4 of 5 prompts are too long$"),
        ("killed", RegretlessError, r"^sample: one of its processes ended by SIGKILL, .* parallel=1 computes in one"),
    ],
)
def test_responses_when_a_process_fails_then_its_error_is_raised_and_the_others_end(
    tmp_path: Path, unit: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        LocalWorkers(2, threads=1).run(Need("sample"), functools.partial(Unit, tmp_path), ["a", unit], Tally())
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "--multiprocessing-fork" in child.cmdline()]


PRETRAIN = {"model": {"name_or_path": "m"}, "data": "d.jsonl", "processes": 1}


def recipe_with(**values: Any) -> Recipe:
    return parse_recipe({"name": "x", "pretrain": {"a": PRETRAIN}, "threads": 1, "parallel": 3, **values}, "x")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"threads": None}, "a thread for every core; set `threads`"),
        ({"cluster": {}}, "the cluster does the work"),
        ({"pretrain": {"a": {**PRETRAIN, "processes": 2}}}, "each training uses several processes"),
    ],
)
def test_parallel_when_something_else_divides_the_work_then_a_number_is_refused_and_auto_is_one(
    values: dict[str, Any], reason: str
) -> None:
    (problem,) = parallel_problems(recipe_with(**values))
    assert problem.startswith("parallel=3: ") and reason in problem
    assert parallel_problems(recipe_with(**{**values, "parallel": "auto"})) == []
    assert places(recipe_with(**{**values, "parallel": "auto"})) == 1


def test_parallel_when_gpus_are_visible_then_a_number_is_refused_and_auto_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_by_side, "visible_gpus", lambda: 2)
    (problem,) = parallel_problems(recipe_with())
    assert "2 GPU(s)" in problem
    assert places(recipe_with(parallel="auto")) == 1


def test_parallel_when_nothing_is_in_its_way_then_it_is_as_asked_and_auto_follows_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(side_by_side, "cores", lambda: 5)
    assert [places(recipe_with(parallel=value)) for value in (1, 3, "auto")] == [1, 3, 5]
    assert places(recipe_with(parallel="auto", threads=2)) == 2
    assert places(recipe_with(parallel="auto", threads=8)) == 1
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert places(recipe_with()) == 1, "processes of a launcher train together"
