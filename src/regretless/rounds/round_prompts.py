"""The prompts of one round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import write_jsonl
from regretless.data.columns import Response, Verdict
from regretless.data.prompts import PromptSource, prompt_columns, read_prompts
from regretless.data.rejected_rows import check_some_left, report_refusals
from regretless.data.responses import read_responses


def run(
    source: PromptSource,
    number: int,
    *,
    parts: int | None,
    size: int | None,
    seed: int,
    output: Path,
    earlier: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write the prompts of the round `number` (from 1) into the folder `output`; returns counts.

    parts: of which the round takes one; or else size: prompts of every round. Of a pass over all prompts, in a random
    order of its own, no two rounds have the same; a new pass begins where fewer than `size` are left.
    earlier: files of responses with verdicts; a prompt without both verdicts in one of them rests in this round.
    Raises ConfigError for fewer prompts than that, and DataError where all of the round's prompts rest.
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
    chosen = [rows[index] for index in sorted(order[part * count : (part + 1) * count])]
    resting = {name for path in earlier for name, both in has_both(read_responses(path)[0]).items() if not both}
    asked_now = [row for row in chosen if row.prompt_id not in resting]
    if not asked_now:
        raise DataError(
            f"rounds.rest: all {len(chosen)} prompts of round {number} rest, because none of them has had right and "
            "wrong responses lately; end with the round before (rounds.count), set a smaller rest, or give other "
            "prompts"
        )
    write_jsonl(output / "prompts.jsonl", map(prompt_columns, asked_now))
    rest = {"resting": len(chosen) - len(asked_now)} if earlier else {}
    return {"prompts": len(asked_now), **rest, "refused": len(refused)}


def has_both(rows: Iterable[Response]) -> dict[str, bool]:
    """Whether a prompt's responses are both right and wrong, by its id: only these give pairs of verdicts."""
    verdicts = defaultdict(set)
    for row in rows:
        verdicts[row.prompt_id].add(row.verdict)
    return {name: {Verdict.CORRECT, Verdict.WRONG} <= of_prompt for name, of_prompt in verdicts.items()}
