"""Worker processes with a time limit per row: a row can kill its process, but cannot stall or crash the run."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any, Self

from regretless.core.errors import ConfigError, RegretlessError
from regretless.data.columns import Verdict
from regretless.labeling.base import DIED, Check
from regretless.labeling.worker import WAITING
from regretless.workflow.python_process import run_module

CheckFunction = Callable[..., Check]

START_SECONDS = 120.0
"""Time for a worker to import its verifier: long enough for a busy machine."""
EXIT_SECONDS = 2.0
"""Time for a worker to exit after its output has ended."""
ROWS_PER_WORKER = 32
"""Rows for which starting another worker pays off (the start takes about a second for the algebra system)."""


class VerifierProcess:
    """One process and its current row."""

    def __init__(self, check: CheckFunction, seconds: float) -> None:
        """Start the process; `seconds` is the time limit of a row, in processor time."""
        self.seconds = seconds
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            run_module("regretless.labeling.worker", check.__module__, check.__qualname__, str(seconds)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # so that what a verifier starts can be ended with it
        )
        assert self.process.stdin and self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout
        self.row: int | None = None
        self.is_ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self._received = b""

    def send(self, row: int, question: Sequence[Any]) -> None:
        """Send the process its next row, the function's arguments. If it is gone, reading its output reports that."""
        self.row, self.deadline = row, time.monotonic() + WAITING * self.seconds
        with contextlib.suppress(BrokenPipeError):
            self.input.write(json.dumps(question).encode() + b"\n")
            self.input.flush()

    def receive(self) -> bytes | None:
        """Output of the process: a whole line, an empty one if it is incomplete, None if the process ended."""
        block = os.read(self.output.fileno(), 1 << 16)
        self._received += block
        if not block:
            return None
        if not self._received.endswith(b"\n"):
            return b""
        line, self._received = self._received, b""
        return line

    def end(self, *, has_ended: bool = False) -> int:
        """Kill the process and those that it started, and return its exit code (negative: the signal that ended it).

        has_ended: its output has; it may take a moment to exit with a code of its own.
        """
        if has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left; macOS: nothing but zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        for stream in (self.input, self.output, self.errors):
            with contextlib.suppress(OSError):  # closing flushes, although nothing reads
                stream.close()
        return code

    def last_words(self) -> str:
        """Last line that the process wrote to standard error."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]


class Pool:
    """Workers of one verifier, started as rows need them; a context manager that ends them."""

    def __init__(self, check: CheckFunction, *, workers: int, seconds: float) -> None:
        """`workers`: maximum number of processes. `seconds`: time limit of a row, in processor time.

        Raises ConfigError if a process could not import the function by its module and name.
        """
        module, name = check.__module__, getattr(check, "__qualname__", repr(check))
        if module == "__main__" or not name.isidentifier():  # a method, an inner function, a lambda, an object
            raise ConfigError(f"verifier {module}.{name}: expected a function at the top of a module; move it into one")
        self.check, self.limit, self.seconds = check, workers, seconds
        self.workers: list[VerifierProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.workers:
            self.workers.pop().end()

    def run(self, rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Check]]:
        """Check rows, the function's arguments; yields their indices and outcomes as they complete, each index once.

        A row that exceeds its time limit, or whose process dies, is unknown, and its process is replaced. A worker that
        does not start in time is given up while others work. Raises RegretlessError if a worker dies before it is
        ready, or if none is ready in time; ConfigError if the function returns something other than a Check.
        """
        waiting = deque(range(len(rows)))
        done = 0
        while done < len(rows):
            while len(self.workers) < min(self.limit, -(-(len(rows) - done) // ROWS_PER_WORKER)):
                self.workers.append(VerifierProcess(self.check, self.seconds))
            for worker in self.workers:
                if waiting and worker.is_ready and worker.row is None:
                    row = waiting.popleft()
                    worker.send(row, rows[row])
            for worker, line in self._events():
                if worker.row is not None:
                    position, worker.row = worker.row, None
                    done += 1
                    yield position, self._outcome(worker, line)
                elif line is not None:
                    worker.is_ready = True
                else:
                    self._give_up(worker)

    def _give_up(self, worker: VerifierProcess) -> None:
        """End a worker that did not become ready, and do with one less; raises RegretlessError if that cannot help."""
        is_late, words = time.monotonic() >= worker.deadline, worker.last_words()
        if is_late and any(other.is_ready for other in self.workers):
            self.workers.remove(worker)
            worker.end()
            self.limit -= 1
            return
        reason = words or "no message"
        if is_late:
            reason = (
                f"no process was ready within {START_SECONDS:g} s (last line: {reason}); is the machine busy? Run it "
                "again, or with fewer `workers`"
            )
        raise RegretlessError(f"verifier {self.check.__module__} cannot start: {reason}")

    def _outcome(self, worker: VerifierProcess, line: bytes | None) -> Check:
        if line is not None:
            answer = json.loads(line)
            if isinstance(answer, str):
                raise ConfigError(f"verifier {self.check.__module__}.{self.check.__qualname__} {answer}")
            verdict, reason, extracted = answer
            return Check(Verdict(verdict), reason, extracted)
        is_late = time.monotonic() >= worker.deadline
        self.workers.remove(worker)
        code = worker.end(has_ended=not is_late)
        is_late |= code == -signal.SIGPROF
        return Check(Verdict.UNKNOWN, "verifier timed out" if is_late else f"{DIED}: exit code {code}")

    def _events(self) -> list[tuple[VerifierProcess, bytes | None]]:
        """Wait for the next events: lines of the workers, and None for each that ended or is past its deadline."""
        busy = [worker for worker in self.workers if worker.row is not None or not worker.is_ready]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            wait = min(worker.deadline for worker in busy) - time.monotonic()
            readable: list[VerifierProcess] = [key.data for key, _ in selector.select(max(wait, 0.0))]
        late = [worker for worker in busy if worker not in readable and time.monotonic() >= worker.deadline]
        events = [*((worker, worker.receive()) for worker in readable), *((worker, None) for worker in late)]
        return [(worker, line) for worker, line in events if line != b""]
