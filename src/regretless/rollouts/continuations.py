"""Continuations of contexts by a policy: drawn and verified like responses, and counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from regretless.core.continuations import Continuation
from regretless.core.errors import ConfigError
from regretless.core.files import atomic_path, fingerprint, read_json, write_json
from regretless.core.progress import bar
from regretless.core.regret_values import Counts
from regretless.data.columns import LogpsKind, Response, Verdict
from regretless.data.prompts import PromptRow
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.labeling import verify
from regretless.labeling.verify import VerifyConfig
from regretless.modeling.load import ModelConfig
from regretless.rollouts.contexts import Context
from regretless.rollouts.path_divergence import path_divergences
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.job import SampleWork
from regretless.sampling.sample import sample_together

REFERENCE = "reference"
DRAWING = ("temperature", "top_p", "top_k", "repetition_penalty", "stop")
"""Settings of sampling that say which policy a model is."""
DRAWN, WHOLE, VERIFIED, DIVERGENCES = "drawn.parquet", "whole.parquet", "responses.parquet", "divergences.json"
"""Files of a round: continuations as sampled, behind their contexts, with verdicts; and their KL(μ ‖ π_ref)."""


@dataclass(frozen=True)
class Policy:
    """A policy that continues: a model, and how it is sampled from."""

    model: ModelConfig
    params: SamplingParams

    @property
    def key(self) -> str:
        """Its identity among the policies of a run."""
        return fingerprint([self.model.model_dump(), self.params.model_dump()])

    def seed(self, *of: Any) -> int:
        """A random seed that differs by policy: by the last part of its model's name, since a run folder may move."""
        drawing = self.params.model_dump(include=set(DRAWING))
        return int(fingerprint([*of, self.model.label.rpartition("/")[2], drawing])[:8], 16)


@dataclass(frozen=True)
class Continued:
    """What a policy's continuations of one context came to, in the order of their numbers."""

    right: tuple[bool, ...]
    """Whether each is right. One without a verdict is left out."""
    divergences: tuple[float, ...]
    """Exact KL(μ ‖ π_ref) of each, nats, summed over its tokens; empty for the reference."""
    cut: int
    """Continuations that reached the limit of tokens: they count as wrong."""
    unknown: int
    """Continuations without a verdict."""
    tokens: int
    """Of all of them, up to the limit."""
    paths: tuple[Continuation, ...] = ()
    """All of them, where they are kept; those without a verdict, too."""
    logps_kind: LogpsKind | None = None
    """Distribution that the log-probabilities of `paths` belong to."""

    def counts(self, half: int | None = None) -> Counts | None:
        """Counts of all, or of every second one (half 0 or 1); None if there are none."""
        rows = slice(None) if half is None else slice(half, None, 2)
        right, divergences = self.right[rows], self.divergences[rows]
        if not right:
            return None
        if not divergences:
            return Counts(sum(right), len(right))
        error = float(np.std(divergences, ddof=1) / np.sqrt(len(divergences))) if len(divergences) > 1 else np.nan
        return Counts(sum(right), len(right), float(np.mean(divergences)), error)


@dataclass(frozen=True)
class Round:
    """Work of one policy: `k` continuations of each context, in a folder of its own. Each file resumes by itself."""

    policy: Policy
    reference: ModelConfig | None
    """The model of π_ref, for the writer's KL-to-go; None for the reference itself."""
    contexts: Mapping[Context, PromptRow]
    k: int
    seed: int
    folder: Path

    def work(self, most_tokens: int) -> SampleWork:
        """Its sampling, from a seed of the policy's own, so that two policies draw independently."""
        changes = {"n": self.k, "seed": self.policy.seed(self.seed), "max_new_tokens": most_tokens}
        params = self.policy.params.model_copy(update=changes)
        return SampleWork([self.policy.model], list(self.contexts.values()), params, self.folder / DRAWN)


def draw(rounds: Sequence[Round], most_tokens: int, earlier: Sequence[Round] = ()) -> None:
    """Sample the continuations of several rounds; a model is loaded once. Those of earlier rounds are kept.

    Raises ConfigError for models that cannot be used, DataError for contexts that cannot.
    """
    missing = [new for new in rounds if not (new.folder / VERIFIED).is_file()]
    for new in missing:
        new.folder.mkdir(parents=True, exist_ok=True)
        for old in earlier:
            # Sampling finds there what it has to draw no more.
            if old.policy == new.policy and not (new.folder / DRAWN).exists():
                with atomic_path(new.folder / DRAWN) as temporary:
                    shutil.copyfile(old.folder / DRAWN, temporary)
    if missing:
        sample_together([new.work(most_tokens) for new in missing])


def label(
    new: Round, most_tokens: int, verifier: VerifyConfig, tokenizer: PreTrainedTokenizerBase, *, keep: bool = False
) -> dict[Context, Continued]:
    """Verify the continuations of a round, and measure their KL(μ ‖ π_ref); by context, with their tokens to `keep`.

    Raises ConfigError for continuations to keep that have no log-probabilities.
    """
    of_name = {context.name: context for context in new.contexts}
    if not (new.folder / VERIFIED).is_file():
        drawn, _ = read_responses(new.folder / DRAWN)
        write_records(
            new.folder / WHOLE, [_whole(row, of_name[row.prompt_id], most_tokens, tokenizer) for row in drawn]
        )
        verify.run(verifier.model_copy(update={"grade_cut": False}), new.folder / WHOLE, new.folder)
    rows, refused = read_responses(new.folder / VERIFIED)
    if refused:
        raise ConfigError(f"{new.folder / VERIFIED}: {refused[0]}; delete the folder, and it is made again")
    divergences = _divergences(new, rows)
    grouped: dict[Context, list[tuple[Response, float | None]]] = {context: [] for context in new.contexts}
    for row, divergence in zip(rows, divergences, strict=True):
        grouped[of_name[row.prompt_id]].append((row, divergence))
    counted = {context: _continued(of_context) for context, of_context in grouped.items()}
    if not keep:
        return counted
    return {context: replace(one, **_kept(context, grouped[context])) for context, one in counted.items()}


def _kept(context: Context, rows: Iterable[tuple[Response, float | None]]) -> dict[str, Any]:
    """`Continued.paths` of a context, and the kind of their log-probabilities."""
    paths, kind = [], None
    for row, _ in rows:
        if row.logps is None or row.token_ids is None:
            raise ConfigError(
                f"rollout.keep_continuations: the engine {row.engine} gives no log-probabilities of what it continues, "
                "which training on them needs; use one that does, or leave it out"
            )
        ids, logps, kind = np.array(row.token_ids, np.int32), np.array(row.logps, np.float32), row.logps_kind
        paths.append(Continuation(len(context.written), ids, logps))
    return {"paths": tuple(paths), "logps_kind": kind}


def _whole(row: Response, context: Context, most_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Response:
    """A continuation with the text of its whole response, cut where that reaches the limit of tokens."""
    ids = row.token_ids
    if ids is None:
        raise ConfigError(
            f"engine {row.engine}: returned a continuation without token ids, so that its length is unknown; the "
            "engine, or the server, has to return them"
        )
    room = most_tokens - len(context.written)
    if len(ids) > room or (len(ids) == room and row.finish_reason == "length"):
        row = replace(
            row,
            finish_reason="length",
            token_ids=ids[:room],
            logps=row.logps and row.logps[:room],
            sampled_logps=row.sampled_logps and row.sampled_logps[:room],
            token_numbers=None,
        )
    beginning = tokenizer.decode(context.written, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    text = beginning + row.response
    if row.finish_reason != "stop_string":  # which ends a text within a token
        whole = [*context.written, *(row.token_ids or [])]
        text = tokenizer.decode(whole, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return replace(row, response=text, token_bytes=None)


def _divergences(new: Round, rows: Sequence[Response]) -> Sequence[float | None]:
    if new.reference is None:
        return [None] * len(rows)
    file = new.folder / DIVERGENCES
    if not file.is_file():
        paths = [(row.prompt_token_ids or [], row.token_ids or []) for row in rows]
        with bar("rollout: KL", len(paths)) as advance:
            found = path_divergences(new.policy.model, new.reference, new.policy.params, paths, advance)
        write_json(file, found)
    values: list[float] = read_json(file)
    return values


def _continued(rows: Iterable[tuple[Response, float | None]]) -> Continued:
    right, divergences = [], []
    cut = unknown = tokens = 0
    for row, divergence in rows:
        is_cut = row.finish_reason == "length"
        cut += is_cut
        tokens += len(row.token_ids or ())
        if not is_cut and row.verdict not in (Verdict.CORRECT, Verdict.WRONG):
            unknown += 1
            continue
        right.append(row.verdict is Verdict.CORRECT)
        if divergence is not None:
            divergences.append(divergence)
    return Continued(tuple(right), tuple(divergences), cut, unknown, tokens)


def writer_of(response: Response, writers: Sequence[ModelConfig], common: SamplingParams) -> Policy | str:
    """The policy that wrote a response, or why it cannot continue. common: engine, server and size of batches."""
    by_name = {model.label: model for model in writers}
    by_name |= {name: model for model in writers if (name := model.label.rpartition("/")[2]) not in by_name}
    name = response.model or ""
    model = by_name.get(name) or by_name.get(name.rpartition("/")[2])
    if model is None:
        return f"model: no writer has the name {response.model!r}; name it in writers, which has {', '.join(by_name)}"
    if response.sampling is None:
        return "sampling: how the response was drawn is unknown, so its writer cannot continue it"
    try:
        given = json.loads(response.sampling)
        if given["temperature"] == 0:
            return "sampling: temperature 0: all continuations of a greedy writer are the same"
        params = SamplingParams.parse({**common.model_dump(), **{name: given[name] for name in DRAWING}}, "sampling")
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        return f"sampling: expected the settings that sample stores, got {response.sampling:.60} ({error!r:.80})"
    return Policy(model, params)


def reference_beside(writer: Policy, model: ModelConfig) -> Policy:
    """π_ref, drawn from its own distribution; texts end it where they end the writer."""
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    return Policy(model, writer.params.model_copy(update=plain))
