"""Stage `rollout`: the regret of each unit of a response, from continuations by its writer and by the reference."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from regretless.core.continuations import packed
from regretless.core.errors import ConfigError, DataError
from regretless.core.intervals import Interval
from regretless.core.regret_values import (
    Counts,
    Ends,
    Posterior,
    estimated_best_value,
    rate_interval,
    split,
    waste_error,
    writer_value,
)
from regretless.core.settings import Section, Seed
from regretless.data.columns import Response, Verdict
from regretless.data.regret_table import REGRET
from regretless.data.rejected_rows import Refusal, check_some_left, report_refusals
from regretless.data.responses import read_responses
from regretless.data.rows import read_rows, write_parquet, write_records
from regretless.data.schema import Unusable
from regretless.labeling.verify import VerifyConfig
from regretless.modeling.load import ModelConfig, tokenizer_fingerprint
from regretless.rollouts.contexts import At, Context, Measured, checked_ends, step_ends, unit_characters, unit_ends
from regretless.rollouts.continuations import (
    DRAWN,
    REFERENCE,
    WHOLE,
    Continued,
    Policy,
    Round,
    draw,
    label,
    reference_beside,
    writer_of,
)
from regretless.sampling.engine_settings import USUAL_BATCH, BatchSize, SamplingParams, SamplingServer, VllmOptions
from regretless.sampling.engines import ENGINES, check_engine_settings

Fraction = Annotated[float, Field(gt=0, lt=1)]
Alpha = Annotated[float, Field(gt=0, le=100)]
RESPONSES = "responses.parquet"
FIFTHS = [0.2, 0.4, 0.6, 0.8]


class RolloutConfig(Section):
    """How the regret of responses is measured."""

    k: int = Field(default=16, ge=2)
    """Continuations of each context by each policy."""
    most: int | None = Field(default=None, ge=2)
    """Continuations of a context where `k` leave open on which side of 0 a unit's regret is (at the first of `alphas`);
    by default `k` everywhere."""
    positions: list[Fraction] = Field(default=FIFTHS, min_length=1)
    """Where the units of a response end, as fractions of its tokens; the last ends with the response."""
    at: At = "lines"
    """What ends there: the `lines` whose ends are nearest to the positions, or the `tokens`. With `steps` the positions
    are not used: a unit is each step that a response says it has (`step_ends`)."""
    column: str | None = None
    """Column of the responses with the ends of units (rising numbers of tokens), instead of positions."""
    alphas: list[Alpha] = Field(default=[1.0, 0.1, 0.01], min_length=1)
    """The paper's α, which objectives call beta: the weight of the divergence from the reference. Values are reported
    for each; the first is that of the columns for pairs."""
    max_tokens: int = Field(default=2048, ge=1)
    """Most tokens of a response, those before a continuation included. One that reaches it counts as wrong."""
    max_correct: int | None = Field(default=None, ge=0)
    """Most correct responses to measure for each prompt, the first of the file; all by default."""
    max_wrong: int | None = Field(default=None, ge=0)
    """Most wrong responses to measure for each prompt, the first of the file; all by default."""
    keep_continuations: bool = False
    """Whether responses get the continuations that their writer drew behind their units (`continuations`), which
    `estimator: rollouts` of repo trains on: 8 bytes for each token of them, in responses and pairs."""
    writers: list[ModelConfig] = Field(default=[])
    """Models that wrote the responses; by default those of `sample`, else the model. Each continues its own responses,
    drawn as they were."""
    engine: str = "transformers"
    """Software that runs the models, as in `sample`."""
    server: SamplingServer | None = None
    """Server to ask, for an engine that uses one."""
    vllm: VllmOptions | None = None
    """Settings of vLLM, for the engine `vllm`."""
    batch_size: BatchSize = USUAL_BATCH
    """Number of continuations generated at the same time, or the memory for them, as in `sample`."""
    seed: Seed = 0
    """Random seed of the continuations."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        ENGINES.check(self.engine)
        check_engine_settings(self.engine, {"server": self.server}, self.vllm)
        if self.most is not None and self.most < self.k:
            raise ValueError(f"most: expected k={self.k} or more, got {self.most}")
        if sorted(set(self.positions)) != self.positions:
            raise ValueError(f"positions: expected rising fractions, got {self.positions}")
        if len(set(self.alphas)) < len(self.alphas):
            raise ValueError(f"alphas: expected different numbers, got {self.alphas}")
        return self

    def sampling(self) -> SamplingParams:
        """The settings of sampling that all policies share."""
        names = ("engine", "server", "vllm", "batch_size", "seed")
        return SamplingParams(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Subject:
    """A response to measure, the policy that wrote it, and the reference beside that."""

    measured: Measured
    writer: Policy
    reference: Policy

    @property
    def is_on_policy(self) -> bool:
        """True if the reference wrote it: one set of continuations then serves both."""
        return self.writer == self.reference

    def continued(self) -> Iterator[tuple[Policy, Context]]:
        """Every context, by each policy that continues it."""
        policies = [self.reference] if self.is_on_policy else [self.reference, self.writer]
        return itertools.product(policies, self.measured.contexts)


def run(
    config: RolloutConfig, responses: Path, model: ModelConfig, verifier: VerifyConfig, output: Path
) -> dict[str, Any]:
    """Measure the regret of responses with verdicts; returns counts and a table of means.

    model: the reference π_ref. Written into the folder `output`: regret.parquet (a row for each response, unit and α:
    docs/rollouts.md), responses.parquet (the responses, with what `pair` reads of their regret), the continuations of
    each policy, and refused.jsonl. An interrupted run resumes, in the middle of a policy's continuations too.
    Raises DataError if no response is usable, ConfigError for models or engines that are not.
    """
    rows, subjects, refused = subjects_of(config, responses, model)
    report_refusals(refused, output / "refused.jsonl")
    check_some_left(subjects, refused, responses)
    if any(not one.is_on_policy for one in subjects):
        _check_local(config)
    tokenizer = _tokenizer(config, model)
    rounds = _rounds(config, subjects, model, output, config.k, "", lambda _: True)
    draw(rounds, config.max_tokens)

    def labeled(one: Round) -> dict[Context, Continued]:
        return label(one, config.max_tokens, verifier, tokenizer, keep=config.keep_continuations)

    found = {one.policy.key: labeled(one) for one in rounds}
    measures = Measures(config, found)
    if config.most is not None and config.most > config.k:
        open_contexts = {context for subject in subjects for context in measures.open_contexts(subject)}
        more = _rounds(config, subjects, model, output, config.most, "-more", open_contexts.__contains__)
        draw(more, config.max_tokens, rounds)
        for one in more:
            found[one.policy.key] |= labeled(one)
        rounds += more
        measures = Measures(config, found)
    kept = [subject for subject in subjects if measures.has_all(subject)]
    if not kept:
        raise DataError(f"{responses}: no continuation of any context has a verdict; choose another verifier")
    table = [row for subject in kept for row in measures.rows(subject)]
    write_parquet(output / REGRET, pa.Table.from_pylist(table))
    columns = {
        one.measured.response.response_id: measures.columns(one)
        | (measures.continuations(one) if config.keep_continuations else {})
        | {"unit_characters": unit_characters(one.measured, tokenizer)}
        for one in kept
    }
    write_records(output / RESPONSES, [dataclasses.replace(row, **columns.get(row.response_id, {})) for row in rows])
    for one in rounds:
        for name in (DRAWN, WHOLE):
            (one.folder / name).unlink(missing_ok=True)
    unmeasured = len(subjects) - len(kept)
    return _summary(table, found, len(refused)) | ({"without_verdicts": unmeasured} if unmeasured else {})


def subjects_of(
    config: RolloutConfig, responses: Path, model: ModelConfig
) -> tuple[list[Response], list[Subject], list[Refusal]]:
    """All responses of a file, those to measure, and the rows that cannot be used."""
    rows, refused = read_responses(responses)
    tokenizer = _tokenizer(config, model)
    vocabulary = tokenizer_fingerprint(tokenizer)
    given = _column(config.column, responses)
    seen: Counter[tuple[str, Verdict]] = Counter()
    most = {Verdict.CORRECT: config.max_correct, Verdict.WRONG: config.max_wrong}
    subjects = []
    for row in rows:
        try:
            outcome = _outcome(row, config.max_tokens)
            limit = most[outcome]
            if limit is not None and seen[row.prompt_id, outcome] >= limit:
                continue
            if row.tokenizer not in (None, vocabulary):
                raise Unusable(f"tokenizer: another one than {model.label}'s, which has to continue the same tokens")
            writer = writer_of(row, config.writers or [model], config.sampling())
            if isinstance(writer, str):
                raise Unusable(writer)
            ids = row.token_ids or []
            if config.column is not None:
                ends = checked_ends(given.get(row.origin), len(ids), config.column)
            elif config.at == "steps":
                ends = step_ends(row, tokenizer)
            else:
                ends = unit_ends(ids, config.positions, config.at, tokenizer)
        except Unusable as reason:
            refused.append(Refusal.at(row.origin, str(reason), {"response_id": row.response_id}))
            continue
        seen[row.prompt_id, outcome] += 1
        measured = Measured(row, float(outcome is Verdict.CORRECT), tuple(ends))
        subjects.append(Subject(measured, writer, reference_beside(writer, model)))
    return rows, subjects, sorted(refused, key=lambda refusal: refusal.line)


def contexts_to_continue(subjects: Iterable[Subject]) -> int:
    """Contexts that are continued, counted once for each policy that does so."""
    return len({(policy.key, context) for subject in subjects for policy, context in subject.continued()})


def _outcome(row: Response, most_tokens: int) -> Verdict:
    """The verdict of a response that can be measured. Raises Unusable."""
    if not row.token_ids or not row.prompt_token_ids:
        raise Unusable("token_ids, prompt_token_ids: missing or empty; sample with an engine that records them")
    if row.answer is None:
        raise Unusable("answer: missing, so that no continuation can be verified")
    length = len(row.token_ids)
    if length > most_tokens:
        raise Unusable(
            f"{length} tokens, and its continuations end at max_tokens={most_tokens}; raise rollout.max_tokens"
        )
    if row.finish_reason == "length":
        if length < most_tokens:
            raise Unusable(f"cut at {length} tokens, below max_tokens={most_tokens}: its return is unknown")
        return Verdict.WRONG
    if row.verdict not in (Verdict.CORRECT, Verdict.WRONG):
        raise Unusable("verdict: expected correct or wrong, got " + (row.verdict or "none: run verify first"))
    return row.verdict


def _column(name: str | None, responses: Path) -> dict[str | None, Any]:
    """Values of a column of a file, by the origin of their row."""
    if name is None:
        return {}
    rows = [(number, row) for number, row in read_rows(responses) if isinstance(row, dict)]
    if not any(name in row for _, row in rows):
        raise DataError(f"{responses}: no column {name}; set rollout.column to one of the file, or leave it out")
    return {f"{responses}:{number}": row.get(name) for number, row in rows}


def _tokenizer(config: RolloutConfig, model: ModelConfig) -> Any:
    tokenizer = ENGINES.find(config.engine).tokenizer(model)
    if tokenizer is None:
        raise ConfigError(f"model {model.label}: its tokenizer is needed to continue responses; set model.tokenizer")
    return tokenizer


def _check_local(config: RolloutConfig) -> None:
    """Raises ConfigError for a writer that is not the reference, and runs on a server."""
    if ENGINES.find(config.engine).takes_server:
        raise ConfigError(
            f"rollout: with the engine {config.engine}, responses of another policy than the reference, drawn at "
            "temperature 1 without top_k, top_p and repetition_penalty, have a KL-to-go that needs both models here; "
            "use the engine transformers or vllm, or sample the responses from the reference"
        )


def _rounds(
    config: RolloutConfig,
    subjects: Iterable[Subject],
    model: ModelConfig,
    output: Path,
    k: int,
    suffix: str,
    takes: Callable[[Context], bool],
) -> list[Round]:
    """The work of each policy, over the contexts of its subjects that are taken."""
    contexts: dict[str, dict[Context, Any]] = defaultdict(dict)
    policies: dict[str, tuple[Policy, ModelConfig | None]] = {}
    for subject in subjects:
        rows = {context: row for context, row in subject.measured.prompts() if takes(context)}
        both = [(subject.reference, None), *([] if subject.is_on_policy else [(subject.writer, model)])]
        for policy, reference in both:
            policies[policy.key] = policy, reference
            contexts[policy.key] |= rows
    names = {key: _name(number, reference) for number, (key, (_, reference)) in enumerate(policies.items())}
    return [
        Round(policies[key][0], policies[key][1], rows, k, config.seed, output / f"{names[key]}{suffix}")
        for key, rows in contexts.items()
        if rows
    ]


def _name(number: int, reference: ModelConfig | None) -> str:
    return f"{REFERENCE if reference is None else 'writer'}-{number}"


class Measures:
    """Values of contexts, and regret of responses, from the continuations of all policies."""

    def __init__(self, config: RolloutConfig, found: Mapping[str, Mapping[Context, Continued]]) -> None:
        self.config, self.found = config, found
        self._posteriors: dict[tuple[str, Context], Posterior] = {}

    def has_all(self, subject: Subject) -> bool:
        """True if every context of a response has continuations with a verdict, by both policies."""
        found = (self._continued(policy, context) for policy, context in subject.continued())
        return all(one.counts(half) for one in found for half in (0, 1))

    def _continued(self, policy: Policy, context: Context) -> Continued:
        return self.found[policy.key][context]

    def _counts(self, policy: Policy, context: Context, half: int | None = None) -> Counts:
        counts = self._continued(policy, context).counts(half)
        assert counts is not None  # has_all
        return counts

    def _posterior(self, policy: Policy, context: Context) -> Posterior:
        key = policy.key, context
        if key not in self._posteriors:
            rng = np.random.default_rng(policy.seed(self.config.seed, context.name))
            self._posteriors[key] = Posterior(self._counts(policy, context), rng)
        return self._posteriors[key]

    def values(self, subject: Subject, alpha: float, half: int | None = None) -> tuple[list[float], list[float]]:
        """V* and V^μ of a response's contexts (T + 1,), the last being its return; from one half of the counts."""
        best, writer = [], []
        for context in subject.measured.contexts:
            theirs = self._counts(subject.writer, context, half)
            best.append(estimated_best_value(self._counts(subject.reference, context, half), alpha))
            writer.append(float(writer_value(theirs.rate, theirs.divergence, alpha)))
        outcome = subject.measured.outcome
        return [*best, outcome], [*writer, outcome]

    def draws(self, subject: Subject, alpha: float) -> tuple[list[Ends], list[Ends]]:
        """Posterior draws of the same values."""
        contexts, outcome = subject.measured.contexts, np.full(1, subject.measured.outcome)
        end = Ends(outcome, outcome)
        best = [self._posterior(subject.reference, context).best(alpha) for context in contexts]
        writer = [self._posterior(subject.writer, context).writer(alpha) for context in contexts]
        return [*best, end], [*writer, end]

    def open_contexts(self, subject: Subject) -> Iterator[Context]:
        """Contexts around the units whose regret may be on either side of 0."""
        if not self.has_all(subject):
            return
        best, writer = self.draws(subject, self.config.alphas[0])
        contexts = subject.measured.contexts
        for unit in range(len(contexts)):
            low, high = best[unit].minus(writer[unit + 1]).interval()
            if low <= 0 <= high:
                yield from contexts[unit : unit + 2]

    def rows(self, subject: Subject) -> Iterator[dict[str, Any]]:
        """Rows of regret.parquet: one for each unit and α."""
        measured = subject.measured
        response = measured.response
        starts = (0, *measured.ends[:-1])
        for alpha in self.config.alphas:
            best, writer = self.values(subject, alpha)
            best_draws, writer_draws = self.draws(subject, alpha)
            parts = split(best, writer)
            for unit, (start, end) in enumerate(zip(starts, measured.ends, strict=True)):
                context = measured.contexts[unit]
                before, behind = best_draws[unit], unit + 1
                values = {
                    "v_star": (best[unit], before.interval()),
                    "v_mu": (writer[unit], writer_draws[unit].interval()),
                    "q": (writer[behind], writer_draws[behind].interval()),
                    "regret": (parts.regret[unit], before.minus(writer_draws[behind]).interval()),
                    "local": (parts.local[unit], before.minus(best_draws[behind]).interval()),
                    "future": (parts.future[unit], best_draws[behind].minus(writer_draws[behind]).interval()),
                }
                row = {
                    "prompt_id": response.prompt_id,
                    "response_id": response.response_id,
                    "model": response.model,
                    "context": context.name,
                    "outcome": measured.outcome,
                    "units": len(measured.ends),
                    "unit": unit,
                    "start": start,
                    "end": end,
                    "alpha": alpha,
                }
                for name, policy in (("ref", subject.reference), ("mu", subject.writer)):
                    row |= self._counted(name, policy, context)
                for name, (value, interval) in values.items():
                    row |= _with_ends(name, float(value), interval)
                yield row

    def _counted(self, name: str, policy: Policy, context: Context) -> dict[str, Any]:
        """What a policy's continuations of a context came to, as columns."""
        continued, counts = self._continued(policy, context), self._counts(policy, context)
        row: dict[str, Any] = {f"n_{name}": counts.n, f"right_{name}": counts.right}
        row |= {f"cut_{name}": continued.cut, f"unknown_{name}": continued.unknown}
        row |= _with_ends(f"p_{name}", counts.rate, rate_interval(counts))
        if name == "mu":
            row |= {"kl_to_go": counts.divergence, "kl_to_go_error": counts.divergence_error}
        return row

    def columns(self, subject: Subject) -> dict[str, Any]:
        """What `responses.parquet` has of a response: `Response.regret` and its neighbors."""
        alpha, contexts = self.config.alphas[0], subject.measured.contexts
        best, writer = self.values(subject, alpha)
        q_errors = [float(self._posterior(subject.writer, one).writer_values(alpha).std()) for one in contexts[1:]]
        errors = [
            waste_error(self._posterior(subject.reference, one), self._posterior(subject.writer, one), alpha)
            for one in contexts[1:]
        ]
        of_halves = [self.values(subject, alpha, half) for half in (0, 1)]
        halves = [split(*values) for values in of_halves]
        outcome = subject.measured.outcome
        counts = [self._counts(subject.writer, context) for context in contexts]
        return {
            "regret": float(split(best, writer).regret.sum()),
            "regret_error": math.hypot(*errors),
            "regret_halves": [one.waste - outcome for one in halves],
            "unit_ends": list(subject.measured.ends),
            "unit_q_halves": [writer[1:] for _, writer in of_halves],
            "unit_q_error": [*q_errors, 0.0],
            "unit_right": [one.right for one in counts],
            "unit_continuations": [one.n for one in counts],
        }

    def continuations(self, subject: Subject) -> dict[str, Any]:
        """`Response.continuations`: the writer's, from each context that a unit ends in, s_1 to s_{T−1}.

        Raises DataError for a response with other log-probabilities than those of its continuations.
        """
        response, contexts = subject.measured.response, subject.measured.contexts[1:]
        drawn = [self._continued(subject.writer, context) for context in contexts]
        if kinds := {one.logps_kind for one in drawn} - {response.logps_kind}:
            raise DataError(
                f"{response.origin}: its log-probabilities are {response.logps_kind}, and those of its continuations "
                f"{kinds.pop()}; measure with the engine and the logprobs_mode that sampled it, or leave "
                "rollout.keep_continuations out"
            )
        return {"continuations": packed(path for one in drawn for path in one.paths)}


def _with_ends(name: str, value: float, interval: Interval) -> dict[str, float]:
    return {name: value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _summary(
    table: Sequence[Mapping[str, Any]], found: Mapping[str, Mapping[Context, Continued]], refused: int
) -> dict[str, Any]:
    """Counts, and means over responses of their sums, by α and outcome."""
    continued = [one for of_policy in found.values() for one in of_policy.values()]
    sums: dict[tuple[float, float], dict[str, list[float]]] = {}
    for row in table:
        total = sums.setdefault((row["alpha"], row["outcome"]), {}).setdefault(row["response_id"], [0.0, 0.0])
        total[0] += row["regret"]
        total[1] += row["future"]
    means = {
        f"alpha {alpha:g}, {'right' if outcome else 'wrong'} responses": {
            "regret": fmean(regret for regret, _ in of_kind.values()),
            "G": fmean(waste for _, waste in of_kind.values()),
        }
        for (alpha, outcome), of_kind in sorted(sums.items(), reverse=True)
    }
    units = {row["response_id"]: row["units"] for row in table}
    return {
        "responses": len(units),
        "units": sum(units.values()),
        "contexts": len({context for of_policy in found.values() for context in of_policy}),
        "continuations": sum(len(one.right) + one.unknown for one in continued),
        "tokens": sum(one.tokens for one in continued),
        "cut": sum(one.cut for one in continued),
        "unknown": sum(one.unknown for one in continued),
        "means": means,
        "refused": refused,
    }
