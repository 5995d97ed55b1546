"""What carries the effect: the paper's formula, its weights set to 0 (DPO), DPO at RePO's scale, λ, the released code.

Without its weights, RePO is DPO (`discount=0` makes them 0). They count each token of a response of T tokens (2T − 1)/T
times on average, so DPO matches RePO's scale at about twice its β. All of these train at RePO's chosen settings; the
released code, whose scores are means over tokens, has the same number of settings of its own to choose from.

    python experiments/claim_weights.py
"""

from __future__ import annotations

from trials import (
    LONGER,
    MEAN_BETAS,
    METHODS,
    RATES,
    TEST,
    TITLES,
    Method,
    Trial,
    claim_options,
    comparison,
    experiment,
    tuning_table,
)

REPO, RELEASED = "paper's formula (RePO)", "released code (λ 0.5)"
CHOSEN = {
    REPO: METHODS["repo"],
    RELEASED: Method(
        "repo",
        {"formulation": "released", "rejected_weight": 0.5},
        tuple({"beta": beta, "learning_rate": rate} for rate in RATES for beta in MEAN_BETAS),
    ),
}


def ablations(repo: Trial) -> dict[str, Trial]:
    """RePO as chosen, and at the same settings without its weights, with another scale, and with λ = 0.5."""
    return {
        "w = 0 (DPO at the same β)": Trial("dpo", repo.settings),
        "w = 0, scale as RePO's (DPO at 2 β)": Trial("dpo", {**repo.settings, "beta": 2 * repo.settings["beta"]}),
        "paper's formula, λ 0.5": repo.but(rejected_weight=0.5),
        "w = 0, λ 0.5": repo.but(discount=0.0, rejected_weight=0.5),
    }


def main() -> None:
    """Run and print Markdown tables."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    chosen = found.chosen(CHOSEN)
    trials = {REPO: chosen[REPO], **ablations(chosen[REPO]), **chosen}
    for problems in (TEST, LONGER):
        print(f"\n{TITLES[problems]}; * where a difference's interval leaves out 0.\n")
        print(comparison(found, trials, problems, against={REPO: "RePO"}))
    print(f"\nChoice of settings: validation accuracy, seeds {[world.seed for world in found.tuning]}.\n")
    print(tuning_table(found, CHOSEN))


if __name__ == "__main__":
    main()
