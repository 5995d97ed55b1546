"""Preference-training throughput of this package against TRL, measured alternately in fresh processes.

    python benchmarks/train_vs_trl.py                         # every case; hours where TRL is slow
    python benchmarks/train_vs_trl.py --quick                 # one case, one repeat, under three minutes
    python benchmarks/train_vs_trl.py --only masked vocabulary --repeats 3

Real data are the published model solutions of GSM8K (`example_model_solutions.jsonl` of openai/grade-school-math) under
a Qwen2 tokenizer: `--data` and `--tokenizer`, else those of a shared data folder. Without them only cases of random
tokens are measured. Both sides get the same token ids, model, LoRA, batch and number of optimizer steps. Before
anything is timed, one batch's loss and LoRA gradient must agree. TRL runs at its defaults and at every configuration
of `TRL_GRID`; the fastest of those is "TRL best". Results go into a JSON file, case by case, and a later call goes on
from there. Needs `pip install .[bench]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pairs import (
    Pair,
    conversation_pairs,
    gsm8k_pairs,
    queries_up_to,
    synthetic_pairs,
    times_fewer_tokens,
    whole_queries,
    with_masked,
)
from sides import LISTED, PAIRS_PER_STEP, QWEN3_1_7B, Case, measure
from spread import spread

from regretless.core.text_cleaning import never_fail_to_print

PAIRS_COMPARED = 8
"""Pairs whose loss and gradient must agree: two 2 × 2 queries, one of the largest model; TRL takes them all at once."""
LONGEST = 512
"""Tokens of a sequence for the largest model. One solution has 1,527, and TRL's memory grows with the longest."""
TRL_DEFAULT = {"per_device_train_batch_size": 8}
TRL_GRID: list[dict[str, Any]] = [
    {
        "precompute_ref_log_probs": True,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "group_by_length",
        "per_device_train_batch_size": size,
    }
    for size in (1, 2, 4)
]


def agree(case: Case, until: float | None = None) -> dict[str, Any]:
    """Relative differences of loss and LoRA gradient between the two sides on one batch, in float32.

    In bfloat16 each side rounds for itself, so each is compared with float32 computation on the same weights. Raises
    SystemExit if a difference is more than rounding explains: in bfloat16, a gradient's that is half as much again as
    TRL's, or a loss, of a few rounded scores, that is 15 % off. `until`: as for `measure`.
    """
    count = min(PAIRS_COMPARED // 2 if case.once else PAIRS_COMPARED, case.pairs_per_step)
    first = replace(case, pairs=case.pairs[:count])
    ours = measure("ours", first, {}, "batch", until)
    trl = measure("trl", first, {"per_device_train_batch_size": count}, "batch", until)
    if case.bf16:
        exact = measure("ours", replace(first, bf16=False, exact=True), {}, "batch", until)
        gaps, theirs = _gaps(ours, exact), _gaps(trl, exact)
        limits = {"loss_gap": 0.15, "gradient_gap": 1.5 * theirs["gradient_gap"]}
    else:
        gaps = _gaps(ours, trl)
        limits = {"loss_gap": 1e-4, "gradient_gap": 1e-3}
    if any(gaps[name] > limit for name, limit in limits.items()):
        raise SystemExit(f"{case.name}: loss and gradient are apart by {gaps} (relative), more than {limits}")
    return {"in_bfloat16": {"ours": gaps, "TRL": theirs}} if case.bf16 else gaps


def _gaps(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Relative differences of loss and gradient."""
    distance = np.linalg.norm(one["gradient"] - other["gradient"]) / np.linalg.norm(other["gradient"])
    return {"loss_gap": abs(one["loss"] - other["loss"]) / abs(other["loss"]), "gradient_gap": float(distance)}


def against_trl(case: Case, repeats: int, grid: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Alternating repeats of ours, TRL at its best found configuration and, where asked for, at its defaults."""
    gaps = agree(case)
    best = grid[0]
    if len(grid) > 1:
        short = replace(case, pairs=whole_queries(case.pairs, 2 * case.pairs_per_step))
        best = max(grid, key=lambda options: measure("trl", short, options)["pairs_per_second"])
    sides = {"ours": ("ours", case, {}), "TRL best": ("trl", case, best)}
    if case.with_default:
        sides["TRL default"] = ("trl", case, TRL_DEFAULT)
    found = alternate(sides, repeats)
    return found | gaps | {"trl_best": best}


def among_ours(pairs: list[Pair], repeats: int) -> dict[str, Any]:
    """Alternating repeats of DPO, RePO by both estimators, TDPO, and DPO with as many masked pairs as original ones, on
    equal queries."""
    plain = Case("ours", 8192, pairs)
    masked = Case("ours", 8192, with_masked(pairs, each=2))
    # As many queries a step with masked pairs as without, so that a step is the same work but for the masked pairs.
    masked.pairs_per_step = round(PAIRS_PER_STEP * len(masked.pairs) / len(pairs))
    sides = {
        "DPO": ("ours", plain, {}),
        "RePO": ("ours", plain, {"objective": "repo"}),
        "RePO topk": ("ours", plain, {"objective": "repo", "objective_kwargs": {"estimator": "topk"}}),
        "TDPO": ("ours", plain, {"objective": "tdpo"}),
        "DPO + masked": ("ours", masked, {}),
    }
    share = 1 - len(pairs) / len(masked.pairs)
    return alternate(sides, repeats) | {"masked_share": share, "pairs_per_query": len(masked.pairs) / len(pairs)}


def alternate(sides: dict[str, tuple[str, Case, dict[str, Any]]], repeats: int) -> dict[str, Any]:
    """All measurements of each side, one of each in every repeat."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, (side, case, options) in sides.items():
            runs[name].append(measure(side, case, options))
    return {"runs": runs}


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases that the given data allows."""
    one = synthetic_pairs(48, 1, 1, 150, 300, 8192)
    grouped = synthetic_pairs(12, 2, 2, 104, 306, 8192)
    many = synthetic_pairs(3, 8, 8, 104, 150, 8192)
    sixteen = Case("16 responses a query, P≈104, R≈150", 8192, many, pairs_per_step=64)
    turns = conversation_pairs(12, 2, 2, prompt=104, turns=4, part_at=3, turn=100, vocabulary=8192)
    conversations = Case("2×2 conversations of 4 turns that part at the 3rd", 8192, turns)
    if not args.data or not args.tokenizer:
        random = Case("random 2×2, P≈104, R≈306", 8192, grouped, True)
        return [random, Case("one pair a prompt", 8192, one), sixteen, conversations]
    real = gsm8k_pairs(args.data, args.tokenizer, "2x2", 8192)
    mixed = gsm8k_pairs(args.data, args.tokenizer, "mixed", 8192)
    large = gsm8k_pairs(args.data, args.tokenizer, "2x2", None)
    short = queries_up_to(large, LONGEST)
    return [
        Case("GSM8K 2×2", 8192, whole_queries(real, 96), True),
        # Six pairs a query: steps of 24 hold four whole queries, as those of 16 do without masked pairs.
        Case("GSM8K 2×2 + masked", 8192, whole_queries(with_masked(real), 144), pairs_per_step=24),
        Case("GSM8K mixed 1×2, 2×1, 2×2", 8192, whole_queries(mixed, 96)),
        Case("one pair a prompt, P≈150, R≈300", 8192, one),
        Case("GSM8K 2×2, vocabulary 151,936", 151_936, whole_queries(large, 32)),
        sixteen,
        conversations,
        Case(
            "GSM8K 2×2, 1.7 billion weights in bfloat16",
            151_936,
            whole_queries(short, 16),
            pairs_per_step=8,
            model=QWEN3_1_7B,
            bf16=True,
            threads=2,
            once=True,
        ),
    ]


def profile(case: Case) -> str:
    """Where the time of a pair goes on both sides, TRL at the best of its configurations with micro-batch 1."""
    ours, trl = measure("ours", case, {}, "profile"), measure("trl", case, TRL_GRID[0], "profile")
    lines = [f"| {case.name}: ms a pair, profiled | ours | TRL best | TRL ÷ ours |", "|---|---|---|---|"]
    for kind in [*ours, "all"]:
        mine, theirs = (sum(side.values()) if kind == "all" else side[kind] for side in (ours, trl))
        lines.append(f"| {kind} | {1000 * mine:.0f} | {1000 * theirs:.0f} | {theirs / mine:.2f} |")
    return "\n".join(lines)


def ratio(runs: dict[str, list[dict[str, Any]]], key: str, ours: str, other: str) -> str:
    """Median, least and greatest of the repeats' ratios of one measured quantity."""
    both = zip(runs[ours], runs[other], strict=True)
    return spread([mine[key] / theirs[key] for mine, theirs in both if mine[key] and theirs[key]])


def share_of_limit(runs: list[dict[str, Any]]) -> str:
    """Time of the necessary matrix products (benchmarks/limit.py) ÷ the time that we take."""
    # Results that were kept from an earlier version of this script have no limit.
    timed = [run for run in runs if run.get("limit_seconds_per_pair")]
    return spread([run["limit_seconds_per_pair"] / run["busy_seconds_per_pair"] for run in timed])


def markdown(results: dict[str, dict[str, Any]], cases: Sequence[Case]) -> str:
    """The tables of docs/performance.md."""
    lines = [
        "| data | TRL's tokens ÷ ours | ours, pairs/s | TRL best, pairs/s | ÷ TRL best | share of the limit "
        "| memory ÷ TRL best | reference pass, seconds ÷ TRL best | TRL best: micro-batch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        if case.name not in results:
            continue
        result = results[case.name]
        runs = result["runs"]
        speed = [statistics.median(run["pairs_per_second"] for run in runs[side]) for side in ("ours", "TRL best")]
        lines.append(
            f"| {case.name} | {times_fewer_tokens(case.pairs):.2f} | {speed[0]:.2f} | {speed[1]:.2f} "
            f"| {ratio(runs, 'pairs_per_second', 'ours', 'TRL best')} | {share_of_limit(runs['ours'])} "
            f"| {ratio(runs, 'peak_over_base_mib', 'ours', 'TRL best')} "
            f"| {ratio(runs, 'reference_pairs_per_second', 'TRL best', 'ours')} "
            f"| {result['trl_best']['per_device_train_batch_size']} |"
        )
    for name, result in results.items():
        if "TRL default" in result["runs"]:
            speed = statistics.median(run["pairs_per_second"] for run in result["runs"]["TRL default"])
            lines += [
                "",
                f"{name} against TRL at its defaults ({speed:.2f} pairs/s): speed "
                f"{ratio(result['runs'], 'pairs_per_second', 'ours', 'TRL default')}, memory "
                f"{ratio(result['runs'], 'peak_over_base_mib', 'ours', 'TRL default')}.",
            ]
    if "ours" in results:
        result = results["ours"]
        runs = result["runs"]
        # Masked pairs make a query's pairs more: time is compared by query.
        per_query = [{"seconds": result["pairs_per_query"] / run["pairs_per_second"]} for run in runs["DPO + masked"]]
        plain = [{"seconds": 1 / run["pairs_per_second"]} for run in runs["DPO"]]
        lines += [
            "",
            "| ours | time of a step ÷ DPO's |",
            "|---|---|",
            f"| RePO | {ratio(runs, 'pairs_per_second', 'DPO', 'RePO')} |",
            f"| RePO, `estimator=topk` at k = {LISTED} (processor time ÷ that of `sampled`) "
            f"| {ratio(runs, 'busy_seconds_per_pair', 'RePO topk', 'RePO')} |",
            f"| TDPO | {ratio(runs, 'pairs_per_second', 'DPO', 'TDPO')} |",
            f"| masked pairs added, {result['masked_share']:.0%} of all pairs "
            f"| {ratio({'masked': per_query, 'plain': plain}, 'seconds', 'masked', 'plain')} |",
        ]
    compared = [result for result in results.values() if "loss_gap" in result]
    if compared:
        gaps = [max(result[gap] for result in compared) for gap in ("loss_gap", "gradient_gap")]
        lines += [
            "",
            f"Before timing, both sides' losses agreed to {gaps[0]:.0e} and their LoRA gradients to {gaps[1]:.0e}.",
        ]
    for name, result in results.items():
        if apart := result.get("in_bfloat16"):
            sides = "; ".join(
                f"{side} {found['loss_gap']:.0%} and {found['gradient_gap']:.0%}" for side, found in apart.items()
            )
            lines += ["", f"{name}: before timing, loss and gradient were apart from float32 by {sides}."]
    counts = {len(next(iter(result["runs"].values()))) for result in results.values()}
    repeats = " or ".join(map(str, sorted(counts)))
    return "\n".join([*lines, "", f"Repeats: {repeats}. Medians; in brackets the least and the greatest ratio."])


def shared_folder() -> Path:
    """`$REGRETLESS_SHARED`, else a folder `shared` beside the project."""
    return Path(os.environ.get("REGRETLESS_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def main() -> None:
    """Measure all cases and print the tables."""
    never_fail_to_print()
    solutions, tokenizer = (
        shared_folder() / "data/gsm8k/example_model_solutions.jsonl",
        shared_folder() / "data/tokenizers",
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=solutions if solutions.exists() else None)
    parser.add_argument("--tokenizer", default=str(tokenizer / "qwen2") if tokenizer.exists() else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of both sides; the largest case has two at least")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="the first case, one repeat, TRL at micro-batch 1")
    parser.add_argument("--profile", action="store_true", help="where the time goes on both sides, instead of speed")
    parser.add_argument("--json", type=Path, default=Path("outputs/train_vs_trl.json"), help="results, case by case")
    args = parser.parse_args()
    threads = "1 thread" if args.threads == 1 else f"{args.threads} threads"
    print(f"{platform.processor() or platform.machine()}, {threads}, {time.strftime('%Y-%m-%d')}\n")
    every = [replace(case, threads=max(case.threads, args.threads)) for case in cases(args)]
    if args.quick:
        first = every[0]
        quick = replace(first, pairs=whole_queries(first.pairs, 2 * PAIRS_PER_STEP), with_default=False)
        print(markdown({quick.name: against_trl(quick, 1, TRL_GRID[:1])}, [quick]))
        return
    if args.profile:
        for case in every:
            if any(part in case.name for part in args.only or [every[0].name]):
                print(profile(case))
        return
    results: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    args.json.parent.mkdir(parents=True, exist_ok=True)

    def keep(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        temporary = args.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(results, indent=1))
        temporary.replace(args.json)
        print(f"{name}: done", file=sys.stderr, flush=True)

    def wanted(name: str) -> bool:
        chosen = any(part in name for part in args.only) if args.only else True
        return chosen and name not in results

    for case in every:
        if wanted(case.name):
            few = (1, TRL_GRID[:1]) if case.once else (args.repeats, TRL_GRID)
            keep(case.name, against_trl(case, *few))
    if wanted("ours"):
        keep("ours", among_ours(every[0].pairs, args.repeats))
    print(markdown(results, every))


if __name__ == "__main__":
    main()
