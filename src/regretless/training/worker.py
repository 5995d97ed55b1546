"""One of several processes that train: run as a script with FOLDER, under torch's launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from regretless.core.files import read_json, write_json
from regretless.core.ranks import is_first_process
from regretless.core.text_cleaning import never_fail_to_print
from regretless.modeling.load import quiet_libraries
from regretless.training.processes import RESULT_FILE, TASK_FILE, end_with_parent, write_failure
from regretless.training.task import run_task


def main() -> None:
    """Train as the folder's task says; rank 0 writes the summary, and a process that fails writes why."""
    end_with_parent()
    never_fail_to_print()
    quiet_libraries()
    folder, code = Path(sys.argv[1]), 0
    try:
        summary = run_task(read_json(folder / TASK_FILE))
        if is_first_process():
            write_json(folder / RESULT_FILE, summary)
    except Exception as error:
        write_failure(folder, error, int(os.environ["RANK"]))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without taking anything apart: destroying torch's gloo groups can deadlock (`regretless.__main__`).
    os._exit(code)


if __name__ == "__main__":
    main()
