"""Trains the given pairs and saves weights and log, for the distributed tests to launch. Not a test by itself."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from regretless import PreferenceConfig, PreferenceTrainer
from regretless.modeling import sequence_parallel
from regretless.modeling.layout import Segment
from regretless.modeling.sequence_parallel import SequenceGroup
from regretless.training.sharding import let_cpus_shard


def own_tokens_only(*states: Any, sequence: SequenceGroup, by: str, **options: Any) -> Any:
    """A planted fault: attention in which each process sees its own part of a row."""
    (query, _, _), segments = states[1:4], options.pop("segments")
    assert sum(segment.length for segment in segments) == query.shape[2] * sequence.size
    return AttentionInterface()[by](*states, segments=(Segment(query.shape[2]),), **options)


def work(folder: Path) -> None:
    """Train as the task file says; process 0 writes the weights and `log.json` beside it."""
    task = pickle.loads((folder / "task.pickle").read_bytes())
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        let_cpus_shard()
    if task.get("plant"):
        AttentionInterface.register(sequence_parallel.NAME, own_tokens_only)
    # The other processes start with other weights, as without a seed; those of rank 0 count.
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "qwen3", **task["model"]}))
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if task["lora"] else None
    trainer = PreferenceTrainer(
        model,
        args=PreferenceConfig(output_dir=str(folder / "out"), **task["arguments"]),
        train_dataset=task["pairs"],
        eval_dataset=task["pairs"][:7],
        processing_class=task["tokenizer"],
        peft_config=lora,
    )
    trainer.train(resume_from_checkpoint=task.get("resume"))
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
    # Without taking anything apart: that can hang, as `regretless.__main__` says.
    os._exit(0)
