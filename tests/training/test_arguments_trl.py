"""What the arguments of TRL's DPOConfig mean here, and what is answered to the others."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments

from regretless.core.errors import ConfigError
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.load import ModelConfig
from regretless.objectives import OBJECTIVES, build
from regretless.runs.recipe import PairsSource
from regretless.training.arguments import ARGUMENTS, PreferenceConfig
from regretless.training.constructor import INSTEAD
from regretless.training.train_config import LoraSettings, TrainConfig
from regretless.training.trainer import PreferenceTrainer


def config(tmp_path: Path, **given: Any) -> PreferenceConfig:
    return PreferenceConfig(str(tmp_path / "out"), **{"use_cpu": True, "report_to": "none", **given})


@pytest.mark.parametrize(
    ("given", "objective", "hyperparameters"),
    [
        ({}, "repo", {}),
        ({"loss_type": "sigmoid", "beta": 0.2}, "dpo", {"beta": 0.2}),
        ({"loss_type": ["ipo"]}, "ipo", {"reduction": "mean"}),
        ({"loss_type": "robust", "label_smoothing": 0.1}, "dpo", {"label_smoothing": 0.1}),
        ({"objective": "dpo", "label_smoothing": 0.1}, "dpo", {"label_smoothing": 0.1}),
        ({"loss_type": "sigmoid_norm", "ld_alpha": 0.5}, "dpo", {"reduction": "mean", "ld_alpha": 0.5}),
        ({"loss_type": "apo_down", "loss_weights": [1]}, "apo", {"variant": "down"}),
        (
            {"loss_type": "hinge", "loss_weights": [0.5]},
            "weighted_sum",
            {"terms": [{"objective": "hinge", "weight": 0.5}]},
        ),
        (
            {"loss_type": ["apo_zero", "robust"], "loss_weights": [1, 0.5], "beta": 0.2, "label_smoothing": 0.1}
            | {"ld_alpha": 0.0, "objective_kwargs": {"reference": "behavior"}},
            "weighted_sum",
            {
                "terms": [
                    {"objective": "apo", "weight": 1, "beta": 0.2, "variant": "zero"},
                    {"objective": "dpo", "weight": 0.5, "beta": 0.2, "label_smoothing": 0.1},
                ],
                "ld_alpha": 0.0,
                "reference": "behavior",
            },
        ),
        (
            {"objective": "ipo", "loss_type": "ipo", "objective_kwargs": {"reduction": "sum"}},
            "ipo",
            {"reduction": "sum"},
        ),
    ],
)
def test_loss_when_it_is_named_as_in_trl_then_the_objective_is_that_loss(
    given: dict[str, Any], objective: str, hyperparameters: dict[str, Any], tmp_path: Path
) -> None:
    args = config(tmp_path, **given)
    assert (args.objective, args.hyperparameters) == (objective, hyperparameters)
    again = PreferenceConfig(**args.to_dict())
    assert (again.objective, again.hyperparameters) == (objective, hyperparameters)
    build(objective, **hyperparameters)


def test_arguments_when_they_mean_nothing_here_then_all_are_answered_at_once(tmp_path: Path) -> None:
    given = {
        "sync_ref_model": True,
        "ld_alpha": 1.5,
        "importance": "mean",
        "loss_weights": [1.0],
        "eta": 0.1,
        "learning_rat": 1,
        "lr": 1e-5,
    }
    given |= {"loss_type": ["sigmoid", "sft"], "label_smoothing": 0.5, "truncation_mode": "keep_end"}
    with pytest.raises(ConfigError, match=r"PreferenceConfig: 10 problem\(s\)") as caught:
        config(tmp_path, **given)
    lines = {line.split(":")[0].removeprefix("  - "): line for line in str(caught.value).splitlines()[1:]}
    assert lines.keys() == given.keys()
    assert "not used here: the reference is fixed" in lines["sync_ref_model"]
    assert "a hyperparameter of rpo; set objective_kwargs={'eta': 0.1}" in lines["eta"]
    assert "unknown argument; did you mean learning_rate?" in lines["learning_rat"]
    assert "unknown argument; TRL's are in https://regretless.github.io/regretless/from_trl.html" in lines["lr"]
    assert "got 'sft'; set objective='sft', without loss_type" in lines["loss_type"]
    assert "expected a weight for each of 2 losses in loss_type, got [1.0]" in lines["loss_weights"]
    assert "at most 1 or null, got 1.5" in lines["ld_alpha"]
    assert "a hyperparameter of every method; set objective_kwargs={'importance': 'mean'}" in lines["importance"]
    assert "below 0.5, got 0.5" in lines["label_smoothing"]
    assert "'keep_start'" in lines["truncation_mode"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"loss_type": "sigmoid", "objective": "repo"}, "'sigmoid' is objective='dpo', got 'repo'; remove one"),
        ({"loss_type": "discopop"}, "loss_type: expected one of sigmoid, robust, sigmoid_norm, ipo, hinge, apo_zero, "),
        ({"loss_type": "simpo"}, "got 'simpo'; set objective='simpo', without loss_type"),
        ({"loss_type": ["hinge", "ipo"], "objective": "dpo"}, "hinge + ipo is objective='weighted_sum', got 'dpo'"),
        ({"loss_weights": [1.0]}, "loss_weights: expected a weight for each of 0 losses"),
        ({"loss_type": ["hinge", "ipo"], "label_smoothing": 0.1}, "label_smoothing: hinge + ipo does not use it"),
        ({"loss_type": "sigmoid", "label_smoothing": 0.1}, "label_smoothing: sigmoid does not use it"),
        ({"label_smoothing": 0.1}, "label_smoothing: repo has none"),
        ({"beta": 1.0, "objective_kwargs": {"beta": 1.0}}, "beta: set twice"),
        ({"loss_type": ["hinge", "ipo"], "beta": -1.0}, "  - beta: input should be greater than 0 (got -1.0)"),
        ({"model_init_kwargs": "float32"}, "model_init_kwargs: expected a mapping, or JSON of one, got 'float32'"),
    ],
)
def test_argument_when_it_cannot_be_meant_then_one_line_says_so(
    given: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **given)
    assert problem in str(caught.value) and len(caught.value.problems) == 1


def test_hyperparameters_when_they_are_wrong_then_they_are_told_with_the_other_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, objective="dpo", lerning_rate=1e-5, seed=-1, beta=-1, objective_kwargs={"smothing": "robust"})
    assert caught.value.problems == [
        "seed: expected a whole number of at least 0 and at most 4294967295, got -1",
        "beta: input should be greater than 0 (got -1)",
        "objective_kwargs.smothing: unknown key (got 'robust'); did you mean smoothing?",
        "lerning_rate: unknown argument; did you mean learning_rate?",
    ]
    # Which objective it is decides what is wrong with its hyperparameters.
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, objective="dop", objective_kwargs={"smothing": "robust"})
    (problem,) = caught.value.problems
    assert problem.startswith("objective: expected one of repo, ") and problem.endswith("; got 'dop'")


def test_arguments_when_they_concern_speed_only_then_they_are_taken_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path, dataset_num_proc=4, padding_free=True, precompute_ref_batch_size=2, loss_weights=None)
    said = capsys.readouterr().err
    assert "note: dataset_num_proc: has no effect here: the tokenizer uses all cores" in said
    assert "note: precompute_ref_batch_size: " in said and "padding_free" not in said


def test_parser_of_transformers_when_it_reads_arguments_then_those_of_trl_are_among_them(tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path} --loss_type robust --label_smoothing 0.2 --truncation_mode keep_start --use_cpu"
    (args,) = HfArgumentParser(PreferenceConfig).parse_args_into_dataclasses([*line.split(), "--report_to", "none"])
    assert (args.objective, args.truncation) == ("dpo", "keep_start")
    assert args.hyperparameters == {"label_smoothing": 0.2}


def test_arguments_when_they_are_empty_or_name_labels_then_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        PreferenceConfig(output_dir=str(tmp_path), loss_type=[], label_names=["labels"])
    assert "loss_type: expected at least one loss, got an empty list" in str(caught.value)
    assert "label_names: not used here: rows have no labels" in str(caught.value)


def test_parser_of_transformers_when_losses_and_hyperparameters_are_given_then_they_are_read(tmp_path: Path) -> None:
    def parsed(text: str) -> PreferenceConfig:
        return HfArgumentParser(PreferenceConfig).parse_args_into_dataclasses(["--output_dir", "x", *text.split()])[0]

    both = parsed("--loss_type sigmoid ipo --loss_weights 1 2")
    assert [(term["objective"], term["weight"]) for term in both.hyperparameters["terms"]] == [("dpo", 1), ("ipo", 2)]
    assert parsed('--objective simpo --objective_kwargs {"gamma":0.7}').hyperparameters == {"gamma": 0.7}
    with pytest.raises(ConfigError, match=r"objective_kwargs: expected a mapping, or JSON of one, got '\[1\]'"):
        parsed("--objective_kwargs [1]")


def test_recipe_when_it_has_an_argument_of_trl_then_its_name_here_is_said() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse({"loss_type": "ipo", "truncation_mode": "keep_start", "sync_ref_model": True}, "train")
    text = str(caught.value)
    assert "loss_type: set objective" in text and "truncation_mode: set truncation" in text
    assert "sync_ref_model: not used here: the reference is fixed" in text
    both = TrainConfig.parse({"objective": ["dpo", "repo"], "label_smoothing": 0.2}, "train")
    assert [both.split_for(name)[0] for name in both.objectives] == [{"label_smoothing": 0.2}, {}]


def test_long_pairs_when_truncated_as_in_trl_then_the_beginning_is_kept(
    make_trainer: Callable[..., PreferenceTrainer], make_model: Callable[..., PreTrainedModel]
) -> None:
    rows = [{"prompt": "w4 w5", "chosen": "w6 w7 w8 w9", "rejected": "w9 w8"}]
    data = make_trainer(loss_type="sigmoid", truncation_mode="keep_start", max_length=4, data=rows).train_dataset
    assert [side.ids for side in data[0].pair.sides] == [(6, 3), (9, 8)]  # w7 is unknown; both without their end


TOKEN_METRICS = ("logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy", "num_tokens")
METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", *TOKEN_METRICS)
METRICS += ("logps/chosen", "logps/rejected")


@pytest.mark.parametrize(
    "loss",
    [
        {"loss_type": "sigmoid"},
        {"loss_type": "ipo"},
        {"loss_type": "robust", "label_smoothing": 0.1},
        {"loss_type": ["hinge", "apo_zero"], "loss_weights": [0.5, 2.0], "ld_alpha": 0.5},
    ],
    ids=["sigmoid", "ipo", "robust", "sum"],
)
def test_training_when_trl_trains_on_the_same_rows_then_losses_metrics_and_weights_are_the_same(
    loss: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel]
) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed (the extra `dev` has it)")
    words = [f"w{number}" for number in (4, 5, 6, 8, 9, 10, 11, 12)]
    rows = [{"prompt": f"{a} ", "chosen": f"{b} {a} {b}", "rejected": f"{b} w13"} for a in words[:4] for b in words[4:]]
    arguments = {"max_steps": 3, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "logging_steps": 1}
    arguments |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "beta": 0.5}
    arguments |= {"bf16": False, "gradient_checkpointing": False, "max_length": 64, "seed": 0, **loss}
    found = []
    for trainer_of, config_of in ((trl.DPOTrainer, trl.DPOConfig), (PreferenceTrainer, PreferenceConfig)):
        trainer = trainer_of(
            make_model(),
            make_model(),
            config_of(str(tmp_path / trainer_of.__name__), **arguments),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=copy.deepcopy(tokenizer),
        )
        trainer.train()
        log = [line for line in trainer.state.log_history if "loss" in line]
        found.append((log, {name: value.detach() for name, value in trainer.model.named_parameters()}))
    (theirs, their_weights), (ours, our_weights) = found
    # TRL's rewards are of sums also where the loss is of means.
    # With ld_alpha, TRL's log-probabilities of responses are those of the loss.
    without = "rewards/" if loss["loss_type"] == "ipo" else "logps/" if "ld_alpha" in loss else "none"
    names = [name for name in METRICS if not name.startswith(without)]
    for their, our in zip(theirs, ours, strict=True):
        assert {name: our[name] for name in names} == pytest.approx({name: their[name] for name in names}, abs=2e-5)
    assert len(ours) == 3 and ours[-1]["num_tokens"] == 3 * ours[0]["num_tokens"] > 0
    for name, weight in our_weights.items():
        torch.testing.assert_close(weight, their_weights[name], atol=1e-4, rtol=1e-3)


def test_token_metrics_when_responses_are_in_several_pairs_then_they_are_means_over_all_tokens_of_all_pairs(
    make_trainer: Callable[..., PreferenceTrainer],
    pairs: list[TokenizedPair],
    make_model: Callable[..., PreTrainedModel],
) -> None:
    trainer = make_trainer(
        lora=False,
        objective="dpo",
        max_steps=2,
        per_device_train_batch_size=20,
        learning_rate=1e-30,
        eval_dataset=pairs,
    )
    trainer.train()
    model, total = make_model().eval(), 0
    sums: dict[str, list[float]] = {name: [] for name in TOKEN_METRICS[:-1]}
    for pair in pairs:
        for side, response in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            assert response is not None
            ids = torch.tensor([[*pair.prompt_ids, *response.ids]])
            logits = model(ids).logits[0, len(pair.prompt_ids) - 1 : -1].detach()
            sums[f"logits/{side}"] += logits.mean(-1).tolist()
            sums["entropy"] += torch.distributions.Categorical(logits=logits).entropy().tolist()
            total += ids.shape[1]
            if side == "chosen":
                sums["mean_token_accuracy"] += (logits.argmax(-1) == torch.tensor(response.ids)).float().tolist()
    expected = {f"eval_{name}": sum(values) / len(values) for name, values in sums.items()}
    assert 0 < expected["eval_mean_token_accuracy"] < 1
    evaluation = trainer.evaluate()
    assert {name: evaluation[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    # Both steps of the only epoch, all pairs together.
    assert len(pairs) > 20 and lines[-1]["num_tokens"] == total


PAGE = Path(__file__).parents[2] / "docs" / "from_trl.md"


def table(heading: str) -> dict[str, list[str]]:
    """The rows below a heading of the page on TRL, by their first cell."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "| `" in line
    ]
    assert len({row[0] for row in rows}) == len(rows) > 10
    return {row[0]: row[1:] for row in rows}


def defaults(kind: type[Any]) -> dict[str, Any]:
    return {
        one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        for one in dataclasses.fields(kind)
        if one.init
    }


def test_page_on_trl_when_compared_with_the_installed_one_then_every_argument_and_differing_default_is_listed() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed (the extra `dev` has it)")
    theirs, ours = defaults(trl.DPOConfig), defaults(PreferenceConfig)
    own = theirs.keys() - {one.name for one in dataclasses.fields(TrainingArguments)}
    verdicts = {name: ARGUMENTS[name].verdict if name in ARGUMENTS else "taken" for name in own}
    assert {name: row[0] for name, row in table("Arguments of DPOConfig").items()} == {
        name: verdict.removesuffix(" in Python") for name, verdict in verdicts.items()
    }
    assert own - ours.keys() == ARGUMENTS.keys() - ours.keys()
    differing = {name: [repr(theirs[name]), repr(ours[name])] for name in theirs.keys() & ours.keys()}
    listed = {name: row[:2] for name, row in table("Defaults that differ").items()}
    assert listed == {name: values for name, values in differing.items() if values[0] != values[1]}
    arguments = list(inspect.signature(trl.DPOTrainer.__init__).parameters)[1:]
    assert list(table("Arguments of DPOTrainer")) == arguments
    assert list(inspect.signature(PreferenceTrainer.__init__).parameters)[1:-1] == arguments
    refused = {name for name, row in table("Arguments of DPOTrainer").items() if row[0] == "refused"}
    assert refused == set(INSTEAD) & set(arguments)


def test_page_on_trl_when_it_translates_options_then_every_setting_that_it_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8").split("## Options of TRL's command line")[1].split("\n## ")[0]
    targets = [key for row in text.splitlines()[4:] for key in re.findall(r"([a-z_.]+)=", row.rpartition(" | ")[2])]
    sections = {"lora": LoraSettings.model_fields, "model": ModelConfig.model_fields}
    plain = {*PairsSource.model_fields, *PreferenceConfig.__dataclass_fields__, *OBJECTIVES["ipo"].model_fields}
    assert len(targets) > 12
    for target in targets:
        section, _, key = target.rpartition(".")
        assert key in (sections[section] if section else plain), target


def test_adapter_when_set_by_the_names_of_trl_then_the_right_ones_are_said() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse({"use_peft": True, "lora_r": 8}, "train")
    assert str(caught.value).count("lora.r, lora.alpha") == 2 and "use_cpu" not in str(caught.value)


def test_defaults_of_trl_when_passed_then_none_is_refused_but_those_that_differ(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed (the extra `dev` has it)")
    given = {name: value for name, value in defaults(trl.DPOConfig).items() if name not in ("output_dir", "bf16")}
    args = config(tmp_path, **{**given, "remove_unused_columns": False, "report_to": "none", "use_cpu": True})
    assert (args.objective, args.hyperparameters, args.truncation) == ("dpo", {"beta": 0.1}, "keep_start")
