"""Tables of comparisons in every format: names whole and escaped, marks, all digits in CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from made_runs import BENCHMARK, made_run, prefer, rate
from regretless.cli.app import main
from regretless.core.terminal import terminal
from regretless.studies.compare import compare
from regretless.studies.compared_runs import Run
from regretless.studies.comparison import Comparison
from regretless.studies.tables import FORMATS, as_csv, as_html, as_latex, as_markdown, for_terminal

LONG = "a_benchmark_whose_name_has_40_characters"
METHOD = "a_method_whose_name_has_forty_characters"


def right(count: int, n: int = 40) -> list[bool]:
    return [index < count for index in range(n)]


def two_models(folder: Path) -> Comparison:
    """Two models, three training seeds each, four rows, one of them with a name that is hard to print."""
    runs = []
    for model in ("Tiny_1B", "50%-<b>"):
        for seed in range(3):
            counts = {"base": 10, "dpo": 20 + seed, "repo_det": 24 + 2 * seed, "x|y*z": 15 + seed**2}
            greedy = {name: {BENCHMARK: right(n), "other_set": right(n // 2)} for name, n in counts.items()}
            made = made_run(folder / f"{model[:4]}-{seed}", greedy, train={"seed": seed})
            runs.append(Run(made, model=model))
    return compare(runs)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return two_models(tmp_path_factory.mktemp("two"))


def test_markdown_when_written_then_rows_are_marked_and_names_are_escaped(found: Comparison) -> None:
    text = as_markdown(found)
    lines = text.splitlines()
    assert lines[0].startswith("Greedy answers: mean ± standard deviation over 3 training seeds, with the 95 % t-")
    assert "|  | sums Pass@1 (%) | other_set Pass@1 (%) |" in lines
    assert "| repo_det | **65.00** ± 5.00 [52.58, 77.42] | **32.50** ± 2.50 [26.29, 38.71] |" in lines
    assert "| dpo | <ins>52.50</ins> ± 2.50 " in text
    assert "| x\\|y\\*z |" in text and "| *50%-\\<b\\>*" in text
    assert "| base | 25.00 |" in text
    # 40 points, sd 5 over three seeds: t = 13.86 with two degrees of freedom, p = 0.0052; the fifth of 12 comparisons.
    assert "| repo_det | +40.00 [+27.58, +52.42] p 0.005, Holm 0.041 |" in text
    assert "Holm's correction counts all comparisons made: 12." in text
    assert all(line.count(" | ") == 2 for line in lines if re.match(r"\| (dpo|repo_det|base)", line))


def test_latex_when_written_then_it_is_booktabs_with_escaped_names(found: Comparison) -> None:
    text = as_latex(found)
    assert r"repo\_det & \textbf{65.00} $\pm$ 5.00 & " in text
    assert r"dpo & \underline{52.50} $\pm$ 2.50 & " in text
    assert r"\multicolumn{3}{c}{Tiny\_1B} \\" in text and r"50\%-\textless{}b\textgreater{}" in text
    assert r"x\textbar{}y*z" in text and r"{\tiny [52.58, 77.42]}" in text
    for left, other in (
        ("begin{table}", "end{table}"),
        ("begin{tabular}{lcc}", "end{tabular}"),
        ("toprule", "bottomrule"),
    ):
        assert text.count(f"\\{left}") == text.count(f"\\{other}") == 2
    body = [line for line in text.splitlines() if " & " in line]
    assert all(len(re.split(r"(?<!\\)&", line)) == 3 and line.endswith(r"\\") for line in body)
    assert not re.search(r"(?<!\\)[_%#]", re.sub(r"^%.*$", "", text, flags=re.MULTILINE))


def test_csv_when_read_then_each_cell_is_a_line_with_all_digits(found: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert len(rows) == 2 * 4 * 2
    (one,) = [row for row in rows if (row["model"], row["method"], row["benchmark"]) == ("Tiny_1B", "dpo", "other_set")]
    assert (one["n"], one["over"], one["rank"], one["test"]) == ("3", "training seeds", "2", "paired t")
    assert float(one["value"]) == pytest.approx(100 * (10 + 10 + 11) / 3 / 40, abs=1e-12)
    assert float(one["p_holm"]) >= float(one["p"]) > 0
    assert len(one["runs"].split(";")) == 3
    (base,) = [row for row in rows if (row["model"], row["method"], row["benchmark"]) == ("50%-<b>", "base", "sums")]
    assert (base["sd"], base["difference"], base["p_holm"]) == ("", "", "")


def test_csv_when_a_name_looks_like_a_formula_then_spreadsheets_show_it_and_numbers_stay_numbers(
    tmp_path: Path,
) -> None:
    names = ("=1+1", "+a", "-a", "@a", "a=1")
    runs = [
        Run(
            made_run(tmp_path / str(number), {"base": {BENCHMARK: right(20)}, "dpo": {BENCHMARK: right(10)}}),
            model=name,
        )
        for number, name in enumerate(names)
    ]
    rows = [row for row in csv.DictReader(io.StringIO(as_csv(compare(runs)))) if row["method"] == "dpo"]
    assert [row["model"] for row in rows] == ["'=1+1", "'+a", "'-a", "'@a", "a=1"]
    assert {float(row["difference"]) for row in rows} == {-25.0}


def test_html_when_written_then_names_are_text_and_values_lead_to_reports(found: Comparison) -> None:
    text = as_html(found, lambda run: f'{run.path.name}/"report".html')
    assert "<strong>65.00</strong> ± 5.00" in text and "<ins>52.50</ins>" in text
    assert '<td class="number"><a href="Tiny-0/&#34;report&#34;.html">25.00</a></td>' in text  # one base model
    assert "50%-&lt;b&gt;" in text and "<b>" not in text.replace("<br>", "")
    assert '<small>seeds <a href="Tiny-0/&#34;report&#34;.html" title="50.00">0</a>' in text
    assert isinstance(text, Markup) and "<a " not in as_html(found)


def test_terminal_when_80_columns_wide_then_no_name_is_cut(tmp_path: Path) -> None:
    benchmarks = [LONG, *(f"benchmark_{number}_of_several" for number in range(5))]
    greedy = {name: {benchmark: right(7) for benchmark in benchmarks} for name in ("base", METHOD, METHOD + "_b")}
    sampled = {name: {41: right(5), 42: right(9)} for name in greedy}
    runs = [made_run(tmp_path / str(seed), greedy, sampled=sampled, train={"seed": seed}) for seed in range(2)]
    shown = compare([Run(run, model="owner/" + METHOD) for run in runs])
    screen = terminal(width=80, file=io.StringIO())
    screen.print(for_terminal(shown, 80))
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for name in (*benchmarks, METHOD, METHOD + "_b"):
        assert any(re.search(rf"(?<!\w){name}(?!\w)", line) for line in lines), name
    assert "…" not in "".join(lines)
    # A name that is wider than the terminal is broken, not cut.
    narrow = terminal(width=30, file=io.StringIO())
    narrow.print(for_terminal(shown, 30))
    assert isinstance(narrow.file, io.StringIO)
    cells = [line.split("│")[1].strip() for line in narrow.file.getvalue().splitlines() if line.count("│") > 1]
    assert METHOD in "".join(cells)


def test_bounds_that_are_unknown_when_written_then_no_format_has_a_nan(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", {"base": {BENCHMARK: right(3)}, "dpo": {BENCHMARK: right(4)}})
    for label in ("base", "dpo"):
        rate(run, label, [4.0 if label == "base" else 3.999])  # one question: no interval; and −0.001 is shown as +0.00
        prefer(run, label, [0.25, 0.75])
    one = compare([Run(run)])
    for name, write in FORMATS.items():
        assert not re.search(r"\b(nan|None)\b", str(write(one))), name
    assert "| dpo | **10.00** [3.96, 23.05] | 4.00 | 50.00 [0.00, 100.00] | – |" in as_markdown(one)
    assert "| dpo | +2.50 [−6.74, +12.76] p 1.000, Holm 1.000 | +0.00 | +0.00 | – |" in as_markdown(one)
    assert "could not be tested" in as_markdown(one)
    json.dumps(one.as_json(), allow_nan=False)


def test_verb_when_run_then_it_prints_the_format_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    greedy = {"base": {BENCHMARK: right(10)}, "dpo": {BENCHMARK: right(20)}, "repo": {BENCHMARK: right(24)}}
    run = str(made_run(tmp_path / "run", greedy))

    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["compare", *arguments])
        assert not stopped.value.code
        return capsys.readouterr().out

    assert re.search(r"│ repo +│ +60.00 │\n", said(run))
    assert said(run, "--format", "markdown").startswith("Greedy answers of one run a row")
    assert "Differences to dpo, paired" in said(run, "--baseline", "dpo", "--format", "markdown")
    assert len(said(run, "--format", "csv").splitlines()) == 4
    content: dict[str, Any] = json.loads(said(run, "--json"))
    assert (content["comparisons"], content["runs"][0]["model"]) == (2, "Tiny-1B")
    assert [row["value"] for row in content["cells"]] == [25.0, 50.0, 60.0]
    with pytest.raises(SystemExit) as stopped:
        main(["compare", run, str(tmp_path)])
    assert stopped.value.code == 2
    assert "expected the folder of a run" in capsys.readouterr().err
