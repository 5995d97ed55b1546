"""Stage `judge`: scores of the responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import RESPONSES, Run, Stage
from regretless.workflow.run_folder import Unit, resolve
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.labeling.judge import JudgeConfig
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import Recipe


class Judge(Stage["JudgeConfig"]):
    """Scores responses."""

    name = "judge"
    writes = ("responses.parquet", "judgments.jsonl", "refused.jsonl")
    work = "regretless.labeling.judge"
    about = "Score responses with a language model on an OpenAI-compatible server."
    reads = "responses, a language model on a server"
    makes = "scores"
    flags = ("responses",)
    uses = ("responses",)
    result = RESPONSES

    def units(self, config: JudgeConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the responses with scores."""
        responses, here = Path(run.latest(RESPONSES, self.name)), resolve(config, run.root)
        inputs = {"responses": responses, **here.files()}
        task = {"config": here, "responses": responses}
        yield [run.unit(self, self.place, dump(config), task, inputs=inputs, need=Need("judge"))]

    def problems(self, config: JudgeConfig, machine: Machine) -> None:
        """Problems of the server, and of the files that the judge's prompts are made of."""
        from regretless.labeling.judge_prompt import JudgePrompt, load_aspects

        super().problems(config, machine)
        found = [machine.path(f"{self.name}.{name}", str(path)) for name, path in config.files().items()]
        machine.under(self.name, config.server.api_key)
        if all(path is not None and path.is_file() for path in found):
            machine.under(
                self.name,
                lambda: JudgePrompt(config.system, config.layout),
                lambda: load_aspects(config.aspects, config.rubrics, config.typed, config.not_applicable),
            )

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """A local judge."""
        return section and {**section, **miniature_judge()}


def miniature_judge() -> dict[str, Any]:
    """Settings of a judge in miniature: a server without an address, which `local_judge` sets in the environment."""
    from regretless.world.local_judge import KEY_VARIABLE

    return {"server": {"api_key_env": KEY_VARIABLE, "concurrency": 8}, "replies": None, "when_spent": "stop"}


STAGE = Judge()
