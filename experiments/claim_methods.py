"""The paper's Table 2 in the embedded world: every method with the same search, in-domain and on longer problems.

python experiments/claim_methods.py
"""

from __future__ import annotations

from trials import LONGER, METHODS, TEST, TITLES, claim_options, comparison, experiment, tuning_table


def main() -> None:
    """Run and print three Markdown tables."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    trials = {"base": None, **found.chosen(METHODS)}
    for problems in (TEST, LONGER):
        print(f"\n{TITLES[problems]}; * where a difference's interval leaves out 0.\n")
        print(comparison(found, trials, problems, against={"base": "base", "dpo": "DPO", "sft": "SFT"}))
    print(f"\nChoice of settings: validation accuracy, seeds {[world.seed for world in found.tuning]}.\n")
    print(tuning_table(found, METHODS))


if __name__ == "__main__":
    main()
