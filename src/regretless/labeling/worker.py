"""Process that runs one verifier for `regretless.labeling.pool`: JSON rows in, JSON outcomes out, one line each.

`python -m regretless.labeling.worker MODULE FUNCTION SECONDS` imports the function, calls `warm_up()` of its module if
there is one, says it is ready, and answers until its input ends. A module of its own, and no fork or pickle: the parent
may hold threads and an accelerator, and its main module must not be imported again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys

MEMORY_LIMIT = 4 << 30
"""Address space of a worker (bytes): an exploding expression ends in a MemoryError, not in the machine's swap."""


WAITING = 8
"""Seconds on the clock that a row may take for each second of its limit: that one is the processor's time, so that a
verdict does not depend on what else the machine does, and this one ends a row that only waits."""
ORPHAN_SECONDS = 5.0
"""How much longer than that a row may run before the process ends itself, its parent being gone."""


def main(module: str, function: str, seconds: float) -> None:
    """Answer rows `[response, answer]` with `[verdict, reason, extracted]`; errors of the verifier become unknown."""
    # The protocol gets its own copy of standard output: a verifier that prints must not break it.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.suppress(ImportError, ValueError, OSError):  # not every system can limit it
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
        home = importlib.import_module(module)
        getattr(home, "warm_up", lambda: None)()
        check = getattr(home, function)
        output.write("ready\n")
        output.flush()
        for line in sys.stdin:
            response, answer = json.loads(line)
            # A watchdog outside the interpreter: it works while C code holds the interpreter's lock.
            faulthandler.dump_traceback_later(WAITING * seconds + ORPHAN_SECONDS, exit=True)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # nothing handles its signal: the process ends
            try:
                outcome = check(response, answer)
                row = [outcome.verdict, outcome.reason, outcome.extracted]
            except Exception as error:
                row = ["unknown", f"verifier failed: {type(error).__name__}", None]
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
            output.write(json.dumps(row) + "\n")
            output.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
