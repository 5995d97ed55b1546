"""Measured regret beside what methods read: unit sums against the objectives, rank correlations by hand, the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from regretless.analysis.regret_calibration import (
    MeasuredResponse,
    Reading,
    rank_correlation,
    read_measured,
    readings,
    regret_calibration,
    unit_regrets,
)
from regretless.core.errors import DataError
from regretless.core.intervals import from_samples
from regretless.core.regret_values import split
from regretless.data.columns import Response
from regretless.data.rows import write_parquet, write_records
from regretless.data.tokenization import TokenizedSide
from regretless.modeling.layout import as_context
from regretless.objectives import Logps, build

PROMPT, IDS = (1, 2), (10, 11, 12, 13, 14, 15, 16)
ENDS = (2, 5, 7)


def units_of(regrets: tuple[float, ...], futures: tuple[float, ...]) -> list[dict[str, float]]:
    numbers = zip((0, *ENDS), ENDS, regrets, futures, strict=False)
    return [
        {
            "start": start,
            "end": end,
            "regret": r,
            "regret_low": r - 1,
            "regret_high": r + 1,
            "local": r - f,
            "future": f,
        }
        for start, end, r, f in numbers
    ]


def response(name: str = "a", prompt: str = "p", outcome: float = 1.0, **more: Any) -> MeasuredResponse:
    units = {0.5: units_of((3.0, 1.0, 2.0), (0.5, 0.25, 0.0)), 0.1: units_of((1.0, 2.0, 3.0), (0.5, 0.25, 0.0))}
    given: dict[str, Any] = {"item": (PROMPT, IDS), "behavior": np.linspace(-1, -2, 7), "units": units, **more}
    return MeasuredResponse(response_id=name, prompt_id=prompt, outcome=outcome, **given)


def test_unit_regrets_when_summed_then_they_are_minus_the_objectives_scores_of_the_units() -> None:
    rng = np.random.default_rng(0)
    policy, reference, behavior = -rng.random((3, 7))
    read = unit_regrets(response(behavior=behavior), policy, reference)
    assert list(read) == ["dpo", "repo", "repo_det"]
    steps = torch.tensor([[0, 0, 1, 1, 1, 2, 2]])
    rows = {name: torch.tensor(row[None]) for name, row in (("reference", reference), ("behavior", behavior))}
    logps = Logps(torch.tensor(policy[None]), mask=torch.ones(1, 7), steps=steps, **rows)
    scores = {"dpo": (policy - reference).sum()}
    for name in ("repo", "repo_det"):
        objective: Any = build(name, beta=1.0, granularity="step", discount=1.0)
        scores[name] = float(objective.token_scores(logps).sum())
    assert {name: -(own + ahead).sum() for name, (own, ahead) in read.items()} == pytest.approx(scores, abs=1e-12)
    # By hand: the unit's own tokens, and all tokens behind it.
    own, ahead = read["repo"]
    assert own[1] == pytest.approx(-(policy - reference)[2:5].sum(), abs=1e-12)
    assert ahead.tolist() == pytest.approx([-(policy - behavior)[end:].sum() for end in ENDS], abs=1e-12)
    assert list(unit_regrets(response(behavior=None), policy, reference)) == ["dpo", "repo_det"]


def test_unit_regrets_when_the_policy_is_the_best_one_then_dpo_reads_the_local_part_of_measured_regret() -> None:
    # π* = π_ref exp((V*(s') − V*(s)) / α), at the first token of each unit; μ = π_ref.
    alpha, best = 0.5, np.array([0.2, 0.5, 0.3, 1.0])
    exact = split(best, [0.1, 0.4, 0.15, 1.0])
    reference = np.linspace(-1, -2, 7)
    policy = reference.copy()
    policy[[0, 2, 5]] += np.diff(best) / alpha
    read = unit_regrets(response(behavior=reference), policy, reference)
    assert alpha * read["dpo"][0] == pytest.approx(exact.local, abs=1e-12)
    # The paths ahead: RePO's one-sample estimate is V*(s_{t+1}) − R, not what the writer is expected to waste.
    assert alpha * read["repo"][1] == pytest.approx(best[1:] - 1.0, abs=1e-12)


def test_rank_correlation_when_ranks_are_known_then_it_is_spearmans_and_resamples_whole_prompts() -> None:
    # Σd² = 2 of four: 1 − 6·2/(4·15) = 0.8.
    table = [(1.0, 10.0), (2.0, 20.0), (3.0, 400.0), (4.0, 300.0)]
    found = rank_correlation({"a": table[:2], "b": table[2:]}, seed=0)
    assert found["value"] == pytest.approx(0.8) and (found["n"], found["prompts"]) == (4, 2)
    # Two prompts are drawn together with probability ½, else one of them twice: ρ is 0.8, 1 or −1.
    assert (found["low"], found["high"]) == pytest.approx((-1.0, 1.0))
    draws = np.array([1.0] * 1 + [0.8] * 2 + [-1.0] * 1)
    assert found["standard_error"] == pytest.approx(
        from_samples(0.8, 2, np.repeat(draws, 100)).standard_error, abs=0.05
    )
    # Ties share their rank: 1.5 and 1.5.
    tied = rank_correlation({"a": [(0.0, 1.0), (0.0, 2.0), (1.0, 3.0)]}, seed=0)
    assert tied["value"] == pytest.approx(np.sqrt(3) / 2) and tied["low"] is None
    for nothing in ({}, {"a": table[:2]}, {"a": [(1.0, 5.0)] * 3}):
        assert rank_correlation(nothing, seed=0)["value"] is None


def test_calibration_when_a_reading_follows_regret_in_right_responses_only_then_it_says_so() -> None:
    items = {name: ((number,), IDS) for number, name in enumerate("abcd")}
    outcomes = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0}
    measured = [
        response(name, f"prompt {name}", outcome, item=items[name], behavior=None) for name, outcome in outcomes.items()
    ]
    zero, policy = np.zeros(7, dtype=np.float32), np.zeros(7, dtype=np.float32)
    policy[[0, 2, 5]] = -3, -1, -2  # in the order of regret at α = 0.5
    scores: Mapping[str, Any] = {
        "base": dict.fromkeys(items.values(), zero),
        "dpo": {items[name]: policy if outcome else -policy for name, outcome in outcomes.items()},
    }
    found = regret_calibration(readings(measured, scores), seed=0)
    assert (found["alphas"], found["responses"]) == ([0.5, 0.1], 4)
    of_units = found["policies"]["dpo"]["dpo"]["units"]
    assert [of_units[outcome]["0.5"]["value"] for outcome in ("right", "wrong")] == pytest.approx([1.0, -1.0])
    # At the other α the ranks are 1, 2, 3 against 3, 1, 2: 1 − 6·6/(3·8) = −0.5.
    assert of_units["right"]["0.1"]["value"] == pytest.approx(-0.5)
    assert (of_units["right"]["0.5"]["n"], of_units["right"]["0.5"]["prompts"]) == (6, 2)
    assert "G" not in found["policies"]["dpo"]["dpo"]
    # Nothing is read into the reference by DPO, and by RePO where the writer is unknown.
    assert found["policies"]["base"]["dpo"]["units"]["right"]["0.5"]["value"] is None
    assert found["policies"]["dpo"]["repo"]["units"]["right"]["0.5"]["n"] == 0


def test_calibration_of_g_when_one_number_a_response_is_known_then_it_is_that_of_what_lies_ahead() -> None:
    # G is 1, 2, 3; RePO reads 0.1, 0.3 and 0.2 ahead: 1 − 6·2/(3·8) = 0.5.
    measured, scores = [], {}
    for number, (waste, ahead) in enumerate(zip((1.0, 2.0, 3.0), (0.1, 0.3, 0.2), strict=True)):
        item = ((number,), IDS)
        units = {0.5: units_of((1.0, 1.0, 1.0), (waste, 0.0, 0.0))}
        measured.append(response(str(number), str(number), item=item, units=units, behavior=np.zeros(7)))
        scores[item] = np.array([5, 5, -ahead, 0, 0, 0, 0], dtype=np.float32)
    found = regret_calibration(readings(measured, {"base": scores}), seed=0)["policies"]["base"]
    for method in ("repo", "repo_det"):
        assert found[method]["G"]["right"]["0.5"]["value"] == pytest.approx(0.5)
        assert found[method]["G"]["wrong"]["0.5"]["value"] is None


@pytest.mark.parametrize(
    ("prompt", "ids", "places"),
    [
        (PROMPT, IDS, [(0, 2), (2, 5), (5, 7)]),
        (PROMPT, IDS[:5], [(0, 2), (2, 5)]),  # cut behind a unit
        (PROMPT, IDS[:6], [(0, 2), (2, 5)]),  # within one
        (PROMPT, (*as_context(IDS[:2]), *IDS[2:5]), [(0, 3)]),  # behind a context
        (PROMPT, IDS[:1], []),
        (PROMPT, (*IDS[:4], 99, *IDS[5:]), []),  # another response
        (PROMPT, (*IDS, 99), []),
        ((1,), IDS, []),  # another prompt
    ],
)
def test_units_of_a_side_when_it_is_a_part_of_the_response_then_they_are_counted_in_its_own_tokens(
    prompt: tuple[int, ...], ids: tuple[int, ...], places: list[tuple[int, int]]
) -> None:
    parts = np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 40.0])
    shown = Reading(response(), {"base": {}, "mine": {"repo": parts}}).of_side(prompt, TokenizedSide(ids), beta=0.5)
    assert [(unit["start"], unit["end"]) for unit in shown.get("measured", {}).get("units", ())] == places
    if places:
        first = 1 if ids[0] < 0 else 0
        unit = shown["measured"]["units"][0]
        assert shown["measured"]["alpha"] == 0.5 and unit["regret"] == (3.0, 1.0)[first]
        assert unit["policies"] == {"base": {}, "mine": {"repo": 0.5 * (parts[0] + parts[1])[first]}}


def write_rollout(folder: Path, **changes: Any) -> None:
    row = {"response_id": "a", "outcome": 1.0, "alpha": 0.5, **units_of((3.0,), (0.0,))[0], **changes}
    table = {name: value for name, value in row.items() if value is not None}
    write_parquet(folder / "regret.parquet", pa.Table.from_pylist([table]))
    rows = [
        Response(
            prompt_id="p",
            response_id="a",
            prompt="x",
            response="y",
            prompt_token_ids=list(PROMPT),
            token_ids=list(IDS),
            logps=[-0.5] * 7,
            tokenizer="t",
        )
    ]
    write_records(folder / "responses.parquet", rows)


def test_measured_responses_when_read_then_they_have_tokens_writer_and_units(tmp_path: Path) -> None:
    write_rollout(tmp_path)
    (found,) = read_measured(tmp_path, "t")
    assert (found.item, found.outcome, found.prompt_id) == ((PROMPT, IDS), 1.0, "p")
    assert found.behavior is not None and found.behavior.tolist() == [-0.5] * 7
    assert found.units == {0.5: units_of((3.0,), (0.0,))}


@pytest.mark.parametrize(
    ("changes", "tokenizer", "message"),
    [
        ({"regret_low": None}, "t", "regret.parquet:1: without columns regret_low"),
        ({"response_id": "b"}, "t", "without a response of that id in responses.parquet"),
        ({}, "another", "token ids of another tokenizer"),
    ],
)
def test_measured_responses_when_files_do_not_fit_then_it_is_an_error(
    tmp_path: Path, changes: dict[str, Any], tokenizer: str, message: str
) -> None:
    write_rollout(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        read_measured(tmp_path, tokenizer)
