"""What the commands behind docs/theory.md share."""

from __future__ import annotations

import sys

import pictures
import pytest
import theory_common


@pytest.mark.parametrize("start", [lambda: theory_common.figure_path("about", "theory-x.svg"), pictures.main])
def test_command_when_matplotlib_is_missing_then_it_says_what_to_install_before_it_computes(
    start: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["theory_x.py"])
    for module in (theory_common, pictures):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        start()  # type: ignore[operator]
    said = capsys.readouterr()
    assert "pip install matplotlib" in said.err and not said.out


def test_command_when_only_the_table_is_wanted_then_it_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["theory_x.py", "--no-figure"])
    monkeypatch.setattr(theory_common, "find_spec", lambda name: None)
    assert theory_common.figure_path("about", "theory-x.svg") is None
