"""The columns of responses and of pairs: what each means, the values that it may have, and how a table stores it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from regretless.core import continuations
from regretless.core.files import fingerprint
from regretless.core.top_logps import first_rows

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
TOKEN_VALUES = {"logps": "behavior"}
"""Fields of a response, and of a side, with a number for each token, and the names that objectives have for them in
`needs`."""
PER_TOKEN = ("token_ids", "tokens", "token_bytes", *TOKEN_VALUES, "token_numbers", "top_logps")
"""Fields of a response, and of a side, with one value for each token."""
TOP = "top_logps"
"""The name that objectives have in `needs` for the field of that name."""
CONTINUATIONS = "continuations"
"""The same of this one."""
OF_TOKENS = (*PER_TOKEN, CONTINUATIONS)
"""Fields of a response, and of a side, that mean nothing without its tokens."""
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
    token_bytes: list[int] | None = None
    """Bytes (UTF-8) that each token adds to the text; 0 for the end-of-sequence token."""
    logps: list[float] | None = None
    """Log-probability of each token id (nats) under the behavior model; `logps_kind` says which distribution."""
    logps_kind: LogpsKind | None = None
    """`raw`: the model's own distribution; `sampled`: after temperature, top-p, top-k and penalties."""
    sampled_logps: list[float] | None = None
    """Log-probability of each token id (nats) in the distribution it was sampled from."""
    token_numbers: dict[str, list[float]] | None = None
    """Further numbers per token id by name, which pairs pass on to the objectives that name them in `needs`."""
    top_logps: bytes | None = None
    """For each token id the same number of most likely tokens in its place, each with its log-probability (nats), as
    8 bytes of `core.top_logps.ENTRY`."""
    top_logps_kind: LogpsKind | None = None
    """Distribution that `top_logps` belongs to, as for `logps_kind`."""
    continuations: bytes | None = None
    """How the behavior model went on from the ends of units when `rollout` asked it again, with log-probabilities of
    the kind of `logps` (`core.continuations`)."""
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
    answer_is_json: bool | None = None
    """True if `answer` is the JSON of a list or an object (`schema.read_gold` reads it); it is a text otherwise."""
    verdict: Verdict | None = None
    verdict_reason: str | None = None
    extracted: str | None = None
    """Text that the verifier took as the response's answer."""
    score: float | None = None
    """Scalar quality from a judge; higher is better."""
    step_ends: list[int] | None = None
    """Characters of the text at the end of each step of reasoning; the last is its length."""
    step_labels: list[int | None] | None = None
    """Label of each step: 1 good, 0 neutral, -1 bad, None unknown."""
    regret: float | None = None
    """Σ Reg of its units, measured by `rollout`."""
    regret_error: float | None = None
    """Posterior standard deviation of its G = Σ_{t≥1} V* − V^μ: responses to one prompt share V*(s_0), and differ by
    no more than G and the return."""
    regret_halves: list[float] | None = None
    """Σ Reg − V*(s_0) from the continuations with even numbers, and from those with odd ones."""
    unit_ends: list[int] | None = None
    """Tokens at the end of each unit that `rollout` measured."""
    unit_characters: list[int] | None = None
    """Characters of the text at the end of each unit."""
    unit_q_halves: list[list[float]] | None = None
    """Q^μ of each unit, from the continuations with even numbers, and from those with odd ones."""
    unit_q_error: list[float] | None = None
    """Posterior standard deviation of Q^μ of each unit; 0 for the last one, whose Q^μ is the return."""
    unit_right: list[int] | None = None
    """Right continuations by the writer, before each unit."""
    unit_continuations: list[int] | None = None
    """Continuations by the writer, before each unit."""
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
    token_bytes: list[int] | None = None
    """Bytes that each token adds to the text, as in `Response`, for policies with another tokenizer; where there are
    none, those of `tokens`."""
    logps: list[float] | None = None
    """Log-probability of each token (nats) under the behavior policy."""
    token_numbers: dict[str, list[float]] | None = None
    """Further numbers per token by name, for objectives that name them in `needs`."""
    top_logps: bytes | None = None
    """The most likely tokens in the place of each token, as in `Response`."""
    top_logps_kind: LogpsKind | None = None
    """Distribution that `top_logps` belongs to."""
    continuations: bytes | None = None
    """How the behavior policy went on from beginnings of the response, as in `Response`."""
    model: str | None = None
    """Name of the model that generated the response."""
    complete: bool | None = None
    """False if the text is the beginning of a response: no end-of-sequence token belongs after it."""
    cut_at: int | None = None
    """Number of tokens that the text consists of, if more are stored: those behind are how its writer went on, which
    objectives with `horizon=stored` read."""
    stopped: bool | None = None
    """True if a stop string ended the response: it is not truncated, and no end-of-sequence token belongs after it. Its
    tokens may lack the last characters of the text: those of the token that the stop string began within."""
    score: float | None = None
    """Scalar quality from a judge; higher is better."""
    step_ends: list[int] | None = None
    """Characters at the end of each step of reasoning, as in `Response`; those behind a cut (`cut_at`) go on behind the
    text."""
    step_labels: list[int | None] | None = None
    """Label of each step, as in `Response`."""

    @property
    def pieces(self) -> list[int] | list[str] | None:
        """The tokens that the log-probabilities belong to: token ids, or token strings if there are no ids."""
        return self.tokens if self.token_ids is None else self.token_ids

    @property
    def token_values(self) -> dict[str, list[float]]:
        """Numbers per token by the names that objectives have in `needs`; a column hides an equal name."""
        columns = {name: getattr(self, column) for column, name in TOKEN_VALUES.items()}
        values = {**(self.token_numbers or {}), **columns}
        return {name: numbers for name, numbers in values.items() if numbers is not None}

    @property
    def length(self) -> int:
        """Tokens of the text, those that are stored behind it left out; 0 if none are recorded."""
        return len(self.pieces or ()) if self.cut_at is None else self.cut_at

    def first_tokens(self, count: int, *, keep_rest: bool = False) -> Side:
        """The side with its first `count` tokens, the others stored behind the cut or left out; the caller sets the
        remaining text."""
        tokens = len(self.pieces or ())
        first = {name: first_values(getattr(self, name), count, tokens) for name in PER_TOKEN}
        first[CONTINUATIONS] = continuations.cut(self.continuations, count)
        cut = {} if keep_rest else first
        return replace(self, **cut, complete=False, cut_at=count if keep_rest else None, stopped=None, score=None)


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
    """Fingerprint of the tokenizer that made the ids of both sides; of two, both (`several_tokenizers`)."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template besides the messages, as JSON; `tools` among them."""
    kind: Literal["original", "masked"] = "original"
    prefix_tokens: int | None = None
    """Number of tokens that both responses begin with and that are context: nothing compares or trains them."""
    preference_probability: float | None = None
    """Probability that the chosen response is the better one, for training with `soft_labels`."""
    topic: str | None = None
    """What it is about, so that whole topics can be held out of training (`train.eval_by`)."""
    source_row: str | None = field(default=None, compare=False)
    """The row of a user's own file that a stage has read it from, `file:line`, for messages of later stages."""
    origin: str | None = field(default=None, compare=False)
    """Origin of the row, `file:line`, for messages; set by the reader and never stored."""

    @property
    def sides(self) -> dict[SideName, Side]:
        """The existing sides, by name."""
        return {"chosen": self.chosen} if self.rejected is None else {"chosen": self.chosen, "rejected": self.rejected}

    def tokenizer_of(self, side: SideName) -> str | None:
        """Fingerprint of the tokenizer that made the ids of a side; None if it is unknown."""
        both = (self.tokenizer or UNKNOWN).split(AND)
        found = both[SIDES.index(side)] if len(both) == len(SIDES) else self.tokenizer
        return None if found == UNKNOWN else found


def first_values(values: Any, count: int, tokens: int) -> Any:
    """The first `count` values of a column of `PER_TOKEN` with one for each of `tokens` tokens; None stays None."""
    if isinstance(values, dict):
        return {name: row[:count] for name, row in values.items()}
    return first_rows(values, count, tokens) if isinstance(values, bytes) else values and values[:count]


AND, UNKNOWN = " and ", "unknown"


@cache
def field_names(record: type[Response | Pair | Side]) -> tuple[str, ...]:
    """Names of the fields of a record that files hold, in order."""
    return tuple(item.name for item in fields(record) if item.name != "origin")


CARRIED = tuple(name for name in field_names(Side) if name in field_names(Response))
"""Fields that a side has from its response."""


def several_tokenizers(chosen: str | None, rejected: str | None) -> str:
    """`Pair.tokenizer` of a pair whose sides have different tokenizers, which `Pair.tokenizer_of` reads."""
    return f"{chosen or UNKNOWN}{AND}{rejected or UNKNOWN}"


def text_key(text: Text) -> str:
    """Short stable identity of a text or conversation."""
    return fingerprint(text)[:16]


# ---- what rows may have in a column, and how a table stores it -----------------------------------------------------

POSITIVE_TOLERANCE = 1e-3
"""Engines that compute in half precision report log-probabilities slightly above 0 for certain tokens."""
LOWEST_LOGP = -1e9
"""Nats. No model computes less for a token that it generated; sums and squares of this still fit into float32."""
MOST_SCORE = 1e100
"""Sums and squares of scores up to this fit into float64."""
MOST_NUMBER = 1e38
"""Further numbers per token are stored and computed with as float32."""


def as_bytes(value: Any) -> Any:
    """A text in base64, the form that bytes have in JSON, as bytes; any other value as it is."""
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else value
    except ValueError:
        return value


Id = Annotated[int, Field(ge=0, lt=2**31)]
IdList = Annotated[list[Id], Field(description="token ids (whole numbers from 0 to 2147483647)")]
SomeIds = Annotated[list[Id], Field(min_length=1, description="one token id or more (0 to 2147483647)")]
Logp = Annotated[float, Field(allow_inf_nan=False, ge=LOWEST_LOGP, le=POSITIVE_TOLERANCE)]
LOGPS = f"log-probabilities in nats, finite and from {LOWEST_LOGP:g} to 0"
LogpList = Annotated[list[Logp], Field(description=LOGPS)]
TokenList = Annotated[list[str], Field(description="token strings")]
Score = Annotated[
    float,
    Field(
        allow_inf_nan=False,
        ge=-MOST_SCORE,
        le=MOST_SCORE,
        description=f"a number from {-MOST_SCORE:g} to {MOST_SCORE:g}",
    ),
]
TokenNumbers = Annotated[
    dict[str, list[Annotated[float, Field(allow_inf_nan=False, ge=-MOST_NUMBER, le=MOST_NUMBER)]] | None],
    Field(description=f"for each name a list of numbers from {-MOST_NUMBER:g} to {MOST_NUMBER:g}, one per token"),
]
Packed = Annotated[bytes, BeforeValidator(as_bytes), Field(description="bytes, or a text in base64")]
String = Annotated[str, Field(description="text")]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Name = Annotated[str | Integer, Field(description="text or a whole number")]
Flag = Annotated[bool, Field(description="true or false")]
Real = Annotated[float, Field(allow_inf_nan=False, description="a finite number")]
Reals = Annotated[list[Real], Field(description="finite numbers")]
UnitHalves = Annotated[list[list[Real]], Field(min_length=2, max_length=2, description="two lists of finite numbers")]
Halves = Annotated[list[Real], Field(min_length=2, max_length=2, description="two finite numbers")]
Counts = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(description="whole numbers, 0 or more")]
StepLabels = Annotated[list[Annotated[int, Field(ge=-1, le=1)] | None], Field(description="a list of 1, 0, -1 or null")]
Count = Annotated[int, Field(ge=0, lt=2**63, description="a whole number, 0 or more")]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, description="a number from 0 to 1")]
Place = Annotated[int, Field(ge=1, lt=2**31, description="a whole number, 1 or more")]
Kind = Annotated[LogpsKind, Field(description="raw or sampled")]
Finish = Annotated[FinishReason, Field(description="stop, length or stop_string")]
VerdictName = Annotated[Literal["correct", "wrong", "unknown"], Field(description="correct, wrong or unknown")]
PairKind = Annotated[Literal["original", "masked"], Field(description="original or masked")]
Seed = Annotated[Integer, Field(description="a whole number of 64 bits")]
Gold = Annotated[
    str
    | Integer
    | Annotated[float, Field(allow_inf_nan=False)]
    | Annotated[list[JsonValue], Field(min_length=1)]
    | Annotated[dict[str, JsonValue], Field(min_length=1)],
    Field(description="text, a finite number, or a list or object of JSON with a value or more"),
]


class Columns(BaseModel):
    """Columns of a row, each None if missing; the row's other columns are ignored."""

    # Strict: text "1" is not 1, 1.5 is not 1, true is not 1.
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class MessageColumns(Columns):
    """One message of a conversation."""

    role: str
    content: str


Texts = Annotated[
    str | Annotated[list[MessageColumns], Field(min_length=1)],
    Field(description="text or a list of messages with the texts role and content"),
]


class ReleasedColumns(Columns):
    """Log-probabilities in the format of the RePO authors' release."""

    tokens: Annotated[list[str], Field(min_length=1, description="token strings")]
    logprobs: LogpList
    token_ids: SomeIds | None = None


Released = Annotated[ReleasedColumns, Field(description="an object with tokens and logprobs")]


class ColumnType(NamedTuple):
    """What the values of a column may be, and how a table stores them."""

    accepted: Any
    """Type for pydantic; its description is what messages expect."""
    stored: pa.DataType = pa.string()


TEXT = ColumnType(String)
IDS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
COLUMN_TYPES: Mapping[str, ColumnType] = {
    "prompt": ColumnType(Texts),
    "prompt_id": ColumnType(Name),
    "response_id": ColumnType(Name),
    "pair_id": ColumnType(Name),
    "id": ColumnType(Name),
    "prompt_token_ids": ColumnType(IdList, IDS),
    "token_ids": ColumnType(IdList, IDS),
    "tokens": ColumnType(TokenList, pa.list_(pa.string())),
    "token_bytes": ColumnType(Counts, IDS),
    "logps": ColumnType(LogpList, FLOATS),
    "sampled_logps": ColumnType(LogpList, FLOATS),
    "logps_kind": ColumnType(Kind),
    "token_numbers": ColumnType(TokenNumbers),
    "top_logps": ColumnType(Packed, pa.large_binary()),
    "top_logps_kind": ColumnType(Kind),
    "continuations": ColumnType(Packed, pa.large_binary()),
    "seed": ColumnType(Seed, pa.int64()),
    "finish_reason": ColumnType(Finish),
    "answer": ColumnType(Gold),
    "answer_is_json": ColumnType(Flag, pa.bool_()),
    "verdict": ColumnType(VerdictName),
    "score": ColumnType(Score, pa.float64()),
    "step_ends": ColumnType(Counts, IDS),
    "step_labels": ColumnType(StepLabels, pa.list_(pa.int8())),
    "regret": ColumnType(Real, pa.float64()),
    "regret_error": ColumnType(Real, pa.float64()),
    "regret_halves": ColumnType(Halves, pa.list_(pa.float64())),
    "unit_ends": ColumnType(Counts, IDS),
    "unit_characters": ColumnType(Counts, IDS),
    "unit_q_halves": ColumnType(UnitHalves, pa.list_(pa.list_(pa.float64()))),
    "unit_q_error": ColumnType(Reals, pa.list_(pa.float64())),
    "unit_right": ColumnType(Counts, IDS),
    "unit_continuations": ColumnType(Counts, IDS),
    "complete": ColumnType(Flag, pa.bool_()),
    "cut_at": ColumnType(Place, pa.int32()),
    "prefix_tokens": ColumnType(Place, pa.int32()),
    "preference_probability": ColumnType(Probability, pa.float64()),
    "stopped": ColumnType(Flag, pa.bool_()),
    "kind": ColumnType(PairKind),
}
"""Columns of responses and pairs that are not plain text, by the name of their field."""
