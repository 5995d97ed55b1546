"""Comparisons of made runs against hand-worked means, intervals, p-values, ranks and Holm's correction."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from made_runs import BENCHMARK, add_harness, made_run, prefer, rate
from regretless.core.errors import ConfigError
from regretless.studies.compare import compare
from regretless.studies.compared_runs import Run
from regretless.studies.comparison import Comparison, Decoding, Over, Table, TableCell, TableRow, records

N = 40


def right(count: int, n: int = N) -> list[bool]:
    return [index < count for index in range(n)]


def seeded(folder: Path, counts: Mapping[str, Sequence[int]], **recipe: Any) -> list[Run]:
    """A run for each training seed; correct answers of each method by seed, and 10 of the base model."""
    runs = []
    for seed in range(max(map(len, counts.values()))):
        greedy = {method: {BENCHMARK: right(own[seed])} for method, own in counts.items() if seed < len(own)}
        made = made_run(
            folder / f"seed-{seed}", {"base": {BENCHMARK: right(10)}, **greedy}, train={"seed": seed}, **recipe
        )
        runs.append(Run(made))
    return runs


def only(found: Comparison, decoding: Decoding = Decoding.GREEDY) -> Table:
    (table,) = [table for table in found.tables if table.decoding is decoding]
    return table


def cell(table: Table, method: str, variant: str = "", metric: str = "pass_at_1") -> TableCell:
    (column,) = [column for column in table.columns if column.metric == metric]
    return table.cells[TableRow(method, variant), column]


def test_one_run_when_compared_then_differences_are_paired_over_problems(tmp_path: Path) -> None:
    base = [True] * 48 + [False] * 2
    dpo = [True] * 36 + [False] * 12 + [True] * 2  # Newcombe 1998: 36 both, 12 and 2 one of them
    run = made_run(tmp_path / "run", {"base": {BENCHMARK: base}, "dpo": {BENCHMARK: dpo}, "repo": {BENCHMARK: base}})
    table = only(found := compare([Run(run)]))
    assert (table.model, table.over, table.n) == ("Tiny-1B", Over.PROBLEMS, 1)
    one = cell(table, "dpo")
    assert (one.value, one.sd, one.n, one.over) == (76.0, None, 50, "problems")
    versus = one.difference
    assert versus is not None
    assert (versus.value, versus.n, versus.test) == (pytest.approx(-20), 50, "exact McNemar")
    assert (round(versus.low or 0, 2), round(versus.high or 0, 2)) == (-34.04, -5.69)
    assert versus.p == pytest.approx(2 * sum(math.comb(14, k) for k in range(3)) / 2**14)
    assert versus.p_holm == pytest.approx(2 * versus.p)  # the smaller of two
    same = cell(table, "repo").difference
    assert same is not None and (same.p, same.p_holm) == (1.0, 1.0)
    assert found.comparisons == 2
    assert cell(table, "base").difference is None


def test_training_seeds_when_compared_then_mean_deviation_interval_and_paired_test_are_those_of_the_seeds(
    tmp_path: Path,
) -> None:
    dpo, repo = [20, 24, 22], [26, 25, 30]
    table = only(found := compare(seeded(tmp_path, {"dpo": dpo, "repo": repo}), "dpo"))
    assert (table.over, table.n) == (Over.TRAINING, 3)
    assert "3 training seeds" in table.caption and "data seed 0" in table.caption
    one = cell(table, "repo")
    # By hand: 65, 62.5 and 75 %: deviations -2.5, -5, 7.5; variance 87.5 / 2; t(0.975, 2) = 4.302653.
    assert (one.value, one.n) == (pytest.approx(67.5), 3)
    assert one.sd == pytest.approx(math.sqrt(87.5 / 2))
    assert one.high == pytest.approx(67.5 + 4.302653 * math.sqrt(87.5 / 2 / 3), abs=1e-4)
    versus = one.difference
    assert versus is not None
    expected = stats.ttest_rel([100 * count / N for count in repo], [100 * count / N for count in dpo])
    interval = expected.confidence_interval(0.95)
    assert (versus.value, versus.n, versus.over, versus.test) == (pytest.approx(12.5), 3, "training seeds", "paired t")
    assert (versus.p, versus.low, versus.high) == pytest.approx((expected.pvalue, interval.low, interval.high))
    # The base model has one value, and each method's difference to it is tested over the seeds.
    base = cell(table, "base")
    assert (base.value, base.sd, base.n) == (25.0, None, 1)
    reverse = cell(table, "base").difference
    assert reverse is not None and (reverse.value, reverse.n) == (pytest.approx(-30), 3)
    against = cell(only(compare(found.runs)), "repo").difference
    assert against is not None
    assert against.p == pytest.approx(stats.ttest_1samp([65 - 25, 62.5 - 25, 75 - 25], 0).pvalue)


def test_p_values_of_all_models_when_corrected_then_they_count_together(tmp_path: Path) -> None:
    counts = {"dpo": [20, 24, 22], "repo": [26, 25, 30]}
    runs = seeded(tmp_path / "a", counts)
    runs += [Run(run.path, model="Other") for run in seeded(tmp_path / "b", {**counts, "ipo": [24, 25, 21]})]
    found = compare(runs)
    p_values = sorted(row["p"] for row in records(found) if row["p"] is not None)
    assert found.comparisons == len(p_values) == 5
    smallest = min((row for row in records(found) if row["p"] is not None), key=lambda row: row["p"])
    assert smallest["p_holm"] == pytest.approx(5 * p_values[0])
    adjusted = [row["p_holm"] for row in sorted((r for r in records(found) if r["p"]), key=lambda row: row["p"])]
    assert adjusted == sorted(adjusted)


def test_seeds_of_different_kinds_when_compared_then_the_table_says_which(tmp_path: Path) -> None:
    def table(name: str, seeds: Sequence[tuple[int, int]]) -> Table:
        runs = []
        for number, (data, training) in enumerate(seeds):
            greedy = {"base": {BENCHMARK: right(10 + data)}, "dpo": {BENCHMARK: right(20 + number)}}
            made = made_run(tmp_path / name / str(number), greedy, seed=data, train={"seed": training})
            runs.append(Run(made))
        return only(compare(runs))

    data = table("data", [(0, 7), (1, 7)])
    assert (data.over, "2 data seeds" in data.caption, "training seed 7" in data.caption) == (Over.DATA, True, True)
    assert cell(data, "base").value == pytest.approx(100 * 10.5 / N)
    whole = table("whole", [(0, 0), (1, 1)])
    assert whole.over is Over.WHOLE and "seeds of data and training" in whole.caption
    # Two trainings on one data set are not independent: each data seed counts once.
    nested = table("nested", [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert (nested.over, nested.n) == (Over.NESTED, 2)
    assert [name for name, _, _ in cell(nested, "dpo").parts] == ["0/0", "0/1", "1/0", "1/1"]
    first, second = 100 * 20.5 / N, 100 * 22.5 / N
    assert cell(nested, "dpo").sd == pytest.approx(abs(second - first) / math.sqrt(2))
    versus = cell(nested, "dpo").difference
    assert versus is not None and (versus.n, versus.value) == (2, pytest.approx(100 * 11 / N))


def test_decoding_seeds_when_one_run_has_them_then_they_have_a_table_of_their_own(tmp_path: Path) -> None:
    sampled = {"base": {41: right(8), 42: right(12)}, "dpo": {41: right(20), 42: right(22)}}
    greedy = {label: {BENCHMARK: right(15)} for label in sampled}
    found = compare([Run(made_run(tmp_path / "a", greedy, sampled=sampled))])
    assert cell(only(found), "dpo").value == 37.5
    table = only(found, Decoding.SAMPLED)
    assert (table.over, table.n) == (Over.DECODING, 2)
    assert "2 decoding seeds" in table.caption and "nothing about other trainings" in table.caption
    one = cell(table, "dpo")
    assert (one.value, [value for _, value, _ in one.parts]) == (52.5, pytest.approx([50, 55]))
    assert one.difference is not None and (one.difference.value, one.difference.n) == (pytest.approx(27.5), 2)
    # With several trainings a run counts once, whatever the number of its decoding seeds.
    more = {label: {seed: right(sum(own) + 2) for seed, own in passes.items()} for label, passes in sampled.items()}
    other = made_run(tmp_path / "b", greedy, sampled=more, train={"seed": 1})
    both = only(compare([Run(tmp_path / "a"), Run(other)]), Decoding.SAMPLED)
    assert (both.over, cell(both, "dpo").n, cell(both, "dpo").value) == (Over.TRAINING, 2, pytest.approx(55))
    assert "each the mean over its decoding seeds" in both.caption


def test_ranks_when_methods_tie_then_they_share_them(tmp_path: Path) -> None:
    counts = {"base": 20, "dpo": 30, "ipo": 30, "kto": 20, "repo": 10}
    table = only(compare([Run(made_run(tmp_path / "a", {name: {BENCHMARK: right(n)} for name, n in counts.items()}))]))
    assert {name: cell(table, name).rank for name in counts} == {"base": 2, "dpo": 1, "ipo": 1, "kto": 2, "repo": None}
    near = made_run(tmp_path / "c", {name: {BENCHMARK: right(1)} for name in ("base", "dpo", "ipo")})
    for name, rating in {"base": 4.0, "dpo": 5.001, "ipo": 5.004}.items():
        rate(near, name, [rating, rating])
    table = only(compare([Run(near)]))
    assert [cell(table, name, metric="score").rank for name in ("base", "dpo", "ipo")] == [2, 1, 1]  # 5.00 both
    equal = made_run(tmp_path / "b", {name: {BENCHMARK: right(3)} for name in ("base", "dpo")})
    assert cell(only(compare([Run(equal)])), "dpo").rank is None


def test_seed_that_a_method_lacks_when_compared_then_common_seeds_are_paired_and_it_is_said(tmp_path: Path) -> None:
    runs = seeded(tmp_path, {"repo": [26, 25, 30, 29], "dpo": [20, 24, 22]})
    found = compare(runs, "repo")
    table = only(found)
    assert (cell(table, "repo").n, cell(table, "dpo").n) == (4, 3)
    versus = cell(table, "dpo").difference
    assert versus is not None and (versus.n, versus.value) == (3, pytest.approx(100 * (-6 - 1 - 8) / 3 / N))
    assert any("dpo lacks data seed 0 with training seed 3" in note for note in found.notes)
    # With one common seed, the problems are what is left to pair.
    last = only(compare([runs[0], runs[3]], "repo"))
    versus = cell(last, "dpo").difference
    assert versus is not None and (versus.n, versus.over) == (N, "problems")


def test_seeds_with_equal_differences_when_compared_then_no_certainty_is_made_of_it(tmp_path: Path) -> None:
    table = only(compare(seeded(tmp_path, {"dpo": [20, 24], "repo": [23, 27], "ipo": [20, 24]}), "dpo"))
    same, none = cell(table, "repo").difference, cell(table, "ipo").difference
    assert same is not None and none is not None
    assert (same.value, same.low, same.p, same.p_holm) == (pytest.approx(7.5), None, None, None)
    assert (none.value, none.low, none.p) == (0.0, None, 1.0)
    one = cell(only(compare(seeded(tmp_path / "equal", {"dpo": [20, 20]}))), "dpo")
    assert (one.sd, one.low, one.high) == (0.0, None, None)


def test_interval_over_two_seeds_when_wider_than_the_scale_then_it_ends_there(tmp_path: Path) -> None:
    # t(0.975, 1) = 12.706: means 95 and 5 ± 63.5 points, and their difference 90 ± 127 points.
    table = only(compare(seeded(tmp_path / "a", {"dpo": [0, 4], "repo": [40, 36]}), "dpo"))
    high, low = cell(table, "repo"), cell(table, "dpo")
    assert (high.value, high.high, low.value, low.low) == (95, 100, 5, 0)
    assert (high.low, low.high) == (pytest.approx(95 - 63.531, abs=1e-3), pytest.approx(5 + 63.531, abs=1e-3))
    versus = high.difference
    assert versus is not None and versus.value == pytest.approx(90) and versus.high == 100
    assert versus.low == pytest.approx(90 - 127.062, abs=1e-3)


def test_base_model_when_several_runs_evaluated_it_then_a_method_is_paired_with_the_one_of_its_run(
    tmp_path: Path,
) -> None:
    runs = [
        made_run(tmp_path / "a", {"base": {BENCHMARK: right(10)}, "dpo": {BENCHMARK: right(20)}}),
        made_run(tmp_path / "b", {"base": {BENCHMARK: right(12)}, "repo": {BENCHMARK: right(20)}}),
    ]
    found = compare([Run(run) for run in runs])
    versus = [cell(only(found), method).difference for method in ("dpo", "repo")]
    assert [one and one.value for one in versus] == pytest.approx([25, 20])
    assert cell(only(found), "base").value == pytest.approx(27.5)
    assert cell(only(found), "base").low is None
    assert any("several runs evaluated base with the same seeds" in note for note in found.notes)
    for run, count in zip(("c", "d"), (8, 12), strict=True):
        method = {"c": "dpo", "d": "repo"}[run]
        sampled = {"base": {41: right(count), 42: right(count + 2)}, method: {41: right(20), 42: right(20)}}
        made_run(tmp_path / run, {name: {BENCHMARK: right(10)} for name in ("base", method)}, sampled=sampled)
    table = only(compare([Run(tmp_path / "c"), Run(tmp_path / "d")]), Decoding.SAMPLED)
    base = cell(table, "base")
    assert (base.value, base.n, len(base.parts)) == (pytest.approx(27.5), 2, 4)


def test_variants_when_runs_differ_in_settings_alone_then_they_are_rows_and_a_variant_can_be_the_baseline(
    tmp_path: Path,
) -> None:
    base = {"base": {BENCHMARK: right(10)}}
    greedy = {**base, "dpo": {BENCHMARK: right(20)}}
    plain = made_run(tmp_path / "plain", greedy)
    better = {**greedy, "dpo": {BENCHMARK: right(25)}}
    masked = made_run(tmp_path / "masked", better, mask={"count": 100, "lengths": [16, 32], "seed": 0})
    table = only(compare([Run(plain), Run(masked)]))
    assert [row.label for row in table.rows] == ["base", "dpo", "dpo (mask)"]
    counts = [Run(made_run(tmp_path / str(n), better, mask={"count": n, "lengths": [16]})) for n in (100, 200)]
    assert [run.variant for run in compare(counts).runs] == ["mask.count=100", "mask.count=200"]
    methods = [{"dpo": {"beta": beta}, "ipo": {"beta": 1 - beta}} for beta in (0.1, 0.2)]
    betas = [Run(made_run(tmp_path / str(i), better, train={"methods": one})) for i, one in enumerate(methods)]
    assert [run.variant for run in compare(betas).runs] == [f"train.methods.dpo.beta={beta}" for beta in (0.1, 0.2)]
    # No mean over the seeds of runs that differ in more than their seeds; methods may have their own settings.
    two = [made_run(tmp_path / f"rate-{n}", better, train={"seed": n, "learning_rate": (1 + n) / 1e4}) for n in (0, 1)]
    table = only(compare([Run(run) for run in two]))
    assert [row.label for row in table.rows] == ["base", *(f"dpo (train.learning_rate=0.000{n})" for n in (1, 2))]
    assert "over 1 training seed," in table.caption and cell(table, "dpo", "train.learning_rate=0.0001").n == 1
    other = made_run(tmp_path / "ipo", {**base, "ipo": {BENCHMARK: right(25)}}, train={"learning_rate": 1.0})
    assert [row.label for row in only(compare([Run(two[0]), Run(other)])).rows] == ["base", "dpo", "ipo"]
    shown = [
        made_run(tmp_path / f"{n}", better, train={"seed": n, "run_name": f"seed-{n}"}, analyze={"pairs": 10 + n})
        for n in (0, 1)
    ]
    assert [run.variant for run in compare([Run(run) for run in shown]).runs] == ["", ""]
    table = only(compare([Run(plain, variant="none"), Run(masked, variant="masked")], "none"))
    versus = cell(table, "dpo", "masked").difference
    assert versus is not None and (versus.value, versus.baseline) == (12.5, TableRow("dpo", "none"))
    assert cell(table, "dpo", "none").difference is None
    runs = [
        Run(
            made_run(tmp_path / f"{mask}-{beta}", {"dpo": {BENCHMARK: right(20 + 2 * mask + beta)}, **base}),
            variant=text,
        )
        for mask in (0, 1)
        for beta in (0, 1)
        if (text := f"mask={mask}, beta={beta}")
    ]
    table = only(compare(runs, "mask=0"))
    for beta in (0, 1):
        versus = cell(table, "dpo", f"mask=1, beta={beta}").difference
        assert versus is not None and versus.value == pytest.approx(5)
        assert versus.baseline == TableRow("dpo", f"mask=0, beta={beta}")


def test_unknown_baseline_when_named_then_the_methods_are_listed(tmp_path: Path) -> None:
    run = Run(made_run(tmp_path / "a", {"base": {BENCHMARK: right(1)}, "dpo": {BENCHMARK: right(2)}}))
    with pytest.raises(ConfigError, match="--baseline sft: expected one of base; dpo"):
        compare([run], "sft")


def test_chat_metrics_when_compared_then_questions_are_paired_and_unknown_values_stay_unknown(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", {"base": {BENCHMARK: right(3)}, "dpo": {BENCHMARK: right(4)}})
    ratings = {"base": [2.0, 5.0, 6.0, 3.0], "dpo": [4.0, 6.0, 6.0, 7.0]}
    for label, found in ratings.items():
        rate(run, label, found)
        prefer(run, label, [0.2, 0.4, 0.9, 0.7] if label == "base" else [0.5, 0.6, 0.8, 0.9])
    table = only(compare([Run(run)]))
    score = cell(table, "dpo", metric="score")
    assert (score.value, score.n) == (5.75, 4)
    expected = stats.ttest_rel(ratings["dpo"], ratings["base"])
    versus = score.difference
    assert versus is not None and (versus.n, versus.over, versus.test) == (4, "questions", "paired t")
    assert (versus.value, versus.p) == (1.75, pytest.approx(expected.pvalue))
    assert versus.low == pytest.approx(expected.confidence_interval(0.95).low)
    controlled = cell(table, "dpo", metric="length_controlled_win_rate")
    assert (controlled.value, controlled.low, controlled.rank, controlled.difference) == (None, None, None, None)
    assert cell(table, "dpo", metric="win_rate").value == pytest.approx(70)


def test_runs_when_they_differ_in_the_judge_alone_then_each_judge_has_a_column(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / judge, {"base": {}, "dpo": {}}) for judge in ("one", "two")]
    for run, ratings in zip(runs, ([4.0, 6.0], [7.0, 9.0]), strict=True):
        rate(run, "base", [3.0, 4.0], judge=run.name)
        rate(run, "dpo", ratings, judge=run.name)
    table = only(compare([Run(run) for run in runs]))
    assert {column.judge: table.cells[row, column].value for row, column in table.cells if row.method == "dpo"} == {
        "one": 5.0,
        "two": 8.0,
    }
    for run in runs:
        prefer(run, "base", [0.2, 0.4])
        prefer(run, "dpo", [0.5, 0.6])
    with pytest.raises(ConfigError, match=r"on alpaca .* leave one out; to compare judges, give one run both of them"):
        compare([Run(run) for run in runs])


def test_tasks_of_the_harness_when_compared_then_they_are_columns_paired_by_problem(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", {"base": {BENCHMARK: right(3)}, "dpo": {BENCHMARK: right(4)}})
    answers = {"base": [0.0] * 9 + [1.0], "dpo": [1.0] * 8 + [0.0, 1.0]}
    for label, given in answers.items():
        scores = {f"{number}-hash": value for number, value in enumerate(given)}
        add_harness(run, label, {"ifeval|strict|none": scores, "ifeval|bleu|none": dict.fromkeys(scores, 0.5)})
    found = compare([Run(run)])
    strict = cell(only(found), "dpo", metric="strict")
    assert (strict.value, strict.n, strict.rank) == (90.0, 10, 1)
    versus = strict.difference
    assert versus is not None and (versus.value, versus.n, versus.test) == (80.0, 10, "exact McNemar")
    assert versus.p == pytest.approx(stats.binomtest(8, 8).pvalue)
    (note,) = [note for note in found.notes if "ifeval" in note]
    assert note.startswith(
        "ifeval: not in the tables: bleu; a column needs scores of 0 or 1 for all problems and models"
    )
    assert len(only(found).columns) == 2


def test_metric_of_the_harness_when_of_one_model_alone_it_is_a_share_or_less_is_better_then_it_has_no_column(
    tmp_path: Path,
) -> None:
    run = made_run(tmp_path / "a", {"base": {BENCHMARK: right(3)}, "dpo": {BENCHMARK: right(4)}})
    for label, f1 in {"base": 0.0, "dpo": 0.5}.items():
        scores = {f"qa|{metric}|none": {"0-hash": 1.0, "1-hash": 0.0} for metric in ("hit", "miss")}
        add_harness(run, label, {**scores, "qa|f1|none": {"0-hash": f1, "1-hash": 0.0}})
        raw = run / "evaluate" / label / "harness" / "raw"
        raw.mkdir()
        directions = {"qa": {"hit": True, "miss": False, "f1": True}}
        (raw / "results_1.json").write_text(json.dumps({"higher_is_better": directions}), encoding="utf-8")
    found = compare([Run(run)])
    assert [column.metric for column in only(found).columns if column.benchmark == "qa"] == ["hit"]
    (note,) = [note for note in found.notes if note.startswith("qa")]
    assert "not in the tables: f1, miss;" in note
