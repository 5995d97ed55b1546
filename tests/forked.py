"""Work in processes that are forked from one with everything imported, for tests of which no start is the subject.

A process that imports the package itself takes seconds of processor time. Not a test by itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from regretless.workflow.children import Children, Ended, Line

PRELOAD = (
    "regretless.runs.pipeline",
    "regretless.cli.verbs",
    "regretless.training.train",
    "regretless.sampling.sample",
)


def together(count: int, work: Callable[..., None], *arguments: Any, **environment: str) -> str:
    """Call `work` in so many processes at once, which know of each other as those of torch's launcher do.

    Returns what they wrote. Fails with the error of the first that fails; the others are then ended.
    """
    environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    lines: list[str] = []
    with Children(PRELOAD) as children:
        for rank in range(count):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.start(str(rank), _member, environment | ranks, work, arguments)
        while children:
            for event in children.events():
                if isinstance(event, Line):
                    lines.append(event.text)
                if isinstance(event, Ended):
                    said = f"process {event.child}: {type(event.error).__name__}: {event.error}"
                    assert event.error is None and not event.exit_code, f"{said} (exit code {event.exit_code})"
    return "\n".join(lines)


def _free_port() -> int:
    """A port that is free until it is used: below those that the system gives away, and another in each process."""
    port = 20_000 + os.getpid() % 10_000
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
        port += 1


def _member(environment: Mapping[str, str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    work(*arguments)


@contextlib.contextmanager
def started(
    *arguments: object, log: Path, folder: Path | None = None, paths: tuple[str, ...] = ()
) -> Iterator[BaseProcess]:
    """The command line in a process of its own, and a group of its own, which is ended with the block.

    log: file for all that it writes. folder: where it works. paths: further folders of packages that it finds.
    """
    with Children(PRELOAD) as children:
        children.start("regretless", _main, ["regretless", *map(str, arguments)], folder, paths, log=log)
        (child,) = children._running.values()
        yield child.process


def regretless(*arguments: object, log: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line at its end: its exit code, and all that it wrote as standard error. Options as of `started`."""
    with started(*arguments, log=log, **options) as process:
        process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(arguments, process.exitcode, "", log.read_text(encoding="utf-8"))


def _main(command: list[str], folder: Path | None, paths: tuple[str, ...]) -> None:
    from regretless.__main__ import main

    os.setsid()
    if folder is not None:
        os.chdir(folder)
    sys.argv, sys.path[:0] = command, paths
    # For processes that this one starts.
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    torch.set_num_threads(1)
    main()
