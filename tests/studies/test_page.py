"""The page of a comparison: all numbers, linked to their runs' reports, in one file that fetches nothing."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markupsafe import Markup

from made_runs import BENCHMARK, made_run
from regretless.cli.app import main
from regretless.core.errors import ConfigError
from regretless.core.files import read_json
from regretless.studies.compare import compare
from regretless.studies.compared_runs import Run
from regretless.studies.page import write_page


class Links(HTMLParser):
    """Addresses of links, and of everything that a page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "xlink:href", "src") and value and not value.startswith("#"):
                (self.links if tag == "a" else self.fetched).append(value)


@pytest.mark.slow
def test_page_of_real_runs_when_written_by_the_verb_then_numbers_lead_to_reports(
    quickstarts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a folder" / "compared"
    command = ["compare", *map(str, quickstarts), "--output", str(output), "--figure-format", "pdf"]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert not stopped.value.code
    said = capsys.readouterr()
    assert "over 2 training seeds" in " ".join(said.out.split()) and str(output / "comparison.html") in said.err
    text = (output / "comparison.html").read_text(encoding="utf-8")
    page = Links(text)
    assert not page.fetched and "<script" not in text
    reports = {(output / unquote(link)).resolve() for link in page.links}
    assert reports == {run / "report" / "report.html" for run in quickstarts}
    assert all(report.is_file() for report in reports)
    comparisons = read_json(output / "comparison.json")["comparisons"]
    assert comparisons == 4 and "4 comparisons were made" in text
    for name in ("bars-greedy", "bars-sampled", "curves-quickstart", "distance-quickstart"):
        assert f'id="{name}"' in text and (output / "figures" / f"{name}.pdf").is_file()
    assert text.count("<svg") == 4
    assert "The runs differ in their seeds at most." in text
    values = [row["value"] for row in read_json(output / "comparison.json")["cells"]]
    assert all(f"{value:.2f}" in text for value in values)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:url\(|xlink:href="|href=")#([^)"]+)', text)
    assert used and set(used) <= set(ids)


def test_settings_that_differ_when_shown_then_values_are_listed_with_their_runs(tmp_path: Path) -> None:
    greedy = {"base": {BENCHMARK: [1, 0]}, "dpo": {BENCHMARK: [1, 1]}}
    runs = [
        made_run(tmp_path / "runs" / name, greedy, train={"seed": seed, "learning_rate": rate})
        for seed, (name, rate) in enumerate({"slow": 1e-4, "<fast>": "<b>3e-4</b>"}.items())
    ]
    write_page(compare([Run(run) for run in runs]), tmp_path / "page", more={"The <search>": Markup("<p>12 cells</p>")})
    text = (tmp_path / "page" / "comparison.html").read_text(encoding="utf-8")
    section = text.split('id="settings"')[1]
    assert re.search(r"train.learning_rate</th><td class=\"value\">0.0001</td><td>slow</td>", section)
    assert "&lt;b&gt;3e-4&lt;/b&gt;</td><td>&lt;fast&gt;</td>" in section and "<fast>" not in text
    assert "<h2>The &lt;search&gt;</h2>\n<p>12 cells</p>" in text
    assert not Links(text.split("<main>")[1]).links  # no run has a report


def test_page_without_matplotlib_when_written_then_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare([Run(made_run(tmp_path / "a", {"base": {BENCHMARK: [1, 0]}, "dpo": {BENCHMARK: [1, 1]}}))])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_page(found, tmp_path / "page")
    assert "figures need matplotlib: pip install" in (tmp_path / "page" / "comparison.html").read_text()
    with pytest.raises(ConfigError, match="figures need matplotlib"):
        write_page(found, tmp_path / "page", ["png"])


def test_formats_that_do_not_exist_when_asked_for_then_nothing_is_written(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", {"base": {BENCHMARK: [1, 0]}, "dpo": {BENCHMARK: [1, 1]}})
    with pytest.raises(ConfigError, match="got gif"):
        write_page(compare([Run(run)]), tmp_path / "page", ["gif"])
    assert not (tmp_path / "page").exists()
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(run), "--figure-format", "png"])
    assert stopped.value.code == 2
