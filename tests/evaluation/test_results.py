"""Results of verified responses: one pass, several seeds, several models."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from regretless.core.errors import DataError
from regretless.core.files import write_json
from regretless.core.intervals import paired_difference, wilson
from regretless.data.columns import Response, Verdict
from regretless.data.rows import write_records
from regretless.evaluation.results import collect, results_table, summarize

C, W, U = Verdict.CORRECT, Verdict.WRONG, Verdict.UNKNOWN


def write_pass(folder: Path, verdicts: list[Verdict | None], ids: list[str] | None = None) -> Path:
    """Verified responses of one pass and their result.json; unknown ones were cut."""
    rows = [
        Response(
            prompt_id=prompt_id,
            response_id=f"{prompt_id}-0",
            prompt="p",
            response="r",
            finish_reason="length" if verdict == U else "stop",
            verdict=verdict,
            verdict_reason="truncated" if verdict == U else None,
        )
        for prompt_id, verdict in zip(ids or map(str, range(len(verdicts))), verdicts, strict=True)
    ]
    write_records(folder / "responses.parquet", rows)
    write_json(folder / "result.json", summarize(folder / "responses.parquet"))
    return folder / "responses.parquet"


def test_summarize_when_some_have_no_verdict_then_they_are_not_correct_but_counted(tmp_path: Path) -> None:
    found = summarize(write_pass(tmp_path, [C, C, W, U, None]))
    assert (found["n"], found["correct"], found["cut"]) == (5, 2, 1)
    assert found["pass_at_1"] == pytest.approx(0.4)
    assert found["interval"] == pytest.approx(list(wilson(2, 5)))
    assert found["unknown"] == {"truncated": 1, "not verified": 1}
    assert found["verdicts"] == {"0": True, "1": True, "2": False, "3": False, "4": False}


def test_summarize_when_a_problem_has_several_responses_then_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one response per problem"):
        write_pass(tmp_path, [C, W], ids=["same", "same"])


def test_collect_when_there_are_models_and_seeds_then_gains_are_paired_and_spreads_are_known(tmp_path: Path) -> None:
    base, trained = [C, W, W, W, C, W, W, U], [C, C, C, W, W, W, C, C]
    write_pass(tmp_path / "base" / "gsm8k", base)
    write_pass(tmp_path / "repo" / "gsm8k", trained)
    for seed, verdicts in ((41, [C] * 6 + [W] * 2), (42, [C] * 4 + [W] * 4)):
        write_pass(tmp_path / "repo" / "gsm8k" / f"seed-{seed}", verdicts)
    write_pass(tmp_path / "base" / "gsm8k" / "seed-41", base)
    results = collect(tmp_path)
    first, second = results["rows"]
    assert (first["label"], first["value"], first["gain"], first["cut"], first["unknown"]) == ("base", 0.25, None, 1, 1)
    assert (second["label"], second["value"], second["gain"]) == ("repo", 0.625, pytest.approx(0.375))
    expected = paired_difference([v == C for v in base], [v == C for v in trained]).interval
    assert (second["gain_low"], second["gain_high"]) == pytest.approx(tuple(expected))
    one, two = results["seeds"]
    assert (one["seeds"], one["mean"], one["sd"], one["low"]) == (1, 0.25, None, None)
    assert (two["seeds"], two["mean"]) == (2, pytest.approx(0.625))
    assert two["sd"] == pytest.approx(0.1767767)
    assert (two["low"], two["high"]) == (0.0, 1.0)  # the t-interval of two values reaches beyond them
    write_json(tmp_path / "results.json", results)  # fails on NaN
    console = Console(file=io.StringIO(), width=120)
    console.print(results_table(results))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "62.5 [30.6, 86.3]" in text
    assert "+37.5" in text
    assert "repo, 2 seeds" in text


def test_collect_when_seeds_vary_then_their_interval_is_a_t_interval_and_if_not_it_is_unknown(tmp_path: Path) -> None:
    write_pass(tmp_path / "base" / "gsm8k", [C] * 20)
    for seed in (1, 2, 3):
        write_pass(tmp_path / "base" / "gsm8k" / f"seed-{seed}", [C] * 9 + [W] * 11)
    (equal,) = collect(tmp_path)["seeds"]
    assert (equal["seeds"], equal["mean"], equal["sd"]) == (3, 0.45, 0.0)
    assert (equal["low"], equal["high"]) == (None, None)
    write_pass(tmp_path / "base" / "gsm8k" / "seed-3", [C] * 12 + [W] * 8)
    (varied,) = collect(tmp_path)["seeds"]
    reach = 4.30265 * 0.0866025 / 3**0.5
    assert (varied["low"], varied["high"]) == pytest.approx((0.5 - reach, 0.5 + reach), rel=1e-4)


def test_table_when_the_terminal_has_80_columns_then_it_fits_and_no_name_is_cut() -> None:
    row = {"benchmark": "arithmetic", "n": 1000, "value": 0.921, "low": 0.903, "high": 0.936, "unknown": 0}
    base = {**row, "label": "base", "gain": None, "gain_low": None, "gain_high": None}
    trained = {**row, "label": "repo_det", "gain": 0.4, "gain_low": 0.367, "gain_high": 0.432}
    long = {**trained, "label": "repo_det-" + "with-a-very-long-name-" * 4}
    for rows, folds in (([base, trained], False), ([base, long], True)):
        console = Console(file=io.StringIO(), width=80)
        console.print(results_table({"rows": rows, "seeds": []}))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text and "no verdict" not in text and "metric" not in text
        assert all(len(line) <= 80 for line in text.splitlines())
        assert "Pass@1 (%)" in text and ("+40.0 [+36.7, +43.2]" in text) != folds
        names = "".join(line.split("│")[2].strip() for line in text.splitlines() if line.startswith("│"))
        assert names == "base" + rows[1]["label"]


def test_table_when_a_metric_of_the_harness_is_no_share_then_it_is_on_its_own_scale() -> None:
    row = {"benchmark": "t", "n": 12, "low": None, "high": None, "gain": None, "gain_low": None, "gain_high": None}
    rows = [
        row | {"label": "base", "metric": "f1", "value": 0.0},
        row | {"label": "dpo", "metric": "f1", "value": 0.5, "low": 0.25, "high": 0.75, "gain": 0.5},
        row | {"label": "base", "metric": "word_perplexity", "value": 0.9},
        row | {"label": "dpo", "metric": "word_perplexity", "value": 23.4, "low": 20, "high": 26.8, "gain": 22.5},
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(results_table({"rows": [], "seeds": [], "harness": rows}))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    cells = [[cell.strip() for cell in line.split("│")[3:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["f1 (%)", "12", "0.0", ""],
        ["f1 (%)", "12", "50.0 [25.0, 75.0]", "+50.0"],
        ["word_perplexity", "12", "0.90", ""],
        ["word_perplexity", "12", "23.40 [20.00, 26.80]", "+22.50"],
    ]


def test_collect_when_problems_differ_then_error_names_the_models(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no result\.json"):
        collect(tmp_path)
    write_pass(tmp_path / "base" / "gsm8k", [C, W])
    write_pass(tmp_path / "repo" / "gsm8k", [C, W, W])
    with pytest.raises(DataError, match="base and repo answered different problems: 0 only in the first, 1 only"):
        collect(tmp_path)
    write_pass(tmp_path / "repo" / "gsm8k", [C, W])
    write_pass(tmp_path / "repo" / "gsm8k" / "seed-41", [C])
    found = collect(tmp_path)
    assert found["seeds"] == []
    assert results_table(found | {"contaminated": ["sums: 1"]}).caption == "\n".join(["sums: 1", *found["left_out"]])
    assert found["left_out"] == [
        "gsm8k: seed-41 of repo not in the mean over seeds: greedy and seed-41 answered different problems: 1 only in "
        "the first, 0 only in the second, 0 with other text or gold answer"
    ]
