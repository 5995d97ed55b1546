"""Settings of the train stage: pairs of a step, and the processes that share them."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from regretless.core.errors import ConfigError
from regretless.objectives import OBJECTIVES
from regretless.objectives.dpo import DPO
from regretless.training import train_config
from regretless.training.argument_checks import Verdict
from regretless.training.arguments import ARGUMENTS
from regretless.training.train_config import TrainConfig


@pytest.mark.parametrize(
    ("settings", "count", "pairs", "arguments"),
    [
        ({}, 1, 8, (8, 1)),
        ({"pairs_per_step": 128}, 8, 128, (16, 1)),
        ({"pairs_per_step": 128, "gradient_accumulation_steps": 4}, 8, 128, (4, 4)),
        ({"pairs_per_step": 128, "methods": {"dpo": {"pairs_per_step": 32}}}, 8, 32, (4, 1)),
        ({"per_device_train_batch_size": 4}, 8, 32, (4, 1)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, 8, 64, (4, 2)),
    ],
)
def test_step_when_divided_by_processes_then_it_has_the_pairs_that_are_asked_for(
    settings: dict[str, object], count: int, pairs: int, arguments: tuple[int, int]
) -> None:
    config = TrainConfig(objective="dpo", **settings)
    assert config.step_pairs("dpo", count) == pairs
    assert tuple(config.batch_arguments("dpo", count).values()) == arguments


def test_processes_when_left_open_then_there_is_one_for_each_gpu_and_the_result_does_not_depend_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for gpus, count in ((0, 1), (1, 1), (4, 4)):
        monkeypatch.setattr(train_config, "visible_gpus", lambda gpus=gpus: gpus)
        config = TrainConfig(objective="dpo", pairs_per_step=12, strategy="fsdp2", processes="auto")
        assert config.process_count("dpo") == count
        results.append(config.result_settings("dpo", count))
    assert results[0] == results[1] == results[2] == {"pairs_per_step": 12}
    assert TrainConfig(objective="dpo", use_cpu=True).process_count("dpo") == 1
    assert TrainConfig(objective="dpo", processes=2).process_count("dpo") == 2
    # A launcher's processes replace those of the settings.
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert TrainConfig(objective="dpo", processes=2).process_count("dpo") == 3
    # A batch size for each process makes another step on another number of them.
    assert TrainConfig(objective="dpo", per_device_train_batch_size=2).result_settings("dpo", 3) == {
        "pairs_per_step": 6
    }


def test_processes_when_there_are_too_few_gpus_or_pairs_then_the_problems_say_which_number_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_config, "visible_gpus", lambda: 6)
    (problem,) = TrainConfig(objective="dpo", pairs_per_step=128).problems_here("dpo")
    assert problem.startswith("pairs_per_step: 128 pairs cannot be divided equally by 6 processes;")
    assert problem.endswith("or 4 processes")
    divided, asked = TrainConfig(objective="dpo", processes=9).problems_here("dpo")
    assert asked == "processes: 9 were asked for, and 6 GPU(s) are visible; each process needs one"
    assert divided.startswith("pairs_per_step: 8 pairs") and divided.endswith("or 8 processes")
    alone = TrainConfig(objective="dpo", processes=1, use_cpu=True, methods={"dpo": {"fsdp": "full_shard"}})
    (problem,) = alone.problems_here("dpo")
    assert problem.startswith("methods.dpo.fsdp: shards a model over several processes, and one trains here;")
    own = TrainConfig(objective="dpo", pairs_per_step=6, methods={"dpo": {"pairs_per_step": 9}})
    (problem,) = own.problems_here("dpo")
    assert problem.startswith("methods.dpo.pairs_per_step: 9 pairs") and problem.endswith("or 3 processes")


def test_terms_when_several_are_unusable_then_each_problem_is_that_of_the_objective_under_a_key_of_its_own() -> None:
    terms = [{"objective": "dpo", "beta": -1}, {"objective": "sft", "weight": -2}]
    expected = [
        "terms.0.beta: input should be greater than 0 (got -1)",
        "terms.1.weight: expected a number of at least 0, got -2",
    ]
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse({"objective": "weighted_sum", "terms": terms}, "train")
    assert caught.value.problems == expected
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse({"objective": "weighted_sum", "methods": {"weighted_sum": {"terms": terms}}}, "train")
    assert caught.value.problems == [f"methods.weighted_sum.{problem}" for problem in expected]


def test_parallelism_inside_a_model_when_written_in_a_file_then_it_is_refused_with_all_other_problems() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainConfig.model_validate({"objective": "dpo", "parallelism_config": {"cp_size": 2}, "beta": -1})
    problems = {error["loc"]: error["msg"] for error in caught.value.errors()}
    assert "sequence_parallel_size divides sequences" in problems["parallelism_config",]
    assert ("beta",) in problems


class _Clashing(DPO):
    """An objective of somebody's own, with hyperparameters that are named like settings of training."""

    label_smoothing: float = 0.0
    learning_rate: float = 0.5
    strategy: str = "a"


def test_hyperparameter_when_it_is_named_like_a_setting_of_training_then_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OBJECTIVES, "dpo", _Clashing)
    with pytest.raises(ConfigError) as error:
        TrainConfig.parse({"objective": "dpo", "learning_rate": 1e-4}, "train")
    assert error.value.problems == [
        "objective: expected hyperparameters that are no settings of training, got learning_rate, strategy of dpo; "
        "rename them in its package"
    ]
    # It is not in the way of others.
    assert TrainConfig.parse({"objective": "ipo", "learning_rate": 1e-4}, "train").split_for("ipo")[0] == {}


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("hub_strategy", "checkpoint", "optimizer states are not uploaded, so nothing could resume"),
        ("max_steps", 0, "expected 1 to 1000000000000, or -1 for as many as num_train_epochs takes, got 0"),
        ("save_strategy", "epochs", "expected one of no, steps, epoch, best, got 'epochs'"),
        ("report_to", 5, "expected a tracker's name, or a list of them, got 5"),
        ("dataset_num_proc", 1, "the tokenizer uses all cores in one process"),
        ("padding_free", True, "not used here: rows have no padding"),
        ("sync_ref_model", False, "not used here: the reference is fixed"),
        ("do_eval", True, "training has no such switch here; set eval_pairs"),
    ],
)
def test_argument_when_a_recipe_cannot_have_it_then_the_recipe_is_refused_as_it_is_read(
    key: str, value: object, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse({key: value}, "train")
    (line,) = caught.value.problems
    assert line.startswith(key) and problem in line


def test_rules_of_arguments_when_they_refuse_or_leave_out_then_they_say_what_to_do() -> None:
    assert {rule.verdict for rule in ARGUMENTS.values()} == set(get_args(Verdict))
    assert not [name for name, rule in ARGUMENTS.items() if bool(rule.advice) != (rule.verdict != "taken")]
