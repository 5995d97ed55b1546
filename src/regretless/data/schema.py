"""Types of the columns of rows: every row from outside is checked against them, and nothing is converted."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence, Sized
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from regretless.core.text_cleaning import json_value

POSITIVE_TOLERANCE = 1e-3
"""Engines that compute in half precision report log-probabilities slightly above 0 for certain tokens."""
LOWEST_LOGP = -1e9
"""Nats. No model computes less for a token that it generated; sums and squares of this still fit into float32."""
MOST_SCORE = 1e100
"""Sums and squares of scores up to this fit into float64."""
MOST_NUMBER = 1e38
"""Further numbers per token are stored and computed with as float32."""
FOUND = 60
"""Most characters of a value in a message."""

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
String = Annotated[str, Field(description="text")]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Name = Annotated[str | Integer, Field(description="text or a whole number")]
Flag = Annotated[bool, Field(description="true or false")]
Count = Annotated[int, Field(ge=0, lt=2**63, description="a whole number, 0 or more")]
Kind = Annotated[Literal["raw", "sampled"], Field(description="raw or sampled")]
Finish = Annotated[Literal["stop", "length", "stop_string"], Field(description="stop, length or stop_string")]
VerdictName = Annotated[Literal["correct", "wrong", "unknown"], Field(description="correct, wrong or unknown")]
Gold = Annotated[
    str | Integer | Annotated[float, Field(allow_inf_nan=False)], Field(description="text or a finite number")
]


class Unusable(Exception):
    """Reason why a row is rejected; the reader turns it into a `Refusal`."""


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


class ResponseColumns(Columns):
    """Columns of a response (`records.Response`)."""

    prompt: Texts
    response: String
    prompt_id: Name | None = None
    response_id: Name | None = None
    prompt_token_ids: IdList | None = None
    token_ids: IdList | None = None
    tokens: TokenList | None = None
    logps: LogpList | None = None
    logps_kind: Kind | None = None
    sampled_logps: LogpList | None = None
    token_numbers: TokenNumbers | None = None
    model: String | None = None
    revision: String | None = None
    dtype: String | None = None
    engine: String | None = None
    tokenizer: String | None = None
    sampling: String | None = None
    seed: Annotated[Integer, Field(description="a whole number of 64 bits")] | None = None
    finish_reason: Finish | None = None
    answer: Gold | None = None
    verdict: VerdictName | None = None
    verdict_reason: String | None = None
    extracted: String | None = None
    score: Score | None = None


class PromptColumns(Columns):
    """Columns of a prompt other than its text."""

    prompt_id: Name | None = None
    id: Name | None = None


class AnswerColumns(Columns):
    """The gold answer of a prompt, under any of its names."""

    answer: Gold | None = None


class ReleasedColumns(Columns):
    """Log-probabilities in the format of the RePO authors' release."""

    tokens: Annotated[list[str], Field(min_length=1, description="token strings")]
    logprobs: LogpList
    token_ids: SomeIds | None = None


Released = Annotated[ReleasedColumns, Field(description="an object with tokens and logprobs")]


class PairColumns(Columns):
    """Columns of a pair (`records.Pair`) other than its sides."""

    pair_id: Name | None = None
    prompt_id: Name | None = None
    prompt_token_ids: SomeIds | None = None
    logps_kind: Kind | None = None
    tokenizer: String | None = None
    kind: Annotated[Literal["original", "masked"], Field(description="original or masked")] | None = None
    rejected_mask_len: Count | None = None


class ScoreColumns(Columns):
    """Columns of preference data that may hold the score of a side."""

    score: Score | None = None
    rating: Score | None = None
    score_of: Score | None = None


class SideColumns(ScoreColumns):
    """Columns of one side (`records.Side`) other than its text, and their names in the RePO authors' release."""

    id: Name | None = None
    token_ids: SomeIds | None = None
    tokens: TokenList | None = None
    logps: LogpList | None = None
    token_numbers: TokenNumbers | None = None
    logprob_with_token: Released | None = None
    model: String | None = None
    complete: Flag | None = None
    stopped: Flag | None = None
    mask_len: Count | None = None


C = TypeVar("C", bound=Columns)


class Schema(Generic[C]):
    """Checks rows against their columns' types."""

    def __init__(self, columns: type[C], names: Mapping[str, str] | None = None) -> None:
        """`names`: the column of a row that each field is read from, if it differs."""
        self.columns = columns
        self.names = {field: field for field in columns.model_fields} if names is None else names
        self._expected = dict(_expectations(columns))

    def check(self, row: Mapping[str, Any]) -> C:
        """The columns of a row. Raises Unusable with the first column that is not as expected, and its value.

        Tuples, numpy arrays and numpy numbers of rows in memory are accepted as lists and numbers.
        """
        known = {field: row[name] for field, name in self.names.items() if name in row}
        try:
            return self.columns.model_validate(known)
        except ValidationError:
            known = _plain(known)
        try:
            return self.columns.model_validate(known)
        except ValidationError as error:
            raise Unusable(self._reason(known, error.errors(include_url=False)[0]["loc"])) from None

    def _reason(self, fields: Mapping[str, Any], place: tuple[int | str, ...]) -> str:
        """The column at a path in a row's fields, its expectation and its value."""
        names: list[str] = []
        value: Any = fields
        for part in place:
            if isinstance(value, Mapping) and part in value:
                names.append(str(part))
                value = value[part]
            elif isinstance(value, list) and isinstance(part, int):
                return _of_item(self._column(names), part, value[part], self._expectation(names))
        return f"{self._column(names)}: expected {self._expectation(names)}, got {found(value)}"

    def _column(self, names: Sequence[str]) -> str:
        return ".".join([self.names[names[0]], *names[1:]])

    def _expectation(self, names: Sequence[str]) -> str:
        """The expectation at a path, or for the object that contains it."""
        return self._expected.get(".".join(names)) or self._expected[names[0]]


def _of_item(name: str, position: int, value: Any, expected: str) -> str:
    above = ", above 0" if isinstance(value, float) and value > 0 and expected == LOGPS else ""
    return f"{name}: value {position} is {found(value)}{above}; expected {expected}"


def _expectations(columns: type[Columns], prefix: str = "") -> typing.Iterator[tuple[str, str]]:
    """Columns and their expectations, in words."""
    hints = typing.get_type_hints(columns, include_extras=True)
    for name in columns.model_fields:
        for option in (hints[name], *typing.get_args(hints[name])):
            for item in getattr(option, "__metadata__", ()):
                if isinstance(item, FieldInfo) and item.description:
                    yield prefix + name, item.description
            inner = getattr(option, "__origin__", None)
            if isinstance(inner, type) and issubclass(inner, Columns):
                yield from _expectations(inner, f"{prefix}{name}.")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def found(value: Any) -> str:
    """A value as messages display it: its beginning."""
    text = repr(json_value(value, depth=2)) if not isinstance(value, float) else repr(value)
    return text if len(text) <= FOUND else text[: FOUND - 1] + "…"


PROMPT, ANSWER, RESPONSE = Schema(PromptColumns), Schema(AnswerColumns), Schema(ResponseColumns)
PAIR = Schema(PairColumns)
_LOGPS: TypeAdapter[list[float]] = TypeAdapter(Annotated[list[Logp], Field(strict=True)])


def check_lengths(name: str, tokens: Sized | None, values: Sized | None) -> str | None:
    """The problem with the count of values in the column `name` (one per token), or None."""
    if values is None:
        return None
    if tokens is None:
        return f"{name}: present without token ids, so their tokens are unknown"
    if len(values) != len(tokens):
        return f"{name}: expected one value per token, got {len(values)} values for {len(tokens)} tokens"
    return None


def check_numbers(name: str, tokens: Sized | None, numbers: Mapping[str, Sized | None] | None) -> str | None:
    """The problem with the count of each list in the column `name` (`token_numbers`), or None."""
    problems = (check_lengths(f"{name}.{key}", tokens, values) for key, values in (numbers or {}).items())
    return next(filter(None, problems), None)


def logps_problem(name: str, tokens: Sized | None, logps: list[float] | None) -> str | None:
    """The problem with a response's log-probabilities (nats, one per token id or string), or None."""
    problem = check_lengths(name, tokens, logps)
    if problem is not None or logps is None:
        return problem
    try:
        _LOGPS.validate_python(logps, strict=True)
    except ValidationError as error:
        position = error.errors(include_url=False)[0]["loc"][0]
        assert isinstance(position, int)
        return _of_item(name, position, logps[position], LOGPS)
    return None


def given_numbers(numbers: Mapping[str, list[float] | None] | None) -> dict[str, list[float]] | None:
    """The lists that a row has; a table adds the names of all rows to every row, with null for missing ones."""
    return {name: values for name, values in (numbers or {}).items() if values is not None} or None


def read_gold(row: Mapping[str, Any], column: str) -> str | float | None:
    """The gold answer in a column, None if there is none. Raises Unusable."""
    try:
        return ANSWER.check({"answer": row.get(column)}).answer
    except Unusable as reason:
        raise Unusable(f"{column}{str(reason).removeprefix('answer')}") from None
