"""A vLLM server on loopback, in a Python environment of its own, for the length of a block."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NAME = "tiny"
"""What the model is called on the server."""
PATIENCE = 600.0
"""Seconds until it must be up; an idle machine takes 30."""
GRACE = 20.0
"""Seconds that it has to end by itself."""
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""One GiB for keys and values, where half of the machine's memory would be taken; no request to anywhere."""


@dataclass
class VllmServer:
    """A running server."""

    url: str
    """What to give as base_url."""
    log: Path

    def tail(self, start: int = 0) -> str:
        """The last lines of the log, none from before byte `start`."""
        return "\n".join(self.log.read_bytes()[start:].decode(errors="replace").splitlines()[-80:])


@contextmanager
def serving_vllm(python: str, model: Path, log: Path, *options: str) -> Iterator[VllmServer]:
    """Serve the model of a folder with the vLLM of an environment (its Python) until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not the `vllm` command: it looks for a package of that name, and the CPU build has another.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model), "--served-model-name", NAME, "--enforce-eager", "--dtype", "float32", *options]
    # Neither this process's packages nor its limit of threads are the server's.
    inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "OMP_NUM_THREADS"}}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**inherited, **SETTINGS}, stdout=output, stderr=output, start_new_session=True
        )
    server = VllmServer(f"http://127.0.0.1:{port}/v1", log)
    try:
        _wait(process, port, server)
        yield server
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], port: int, server: VllmServer) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    state = "still not up" if process.poll() is None else f"ended with exit code {process.returncode}"
    pytest.fail(f"vLLM: {state}; its log ends with\n{server.tail()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes it started, which are one process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
