"""What is printed: nothing from rows, columns or names steers a terminal, and brackets are no markup."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
from pathlib import Path

import pytest
from rich.table import Table

from regretless.core.progress import bar
from regretless.core.terminal import console, terminal
from regretless.data.rejected_rows import Refusal

SOURCE = Path(__file__).resolve().parents[2] / "src"
NASTY = "\x1b]0;title\x07\x1b[2J\x9b31m\r[red]x[/red][/nothing]\u202e\udcff"


def test_texts_when_printed_in_any_form_then_escapes_are_shown_and_rich_still_colors() -> None:
    file = io.StringIO()
    console = terminal(file=file, force_terminal=True, width=300, color_system="standard")
    console.print(NASTY, style="yellow")
    table = Table(NASTY)
    table.add_row(NASTY)
    console.print(table)
    console.print(f"refused {Refusal('a.jsonl', 1, NASTY + chr(10) + 'error: false')}")
    said = file.getvalue()
    assert "\x1b[33m" in said, "the style is rich's own"
    assert all(found.startswith(("\x1b[33m", "\x1b[0m", "\x1b[1m")) for found in _escapes(said)), _escapes(said)
    assert "\\x1b[2J" in said and "\\udcff" not in said and "\\xff" in said and "[red]x[/red][/nothing]" in said
    assert not any(character in said for character in "\x07\x9b\r\u202e\udcff")
    assert "\nerror: false" not in said


@pytest.mark.filterwarnings("ignore:install .ipywidgets.")
def test_bar_when_shown_in_a_notebook_then_standard_error_is_the_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel flushes standard error before it displays anything, the bar's own texts among it."""
    monkeypatch.setattr(console, "is_jupyter", True)
    before = sys.stdout, sys.stderr
    with bar("Sampling", 1):
        assert (sys.stdout, sys.stderr) == before


def _escapes(text: str) -> list[str]:
    return [text[place : place + 5] for place, character in enumerate(text) if character == "\x1b"]


def test_progress_bar_when_its_label_holds_escapes_then_they_are_shown() -> None:
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream), bar(f"tokenize {NASTY}", 1) as advance:
        advance(1)
    said = stream.getvalue()
    assert "\\x1b" in said and "\x1b" not in said and "\x9b" not in said


def test_terminal_without_greek_letters_when_printed_to_then_they_are_escaped() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal(file=file).print("regret with η = 0.2")
    file.flush()
    assert file.buffer.getvalue() == rb"regret with \u03b7 = 0.2" + b"\n"  # type: ignore[attr-defined]


def test_modules_when_they_print_then_through_the_one_console() -> None:
    stray = [
        f"{file.relative_to(SOURCE)}:{node.lineno}"
        for file in (SOURCE / "regretless").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "Console")
    ]
    assert stray == []
