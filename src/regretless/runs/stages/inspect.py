"""Stage `inspect`: numbers about the pairs as the objectives will see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.errors import RegretlessError
from regretless.core.settings import dump
from regretless.core.terminal import print_note
from regretless.runs.stages.benchmark_prompts import compared, with_benchmarks, without_benchmarks
from regretless.runs.stages.stage import PAIRS, Run, Session, Stage, file_input, hub_setting
from regretless.workflow.run_folder import Unit
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.analysis.inspect import InspectConfig
    from regretless.runs.recipe import Recipe
    from regretless.training.train_config import TrainConfig

DEFAULT_OBJECTIVES = ("repo_det", "dpo")
"""Objectives that it uses if no training is configured: they accept any pairs."""
LENGTHS = ("max_length", "max_prompt_length", "truncation")
"""Settings that decide which pairs are too long. `inspect` and `train` have the same defaults."""


class Inspect(Stage["InspectConfig"]):
    """Reports about pairs before training."""

    name = "inspect"
    writes = ("inspect.json", "refused.jsonl")
    work = "regretless.analysis.inspect"
    about = "Report before training what the objectives will see in the pairs."
    reads = "pairs, a model"
    makes = "what the objectives will see: lengths, margins, saturation, rejected rows"
    flags = ("pairs", "model", "objective")
    optional = ("objective",)
    neighbor = "train"
    prints_tables = True
    uses = ("pairs", "model")
    is_read = False

    def units(self, config: InspectConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the numbers for all objectives."""
        source, train = run.latest(PAIRS, self.name), run.recipe.train
        config = as_trained(config, train)
        objectives: dict[str, Mapping[str, Any]] = {name: {} for name in config.objectives or DEFAULT_OBJECTIVES}
        if train is not None and not config.objectives:
            objectives = {name: train.split_for(name)[0] for name in train.objectives}
        named, asked, questions = compared(run)
        settings = {
            **dump(config),
            **named,
            "model": dump(run.model),
            "objectives": objectives,
            **hub_setting("pairs", source),
            "template": run.template,
        }
        task = {
            "config": config,
            "pairs": Path(source),
            "model": run.model,
            "objectives": objectives,
            "template": run.template,
            **asked,
        }
        inputs, need = file_input("pairs", source) | questions, Need("inspect", gpus=1)
        yield [run.unit(self, self.place, settings, task, inputs=inputs, need=need)]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Inspect the pairs; benchmarks that cannot be read now may still be evaluated elsewhere."""
        try:
            unit = with_benchmarks(unit)
        except RegretlessError as error:
            print_note(f"inspect: prompts are not compared with those of the benchmarks: {error}")
            unit = without_benchmarks(unit)
        return super().do(unit, place, session)

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """Without other models."""
        return None if section is None else {**section, "behavior": None, "rescore": False}


def as_trained(config: InspectConfig, train: TrainConfig | None) -> InspectConfig:
    """The settings of `inspect`, with the lengths of the first method to train where `inspect` sets none itself."""
    if train is None:
        return config
    values = train.values_for(train.objectives[0])
    missing = [name for name in LENGTHS if name in values and name not in config.model_fields_set]
    return config.model_copy(update={name: values[name] for name in missing})


STAGE = Inspect()
