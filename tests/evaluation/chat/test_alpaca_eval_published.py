"""AlpacaEval 2 on published judgments: raw and length-controlled win rates come out as on the leaderboard."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from regretless.core.errors import DataError
from regretless.evaluation.chat.alpaca_eval import JudgedAnswer, win_rates
from regretless.evaluation.chat.length_control import (
    Coefficients,
    GamedBaselines,
    predict,
    read_gamed_baselines,
    standardized,
)
from regretless.evaluation.chat.verdicts import two_token_preference

MISALIGNED = {"alpaca-7b_concise": 0.16, "alpaca-7b_verbose": 1.6}
"""Models with rows left out, whose published numbers took each later row's difficulty from its position among the rows
that are there, and how far they are therefore from the right ones, in points."""
REFERENCE = "gpt4_1106_preview"


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    return shared / "data" / "alpaca_eval"


@pytest.fixture(scope="module")
def gamed(data: Path) -> GamedBaselines:
    return read_gamed_baselines(data / "gamed_baselines_reconstructed.csv")


@pytest.fixture(scope="module")
def leaderboard(data: Path) -> dict[str, dict[str, str]]:
    return table(data / "leaderboard_subset.csv")


def table(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as handle:
        return {row[""]: row for row in csv.DictReader(handle)}


def comparisons(data: Path, place: str) -> dict[str, list[JudgedAnswer]]:
    """Published judgments by model; `place` is the column that says which instruction a row belongs to."""
    found: dict[str, list[JudgedAnswer]] = {}
    with (data / "judgments_compact.csv").open(newline="") as handle:
        for row in csv.DictReader(handle):
            given = float(row["preference"])
            lengths = int(row["len_1"]), int(row["len_2"])
            found.setdefault(row["model"], []).append(
                JudgedAnswer(int(row[place]), given - 1 if given else 0.5, *lengths)
            )
    return found


def test_raw_win_rates_of_published_judgments_are_the_published_ones(
    data: Path, leaderboard: Mapping[str, Mapping[str, str]]
) -> None:
    found = comparisons(data, "index")
    assert found.keys() == leaderboard.keys()
    for model, rows in found.items():
        raw, published = win_rates(rows, None)["metrics"]["win_rate"], leaderboard[model]
        assert raw["value"] == pytest.approx(float(published["win_rate"]), abs=1e-9), model
        assert raw["standard_error"] == pytest.approx(float(published["standard_error"]), abs=1e-9), model
        counts = [int(published[name]) for name in ("n_total", "n_wins", "n_wins_base", "n_draws")]
        assert [raw["n"], raw["wins"], raw["losses"], raw["draws"]] == counts, model


def test_length_controlled_win_rates_with_published_coefficients_are_the_published_ones(
    data: Path, gamed: GamedBaselines, leaderboard: Mapping[str, Mapping[str, str]]
) -> None:
    weights = table(data / "glm_weights_subset.csv")
    for place in ("index", "pos"):
        for model, rows in comparisons(data, place).items():
            values = [float(value) for name, value in weights[model].items() if name]
            predicted = predict(Coefficients(*values), np.array([gamed.difficulty[row.index] for row in rows]))
            off = abs(float(predicted.mean()) - float(leaderboard[model]["length_controlled_winrate"]))
            if place == "pos" or model not in MISALIGNED:
                assert off < 1e-9, (model, place)
            else:
                assert 1e-4 < off < 0.04, "the right rows move even the prediction of the misaligned models"


def test_length_controlled_win_rates_when_refitted_are_near_the_published_ones(
    data: Path, gamed: GamedBaselines, leaderboard: Mapping[str, Mapping[str, str]]
) -> None:
    by_index, by_position = comparisons(data, "index"), comparisons(data, "pos")
    for model in leaderboard.keys() - {REFERENCE}:
        published = float(leaderboard[model]["length_controlled_winrate"])
        rows = (by_position if model in MISALIGNED else by_index)[model]
        # Of the rows as they are: some are misaligned on purpose.
        lengths = {row.index: row.length_1 for row in rows}
        fitting = GamedBaselines(gamed.features, gamed.preferences, gamed.difficulty, lengths)
        controlled = win_rates(rows, fitting, rounds=2)["metrics"]["length_controlled_win_rate"]
        assert controlled["value"] == pytest.approx(published, abs=0.31), model
        assert controlled["n"] == len(rows)
        if model in MISALIGNED:
            right = win_rates(by_index[model], gamed, rounds=2)["metrics"]["length_controlled_win_rate"]["value"]
            assert abs(right - published) == pytest.approx(MISALIGNED[model], abs=0.12), model
        if published_error := leaderboard[model]["lc_standard_error"]:
            error = controlled["prediction_standard_error"]
            assert error == pytest.approx(float(published_error), abs=0.002), model


def test_length_controlled_interval_tells_of_the_fit_and_not_only_of_its_predictions(
    data: Path, gamed: GamedBaselines
) -> None:
    rows = comparisons(data, "index")["FuseChat-Llama-3.1-8B-Instruct"]
    controlled = win_rates(rows, gamed, rounds=100)["metrics"]["length_controlled_win_rate"]
    assert controlled["standard_error"] > 1.8 * controlled["prediction_standard_error"]
    assert controlled["low"] < controlled["value"] < controlled["high"]
    assert controlled == win_rates(rows, gamed, rounds=100)["metrics"]["length_controlled_win_rate"], "seeded"


def test_win_rate_when_instructions_are_few_then_its_interval_stays_possible() -> None:
    outcomes = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    rate = win_rates([JudgedAnswer(number, one, 10, 10) for number, one in enumerate(outcomes)], None)["metrics"]
    assert rate["win_rate"]["standard_error"] == pytest.approx(100 * math.sqrt(2 / 9 * 6 / 5 / 6)), "as published"
    assert (rate["win_rate"]["low"], rate["win_rate"]["high"]) == (0, pytest.approx(87.53, abs=0.01))
    equal = win_rates([JudgedAnswer(number, 0.5, 10, 10) for number in range(6)], None)["metrics"]["win_rate"]
    assert (equal["value"], equal["low"], equal["high"]) == (50, None, None)


def test_reference_against_itself_has_no_length_controlled_win_rate(data: Path, gamed: GamedBaselines) -> None:
    metrics = win_rates(comparisons(data, "index")[REFERENCE], gamed)["metrics"]
    assert (metrics["win_rate"]["value"], metrics["win_rate"]["draws"]) == (50.0, 805)
    assert metrics["length_controlled_win_rate"]["value"] is None
    assert "the same length" in metrics["length_controlled_win_rate"]["problem"]


def test_length_controlled_win_rate_when_the_penalty_leaves_no_coefficient_is_unknown() -> None:
    indices = range(10)
    gamed = GamedBaselines(
        np.zeros((0, 3)), np.zeros(0), {index: index % 3 - 1.0 for index in indices}, dict.fromkeys(indices, 10)
    )
    rows = [JudgedAnswer(index, (0.9, 0.0)[index % 2], 10, 10 + index % 4) for index in indices]
    metrics = win_rates(rows, gamed, rounds=20)["metrics"]
    assert metrics["win_rate"]["value"] == pytest.approx(45)
    assert metrics["length_controlled_win_rate"] == {
        "value": None,
        "standard_error": None,
        "low": None,
        "high": None,
        "n": 10,
        "problem": "undetermined: the penalty that cross-validation chose removed both difficulty and constant",
    }


def test_difficulties_when_they_belong_to_another_order_are_refused(data: Path, gamed: GamedBaselines) -> None:
    rows = comparisons(data, "pos")["alpaca-7b_verbose"]
    with pytest.raises(DataError, match=r"0 instruction\(s\) without a difficulty, \d{3} with a reference of another"):
        win_rates(rows, gamed)
    beyond = [JudgedAnswer(2000, 0.5, 10, 20), JudgedAnswer(1, 0.5, 3394, 20)]
    with pytest.raises(DataError, match=r"1 instruction\(s\) without a difficulty, 0 with"):
        win_rates(beyond, gamed)
    unknown = GamedBaselines(gamed.features, gamed.preferences, gamed.difficulty, {})
    with pytest.raises(DataError, match=r"0 instruction\(s\) without a difficulty, 805 with"):
        win_rates(comparisons(data, "index")["phi-2-sft"], unknown)


def test_gamed_baselines_when_they_have_no_lengths_are_read_with_the_published_questions_alone(
    data: Path, tmp_path: Path, gamed: GamedBaselines
) -> None:
    def written(name: str, rows: Sequence[Mapping[str, str]]) -> Path:
        with (tmp_path / name).open("w", newline="") as handle:
            writer = csv.DictWriter(handle, [key for key in rows[0] if key != "len_1"], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        return tmp_path / name

    with (data / "gamed_baselines_reconstructed.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    bare, published = written("df_gamed.csv", rows), data / "alpaca_eval_gpt4_baseline.json"
    found = read_gamed_baselines(bare, str(published))
    assert found.reference_lengths == gamed.reference_lengths
    assert [found.reference_lengths[index] for index in (0, 1)] == [2104, 3394]
    questions = json.loads(published.read_text())
    others = {
        "shuffled": questions[1:] + questions[:1],
        "fewer": questions[:-1],
        "rewritten": [{**questions[0], "output": "yes"}, *questions[1:]],
        "bare": [{"instruction": row["instruction"]} for row in questions],
    }
    for name, content in others.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=rf"df_gamed\.csv: no column len_1 .*instructions of .*{name}\.json"):
            read_gamed_baselines(bare, str(tmp_path / f"{name}.json"))
    for path, given in (
        (bare, None),
        (written("some.csv", [row for row in rows if row["index"] != "804"]), str(published)),
    ):
        with pytest.raises(DataError, match=r"no column len_1 .*; add the column, or use AlpacaEval's own two files"):
            read_gamed_baselines(path, given)


def test_length_differences_are_over_their_sample_standard_deviation(data: Path) -> None:
    with (data / "gamed_baselines_reconstructed.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    for model in {row["model"] for row in rows}:
        lengths = [[float(row[name]) for row in rows if row["model"] == model] for name in ("len_1", "len_2")]
        found = standardized(*map(np.array, lengths))
        published = [float(row["std_delta_len"]) for row in rows if row["model"] == model]
        assert found == pytest.approx(np.array(published), abs=1e-9)


def test_preference_from_the_judges_tokens_is_the_published_one(data: Path) -> None:
    annotations = json.loads((data / "annotations" / "gpt-3.5-turbo-1106_concise.json").read_text())
    rows = [row for row in annotations if row["raw_completion"]]
    assert len(rows) == 801
    for row in rows:
        first = row["raw_completion"]["logprobs"]["content"][0]
        top = [(entry["token"], entry["logprob"]) for entry in first["top_logprobs"]]
        # Which name the model had is not recorded: one of the two. In four replies it leaves out " m" or " M", of
        # about 1e-8.
        off = [abs(1 + two_token_preference(top, *names, 5) - row["preference"]) for names in (("m", "M"), ("M", "m"))]
        assert min(off) < 2e-8
