"""Processes that compute each row together (gloo), against one process with the same pairs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forked import together
from launching import ALONE, ARGUMENTS, MODEL, assert_equal, assert_logged, train
from regretless import PreferenceConfig, PreferenceTrainer
from regretless.core.errors import ConfigError
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.forward import grouped, response_scores
from regretless.modeling.layout import lay_out
from regretless.modeling.sequence_parallel import SequenceGroup, check_sequence_parallel
from regretless.training.sequence import sequence_group
from regretless.training.train_config import TrainConfig
from tiny_kinds import needs_states, tiny_of_kind

LOGGED = (
    *("loss", "grad_norm", "rewards/margins", "logps/chosen", "entropy", "num_tokens"),
    *("eval_loss", "eval_rewards/accuracies"),
)

WINDOW = {"model_type": "gemma2", "sliding_window": 5}
SINKS = {"model_type": "gpt_oss", "num_key_value_heads": 2, "num_local_experts": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "size", "groups", "objective", "model", "more"),
    [
        # Queries are larger than a micro-batch: rows are computed without gradient, then with it.
        (2, 2, 1, "repo", {}, {"max_tokens_per_microbatch": 18}),
        pytest.param(*(4, 2, 2, "kto", WINDOW, {}), marks=pytest.mark.extended),
        # Two heads of keys for four processes with one head each.
        (4, 4, 1, "dpo", SINKS, {"gradient_checkpointing": True}),
        (2, 2, 1, "tdpo", {}, {}),
    ],
    ids=["repo", "two-groups-kto", "shared-keys-sinks-dpo", "fsdp2-tdpo"],
)
def test_processes_when_they_compute_each_row_together_then_weights_and_log_are_those_of_one(
    count: int,
    size: int,
    groups: int,
    objective: str,
    model: dict[str, Any],
    more: dict[str, Any],
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[TokenizedPair],
) -> None:
    data = pairs[:36]
    task = {"pairs": data, "tokenizer": tokenizer, "lora": objective != "dpo", "model": MODEL | model}
    arguments = ARGUMENTS | {"objective": objective, "logging_steps": 1} | more
    one, one_log = train(tmp_path / "one", ALONE, **task, arguments={**arguments, "per_device_train_batch_size": 18})
    together = {"per_device_train_batch_size": 18 // groups, "sequence_parallel_size": size}
    several, log = train(
        tmp_path / "several", count, sharded=objective == "tdpo", **task, arguments={**arguments, **together}
    )
    assert_equal(several, one)
    assert len(one_log) == len(log)
    # Two groups divide a step's pairs, and compute a prompt that both have twice.
    counts = () if groups > 1 else ("tokens/computed", "tokens/saved", "tokens/recomputed")
    assert_logged(log, one_log, (*LOGGED, *counts), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_checkpoint_when_one_process_goes_on_from_that_of_two_then_weights_and_log_are_those_of_two(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, pairs: list[TokenizedPair]
) -> None:
    task = {"pairs": pairs[:36], "tokenizer": tokenizer, "lora": True}
    arguments = ARGUMENTS | {"objective": "dpo", "per_device_train_batch_size": 9, "logging_steps": 3}
    arguments |= {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
    two, log = train(tmp_path / "two", 2, **task, arguments={**arguments, "sequence_parallel_size": 2})
    checkpoint = tmp_path / "two" / "out" / "checkpoint-2"
    one, log_again = train(tmp_path / "one", ALONE, **task, arguments=arguments, resume=str(checkpoint))
    assert log[-1]["step"] == 4
    assert_equal(one, two)
    assert_logged(log_again, log, ("loss", "num_tokens", "tokens/computed", "train_loss"), rel=1e-5)


@pytest.mark.slow
def test_processes_when_each_attends_to_its_own_tokens_only_then_they_refuse_before_the_first_step(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, pairs: list[TokenizedPair]
) -> None:
    # What torch's context parallelism does on CPUs, without an error (experiments/context_parallel.py).
    arguments = ARGUMENTS | {"objective": "dpo", "sequence_parallel_size": 2}
    task = {"pairs": pairs, "tokenizer": tokenizer, "lora": True, "arguments": arguments}
    with pytest.raises(AssertionError, match="sequence_parallel_size: Qwen3ForCausalLM gives log-probabilities that"):
        train(tmp_path, 2, **task, plant="attention of each process's own tokens")


def test_model_when_its_layers_cannot_be_divided_then_it_is_refused_with_the_reason() -> None:
    check_sequence_parallel(tiny_of_kind("qwen3"), 4)
    with pytest.raises(ConfigError, match="4 attention heads of Qwen3ForCausalLM cannot be divided equally among 3"):
        check_sequence_parallel(tiny_of_kind("qwen3"), 3)


@needs_states
def test_model_when_it_has_recurrent_layers_then_dividing_its_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Jamba.* has recurrent layers"):
        check_sequence_parallel(tiny_of_kind("jamba"), 2)


def test_arguments_when_rows_cannot_be_divided_then_all_problems_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        PreferenceConfig(output_dir=str(tmp_path), sequence_parallel_size=2, rows="plain", compile_layers=True)
    assert "sequence_parallel_size: not together with rows" in str(caught.value)
    assert "sequence_parallel_size: not together with compile_layers" in str(caught.value)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size: .*got 0"):
        PreferenceConfig(output_dir=str(tmp_path), sequence_parallel_size=0)


def test_trainer_when_alone_then_it_refuses_to_share_rows(
    make_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[TokenizedPair],
    tmp_path: Path,
) -> None:
    args = PreferenceConfig(output_dir=str(tmp_path), sequence_parallel_size=2, report_to="none")
    with pytest.raises(ConfigError, match="2 does not divide 1, the number of processes"):
        PreferenceTrainer(make_model(), args=args, train_dataset=pairs, processing_class=tokenizer)


def test_trainer_when_a_row_cannot_be_divided_then_it_refuses_with_the_reason(
    make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("regretless.training.sequence.processes", lambda: 2)
    args = PreferenceConfig(output_dir=str(tmp_path), sequence_parallel_size=2, report_to="none")
    with pytest.raises(ConfigError, match="not together with the load-balancing loss of a mixture of experts"):
        sequence_group(args, make_model(), 0.1)


@pytest.mark.slow
def test_processes_when_the_model_needs_plain_rows_then_they_refuse_to_share_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, pairs: list[TokenizedPair]
) -> None:
    arguments = ARGUMENTS | {"objective": "dpo", "sequence_parallel_size": 2}
    task = {"pairs": pairs, "tokenizer": tokenizer, "lora": False, "arguments": arguments}
    bloom = {"model_type": "bloom", "n_head": 4, "n_layer": 2}
    with pytest.raises(
        AssertionError, match="sequence_parallel_size: needs shared rows, and this model is computed in plain rows"
    ):
        train(tmp_path, 2, **task, model=bloom | {"vocab_size": 40, "hidden_size": 32})


def test_step_when_processes_share_rows_then_its_pairs_are_divided_among_their_groups() -> None:
    config = TrainConfig.parse({"objective": "dpo", "pairs_per_step": 6, "sequence_parallel_size": 2}, "train")
    assert config.batch_arguments("dpo", 4)["per_device_train_batch_size"] == 3
    assert config.division_problems("dpo", 4) == []
    (problem,) = config.division_problems("dpo", 3)
    assert problem == "sequence_parallel_size: 2 does not divide 3, the number of processes"
    (problem,) = config.division_problems("dpo", 8)
    assert "8 processes of which 2 compute each row together" in problem and problem.endswith("or 6 processes")
    # As with the number of processes, the result is the same.
    plain = TrainConfig.parse({"objective": "dpo", "pairs_per_step": 6}, "train")
    assert config.result_settings("dpo", 4) == plain.result_settings("dpo", 1)


def compare_attention(folder: Path) -> None:
    """In each of two processes: scores of a row together and alone, by the attention of CPUs and by that of GPUs."""
    torch.distributed.init_process_group("gloo")
    model, sequence = tiny_of_kind("gemma2", sliding_window=5), SequenceGroup.of_neighbors(2)
    layout, _ = lay_out([((4, 5, 6, 7), (8, 9, 2)), ((4, 5, 6, 7), (8, 10, 11, 2)), ((12,), tuple(range(13, 39)))])
    found = []
    for one_row, group in itertools.product((False, True), (None, sequence)):
        with torch.no_grad(), grouped(model, one_row=one_row, sequence=group):
            found.append(response_scores(model, layout).logps)
    torch.save(found, folder / f"scores-{os.environ['RANK']}.pt")


@pytest.mark.slow
def test_scores_when_two_processes_compute_a_row_together_then_both_attentions_give_those_of_one(
    tmp_path: Path,
) -> None:
    together(2, compare_attention, tmp_path)
    expected, *others = torch.load(tmp_path / "scores-0.pt")
    assert len(expected) == 33 and expected.std() > 0.1
    for scores in (*others, *torch.load(tmp_path / "scores-1.pt")):
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-9)
