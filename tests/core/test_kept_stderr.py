"""Standard error of a block and of its processes: it is shown, and its end is kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from regretless.core import kept_stderr as module
from regretless.core.kept_stderr import kept_stderr

SAYS = (sys.executable, "-c", "import sys; sys.stderr.write('from a process\\n')")


def test_errors_when_written_in_the_block_then_they_are_shown_and_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="failed"), kept_stderr() as kept:
        os.write(2, b"from here\n")
        subprocess.run(SAYS, check=True)
        raise ValueError("failed")
    assert kept.decode().splitlines() == ["from here", "from a process"]
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err.splitlines() == ["from here", "from a process", "afterwards"]
    assert kept.decode().count("\n") == 2


def test_errors_when_there_are_many_then_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 10)
    with pytest.raises(ValueError, match="failed"), kept_stderr() as kept:
        os.write(2, b"x" * 50 + b"the end.\n")
        raise ValueError("failed")
    assert kept == b"xthe end.\n"
