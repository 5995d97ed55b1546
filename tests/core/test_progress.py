"""Bars of several processes on one terminal."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace

import pytest

from regretless.core.progress import BarState, SharedBars
from regretless.core.terminal import console


def test_bars_of_several_processes_when_shown_then_every_line_names_one_and_none_is_torn() -> None:
    stream = io.StringIO()
    one, two = BarState(0, "train sft", 10, 0), BarState(0, "train sft", 20, 5, "a note")
    with contextlib.redirect_stderr(stream), SharedBars() as bars:
        bars.show("pretrain/one", one)
        bars.show("pretrain/two", two)
        bars.say("pretrain/one: \x1b[33mcareful\x1b[0m \x1b[2J\x07[red]x[/red]")
        bars.show("pretrain/one", replace(one, done=10, is_over=True))
        bars.show("pretrain/one", replace(one, number=1, description="verify", done=3))
        bars.forget("pretrain/two")
    said = [re.sub(r"[━╸╺]+ *", "", line) for line in stream.getvalue().splitlines()]
    assert said[0].replace("\\x07", "") == "pretrain/one: careful [red]x[/red]", "codes that steer a terminal are lost"
    assert [line.rstrip() for line in said[1:]] == [
        "pretrain/one: train sft      10/10 0:00:00 0:00:00",
        "pretrain/two: train sft      5/20 0:00:00 -:--:-- a note",
        "pretrain/one: verify         3/10 0:00:00 -:--:--",
    ]


def test_bars_of_several_processes_when_on_a_terminal_then_those_at_work_stay_below_the_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr(console, "is_interactive", True)
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream), SharedBars() as bars:
        bars.show("pretrain/one", BarState(0, "train sft", 10, 0))
        bars.say("said while it runs")
        bars._progress.refresh()
        during = stream.getvalue()
    assert during.rindex("pretrain/one: train sft") > during.rindex("said while it runs")
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"
