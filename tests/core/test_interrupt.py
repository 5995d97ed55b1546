"""Ctrl-C: real signals to real processes, at many moments, also where an exception would be swallowed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forked import regretless, started
from regretless.core.files import write_jsonl
from regretless.world.tokenizer import build_tokenizer

PROJECT = Path(__file__).resolve().parents[2]
PRESSES = 3
MARKS = ("pending.json", "manifest.json")
ERRORS = ("Traceback", "KeyboardInterrupt", "Aborted")
KEPT = "interrupted: finished work stays in {}; the same command resumes from there"
DRIVER = """
import sys
from regretless.core import interrupt
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
    "thread that is waited for": "import threading\ndef work(): time.sleep(0.1); press(); time.sleep(600)\n"
    "thread = threading.Thread(target=work, daemon=True)\nthread.start()\nthread.join()",
    "event loop": "import asyncio\nasync def work():\n    asyncio.get_running_loop().call_later(0.1, press)\n"
    "    try: await asyncio.sleep(600)\n    except BaseException: pass\nasyncio.run(work())",
}


@pytest.mark.parametrize("place", PLANTED)
def test_interrupt_when_python_would_swallow_the_exception_then_the_process_ends_all_the_same(place: str) -> None:
    code = (
        "import gc, os, signal, sys, time\nfrom regretless.core import interrupt\n"
        "def press(): os.kill(os.getpid(), signal.SIGINT); time.sleep(0)\n"
        "with interrupt.handled(), interrupt.saying('kept in the folder x'):\n"
        + "".join(f"    {line}\n" for line in PLANTED[place].splitlines())
        + "    print('lost')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kept in the folder x\n")


def test_interrupt_when_the_process_ignores_it_then_it_goes_on() -> None:
    code = (
        "import os, signal\nfrom regretless.core import interrupt\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
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


@pytest.mark.slow
def test_run_when_interrupted_at_many_moments_then_each_press_ends_it_with_one_line_and_the_last_run_is_whole(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    command = ("run", str(PROJECT / "recipes" / "quickstart.yaml"), "--smoke", "--output-dir", str(run))
    seen: set[str] = set()

    # First while it still imports, then each time that a stage has begun, a little later every time; then not at all.
    process = start(*command)
    os.killpg(process.pid, signal.SIGINT)  # the whole group, as a terminal does
    _, said = process.communicate()
    assert process.returncode == 130 and not [text for text in ERRORS if text in said], said
    assert said.splitlines()[-1].startswith("interrupted: ")
    for press in range(1, PRESSES + 1):
        log = tmp_path / f"log-{press}"
        with started(*command, log=log) as forked:
            before = begun(run)
            while forked.is_alive() and (press == PRESSES or not begun(run) - before):
                time.sleep(0.01)
            seen |= begun(run)
            time.sleep(0.05 * press)
            if forked.is_alive():
                os.killpg(forked.pid, signal.SIGINT)
            forked.join()
        said = log.read_text()
        assert not [text for text in ERRORS if text in said], said
        if forked.exitcode == 0:
            break
        assert forked.exitcode == 130, said
        assert said.splitlines()[-1] == KEPT.format(run), said
    assert forked.exitcode == 0
    assert len(seen) > PRESSES / 2, seen
    assert (run / "report" / "report.html").is_file()


def begun(run: Path) -> set[str]:
    """Stages that have begun in a run folder; one that ends just now moves folders that are being read."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return {file.parent.relative_to(run).as_posix() for name in MARKS for file in run.rglob(name)}


@pytest.mark.slow
def test_training_when_interrupted_then_it_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    row = {"chosen": "7+2=9", "rejected": "7-2=5"}
    prompts = [f"Tom has {number} apples. Tom buys 2. How many?\n" for number in range(7, 15)]
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": text, **row} for text in prompts])
    sizes = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, head_dim: 8"
    architecture = f"{{model_type: qwen3, {sizes}, num_key_value_heads: 2}}"
    command = [
        *("train", "--pairs", str(tmp_path / "pairs.jsonl"), "--output", str(tmp_path / "out"), "objective=dpo"),
        *(f"model.architecture={architecture}", f"model.tokenizer={tmp_path / 'tokenizer'}", "lora=null"),
        *("max_steps=100", "save_steps=5", "save_total_limit=2", "pairs_per_step=4"),
    ]
    with started(*command, log=tmp_path / "log") as process:
        while process.is_alive() and not list((tmp_path / "out").glob("checkpoint-*/trainer_state.json")):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        process.join()
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 130, said
    assert said.splitlines()[-1] == KEPT.format(tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = regretless(*command, log=tmp_path / "again")
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "out" / "training.log").read_text().splitlines()[0])
    assert first["step"] >= 1, "it began anew"
    assert not list(tmp_path.glob(".*.lock"))
