"""Does RePO's behavior label help? The right log-probabilities, none (RePO_det), and those of other policies.

Wrong labels train at the settings that were chosen with the right ones. A label meets the policy's gradient only
through the margin of its pair, which a wrong one shifts by a constant.

python experiments/claim_labels.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    TITLES,
    PairData,
    World,
    claim_options,
    comparison,
    experiment,
    markdown,
    mean_and_interval,
    pair_logps,
)

from regretless.data.preferences import read_pairs
from regretless.data.rows import write_records
from regretless.modeling.load import ModelConfig


def untrained(world: World) -> ModelConfig:
    """The behavior model's architecture with its weights before any training."""
    return ModelConfig.parse(
        {**world.settings["pretrain"][BEHAVIOR]["model"], "tokenizer": str(world.path / "world" / "tokenizer")},
        "model",
    )


def labeled(name: str, labeler: Callable[[World], ModelConfig]) -> PairData:
    """A world's pairs with the log-probabilities of another policy in place of the writer's."""

    def make(world: World, output: Path) -> dict[str, Any]:
        pairs, _ = read_pairs(world.pairs)
        logps = [values.tolist() for values in pair_logps(labeler(world), world.pairs)]
        sides = zip(pairs, logps[::2], logps[1::2], strict=True)
        write_records(
            output / "pairs.parquet",
            [
                replace(
                    pair, chosen=replace(pair.chosen, logps=chosen), rejected=replace(pair.rejected, logps=rejected)
                )
                for pair, chosen, rejected in sides
            ],
        )
        return {"pairs": len(pairs), "nats_per_token": float(np.mean([value for row in logps for value in row]))}

    return PairData(f"labelled-{name}", {"policy": name}, make)


CHOSEN = {"of the writer (RePO)": "repo", "none (RePO_det)": "repo_det", "none (DPO)": "dpo"}
WRONG = {
    "wrong: of the base model": labeled("base", lambda world: world.model(BASE)),
    "wrong: of an untrained model": labeled("untrained", untrained),
}
RIGHT = next(iter(CHOSEN))


def main() -> None:
    """Run and print Markdown tables."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    methods = found.chosen({label: METHODS[name] for label, name in CHOSEN.items()})
    trials = {**methods, **{label: methods[RIGHT].but(pairs=pairs) for label, pairs in WRONG.items()}}
    for problems in (TEST, LONGER):
        print(f"\n{TITLES[problems]}; * where a difference's interval leaves out 0.\n")
        print(comparison(found, trials, problems, against={RIGHT: "right labels"}))
    print("\nWhat the labels are: mean log-probability of a token, nats.\n")
    print(markdown(["labels", "mean over seeds [95 % t-interval]"], label_rows(found.worlds)))


def label_rows(worlds: Sequence[World]) -> list[list[str]]:
    """Mean label of each kind, over the tokens of all pairs."""
    rows = []
    for label, data in {RIGHT: None, **WRONG}.items():
        files = [world.path / "pairs" / data.name / "pairs.parquet" if data else world.pairs for world in worlds]
        if all(file.is_file() for file in files):
            rows.append([label, mean_and_interval([mean_label(file) for file in files], scale=1, digits=3)])
    return rows


def mean_label(file: Path) -> float:
    """Mean behavior log-probability (nats) over the tokens of both responses of all pairs."""
    pairs, _ = read_pairs(file)
    return float(np.mean([value for pair in pairs for side in pair.sides.values() for value in side.logps]))


if __name__ == "__main__":
    main()
