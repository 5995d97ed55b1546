"""Stage `world`: problems, demonstrations and tokenizer of the embedded world."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.pretrain import BATCH, STEPS
from regretless.runs.stages.stage import Run, Stage
from regretless.runs.stages.tiny import BEHAVIOR, WORLD
from regretless.workflow.run_folder import Unit

if TYPE_CHECKING:
    from regretless.runs.recipe import Recipe
    from regretless.world.world import WorldConfig


class World(Stage["WorldConfig"]):
    """Makes the embedded world."""

    name = "world"
    writes = (
        "prompts.jsonl",
        "test.jsonl",
        "validation.jsonl",
        "longer-test.jsonl",
        "demonstrations-*.jsonl",
        "tokenizer",
    )
    work = "regretless.world.world"
    about = "Make the embedded world: problems, held-out test, demonstrations, tokenizer."
    makes = "the quickstart's problems, demonstrations and tokenizer"
    counted = (("prompts", "prompts"),)

    def units(self, config: WorldConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the world."""
        yield [run.unit(self, self.place, dump(config), {"config": config})]

    def contents(self, config: WorldConfig) -> Collection[str]:
        """Its files."""
        from regretless.world.world import output_names

        return output_names(config)

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """The easiest problems, and demonstrations for all models that are pretrained."""
        policies = [BEHAVIOR] if recipe.world is None else recipe.world.policies
        demonstrations = {"demonstrations": STEPS * BATCH, "off_by_one": 0.3}
        return {**(section or {}), **WORLD, "policies": dict.fromkeys(policies, demonstrations)}


STAGE = World()
