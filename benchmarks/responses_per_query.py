"""What a query costs as its responses become more: tokens computed, memory and time of a step of one query.

    python benchmarks/responses_per_query.py --json outputs/responses_per_query.json
    python benchmarks/responses_per_query.py --tokens-only          # the columns that need no measurement

Half of the responses are chosen over the other half, so n responses make n²/4 pairs. Random tokens, prompts of 104 and
responses of 150; DPO with LoRA on a small Qwen3 architecture, in fresh processes. Every query is computed once with
`max_tokens_per_microbatch` at `--budget`, and once without a limit: then the whole query is one micro-batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from pairs import Pair, synthetic_pairs
from sides import Case, measure

from regretless.core.text_cleaning import never_fail_to_print

PROMPT, RESPONSE, VOCABULARY = 104, 150, 8192
NO_LIMIT = 1 << 30


def query_tokens(pairs: list[Pair], budget: int) -> dict[str, float]:
    """Mean tokens a query: of a pairwise trainer, distinct, computed here, and what cutting it into pairs would take.

    `computed` have a gradient; `recomputed` are those of them that are computed without one before.
    """
    from regretless.modeling.layout import lay_out
    from regretless.modeling.scoring import fill_rows
    from regretless.training.packing import cut_rows, pack_rows

    found = dict.fromkeys(("pairwise", "distinct", "computed", "recomputed", "cut into pairs"), 0)
    queries = 0
    for prompt, query in groupby(pairs, key=lambda pair: tuple(pair["prompt_ids"])):
        units = [[(prompt, tuple(pair[side])) for side in ("chosen_ids", "rejected_ids")] for pair in query]
        queries += 1
        items = [item for unit in units for item in unit]
        found["pairwise"] += sum(len(prompt) + len(response) for _, response in items)
        found["distinct"] += lay_out(items)[0].tokens
        for batch in pack_rows(units, budget):
            rows = cut_rows([item for index in batch for item in units[index]], budget)
            sizes = [lay_out(row)[0].tokens for row in rows]
            found["computed"] += sum(sizes)
            found["recomputed"] += sum(sizes[1:])
        for row in fill_rows(units, budget):
            found["cut into pairs"] += lay_out([item for index in row for item in units[index]])[0].tokens
    return {name: count / queries for name, count in found.items()}


def case(responses: int, steps: int) -> Case:
    """Steps of one query with so many responses."""
    half = responses // 2
    pairs = synthetic_pairs(steps, half, half, PROMPT, RESPONSE, VOCABULARY)
    return Case("", VOCABULARY, pairs, pairs_per_step=half * half)


def main() -> None:
    """Count and measure every number of responses, and print the table."""
    from regretless.training.packing import MOST_CPU

    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--budget", type=int, default=MOST_CPU, help="max_tokens_per_microbatch; default: that of CPUs")
    parser.add_argument("--steps", type=int, default=3, help="of a run, after one that is not timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens-only", action="store_true", help="count tokens and measure nothing")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    args = parser.parse_args()
    measured = [] if args.tokens_only else ["seconds a step", "no limit", "MiB over the weights", "no limit"]
    counted = ["responses", "pairs", "pairwise trainer", "distinct", "computed", "of these twice", "cut into pairs"]
    machine = platform.processor() or platform.machine()
    print(f"{machine}, 1 thread, {time.strftime('%Y-%m-%d')}, at most {args.budget} tokens at a time\n")
    print("| " + " | ".join([*counted, *measured]) + " |")
    print("|" + "---|" * len([*counted, *measured]))
    found: dict[int, Any] = {}
    for responses in args.responses:
        one = case(responses, args.steps)
        tokens = query_tokens(one.pairs, args.budget)
        cells = [f"{responses}", f"{one.pairs_per_step}", *(f"{count:,.0f}" for count in tokens.values())]
        found[responses] = {"tokens": tokens}
        if measured:
            runs: dict[int, list[dict[str, Any]]] = {args.budget: [], NO_LIMIT: []}
            for _ in range(args.repeats):
                for budget, each in runs.items():
                    each.append(measure("ours", one, {"max_tokens_per_microbatch": budget}))
            seconds = [[one.pairs_per_step / run["pairs_per_second"] for run in each] for each in runs.values()]
            memory = [[run["peak_over_base_mib"] for run in each] for each in runs.values()]
            cells += [f"{statistics.median(values):.2f}" for values in seconds]
            cells += [f"{statistics.median(values):.0f}" for values in memory]
            found[responses] |= {"seconds": seconds, "memory_mib": memory}
        print("| " + " | ".join(cells) + " |", flush=True)
        print(f"{responses} responses: done", file=sys.stderr, flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
