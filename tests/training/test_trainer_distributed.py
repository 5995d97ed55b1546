"""Two processes on one machine (gloo) against one process with the same global batch."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import merge_fsdp_weights
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forked import together
from launching import (
    ALONE,
    ARGUMENTS,
    CONFIGURATIONS,
    MODEL,
    accelerate,
    assert_equal,
    assert_logged,
    torchrun,
    train,
)
from regretless.cli import app
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.training_folder import checkpoint_problem, last_complete_checkpoint
from regretless.training.sharding import FSDP2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "objective", "lora"),
    [
        pytest.param(torchrun(2), "kto", False, marks=pytest.mark.extended),
        (accelerate("ddp.yaml"), "repo", True),
        pytest.param(2, "repo", False, marks=pytest.mark.everyday),
        pytest.param(accelerate("fsdp2.yaml"), "kto", True, marks=pytest.mark.extended),
        pytest.param(accelerate("fsdp2.yaml"), "tdpo", True, marks=pytest.mark.extended),
    ],
    ids=["torchrun-kto", "ddp-repo-lora", "fsdp2-repo", "fsdp2-kto-lora", "fsdp2-tdpo-lora"],
)
def test_two_processes_when_given_the_same_global_batch_then_weights_and_log_are_those_of_one(
    launcher: list[str] | int,
    objective: str,
    lora: bool,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[TokenizedPair],
) -> None:
    # 39 pairs, 19 a step: the last step has a single pair, which one of two processes goes without.
    data = pairs[:39]
    common = {"pairs": data, "tokenizer": tokenizer, "lora": lora}
    arguments = ARGUMENTS | {"objective": objective}
    assert len(data) == 39
    one, one_log = train(
        tmp_path / "one",
        ALONE,
        **common,
        arguments={**arguments, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 19},
    )
    # Two processes have less space: queries are larger than a micro-batch, by another number of rows in each process.
    smaller = {"per_device_train_batch_size": 19, "max_tokens_per_microbatch": 18}
    two, two_log = train(
        tmp_path / "two", launcher, sharded=launcher == 2, **common, arguments={**arguments, **smaller}
    )
    assert_equal(two, one)
    keys = ("loss", "rewards/margins", "eval_loss", "eval_rewards/accuracies")
    assert_logged(two_log, one_log, keys, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_trainer_when_only_the_launcher_shards_then_compiled_layers_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, pairs: list[TokenizedPair]
) -> None:
    arguments = ARGUMENTS | {"objective": "dpo", "compile_layers": True}
    with pytest.raises(AssertionError, match="ConfigError: compile_layers: not together with FSDP"):
        train(tmp_path, 2, sharded=True, pairs=pairs[:6], tokenizer=tokenizer, lora=False, arguments=arguments)


@pytest.mark.slow
def test_two_processes_when_experts_are_balanced_then_each_counts_by_its_share_of_the_tokens(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, pairs: list[TokenizedPair]
) -> None:
    # One process has two micro-batches, a query in each; two processes have one of them each.
    prompts = list(dict.fromkeys(pair.prompt_ids for pair in pairs))
    data = [pair for pair in pairs if pair.prompt_ids in (prompts[1], prompts[7])]
    mixture = {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    task = {"pairs": data, "tokenizer": tokenizer, "lora": False, "model": MODEL | mixture}
    arguments = ARGUMENTS | {"objective": "dpo", "router_aux_loss_coef": 0.5, "logging_steps": 1, "learning_rate": 0.1}
    assert len(data) == 8
    one, one_log = train(tmp_path / "one", ALONE, **task, arguments={**arguments, "per_device_train_batch_size": 8})
    two, two_log = train(tmp_path / "two", 2, **task, arguments={**arguments, "per_device_train_batch_size": 4})
    assert_equal(two, one)
    for key in ("loss", "aux_loss", "tokens/computed"):
        assert two_log[0][key] == pytest.approx(one_log[0][key], rel=1e-5), key
    assert one_log[0]["loss"] == pytest.approx(0.6931 + 0.5 * one_log[0]["aux_loss"], abs=1e-4)


@pytest.mark.extended
@pytest.mark.slow
def test_two_processes_when_few_steps_are_asked_for_then_both_have_the_references_that_these_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, pairs: list[TokenizedPair]
) -> None:
    task = {"pairs": pairs, "tokenizer": tokenizer, "lora": False}
    arguments = ARGUMENTS | {"objective": "kto", "max_steps": 2, "eval_strategy": "no"}
    one, _ = train(tmp_path / "one", ALONE, **task, arguments={**arguments, "per_device_train_batch_size": 6})
    two, _ = train(tmp_path / "two", torchrun(2), **task, arguments={**arguments, "per_device_train_batch_size": 3})
    assert_equal(two, one)
    items = [
        sum(len(np.load(file)) for file in (tmp_path / name / "out.cache").rglob("part-*.npy"))
        for name in ("one", "two")
    ]
    whole = len({(pair.prompt_ids, ids) for pair in pairs for ids in (pair.chosen.ids, pair.rejected.ids)})
    assert 0 < items[0] <= items[1] < whole


@pytest.mark.slow
def test_sharded_checkpoint_when_the_next_one_is_damaged_then_training_goes_on_from_it_and_one_process_reads_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, pairs: list[TokenizedPair]
) -> None:
    arguments = ARGUMENTS | {
        "objective": "dpo",
        "optim": "adamw_torch",
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 3,  # a line is made of steps on both sides of the checkpoint
    }
    task = {"pairs": pairs, "tokenizer": tokenizer, "lora": False, "arguments": arguments}
    whole, log = train(tmp_path / "run", 2, sharded=True, **task)
    assert log[-1]["step"] == 5
    last, damaged, middle = (tmp_path / "run" / "out" / f"checkpoint-{step}" for step in (5, 4, 2))
    merge_fsdp_weights(str(last / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    assert_equal(load_file(tmp_path / "merged" / "model.safetensors"), whole)
    shutil.rmtree(last)
    (shard,) = (damaged / "optimizer_0").glob("__1_*.distcp")
    shard.write_bytes(bytes(shard.stat().st_size))
    assert last_complete_checkpoint(last.parent) == (
        str(middle),
        [f"checkpoint-4: optimizer_0/{shard.name} is not as it was written"],
    )
    again, log_again = train(tmp_path / "run", 2, sharded=True, **task, resume=True)
    assert checkpoint_problem(damaged) is None, "it was written anew"
    assert_equal(again, whole)
    assert_logged(log_again, log, ("loss", "rewards/margins", "logps/chosen", "eval_loss", "train_loss"), rel=1e-6)


@pytest.mark.slow
def test_train_verb_when_two_processes_hold_out_pairs_then_scores_and_adapter_are_those_of_one(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel]
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ["w4", "w5", "w6", "w8", "w9"]
    sides = [" ".join(side) for side in itertools.product(words, repeat=3)]
    rows = [
        {
            "pair_id": f"p{number}",
            "prompt": sides[number // 2],
            "chosen": f"{sides[-number]} w4",
            "rejected": sides[number],
        }
        for number in range(1, 41)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(output: Path) -> list[str]:
        files = {"--pairs": tmp_path / "pairs.jsonl", "--model": tmp_path / "model", "--output": output}
        settings = ["objective=dpo", "eval_pairs=9", "pairs_per_step=8", "optim=sgd", "max_steps=2", "lora.r=4"]
        return ["train", *(str(word) for item in files.items() for word in item), *settings, "lora.dropout=0"]

    one, two = tmp_path / "one", tmp_path / "two"
    with pytest.raises(SystemExit, match="0"):
        app.main(command(one))
    together(2, app.main, command(two))
    scores = [[json.loads(line) for line in (run / "pair_scores.jsonl").open()] for run in (one, two)]
    assert len(scores[0]) in (9, 10)  # whole prompts
    assert [row["pair_id"] for row in scores[0]] == [row["pair_id"] for row in scores[1]]
    for mine, other in zip(*scores, strict=True):
        assert other["chosen_reward"] == pytest.approx(mine["chosen_reward"], rel=1e-4, abs=1e-7)
        assert other["rejected_reward"] == pytest.approx(mine["rejected_reward"], rel=1e-4, abs=1e-7)
    assert_equal(load_file(two / "adapter_model.safetensors"), load_file(one / "adapter_model.safetensors"))


@pytest.mark.parametrize("file", sorted(CONFIGURATIONS.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_configuration_when_parsed_then_it_launches_what_its_name_says(file: Path) -> None:
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    machines = 2 if file.stem.endswith("-nodes") else 1
    assert (settings["num_machines"], settings["num_processes"]) == (machines, 8 * machines)
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    environment = prepare_multi_gpu_env(arguments)
    assert (arguments.num_machines, arguments.multi_gpu) == (machines, file.stem.startswith("ddp"))
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if file.stem.startswith("fsdp2"):
        assert environment["ACCELERATE_USE_FSDP"] == "true"
        assert environment["FSDP_VERSION"] == "2"
        assert environment["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"
        assert environment.items() >= FSDP2.items(), "what a recipe's strategy sets up"
