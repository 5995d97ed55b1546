"""Three epochs and more: who collapses.

The learning rate stays constant after the warm-up, so that the checkpoint after an epoch is what training for that long
would have given. Every method runs at its chosen settings, and DPO and RePO also where the grid is hottest.

    python experiments/claim_epochs.py
"""

from __future__ import annotations

from trials import (
    BETAS,
    METHODS,
    RATES,
    TEST,
    Trial,
    Unfinished,
    cell_text,
    claim_options,
    difference,
    experiment,
    markdown,
    mean_and_interval,
)

EPOCHS = (1, 3, 6)
LONG = {
    "num_train_epochs": EPOCHS[-1],
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "save_strategy": "epoch",
}
HOT = {"learning_rate": max(RATES)}


def main() -> None:
    """Run and print a Markdown table."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    trials = {
        f"{label}, {cell_text(trial)}": trial.but(**LONG)
        for label, trial in {
            **found.chosen(METHODS),
            "repo, λ 0.5": Trial("repo", {**HOT, "beta": min(BETAS), "rejected_weight": 0.5}),
        }.items()
    }
    for beta in BETAS:
        for name in ("dpo", "repo", "repo_det"):
            trial = Trial(name, {**HOT, "beta": beta})
            trials.setdefault(f"{name}, {cell_text(trial)}", trial.but(**LONG))
    base = found.accuracies(None, TEST)
    rows = []
    for label, trial in trials.items():
        try:
            values = {epoch: found.accuracies(trial, TEST, epoch) for epoch in EPOCHS}
        except Unfinished:
            print(f"(not finished: {label})")
            continue
        last = values[EPOCHS[-1]]
        rows.append(
            [
                label,
                *(mean_and_interval(values[epoch]) for epoch in EPOCHS),
                f"{100 * min(last):.1f}",
                f"{sum(one < other for one, other in zip(last, base, strict=True))} of {len(base)}",
                *(difference(values[epoch], values[EPOCHS[0]]) for epoch in EPOCHS[1:]),
            ]
        )
    header = [
        "method",
        *(f"{epoch} epoch{'s' * (epoch > 1)}" for epoch in EPOCHS),
        f"worst seed after {EPOCHS[-1]}",
        "seeds below the base",
        *(f"paired {epoch} − {EPOCHS[0]}" for epoch in EPOCHS[1:]),
    ]
    print(f"\nGreedy Pass@1, %, test problems; base {mean_and_interval(base)}; * where the interval of a difference")
    print("leaves out 0.\n")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
