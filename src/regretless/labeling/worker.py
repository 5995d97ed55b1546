"""Process that runs one verifier for `regretless.labeling.worker_pool`: JSON rows in, JSON outcomes out, one line each.

Run as a script with MODULE FUNCTION SECONDS, it imports the function, calls `warm_up()` of its module if it exists,
reports that it is ready, and answers until its input ends. It is a separate module, without fork or pickle:
the parent may hold threads and an accelerator, and its main module must not be imported again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys

from regretless.core.errors import error_line
from regretless.core.text_cleaning import clean_text
from regretless.labeling.base import FAILED, check_problem

MEMORY_LIMIT = 4 << 30
"""Address space of a worker (bytes): an exploding expression ends in a MemoryError before the machine swaps."""


WAITING = 8
"""Wall-clock seconds for a row per second of its limit. The limit is in processor time, so that a verdict does not
depend on the machine's load; the wall-clock limit ends a row that only waits."""
ORPHAN_SECONDS = 5.0
"""Additional seconds after which the process ends itself, because its parent is gone."""


def main(module: str, function: str, seconds: float) -> None:
    """Answer rows, that is the arguments, with `[verdict, reason, extracted]`; errors of the verifier become unknown.

    A result that is not a proper Check is a bug of the verifier: it is answered with a text that says so.
    """
    # The protocol uses its own copy of standard output, so that a verifier that prints does not break it.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.suppress(ImportError, ValueError, OSError):  # not every system supports it
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
        home = importlib.import_module(module)
        getattr(home, "warm_up", lambda: None)()
        check = getattr(home, function)
        output.write("ready\n")
        output.flush()
        for line in sys.stdin:
            question = json.loads(line)
            # A watchdog outside the interpreter: it also runs while C code holds the interpreter lock.
            faulthandler.dump_traceback_later(WAITING * seconds + ORPHAN_SECONDS, exit=True)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal has no handler, so the process ends
            try:
                outcome = check(*question)
                problem = check_problem(outcome)
                row = [outcome.verdict, outcome.reason, outcome.extracted] if problem is None else problem
            except (Exception, SystemExit) as error:
                row = ["unknown", clean_text(f"{FAILED}: {error_line(error)}"), None]
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
            output.write(json.dumps(row) + "\n")
            output.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
