"""Figure 2 of the paper as a decision process: two partial paths, ranked by reward and by regret (§4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from theory.regularized import Problem, regret, solve
from theory.tree import END, FloatArray, IntArray, TokenTree

MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@dataclass(frozen=True)
class Grid:
    """A walk of `horizon` moves. Goal and pit end it; the coin pays once, and the walk goes on."""

    rows: int = 3
    columns: int = 6
    start: tuple[int, int] = (1, 1)
    horizon: int = 5
    coin: tuple[int, int] = (1, 0)
    goal: tuple[int, int] = (1, 5)
    pit: tuple[int, int] = (2, 4)
    coin_reward: float = 1.0
    goal_reward: float = 6.0
    pit_reward: float = -2.0


@dataclass(frozen=True, eq=False)
class Walks:
    """All walks on a grid as a token tree, the moves being the tokens."""

    problem: Problem
    moves: tuple[str, ...]
    """Name of the move of each edge."""

    def segment(self, moves: Sequence[str]) -> IntArray:
        """Edges of the walk that begins with `moves`. Raises ValueError for a move that cannot be made."""
        tree, context = self.problem.tree, 0
        edges: list[int] = []
        for move in moves:
            found = [e for e in np.flatnonzero(tree.source == context) if self.moves[e] == move]
            if not found:
                raise ValueError(f"{move!r} cannot follow {list(moves[: len(edges)])}")
            edges.append(int(found[0]))
            context = int(tree.child[found[0]])
        return np.array(edges)

    def favorable(self) -> FloatArray:
        """A walker who knows where the goal is: the optimal policy, (E,) nats."""
        return solve(self.problem).policy

    def pessimistic(self) -> FloatArray:
        """A walker who takes the pit for the goal: the optimal policy when every reward is its opposite, (E,) nats."""
        return solve(replace(self.problem, reward=-self.problem.reward)).policy


def grid_walks(grid: Grid | None = None, *, beta: float = 0.5) -> Walks:
    """All walks on `grid`, with a reference that makes every possible move equally likely and no discount."""
    grid = grid or Grid()
    sources: list[int] = []
    children: list[int] = []
    rewards: list[float] = []
    moves: list[str] = []
    states = [(grid.start, 0, False)]
    # States are appended as they are reached, so contexts come level by level, as TokenTree numbers them.
    for context, (place, walked, has_coin) in enumerate(states):
        for move, (down, right) in MOVES.items():
            cell = (place[0] + down, place[1] + right)
            if not (0 <= cell[0] < grid.rows and 0 <= cell[1] < grid.columns):
                continue
            takes_coin = cell == grid.coin and not has_coin
            over = cell in (grid.goal, grid.pit) or walked + 1 == grid.horizon
            sources.append(context)
            moves.append(move)
            rewards.append(
                grid.coin_reward * takes_coin
                + grid.goal_reward * (cell == grid.goal)
                + grid.pit_reward * (cell == grid.pit)
            )
            children.append(END if over else len(states))
            if not over:
                states.append((cell, walked + 1, has_coin or takes_coin))
    tree = TokenTree(np.array(sources), np.array(children))
    counts = np.diff(tree.first, append=tree.edges)
    reference = -np.log(counts.astype(np.float64))[tree.source]
    return Walks(Problem(tree=tree, reward=np.array(rewards), reference=reference, beta=beta), tuple(moves))


def mixture(policy: FloatArray, other: FloatArray, share: float) -> FloatArray:
    """The policy that follows `other` with probability `share` at every token, else `policy`; (E,) nats."""
    return np.log((1 - share) * np.exp(policy) + share * np.exp(other))


def segment_regret(problem: Problem, behavior: FloatArray, segment: IntArray) -> float:
    """Regret of a segment: the sum over its tokens, in units of reward."""
    return float(regret(problem, behavior)[segment].sum())
