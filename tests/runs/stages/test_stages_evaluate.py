"""How an evaluation verifies: settings of its own, those of `verify`, and those of the recipes."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import islice
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from regretless.cli import verbs
from regretless.cli.app import app
from regretless.core import plugins
from regretless.core.errors import ConfigError, DataError
from regretless.core.files import read_json
from regretless.data.preferences import read_pairs
from regretless.data.rows import read_rows, write_records
from regretless.evaluation.results import EvaluateConfig
from regretless.labeling.verify import VerifyConfig
from regretless.reporting import report
from regretless.reporting.report import ReportConfig
from regretless.runs.miniature import smoke_recipe
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import apply_overrides, load_recipe, parse_recipe
from regretless.runs.stages import STAGES, Run
from regretless.runs.stages.evaluate import grading
from regretless.workflow.run_folder import RunFolder

RECIPES = Path(__file__).parents[3] / "recipes"


def test_grading_when_evaluate_says_something_then_that_goes_over_verify() -> None:
    benchmarks = {"benchmarks": {"amc23": {"benchmark": "amc23"}}}
    verify = VerifyConfig(verifier="math_any", grade_cut=True, time_limit=3)
    assert grading(EvaluateConfig.parse(benchmarks, "x"), verify) == verify
    own = EvaluateConfig.parse({**benchmarks, "verifier": "math", "grade_cut": False}, "x")
    assert grading(own, verify) == VerifyConfig(time_limit=3)
    with pytest.raises(ConfigError, match=r"verifier: expected one of math, math_any \(got 'maths'\)"):
        grading(EvaluateConfig.parse({**benchmarks, "verifier": "maths"}, "x"), verify)


def test_grading_when_a_benchmark_names_its_verifier_then_the_others_keep_theirs() -> None:
    benchmarks = {"a": {"benchmark": "amc23", "verifier": "math_any"}, "b": {"benchmark": "amc23"}}
    config = EvaluateConfig.parse({"benchmarks": benchmarks}, "x")
    assert [grading(config, VerifyConfig(), name).verifier for name in benchmarks] == ["math_any", "math"]
    assert config.benchmarks["a"].source == config.benchmarks["b"].source
    with pytest.raises(ConfigError, match=r"benchmarks\.a\.verifier: expected one of math, math_any"):
        EvaluateConfig.parse({"benchmarks": {"a": {"benchmark": "amc23", "verifier": "maths"}}}, "x")


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("math", ("math", False)), ("math-released", ("math_any", True)), ("math-full-sweep", ("math_any", True))],
)
def test_recipe_when_read_then_it_grades_as_its_source(folder: str, expected: tuple[str, bool]) -> None:
    for path in sorted((RECIPES / folder).glob("*.yaml")):
        recipe = load_recipe(path)
        assert recipe.verify is not None and recipe.evaluate is not None
        used = grading(recipe.evaluate, recipe.verify)
        assert (used.verifier, used.grade_cut) == (recipe.verify.verifier, recipe.verify.grade_cut) == expected


def test_recipe_when_evaluate_names_no_verifier_of_the_table_then_error_comes_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.verifier: expected one of math, math_any"):
        load_recipe(RECIPES / "math" / "qwen3-1.7b.yaml", ["evaluate.verifier=maths"])


def test_recipe_when_evaluate_names_a_verifier_that_cannot_be_used_then_error_says_why_as_for_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = {"absent": [EntryPoint("absent", "no_such_module:CHECK", "regretless.verifiers")]}
    monkeypatch.setattr(plugins, "offered", lambda kind: points if kind == "verifiers" else {})
    with pytest.raises(ConfigError) as error:
        load_recipe(RECIPES / "math" / "qwen3-1.7b.yaml", ["verify.verifier=absent", "evaluate.verifier=absent"])
    problems = [problem.split(": ", 1) for problem in error.value.problems]
    assert [key for key, _ in problems] == ["verify.verifier", "evaluate.verifier"]
    assert problems[0][1] == problems[1][1] and "cannot be imported: ModuleNotFoundError" in problems[0][1]


def test_own_problems_when_their_columns_are_named_as_advised_then_base_and_adapter_are_compared(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"Tom has {n} apples. How many?\n", "gold": str(n)} for n in range(1, 4)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=2, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    command = ["evaluate", "--model", str(model), "--benchmark", f"mine={tmp_path / 'mine.jsonl'}"]
    command += ["--policy", f"tuned={tmp_path / 'adapter'}", "--output", str(tmp_path / "out"), "max_new_tokens=4"]
    with pytest.raises(DataError) as error:
        verbs.stage(request(command))
    advised = re.findall(r"(benchmarks\.mine\.\w+)", str(error.value))
    assert advised == ["benchmarks.mine.prompt_column", "benchmarks.mine.answer_column"]
    for names in (advised, ["prompt_column", "answer_column"]):
        set_right = [f"{name}={column}" for name, column in zip(names, ["question", "gold"], strict=True)]
        verbs.stage(request([*command, *set_right]))
    found = read_json(tmp_path / "out" / "results.json")["rows"]
    assert [(row["label"], row["n"]) for row in found] == [("base", 3), ("tuned", 3)]
    assert found[1]["gain"] == 0  # an adapter that was not trained changes nothing
    assert "unchanged, skipped" in capsys.readouterr().err


def test_own_problems_when_the_verifier_cannot_grade_a_gold_answer_then_nothing_is_sampled(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1 + 1 =", "answer": {"final": 2}}\n')
    command = ["evaluate", "--model", str(model), "--benchmark", f"mine={tmp_path / 'mine.jsonl'}"]
    with pytest.raises(
        DataError, match=r"mine\.jsonl:1: answer: verifier math: expected a text or a number, or a list"
    ):
        verbs.stage(request([*command, "--output", str(tmp_path / "out"), "max_new_tokens=4"]))
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_own_problems_of_a_recipe_when_columns_are_missing_then_the_advice_is_the_recipes_key(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1 + 1 =", "gold": "2"}\n')
    values = {"name": "x", "output_dir": str(tmp_path / "run"), "model": {"name_or_path": str(model)}}
    recipe = {
        **values,
        "evaluate": {"max_new_tokens": 4, "benchmarks": {"mine": {"dataset": str(tmp_path / "mine.jsonl")}}},
    }
    with pytest.raises(DataError, match=r"evaluate\.benchmarks\.mine\.prompt_column"):
        run_recipe(parse_recipe(recipe, "x"))
    override = ["evaluate.benchmarks.mine.prompt_column=question", "evaluate.benchmarks.mine.answer_column=gold"]
    run_recipe(parse_recipe(apply_overrides(recipe, override), "x"))


def test_recipe_with_a_harness_and_further_models_when_shrunk_then_it_needs_neither() -> None:
    values = {"name": "x", "model": {"name_or_path": "Qwen/Qwen3-0.6B"}}
    evaluate = {"harness": ["ifeval"], "policies": {"other": "someone/model"}}
    shrunk = smoke_recipe(parse_recipe({**values, "evaluate": evaluate}, "x")).evaluate
    assert shrunk is not None
    assert (shrunk.harness, shrunk.policies) == ([], {})
    assert list(shrunk.benchmarks) == ["arithmetic"]


def test_results_of_a_run_when_its_pairs_repeat_problems_then_table_and_page_say_so(folder: Path) -> None:
    run = Run.of(load_recipe(folder / "recipe.yaml"), RunFolder(folder))
    assert run.recipe.evaluate is not None
    (problem,) = islice(read_rows(folder / "world" / "test.jsonl"), 1)
    pairs = Path(run.latest("pairs.parquet", "train"))
    write_records(pairs, [replace(pair, prompt=problem[1]["prompt"]) for pair in read_pairs(pairs)[0]])
    STAGES["evaluate"].after(run.recipe.evaluate, run)
    (note,) = read_json(folder / "evaluate" / "results.json")["contaminated"]
    assert note.startswith("arithmetic: 1 of 8 problems stand in the training prompts")
    page = folder / "page"
    report.run(ReportConfig(), folder, page)
    assert note in html.unescape((page / "report.html").read_text(encoding="utf-8"))


def request(words: list[str]) -> verbs.Request:
    """The request of a command line, which is what `app` makes of it."""
    found: list[verbs.Request] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs, "stage", found.append)
        with pytest.raises(SystemExit):
            app(words)
    return found[0]
