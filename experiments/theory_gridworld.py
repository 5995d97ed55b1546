"""Two partial paths of a grid world, ranked by reward and by regret under a favorable and a pessimistic continuation.

    python experiments/theory_gridworld.py

Path 1 fetches a coin and leaves the goal out of reach; path 2 has earned nothing yet and stands near the goal, and near
a pit. The reference moves at random; β = 0.5, no discount.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from theory.grid_world import MOVES, Grid, Walks, grid_walks, mixture, segment_regret
from theory.tree import FloatArray
from theory_common import BLUE, GRAY, GREEN, ORANGE, figure_path, save_figure, start_figure, table

PATHS = {"path 1": ("left", "up"), "path 2": ("right", "right")}
SHARES = np.linspace(0, 1, 101)


def regrets(walks: Walks, behavior: FloatArray) -> list[float]:
    """Regret of path 1 and of path 2."""
    return [segment_regret(walks.problem, behavior, walks.segment(moves)) for moves in PATHS.values()]


def turning_point(difference: FloatArray) -> float:
    """Share of pessimism at which path 1 and path 2 are regretted equally, between two grid points."""
    after = int(np.argmax(difference > 0))
    before = difference[after - 1]
    return float(SHARES[after - 1] + (SHARES[after] - SHARES[after - 1]) * before / (before - difference[after]))


def draw(path: Path, grid: Grid, curves: FloatArray, turn: float) -> None:
    figure, (board, chart) = start_figure(2, height=2.6)
    for row in range(grid.rows + 1):
        board.plot([-0.5, grid.columns - 0.5], [row - 0.5] * 2, color="#cccccc", linewidth=0.8)
    for column in range(grid.columns + 1):
        board.plot([column - 0.5] * 2, [-0.5, grid.rows - 0.5], color="#cccccc", linewidth=0.8)
    names = {grid.start: "start", grid.coin: "coin +1", grid.goal: "goal +6", grid.pit: "pit −2"}
    for (row, column), name in names.items():
        board.text(column, row + 0.36, name, ha="center", fontsize=7)
    for (label, moves), color in zip(PATHS.items(), (ORANGE, BLUE), strict=True):
        cells = [grid.start]
        for move in moves:
            cells.append((cells[-1][0] + MOVES[move][0], cells[-1][1] + MOVES[move][1]))
        rows, columns = zip(*cells, strict=True)
        board.plot(columns, rows, color=color, linewidth=2, label=label)
        board.plot(columns[-1], rows[-1], "o", color=color)
    board.plot(grid.start[1], grid.start[0], "s", color=GREEN)
    board.set(ylim=(grid.rows - 0.45, -1.2), aspect="equal")
    board.axis("off")
    board.legend(loc="upper right", ncols=2)
    for values, label, color in zip(curves.T, PATHS, (ORANGE, BLUE), strict=True):
        chart.plot(SHARES, values, color=color, label=label)
    chart.axvline(turn, color=GRAY, linewidth=0.8, linestyle="--")
    chart.set_xlabel("share of the pessimistic continuation")
    chart.set_ylabel("regret (reward)")
    chart.legend(loc="lower right")
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-gridworld.svg")
    grid = Grid()
    walks = grid_walks(grid)
    favorable, pessimistic = walks.favorable(), walks.pessimistic()
    earned = [float(walks.problem.reward[walks.segment(moves)].sum()) for moves in PATHS.values()]
    judged = {
        "reward so far": (earned, earned[0] > earned[1]),
        **{
            f"regret, {name} continuation": (found := regrets(walks, behavior), found[0] < found[1])
            for name, behavior in {
                "favorable": favorable,
                "pessimistic": pessimistic,
                "random": walks.problem.reference,
            }.items()
        },
    }
    rows = [
        [name, *(f"{value + 0.0:.2f}" for value in values), "path 1" if first else "path 2"]
        for name, (values, first) in judged.items()
    ]
    print(table(["judged by", *PATHS, "preferred"], rows), "\n")
    curves = np.array([regrets(walks, mixture(favorable, pessimistic, share)) for share in SHARES])
    turn = turning_point(curves[:, 1] - curves[:, 0])
    print(f"The ranking turns where the continuation is pessimistic in {100 * turn:.1f} % of its moves.")
    if path:
        draw(path, grid, curves, turn)


if __name__ == "__main__":
    main()
