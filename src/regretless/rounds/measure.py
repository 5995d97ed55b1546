"""What a round shows: its writer's responses, how far training went from it, and whether the rounds go on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regretless.core.files import read_json, write_json
from regretless.core.intervals import mean_by_prompt, share_by_prompt
from regretless.data.columns import Response, Verdict
from regretless.data.responses import read_responses
from regretless.modeling.load import ModelConfig
from regretless.modeling.training_folder import STATE
from regretless.rounds.round_prompts import has_both
from regretless.rounds.round_settings import StopConfig
from regretless.rounds.writer import FILE, drawn_logps, drawn_rows, score
from regretless.workflow.stage_folder import MANIFEST


def run(responses: Path, trained: ModelConfig, most: int, seed: int, output: Path) -> dict[str, Any]:
    """Write measures.json into the folder `output`; returns the plain numbers of it.

    trained: what the round's training made of its start. It scores at most `most` responses, drawn at random.
    Raises DataError for responses without token ids and log-probabilities.
    """
    rows, _ = read_responses(responses)
    scored = drawn_rows(responses, rows, most, seed)
    found = {**of_responses(rows), **of_training(scored, score(trained, scored, "re-score: trained"))}
    write_json(output / FILE, found)
    return {name: value["value"] if isinstance(value, Mapping) else value for name, value in found.items()}


def of_responses(rows: Sequence[Response]) -> dict[str, Any]:
    """Numbers about a writer's responses; means and shares have a 95 % interval over prompts.

    `pass_at_1`, `both_verdicts` (share of prompts with right and wrong responses, the only ones that give pairs of
    verdicts), `score` of a judge, `tokens` per response, `cut` at the limit, and `entropy` in nats per token: minus the
    mean log-probability of the drawn tokens, of the distribution that they were drawn from.
    """
    prompts = [row.prompt_id for row in rows]
    measures: dict[str, Any] = {"responses": len(rows), "prompts": len(set(prompts))}
    if any(row.verdict is not None for row in rows):
        measures["pass_at_1"] = share_by_prompt([row.verdict == Verdict.CORRECT for row in rows], prompts)
        both = has_both(rows)
        measures["both_verdicts"] = share_by_prompt(list(both.values()), list(both))
    if scores := [(row.score, row.prompt_id) for row in rows if row.score is not None]:
        values, judged = zip(*scores, strict=True)
        measures["score"] = mean_by_prompt(values, [1.0] * len(values), judged)
    counts = [len(row.pieces or ()) for row in rows]
    measures["tokens"] = mean_by_prompt(counts, [1.0] * len(rows), prompts)
    measures["cut"] = sum(row.finish_reason == "length" for row in rows) / len(rows)
    drawn = [(drawn_logps(row), row.prompt_id) for row in rows if drawn_logps(row)]
    measures["entropy"] = mean_by_prompt(
        [-sum(logps) for logps, _ in drawn], [len(logps) for logps, _ in drawn], [prompt for _, prompt in drawn]
    )
    return measures


def of_training(rows: Sequence[Response], trained: Sequence[float]) -> dict[str, Any]:
    """How far training went from the writer μ of the responses, by the trained model's log-probability of each (nats).

    `kl_of_round`: KL(μ ‖ π), the mean of log μ − log π, with an interval over prompts. `effective_share`: the effective
    sample size (Σ w)² / Σ w² of the importance weights w = π / μ of whole responses, as a share of their number: 1 if
    the two agree, 1/n if one response has all the weight.
    """
    logs = np.array([value - sum(drawn_logps(row)) for row, value in zip(rows, trained, strict=True)])
    weights = np.exp(logs - logs.max())
    share = float(weights.sum() ** 2 / (weights @ weights) / len(weights))
    moved = mean_by_prompt((-logs).tolist(), [1.0] * len(rows), [row.prompt_id for row in rows])
    return {"kl_of_round": moved, "effective_share": share}


def measures(written: Path, measured: Path) -> dict[str, Any]:
    """What was measured of a round: before its training, in the folder `written`, and after it, in `measured`."""
    return {**read_json(written / FILE), **read_json(measured / FILE)}


def reason_to_stop(stop: StopConfig, measures: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a method's rounds end behind those that were measured, in words; None if they go on."""
    first, last = measures[0], measures[-1]
    divergence, length = last["kl_to_start"]["value"], last["tokens"]["value"]
    if stop.kl is not None and divergence > stop.kl:
        return (
            f"the KL divergence of round {len(measures)}'s writer to the start is {divergence:.3g} nats, above "
            f"{stop.kl:g}"
        )
    if stop.length is not None and length > stop.length * first["tokens"]["value"]:
        return (
            f"responses of round {len(measures)} have {length:.4g} tokens, above {stop.length:g} times the first "
            f"round's {first['tokens']['value']:.4g}"
        )
    if stop.gain and len(measures) > 1:
        return _no_gain(len(measures), *measures[-2:])
    return None


def _no_gain(number: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Why a round's writer is not better than the one before, by responses to other prompts; None if it is.

    The interval of the difference joins those of the two, which are independent (Newcombe, Statistics in Medicine 17,
    1998, method 10). Without intervals, of fewer than two prompts, no gain is known.
    """
    name = next((name for name in ("pass_at_1", "score") if name in before and name in now), None)
    if name is None:
        return None
    old, new = before[name], now[name]
    gain, low = new["value"] - old["value"], -math.inf
    if new["low"] is not None and old["high"] is not None:
        low = gain - math.hypot(new["value"] - new["low"], old["high"] - old["value"])
    if low > 0:
        return None
    label = {"pass_at_1": "Pass@1", "score": "the score"}[name]
    return (
        f"{label} of round {number}'s writer, {new['value']:.4g}, is not above the {old['value']:.4g} of the round "
        f"before: the difference of {gain:.3g} may be 0 or less (95 % interval from {low:.3g})"
    )


def row(number: int, method: str, written: Path, measured: Path, trained: Path, replay: Path) -> dict[str, Any]:
    """A line of rounds.jsonl: what was measured of a round, its pairs, and what its training says.

    written, measured, trained, replay: folders of these units; the last need not exist. `pairs` are those that were
    trained on, `replayed` those of earlier rounds among all. `saturated` is the share of the pairs of the last logged
    steps whose margin has practically no gradient left; None where the method has no margin.
    """
    summary = read_json(trained / MANIFEST)["summary"]
    drawn = replay / MANIFEST
    logged = [line for line in read_json(trained / STATE)["log_history"] if "loss" in line]
    return {
        **{"round": number, "method": method},
        **measures(written, measured),
        **{name: summary[name] for name in ("pairs", "held_out_pairs", "steps", "loss")},
        "replayed": read_json(drawn)["summary"]["replayed"] if drawn.is_file() else 0,
        "saturated": logged[-1].get("rewards/saturated") if logged else None,
    }
