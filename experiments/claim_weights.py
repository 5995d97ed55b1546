"""What carries the effect: the paper's weights, the released code's, or none (DPO), each with λ = 1 and λ = 0.5.

Without its weights w, RePO is DPO (`discount=0` makes them 0). They count each token of a response of T tokens
(2T − 1)/T times on average, so DPO matches RePO's scale at about twice its β.

    python experiments/claim_weights.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trials import (
    LONGER,
    MEAN_BETAS,
    METHODS,
    RATES,
    TEST,
    Experiment,
    Method,
    Trial,
    Unfinished,
    cell_text,
    claim_options,
    difference,
    experiment,
    markdown,
    spread,
    tuning_table,
)

MEANS = tuple({"beta": beta, "learning_rate": rate} for rate in RATES for beta in MEAN_BETAS)


def released(rejected_weight: float) -> Method:
    """The released code: the window begins at the token itself, and scores are means over tokens."""
    return Method("repo", {"formulation": "released", "rejected_weight": rejected_weight}, MEANS)


VARIANTS: Mapping[str, Method] = {
    "paper's weights, λ 1 (RePO)": METHODS["repo"],
    "paper's weights, λ 0.5": Method("repo", {"rejected_weight": 0.5}),
    "released code, λ 1": released(1.0),
    "released code, λ 0.5 (as released)": released(0.5),
    "no weights, λ 1 (DPO)": METHODS["dpo"],
    "no weights, λ 0.5": Method("repo", {"discount": 0.0, "rejected_weight": 0.5}),
}
PAPER = next(iter(VARIANTS))


def matched(repo: Trial) -> dict[str, Trial]:
    """RePO as chosen, and at its learning rate DPO at the same β and at the same scale."""
    beta = repo.settings["beta"]

    def dpo(factor: float) -> Trial:
        settings: dict[str, Any] = {**repo.settings, "beta": factor * beta}
        return Trial("dpo", settings)

    return {"RePO": repo, "DPO at the same β": dpo(1), "DPO at the same scale, 2 β": dpo(2)}


def main() -> None:
    """Run and print Markdown tables."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    chosen = found.chosen(VARIANTS)
    fixed = matched(chosen[PAPER])
    for problems in (TEST, LONGER):
        print(f"\nEach at its chosen settings: greedy Pass@1, %, {problems} problems; * where the interval of a")
        print("difference leaves out 0.\n")
        print(table(found, chosen, problems, "RePO"))
        print(f"\nAt RePO's settings, {problems} problems.\n")
        print(table(found, fixed, problems, "RePO"))
    print(f"\nChoice of settings, mean over seeds {', '.join(str(world.seed) for world in found.tuning)}.\n")
    print(tuning_table(found, VARIANTS))


def table(found: Experiment, trials: Mapping[str, Trial], problems: str, first: str) -> str:
    """Accuracies of trials, and their paired differences to the first one."""
    seeds = " / ".join(str(world.seed) for world in found.worlds)
    header = ["variant", "settings", f"seeds {seeds}", "mean [95 % t-interval]", "sd", f"paired − {first}"]
    reference = found.accuracies(next(iter(trials.values())), problems)
    rows = []
    for number, (label, trial) in enumerate(trials.items()):
        try:
            values = found.accuracies(trial, problems)
        except Unfinished:
            continue
        rows.append([label, cell_text(trial), *spread(values), difference(values, reference) if number else ""])
    return markdown(header, rows)


if __name__ == "__main__":
    main()
