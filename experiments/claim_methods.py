"""The paper's Table 2 in the embedded world: every method with the same search, in-domain and on longer problems.

python experiments/claim_methods.py
"""

from __future__ import annotations

from trials import (
    LONGER,
    LONGEST,
    METHODS,
    TEST,
    Unfinished,
    cell_text,
    claim_options,
    difference,
    experiment,
    markdown,
    spread,
    tuning_table,
)

TITLES = {
    TEST: "In-domain: 2 to 4 steps, as in the pairs",
    LONGER: "Out-of-domain: 5 and 6 steps, in pretraining but not in the pairs",
    LONGEST: "Out-of-domain: 7 steps, one more than even in pretraining",
}


def main() -> None:
    """Run and print four Markdown tables."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    chosen = found.chosen(METHODS)
    seeds = " / ".join(str(world.seed) for world in found.worlds)
    header = ["method", "chosen", f"seeds {seeds}", "mean [95 % t-interval]", "sd", "paired − base", "paired − DPO"]
    for problems, title in TITLES.items():
        base = found.accuracies(None, problems)
        dpo = found.accuracies(chosen["dpo"], problems)
        rows = [["base", "", *spread(base), "", difference(base, dpo)]]
        for label, trial in chosen.items():
            try:
                values = found.accuracies(trial, problems)
            except Unfinished:
                continue
            against = difference(values, dpo) if label != "dpo" else ""
            rows.append([label, cell_text(trial), *spread(values), difference(values, base), against])
        print(f"\n{title}: greedy Pass@1, %; * where the interval of a difference leaves out 0.\n")
        print(markdown(header, rows))
    print(f"\nChoice of settings, mean over seeds {', '.join(str(world.seed) for world in found.tuning)}.\n")
    print(tuning_table(found, METHODS))


if __name__ == "__main__":
    main()
