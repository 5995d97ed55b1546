"""Finished units that several run folders share."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from regretless.core.files import write_text
from regretless.workflow.run_folder import RunFolder
from regretless.workflow.unit_store import UnitStore
from single_unit import do_unit


def do(place: Path, run: str, settings: dict[str, Any], seconds: float = 0.0) -> bool:
    """Do a unit in a run folder that shares a store; whether it was done here. Every beginning is noted in a file."""

    def work(output: Path) -> dict[str, Any]:
        with (place / "begun").open("a") as handle:
            handle.write("x")
        write_text(output / "some" / "result.txt", str(settings))
        time.sleep(seconds)
        return {"rows": 3}

    folder = RunFolder(place / run, store=UnitStore(place / "units"))
    return do_unit(folder, "unit", settings, work).ran


def test_unit_when_another_run_has_done_it_then_its_files_are_taken_as_links(tmp_path: Path) -> None:
    (tmp_path / "begun").touch()
    assert do(tmp_path, "one", {"seed": 1})
    assert not do(tmp_path, "two", {"seed": 1})
    assert do(tmp_path, "two", {"seed": 2})
    assert not do(tmp_path, "one", {"seed": 2}), "what was there for other settings is replaced"
    one, two = (tmp_path / run / "unit" / "some" / "result.txt" for run in ("one", "two"))
    assert one.read_text() == "{'seed': 2}"
    assert one.samefile(two)
    assert not do(tmp_path, "one", {"seed": 1})
    assert two.read_text() == "{'seed': 2}", "a run that goes back leaves the others as they are"
    assert (tmp_path / "begun").read_text() == "xx"


def test_unit_when_two_processes_need_it_then_one_does_it_and_after_a_kill_the_other(tmp_path: Path) -> None:
    (tmp_path / "begun").touch()
    context = multiprocessing.get_context("fork")
    first = context.Process(target=do, args=(tmp_path, "one", {"seed": 1}, 60.0))
    first.start()
    while (tmp_path / "begun").read_text() != "x":
        time.sleep(0.005)
    others = [context.Process(target=do, args=(tmp_path, run, {"seed": 1}, 0.2)) for run in ("two", "three")]
    for other in others:
        other.start()
    time.sleep(0.3)
    assert (tmp_path / "begun").read_text() == "x", "the others wait"
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    for other in others:
        other.join()
        assert other.exitcode == 0
    assert (tmp_path / "begun").read_text() == "xx", "one of them did it, and the other took it"
    assert (tmp_path / "two" / "unit" / "some" / "result.txt").samefile(
        tmp_path / "three" / "unit" / "some" / "result.txt"
    )
    assert not do(tmp_path, "one", {"seed": 1}), "what the killed process left is replaced"


def test_unit_when_the_run_was_killed_before_it_was_stored_then_the_next_run_stores_it(tmp_path: Path) -> None:
    (tmp_path / "begun").touch()
    assert do(tmp_path, "one", {"seed": 1})
    shutil.rmtree(tmp_path / "units")  # as a kill leaves it between the unit's manifest and the store
    assert not do(tmp_path, "one", {"seed": 1})
    assert not do(tmp_path, "two", {"seed": 1}), "taken from the store"
    assert (tmp_path / "begun").read_text() == "x"
