"""Stage `verify`: verdicts on the responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import RESPONSES, Run, Stage
from regretless.runs.stages.tiny import has_data
from regretless.workflow.run_folder import Unit
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.labeling.verify import VerifyConfig
    from regretless.runs.recipe import Recipe


class Verify(Stage["VerifyConfig"]):
    """Compares responses with gold answers."""

    name = "verify"
    writes = ("responses.parquet", "responses.jsonl", "parts", "refused.jsonl")
    work = "regretless.labeling.verify"
    about = "Compare responses with gold answers: correct, wrong or unknown."
    reads = "responses with gold answers"
    makes = "verdicts: correct, wrong or unknown"
    flags = ("responses",)
    uses = ("responses",)
    result = RESPONSES
    counted = (("responses", "responses"),)

    def units(self, config: VerifyConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the responses with verdicts."""
        responses = Path(run.latest(RESPONSES, self.name))
        suffix = Path(RESPONSES).suffix if run.output is None or run.is_unit else run.output.suffix
        task = {"config": config, "responses": responses, "result": f"responses{suffix}"}
        yield [run.unit(self, self.place, dump(config), task, inputs={"responses": responses}, need=Need("verify"))]

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """As it is; the sampled responses need verdicts unless a judge scores them."""
        return section or ({} if has_data(recipe) and recipe.judge is None else section)


STAGE = Verify()
