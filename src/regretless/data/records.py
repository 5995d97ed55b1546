"""The rows that stages exchange: responses, and pairs with their sides."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, Literal

from regretless.core.files import fingerprint

Message = dict[str, Any]
"""One message: the texts `role` and `content`, and, where it has them, `tool_calls` (each a function with its name and
arguments), `tool_call_id`, `name` and `reasoning_content`, as in transformers."""
Text = str | list[Message]
"""A plain text, or a conversation: messages. A response of several messages has tool outputs, or questions, between
those of the assistant."""


class Verdict(StrEnum):
    """A verifier's decision; unknown is counted and never paired."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNKNOWN = "unknown"


SideName = Literal["chosen", "rejected"]
SIDES: tuple[SideName, SideName] = ("chosen", "rejected")
PER_TOKEN = ("token_ids", "tokens", "logps", "token_numbers")
"""Fields of a response, and of a side, with one value for each token."""
FinishReason = Literal["stop", "length", "stop_string"]
"""Why a response ended: the model's end token, the limit of tokens, or a text that the settings of sampling name."""
LogpsKind = Literal["raw", "sampled"]


@dataclass(frozen=True, kw_only=True)
class Response:
    """One sampled answer with the token log-probabilities of the model that generated it."""

    prompt_id: str
    response_id: str
    prompt: Text
    prompt_token_ids: list[int] | None = None
    response: str
    token_ids: list[int] | None = None
    """Generated tokens, the end-of-sequence token included when it was generated."""
    tokens: list[str] | None = None
    """Token strings, if a server returns no ids for its log-probabilities."""
    logps: list[float] | None = None
    """Log-probability of each token id (nats) under the behavior model; `logps_kind` says which distribution."""
    logps_kind: LogpsKind | None = None
    """`raw`: the model's own distribution; `sampled`: after temperature, top-p, top-k and penalties."""
    sampled_logps: list[float] | None = None
    """Log-probability of each token id (nats) in the distribution it was sampled from."""
    token_numbers: dict[str, list[float]] | None = None
    """Further numbers per token id by name, which pairs pass on to the objectives that name them in `needs`."""
    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    engine: str | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that made the ids (`regretless.modeling.load.tokenizer_fingerprint`)."""
    sampling: str | None = None
    """Sampling parameters as JSON."""
    seed: int | None = None
    finish_reason: FinishReason | None = None
    answer: str | None = None
    """Gold answer of the prompt."""
    verdict: Verdict | None = None
    verdict_reason: str | None = None
    extracted: str | None = None
    """Text that the verifier took as the response's answer."""
    score: float | None = None
    """Scalar quality from a judge; higher is better."""
    origin: str | None = field(default=None, compare=False)
    """Origin of the row, `file:line`, for messages; set by the reader and never stored."""

    @property
    def pieces(self) -> list[int] | list[str] | None:
        """The tokens that the log-probabilities belong to: token ids, or token strings if there are no ids."""
        return self.tokens if self.token_ids is None else self.token_ids


@dataclass(frozen=True, kw_only=True)
class Side:
    """One response of a pair: its text, and what is known about its tokens."""

    text: Text
    id: str | None = None
    token_ids: list[int] | None = None
    """Generated tokens, the end-of-sequence token included when it was generated; those of several messages one after
    another, without what lies between."""
    tokens: list[str] | None = None
    """Token strings, if a data set has no ids for its log-probabilities; the policy's tokenizer resolves them."""
    logps: list[float] | None = None
    """Log-probability of each token (nats) under the behavior policy."""
    token_numbers: dict[str, list[float]] | None = None
    """Further numbers per token by name, for objectives that name them in `needs`."""
    model: str | None = None
    """Name of the model that generated the response."""
    complete: bool | None = None
    """False if the response was truncated (no end-of-sequence token belongs after it)."""
    stopped: bool | None = None
    """True if a stop string ended the response: it is not truncated, and no end-of-sequence token belongs after it. Its
    tokens may lack the last characters of the text: those of the token that the stop string began within."""
    score: float | None = None
    """Scalar quality from a judge; higher is better."""

    @property
    def pieces(self) -> list[int] | list[str] | None:
        """The tokens that the log-probabilities belong to: token ids, or token strings if there are no ids."""
        return self.tokens if self.token_ids is None else self.token_ids

    def without_last(self, count: int) -> Side:
        """The side without its last `count` tokens; the caller sets its remaining text."""
        cut = {name: _without_last(getattr(self, name), count) for name in PER_TOKEN}
        return replace(self, **cut, complete=False, stopped=None, score=None)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One preference. Files have flat columns for its sides (`pair_row`): TRL's, `chosen_logps`, `rejected_logps`, …"""

    prompt: Text
    chosen: Side
    rejected: Side | None = None
    """None only in data for supervised training."""
    pair_id: str | None = None
    prompt_id: str | None = None
    prompt_token_ids: list[int] | None = None
    logps_kind: LogpsKind | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that made the ids of both sides; of two, both, and then there are no ids."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template besides the messages, as JSON; `tools` among them."""
    kind: Literal["original", "masked"] = "original"
    source_row: str | None = field(default=None, compare=False)
    """The row of a user's own file that a stage has read it from, `file:line`, for messages of later stages."""
    origin: str | None = field(default=None, compare=False)
    """Origin of the row, `file:line`, for messages; set by the reader and never stored."""

    @property
    def sides(self) -> dict[SideName, Side]:
        """The existing sides, by name."""
        return {"chosen": self.chosen} if self.rejected is None else {"chosen": self.chosen, "rejected": self.rejected}


def _without_last(values: Any, count: int) -> Any:
    """A list, or each list of a dictionary, without its last `count` values; None stays None."""
    if isinstance(values, dict):
        return {name: row[:-count] for name, row in values.items()}
    return values and values[:-count]


AND = " and "


@cache
def field_names(record: type[Response | Pair | Side]) -> tuple[str, ...]:
    """Names of the fields of a record that files hold, in order."""
    return tuple(item.name for item in fields(record) if item.name != "origin")


CARRIED = tuple(name for name in field_names(Side) if name in field_names(Response))
"""Fields that a side has from its response."""


def several_tokenizers(*fingerprints: str | None) -> str:
    """`Pair.tokenizer` of a pair whose sides have different tokenizers."""
    return AND.join(fingerprint or "unknown" for fingerprint in fingerprints)


def has_several_tokenizers(pair: Pair) -> bool:
    """Whether the sides of a pair have different tokenizers, so that it has no token ids."""
    return AND in (pair.tokenizer or "")


def text_key(text: Text) -> str:
    """Short stable identity of a text or conversation."""
    return fingerprint(text)[:16]
