"""What a job of a study sees of the machine."""

from __future__ import annotations

import pytest

from regretless.studies.job import VISIBLE, devices


@pytest.mark.parametrize(
    ("seen", "expected"),
    [(None, "2,3"), ("4,5,6,7", "6,7"), ("GPU-a, GPU-b, GPU-c, GPU-d", "GPU-c,GPU-d")],
)
def test_devices_of_a_job_when_the_study_may_use_only_some_are_among_those(
    seen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seen is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, seen)
    assert devices(range(2, 4)) == expected
