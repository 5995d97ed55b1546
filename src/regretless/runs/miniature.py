"""Smoke runs: any recipe from end to end in seconds and offline, with the real architecture class at a tiny size.

Data and tokenizer are those of the embedded world, with its easiest problems. Behavior models are trained on them for
a hundred steps, enough to get some right and most wrong, so that every later stage has real work to do. Where a recipe
asks a judge, `local_judge` answers. The numbers mean nothing.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from regretless.runs.recipe import Recipe, parse_recipe
from regretless.runs.stages import STAGES
from regretless.runs.stages.evaluate import CHAT_FILES
from regretless.runs.stages.tiny import LARGEST_AMOUNT, STEPS_OF_A_PROBLEM, model_in_miniature
from regretless.world import local_judge
from regretless.world.chat_files import write_chat_benchmarks
from regretless.world.problems import Generator

CHAT_QUESTIONS = 8
"""One question for each category of MT-Bench."""


def smoke_recipe(recipe: Recipe) -> Recipe:
    """The recipe with tiny models, the embedded world's easiest problems, few steps; stages and methods are the same.

    Existing pairs or responses are replaced by sampled ones. The run folder's name gets the suffix -smoke. The recipe
    runs inside `surroundings`.
    Raises ConfigError for a model whose family cannot be derived from its name.
    """
    values = recipe.model_dump(exclude_unset=True, exclude={"responses"})
    # Work of a second gains nothing from processes that take seconds to start.
    values |= {"output_dir": f"{recipe.run_dir}-smoke", "threads": 1, "parallel": 1}
    if recipe.model is not None:
        values["model"] = model_in_miniature(recipe.model)
    for name, stage in STAGES.items():
        section = stage.miniature(values.pop(name, None), recipe)
        values |= {} if section is None else {name: section}
    if recipe.rounds is not None:
        values["model"] = values["sample"]["models"][0]  # it answers some problems
    return parse_recipe(values, f"smoke run of {recipe.name}")


@contextlib.contextmanager
def surroundings(recipe: Recipe) -> Iterator[local_judge.LocalJudge | None]:
    """Provide, within the block, what a smoke recipe needs from outside: the chat benchmarks' files and a judge."""
    has_chat = recipe.evaluate is not None and bool(recipe.evaluate.chat)
    if has_chat:
        rng = random.Random(recipe.seed)
        problems = Generator(STEPS_OF_A_PROBLEM, LARGEST_AMOUNT)
        sampled = [problems.draw(rng) for _ in range(4 * CHAT_QUESTIONS)]
        write_chat_benchmarks(recipe.run_dir / CHAT_FILES, sampled, rng)
    if recipe.judge is None and not has_chat:
        yield None
        return
    with local_judge.serving() as judge:
        yield judge
