"""The experiment "Old pairs" of docs/experiments.md: does knowing the writer help more, the older its pairs are?

    python experiments/replay_age.py run runs/replay-age --seeds 0 1 2 3 4
    python experiments/replay_age.py table

The first makes, for each seed, a world of `recipes/rounds.yaml` and four rounds of supervised training in it. Then the
base model writes pairs about other problems, and they train the models of round 0 (the base itself), 1 and 3, each of
which is its own reference. After a kill the same command goes on. Its end is experiments/measured/replay_age.csv, which
the second prints as tables, with the predictions.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from real_regret import prediction_table
from rounds_world import OUTSIDE, WORLD, commands, regretless
from theory_common import table

from regretless.core.intervals import Estimate, over_seeds

MEASURED = Path(__file__).parent / "measured" / "replay_age.csv"
AGES, BETAS, HELD = (0, 1, 3), (0.3, 1.0), 1500
STRONGER = 2.0
"""β at which DPO, with a weight of 1 for each token, is as strong as RePO at 1, whose mean weight is nearly 2."""
CHAIN = [
    *("rounds.count=4", "rounds.prompts=400", "train.objective=sft", "train.max_steps=16"),
    f"world.prompts={HELD + 1600}",
]
ALONE = ["rounds=null", *OUTSIDE]
TRAINING = [
    "train.learning_rate=3e-4",
    "train.max_steps=48",
    "train.lr_scheduler_type=linear",
    "train.warmup_steps=0.1",
]
RANGES = {
    "A1": (15.0, 45.0),
    "A2": (0.0, 15.0),
    "A3": (-8.0, 5.0),
    "A4": (-5.0, 5.0),
    "A5": (-4.0, 6.0),
    "A6": (-2.0, 2.0),
    "A7": (-3.0, 3.0),
    "A8": (-3.0, 3.0),
    "A9": (-4.0, 4.0),
}
"""Predicted ranges in points, as in docs/experiments.md."""
RELABELED = "repo, labels of the reference"


def measure(root: Path, seed: int) -> Iterator[dict[str, object]]:
    """A row for each trained model of a seed: age of the pairs, β, method, and Pass@1 before and after, in percent."""
    chain = root / f"chain-{seed}"
    of_seed = f"seed={seed}"
    regretless(chain, *WORLD, *CHAIN, of_seed)
    asked = [line for k in range(1, 5) for line in lines(chain / "rounds" / str(k) / "prompts" / "prompts.jsonl")]
    known = {json.loads(line)["prompt"] for line in asked}
    held = [line for line in lines(chain / "world" / "prompts.jsonl") if json.loads(line)["prompt"] not in known]
    prompts = root / f"held-{seed}.jsonl"
    prompts.write_text("".join(f"{line}\n" for line in held[:HELD]), encoding="utf-8")
    tested = f"evaluate.benchmarks.arithmetic.dataset={chain}/world/test.jsonl"
    models = {0: chain / "pretrain" / "base", 1: chain / "rounds/1/train/sft", 3: chain / "rounds/3/sft/train/sft"}
    written = root / f"written-{seed}"
    sampled = [f"model.name_or_path={models[0]}", f"sample.prompts.dataset={prompts}"]
    regretless(written, *ALONE, of_seed, *sampled, "pair=null", "train=null", "evaluate=null")
    for age in AGES:
        given = [*ALONE, of_seed, f"model.name_or_path={models[age]}", "sample=null", "verify=null", tested, *TRAINING]
        given.append(f"responses={written}/verify/responses.parquet")
        for beta in (*BETAS, STRONGER):
            betas = [f"train.methods.{name}.beta={beta}" for name in ("repo", "dpo")]
            name = f"{seed}-age-{age}-beta-{beta:g}"
            compared = "[repo,dpo]" if beta in BETAS else "dpo"
            regretless(root / name, *given, *betas, f"train.objective={compared}")
            found = results(root / name)
            start = found.pop("base")
            if age and beta in BETAS:  # at age 0 the reference is the writer
                relabeled = json.dumps({"*": {"name_or_path": str(models[age])}})
                other = root / f"{name}-reference"
                regretless(other, *given, *betas, "train.objective=repo", f"pair.rescore={relabeled}")
                found[RELABELED] = results(other)["repo"]
            for method, value in found.items():
                yield {"seed": seed, "age": age, "beta": beta, "method": method, "before": start, "after": value}


def lines(file: Path) -> list[str]:
    """The lines of a text file."""
    return file.read_text(encoding="utf-8").splitlines()


def results(folder: Path) -> dict[str, float]:
    """Greedy Pass@1 of each model of a run, in percent."""
    rows = json.loads((folder / "evaluate" / "results.json").read_text(encoding="utf-8"))["rows"]
    return {row["label"]: 100 * row["value"] for row in rows}


def estimate(values: list[float]) -> Estimate:
    """Mean over seeds with Student's 95 % interval."""
    of = over_seeds(values)
    return Estimate(of.mean, of.n, of.sd / math.sqrt(of.n), of.interval)


def tables(rows: pd.DataFrame) -> None:
    """Print Pass@1 by age, β and method (mean ± standard deviation), paired differences, and the predictions."""
    after = rows.pivot(index="seed", columns=["age", "beta", "method"], values="after")
    start = rows.groupby(["age", "seed"]).before.first().unstack(0)
    cells = {("", "before training"): {age: start[age] for age in AGES}}
    for age, beta, method in after.columns:
        cells.setdefault((f"{beta:g}", method), {})[age] = after[age, beta, method]
    shown = [
        (method, beta, *(f"{of[age].mean():.1f} ± {of[age].std():.1f}" if age in of else "" for age in AGES))
        for (beta, method), of in sorted(cells.items())
    ]
    print(table(["", "β", *(f"pairs of age {age}" for age in AGES)], shown) + "\n")
    differences = []
    for beta, (first, second) in itertools.product(BETAS, (("repo", "dpo"), ("repo", RELABELED))):
        cells = []
        for age in AGES:
            given = (age, beta, first) in after and (age, beta, second) in after
            of = estimate(list(after[age, beta, first] - after[age, beta, second])) if given else None
            cells.append(f"{of.value:+.1f} [{of.interval[0]:+.1f}, {of.interval[1]:+.1f}]" if of else "")
        differences.append((f"{first} minus {second}", f"{beta:g}", *cells))
    print(table(["", "β", *(f"pairs of age {age}" for age in AGES)], differences) + "\n")
    ahead = {age: after[age, 0.3, "repo"] - after[age, 1.0, "dpo"] for age in AGES}
    known = {key: after[*key, "repo"] - after[*key, RELABELED] for key in ((1, 0.3), (3, 0.3), (3, 1.0))}
    found = {
        "A1": after[0, 1.0, "dpo"] - start[0],
        "A2": after[3, 1.0, "dpo"] - start[3],
        "A3": ahead[0],
        "A4": ahead[3],
        "A5": ahead[3] - ahead[0],
        "A6": known[1, 0.3],
        "A7": known[3, 0.3],
        "A8": known[3, 1.0],
        "A9": after[1, 1.0, "repo"] - after[1, STRONGER, "dpo"],
    }
    print(prediction_table([(name, estimate(list(values))) for name, values in found.items()], RANGES))


def main() -> None:
    """Run the experiment, or print its tables."""
    parser, _ = commands(__doc__)
    args = parser.parse_args()
    if args.command == "run":
        rows = [row for seed in args.seeds for row in measure(args.folder, seed)]
        MEASURED.parent.mkdir(exist_ok=True)
        pd.DataFrame(rows).to_csv(MEASURED, index=False, float_format="%.6g")
    else:
        tables(pd.read_csv(MEASURED))


if __name__ == "__main__":
    main()
