"""How this process starts other Python processes: each imports from where this one does, and from nowhere else.

Python itself puts the working directory in front of what `python -m` and `python -c` import from, also for processes
that `multiprocessing` starts: a file `json.py` in the folder where a run is started would run in each of them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import util


def run_module(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Command line that runs a module as a script. python: see `run_code`."""
    return run_code(f"import runpy; runpy.run_module({module!r}, None, '__main__', True)", *arguments, python=python)


def run_code(code: str, *arguments: str, python: str | None = None) -> list[str]:
    """Command line that runs code with exactly this process's `sys.path`, and the options of its interpreter.

    python: the interpreter of another environment, which has a `sys.path` of its own; it loses the working directory.
    """
    if python is not None:
        return [python, "-c", f"import sys; sys.path[:1] == [''] and sys.path.pop(0); {code}", *arguments]
    return [sys.executable, *_options(), "-c", f"import sys; sys.path[:] = {_paths()!r}; {code}", *arguments]


@contextlib.contextmanager
def multiprocessing_starts() -> Iterator[None]:
    """A block in which processes that `multiprocessing` starts import from where this one does.

    The two that it keeps for itself are not told this process's `sys.path`; so it is in the environment, which must not
    stay that way: what others start has paths of its own.
    """
    # A path with the separator cannot be written there. The work's process is told all of them (`workflow.children`).
    paths = os.pathsep.join(path or os.curdir for path in _paths() if os.pathsep not in path)
    before, options = os.environ.get("PYTHONPATH"), util._args_from_interpreter_flags  # type: ignore[attr-defined]
    os.environ["PYTHONPATH"] = paths
    util._args_from_interpreter_flags = _options  # type: ignore[attr-defined]
    try:
        yield
    finally:
        util._args_from_interpreter_flags = options  # type: ignore[attr-defined]
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _paths() -> list[str]:
    return [path for path in sys.path if isinstance(path, str)]


def _options() -> list[str]:
    """Options of this process's interpreter, and `-P`: without the working directory in front of `sys.path`.

    Not by PYTHONSAFEPATH, which everything started later would inherit: a script of others would no longer import the
    modules beside it.
    """
    return [*subprocess._args_from_interpreter_flags(), "-P"]  # type: ignore[attr-defined]
