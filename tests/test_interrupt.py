"""Ctrl-C: real signals to real processes, at many moments, also where an exception would be swallowed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
DRIVER = """
import sys
from regretless import interrupt
with interrupt.handled():
    print("ready", flush=True)
    from regretless.__main__ import main
    main()
"""
"""The command line, which says when a signal can be sent: before that, Python itself has no handler of ours."""
PLANTED = {
    "garbage collector": "gc.callbacks.append(lambda *_: press())\ngc.collect()",
    "destructor": "class Doomed:\n    def __del__(self): press()\ndel_me = Doomed()\ndel del_me",
    "comparison that hides errors": "class Key:\n    def __eq__(self, other): press()\n"
    "try: Key() == 1\nexcept BaseException: pass",
    "import": "import tempfile, pathlib\nplace = tempfile.mkdtemp()\nsys.path.insert(0, place)\n"
    "pathlib.Path(place, 'planted.py').write_text('import os, signal\\nos.kill(os.getpid(), signal.SIGINT)\\n')\n"
    "try: import planted\nexcept BaseException: pass",
    "thread that is waited for": "import threading\nthread = threading.Thread(target=lambda: (time.sleep(0.1), press(), "
    "time.sleep(600)), daemon=True)\nthread.start()\nthread.join()",
    "event loop": "import asyncio\nasync def work():\n    asyncio.get_running_loop().call_later(0.1, press)\n"
    "    try: await asyncio.sleep(600)\n    except BaseException: pass\nasyncio.run(work())",
}


@pytest.mark.parametrize("place", PLANTED)
def test_interrupt_when_python_would_swallow_the_exception_then_the_process_ends_all_the_same(place: str) -> None:
    code = (
        "import gc, os, signal, sys, time\nfrom regretless import interrupt\n"
        "def press(): os.kill(os.getpid(), signal.SIGINT); time.sleep(0)\n"
        "with interrupt.handled(), interrupt.saying('kept in the folder x'):\n"
        + "".join(f"    {line}\n" for line in PLANTED[place].splitlines())
        + "    print('lost')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kept in the folder x\n")


def test_interrupt_when_the_process_ignores_it_then_it_goes_on() -> None:
    code = (
        "import os, signal\nfrom regretless import interrupt\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with interrupt.handled(): os.kill(os.getpid(), signal.SIGINT)\nprint('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "still here\n")


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The command line in a process (and a group) of its own, at the moment when it begins."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_run_when_interrupted_at_many_moments_then_each_press_ends_it_with_one_line_and_the_last_run_is_whole(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    command = ("run", str(PROJECT / "recipes" / "quickstart.yaml"), "--smoke", "--output-dir", str(run))
    seen: set[str] = set()
    # The first while it still imports; then a moment after another stage has begun, until none is left.
    for press in range(100):
        process = start(*command)
        known = {path.parent for path in run.rglob("pending.json")} | {
            path.parent for path in run.rglob("manifest.json")
        }
        while press and process.poll() is None:
            begun = {path.parent for path in run.rglob("pending.json")}
            if begun - known or (len(known) and time.monotonic() % 7 < 0.05):
                seen |= {path.relative_to(run).as_posix() for path in begun}
                break
            time.sleep(0.01)
        time.sleep(0.07 * (press % 5))
        if process.poll() is None:
            # To the whole group, as a terminal does.
            os.killpg(process.pid, signal.SIGINT)
        out, said = process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == 130, said
        assert "Traceback" not in said and "KeyboardInterrupt" not in said and "Aborted" not in said, said
        *_, last = said.splitlines()
        kept = f"interrupted: what is done so far is kept in {run}; the same command resumes from there"
        assert last == kept or re.match("interrupted: no file is left half written", last), said
        assert "Traceback" not in out
    assert process.returncode == 0
    assert len(seen) >= 3, seen
    assert (run / "report" / "report.html").is_file()
