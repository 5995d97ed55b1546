"""The paper's Table 2 in the embedded world: every method with the same search, in-domain and on longer problems.

python experiments/claim_methods.py
"""

from __future__ import annotations

from trials import (
    BETAS,
    LONGER,
    METHODS,
    RATES,
    TEST,
    TITLES,
    Trial,
    claim_options,
    comparison,
    experiment,
    tuning_table,
)

COMMON = {"beta": max(BETAS), "learning_rate": max(RATES)}
SAME = {name: Trial(name, COMMON) for name in ("dpo", "rpo", "kto", "tdpo", "repo", "repo_det")}
"""The preference methods that take to a large β, all at the same settings: does the order hang on the search?"""


def main() -> None:
    """Run and print Markdown tables."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    trials = {"base": None, **found.chosen(METHODS)}
    for problems in (TEST, LONGER):
        print(f"\n{TITLES[problems]}; * where a difference's interval leaves out 0.\n")
        print(comparison(found, trials, problems, against={"base": "base", "dpo": "DPO", "sft": "SFT"}))
    for problems in (TEST, LONGER):
        print(f"\nAll at the same settings. {TITLES[problems]}; * where a difference's interval leaves out 0.\n")
        print(comparison(found, SAME, problems, against={"dpo": "DPO"}))
    print(f"\nChoice of settings: validation accuracy, seeds {[world.seed for world in found.tuning]}.\n")
    print(tuning_table(found, METHODS))


if __name__ == "__main__":
    main()
