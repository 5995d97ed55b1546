"""The experiments with measured regret in the embedded world, of docs/experiments.md: their responses and their tables.

    python experiments/real_regret.py responses runs/quickstart/verify/responses.parquet --pieces 4
    python experiments/world_regret.py instrument runs/world-regret/many runs/world-regret/few-*
    python experiments/world_regret.py picture runs/world-regret/measured
    python experiments/world_regret.py scores runs/quickstart/analyze/unit_regret.parquet

The second compares measurements of the same responses, few continuations against many. The third draws
docs/figures/world-regret.svg and prints its means. The fourth prints the table of predictions about trained models, and
the rank correlation of each model's scores with measured regret.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from real_regret import PRIMARY, draw, over_problems, prediction_table, rank, unit_table
from theory_common import FIGURES, table

from regretless.core.intervals import Estimate

RANGES = {
    "W1": (0.90, 1.00),
    "W2": (0.60, 0.95),
    "W3": (0.15, 0.50),
    "W4": (0.00, 0.40),
    "W5": (-0.25, 0.05),
    "W6": (-0.10, 0.30),
    "W7": (0.05, 0.50),
    "W8": (-0.20, 0.30),
    "W9": (-0.10, 0.40),
    "W10": (-0.30, 0.30),
    "W11": (-0.30, 0.30),
    "W12": (-0.20, 0.30),
}
"""Predicted ranges, as in docs/experiments.md."""
KEYS = ["prompt_id", "response_id", "unit", "alpha"]
VALUES = ("v_star", "v_mu", "regret")


def instrument(many: Path, few: list[Path]) -> None:
    """Print how often intervals of few continuations contain the value of many, their bias and error; W1."""
    truth = pd.read_parquet(many / "regret.parquet")
    measured = pd.concat([pd.read_parquet(folder / "regret.parquet") for folder in few])
    both = measured.merge(truth[[*KEYS, *VALUES]], on=KEYS, suffixes=("", "_true"))
    rows = []
    for alpha, name in ((alpha, name) for alpha in sorted(both.alpha.unique(), reverse=True) for name in VALUES):
        of = both[both.alpha == alpha]
        error = of[name] - of[f"{name}_true"]
        inside = (of[f"{name}_low"] <= of[f"{name}_true"]) & (of[f"{name}_true"] <= of[f"{name}_high"])
        root = float(np.sqrt((error**2).mean()))
        rows.append((f"{alpha:g}", name, f"{inside.mean():.3f}", f"{error.mean():+.3f}", f"{root:.3f}"))
    print(f"{len(both) // len(both.alpha.unique())} measurements of {len(truth) // len(truth.alpha.unique())} units\n")
    print(table(["α", "value", "share of intervals that contain it", "mean error", "root mean square error"], rows))
    primary = both[both.alpha == PRIMARY]
    inside = ((primary.regret_low <= primary.regret_true) & (primary.regret_true <= primary.regret_high)).astype(float)
    found = over_problems(primary.assign(inside=inside), lambda of: float(of.inside.mean()))
    print("\n" + prediction_table([("W1", found)], RANGES))


def scores(units: pd.DataFrame) -> Iterator[tuple[str, Estimate]]:
    """W2 to W12, from `unit_regret.parquet` of an analysis of the models that quickstart trains."""
    units = units[units.alpha == PRIMARY].assign(read=units.own + units.ahead)
    own = {name: units[(units.policy == name) & (units.method == name)] for name in ("dpo", "repo", "repo_det")}
    keys = [*KEYS, "outcome", "regret", "local", "future"]
    both = own["dpo"][[*keys, "own"]].merge(own["repo"][[*keys, "read", "ahead"]], on=keys)
    right, wrong = both[both.outcome == 1], both[both.outcome == 0]
    yield "W2", over_problems(both, rank("local", "regret"))
    dpo, repo = rank("own", "regret"), rank("read", "regret")
    yield "W3", over_problems(both, dpo)
    yield "W4", over_problems(both, repo)
    yield "W5", over_problems(both, lambda rows: repo(rows) - dpo(rows))
    yield "W6", over_problems(right, dpo)
    yield "W7", over_problems(wrong, dpo)
    yield "W8", over_problems(right, repo)
    yield "W9", over_problems(wrong, repo)
    yield "W10", over_problems(right, rank("ahead", "future"))
    yield "W11", over_problems(wrong, rank("ahead", "future"))
    yield "W12", over_problems(own["repo_det"], rank("read", "regret"))


def every_model(units: pd.DataFrame) -> str:
    """A table: rank correlation of what each method's score reads into each model with measured regret, by α."""
    units = units.assign(read=units.own + units.ahead)
    rows = []
    for (policy, method), of in units.groupby(["policy", "method"], sort=False):
        cells = []
        for alpha in sorted(of.alpha.unique(), reverse=True):
            found = over_problems(of[of.alpha == alpha], rank("read", "regret"))
            low, high = found.interval
            cells.append("–" if np.isnan(found.value) else f"{found.value:.2f} [{low:.2f}, {high:.2f}]")
        rows.append((f"{policy}, read as {method}", *cells))
    return table(["model", *(f"α = {alpha:g}" for alpha in sorted(units.alpha.unique(), reverse=True))], rows)


def main() -> None:
    """Print what the command asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("instrument")
    command.add_argument("many", type=Path, help="what `regretless rollout` wrote with many continuations")
    command.add_argument("few", type=Path, nargs="+", help="the same with few, each with another seed")
    command = commands.add_parser("picture")
    command.add_argument("folder", type=Path, help="what `regretless rollout` wrote")
    command = commands.add_parser("scores")
    command.add_argument("file", type=Path, help="unit_regret.parquet of an analysis")
    args = parser.parse_args()
    if args.command == "instrument":
        instrument(args.many, args.few)
    elif args.command == "picture":
        units = pd.read_parquet(args.folder / "regret.parquet")
        print(unit_table(units))
        draw(units, FIGURES / "world-regret.svg")
    else:
        units = pd.read_parquet(args.file)
        print(prediction_table(scores(units), RANGES))
        print("\n" + every_model(units))


if __name__ == "__main__":
    main()
