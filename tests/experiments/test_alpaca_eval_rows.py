"""Which published AlpacaEval models have rows with the difficulties of other instructions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from alpaca_eval_rows import incomplete, main, published_by, read_board, read_compact, table

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
