"""Processor time that a block may take."""

from __future__ import annotations

import contextlib
import time

import pytest

from regretless.core.processor_time import processor_limit


def test_limit_when_the_clock_runs_on_then_only_the_processors_time_counts() -> None:
    with processor_limit(0.2):
        time.sleep(0.5)
    with pytest.raises(TimeoutError), processor_limit(0.2):
        while True:
            pass


@pytest.mark.parametrize("swallowed", [Exception, BaseException])
def test_limit_when_the_block_swallows_the_interruption_then_its_result_does_not_count(swallowed: type) -> None:
    # As parsers do that try one way after another: what is left of the result would be called a wrong answer.
    with pytest.raises(TimeoutError), processor_limit(0.05), contextlib.suppress(swallowed):
        while True:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_limit_when_an_interruption_is_lost_then_the_next_one_ends_the_block() -> None:
    class Slow:
        def __del__(self) -> None:  # exceptions in it are ignored
            while True:
                pass

    with pytest.raises(TimeoutError), processor_limit(0.05):
        Slow()
        while True:
            pass
