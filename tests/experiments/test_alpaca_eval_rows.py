"""Which published AlpacaEval models have rows with the difficulties of other instructions."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from alpaca_eval_rows import incomplete, main, published_by, read_annotations, read_board, read_compact, table

from regretless.core.errors import DataError
from regretless.evaluation.chat.alpaca_eval import win_rates
from regretless.evaluation.chat.length_control import predict, read_gamed_baselines


def test_published_models_with_rows_left_out_are_found_named_and_fitted_anew(shared: Path) -> None:
    data = shared / "data" / "alpaca_eval"
    gamed = read_gamed_baselines(data / "gamed_baselines_reconstructed.csv")
    board = read_board(data / "leaderboard_subset.csv", data / "glm_weights_subset.csv")
    assert len(board.rows) == 20
    rows = {row[0]: row[1:] for row in table(board, gamed, read_compact(data / "judgments_compact.csv"))}
    assert {name: row[:3] for name, row in rows.items()} == {
        "alpaca-7b_concise": ["804", "4.47", "position"],
        "alpaca-7b_verbose": ["802", "6.82", "position"],
    }
    for name, off in {"alpaca-7b_concise": 0.26, "alpaca-7b_verbose": -1.58}.items():
        by_position, _, found = map(float, rows[name][3:])
        assert by_position == pytest.approx(board.win_rates[name], abs=0.2), "the fit itself is near the published one"
        assert found == pytest.approx(off, abs=0.05)


def test_models_whose_published_number_is_right_or_cannot_be_told_are_not_called_misaligned(shared: Path) -> None:
    data = shared / "data" / "alpaca_eval"
    gamed = read_gamed_baselines(data / "gamed_baselines_reconstructed.csv")
    board = read_board(data / "leaderboard_subset.csv", data / "glm_weights_subset.csv")
    name = "alpaca-7b_verbose"
    difficulties = np.array([gamed.difficulty[index] for index in range(805)])
    right = {name: float(predict(board.coefficients[name], difficulties).mean())}
    assert published_by(replace(board, win_rates=right), name, gamed) == "instruction"
    assert published_by(replace(board, win_rates={name: 5.0}), name, gamed) == "neither"
    assert published_by(replace(board, coefficients={}), name, gamed) == "no coefficients"
    assert incomplete(replace(board, rows={name: 805}), 805) == []


def test_annotations_when_rows_are_missing_or_failed_keep_the_others_in_place(shared: Path, tmp_path: Path) -> None:
    data = shared / "data" / "alpaca_eval"
    gamed = read_gamed_baselines(data / "gamed_baselines_reconstructed.csv")
    questions = str(data / "alpaca_eval_gpt4_baseline.json")
    source = data / "annotations" / "gpt-3.5-turbo-1106_concise.json"
    whole = read_annotations(source, questions)
    with (data / "leaderboard_subset.csv").open(newline="") as handle:
        published = next(row for row in csv.DictReader(handle) if row[""] == "gpt-3.5-turbo-1106_concise")
    result = win_rates(whole, gamed, rounds=2)
    assert result["metrics"]["win_rate"]["value"] == pytest.approx(float(published["win_rate"]), abs=1e-9)
    assert int(result["mean_length"]) == int(published["avg_length"])
    annotations = json.loads(source.read_text())
    annotations[7]["preference"] = None
    annotations[8]["preference"] = 0
    annotations[9]["preference"] = math.pi
    (tmp_path / "annotations.json").write_text(json.dumps(annotations[5:]))
    rows = read_annotations(tmp_path / "annotations.json", questions)
    assert [row.index for row in rows] == list(range(5, 805))
    assert [row.preference for row in rows[2:5]] == [None, 0.5, None]
    assert rows[10:] == whole[15:]
    result = win_rates(rows, gamed, rounds=2)
    assert (result["questions"], result["failed"]) == (800, {"no preference": 2})
    assert {metric["n"] for metric in result["metrics"].values()} == {798}
    (tmp_path / "annotations.json").write_text(json.dumps([annotations[3], annotations[3]]))
    with pytest.raises(DataError, match=r"annotations\.json:2: instruction not in .*, or a duplicate"):
        read_annotations(tmp_path / "annotations.json", questions)


@pytest.mark.parametrize("options", [[], ["--gamed", "gamed.csv"]])
def test_script_when_a_file_is_missing_then_one_line_names_it(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gamed.csv").write_text(
        "index,std_delta_len,instruction_difficulty,preference,len_1\n0,0.1,0.2,0.3,4\n", encoding="utf-8"
    )
    monkeypatch.setattr("sys.argv", ["alpaca_eval_rows.py", *options])
    with pytest.raises(SystemExit, match="2"):
        main()
    missing = "leaderboard_subset.csv" if options else "gamed_baselines_reconstructed.csv"
    said = capsys.readouterr().err.splitlines()[-1]
    assert missing in said and "name the folder that holds the tables" in said
