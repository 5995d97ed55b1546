"""RePO's future by continuations: `sampled` on the path taken, exact where all are enumerated, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regretless.core.errors import ConfigError, DataError
from regretless.objectives import Logps, build
from regretless.objectives.continued import Continued
from regretless.objectives.inputs import later_steps

PAIRS = torch.tensor([[0, 1], [2, 1]])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"discount": 1.0},
    {"discount": 0.6},
    {"formulation": "released"},
    {"formulation": "released", "discount": 0.6},
]
STEPS: list[dict[str, Any]] = [*OPTIONS, *({"granularity": "step", **options} for options in OPTIONS)]
Drawn = tuple[int, int, Tensor, Tensor, list[int]]
"""A continuation: its response, its start, log-probabilities under policy and behavior policy, and its steps."""


def tokens_of(count: int, random: torch.Generator) -> Tensor:
    return -torch.randn(count, generator=random, dtype=torch.float64).abs()


def steps_of(count: int, first: int, random: torch.Generator) -> list[int]:
    """Steps of one or two tokens."""
    opens = torch.randint(2, (count,), generator=random).tolist()
    return [first + number for number in itertools.accumulate(opens[1:], initial=0)]


class Responses:
    """Three responses with steps, their log-probabilities (policy, reference, behavior), and continuations of them."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.lengths = [9, 1, 6]
        self.values = [[tokens_of(length, self.random) for length in self.lengths] for _ in range(3)]
        self.steps = [steps_of(length, 0, self.random) for length in self.lengths]
        self.drawn: list[Drawn] = []

    def draw(self, row: int, start: int, count: int) -> None:
        """Several continuations of one beginning, which go on with its last step or open the next one."""
        opens = int(torch.randint(2, (), generator=self.random))
        for _ in range(count):
            length = int(torch.randint(1, 8, (), generator=self.random))
            steps = steps_of(length, self.steps[row][start - 1] + opens, self.random)
            policy, behavior = (tokens_of(length, self.random) for _ in range(2))
            self.drawn.append((row, start, policy, behavior, steps))

    def take(self, row: int, start: int, *, times: int = 1) -> None:
        """The path that was taken, as continuations."""
        policy, _, behavior = (values[row][start:] for values in self.values)
        self.drawn += [(row, start, policy, behavior, self.steps[row][start:])] * times

    def logps(self, **more: Any) -> Logps:
        policy, reference, behavior = (pad_sequence(rows, batch_first=True) for rows in self.values)
        mask = torch.arange(policy.shape[1]) < torch.tensor(self.lengths).unsqueeze(1)
        steps = pad_sequence([torch.tensor(row) for row in self.steps], batch_first=True)
        inputs = {"reference": reference, "behavior": behavior, "steps": steps, **more}
        return Logps(policy, mask=mask, continuations=self.continued(), **inputs)

    def continued(self) -> Continued:
        rows, starts, policy, behavior, steps = zip(*self.drawn, strict=True)
        return Continued(
            policy=pad_sequence(policy, batch_first=True, padding_value=math.nan),
            behavior=pad_sequence(behavior, batch_first=True, padding_value=math.nan),
            mask=pad_sequence([torch.ones(len(each), dtype=torch.bool) for each in policy], batch_first=True),
            rows=torch.tensor(rows),
            starts=torch.tensor(starts),
            steps=pad_sequence([torch.tensor(each) for each in steps], batch_first=True),
        )


def future(
    policy: Tensor, behavior: Tensor, units: Sequence[int], unit: int, *, released: bool, discount: float | None
) -> float:
    """The inner sum of a unit in one response, tokens by number of their unit: the double sum as it is printed."""
    sums = [0.0] * (max(units) + 1)
    for number, one, other in zip(units, policy.tolist(), behavior.tolist(), strict=True):
        sums[number] += one - other
    ahead = sums[unit if released else unit + 1 :]
    if discount is not None:
        return sum(value * discount ** (place + (not released)) for place, value in enumerate(ahead))
    return sum(ahead) / len(ahead) if ahead else 0.0


def score_by_hand(data: Responses, row: int, options: dict[str, Any], cut: int | None = None) -> float:
    """β = 1. Each unit's future is the mean over the paths by its next context that has continuations."""
    by_step, released = options.get("granularity") == "step", options.get("formulation") == "released"
    policy, reference, behavior = (values[row] for values in data.values)
    length = len(policy)
    cut = length if cut is None else cut
    units = data.steps[row] if by_step else list(range(length))
    contexts: dict[int, list[tuple[Tensor, Tensor, list[int]]]] = {}
    for of_row, start, ours, theirs, steps in data.drawn:
        if of_row == row:
            own = steps if by_step else list(range(start, start + len(ours)))
            both = torch.cat((policy[:start], ours)), torch.cat((behavior[:start], theirs))
            contexts.setdefault(start, []).append((*both, [*units[:start], *own]))
    total = float((policy - reference)[:cut].sum())
    count = units[cut - 1] + 1
    for unit in range(count):
        # The first token behind the unit opens the next one: in a continuation of an unfinished unit, it does not.
        ending = [start for start in sorted(contexts) if contexts[start][0][2][start] > unit]
        paths = contexts[ending[0]] if ending else [(policy, behavior, units)]
        read = [future(*path, unit, released=released, discount=options.get("discount")) for path in paths]
        total += sum(read) / len(read)
    return total / count if released else total


def scores(logps: Logps, estimator: str = "rollouts", **options: Any) -> list[float]:
    found = build("repo", estimator=estimator, **options)(logps, PAIRS).scores
    assert found is not None
    return found.tolist()


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize("times", [1, 3])
def test_rollouts_when_each_continuation_is_the_path_taken_then_it_is_sampled(
    options: dict[str, Any], times: int
) -> None:
    data = Responses()
    for row, start in ((0, 2), (0, 3), (0, 8), (2, 5), (2, 1)):
        data.take(row, start, times=times)
    assert scores(data.logps(), **options) == pytest.approx(scores(data.logps(), "sampled", **options), abs=1e-12)
    # With what is stored behind a cut, too.
    behind = (torch.arange(9) >= torch.tensor([[4], [1], [5]])).double()
    cut = [scores(data.logps(future=behind), each, horizon="stored", **options) for each in ("rollouts", "sampled")]
    assert cut[0] == pytest.approx(cut[1], abs=1e-12)


@pytest.mark.parametrize("options", STEPS)
@pytest.mark.parametrize("cuts", [None, (4, 1, 6)])
def test_rollouts_when_continuations_differ_then_each_units_future_is_the_mean_over_its_next_contexts_paths(
    options: dict[str, Any], cuts: tuple[int, ...] | None
) -> None:
    data = Responses()
    for row, start, count in ((0, 3, 4), (2, 4, 1), (0, 6, 2), (2, 1, 3)):
        data.draw(row, start, count)
    more, horizon = {}, {}
    if cuts is not None:
        more, horizon = {"future": (torch.arange(9) >= torch.tensor(cuts).unsqueeze(1)).double()}, {"horizon": "stored"}
    expected = [score_by_hand(data, row, options, None if cuts is None else cuts[row]) for row in range(3)]
    found = scores(data.logps(**more), **options, **horizon)
    assert found == pytest.approx(expected, rel=1e-12)
    assert found != pytest.approx(scores(data.logps(**more), "sampled", **options, **horizon), rel=1e-3)


END, DEPTH = 0, 4
"""The token that ends a response, and the most tokens of one."""


class Tree:
    """Three tokens in every context; the writer's probabilities are ½, ¼, ¼ in an order that depends on the context."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.contexts = [path for length in range(DEPTH) for path in itertools.product((1, 2), repeat=length)]
        self.logits = {
            path: torch.randn(3, generator=random, dtype=torch.float64).requires_grad_() for path in self.contexts
        }
        self.writer = {
            path: torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)[torch.randperm(3, generator=random)].log()
            for path in self.contexts
        }

    def logps(self, start: Sequence[int], tokens: Sequence[int], table: dict[tuple[int, ...], Tensor]) -> Tensor:
        path = [*start, *tokens]
        places = range(len(start), len(path))
        return torch.stack([table[tuple(path[:place])].log_softmax(0)[path[place]] for place in places])

    def futures(self, start: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        """Every continuation, as often as the writer draws it among 4 for each token that may be left."""
        found = []
        for length in range(1, DEPTH - len(start) + 1):
            for tokens in itertools.product(range(3), repeat=length):
                over = tokens[-1] == END or len(start) + length == DEPTH
                if over and END not in tokens[:-1]:
                    share = float(self.logps(start, tokens, self.writer).sum().exp())
                    found.append((tokens, round(share * 4 ** (DEPTH - len(start)))))
        return found

    def divergence(self, context: tuple[int, ...]) -> Tensor:
        """F: Σ KL(m ‖ π) over the contexts of the writer's future, expected from a context on."""
        if END in context or len(context) == DEPTH:
            return torch.zeros((), dtype=torch.float64)
        m = self.writer[context]
        later = torch.stack([self.divergence((*context, token)) for token in range(3)])
        return (m.exp() * (m - self.logits[context].log_softmax(0) + later)).sum()


def test_rollouts_when_all_continuations_of_a_tree_are_given_then_value_and_gradient_are_those_of_the_exact_kl() -> (
    None
):
    tree, beta = Tree(), 0.7
    responses = [(1, 2, 1, 0), (2, 0), (1, 1, 2, 2)]
    both = [[tree.logps((), each, table) for each in responses] for table in (tree.logits, tree.writer)]
    policy, behavior = (pad_sequence(rows, batch_first=True) for rows in both)
    drawn = [
        (row, start, tokens)
        for row, response in enumerate(responses)
        for start in range(1, len(response))
        for tokens, times in tree.futures(response[:start])
        for _ in range(times)
    ]
    assert len(drawn) == 64 + 16 + 4 + 64 + 64 + 16 + 4
    values = [
        [tree.logps(responses[row][:start], tokens, each) for row, start, tokens in drawn]
        for each in (tree.logits, tree.writer)
    ]
    lengths = torch.tensor([len(tokens) for *_, tokens in drawn])
    continued = Continued(
        policy=pad_sequence(values[0], batch_first=True),
        behavior=pad_sequence(values[1], batch_first=True),
        mask=torch.arange(int(lengths.max())) < lengths.unsqueeze(1),
        rows=torch.tensor([row for row, *_ in drawn]),
        starts=torch.tensor([start for _, start, _ in drawn]),
    )
    mask = torch.arange(4) < torch.tensor([4, 2, 4]).unsqueeze(1)
    logps = Logps(policy, mask=mask, reference=behavior - 0.1, behavior=behavior, continuations=continued)
    found = build("repo", estimator="rollouts", discount=1.0, beta=beta)(logps, PAIRS)
    assert found.scores is not None
    exact = torch.stack(
        [
            (rows - others + 0.1).sum() - sum(tree.divergence(response[:start]) for start in range(1, len(response)))
            for response, rows, others in zip(responses, *both, strict=True)
        ]
    )
    torch.testing.assert_close(found.scores, beta * exact, rtol=0, atol=1e-10)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    leaves = list(tree.logits.values())
    gradients = [
        torch.autograd.grad((weights * each).sum(), leaves, retain_graph=True) for each in (found.scores, beta * exact)
    ]
    for mine, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)
    # One path instead of all of them is another number.
    sampled = build("repo", discount=1.0, beta=beta)(logps, PAIRS).scores
    assert sampled is not None and (sampled - found.scores).abs().max() > 0.3


def test_rollouts_when_no_response_has_a_context_then_they_are_sampled() -> None:
    data = Responses()
    none = torch.zeros(0, 1)
    empty = Continued(none, none, none.bool(), torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    data.take(0, 3)
    logps = data.logps()
    object.__setattr__(logps, "continuations", empty)
    assert scores(logps) == scores(logps, "sampled")


@pytest.mark.parametrize(
    ("start", "given", "expected"),
    [
        (2, None, [0, 1, 1]),  # 5 does not end a step, and the continuation's 7 does
        (3, None, [1, 2, 2]),
        (2, [0, 0, 0, 1], [0, 1, 1]),  # as the data has it
        (3, [0, 0, 0, 1], [1, 2, 2]),
        (2, [0, 1, 2, 3], [2, 3, 3]),
    ],
)
def test_steps_of_a_continuation_then_they_are_counted_on_from_those_of_its_response(
    start: int, given: list[int] | None, expected: list[int]
) -> None:
    path = [*[4, 5, 7, 6][:start], 7, 8, 2]
    assert later_steps(path, start, 3, given, lambda token: token == 7) == expected


def test_rollouts_when_missing_or_misused_then_the_message_says_what_to_do() -> None:
    data = Responses()
    data.draw(0, 3, 2)
    logps = data.logps()
    with pytest.raises(DataError, match=r"`continuations`: .*run rollout with keep_continuations"):
        object.__setattr__(logps, "continuations", None)
        scores(logps)
    with pytest.raises(ConfigError, match="ld_alpha: it weighs the tokens of responses, not of their continuations"):
        build("repo", estimator="rollouts", ld_alpha=0.5)
    with pytest.raises(ConfigError, match="estimator=rollouts needs the continuations of every pair"):
        build("repo", estimator="rollouts", unknown_behavior="dirac")
    values = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"Continued.mask: expected one token or more"):
        Continued(values, values, values.bool(), torch.zeros(2).long(), torch.ones(2).long())
    with pytest.raises(ValueError, match=r"Continued.starts: expected \(2,\), got \(3,\)"):
        Continued(values, values, values == 0, torch.zeros(2).long(), torch.ones(3).long())
