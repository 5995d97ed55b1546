"""What is said when Ray gives up."""

from __future__ import annotations

import pytest

from regretless.workflow.cluster import why_ray

KILLED = """The actor died unexpectedly before finishing this task.
  class_name: MapWorker
Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1) was 31.2GB / 32.0GB"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("\n\nThe actor is dead.\n  It was restarted.", "The actor is dead."),
        (KILLED, "Task was killed due to the node running low on memory. (Ray's memory monitor ends workers when"),
        ("Worker exit type: NODE_OUT_OF_MEMORY\nOOM killed 2 workers", "OOM killed 2 workers (Ray's memory monitor"),
        ("", "RuntimeError"),
    ],
)
def test_reason_when_ray_gives_up_then_the_line_about_memory_is_said_if_there_is_one(
    message: str, expected: str
) -> None:
    assert why_ray(RuntimeError(message)).startswith(expected)
