"""Rows from outside are checked against the types of their columns; nothing is converted."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence, Sized
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from regretless.core.continuations import continuation_problem
from regretless.core.files import parse_json
from regretless.core.text_cleaning import json_value
from regretless.core.top_logps import top_problem
from regretless.data.columns import (
    COLUMN_TYPES,
    LOGPS,
    TEXT,
    Columns,
    Count,
    Gold,
    Logp,
    Name,
    Pair,
    Released,
    Response,
    Score,
    Side,
    SomeIds,
    field_names,
)

LONGEST_QUOTED = 60
"""Most characters of a value in a message."""


class Unusable(Exception):
    """Reason why a row is rejected; the reader turns it into a `Refusal`."""


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
OF_PAIR = columns_of(
    Pair, without=("prompt", "chosen", "rejected", "chat_template_kwargs", "topic"), prompt_token_ids=SomeIds
)
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


def check_top(name: str, tokens: Sized | None, data: bytes | None) -> str | None:
    """The problem with the column `name` (`top_logps`), or None."""
    if data is None:
        return None
    if not tokens:
        return f"{name}: present without token ids, so their tokens are unknown"
    return top_problem(name, data, len(tokens))


def check_continuations(name: str, tokens: Sized | None, data: bytes | None) -> str | None:
    """The problem with the column `name` (`continuations`), or None."""
    if data is None:
        return None
    if not tokens:
        return f"{name}: present without token ids, so what they continue is unknown"
    return continuation_problem(name, data, len(tokens))


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


GoldAnswer = str | list[Any] | dict[str, Any]
"""What a verifier is given: a text (a number as text), or the list or object of the user's file."""


def read_gold(row: Mapping[str, Any], column: str = "answer") -> GoldAnswer | None:
    """The gold answer in a column, None if there is none. Raises Unusable."""
    try:
        answer = ANSWER.check({"answer": row.get(column)})["answer"]
    except Unusable as reason:
        raise Unusable(f"{column}{str(reason).removeprefix('answer')}") from None
    if column == "answer" and row.get("answer_is_json") is True and isinstance(answer, str):
        try:
            answer = ANSWER.check({"answer": parse_json(answer)})["answer"]
        except ValueError as error:
            raise Unusable(f"answer: not valid JSON ({error}), although answer_is_json is true") from None
    if isinstance(answer, list | dict):
        try:
            json.dumps(answer, allow_nan=False)
        except ValueError:
            raise Unusable(f"{column}: expected finite numbers, got NaN or infinity in {quoted(answer)}") from None
        return answer
    return None if answer is None else gold_text(answer)


def gold_text(answer: str | float) -> str:
    """A gold answer that is a text or a number, as text: 27.0 as 27."""
    if isinstance(answer, str):
        return answer
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def stored_gold(answer: GoldAnswer | None) -> dict[str, Any]:
    """The columns of a gold answer in a response: a list or an object as JSON, which `read_gold` reads again."""
    if answer is None or isinstance(answer, str):
        return {"answer": answer}
    return {"answer": json.dumps(answer, ensure_ascii=False), "answer_is_json": True}
