"""A made-up run folder in the formats that the stages write."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

from comparisons import write_comparisons

from regretless.core.files import write_json, write_jsonl
from regretless.data.columns import Response, Verdict
from regretless.data.rows import write_records
from regretless.workflow.stage_folder import MANIFEST, StageFolder

HOSTILE = '<script>alert("x")</script></td></div>&amp; <b>17</b> {{ 7*7 }}\n]]>\n\\boxed{1}'
HOSTILE_TOKENS = [
    *(
        '<img src=x onerror="window.broken = 1">',
        "</script><script>window.broken = 2</script>",
        "<!--",
        "--><b>bold</b>",
    ),
    *("\u2028", "שלום ", "\u202eright to left\u202c", "😀", "&lt;i&gt;", "${7*7}", "\t", "'\"`"),
]
"""Tokens that would run, end the script, turn the text around or become elements if they were not kept as text."""
OBJECTIVES = ("repo", "repo_det", "dpo")
PROBLEMS = 200
CLOCK = itertools.count()


def finish(folder: Path, stage: str, summary: dict[str, Any], seconds: float) -> None:
    done = StageFolder(folder, "0" * 32)
    done.finish(stage, {"seed": 0, "sizes": [1, 2]}, summary, seconds)
    # One a second, so that their order is known.
    write_json(folder / MANIFEST, done.manifest() | {"finished": f"2026-01-01T00:00:{next(CLOCK):02}+0000"})


def answers(label: str, right: float) -> list[Response]:
    rng = random.Random(label)
    rows = []
    for number in range(PROBLEMS):
        correct = rng.random() < right if number else label != "base"
        gold = 5 + number % 90
        said = gold if correct else gold + 6
        rows.append(
            Response(
                prompt_id=f"test-{number}",
                response_id=f"test-{number}-{label}",
                prompt=f"Tom has {gold - 3} apples. Tom gives 3 to Ann. Tom buys 6. How many?\n",
                response=f"{gold - 3}-3={gold - 6}\n{gold - 6}+6={said}\n\\boxed{{{said}}}" if number else HOSTILE,
                answer=str(gold),
                extracted=str(said),
                verdict=Verdict.CORRECT if correct else Verdict.WRONG,
            )
        )
    return rows


def write_training(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    log = []
    for step in range(1, 61):
        margin = 4 * (1 - math.exp(-step / 15)) + rng.gauss(0, 0.3)
        log.append(
            {
                "step": step,
                "epoch": step / 60,
                "loss": math.log1p(math.exp(-margin)),
                "grad_norm": 2 + rng.random(),
                "learning_rate": 1e-4 * (1 - step / 60),
                "rewards/chosen": margin / 2,
                "rewards/rejected": -margin / 2,
                "rewards/margins": margin,
                "rewards/accuracies": 1 / (1 + math.exp(-margin)),
                "logps/chosen": -8 - seed + margin / 3,
                "logps/rejected": -9 - margin,
                "logratios/chosen": margin / 3,
                "logratios/rejected": -margin,
            }
        )
    log.append({"step": 60, "epoch": 1.0, "train_loss": 0.3, "train_runtime": 8.1})
    write_json(folder / "trainer_state.json", {"global_step": 60, "log_history": log})
    rows = [
        {"pair_id": str(n), "chosen_reward": rng.gauss(1.5, 1), "rejected_reward": rng.gauss(-1.5, 1.5)}
        for n in range(300)
    ]
    write_jsonl(folder / "pair_scores.jsonl", rows)


TOKENS = {
    "chosen": ["1", "7", "-", "3", "=", "1", "4", "\n", "\\boxed{", "1", "4", "}", ""],
    "rejected": ["17", "+", "3", "=", "2", "0", "\n", *HOSTILE_TOKENS, "\n", "\\boxed{", "2", "0", "}", ""],
    "beginning": ["1", "7", "-", "3", "=", "1", "4", "\n"],
}


def token_rewards() -> dict[str, Any]:
    """Three analyzed pairs: with behavior log-probabilities, without them, and masked."""
    rng = random.Random(0)
    kinds = [("original", "rejected", True), ("original", "rejected", False), ("masked", "beginning", True)]
    prompt = "Tom has 17 apples. Tom gives 3 to Ann.\n"
    pairs = [
        {
            "pair_id": str(number),
            "kind": kind,
            "prompt": [{"role": "user", "content": HOSTILE}] if number else prompt,
            "responses": [
                analyzed("chosen", TOKENS["chosen"], rng, known),
                analyzed("rejected", TOKENS[other], rng, known),
            ],
        }
        for number, (kind, other, known) in enumerate(kinds)
    ]
    policies = {name: f"train/{name}" for name in OBJECTIVES}
    return {"units": {}, "beta": 1.0, "reference": "pretrain/base", "policies": policies, "pairs": pairs}


def analyzed(side: str, tokens: list[str], rng: random.Random, known: bool = True) -> dict[str, Any]:
    """A response as `analyze` writes it, with log-probabilities from `rng`."""
    count = len(tokens)
    reference, behavior = ([-rng.random() for _ in tokens] for _ in range(2))
    weights = [sum(1 / (count - t) for t in range(1, s + 1)) for s in range(count)]
    policies = {}
    for name in OBJECTIVES:
        logps = [-rng.random() for _ in tokens]
        reward = [pi - ref for pi, ref in zip(logps, reference, strict=True)]
        horizon = [w * (pi - mu) for w, pi, mu in zip(weights, logps, behavior, strict=True)]
        policies[name] = {
            "logps": logps,
            "reward": reward,
            "long_horizon": horizon if known else None,
            "regret": [local + far for local, far in zip(reward, horizon, strict=True)] if known else None,
        }
    units = [
        {
            **{"start": start, "end": start + 3, "regret": 0.5 * start, "regret_low": -0.25, "regret_high": 2.0},
            **{"local": 0.12, "future": 0.5 * start - 0.12},
            "policies": {
                name: {"dpo": number - 0.5, "repo_det": number + 8.0} | ({"repo": number + 0.25} if known else {})
                for number, name in enumerate(("base", *OBJECTIVES))
            },
        }
        for start in (0, 3)
    ]
    return {
        "side": side,
        "measured": {"alpha": 0.5, "units": units},
        "text": "".join(tokens),
        "tokens": tokens,
        "names": [text or "<eos>" for text in tokens],
        "reference": reference,
        "behavior": behavior if known else None,
        "weights": weights,
        "policies": policies,
    }


def build_run(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "recipe.yaml").write_text("name: quickstart\ntrain:\n  objective: [repo, repo_det, dpo]\n")
    finish(root / "world", "world", {"problems": {"train": 4000, "test": 1000, "shared": 79}}, 0.4)
    for name in ("base", "behavior"):
        finish(root / "pretrain" / name, "pretrain", {"steps": 1000, "loss": 0.31284}, 28.2)
    finish(root / "sample", "sample", {"prompts": 1500, "responses": 12000, "tokens": 318_264}, 16.1)
    finish(root / "verify", "verify", {"correct": 5012, "wrong": 6980, "unknown": 8}, 2.3)
    finish(root / "pair", "pair", {"pairs": 1893, "dropped": {"all_correct": 211, "all_wrong": 402}}, 0.2)
    for seed, name in enumerate(OBJECTIVES):
        write_training(root / "train" / name, seed)
        finish(root / "train" / name, "train", {"pairs": 1593, "steps": 60, "eval_loss": 0.77}, 8.3 + seed)
    shares = {"base": 0.35, "repo": 0.72, "repo_det": 0.70, "dpo": 0.71}
    for label, share in shares.items():
        verified = root / "evaluate" / label / "arithmetic"
        write_records(verified / "responses.parquet", answers(label, share))
        finish(verified, "evaluate", {"n": PROBLEMS}, 0.5)
        sampled = root / "evaluate" / "samples" / label / "arithmetic" / "greedy"
        finish(sampled, "evaluate", {"responses": PROBLEMS, "tokens": 5_210, "cut": 0}, 1.5)
    write_json(root / "evaluate" / "results.json", {"rows": [result(*item) for item in shares.items()], "seeds": SEEDS})
    write_json(root / "analyze" / "token_rewards.json", token_rewards())
    finish(root / "analyze", "analyze", {"pairs": 3}, 0.9)
    write_comparisons(root, OBJECTIVES)
    write_json(root / "inspect" / "inspect.json", INSPECT)
    return root


def result(label: str, share: float) -> dict[str, Any]:
    gain = None if label == "base" else share - 0.35
    return {
        "benchmark": "arithmetic",
        "label": label,
        "n": PROBLEMS,
        "value": share,
        "low": share - 0.06,
        "high": share + 0.06,
        "gain": gain,
        "gain_low": gain and gain - 0.05,
        "gain_high": gain and gain + 0.05,
        "cut": 0,
        "unknown": 1,
    }


SEEDS = [
    {"benchmark": "arithmetic", "label": "dpo", "seeds": 5, "mean": 0.7609, "sd": 0.0088, "low": 0.75, "high": 0.7718},
    {"benchmark": "arithmetic", "label": "base", "seeds": 1, "mean": 0.31, "sd": None, "low": None, "high": None},
]
SPREAD = {"mean": 0.11, "min": -9.1, "q05": -2.5, "q25": -1.0, "median": 0.1, "q75": 1.0, "q95": 2.6, "max": 8.4}
START = {"pairs": 1000, "without_behavior_logps": 0, "loss": 0.69, "saturated": 0.02}
TOO_LONG = "rejected: too long, with its prompt, for max_length …; raise it, or set truncation=keep_start"
INSPECT = {
    "notes": ["ipo β=0.1: 12 % of pairs start with a margin beyond ±10 nats"],
    "scored_pairs": 1000,
    "data": {
        **{"pairs": 1893, "masked": 0, "prompts": 611, "refused": 42},
        "refused_because": {"logps: value … is NaN": 2, TOO_LONG: 40},
    },
    "tokens": {"pairwise": 194_672, "distinct": 61_231, "distinct_token_ratio": 3.1793},
    "lengths": {side: {**SPREAD, "mean": 26.2} for side in ("prompt", "chosen", "rejected")},
    "objectives": {name: START | {"margin": SPREAD} for name in ("repo β=1", "dpo β=0.1")} | {"sft": {"loss": 3.1}},
    "behavior_minus_reference": {side: {"tokens": 49_218, "nats_per_token": SPREAD} for side in ("chosen", "rejected")},
}
