"""Stage `rollout`: the regret of each unit of a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.data.regret_table import REGRET
from regretless.runs.stages.sample import MINIATURE
from regretless.runs.stages.stage import RESPONSES, Run, Stage
from regretless.runs.stages.tiny import has_data
from regretless.workflow.run_folder import Unit
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.rollouts.rollout import RolloutConfig
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import Recipe


class Rollout(Stage["RolloutConfig"]):
    """Measures regret."""

    name = "rollout"
    writes = (REGRET, RESPONSES, "reference-*", "writer-*", "refused.jsonl")
    work = "regretless.rollouts.rollout"
    about = "Measure the regret of each step of a response, with intervals, by continuations from its beginnings."
    reads = "responses with verdicts, a model"
    makes = "success rates, values and regret of every unit, with intervals"
    flags = ("responses", "model")
    neighbor = "verify"
    uses = ("responses", "model")
    result = RESPONSES
    counted = (("responses", "responses"), ("continuations", "requests"), ("tokens", "tokens_out"))

    def units(self, config: RolloutConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the measured responses."""
        from regretless.labeling.verify import VerifyConfig

        responses = Path(run.latest(RESPONSES, self.name))
        sample = run.recipe.sample
        if not config.writers and sample is not None:
            config = config.model_copy(update={"writers": sample.models})
        verifier = run.recipe.verify or VerifyConfig()
        settings = {**dump(config), "model": dump(run.model), "verify": dump(verifier)}
        task = {"config": config, "responses": responses, "model": run.model, "verifier": verifier}
        inputs, need = {"responses": responses}, Need("rollout", gpus=1)
        yield [run.unit(self, self.place, settings, task, inputs=inputs, need=need)]

    def problems(self, config: RolloutConfig, machine: Machine) -> None:
        """Problems of the engine and of its server."""
        from regretless.sampling.engines import ENGINES

        super().problems(config, machine)
        machine.under(f"{self.name}.engine", ENGINES.find(config.engine).check)
        if config.server is not None:
            machine.under(f"{self.name}.server", config.server.api_key)

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """A few continuations by the models that wrote the miniature's responses."""
        if section is None or not has_data(recipe):
            return None
        # A method that is trained on continuations needs those of all responses.
        most = None if section.get("keep_continuations") else 1
        few: dict[str, Any] = {"k": 2, "most": None, "max_tokens": MINIATURE["max_new_tokens"]}
        few |= {"max_correct": most, "max_wrong": most}
        few |= {"batch_size": MINIATURE["batch_size"], "column": None, "writers": []}
        return {**section, **few, "engine": "transformers", "server": None, "vllm": None}


STAGE = Rollout()
