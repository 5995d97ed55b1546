"""The lemmas of §5 and appendix A on random token trees: largest error of each identity, and what fails as printed.

    python experiments/theory_identities.py

Every identity is checked on every context or edge of 4000 random trees with random rewards, policies, β and γ. The two
sides are computed in different ways: dynamic programming backwards on one, enumeration of all responses or another
problem on the other.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
from theory import random_problem, random_tree
from theory.statements import claims, identities
from theory.tree import FloatArray
from theory_common import BLUE, GRAY, ORANGE, figure_path, magnitude, save_figure, share, start_figure, table

FORESTS, PROMPTS = 40, 100
WRONG = 1e-6
"""An error above this is not rounding."""


def draw(path: Path, held: FloatArray, printed: FloatArray) -> None:
    figure, (axes,) = start_figure(height=2.4)
    bins = np.arange(-18, 3.01, 0.5)
    for errors, color, label in (
        (held, BLUE, "identities that hold"),
        (printed, ORANGE, "claims that fail as printed"),
    ):
        axes.hist(
            np.log10(np.maximum(errors, 1e-18)),
            bins,
            weights=np.full(len(errors), 100 / len(errors)),
            color=color,
            alpha=0.85,
            histtype="stepfilled",
            label=label,
        )
    axes.axvline(-12, color=GRAY, linewidth=1, linestyle="--")
    axes.set_xlabel("log₁₀ of the error (exact zeros at −18); dashed: tolerance of the tests")
    axes.set_ylabel("% of checks")
    axes.legend(loc="upper right")
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-identities.svg")
    rng = np.random.default_rng(0)
    held: dict[str, list[FloatArray]] = defaultdict(list)
    printed: dict[str, list[FloatArray]] = defaultdict(list)
    for _ in range(FORESTS):
        problem = random_problem(rng, random_tree(rng, prompts=PROMPTS))
        for name, errors in identities(rng, problem).items():
            held[name].append(np.abs(errors))
        choice = np.diff(problem.tree.first, append=problem.tree.edges) > 1
        for name, errors in claims(rng, problem).items():
            printed[name].append(np.abs(errors)[choice])
    largest = {name: float(np.concatenate(errors).max()) for name, errors in held.items()}
    print(f"{FORESTS * PROMPTS} random trees\n")
    rows = [[name, f"{sum(map(len, held[name]))}", magnitude(max(error, 1e-13))] for name, error in largest.items()]
    print(table(["statement", "checks", "largest error"], rows), "\n")
    fails = {name: np.concatenate(errors) > WRONG for name, errors in printed.items()}
    rows = [[name, f"{len(wrong)}", share(float(wrong.sum()), len(wrong))] for name, wrong in fails.items()]
    print(table(["claim", "contexts with a choice", "wrong in"], rows))
    if path:
        failed = [np.concatenate(errors) for name, errors in printed.items() if not name.startswith("(")]
        draw(path, np.concatenate([np.concatenate(errors) for errors in held.values()]), np.concatenate(failed))


if __name__ == "__main__":
    main()
