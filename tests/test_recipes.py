"""The recipes in recipes/: all parse and say how to start them; one of each kind runs shrunk, judges included."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from regretless.core.files import read_json
from regretless.data.responses import read_responses
from regretless.objectives import OBJECTIVES, build
from regretless.runs.miniature import smoke_recipe, surroundings
from regretless.runs.pipeline import between, run_recipe
from regretless.runs.recipe import Recipe, load_recipe
from regretless.workflow.run_folder import RunFolder

PROJECT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (PROJECT / "recipes").rglob("*.yaml") if path.parent.name != "base")
NAMES = [path.relative_to(PROJECT).as_posix() for path in RECIPES]
KINDS = {
    path if path.parent.name == "recipes" else (path.stem[:4], "qlora" in path.stem): path
    for path in RECIPES
    # Tests of their own ask judges, and train every method on Qwen3. The miniature of `claims` is the quickstart's.
    if "ultrafeedback" not in path.parent.name and path.stem not in ("qwen3-1.7b", "qwen3-4b", "claims")
}
"""One recipe of each family of models, and those without one; the others are run by `make test-extended`."""
PAPER_METHODS = ("repo", "repo_det", "dpo", "ipo", "rpo", "kto", "tdpo")
"""The methods whose settings the paper states."""


def smoke(path: Path, folder: Path, *overrides: str) -> Recipe:
    return smoke_recipe(load_recipe(path, overrides)).model_copy(update={"output_dir": str(folder)})


def run_judged(recipe: Recipe) -> tuple[RunFolder, Counter[str]]:
    """Run a recipe; what came of it, and the answers of the local judge by kind."""
    with surroundings(recipe) as judge:
        return run_recipe(recipe), Counter() if judge is None else judge.asked


def test_recipes_when_listed_then_every_data_set_and_model_of_the_paper_is_there() -> None:
    models = ("qwen3-1.7b", "qwen3-4b", "llama-3.1-8b", "llama-3.1-8b-instruct", "llama-3.2-1b", "gemma-2-2b")
    expected = {"recipes/quickstart.yaml", *(f"recipes/math/{model}.yaml" for model in models)}
    expected |= {f"recipes/ultrafeedback/{model}.yaml" for model in models[:2]}
    assert expected <= set(NAMES)


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_recipe_when_parsed_then_it_parses_with_every_method_and_names_its_launch_command(path: Path) -> None:
    name = path.relative_to(PROJECT).as_posix()
    assert f"#   regretless run {name}" in path.read_text(encoding="utf-8")
    for method in OBJECTIVES:
        train = load_recipe(path, [f"train.objective={method}"]).train
        assert train is not None
        stated = "beta" in train.split_for(method)[0]
        assert stated or method not in PAPER_METHODS, f"{name} leaves {method} to its defaults"
    # An η of 0.2 is that of the mean; with the sum it would weigh some hundred times β as much.
    likelihood = load_recipe(path, ["train.objective=rpo"]).train
    assert likelihood is not None
    assert likelihood.split_for("rpo")[0].items() >= {"eta": 0.2, "reduction": "mean"}.items()


def test_batch_of_kto_in_the_released_scripts_when_taken_over_then_its_responses_are_pairs_of_two() -> None:
    # Their batch sizes, of single responses for KTO and of pairs for the others: 128 on Llama and in the full sweep; in
    # the other scripts for Qwen 64 for KTO and TDPO.
    for path in RECIPES:
        if path.parent.name.endswith(("-released", "-full-sweep")):
            train = load_recipe(path).train
            assert train is not None
            sizes = [train.step_pairs(name, 1) for name in ("kto", "tdpo", "dpo")]
            equal = path.stem.startswith("llama") or path.parent.name.endswith("-full-sweep")
            assert sizes == ([64, 128, 128] if equal else [32, 64, 128]), path


@pytest.mark.parametrize(
    ("folder", "rates", "rank"), [("math-released", {5e-7, 5e-6}, 32), ("math-full-sweep", {5e-6}, 64)]
)
def test_scripts_of_the_authors_when_taken_over_then_the_full_sweep_has_one_rate_and_the_papers_rank(
    folder: str, rates: set[float], rank: int
) -> None:
    train = load_recipe(PROJECT / "recipes" / folder / "qwen3-4b.yaml").train
    assert train is not None and train.lora is not None
    found = {name: train.values_for(name)["learning_rate"] for name in PAPER_METHODS}
    assert set(found.values()) == rates and found["tdpo"] == 5e-6 and found["repo"] == found["dpo"] == min(rates)
    assert (train.lora.r, train.lora.alpha) == (rank, 64)
    assert [train.split_for(name)[0]["beta"] for name in PAPER_METHODS] == [1.0, 1.0, 0.1, 0.01, 0.5, 0.01, 0.1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=[] if path in KINDS.values() else pytest.mark.extended)
        for path, name in zip(RECIPES, NAMES, strict=True)
    ],
)
def test_recipe_when_run_small_then_it_goes_from_prompts_to_a_report(path: Path, tmp_path: Path) -> None:
    recipe = smoke(path, tmp_path / "run")
    _, asked = run_judged(recipe)
    assert recipe.train is not None
    for objective in recipe.train.objectives:
        assert read_json(tmp_path / "run" / "train" / objective / "trainer_state.json")["global_step"] == 2
    if recipe.evaluate is not None:
        results = read_json(tmp_path / "run" / "evaluate" / "results.json")
        labels = ("base", *recipe.train.objectives)
        for kind, benchmarks in (("rows", recipe.evaluate.benchmarks), ("chat", recipe.evaluate.chat)):
            found = {(row["benchmark"], row["label"]) for row in results[kind]}
            assert found == {(name, label) for name in benchmarks for label in labels}
        whole = [row for row in results["chat"] if not row["metric"].startswith("category_")]
        assert {row["n"] for row in [*results["rows"], *whole]} == {8}
        for name in recipe.evaluate.benchmarks:
            answers, _ = read_responses(tmp_path / f"run/evaluate/samples/base/{name}/greedy/responses.parquet")
            penalties = {json.loads(answer.sampling or "")["repetition_penalty"] for answer in answers}
            assert penalties == {1.05 if path.parent.name in ("math-released", "math-full-sweep") else 1.0}
    assert bool(asked) == (recipe.judge is not None)
    assert (tmp_path / "run" / "report" / "report.html").stat().st_size > 10_000


@pytest.mark.everyday
@pytest.mark.slow
def test_recipe_with_judges_when_run_small_then_each_is_asked_once_and_a_repeat_asks_nothing(tmp_path: Path) -> None:
    path = PROJECT / "recipes" / "ultrafeedback" / "qwen3-4b.yaml"
    recipe = smoke(path, tmp_path / "run", "train.objective=[repo,dpo]", "train.learning_rate=0.1")
    folder, asked = run_judged(recipe)
    rows, _ = read_responses(tmp_path / "run" / "judge" / "responses.parquet")
    writers = Counter((row.prompt_id, row.response_id.split("-")[-2]) for row in rows)
    assert len(writers) == len(rows) == 32 * 4, "one response of each of the four models to each prompt"
    assert len({row.model for row in rows}) == 2 and all(row.logps and row.prompt[0] for row in rows)
    assert len({row.score for row in rows}) > 5, "scores vary"
    pairs = folder.outcomes["pair"].summary
    assert pairs["pairs"] > 20 and pairs["pairs_without_logps"] == 0

    # Prompts times aspects; then instructions, both orders, both turns and two judges for them, of three models.
    assert asked["ratings"] == folder.outcomes["judge"].summary["requests"] == 32 * 4
    assert (asked["preferences"], asked["verdicts"], asked["grades"]) == (3 * 8, 3 * 2 * 8, 3 * 2 * 2 * 8)
    rows = read_json(tmp_path / "run" / "evaluate" / "results.json")["chat"]
    counts = {(row["benchmark"], row["label"]): row["requests"] for row in rows}
    assert sum(counts.values()) == asked.total() - asked["ratings"]
    metrics = {(row["benchmark"], row["metric"]): row for row in rows if row["label"] == "repo"}
    for name, metric in (
        *(("alpaca_eval", "length_controlled_win_rate"), ("alpaca_eval", "win_rate"), ("arena_hard", "win_rate")),
        *(("mt_bench", "score"), ("mt_bench_gpt5", "score")),
    ):
        row = metrics[name, metric]
        assert (row["failed"], row["n"]) == (0, 8)
        # Eight judgments at random may leave the length-controlled win rate undetermined.
        if row["value"] is not None or metric != "length_controlled_win_rate":
            assert row["low"] <= row["value"] <= row["high"] and row["standard_error"] >= 0
    # Grades are random: the means of one model's may be equal by chance.
    scores = {(row["benchmark"], row["label"]): row["value"] for row in rows if row["metric"] == "score"}
    assert any(scores["mt_bench", label] != scores["mt_bench_gpt5", label] for label in ("base", "repo", "dpo"))
    page = (tmp_path / "run" / "report" / "report.html").read_text(encoding="utf-8")
    assert "numbers mean nothing" in page and "judged by gpt-5.1-2025-11-13 in 48 requests" in page

    again, asked = run_judged(recipe)
    assert not asked
    assert not [name for name, outcome in again.outcomes.items() if outcome.ran]


@pytest.mark.slow
def test_every_method_when_run_small_with_masked_pairs_then_each_trains_and_is_evaluated(tmp_path: Path) -> None:
    path = PROJECT / "recipes" / "math" / "qwen3-1.7b.yaml"
    methods = [name for name in OBJECTIVES if not build(name).token_numbers]  # sampling here records no further numbers
    # Large steps, so that methods which start from the same loss end with another.
    more = ("train.learning_rate=1e-2", "mask.count=0.5")
    recipe = one_benchmark(smoke(path, tmp_path / "run", f"train.objective=[{','.join(methods)}]", *more))
    folder = run_recipe(recipe)
    assert folder.outcomes["mask"].summary["masked"] > 0
    losses = {name: folder.outcomes[f"train/{name}"].summary["loss"] for name in methods}
    assert all(map(math.isfinite, losses.values()))
    own = {round(losses[name], 6) for name in (*PAPER_METHODS, "sft")}
    assert len(own) == len(PAPER_METHODS) + 1, losses
    results: dict[str, Any] = read_json(tmp_path / "run" / "evaluate" / "results.json")
    assert {row["label"] for row in results["rows"]} == {"base", *methods}

    # Sampled passes are the same for every method: two of one.
    recipe = one_benchmark(smoke(path, tmp_path / "run", "train.objective=repo", *more, "evaluate.seeds=[41,42]"))
    run_recipe(recipe, between(recipe, "evaluate", "evaluate"))
    results = read_json(tmp_path / "run" / "evaluate" / "results.json")
    assert {(row["label"], row["seeds"]) for row in results["seeds"]} == {("base", 2), ("repo", 2)}


def one_benchmark(recipe: Recipe) -> Recipe:
    """The recipe with the first of its benchmarks alone."""
    assert recipe.evaluate is not None
    first = dict(list(recipe.evaluate.benchmarks.items())[:1])
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"benchmarks": first})})


def test_smoke_run_of_an_unknown_family_when_made_then_it_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot tell its architecture offline"):
        smoke(PROJECT / "recipes" / "math" / "qwen3-1.7b.yaml", tmp_path, "model.name_or_path=some/unheard-of")
