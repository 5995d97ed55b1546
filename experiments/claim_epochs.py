"""Three epochs and more: who collapses, and at which scale.

DPO and RePO train at the learning rate that the search gave both (with β = 1), supervised training at its own. The rate
stays constant after the warm-up, so that the checkpoint after an epoch is what training for that long would have given.

    python experiments/claim_epochs.py
"""

from __future__ import annotations

from trials import (
    BETAS,
    RATES,
    TEST,
    TITLES,
    Trial,
    Unfinished,
    claim_options,
    difference,
    experiment,
    markdown,
    mean_and_interval,
)

EPOCHS = (1, 3, 4)
LONG = {
    "learning_rate": min(RATES),
    "num_train_epochs": EPOCHS[-1],
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "save_strategy": "epoch",
}
GENTLE = {**LONG, "beta": min(BETAS), "rejected_weight": 0.5}
"""The smaller β, with the rejected score weighed less. Without RePO's weights (`discount=0`) it is DPO with a λ."""
TRIALS = {
    **{f"{name}, β {beta:g}": Trial(name, {**LONG, "beta": beta}) for beta in BETAS for name in ("dpo", "repo")},
    f"dpo, β {min(BETAS):g}, λ 0.5": Trial("repo", {**GENTLE, "discount": 0.0}),
    f"repo, β {min(BETAS):g}, λ 0.5": Trial("repo", GENTLE),
    "sft": Trial("sft", {**LONG, "learning_rate": max(RATES)}),
}


def main() -> None:
    """Run and print a Markdown table."""
    found = experiment(claim_options(__doc__.splitlines()[0]))
    base = found.accuracies(None, TEST)
    rows = []
    after: dict[str, list[float]] = {}
    for label, trial in TRIALS.items():
        try:
            values = {epoch: found.accuracies(trial, TEST, epoch) for epoch in EPOCHS}
        except Unfinished:
            print(f"(not finished: {label})")
            continue
        last = after[label] = values[EPOCHS[-1]]
        dpo = after.get(label.replace("repo", "dpo")) if label.startswith("repo") else None
        rows.append(
            [
                label,
                *(mean_and_interval(values[epoch]) for epoch in EPOCHS),
                f"{100 * min(last):.1f}",
                f"{sum(one < other for one, other in zip(last, base, strict=True))} of {len(base)}",
                *(difference(values[epoch], values[EPOCHS[0]]) for epoch in EPOCHS[1:]),
                difference(last, dpo) if dpo else "",
            ]
        )
    header = [
        "method",
        *(f"{epoch} epoch{'s' * (epoch > 1)}" for epoch in EPOCHS),
        f"worst seed after {EPOCHS[-1]}",
        "seeds below the base",
        *(f"paired {epoch} − {EPOCHS[0]}" for epoch in EPOCHS[1:]),
        f"paired − DPO with the same settings, after {EPOCHS[-1]}",
    ]
    print(f"\n{TITLES[TEST]}; base {mean_and_interval(base)}; * where a difference's interval leaves out 0.\n")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
