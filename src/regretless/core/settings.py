"""Typed settings: every stage's config is a `Section`, validated as a whole so that all problems appear at once."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from regretless.core.errors import reject
from regretless.core.paths import NOTHING, NamedPath, PathSetting
from regretless.core.secrets import HIDDEN, Secret, hide, kept_secret, storable

MOST_PROBLEMS = 100
"""Most problems of one section that a message lists."""
LONGEST_SHOWN = 120
"""Most characters of a value in a message."""
LONGEST_NAME = 100
"""Bytes; file systems allow 255 in a name, and prefixes and suffixes are added."""


def check_name(value: str) -> str:
    """A name that a file or folder can have, unchanged. Raises ValueError for one that could lead elsewhere.

    Letters, digits, `_`, `.`, `+`, `-` and whatever is visible beyond ASCII, such as vowel signs and emoji; the first
    is none of `.+-`: so no separator, no `..`, no hidden file, and nothing that looks like a flag.
    """
    is_name = value.isprintable() and re.fullmatch(r"[\w\u0080-\U0010ffff][\w.+\u0080-\U0010ffff-]*", value)
    if not is_name or len(value.encode()) > LONGEST_NAME:
        raise ValueError(
            f"expected a name of letters, digits, _ . + and -, beginning with a letter, a digit or _, of at most "
            f"{LONGEST_NAME} bytes: it becomes a file or folder"
        )
    return value


def in_one_folder(names: Iterable[str]) -> list[str]:
    """Those of the names that would share a folder: equal ones, and on some file systems those that differ in case."""
    by_folder: dict[str, list[str]] = {}
    for name in names:
        by_folder.setdefault(name.casefold(), []).append(name)
    return [name for alike in by_folder.values() if len(alike) > 1 for name in alike]


def _check_apart(values: dict[str, Item]) -> dict[str, Item]:
    if alike := in_one_folder(values):
        raise ValueError(f"the names {', '.join(alike)} differ in case alone, and become folders; choose others")
    return values


Item = TypeVar("Item")
FolderName = Annotated[str, AfterValidator(check_name)]
"""A name in settings that becomes part of a path."""
ByFolder = Annotated[dict[FolderName, Item], AfterValidator(_check_apart)]
"""Settings by such a name; each name has a folder."""
MOST_SEED = 2**32 - 1
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
"""A random seed in settings. NumPy takes none of more bits."""
MOST = 2**63 - 1
"""Greatest whole number in settings: libraries take none of more bits."""


class Unquoted(str):
    """A text that YAML 1.1 reads as something else where it has no quotes: `no`, `1_000`, `2026-01-02`.

    The type of a setting decides what it is; only a setting of any type has to refuse it (`DECIDED`).
    """

    __slots__ = ()


def _refuse_unquoted(value: Any) -> Any:
    if isinstance(value, Unquoted):
        raise ValueError(
            f"{value} without quotes is a text in YAML 1.2 and something else in YAML 1.1; write true, false or a "
            f'plain number, or "{value}" for a text'
        )
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in inside:
        _refuse_unquoted(item)
    return value


DECIDED = BeforeValidator(_refuse_unquoted)
"""For settings of other programs, whose types are not known here: what YAML's versions read differently is refused."""


def _without_null(labeled: Any) -> Any:
    if not isinstance(labeled, Mapping):
        return labeled
    return {label: entry for label, entry in labeled.items() if entry is not None}


REMOVABLE = BeforeValidator(_without_null)
"""For entries by label: null removes one, of a recipe that is extended."""


class Section(BaseModel):
    """Base of all settings: keyword-only, frozen, unknown keys are errors, field docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        # Applies to pydantic's own message, which a traceback includes; ours hides what it must.
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_booleans_for_numbers(cls, values: Any) -> Any:
        # Pydantic would take true for 1; the text `true` it refuses, together with all other problems.
        if not isinstance(values, Mapping):
            return values
        numbers = _numbers(cls)
        return {key: _as_texts(value) if key in numbers else value for key, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _with_secrets_as_such(cls, values: Any) -> Any:
        # A setting with a type of its own is no secret; one of any kind is what its name says.
        if not isinstance(values, Mapping):
            return values
        open_ones = _open_settings(cls)
        return {
            key: kept_secret(str(key), value) if key in open_ones or key not in cls.model_fields else value
            for key, value in values.items()
        }

    @model_serializer(mode="wrap")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return cast(dict[str, Any], storable(values)) if info.mode == "json" else values

    @field_validator("*")
    @classmethod
    def _of_64_bits(cls, value: Any) -> Any:
        if any(isinstance(item, int) and abs(item) > MOST for item in (value if isinstance(value, list) else [value])):
            raise ValueError(f"expected a whole number of at most {MOST}")
        return value

    @field_validator("*")
    @classmethod
    def _with_content(cls, value: Any, info: ValidationInfo) -> Any:
        # No setting needs an empty text, except one that has it by default; as a path, it is the current folder.
        field = cls.model_fields[str(info.field_name)]
        is_named = isinstance(value, Mapping) and typing.get_args(field.annotation)[1:] == (str,)
        texts = value.values() if is_named else [value]
        if value != field.default and any(isinstance(one, str) and not one.strip() for one in texts):
            raise ValueError(NOTHING)
        return value

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Validate values. Raises ConfigError that lists every problem with its key, expected and actual value."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            items = error.errors()
            more = [f"and {len(items) - MOST_PROBLEMS} more"] if len(items) > MOST_PROBLEMS else []
            reject(where, [*_describe(cls, items[:MOST_PROBLEMS]), *more])
            raise  # unreachable: a ValidationError has at least one item


def dump(section: Section) -> dict[str, Any]:
    """The section as JSON-able settings, defaults included; those that may name files stay `NamedPath`."""
    return cast(dict[str, Any], _with_paths(section.model_dump(mode="json"), section))


def _with_paths(dumped: Any, value: Any) -> Any:
    """JSON values of settings, which were made of `value`, with those that may name files as `NamedPath`."""
    if isinstance(value, Section):
        paths, items = _path_settings(type(value)), dict(value)
        return {
            key: NamedPath(item) if key in paths and isinstance(item, str) else _with_paths(item, items.get(key))
            for key, item in dumped.items()
        }
    if isinstance(value, Mapping) and isinstance(dumped, dict):
        return {key: _with_paths(item, value.get(key)) for key, item in dumped.items()}
    if isinstance(value, list | tuple) and isinstance(dumped, list):
        return [_with_paths(item, inner) for item, inner in zip(dumped, value, strict=True)]
    return dumped


@functools.cache
def _path_settings(section: type[Section]) -> frozenset[str]:
    """Settings declared as `PathSetting`: a copy of a section may hold a plain text there."""
    (mark,) = typing.get_args(PathSetting)[1:]
    return frozenset(
        name
        for name, field in section.model_fields.items()
        if mark in field.metadata
        or any(mark in typing.get_args(option) for option in typing.get_args(field.annotation))
    )


def named_paths(value: Any) -> Iterator[tuple[str, NamedPath]]:
    """Values of settings that may name files, also those inside others, with their keys (`models.0.adapter`)."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Section):
        items = value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        if isinstance(item, NamedPath):
            yield str(key), item
        yield from ((f"{key}.{name}", path) for name, path in named_paths(item))


def sound_part(kind: Any, value: Any) -> Any:
    """The valid part of a value: itself, or without the settings that have errors; None if nothing is left.

    For further checks only: a removed setting may have been required.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    with contextlib.suppress(ValidationError):
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            return adapter.validate_python(_without_paths(value, [item["loc"] for item in error.errors()]))
    return None


def _without_paths(value: Any, paths: Sequence[tuple[int | str, ...]]) -> Any:
    """Settings without those at some paths, as far as these exist."""
    if not isinstance(value, Mapping):
        return value
    gone = {path[0] for path in paths if len(path) == 1}
    below = {key: [path[1:] for path in paths if path[:1] == (key,)] for key in value}
    return {key: _without_paths(item, below[key]) for key, item in value.items() if key not in gone}


def _describe(section: type[Section], items: Sequence[Any]) -> list[str]:
    """One line for each setting with an error: its key, what was expected, what it has, and what may be meant."""
    texts_by_key: dict[str, list[str]] = {}
    for item in items:
        keys, inside = _place(section, item)
        message, value = item["msg"].removeprefix("Value error, "), item["input"]
        value = kept_secret(".".join(keys), value)
        # What a section reports about one of its settings belongs to that setting's key.
        named = re.match(r"([\w.]+): ", message)
        if named and any(named[1].split(".")[0] in other.model_fields for other in inside):
            keys, message = [*keys, named[1]], message[named.end() :]
            value = value.get(named[1]) if isinstance(value, Mapping) else value
        key = ".".join(keys) or "(top level)"
        if item["type"] == "extra_forbidden":
            text = f"unknown key (got {_shown(value)}); {_meant(keys[-1], inside)}"
        elif item["type"] == "missing":
            text = "required, not given"
        elif "got " in message or (isinstance(value, Mapping) and item["type"] == "value_error"):
            text = lower(message)
        else:
            text = f"{lower(message)} (got {_shown(value)})"
        text = hide(text)
        if text not in texts_by_key.setdefault(key, []):
            texts_by_key[key].append(text)
    # A value that fits none of several types has an error for each.
    return [f"{key}: {' or: '.join(texts)}" for key, texts in texts_by_key.items()]


def setting_error(
    place: tuple[int | str, ...], message: str, value: Any, kind: str = "value_error"
) -> InitErrorDetails:
    """An error of the setting at `place`, for a validator that reports several at once."""
    # Braces in the message would be read as placeholders.
    text = PydanticCustomError(kind, "{message}", {"message": message})
    return InitErrorDetails(type=text, loc=place, input=value)


def lower(message: str) -> str:
    """A message as the rest of a line."""
    return message[:1].lower() + message[1:]


def _shown(value: Any) -> str:
    if isinstance(value, Secret):
        return HIDDEN
    return textwrap.shorten(repr(value), LONGEST_SHOWN, placeholder=" …")


def _place(section: type[Section], item: Any) -> tuple[list[str], list[type[Section]]]:
    """Keys that lead to an error, and the sections that it is in; keys and sections may be several in a union.

    The path from pydantic has more: names of the options of a union, which are not keys.
    """
    keys: list[str] = []
    inside: list[type[Section]] = [section]
    around: list[Any] = []
    unknown, last = item["type"] == "extra_forbidden", len(item["loc"]) - 1
    for number, part in enumerate(item["loc"]):
        fields = [other.model_fields[part] for other in inside if part in other.model_fields]
        if around and isinstance(part, int if around[0] is list else str) and part != "[key]":
            keys.append(str(part))
            around = around[1:]
        elif fields and not around:
            keys.append(str(part))
            inside = [inner for field in fields for inner in _sections_in(field.annotation)]
            around = max((_containers(field.annotation) for field in fields), key=len)
        elif number == last and not around and (unknown or any(map(_takes_more, inside))):
            keys.append(str(part))
    return keys, inside


@functools.cache
def _numbers(section: type[Section]) -> frozenset[str]:
    """The settings that are numbers, or lists of numbers, and cannot be true or false."""
    kinds = ((name, field.annotation) for name, field in section.model_fields.items())
    return frozenset(name for name, kind in kinds if _may_be(kind, (int, float)) and not _may_be(kind, (bool, Any)))


@functools.cache
def _open_settings(section: type[Section]) -> frozenset[str]:
    """The settings that hold values of any kind: arguments of other programs."""
    return frozenset(name for name, field in section.model_fields.items() if _may_be(field.annotation, (Any,)))


def _may_be(annotation: Any, kinds: tuple[Any, ...]) -> bool:
    return annotation in kinds or any(_may_be(option, kinds) for option in typing.get_args(annotation))


def _as_texts(value: Any) -> Any:
    """A value with texts in place of true and false, in a list too."""
    if isinstance(value, list | tuple):
        return [_as_texts(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else value


def _takes_more(section: type[Section]) -> bool:
    return section.model_config.get("extra") == "allow"


def _sections_in(annotation: Any) -> list[type[Section]]:
    """Sections that a field may hold, inside lists and mappings too."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for option in typing.get_args(annotation) for section in _sections_in(option)]


def _containers(annotation: Any) -> list[Any]:
    """Mappings (`dict`) and lists (`list`) around what a field holds, from outside."""
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    outermost = [dict] if origin is dict else [list] if origin in (list, tuple) else []
    return outermost + max((_containers(option) for option in options), key=len, default=[])


def _meant(key: str, sections: Sequence[type[Section]]) -> str:
    """What to do about an unknown key: the nearest key of these sections, or the same one further inside."""
    inside = [
        f"{name}.{'<name>.' * len(_containers(field.annotation))}{key}"
        for section in sections
        for name, field in section.model_fields.items()
        if any(key in inner.model_fields for inner in _sections_in(field.annotation))
    ]
    names = [name for section in sections for name in section.model_fields]
    close = list(dict.fromkeys(inside)) or difflib.get_close_matches(key, names, 1)
    return f"did you mean {' or '.join(close)}?" if close else "remove it or check its spelling"
