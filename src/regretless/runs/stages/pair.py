"""Stage `pair`: preference pairs of the responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.benchmark_prompts import compared, with_benchmarks
from regretless.runs.stages.stage import PAIRS, RESPONSES, Run, Session, Stage
from regretless.runs.stages.tiny import has_data, model_in_miniature
from regretless.workflow.run_folder import Unit

if TYPE_CHECKING:
    from regretless.labeling.pair import PairConfig
    from regretless.runs.recipe import Recipe


class Pair(Stage["PairConfig"]):
    """Makes pairs."""

    name = "pair"
    writes = ("pairs.parquet", "refused.jsonl")
    work = "regretless.labeling.pair"
    about = "Make preference pairs of verified or scored responses."
    reads = "verdicts or scores"
    makes = "preference pairs"
    flags = ("responses",)
    uses = ("responses",)
    result = PAIRS

    def units(self, config: PairConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the pairs."""
        responses = Path(run.latest(RESPONSES, self.name))
        settings, task, inputs = compared(run, wanted=run.recipe.decontaminate)
        task |= {"config": config, "responses": responses}
        inputs["responses"] = responses
        yield [run.unit(self, self.place, {**dump(config), **settings}, task, inputs=inputs)]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Make the pairs, without prompts of the run's benchmarks if the recipe says so."""
        return super().do(with_benchmarks(unit), place, session)

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """The same rule, as far as the responses have what it needs: without a judge, that is verdicts."""
        from regretless.labeling.pair import pairs_verdicts
        from regretless.modeling.load import ModelConfig

        needs_scores = recipe.pair is not None and not pairs_verdicts(recipe.pair.rule)
        if has_data(recipe) and recipe.judge is None and (recipe.pairs is not None or needs_scores):
            return {}
        if section is None:
            return None
        rescore = section.get("rescore", {})
        models = {name: model_in_miniature(ModelConfig(**model)) for name, model in rescore.items()}
        return {**section, "rescore": models}


STAGE = Pair()
