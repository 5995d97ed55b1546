"""Recipes: what is read, what wins, and that every mistake is named at once."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from regretless.core.errors import ConfigError
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import Recipe, apply_overrides, load_recipe, parse_recipe
from regretless.sampling.sample import SampleConfig

TRAINING: dict[str, Any] = {
    "name": "try",
    "model": {"name_or_path": "some/model"},
    "pairs": {"dataset": "pairs.jsonl"},
    "train": {
        "objective": "dpo",
        "learning_rate": 1e-6,
        "methods": {"dpo": {"beta": 0.1, "learning_rate": 5e-7}, "ipo": {"beta": 0.01}},
    },
}

CHAT: dict[str, Any] = {"benchmark": "mt_bench", "judge": "m", "questions": "q.jsonl"}
PRETRAIN: dict[str, Any] = {"model": {"name_or_path": "m"}, "data": "d.jsonl"}


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def values_of(recipe: Recipe, objective: str) -> dict[str, Any]:
    assert recipe.train is not None
    return {key: value for key, value in recipe.train.values_for(objective).items() if key != "seed"}


def test_recipe_with_several_mistakes_when_loaded_then_all_are_named_with_their_keys(tmp_path: Path) -> None:
    mistakes = {
        **TRAINING,
        "sede": 1,
        "pairs": {"dataset": "pairs.jsonl", "limit": 0},
        "train": {"objective": "dpo", "learnin_rate": 1e-6, "eval_pairs": -1, "beta": -0.5, "lora": {"r": 0}},
        "report": {"examples": -1},
    }
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path / "bad.yaml", mistakes))
    message = str(caught.value)
    assert "7 problem(s)" in message
    parts = (
        "sede: unknown key",
        "pairs.limit",
        "did you mean learning_rate",
        "report.examples",
        "train.eval_pairs: input",
    )
    for part in (*parts, "train.lora.r: input", "beta: input should be greater than 0 (got -0.5)"):
        assert part in message, message


HUGE = 10**20
SAMPLING = {"prompts": {"dataset": "p.jsonl"}, "models": [{"name_or_path": "m"}]}


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("seed", 2**32, "seed: input should be less than or equal to 4294967295"),
        (
            "train.seed",
            2**32,
            "train.seed: expected a whole number of at least 0 and at most 4294967295, got 4294967296",
        ),
        ("train.data_seed", HUGE, "train.data_seed: expected a whole number of at least 0 and at most 4294967295"),
        ("train.lora.r", HUGE, "train.lora.r: input should be less than or equal to 65536"),
        ("train.eval_pairs", True, "train.eval_pairs: input should be a valid integer"),
        ("mask.seed", -1, "mask.seed: input should be greater than or equal to 0"),
        ("sample.seed", 2**63, "sample.seed: input should be less than or equal to 4294967295"),
        ("sample.seed", True, "sample.seed: input should be a valid integer"),
        ("sample.n", True, "sample.n: input should be a valid integer"),
        ("sample.prompts.limit", HUGE, "sample.prompts.limit: expected a whole number of at most 9223372036854775807"),
        ("sample.temperature", math.inf, "sample.temperature: input should be a finite number (got inf)"),
        ("sample.temperature", 1e-38, "sample.temperature: expected 0 (greedy), or 1e-06 or more, got 1e-38"),
        ("sample.repetition_penalty", math.inf, "sample.repetition_penalty: input should be a finite number"),
        (
            "sample.repetition_penalty",
            1e-300,
            "sample.repetition_penalty: input should be greater than or equal to 0.001",
        ),
        ("evaluate.repetition_penalty", 1e-5, "evaluate.repetition_penalty: input should be greater than or equal to"),
        ("evaluate.temperature", 1e-9, "evaluate.temperature: input should be greater than or equal to 0.000001"),
        ("verify.time_limit", math.inf, "verify.time_limit: input should be a finite number"),
        ("verify.time_limit", 1e30, "verify.time_limit: input should be less than or equal to 86400"),
        ("inspect.betas", [0.5, True], "inspect.betas.1: input should be a valid number"),
    ],
)
def test_number_when_no_library_can_use_it_then_its_key_is_refused_alone(place: str, value: Any, problem: str) -> None:
    values: Any = {"name": "x", "model": {"name_or_path": "m"}, "sample": SAMPLING, "verify": {}, "pair": {}}
    values |= {"mask": {}, "inspect": {}, "train": {"objective": "dpo", "lora": {}}}
    values["evaluate"] = {"benchmarks": {"mine": {"dataset": "problems.jsonl"}}, "seeds": [1]}
    assert parse_recipe(values, "x").seed == 0
    *above, last = place.split(".")
    part = values = copy.deepcopy(values)
    for key in above:
        part = part[key]
    part[last] = value
    with pytest.raises(ConfigError) as caught:
        parse_recipe(values, "x")
    (found,) = caught.value.problems
    assert found.startswith(problem)


def test_numbers_when_written_as_text_or_without_a_fraction_then_they_are_read() -> None:
    config = SampleConfig.parse({**SAMPLING, "n": "2", "batch_size": 8.0, "seed": 2**32 - 1}, "sample")
    assert (config.n, config.batch_size, config.seed) == (2, 8, 4294967295)


def test_strategy_no_when_typed_bare_then_it_is_the_word_and_not_false(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.yaml", {**TRAINING, "train": {**TRAINING["train"], "methods": {"ipo": {"eval_strategy": False}}}}
    )
    recipe = load_recipe(path, ["train.save_strategy=no", "train.bf16=no", "train.logging_steps=1_0"])
    assert recipe.train is not None
    values = recipe.train.values_for("ipo")
    assert (values["save_strategy"], values["eval_strategy"], values["bf16"]) == ("no", "no", False)
    assert values["logging_steps"] == 10 and type(values["save_strategy"]) is str
    again = Recipe.parse(recipe.model_dump(exclude_unset=True), "x")
    assert again.train is not None and again.train.values_for("ipo") == values


def test_stages_without_what_they_need_when_parsed_then_each_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe({"name": "x", "verify": {}, "train": {}, "analyze": {}}, "x")
    for part in ("verify: nothing to verify", "train: no pairs", "model: required by train, analyze"):
        assert part in str(caught.value)


def test_quantized_model_when_it_has_no_adapter_to_train_then_the_recipe_says_so_before_any_stage(
    tmp_path: Path,
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    quantized = {"name_or_path": "base", "quantization": {"load_in_4bit": True}}
    recipe: dict[str, Any] = {"name": "x", "pairs": {"dataset": "p.jsonl"}, "model": quantized}
    recipe["train"] = {"objective": "dpo"}
    for train in ({"objective": "dpo"}, {"objective": "dpo", "lora": None}):
        with pytest.raises(ConfigError, match=r"train\.lora: required by model\.quantization"):
            parse_recipe(recipe | {"train": train}, "x")
    for more in (
        {"train": {"objective": "dpo", "lora": {"r": 4}}},
        {"model": quantized | {"adapter": "one"}},
        {"model": quantized | {"name_or_path": str(tmp_path)}},
        {"model": {"name_or_path": "base"}},
    ):
        assert parse_recipe(recipe | more, "x").model is not None


def test_model_when_it_has_an_adapter_then_another_is_refused_before_any_stage(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    train: dict[str, Any] = {"objective": "dpo", "lora": {"r": 4}}
    recipe: dict[str, Any] = {"name": "x", "pairs": {"dataset": "p.jsonl"}, "train": train}
    for model in ({"name_or_path": "base", "adapter": "one"}, {"name_or_path": str(tmp_path)}):
        with pytest.raises(ConfigError, match=r"train\.lora: the model has an adapter already"):
            parse_recipe(recipe | {"model": model}, "x")
        assert parse_recipe(recipe | {"model": model, "train": {"objective": "dpo"}}, "x").train is not None


def test_overrides_that_cannot_be_read_when_applied_then_all_are_named() -> None:
    with pytest.raises(ConfigError, match=r"(?s)train\.beta.*'=3'.*a=\[1"):
        apply_overrides({}, ["train.beta", "=3", "a=[1"])


def test_override_that_cannot_be_read_when_a_recipe_has_other_problems_then_all_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", TRAINING)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, ["seed", "sede=1", "model.name_or_path=[", "pairs.limit=0"])
    said = str(caught.value)
    assert "4 problem(s)" in said
    assert "'seed'" in said and "model.name_or_path=[" in said and "sede: unknown" in said and "pairs.limit: " in said
    with pytest.raises(ConfigError, match="overrides: 1 problem"):
        load_recipe(path, ["seed"])


def test_method_override_when_chosen_then_its_own_hyperparameters_come_along(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", TRAINING)
    assert values_of(load_recipe(path), "dpo") == {"beta": 0.1, "learning_rate": 5e-7}
    recipe = load_recipe(path, ["train.objective=ipo"])
    assert recipe.train is not None and recipe.train.objectives == ["ipo"]
    assert values_of(recipe, "ipo") == {"beta": 0.01, "learning_rate": 1e-6}


def test_typed_value_when_a_method_brings_its_own_then_the_typed_one_wins(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", TRAINING)
    recipe = load_recipe(path, ["train.learning_rate=1e-4", "train.methods.dpo.beta=0.3"])
    assert values_of(recipe, "dpo") == {"beta": 0.3, "learning_rate": 1e-4}
    assert values_of(recipe, "ipo") == {"beta": 0.01, "learning_rate": 1e-4}


def test_typed_value_when_it_replaces_what_trained_methods_bring_along_then_each_lost_value_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "math-released" / "qwen3-1.7b.yaml"
    several = "train.objective=[repo,dpo,kto,tdpo]"

    def said(*overrides: str) -> list[str]:
        load_recipe(recipe, overrides)
        return capsys.readouterr().err.splitlines()

    (line,) = said(several, "train.pairs_per_step=16")
    assert line.startswith("train.pairs_per_step=16 replaces the recipe's values for single methods: ")
    assert "kto 32, tdpo 64. " in line and "train.methods.NAME.pairs_per_step=" in line
    (line,) = said(several, "train.learning_rate=1e-6")
    assert "train.learning_rate=1e-06 replaces" in line and ": repo 5e-07, tdpo 5e-06. " in line
    assert len(said("train.objective=kto", "train.pairs_per_step=16", "train.beta=0.3")) == 2
    # Nothing of what is trained is lost.
    assert said("train.objective=dpo", "train.pairs_per_step=16", "train.learning_rate=1e-6") == []
    assert said(several, "train.methods.kto.pairs_per_step=8", "train.num_train_epochs=1") == []
    assert said("train.objective=kto", "train.pairs_per_step=32") == []


def test_value_typed_for_one_method_when_also_typed_for_all_then_order_does_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", TRAINING)
    for overrides in (
        ["train.methods.dpo.beta=0.3", "train.beta=0.2"],
        ["train.beta=0.2", "train.methods.dpo.beta=0.3"],
    ):
        recipe = load_recipe(path, overrides)
        assert values_of(recipe, "dpo")["beta"] == 0.3
        assert values_of(recipe, "ipo")["beta"] == 0.2


def test_parent_recipe_when_extended_then_the_child_is_laid_on_it_key_by_key(tmp_path: Path) -> None:
    write(tmp_path / "parent.yaml", TRAINING)
    child = {"extends": "parent.yaml", "name": "child", "train": {"methods": {"dpo": {"beta": 0.5}}}}
    recipe = load_recipe(write(tmp_path / "child.yaml", child))
    assert (recipe.name, str(recipe.run_dir)) == ("child", "runs/child")
    assert values_of(recipe, "dpo") == {"beta": 0.5, "learning_rate": 5e-7}


def test_entry_when_null_in_a_recipe_that_extends_another_then_it_is_removed(tmp_path: Path) -> None:
    entries: dict[str, Any] = {
        "pretrain": {"a": {"model": {"name_or_path": "m"}, "data": "d.jsonl"}, "b": None},
        "prompts": {"a": {"dataset": "p.jsonl"}, "b": {"dataset": "q.jsonl"}},
        "evaluate": {
            "benchmarks": {"a": {"dataset": "t.jsonl"}, "b": {"dataset": "t.jsonl"}},
            "policies": {"a": "m", "b": "n"},
        },
    }
    write(tmp_path / "parent.yaml", {"name": "try", "model": {"name_or_path": "m"}, **entries})
    gone = {"prompts": {"a": None}, "evaluate": {"benchmarks": {"a": None}, "policies": {"a": None}}}
    recipe = load_recipe(write(tmp_path / "child.yaml", {"extends": "parent.yaml", **gone}), ["pretrain.c=null"])
    assert recipe.evaluate is not None
    found = [recipe.pretrain, recipe.prompts, recipe.evaluate.benchmarks, recipe.evaluate.policies]
    assert [list(entry) for entry in found] == [["a"], ["b"], ["b"], ["b"]]


def test_recipe_that_extends_itself_when_loaded_then_it_says_so(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", {"extends": "b.yaml"})
    with pytest.raises(ConfigError, match="extends itself"):
        load_recipe(write(tmp_path / "b.yaml", {"extends": "a.yaml"}))


def test_seed_when_given_once_then_every_stage_has_it_unless_it_has_its_own() -> None:
    values = {
        **{key: value for key, value in TRAINING.items() if key != "pairs"},
        "seed": 7,
        "responses": "r.jsonl",
        "verify": {},
        "pair": {"seed": 3},
        "analyze": {},
    }
    recipe = parse_recipe(values, "x")
    assert recipe.pair is not None and recipe.pair.seed == 3
    assert recipe.analyze is not None and recipe.analyze.seed == 7
    assert recipe.train is not None and recipe.train.values_for("dpo")["seed"] == 7


def test_models_to_pretrain_when_the_recipe_has_a_seed_then_all_start_from_other_weights() -> None:
    model = {"architecture": {"model_type": "qwen3"}, "tokenizer": "t"}
    entries = {"base": {"model": model, "data": "d"}, "other": {"model": model, "data": "d"}}
    seeds = [
        entry.model.init_seed
        for seed in (0, 1)
        for entry in parse_recipe({"name": "x", "seed": seed, "pretrain": entries}, "x").pretrain.values()
    ]
    assert seeds == [0, 1, 1000, 1001]


def test_numbers_without_a_dot_when_read_then_they_are_numbers(tmp_path: Path) -> None:
    text = "name: x\nmodel: {name_or_path: m}\npairs: {dataset: p}\ntrain: {objective: sft, learning_rate: 5e-3}\n"
    (tmp_path / "r.yaml").write_text(text)
    assert values_of(load_recipe(tmp_path / "r.yaml"), "sft") == {"learning_rate": 5e-3}


def test_existing_pairs_when_typed_over_a_recipe_that_samples_then_nothing_is_sampled(tmp_path: Path) -> None:
    values = {
        "name": "x",
        "sample": {"prompts": {"dataset": "p.jsonl"}, "models": [{"name_or_path": "m"}]},
        "verify": {},
        "pair": {},
    }
    recipe = load_recipe(write(tmp_path / "r.yaml", values), ["pairs.dataset=mine.parquet"])
    assert recipe.pairs is not None
    assert (recipe.sample, recipe.verify, recipe.pair) == (None, None, None)


def test_paths_below_the_home_folder_when_read_then_every_stage_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = {"name_or_path": "~/model", "tokenizer": "~/tokenizer", "chat_template": "~/chat.jinja"}
    values = {
        "name": "~",
        "output_dir": "~/runs/x",
        "model": model,
        "pretrain": {"a": {"model": model, "data": "~/texts.jsonl"}},
        "pairs": {"dataset": "~/pairs.jsonl"},
        "train": {"objective": "dpo"},
        "evaluate": {
            "benchmarks": {"mine": {"dataset": "~/test.jsonl", "answer_column": "~/answer"}},
            "policies": {"mine": "~/policy", "hub": "owner/model"},
        },
    }
    recipe = parse_recipe({**values, "name": "x"}, "x")
    assert recipe.run_dir == tmp_path / "runs" / "x"
    assert recipe.model is not None and recipe.pairs is not None and recipe.evaluate is not None
    for one in (recipe.model, recipe.pretrain["a"].model):
        assert [one.name_or_path, one.tokenizer, one.chat_template] == [
            str(tmp_path / name) for name in ("model", "tokenizer", "chat.jinja")
        ]
    assert recipe.pretrain["a"].data == str(tmp_path / "texts.jsonl")
    assert recipe.pairs.dataset == str(tmp_path / "pairs.jsonl")
    assert recipe.evaluate.policies == {"mine": str(tmp_path / "policy"), "hub": "owner/model"}
    (benchmark,) = recipe.evaluate.benchmarks.values()
    assert (benchmark.dataset, benchmark.answer_column) == (str(tmp_path / "test.jsonl"), "~/answer")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="model"):
        parse_recipe({**values, "name": "x", "model": loop}, "x")
    responses = parse_recipe({"name": "x", "responses": "~/answers.jsonl", "verify": {}}, "x")
    assert responses.responses == str(tmp_path / "answers.jsonl")
    with pytest.raises(ConfigError):
        parse_recipe(values, "x")


def test_paths_below_the_home_folder_when_the_recipe_has_a_problem_then_only_missing_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pairs.jsonl").touch()
    values = {**TRAINING, "model": {"name_or_path": "~/model"}, "pairs": {"dataset": "~/pairs.jsonl", "limit": "some"}}
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path / "x.yaml", values), [], recipe_problems)
    said = str(caught.value)
    assert "pairs.limit: " in said and f"no such file or folder: {tmp_path / 'model'}" in said
    assert "pairs.jsonl" not in said


SHARED_NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "evaluate, objective": (
        {"evaluate": {"policies": {"dpo": "other"}}},
        "evaluate.policies.dpo: another model of the run has this name",
    ),
    "evaluate, objective in capitals": (
        {"evaluate": {"policies": {"DPO": "other"}}},
        "evaluate.policies.DPO: another model of the run has this name",
    ),
    "evaluate, base": ({"evaluate": {"policies": {"Base": "other"}}}, "evaluate.policies: the name Base has a meaning"),
    "evaluate, results": (
        {"evaluate": {"policies": {"results.json": "other"}}},
        "evaluate.policies: the name results.json has a meaning",
    ),
    "evaluate, twice": (
        {"evaluate": {"policies": {"a": "x", "A": "y"}}},
        "evaluate.policies: the names a, A differ in case alone",
    ),
    "benchmark and chat": (
        {"evaluate": {"benchmarks": {"AIME": {"benchmark": "math500"}}, "chat": {"aime": CHAT}}},
        "evaluate.chat: `benchmarks` has the same label: AIME, aime",
    ),
    "benchmark, harness": (
        {"evaluate": {"benchmarks": {"Harness": {"benchmark": "math500"}}}},
        "evaluate.benchmarks: the name harness has a meaning",
    ),
    "analyze, objective": (
        {"analyze": {"policies": {"dpo": "other"}}},
        "analyze.policies.dpo: another model of the run has this name",
    ),
    "analyze, evaluated": (
        {"evaluate": {"policies": {"a": "x"}}, "analyze": {"policies": {"a": "y"}}},
        "analyze.policies.a: another model of the run has this name",
    ),
    "analyze, base": (
        {"analyze": {"policies": {"base": "other"}}},
        "analyze.policies: the name base is",
    ),
    "pretrain": ({"pretrain": {"a": PRETRAIN, "A": PRETRAIN}}, "pretrain: the names a, A differ in case alone"),
}


@pytest.mark.parametrize(("sections", "problem"), SHARED_NAMES.values(), ids=SHARED_NAMES)
def test_models_when_two_would_share_a_name_or_a_folder_then_the_recipe_is_refused(
    sections: dict[str, Any], problem: str
) -> None:
    evaluate = {"benchmarks": {"b": {"benchmark": "math500"}}, **sections.get("evaluate", {})}
    with pytest.raises(ConfigError) as caught:
        parse_recipe({**TRAINING, **sections, "evaluate": evaluate}, "recipe")
    assert [text[: len(problem)] for text in caught.value.problems] == [problem], caught.value.problems


def test_model_when_named_again_by_the_same_name_then_it_can_be_analyzed() -> None:
    policies = {"dpo": "{run}/train/dpo", "a": "x"}
    evaluate = {"benchmarks": {"b": {"benchmark": "math500"}}, "policies": {"a": "x"}}
    recipe = parse_recipe({**TRAINING, "evaluate": evaluate, "analyze": {"policies": policies}}, "recipe")
    assert recipe.analyze is not None and recipe.analyze.policies == policies
