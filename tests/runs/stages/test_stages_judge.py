"""The judge in a recipe and on the command line, over real HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from judge_helpers import judge_by, last_digit, write_responses
from regretless.cli.app import main
from regretless.data.responses import read_responses
from regretless.data.rows import read_rows
from regretless.runs.pipeline import run_recipe
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import parse_recipe
from scripted_server import serving


def texts(number: int) -> list[str]:
    return [f"a {number + 1}", "b 5", "c 1", f"d {number + 1}"]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def test_recipe_with_a_judge_when_run_twice_then_pairs_are_best_against_worse_and_nothing_is_asked_again(
    tmp_path: Path,
) -> None:
    responses = write_responses(tmp_path / "in.parquet", 3, texts)
    with serving(judge_by(last_digit)) as server:
        recipe = {
            "name": "judged",
            "output_dir": str(tmp_path / "run"),
            "responses": str(responses),
            "judge": {"model": "judge-1", "server": {"base_url": server.url, "retry_seconds": 0.01}},
            "pair": {"rule": "best_vs_random"},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        assert call("run", str(path)) == 0
        asked = len(server.requests)
        assert asked == 3 * 4  # prompts times aspects
        assert call("run", str(path)) == 0
        assert len(server.requests) == asked
    pairs = [row for _, row in read_rows(tmp_path / "run/pair/pairs.parquet") if isinstance(row, dict)]
    assert len(pairs) == 3
    for pair in pairs:
        assert pair["chosen"][0]["content"] == "b 5"
        assert pair["chosen_score"] == 5 > pair["rejected_score"]


def test_finished_judge_when_its_key_is_gone_then_only_other_settings_or_responses_need_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = write_responses(tmp_path / "in.parquet", 1, texts)
    with serving(judge_by(last_digit)) as server:
        judge = {"model": "judge-1", "server": {"base_url": server.url, "api_key_env": "KEY_OF_THE_JUDGE"}}
        values = {"name": "x", "output_dir": str(tmp_path / "run"), "responses": str(responses), "judge": judge}
        monkeypatch.setenv("KEY_OF_THE_JUDGE", "secret")
        run_recipe(parse_recipe(values, "x"))
    monkeypatch.delenv("KEY_OF_THE_JUDGE")
    assert recipe_problems(parse_recipe(values, "x")) == []
    other = {**values, "judge": {**judge, "model": "judge-2"}}
    (problem,) = recipe_problems(parse_recipe(other, "x"))
    assert problem.startswith("judge.server: ") and "KEY_OF_THE_JUDGE" in problem
    write_responses(responses, 2, texts)
    assert recipe_problems(parse_recipe(values, "x")) == [problem]


def test_judge_verb_when_given_files_then_scores_and_replies_stay(tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "in.parquet", 2, texts)
    output = tmp_path / "scored.parquet"
    with serving(judge_by(last_digit)) as server:
        settings = ["model=judge-1", f"server.base_url={server.url}"]
        flags = ["--responses", str(responses), "--output", str(output)]
        assert call("judge", *flags, *settings) == 0
        asked = len(server.requests)
        output.unlink()
        assert call("judge", *flags, *settings) == 0
        assert len(server.requests) == asked == 8
    rows, refused = read_responses(output)
    assert [row.score for row in rows] == [1, 5, 1, 1, 2, 5, 1, 2]
    assert not refused
