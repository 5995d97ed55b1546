"""The prompts of one round."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from regretless.core.errors import ConfigError
from regretless.core.files import write_jsonl
from regretless.data.prompts import PromptSource, prompt_columns, read_prompts
from regretless.data.rejected_rows import check_some_left, report_refusals


def run(
    source: PromptSource, number: int, *, parts: int | None, size: int | None, seed: int, output: Path
) -> dict[str, Any]:
    """Write the prompts of the round `number` (from 1) into the folder `output`; returns counts.

    parts: of which the round takes one; or else size: prompts of every round. Of a pass over all prompts, in a random
    order of its own, no two rounds have the same; a new pass begins where fewer than `size` are left.
    Raises ConfigError for fewer prompts than that.
    """
    rows, refused = read_prompts(source, "sample.prompts.", None)
    report_refusals(refused, output / "refused.jsonl")
    check_some_left(rows, refused, source.dataset)
    count = len(rows) // parts if size is None and parts is not None else size
    if not count or count > len(rows):
        asked = f"{parts} disjoint parts" if size is None else f"{size} prompts in each round"
        raise ConfigError(f"rounds.prompts: {asked} were asked for, and {source.dataset} has {len(rows)} prompts")
    turn, part = divmod(number - 1, len(rows) // count)
    order = Random(f"{seed}/{turn}").sample(range(len(rows)), len(rows))
    chosen = sorted(order[part * count : (part + 1) * count])
    write_jsonl(output / "prompts.jsonl", map(prompt_columns, map(rows.__getitem__, chosen)))
    return {"prompts": len(chosen), "refused": len(refused)}
