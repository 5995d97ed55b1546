"""Work in other processes: what comes back from it, and that nothing of it outlives the process that asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from work_of_children import fail, talk

from regretless.core.errors import ConfigError
from regretless.workflow.children import BarMoved, Children, ChildTraceback, Ended, Event, Line

HERE = Path(__file__).parent
SCRIPT = """
import sys, time
from regretless.core import interrupt
from regretless.workflow.children import Children
from work_of_children import hold
print("main module runs", flush=True)
with interrupt.handled(), Children([]) as children:
    children.start("one", time.sleep, 600)
    children.start("two", time.sleep, 600)
    print("ready", flush=True)
    while True:
        for event in children.events(): print(event, flush=True)
"""
"""Without `if __name__ == "__main__"`, as scripts of a few lines are."""


@pytest.fixture(scope="module", autouse=True)
def forked_from_a_process_of_their_own() -> Iterator[None]:
    """Ends the process that these children are forked from: it has imported nothing for those of later test files."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def all_events(children: Children) -> list[Event]:
    found: list[Event] = []
    while children:
        found += children.events()
    return found


def test_child_when_it_writes_and_returns_then_all_of_it_comes_back_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Children([]) as children:
        children.import_ahead()
        # Later than the start of the process that children are forked from.
        monkeypatch.setenv("OF_THIS_TEST", "value")
        monkeypatch.chdir(tmp_path)
        children.start("one", talk, "α")
        events = all_events(children)
        children.start("two", talk, "β", log=tmp_path / "log")
        (ended,) = all_events(children)
    lines = [event.text for event in events if isinstance(event, Line)]
    assert lines == ["printed α", "on the console: α ≥ 0", "logged", "no end of line"]
    bars = [event.bar for event in events if isinstance(event, BarMoved)]
    assert [(one.description, one.total, one.done, one.is_over) for one in (bars[0], bars[-1])] == [
        ("things", 3, 1, False),
        ("things", 3, 3, True),
    ]
    assert {event.child for event in events} == {"one"}
    assert events[-1] == Ended("one", ("value", str(tmp_path)))
    assert ended == Ended("two", ("value", str(tmp_path)))
    log = (tmp_path / "log").read_text()
    assert log.startswith("printed β\non the console: β ≥ 0\nlogged\n") and "3/3" in log


def test_child_when_it_fails_then_its_error_is_that_of_this_process_or_says_how_it_ended() -> None:
    found: dict[str, Ended] = {}
    with Children([]) as children:
        for kind in ("known", "bug", "odd", "killed", "exit"):
            children.start(kind, fail, kind)
        found = {event.child: event for event in all_events(children) if isinstance(event, Ended)}
    known = found["known"].error
    assert isinstance(known, ConfigError) and (str(known), known.problems) == ("two: wrong", ["wrong"])
    assert isinstance(found["bug"].error, KeyError)
    assert isinstance(found["bug"].error.__cause__, ChildTraceback)
    said = str(found["bug"].error.__cause__)
    assert "in fail\n" in said and "KeyError: 'http://(hidden)@host'" in said
    assert repr(found["odd"].error) == "RuntimeError('OddError: a')"
    assert (found["killed"].exit_code, found["exit"].exit_code) == (-signal.SIGKILL, 3)
    assert found["killed"].error is None and found["known"].exit_code is None


def started(tmp_path: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A script whose two children sleep, and all processes below it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    output: Any = (tmp_path / "messages").open("w")  # a file: what is forked from here writes to a pipe all the same
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=output,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )
    output.close()
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["main module runs\n", "ready\n"]
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 3, "the process that children are forked from, and two of them"
    return process, below


def test_children_when_their_parent_is_killed_then_they_end_too(tmp_path: Path) -> None:
    process, below = started(tmp_path)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert (out, alive) == ("", [])


def test_children_when_ctrl_c_reaches_all_processes_then_one_line_is_printed_and_all_end(tmp_path: Path) -> None:
    process, below = started(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert (process.returncode, out, alive) == (130, "", [])
    said = (tmp_path / "messages").read_text()
    assert said == "interrupted: no file is left half written; the same command resumes\n"


def test_children_at_work_when_the_block_ends_with_an_error_then_they_end() -> None:
    with pytest.raises(RuntimeError, match="of the block"), Children([]) as children:
        children.start("one", time.sleep, 600)
        (child,) = [one for one in psutil.Process().children(recursive=True) if one.pid == children_pid(children)]
        raise RuntimeError("of the block")
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def children_pid(children: Children) -> int:
    (child,) = children._running.values()
    assert child.process.pid is not None
    return child.process.pid
