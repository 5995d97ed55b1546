"""The pair stage: preference pairs from responses with verdicts or scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator
from scipy import stats

from regretless.core.errors import ConfigError, DataError, error_place
from regretless.core.settings import Section, Seed
from regretless.data.columns import (
    CARRIED,
    LogpsKind,
    Pair,
    Response,
    Side,
    Text,
    Verdict,
    several_tokenizers,
)
from regretless.data.contamination import Benchmarks
from regretless.data.rejected_rows import Refusal, check_some_left, report_refusals
from regretless.data.responses import read_responses, split_ambiguous
from regretless.data.rows import write_records
from regretless.data.schema import logps_problem
from regretless.labeling.pairing_rules import RULES, SMALL_MARGIN, UNCONFIRMED, Limits, Step, Unit
from regretless.modeling.load import ModelConfig


class PairConfig(Section):
    """Settings of the pair stage."""

    rule: Annotated[str, AfterValidator(RULES.check)] = "correct_vs_wrong"
    """How responses are paired. `correct_vs_wrong` pairs random correct with random wrong responses (the paper, math).
    `best_vs_random` pairs the best score with a random lower one (the paper, judged data). `most_likely` pairs the most
    likely correct with the most likely wrong responses (the authors' released code). `above_writer` scores a response
    by how much better it is than its writer's responses to the prompt are on average (an advantage, not a regret), and
    `best_start` by how good all responses with the same first line are on average; both pair random responses with
    different scores. So do `rloo` and `grpo`, by the score or verdict relative to the other responses to the prompt:
    minus their mean, or standardized. `regret` pairs units behind one context by their regret, as `rollout` has
    measured it: less is better. `response_regret` does so with whole responses that have equally many units.
    `step_labels` pairs good with bad steps behind one context, as people or a model have labeled them."""
    max_correct: int = Field(default=2, ge=1)
    """Most correct responses per prompt; not used by `best_vs_random`. The paper uses 2. Rules that pair by scores use
    up to `max_correct` + `max_wrong` responses, and make up to `max_correct` × `max_wrong` pairs."""
    max_wrong: int = Field(default=2, ge=1)
    """Most wrong responses per prompt; not used by `best_vs_random`. The paper uses 2."""
    smallest_gap: float = Field(default=1.0, ge=0, le=100)
    """Least difference of two regrets, in posterior standard errors, for the rules `regret` and `response_regret`."""
    label_temperature: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    """Temperature τ of `preference_probability`, which some rules write for training with `soft_labels`. `regret` and
    `response_regret`: the mean of σ(difference of two regrets / τ) over its posterior; at 0 the probability that the
    chosen side has less regret. `rloo` and `grpo`: σ(difference of two scores / τ); at 0 every pair is certain."""
    allow_unequal: bool = False
    """Whether `response_regret` compares responses with different numbers of units. Regret grows with their number, so
    such pairs mostly rank lengths; `pair` prints the rank correlation of the two."""
    within_writer: bool = False
    """Whether both responses of a pair have the same writer (`model`). Each writer's responses to a prompt are then
    paired, and counted, like those to a prompt of their own."""
    smallest_margin: float | None = Field(default=None, ge=0)
    """Least difference of two responses' scores, where both have one; pairs with a smaller one are dropped."""
    logps: LogpsKind = "raw"
    """Log-probabilities to store in the pairs: `raw` are the behavior model's own; `sampled` are those of the
    distribution that tokens were drawn from, after temperature, top-p, top-k and penalties."""
    rescore: dict[str, ModelConfig] = Field(default={})
    """Models whose log-probabilities are stored in place of the recorded ones, by the name of the model that wrote the
    response or its last part; `*` stands for all others. For responses whose log-probabilities are missing or wrong."""
    seed: Seed = 0
    """Random seed. What is drawn for a prompt depends on the seed and the prompt's id alone."""

    @model_validator(mode="after")
    def _raw_where_rescored(self) -> Self:
        if self.rescore and self.logps != "raw":
            raise ValueError("rescore: gives a model's own log-probabilities, so `logps` must be raw")
        return self


VERIFIED = Response(
    prompt_id="verified",
    response_id="verified",
    prompt="1+1?",
    response="2",
    token_ids=[2],
    logps=[-1.0],
    logps_kind="raw",
    finish_reason="stop",
    verdict=Verdict.CORRECT,
)
"""A response as `sample` and `verify` leave it, to ask a rule about."""


def run(config: PairConfig, responses: Path, output: Path, benchmarks: Benchmarks | None = None) -> dict[str, Any]:
    """Pair the responses of a file; returns counts of prompts, responses and pairs, and of omitted rows by reason.

    benchmarks: those whose problems must not be trained on.
    Written into the folder `output`: pairs.parquet (`Pair` records, grouped by prompt, sorted by prompt id) and
    refused.jsonl. The result does not depend on the order of the rows. Raises DataError if there is no pair.
    """
    rows, refused = read_responses(responses)
    clear, ambiguous = split_ambiguous(rows)
    if benchmarks is not None:
        clear, repeated = benchmarks.without(clear)
        refused += repeated
    usable, unusable = _split_unusable(clear, config)
    refused = sorted(refused + ambiguous + unusable, key=lambda refusal: refusal.line)
    report_refusals(refused, output / "refused.jsonl")
    check_some_left(usable, refused, responses)
    pairs, counts = make_pairs(usable, config)
    prompts = {row.prompt_id for row in rows}
    if silent := len(prompts - {row.prompt_id for row in usable}):
        counts["prompts_dropped"]["no_usable_response"] = (
            counts["prompts_dropped"].get("no_usable_response", 0) + silent
        )
    summary = {"prompts": len(prompts), "responses": len(rows), "refused": len(refused), **counts}
    if not pairs:
        remedy = _remedy(rows, usable, config.rule)
        raise DataError(f"{responses}: no pairs from {len(rows)} responses: {_explain(summary)}{remedy}")
    if config.rescore:
        from regretless.labeling.rescore import rescore  # the only part that loads models

        pairs, summary["rescored"] = rescore(pairs, config.rescore)
    write_records(output / "pairs.parquet", pairs)
    return summary


def make_pairs(responses: Iterable[Response], config: PairConfig) -> tuple[list[Pair], dict[str, Any]]:
    """Pairs of responses, and counts: pairs, distinct responses in them, and omitted prompts and responses by reason.

    Raises DataError if one prompt id stands for two prompts, ConfigError if the rule raises, or returns something else
    than `Rule` says.
    """
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    doubted: Counter[str] = Counter()
    undoubted, measured, rule = 0, list[Response](), RULES.find(config.rule)
    for prompt_id, group in _groups(responses, config, left_out):
        candidates = _candidates(group, config.rule, left_out)
        if not candidates:
            dropped["no_usable_response"] += 1
            continue
        most = config.max_correct, config.max_wrong
        writer = f":{candidates[0].model}" if config.within_writer else ""
        random = Random(f"{config.seed}:{prompt_id}{writer}")
        selected = _ask(config.rule, "select", prompt_id, candidates, *most, random)
        measured += [one for one in candidates if one.regret is not None and one.unit_ends]
        if isinstance(selected, str):
            dropped[selected] += 1
            continue
        doubts = [_doubt(config, chosen, rejected) for chosen, rejected in selected]
        doubted.update(filter(None, doubts))
        if selected and all(doubts):
            dropped["doubtful"] += 1
        kept = [pair for pair, doubt in zip(selected, doubts, strict=True) if doubt is None]
        undoubted += len(kept)
        if rule.doubt is not None:
            kept = random.sample(kept, min(config.max_correct * config.max_wrong, len(kept)))
        pairs += [_pair(chosen, rejected, config) for chosen, rejected in kept]
    return pairs, {
        "pairs": len(pairs),
        **(
            {}
            if rule.doubt is None and config.smallest_margin is None
            else {"pairs_dropped": dict(sorted(doubted.items()))}
        ),
        **({} if rule.doubt is None else _confirmed(undoubted, doubted) | _with_units(measured)),
        "prompts_paired": len({pair.prompt_id for pair in pairs}),
        "distinct_responses": len({side.id for pair in pairs for side in pair.sides.values()}),
        "pairs_without_logps": sum(any(side.logps is None for side in pair.sides.values()) for pair in pairs),
        "prompts_dropped": dict(sorted(dropped.items())),
        "responses_left_out": dict(sorted(left_out.items())),
    }


def _groups(
    responses: Iterable[Response], config: PairConfig, left_out: Counter[str]
) -> Iterator[tuple[str, list[Response]]]:
    """The responses that may form pairs with each other: those to one prompt, or to one prompt by one writer."""
    for prompt_id, group in groupby(sorted(responses, key=_order), key=lambda response: response.prompt_id):
        if not config.within_writer:
            yield prompt_id, list(group)
            continue
        writers: dict[str, list[Response]] = {}
        for response in group:
            if response.model is None:
                left_out["without_writer"] += 1
            else:
                writers.setdefault(response.model, []).append(response)
        yield from ((prompt_id, of_one) for _, of_one in sorted(writers.items()))


def _doubt(config: PairConfig, chosen: Response, rejected: Response) -> str | None:
    scores = [side.score for side in (chosen, rejected) if side.score is not None]
    if config.smallest_margin is not None and len(scores) == 2 and scores[0] - scores[1] < config.smallest_margin:
        return SMALL_MARGIN
    doubt: str | None = _estimate(config, "doubt", chosen, rejected)
    return doubt


def _estimate(config: PairConfig, function: str, chosen: Response, rejected: Response) -> Any:
    """What a rule that pairs by estimates says about a pair; None if the rule is no such rule."""
    if getattr(RULES.find(config.rule), function) is None:
        return None
    limits = Limits(config.smallest_gap, config.allow_unequal, config.label_temperature)
    return _ask(config.rule, function, chosen.prompt_id, chosen, rejected, limits)


def _confirmed(kept: int, doubted: Mapping[str, int]) -> dict[str, Any]:
    """The share of pairs that data unseen by the selection confirm."""
    asked = kept + doubted.get(UNCONFIRMED, 0)
    return {"confirmed": kept / asked if asked else None}


def _with_units(measured: Sequence[Response]) -> dict[str, Any]:
    """Rank correlation of regret and number of units over responses; None where one of them does not vary."""
    regrets = [one.regret or 0.0 for one in measured]
    units = [float(len(one.unit_ends or ())) for one in measured]
    varies = len(set(regrets)) > 1 and len(set(units)) > 1
    return {"regret_rank_correlation_with_units": float(stats.spearmanr(regrets, units)[0]) if varies else None}


def _split_unusable(rows: Sequence[Response], config: PairConfig) -> tuple[list[Response], list[Refusal]]:
    """Responses that can be paired, with the log-probabilities for the pair, and the rejected rows with reasons."""
    usable: list[Response] = []
    refused: list[Refusal] = []
    for number, row in enumerate(rows, 1):
        labeled = _with_logps(row, config.logps)
        reason: str | None
        if not row.response.strip() or row.pieces == []:
            reason = "empty completion"
        elif row.finish_reason == "length":
            reason = "truncated at the token limit (finish_reason length): no end-of-sequence token"
        else:
            reason = logps_problem("logps", labeled.pieces, labeled.logps)
        if reason is None:
            usable.append(labeled)
            continue
        answer = {"response_id": row.response_id, "response": row.response}
        refused.append(Refusal.at(row.origin or f"responses:{number}", reason, answer))
    return usable, refused


def _with_logps(row: Response, kind: LogpsKind) -> Response:
    if row.logps_kind in (None, kind):
        return row
    # Continuations have log-probabilities of the kind that the response has.
    logps = row.sampled_logps if kind == "sampled" else None
    return replace(row, logps=logps, logps_kind=kind, continuations=None)


def _order(response: Response) -> tuple[str, str, str, list[int], str]:
    # Content comes before the id: ids of rows without one are derived from their line number.
    return (
        response.prompt_id,
        response.response,
        response.model or "",
        response.token_ids or [],
        response.response_id,
    )


def _ask(rule: str, function: str, prompt_id: str, *arguments: Any) -> Any:
    """What a function of a rule returns. Raises ConfigError if it raises, or returns something of another form."""
    where = f"rule {rule}: {function}, for prompt_id {prompt_id},"
    try:
        result = getattr(RULES.find(rule), function)(*arguments)
    # A plug-in may raise anything.
    except Exception as error:
        raise ConfigError(f"{where} raised {error_place(error)}; correct the rule, or choose another") from error
    fits, expected = RESULTS[function]
    if not fits(result):
        raise ConfigError(f"{where} returned {result!r:.100}; expected {expected}; correct the rule, or choose another")
    return result


def _are_responses(result: Any) -> bool:
    return isinstance(result, Sequence) and all(isinstance(response, Response) for response in result)


def _is_pair(pair: Any) -> bool:
    return _are_responses(pair) and len(pair) == 2 and pair[0].response != pair[1].response


RESULTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "compare": (_are_responses, "a list of responses"),
    "unusable": (lambda result: isinstance(result, str | None), "a text, or None for a response that can be paired"),
    "doubt": (lambda result: isinstance(result, str | None), "a text, or None for a pair that is kept"),
    "probability": (lambda result: isinstance(result, float | int) and 0 <= result <= 1, "a number from 0 to 1"),
    "select": (
        lambda result: isinstance(result, str) or (isinstance(result, Sequence) and all(map(_is_pair, result))),
        "a list of pairs (chosen, rejected) of two different responses, or a text that says why there are none",
    ),
}
"""What each function of a rule returns: whether a result is that, and in words."""


def _candidates(group: Sequence[Response], rule: str, left_out: Counter[str]) -> list[Response]:
    """Distinct responses of one prompt that a rule can use; equal texts are merged."""
    first = group[0]
    other = next((response for response in group if response.prompt != first.prompt), None)
    if other is not None:
        raise DataError(
            f"prompt id {first.prompt_id}: stands for two prompts ({first.origin} and {other.origin}); "
            "every prompt needs its own id"
        )
    candidates: list[Response] = []
    compared = _ask(rule, "compare", first.prompt_id, group)
    for _, equal in groupby(compared, key=lambda response: response.response):
        same = list(equal)
        response = _merged(same)
        reason = _ask(rule, "unusable", first.prompt_id, response)
        if reason is None:
            candidates.append(response)
        left_out.update(["duplicate"] * (len(same) - 1) + ([reason] if reason else []))
    return candidates


def _merged(same: Sequence[Response]) -> Response:
    """One response for equal texts: the verdict if all agree, and the mean of their scores."""
    verdicts = {response.verdict for response in same if response.verdict not in (None, Verdict.UNKNOWN)}
    unverified = all(response.verdict is None for response in same)
    scores = [response.score for response in same if response.score is not None]
    return replace(
        next((response for response in same if response.logps is not None), same[0]),
        # A text with two different verdicts is undecided; one that was never verified has none.
        verdict=verdicts.pop() if len(verdicts) == 1 else None if unverified else Verdict.UNKNOWN,
        score=fmean(scores) if scores else None,
    )


def _pair(chosen: Response, rejected: Response, config: PairConfig) -> Pair:
    comparable = chosen.tokenizer == rejected.tokenizer
    same_prompt_ids = comparable and chosen.prompt_token_ids == rejected.prompt_token_ids
    has_logps = chosen.logps is not None or rejected.logps is not None
    return Pair(
        prompt=chosen.prompt,
        chosen=_side(chosen),
        rejected=_side(rejected),
        pair_id=f"{chosen.response_id}>{rejected.response_id}",
        prompt_id=chosen.prompt_id,
        prompt_token_ids=chosen.prompt_token_ids if same_prompt_ids else None,
        logps_kind=config.logps if has_logps else None,
        prefix_tokens=(chosen.prefix_tokens or None) if comparable and isinstance(chosen, Unit) else None,
        preference_probability=_estimate(config, "probability", chosen, rejected),
        tokenizer=chosen.tokenizer if comparable else several_tokenizers(chosen.tokenizer, rejected.tokenizer),
    )


def _side(response: Response) -> Side:
    cut_at = response.cut_at if isinstance(response, Unit) else None
    complete = None if response.finish_reason is None else True
    if cut_at is not None or isinstance(response, Step):
        complete = False
    return Side(
        text=_completion(response),
        id=response.response_id,
        complete=complete,
        cut_at=cut_at,
        stopped=True if response.finish_reason == "stop_string" and cut_at is None else None,
        **{name: getattr(response, name) for name in CARRIED},
    )


def _completion(response: Response) -> Text:
    """A string after a string, messages after messages, as TRL and others expect in a pair."""
    if isinstance(response.prompt, str):
        return response.response
    return [{"role": "assistant", "content": response.response}]


def _explain(summary: dict[str, Any]) -> str:
    reasons = {**summary["prompts_dropped"], **summary["responses_left_out"], "rejected rows": summary["refused"]}
    return ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count) or "no responses"


def pairs_verdicts(rule: str) -> bool:
    """True if a rule can pair responses that have verdicts and no scores. Raises ConfigError if the rule raises."""
    return bool(_candidates([VERIFIED], rule, Counter()))


def _can_use(rule: str, row: Response) -> bool:
    try:
        return bool(_candidates([row], rule, Counter()))
    except ConfigError:  # a plug-in's rule that nobody chose
        return False


def _remedy(rows: Sequence[Response], usable: Sequence[Response], rule: str) -> str:
    """What helps against having no pairs, to follow their reasons; empty if nothing is known to."""
    if all(row.verdict is None and row.score is None and row.step_labels is None for row in rows):
        return "; no response has a verdict or a score: run verify or judge first"
    rules, _ = RULES.usable()
    can_use = [name for name in rules if any(_can_use(name, row) for row in usable)]
    if rule in can_use or not can_use:
        return ""
    kinds = {
        "verdicts": any(row.verdict in (Verdict.CORRECT, Verdict.WRONG) for row in usable),
        "scores": any(row.score is not None for row in usable),
        "labels of steps": any(row.step_labels is not None for row in usable),
    }
    has = " and ".join(kind for kind, present in kinds.items() if present) or "neither verdicts nor scores"
    return f"; {rule} uses none of these responses, which have {has}: set rule to one of {', '.join(can_use)}"
