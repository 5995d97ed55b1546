"""Runs the commands of docs/tutorials/served_model.md as a new user would, and prints the minutes of each section.

    python experiments/tutorial_minutes.py
    python experiments/tutorial_minutes.py --serve .venv-engines/bin/python

It builds the wheel, and installs it into a new environment in an empty folder, where all commands run. `--serve` names
the Python of an environment that has vLLM; without it, the section that serves is left out. `--usual-index` takes
torch from pip's usual index, for machines that do not reach PyTorch's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from theory_common import table

from regretless.core.text_cleaning import never_fail_to_print

PROJECT = Path(__file__).resolve().parents[1]
PAGE = PROJECT / "docs" / "tutorials" / "served_model.md"
INSTALL, SERVE = "1. Install", "7. Serve it"
VENV = ".venv/bin/activate"
PORT = "8000"
"""The server's, on the page."""
PATIENCE = 600.0
"""Seconds until the server must be up."""
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""Of vLLM: one GiB for keys and values, and no request to anywhere."""


def sections(page: Path = PAGE) -> dict[str, list[str]]:
    """The shell blocks of each numbered section, by its heading."""
    found: dict[str, list[str]] = {}
    for part in page.read_text(encoding="utf-8").split("\n## ")[1:]:
        blocks = re.findall(r"^```bash\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
        if blocks:
            found[part.partition("\n")[0]] = blocks
    return found


def from_usual_index(block: str) -> str:
    """The block, with pip's own choice of the index."""
    return re.sub(r" --index-url \S+", "", block)


def run_block(block: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a block in a shell that has the folder's environment active, if it is there yet; its standard output.

    Raises CalledProcessError with what was printed if a command fails.
    """
    script = f"set -e\nif [ -f {VENV} ]; then . {VENV}; fi\n{block}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=dict(environment), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode} of\n{block}\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def server(block: str, python: str, folder: Path, environment: Mapping[str, str], port: str) -> Iterator[None]:
    """Run the block that serves, in the environment of this Python, until the block of `with` ends."""
    stand_in = folder / "serve" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    # Neither this process's packages nor its limit of threads are the server's.
    stand_in.write_text(f'#!/bin/sh\nunset PYTHONPATH OMP_NUM_THREADS\nexec "{Path(python).absolute()}" "$@"\n')
    stand_in.chmod(0o755)
    log = folder / "serve" / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", block],
            cwd=folder,
            env={**environment, **SETTINGS},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        else:
            raise RuntimeError(f"the server is not up:\n{log.read_text(errors='replace')[-4000:]}")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def new_user(folder: Path) -> dict[str, str]:
    """Variables of a new user's shell, in which `pip install regretless` installs this checkout's wheel."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(PROJECT)], check=True)
    (wheel,) = folder.glob("*.whl")
    constraints = (PROJECT / "constraints" / "cpu.txt").read_text(encoding="utf-8")
    (folder / "constraints.txt").write_text(f"{constraints}\nregretless @ {wheel.as_uri()}\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**environment, "PIP_CONSTRAINT": str(folder / "constraints.txt"), "PIP_QUIET": "1"}


def main() -> None:
    """Run the page, and print a table of minutes."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="PYTHON", help="Python of an environment that has vLLM")
    parser.add_argument("--usual-index", action="store_true", help="install torch from pip's usual index")
    given = parser.parse_args()
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        wheels, work = Path(temporary, "wheels"), Path(temporary, "work")
        wheels.mkdir()
        work.mkdir()
        environment = new_user(wheels)
        for heading, blocks in sections().items():
            if heading == SERVE and given.serve is None:
                continue
            started = time.monotonic()
            if heading == SERVE:
                first, second = blocks
                with server(first, given.serve, work, environment, PORT):
                    print(run_block(second, work, environment), flush=True)
            else:
                for block in blocks:
                    wanted = from_usual_index(block) if given.usual_index else block
                    print(run_block(wanted, work, environment), flush=True)
            rows.append((heading, f"{(time.monotonic() - started) / 60:.1f}"))
    total = sum(float(minutes) for _, minutes in rows)
    print(table(("section", "minutes"), [*rows, ("all", f"{total:.1f}")]))


if __name__ == "__main__":
    main()
