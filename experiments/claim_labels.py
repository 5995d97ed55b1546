"""Does RePO's behaviour label help? The right log-probabilities, none (RePO_det), and those of other policies.

python experiments/claim_labels.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from trials import (
    BASE,
    BEHAVIOR,
    LONGER,
    METHODS,
    TEST,
    Method,
    PairData,
    Unfinished,
    World,
    cell_text,
    claim_options,
    difference,
    experiment,
    markdown,
    mean_and_interval,
    pair_logps,
    spread,
    tuning_table,
)

from regretless.models import ModelConfig
from regretless.preferences import read_pairs
from regretless.records import write_records


def untrained(world: World) -> ModelConfig:
    """The behaviour model's architecture with its weights before any training."""
    return ModelConfig.parse(
        {**world.settings["pretrain"][BEHAVIOR]["model"], "tokenizer": str(world.path / "world" / "tokenizer")},
        "model",
    )


def labelled(name: str, labeller: Callable[[World], ModelConfig]) -> PairData:
    """A world's pairs with the log-probabilities of another policy in place of the writer's."""

    def make(world: World, output: Path) -> dict[str, Any]:
        pairs, _ = read_pairs(world.pairs)
        logps = [values.tolist() for values in pair_logps(labeller(world), world.pairs)]
        sides = zip(pairs, logps[::2], logps[1::2], strict=True)
        write_records(
            output / "pairs.parquet",
            [replace(pair, chosen_logps=chosen, rejected_logps=rejected) for pair, chosen, rejected in sides],
        )
        return {"pairs": len(pairs), "nats_per_token": float(np.mean([value for row in logps for value in row]))}

    return PairData(f"labelled-{name}", {"policy": name}, make)


LABELS = {
    "of the writer (RePO)": METHODS["repo"],
    "none (RePO_det)": METHODS["repo_det"],
    "wrong: of the base model": Method("repo", pairs=labelled("base", lambda world: world.model(BASE))),
    "wrong: of an untrained model": Method("repo", pairs=labelled("untrained", untrained)),
    "DPO, for comparison": METHODS["dpo"],
}
RIGHT = next(iter(LABELS))


def main() -> None:
    """Run and print Markdown tables."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    chosen = found.chosen(LABELS)
    seeds = " / ".join(str(world.seed) for world in found.worlds)
    header = ["labels", "chosen", f"seeds {seeds}", "mean [95 % t-interval]", "sd", "paired − right labels"]
    for problems in (TEST, LONGER):
        right = found.accuracies(chosen[RIGHT], problems)
        rows = []
        for label, trial in chosen.items():
            try:
                values = found.accuracies(trial, problems)
            except Unfinished:
                continue
            rows.append([label, cell_text(trial), *spread(values), difference(values, right) if label != RIGHT else ""])
        print(f"\nGreedy Pass@1, %, {problems} problems; * where the interval of a difference leaves out 0.\n")
        print(markdown(header, rows))
    print("\nWhat the labels are: mean log-probability of a token, nats.\n")
    print(markdown(["labels", "mean over seeds [95 % t-interval]"], label_rows(found.worlds)))
    print(f"\nChoice of settings, mean over seeds {', '.join(str(world.seed) for world in found.tuning)}.\n")
    print(tuning_table(found, LABELS))


def label_rows(worlds: list[World]) -> list[list[str]]:
    """Mean label of each kind, over the tokens of all pairs."""
    rows = []
    for label, method in LABELS.items():
        if method.objective != "repo":
            continue
        means = []
        for world in worlds:
            file = world.path / "pairs" / method.pairs.name / "pairs.parquet" if method.pairs else world.pairs
            if not file.is_file():
                break
            pairs, _ = read_pairs(file)
            means.append(float(np.mean([v for pair in pairs for v in [*pair.chosen_logps, *pair.rejected_logps]])))
        else:
            rows.append([label, mean_and_interval(means, scale=1, digits=3)])
    return rows


if __name__ == "__main__":
    main()
