"""How time and memory of a training step grow: with responses a query, lengths, vocabulary, model size and pairs.

    python benchmarks/cost_model.py --json outputs/cost_model.json

One quantity is varied at a time, in fresh processes, on random tokens: seconds a step and what memory is needed beyond
the weights. Beside them stands how many times as many tokens a pairwise trainer would read.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pairs import synthetic_pairs, times_fewer_tokens
from sides import SMALL_QWEN3, Case, measure
from spread import spread

from regretless.core.text_cleaning import never_fail_to_print

QUERIES, PROMPT, RESPONSE, VOCABULARY = 4, 100, 100, 8192
"""Queries of a step, and mean tokens: the point at which every curve passes."""


def case(
    queries: int = QUERIES,
    responses: int = 4,
    prompt: int = PROMPT,
    response: int = RESPONSE,
    vocabulary: int = VOCABULARY,
    width: int = 256,
    layers: int = 8,
    steps: int = 3,
) -> Case:
    """Steps of `queries` queries with `responses` responses each, half of them chosen over the other half."""
    half = responses // 2
    pairs = synthetic_pairs(queries * steps, half, half, prompt, response, vocabulary)
    model = SMALL_QWEN3 | {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": max(1, width // 128),
    }
    return Case("", vocabulary, pairs, pairs_per_step=queries * half * half, model=model)


CURVES: dict[str, list[dict[str, int]]] = {
    "responses a query": [{"responses": n} for n in (2, 4, 8, 16)],
    "response length, tokens": [{"response": n} for n in (50, 100, 200, 400, 800)],
    "prompt length, tokens": [{"prompt": n} for n in (50, 100, 200, 400, 800)],
    "vocabulary": [{"vocabulary": n} for n in (2048, 8192, 32_768, 131_072)],
    "model width": [{"width": n} for n in (128, 256, 512)],
    "queries a step": [{"queries": n} for n in (2, 4, 8, 16)],
    "steps, of 16 pairs each": [{"steps": n} for n in (4, 16, 64)],
}


def main() -> None:
    """Measure every curve and print it as a table."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="curves whose name contains one of these")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    print(
        f"{platform.processor() or platform.machine()}, 1 thread, {time.strftime('%Y-%m-%d')}, {args.repeats} repeats"
    )
    for name, points in CURVES.items():
        if args.only and not any(part in name for part in args.only):
            continue
        found[name] = []
        print(f"\n| {name} | seconds a step | memory over the weights, MiB | tokens of a pairwise trainer ÷ ours |")
        print("|---|---|---|---|")
        for point in points:
            one = case(**point)
            runs = [measure("ours", one, {}) for _ in range(args.repeats)]
            seconds = [one.pairs_per_step / run["pairs_per_second"] for run in runs]
            memory = [run["peak_over_base_mib"] for run in runs]
            found[name].append(point | {"seconds": seconds, "memory_mib": memory})
            fewer = times_fewer_tokens(one.pairs)
            value = f"{next(iter(point.values())):,}"
            print(
                f"| {value} | {spread(seconds)} | {statistics.median(memory):.0f} | {fewer:.2f} |",
                flush=True,
            )
        print(f"{name}: done", file=sys.stderr, flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
