"""Runs torch's elastic launcher for the processes of one training; run as a script with FOLDER N."""

from __future__ import annotations

import logging
import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from regretless.core.files import write_json
from regretless.training.processes import ENDED_FILE, LOGS, end_with_parent
from regretless.workflow.python_process import run_module


def main() -> None:
    """Start the processes and wait for them; if one fails, write which, and end the others."""
    end_with_parent()
    # Its messages about failed processes: the parent says what the processes themselves wrote.
    logging.disable()
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        # Rank 0 speaks for all; what the others print is kept.
        logs_specs=DefaultLogsSpecs(str(folder / LOGS), redirects=dict.fromkeys(range(1, count), Std.ALL)),
    )
    try:
        interpreter, *arguments = run_module("regretless.training.worker", str(folder))
        elastic_launch(config, interpreter)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        write_json(folder / ENDED_FILE, {"rank": rank, "exit_code": failure.exitcode})
        sys.exit(1)


if __name__ == "__main__":
    main()
