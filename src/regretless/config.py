"""Typed settings: every stage's config is a `Section`, checked as a whole so that all problems show at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from regretless.errors import ConfigError, reject

SECRETS = ("api_key", "apikey", "secret", "password", "auth_token", "access_token")
"""A setting with such a word in its name may be a secret that does not belong there: its value is not shown."""


class Section(BaseModel):
    """Base of all settings: keyword-only, frozen, unknown keys are errors, field docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        # In pydantic's own message, which a traceback shows; ours has what may be shown.
        hide_input_in_errors=True,
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Validate values. Raises ConfigError that lists every problem with its key, expectation and finding."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            reject(where, [_describe(item) for item in error.errors()])
            raise  # unreachable: a ValidationError has at least one item


def _describe(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(top level)"
    if item["type"] == "extra_forbidden":
        found = "(hidden)" if any(word in key.lower() for word in SECRETS) else repr(item["input"])
        return f"{key}: unknown key (got {found}); remove it or check its spelling"
    if item["type"] == "missing":
        return f"{key}: required, not given"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower()}{message[1:]} (got {item['input']!r})"


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, as in version 1.2; PyYAML's 1.1 wants 1.0e-4 and takes it for text."""


FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))


def _load(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """Mapping in a YAML file; `extends: other.yaml` (relative to the file) is merged below it.

    Raises ConfigError when the file is missing, is not YAML, or holds no mapping.
    """
    try:
        values = _load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping at the top level, got {type(values).__name__}")
    parent = values.pop("extends", None)
    return values if parent is None else merge(read_yaml(path.parent / str(parent)), values)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `over` laid on `base`; mappings are merged key by key, anything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as nested mapping, the value read as YAML. Raises ConfigError when there is no `=`."""
    path, sep, raw = text.partition("=")
    if not sep or not path:
        raise ConfigError(f"override {text!r}: expected key=value, for example train.beta=0.1")
    try:
        value: Any = _load(raw) if raw else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {text!r}: the value is not valid YAML: {error}") from error
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)
