"""Stage `pretrain`: models trained before everything else, each from its own data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regretless.runs.stages.stage import Listing, Run
from regretless.runs.stages.tiny import BEHAVIOR, behavior_of, has_data, tiny, trained_name
from regretless.runs.stages.train import MINIATURE, Training, kept
from regretless.workflow.run_folder import RUN, Unit, resolve

if TYPE_CHECKING:
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import PretrainConfig, Recipe

STEPS, BATCH = 100, 16
"""Of a model in miniature."""


class Pretrain(Training["Mapping[str, PretrainConfig]"]):
    """Trains models that other stages start from."""

    name = "pretrain"

    def units(self, config: Mapping[str, PretrainConfig], run: Run) -> Iterator[Sequence[Unit]]:
        """A group for each model."""
        for name, entry in config.items():
            data = resolve(entry, run.root).data
            yield [self.unit(run, name, entry, entry.objectives[0], entry.model, data, {"data": entry.data})]

    def problems(self, config: Mapping[str, PretrainConfig], machine: Machine) -> None:
        """Problems of every model's arguments and data."""
        for name, entry in config.items():
            key = f"{self.name}.{name}"
            machine.path_or_hub(f"{key}.data", entry.data, "dataset")
            self.check(key, entry, machine)

    def finished(self, config: Mapping[str, PretrainConfig], listed: Listing) -> Iterator[str]:
        """Those of the models."""
        yield from (f"{self.name}.{name}" for name in config if listed.done(f"{self.place}/{name}"))

    def contents(self, config: Mapping[str, PretrainConfig]) -> Collection[str]:
        """The models."""
        return config

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """A hundred steps of tiny models; of the behavior models, if the recipe trains none itself."""
        from regretless.modeling.load import ModelConfig

        entries = dict(section or {})
        if not entries and has_data(recipe):
            demonstrations = f"{RUN}/world/demonstrations-{BEHAVIOR}.jsonl"
            for model in behavior_of(recipe):
                started = {"model": tiny(model), "data": demonstrations, "lora": None}
                entries[trained_name(model)] = started
        return {
            name: {
                **kept(entry),
                **MINIATURE,
                **{"max_steps": STEPS, "pairs_per_step": BATCH, "learning_rate": 0.01, "warmup_steps": 5},
                **{"model": tiny(ModelConfig(**entry["model"])), "methods": {}},
            }
            for name, entry in entries.items()
        }


STAGE = Pretrain()
