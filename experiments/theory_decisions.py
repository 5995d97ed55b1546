"""Two decisions whose ranking turns when counterfactual outcomes count: by reward, by regret, by RePO's estimates.

    python experiments/theory_decisions.py

Decision A came out at 3 and could have come out at −5; B came out at 2 and could have come out at 1.5. The behavior
policy takes the other course with probability p; β = 1. In the last two rows A's outcome is a stroke of luck: its
writer reaches it once in ten times, and B's nine times in ten.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from theory.regularized import Problem
from theory.two_decisions import by_one_sample, by_regret, by_reward, course_of_things, two_decisions
from theory_common import BLUE, GRAY, ORANGE, figure_path, save_figure, start_figure, table

CHANCES = np.linspace(0, 0.6, 121)


def turning_point(problem: Problem) -> float:
    """The p at which both decisions are regretted equally, by bisection."""
    low, high = 0.0, 0.5
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if by_regret(problem, course_of_things(middle)).preferred == "A" else (low, middle)
    return low


def draw(path: Path, problem: Problem, turn: float) -> None:
    figure, (axes,) = start_figure(width=5.6)
    realized = by_reward(problem)
    judged = {
        "by regret": (by_regret, {"color": BLUE}),
        "by RePO's one-sample estimate": (by_one_sample, {"color": ORANGE, "linestyle": "--"}),
    }
    axes.axhline(realized.a - realized.b, color=GRAY, linewidth=4, alpha=0.5, label="by the reward that came about")
    for label, (judge, look) in judged.items():
        scores = [judge(problem, course_of_things(chance)) for chance in CHANCES]
        axes.plot(CHANCES, [score.a - score.b for score in scores], label=label, **look)
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.axvline(turn, color=GRAY, linewidth=0.8, linestyle="--")
    axes.set_xlabel("p, chance of the other course of things")
    axes.set_ylabel("score of A − score of B")
    axes.legend(loc="lower left", bbox_to_anchor=(0.18, 0))
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-decisions.svg")
    problem = two_decisions()
    half, lucky = course_of_things(0.5), course_of_things(0.9, 0.1)
    judged = {
        "reward that came about": by_reward(problem),
        "−regret, p = ½": by_regret(problem, half),
        "−regret, p = 0 (RePO_det's deterministic label)": by_regret(problem, course_of_things(0.0)),
        "RePO's one-sample estimate, p = ½": by_one_sample(problem, half),
        "−regret, p = 0.9 after A and 0.1 after B": by_regret(problem, lucky),
        "RePO's one-sample estimate, p = 0.9 after A and 0.1 after B": by_one_sample(problem, lucky),
    }
    rows = [[name, f"{score.a:.3f}", f"{score.b:.3f}", score.preferred] for name, score in judged.items()]
    print(table(["judged by", "A", "B", "preferred"], rows), "\n")
    turn = turning_point(problem)
    follow = [by_one_sample(problem, course_of_things(p)).preferred for p in CHANCES]
    print(
        f"By regret the ranking turns at p = {turn:.4f}. "
        f"The one-sample estimate prefers B at {follow.count('B')} of {len(CHANCES)} values of p from 0 to 0.6."
    )
    if path:
        draw(path, problem, turn)


if __name__ == "__main__":
    main()
