"""The train stage: a trained model or adapter from a pairs file and a model, by as many processes as it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regretless.core.errors import reject
from regretless.core.ranks import processes
from regretless.modeling.load import ModelConfig
from regretless.training.processes import train_in_processes
from regretless.training.ray_train import RayWorkers, train_on_ray
from regretless.training.task import task_of, train_in_this_process
from regretless.training.train_config import TrainConfig
from regretless.workflow.stage_folder import CACHE


def run(
    config: TrainConfig,
    objective: str,
    model: ModelConfig,
    pairs: Path | str,
    output: Path,
    ray_workers: RayWorkers | None = None,
    template: str | None = "plain",
    reference: ModelConfig | None = None,
    optimizer: Path | None = None,
    keep_optimizer: bool = False,
) -> dict[str, Any]:
    """Train `model` with one method on a pairs file; writes a model or adapter with tokenizer to `output`.

    template: what the pairs' text prompts are put into; None for what suits the model (`TextPrompts`). reference: the
    reference model of a method that reads one; by default `model`, as it is before training. optimizer: the file of an
    earlier training of the same weights, whose optimizer's state this one begins with; `keep_optimizer` writes it, to
    optimizer.pt.
    Starts as many processes as the settings say, unless a launcher has started this one among several; with
    `ray_workers`, trains on these. Resumes from the last complete checkpoint in `output`. Also written:
    trainer_state.json (the log), pair_scores.jsonl with the rewards of the held-out pairs, where there are any, and,
    beside `output` in `<output>.cache`, refused-pairs.jsonl (rejected rows with reasons).

    Raises ConfigError, DataError or NonFiniteLossError.
    """
    count = config.process_count(objective)
    if ray_workers is None and count == processes():
        return train_in_this_process(
            config, objective, model, pairs, output, template, reference, optimizer, keep_optimizer
        )
    task, folder = (
        task_of(config, objective, model, pairs, output, template, reference, optimizer, keep_optimizer),
        output.with_name(output.name + CACHE) / "processes",
    )
    if ray_workers is None:
        return train_in_processes(task, count, folder, config.environment(objective))
    reject(f"train {objective}", config.division_problems(objective, ray_workers.count))
    return train_on_ray(task, ray_workers, folder, config.environment(objective))
