"""Implicit scores against measured regret: what policies read into the units of responses that `rollout` measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from regretless.analysis.subset import Scores
from regretless.core.errors import DataError
from regretless.core.intervals import from_samples, resamples
from regretless.data.regret_table import READINGS, REGRET
from regretless.data.responses import read_responses
from regretless.data.rows import read_rows
from regretless.data.tokenization import TokenizedSide
from regretless.modeling.layout import Ids, Item, read_ids
from regretless.workflow.run_folder import BASE

Vector = NDArray[np.float64]
RESPONSES = "responses.parquet"
"""File of `rollout`, beside its table."""
SHOWN = ("start", "end", "regret", "regret_low", "regret_high", "local", "future")
"""Columns of the table that describe a unit."""
RESAMPLES, FEWEST = 500, 3
"""Resamples of prompts for an interval; fewest numbers that a rank correlation is of."""
DEFINED = (
    "Spearman's rank correlation of measured regret with a method's implicit regret under a policy, minus its score of "
    "the same units (granularity step, discount 1, β = 1), among responses of one outcome. units: of each unit, the "
    "log-ratio of its tokens and, for RePO, what lies ahead of it. G: of each response, what lies ahead of its units. "
    "95 % intervals by resampling prompts"
)


@dataclass(frozen=True)
class MeasuredResponse:
    """A response whose regret `rollout` has measured, in T units."""

    response_id: str
    prompt_id: str
    item: Item
    behavior: Vector | None
    """Log-probability of each token under its writer, nats."""
    outcome: float
    """Its return: 1 or 0."""
    units: Mapping[float, Sequence[Mapping[str, float]]]
    """For each α the numbers `SHOWN` of the units, (T,)."""

    @property
    def starts(self) -> list[int]:
        """The first token of each unit, (T,)."""
        return [int(unit["start"]) for unit in next(iter(self.units.values()))]


@dataclass(frozen=True)
class Reading:
    """A measured response, and the regret that methods read into policies."""

    response: MeasuredResponse
    policies: Mapping[str, Mapping[str, tuple[Vector, Vector]]]
    """For each policy and method, in nats at β = 1 for each unit, (T,): the part of its own tokens, and that of the
    tokens ahead of it."""

    def of_side(self, prompt: Ids, side: TokenizedSide, beta: float) -> dict[str, Any]:
        """What to show beside a pair's side: the units that lie in it, at the first α, counted in its own tokens.

        A side may be the beginning of the response, behind a context. Empty if it is not of this response.
        """
        ids = read_ids(side.ids)
        if (prompt, ids) != (self.response.item[0], self.response.item[1][: len(ids)]):
            return {}
        context = len(ids) - len(side.own)
        alpha, units = next(iter(self.response.units.items()))
        shown = []
        for number, unit in enumerate(units):
            if context <= unit["start"] and unit["end"] <= len(ids):
                read = {
                    name: {method: beta * float(own[number] + ahead[number]) for method, (own, ahead) in of.items()}
                    for name, of in self.policies.items()
                }
                places = {name: int(unit[name]) - context for name in ("start", "end")}
                shown.append({**unit, **places, "policies": read})
        return {"measured": {"alpha": alpha, "units": shown}} if shown else {}


def read_measured(folder: Path, tokenizer: str) -> list[MeasuredResponse]:
    """The measured responses of a folder of `rollout`, in the order of its table.

    tokenizer: fingerprint of the models'. Raises DataError for a file that is none of `rollout`, and for token ids of
    another tokenizer.
    """
    responses = {row.response_id: row for row in read_responses(folder / RESPONSES)[0]}
    units: dict[str, dict[float, list[dict[str, float]]]] = {}
    outcomes: dict[str, float] = {}
    for number, row in read_rows(folder / REGRET):
        missing = {"response_id", "outcome", "alpha", *SHOWN} - set(row if isinstance(row, dict) else ())
        if missing or row["response_id"] not in responses:  # type: ignore[index]
            lacks = f"columns {', '.join(sorted(missing))}" if missing else f"a response of that id in {RESPONSES}"
            raise DataError(f"{folder / REGRET}:{number}: without {lacks}; expected the files of rollout, run it again")
        assert isinstance(row, dict)
        name = row["response_id"]
        units.setdefault(name, {}).setdefault(row["alpha"], []).append({key: row[key] for key in SHOWN})
        outcomes[name] = row["outcome"]
    measured = []
    for name, of_response in units.items():
        response = responses[name]
        if response.tokenizer not in (None, tokenizer):
            raise DataError(
                f"{response.origin}: token ids of another tokenizer than the models'; measure responses with "
                "rollout.model one that has their tokenizer, or leave analyze.rollout out"
            )
        behavior = None if response.logps is None else np.asarray(response.logps, dtype=np.float64)
        item = tuple(response.prompt_token_ids or ()), tuple(response.token_ids or ())
        measured.append(MeasuredResponse(name, response.prompt_id, item, behavior, outcomes[name], of_response))
    return measured


def unit_regrets(measured: MeasuredResponse, policy: Vector, reference: Vector) -> dict[str, tuple[Vector, Vector]]:
    """The implicit regret of each method, of log-probabilities (tokens,) of a policy, (T,) nats at β = 1, in two parts.

    Minus the log-ratio of a unit's tokens, and minus Σ (π_s − m_s) over the tokens s ahead of it. The two summed over
    units are minus the method's score with `granularity=step discount=1`. DPO reads nothing ahead; RePO_det has m = 0;
    `repo` is missing where the writer's log-probabilities are.
    """
    own = -np.add.reduceat(policy - reference, measured.starts)

    def ahead(behavior: Vector) -> Vector:
        of_units = np.add.reduceat(policy - behavior, measured.starts)
        return np.asarray(np.cumsum(of_units) - of_units.sum())

    read = {"dpo": (own, np.zeros_like(own)), "repo_det": (own, ahead(np.zeros_like(policy)))}
    if measured.behavior is not None:
        read["repo"] = own, ahead(measured.behavior)
    return {name: read[name] for name in READINGS if name in read}


def readings(measured: Sequence[MeasuredResponse], scores: Mapping[str, Scores]) -> list[Reading]:
    """The implicit regret of each method under each policy, the reference (`BASE`) as a control."""

    def of(policy: Scores, one: MeasuredResponse) -> Vector:
        return policy[one.item].astype(np.float64)

    return [
        Reading(
            one, {name: unit_regrets(one, of(policy, one), of(scores[BASE], one)) for name, policy in scores.items()}
        )
        for one in measured
    ]


def unit_rows(read: Sequence[Reading]) -> Iterator[dict[str, Any]]:
    """A row of each measured unit, α, policy and method: the measured parts of its regret, and those that are read.

    `regret`, `local` and `future` are in units of return; `own` and `ahead` in nats at β = 1, as in `Reading`.
    """
    for one in read:
        response = one.response
        identity = {"prompt_id": response.prompt_id, "response_id": response.response_id, "outcome": response.outcome}
        for policy, methods in one.policies.items():
            for method, (own, ahead) in methods.items():
                for alpha, units in response.units.items():
                    for number, unit in enumerate(units):
                        measured = {name: unit[name] for name in SHOWN}
                        yield {
                            **identity,
                            "alpha": alpha,
                            "unit": number,
                            **measured,
                            "policy": policy,
                            "method": method,
                            "own": float(own[number]),
                            "ahead": float(ahead[number]),
                        }


def regret_calibration(read: Sequence[Reading], seed: int) -> dict[str, Any]:
    """Rank correlations as `DEFINED`, of each policy, method (`READINGS`), target (`units`, `G`), outcome and α.

    Each has value, standard_error, low, high, n (numbers) and prompts. The value is None where there are fewer than
    three numbers, or all are equal.
    """
    alphas = list(read[0].response.units) if read else []
    policies = {
        name: {
            method: {
                target: {
                    outcome: {
                        f"{alpha:g}": _correlation(read, name, method, target, returned, alpha, seed)
                        for alpha in alphas
                    }
                    for outcome, returned in (("right", 1.0), ("wrong", 0.0))
                }
                for target in ("units", "G")
                if (method, target) != ("dpo", "G")  # DPO reads nothing ahead
            }
            for method in READINGS
        }
        for name in (read[0].policies if read else ())
    }
    return {"defined": DEFINED, "alphas": alphas, "responses": len(read), "policies": policies}


def _correlation(
    read: Sequence[Reading], policy: str, method: str, target: str, outcome: float, alpha: float, seed: int
) -> dict[str, Any]:
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for one in read:
        if one.response.outcome != outcome or method not in one.policies[policy]:
            continue
        own, ahead = one.policies[policy][method]
        units = one.response.units[alpha]
        if target == "units":
            values = [(unit["regret"], float(score)) for unit, score in zip(units, own + ahead, strict=True)]
        else:
            values = [(sum(unit["future"] for unit in units), float(ahead.sum()))]
        by_prompt.setdefault(one.response.prompt_id, []).extend(values)
    return rank_correlation(by_prompt, seed)


def rank_correlation(by_prompt: Mapping[str, Sequence[tuple[float, float]]], seed: int) -> dict[str, Any]:
    """Spearman's ρ of pairs of numbers, with the central 95 % of its values where prompts are resampled."""
    groups = [np.asarray(values, dtype=np.float64) for values in by_prompt.values()]
    everything = np.concatenate([np.empty((0, 2)), *groups])
    value = _spearman(everything)
    counts = resamples(len(groups), RESAMPLES, seed).astype(int) if len(groups) > 1 else np.empty((0, 0), dtype=int)
    of_row = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    drawn = np.array([_spearman(np.repeat(everything, draw[of_row], axis=0)) for draw in counts])
    estimate = from_samples(value, len(groups), drawn[~np.isnan(drawn)])
    return estimate.shown() | {"n": len(everything), "prompts": len(groups)}


def _spearman(pairs: Vector) -> float:
    """NaN where a correlation says nothing."""
    if len(pairs) < FEWEST or any(np.ptp(column) == 0 for column in pairs.T):
        return float("nan")
    first, second = (stats.rankdata(column) for column in pairs.T)
    return float(np.corrcoef(first, second)[0, 1])
