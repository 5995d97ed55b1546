"""Bars: their speed by a planted clock, lines where there is no terminal, and several processes on one terminal."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from regretless.core import progress
from regretless.core.files import read_json
from regretless.core.progress import BarState, Pace, SharedBars, bar, drew
from regretless.core.terminal import console


def said_after(state: BarState, *steps: tuple[float, int, int]) -> str:
    """The line about a bar after steps of (seconds, items, tokens); a last step without both is time that passes."""
    now = 1000.0
    pace = Pace(state, clock=lambda: now)
    for seconds, items, tokens in steps:
        now += seconds
        if items or tokens:
            state = replace(state, done=state.done + items, tokens=state.tokens + tokens)
            pace.update(state)
    return pace.line(state.description)


RESPONSES = BarState(0, "sample", 1640, 1000, unit="responses")
ROWS = BarState(0, "verify", 200, 0)


@pytest.mark.parametrize(
    ("state", "steps", "line"),
    [
        (ROWS, [(60, 0, 0)], "verify: 0 of 200 rows (0%)"),
        (ROWS, [(10, 40, 0)], "verify: 40 of 200 rows (20%), 4 rows/s, 0:00:40 left"),
        (ROWS, [(10, 40, 0), (10, 0, 0)], "verify: 40 of 200 rows (20%), 2 rows/s, 0:01:20 left"),
        (ROWS, [(50, 200, 0)], "verify: 200 of 200 rows (100%), 4 rows/s"),
        (replace(ROWS, total=None), [(4, 1, 0)], "verify: 1 rows, 0.25 rows/s"),
        (replace(ROWS, note="$0.10"), [(4, 2000, 0)], "verify: 2,000 of 200 rows (1000%), 500 rows/s, $0.10"),
        # Responses of earlier runs took no time of this one.
        (RESPONSES, [(40, 64, 6400)], "sample: 1,064 of 1,640 responses (65%), 160 tokens/s, 0:06:00 left"),
        # No response is done, but tokens are drawn.
        (RESPONSES, [(40, 0, 800)], "sample: 1,000 of 1,640 responses (61%), 20 tokens/s"),
        (
            RESPONSES,
            [(40, 64, 6400), (40, 0, 1600)],
            "sample: 1,064 of 1,640 responses (65%), 100 tokens/s, 0:12:00 left",
        ),
        # Replies that were paid for earlier come at once; after ten minutes they count no more.
        (ROWS, [(1, 100, 0), *[(10, 1, 0)] * 61], "verify: 161 of 200 rows (80%), 0.1 rows/s, 0:06:30 left"),
        # A worker reports half an hour's rows together.
        (ROWS, [(1800, 100, 0), (1200, 0, 0)], "verify: 100 of 200 rows (50%), 0.033 rows/s, 0:50:00 left"),
        (ROWS, [(1800, 50, 0)] * 3, "verify: 150 of 200 rows (75%), 0.028 rows/s, 0:30:00 left"),
    ],
)
def test_line_of_a_bar_when_time_passes_then_it_says_share_speed_and_what_is_left(
    state: BarState, steps: list[tuple[float, int, int]], line: str
) -> None:
    assert said_after(state, *steps) == line


@contextlib.contextmanager
def lines_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error, on which lines about bars are not a minute apart."""
    monkeypatch.setattr(progress, "BETWEEN_LINES", 0.01)
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        yield stream


def wait_for(text: str, stream: io.StringIO) -> None:
    deadline = time.monotonic() + 30
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert text in stream.getvalue()


def test_bar_when_tokens_are_drawn_before_items_are_done_then_each_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[BarState] = []
    monkeypatch.setattr(progress, "_send", states.append)
    monkeypatch.setattr(progress, "BETWEEN", 0.0)
    drew(5)  # no bar is there
    with bar("sample", 2, unit="responses") as advance:
        drew(30)
        advance(1, 20)
        drew(10)
        advance(1, 20)
    counts = [(state.done, state.tokens) for state in states]
    assert list(dict.fromkeys(counts)) == [(0, 0), (0, 30), (1, 30), (1, 40), (2, 40)]


def test_bar_when_there_is_no_terminal_then_lines_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with lines_often(monkeypatch) as stream:
        with bar("verify", 8, done=2, note=lambda: "a note") as advance:
            wait_for("verify: 2 of 8 rows (25%), a note\n", stream)
            advance(4)
            wait_for("verify: 6 of 8 rows (75%), ", stream)
        with SharedBars() as bars:
            bars.show("one", BarState(0, "train sft", 10, 3, unit="steps"))
            bars.show("two", BarState(0, "train sft", None, 5, unit="steps"))
            wait_for("one: train sft: 3 of 10 steps (30%)\ntwo: train sft: 5 steps\n", stream)
        ended = len(stream.getvalue())
        time.sleep(0.05)
        assert len(stream.getvalue()) == ended, "nothing is said of bars that are over"


def test_bar_when_a_terminal_shows_it_then_no_lines_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr(console, "is_interactive", True)
    monkeypatch.setenv("TERM", "xterm")
    with lines_often(monkeypatch) as stream, bar("verify", 8) as advance:
        advance(4)
        time.sleep(0.05)
        shown = stream.getvalue()
    assert "verify" in shown and "of 8 rows" not in shown


def test_bar_of_a_child_when_it_moves_then_tokens_are_sent_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[BarState] = []
    monkeypatch.setattr(progress, "_send", sent.append)
    with bar("sample", 8, done=2, unit="responses") as advance:
        advance(3, 40)
        advance(1, 2)
    last = sent[-1]
    assert (last.done, last.tokens, last.unit, last.is_over) == (6, 42, "responses", True)


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
        "pretrain/one: train sft      10/10 0:00:00",
        "pretrain/two: train sft      5/20 0:00:00 a note",
        "pretrain/one: verify         3/10 0:00:00",
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


def test_bars_when_written_to_a_file_then_it_has_those_at_work_but_trainings_and_is_gone_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "BETWEEN_WRITES", 0.01)
    file = tmp_path / "progress.json"
    file.write_text("of a process that was killed")

    def written() -> object:
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return read_json(file)

    with progress.written_to(file), progress.written_to(tmp_path / "another.json"):
        assert not file.exists()
        with bar("verify", 200, 40):
            assert written() == ["verify: 40 of 200 rows (20%)"]
        assert not file.exists()
        with SharedBars() as bars:
            bars.show("repo", BarState(0, "train", 60, 5, unit="steps"))
            bars.show("dpo", BarState(0, "tokenize", 60, 5))
            assert written() == ["dpo: tokenize: 5 of 60 rows (8%)"]
    with bar("verify", 200, 40):
        time.sleep(0.05)
        assert not list(tmp_path.iterdir())
