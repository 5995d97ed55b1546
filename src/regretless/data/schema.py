"""Types of the columns of rows: every row from outside is checked against them, and nothing is converted."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence, Sized
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from regretless.core.text_cleaning import json_value
from regretless.data.records import Pair, Response, Side, field_names

POSITIVE_TOLERANCE = 1e-3
"""Engines that compute in half precision report log-probabilities slightly above 0 for certain tokens."""
LOWEST_LOGP = -1e9
"""Nats. No model computes less for a token that it generated; sums and squares of this still fit into float32."""
MOST_SCORE = 1e100
"""Sums and squares of scores up to this fit into float64."""
MOST_NUMBER = 1e38
"""Further numbers per token are stored and computed with as float32."""
LONGEST_QUOTED = 60
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
Real = Annotated[float, Field(allow_inf_nan=False, description="a finite number")]
Halves = Annotated[list[Real], Field(min_length=2, max_length=2, description="two finite numbers")]
Count = Annotated[int, Field(ge=0, lt=2**63, description="a whole number, 0 or more")]
Counts = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(description="whole numbers, 0 or more")]
Kind = Annotated[Literal["raw", "sampled"], Field(description="raw or sampled")]
Finish = Annotated[Literal["stop", "length", "stop_string"], Field(description="stop, length or stop_string")]
VerdictName = Annotated[Literal["correct", "wrong", "unknown"], Field(description="correct, wrong or unknown")]
PairKind = Annotated[Literal["original", "masked"], Field(description="original or masked")]
Seed = Annotated[Integer, Field(description="a whole number of 64 bits")]
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
    "logps": ColumnType(LogpList, FLOATS),
    "sampled_logps": ColumnType(LogpList, FLOATS),
    "logps_kind": ColumnType(Kind),
    "token_numbers": ColumnType(TokenNumbers),
    "seed": ColumnType(Seed, pa.int64()),
    "finish_reason": ColumnType(Finish),
    "answer": ColumnType(Gold),
    "verdict": ColumnType(VerdictName),
    "score": ColumnType(Score, pa.float64()),
    "regret": ColumnType(Real, pa.float64()),
    "regret_error": ColumnType(Real, pa.float64()),
    "regret_halves": ColumnType(Halves, pa.list_(pa.float64())),
    "unit_ends": ColumnType(Counts, IDS),
    "unit_right": ColumnType(Counts, IDS),
    "unit_continuations": ColumnType(Counts, IDS),
    "complete": ColumnType(Flag, pa.bool_()),
    "stopped": ColumnType(Flag, pa.bool_()),
    "kind": ColumnType(PairKind),
}
"""Columns of responses and pairs that are not plain text, by the name of their field in `records`."""


def columns_of(record: type, *, without: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """Columns of a record with the types that they accept; `more`: further columns, or other types."""
    names = [name for name in field_names(record) if name not in without]
    return {name: COLUMN_TYPES.get(name, TEXT).accepted for name in names} | more


class Schema:
    """Checks rows against their columns' types."""

    def __init__(self, types: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        """`types`: what each field accepts; `names`: the column of a row that it is read from, if it differs."""
        self.names = {field: field for field in types} if names is None else names
        optional: dict[str, Any] = {field: (accepted | None, None) for field, accepted in types.items()}
        self._model = create_model("Row", __base__=Columns, **optional)
        self._expected = dict(_expectations(types))

    def check(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a row, each None if missing. Raises Unusable with the first column that is not as expected.

        Tuples, numpy arrays and numpy numbers of rows in memory are accepted as lists and numbers.
        """
        values = {field: row[name] for field, name in self.names.items() if name in row}
        try:
            return dict(self._model.model_validate(values))
        except ValidationError:
            values = _plain(values)
        try:
            return dict(self._model.model_validate(values))
        except ValidationError as error:
            raise Unusable(self._reason(values, error.errors(include_url=False)[0]["loc"])) from None

    def _reason(self, fields: Mapping[str, Any], path: tuple[int | str, ...]) -> str:
        """The column at a path in a row's fields, its expectation and its value."""
        names: list[str] = []
        value: Any = fields
        for part in path:
            if isinstance(value, Mapping) and part in value:
                names.append(str(part))
                value = value[part]
            elif isinstance(value, list) and isinstance(part, int):
                return _of_item(self._column(names), part, value[part], self._expectation(names))
        return f"{self._column(names)}: expected {self._expectation(names)}, got {quoted(value)}"

    def _column(self, names: Sequence[str]) -> str:
        return ".".join([self.names[names[0]], *names[1:]])

    def _expectation(self, names: Sequence[str]) -> str:
        """The expectation at a path, or for the object that contains it."""
        return self._expected.get(".".join(names)) or self._expected[names[0]]


def _of_item(name: str, position: int, value: Any, expected: str) -> str:
    above = ", above 0" if isinstance(value, float) and value > 0 and expected == LOGPS else ""
    return f"{name}: value {position} is {quoted(value)}{above}; expected {expected}"


def _expectations(types: Mapping[str, Any], prefix: str = "") -> typing.Iterator[tuple[str, str]]:
    """Columns and their expectations, in words."""
    for name, accepted in types.items():
        for option in (accepted, *typing.get_args(accepted)):
            for item in getattr(option, "__metadata__", ()):
                if isinstance(item, FieldInfo) and item.description:
                    yield prefix + name, item.description
            inner = getattr(option, "__origin__", None)
            if isinstance(inner, type) and issubclass(inner, Columns):
                hints = typing.get_type_hints(inner, include_extras=True)
                yield from _expectations({field: hints[field] for field in inner.model_fields}, f"{prefix}{name}.")


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


def quoted(value: Any) -> str:
    """A value as messages display it: its beginning."""
    text = repr(json_value(value, depth=2)) if not isinstance(value, float) else repr(value)
    return text if len(text) <= LONGEST_QUOTED else text[: LONGEST_QUOTED - 1] + "…"


PROMPT = Schema({"prompt_id": Name, "id": Name})
ANSWER = Schema({"answer": Gold})
RESPONSE = Schema(columns_of(Response))
OF_PAIR = columns_of(Pair, without=("prompt", "chosen", "rejected", "chat_template_kwargs"), prompt_token_ids=SomeIds)
PAIR = Schema(OF_PAIR | {"rejected_mask_len": Count})
OF_SCORE = {"score": Score, "rating": Score, "score_of": Score}
"""Columns of preference data that may hold the score of a side."""
OF_SIDE = columns_of(Side, without=("text",), token_ids=SomeIds)
"""Columns of a side other than its text."""
IN_RELEASE = {"logprob_with_token": Released, "mask_len": Count}
"""Further columns of a side in the RePO authors' release."""
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


def name_or(name: str | int | None, other: str) -> str:
    """A name in a row, as text, else the other one."""
    return other if name in (None, "") else str(name)


def read_gold(row: Mapping[str, Any], column: str) -> str | float | None:
    """The gold answer in a column, None if there is none. Raises Unusable."""
    try:
        answer: str | float | None = ANSWER.check({"answer": row.get(column)})["answer"]
    except Unusable as reason:
        raise Unusable(f"{column}{str(reason).removeprefix('answer')}") from None
    return answer
