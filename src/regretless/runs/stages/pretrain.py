"""Stage `pretrain`: models trained before everything else, each from its own data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from regretless.runs.stages.stage import Run
from regretless.runs.stages.train import Training
from regretless.workflow.run_folder import Unit, resolve

if TYPE_CHECKING:
    from regretless.runs.recipe import PretrainConfig


class Pretrain(Training["Mapping[str, PretrainConfig]"]):
    """Trains models that other stages start from."""

    name = "pretrain"

    def units(self, config: Mapping[str, PretrainConfig], run: Run) -> Iterator[Sequence[Unit]]:
        """A group for each model."""
        for name, entry in config.items():
            data = resolve(entry, run.root).data
            yield [self.unit(run, name, entry, entry.objectives[0], entry.model, data, {"data": entry.data})]


STAGE = Pretrain()
