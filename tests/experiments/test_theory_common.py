from __future__ import annotations

import sys

import pytest
import theory_common


@pytest.mark.parametrize(("flags", "ends"), [([], True), (["--no-figure"], False)])
def test_figure_when_matplotlib_is_missing_then_one_line_says_so_before_the_work(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], ends: bool
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["theory_anchors.py", *flags])
    if not ends:
        assert theory_common.figure_path("text", "anchors.svg") is None
        return
    said = r"figures need matplotlib: pip install 'regretless\[figures\]', or print the table only with --no-figure"
    with pytest.raises(SystemExit, match=said):
        theory_common.figure_path("text", "anchors.svg")
    with pytest.raises(SystemExit, match=r"figures need matplotlib: pip install 'regretless\[figures\]'$"):
        theory_common.start_figure()
