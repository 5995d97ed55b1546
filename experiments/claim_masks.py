"""The paper's Figure 5 and Table 4 in the embedded world: masked pairs from none to all, DPO against RePO.

Settings are those chosen without masked pairs. DPO runs at twice RePO's β as well, where its scale is RePO's. The masks
are scaled to the world's responses (the paper: 16 to 80 tokens): every one removes at least the answer.

    python experiments/claim_masks.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trials import (
    BEHAVIOR,
    METHODS,
    TEST,
    TITLES,
    Experiment,
    PairData,
    Trial,
    Unfinished,
    World,
    cell_text,
    claim_options,
    difference,
    experiment,
    markdown,
    mean_and_interval,
    score_distance,
    spread,
)

from regretless.data.preferences import read_pairs
from regretless.data.rows import write_records
from regretless.pairing.mask import MaskConfig, mask_pairs

LENGTHS = (6, 12, 18, 24)
"""Tokens that a mask removes: the answer with its end takes up to five, a line of the solution some eight."""
SHARES = (0.35, "all")
"""Masked pairs, as a share of the number of original pairs; all: one for every distinct chosen response."""
SHOWN = ("dpo", "repo")
MATCHED = "dpo at RePO's scale"


def masked(count: float | str, *, alone: bool = False) -> PairData:
    """A world's pairs with masked ones added, or the masked ones alone."""

    def make(world: World, output: Path) -> dict[str, Any]:
        originals, _ = read_pairs(world.pairs)
        tokenizer = world.model(BEHAVIOR).name_or_path
        added, counts = mask_pairs(originals, MaskConfig(lengths=LENGTHS, count=count, tokenizer=tokenizer))
        kept = [*([] if alone else originals), *added]
        write_records(output / "pairs.parquet", kept)
        return {**counts, "pairs": len(kept)}

    name = f"masked-{count}" + ("-alone" if alone else "")
    return PairData(name, {"count": count, "lengths": LENGTHS, "alone": alone}, make)


VARIANTS = {
    "none": None,
    **{(f"{share:.0%} of the pairs" if isinstance(share, float) else share): masked(share) for share in SHARES},
    "all, and no others": masked("all", alone=True),
}


def main() -> None:
    """Run and print Markdown tables of accuracy and of the score distance."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    chosen = found.chosen({name: METHODS[name] for name in SHOWN})
    matched = Trial("dpo", {**chosen["repo"].settings, "beta": 2 * chosen["repo"].settings["beta"]})
    methods = {**chosen, MATCHED: matched}
    for name, trial in methods.items():
        print(f"{name}: {cell_text(trial)}")
    trials = {
        (name, label): trial if data is None else trial.but(pairs=data)
        for name, trial in methods.items()
        for label, data in VARIANTS.items()
    }
    print(f"\n{TITLES[TEST]}; * where a difference's interval leaves out 0.\n")
    print(markdown(*accuracy_rows(found, trials)))
    print("\nScore distance, nats²: mean squared difference of token log-probabilities on the original pairs.\n")
    print(
        markdown(
            ["trained with", "masked pairs", "from the base", "from RePO without masked pairs"],
            distance_rows(found, trials),
        )
    )


def accuracy_rows(
    found: Experiment, trials: Mapping[tuple[str, str], Trial]
) -> tuple[list[str], list[Sequence[object]]]:
    """Header and rows of the table of accuracies."""
    accuracies: dict[tuple[str, str], list[float]] = {}
    for key, trial in trials.items():
        with contextlib.suppress(Unfinished):
            accuracies[key] = found.accuracies(trial, TEST)
    gains = {
        (name, label): [value - without for value, without in zip(values, accuracies[name, "none"], strict=True)]
        for (name, label), values in accuracies.items()
    }
    base = found.accuracies(None, TEST)
    rows: list[Sequence[object]] = []
    for (name, label), values in accuracies.items():
        count = sum(world.pair_count(trials[name, label]) for world in found.worlds) / len(found.worlds)
        row = [
            name,
            label,
            f"{count:.0f}",
            *spread(values),
            difference(values, base),
            "" if label == "none" else difference(values, accuracies[name, "none"]),
        ]
        if name == "repo":
            row.append(difference(values, accuracies["dpo", label]) if ("dpo", label) in accuracies else "")
            known = [(other, label) for other in ("dpo", MATCHED) if label != "none" and (other, label) in gains]
            row += [difference(gains[name, label], gains[key]) for key in known]
        rows.append([*row, *[""] * (11 - len(row))])
    seeds = " / ".join(str(world.seed) for world in found.worlds)
    header = ["method", "masked pairs", "pairs in all", f"seeds {seeds}", "mean [95 % t-interval]", "sd"]
    header += ["paired − base", "paired − none", "paired − DPO, same pairs"]
    return [*header, "gain from masks − DPO's gain", "gain − that of DPO at RePO's scale"], rows


def distance_rows(found: Experiment, trials: Mapping[tuple[str, str], Trial]) -> list[Sequence[object]]:
    """Rows of the table of score distances."""
    rows: list[Sequence[object]] = []
    for (name, label), trial in trials.items():
        try:
            models = [(world, world.token_logps(trial)) for world in found.worlds]
            from_base = [score_distance(logps, world.token_logps(None)) for world, logps in models]
            from_repo = [score_distance(logps, world.token_logps(trials["repo", "none"])) for world, logps in models]
        except Unfinished:
            continue
        texts = [mean_and_interval(values, scale=1, digits=3) for values in (from_base, from_repo)]
        rows.append([name, label, *texts])
    return rows


if __name__ == "__main__":
    main()
