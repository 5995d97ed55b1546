"""Stage `train`: a trained model for each method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.errors import ConfigError
from regretless.core.settings import dump
from regretless.runs.stages.stage import PAIRS, C, Run, Session, Stage, file_input, hub_setting
from regretless.workflow.run_folder import Unit, resolve
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.modeling.load import ModelConfig
    from regretless.training.train_config import TrainConfig


class Training(Stage[C]):
    """A stage that trains models, each in a folder and a group of its own."""

    def unit(
        self,
        run: Run,
        name: str,
        config: TrainConfig,
        objective: str,
        model: ModelConfig,
        data: Path | str,
        source: Mapping[str, str],
    ) -> Unit:
        """One training. source: the data as a setting, if a setting names them."""
        from regretless.training.ray_train import workers_of

        workers = None if run.cluster is None else workers_of(run.cluster.train, config.processes)
        count = config.process_count(objective) if workers is None else workers.count
        # Only settings of this method: a change of another method does not affect it. Neither does the number of
        # processes.
        settings = {
            "objective": objective,
            "values": config.result_settings(objective, count),
            "lora": config.lora and dump(config.lora),
            "eval_pairs": config.eval_pairs,
            "model": dump(model),
            **source,
        }
        task = {
            "config": resolve(config, run.root),
            "objective": objective,
            "model": resolve(model, run.root),
            "pairs": data,
            "ray_workers": workers,
        }
        inputs, place = file_input("pairs", data), f"{self.place}/{name}"
        return run.unit(self, place, settings, task, inputs, need=Need("train", gpus=1), group=name)

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Train the model."""
        from regretless.training import train

        return train.run(**unit.task, output=place)


class Train(Training["TrainConfig"]):
    """Trains on preference pairs."""

    name = "train"
    about = "Train a model on preference pairs, for example with objective=dpo beta=0.1 learning_rate=1e-5."
    reads = "pairs, a model"
    makes = "a trained model or adapter"
    flags = ("pairs", "model", "adapter")

    def units(self, config: TrainConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """A group for each method."""
        if run.output is not None and len(config.objectives) != 1:
            methods = ", ".join(config.objectives)
            raise ConfigError(f"objective: expected one for this command, got {methods}; a recipe trains several")
        pairs = run.latest(PAIRS, self.name)
        for objective in config.objectives:
            yield [self.unit(run, objective, config, objective, run.model, pairs, hub_setting("data", pairs))]

    def after(self, config: TrainConfig, run: Run) -> None:
        """Add the run's data to the models' cards."""
        from regretless.runs import cards

        cards.refresh_cards(run, lambda method, facts: {"data": {**facts.data, **cards.data_of(run)}})


STAGE = Train()
