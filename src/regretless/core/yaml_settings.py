"""Settings as YAML: files, the files that they extend, and overrides of the command line."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from regretless.core.bundled import find
from regretless.core.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, as in version 1.2; PyYAML's 1.1 requires 1.0e-4 and reads it as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping, in which a duplicate key is an error: YAML's own loader uses the last one."""
        own = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := sorted({key for key in own if own.count(key) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"{', '.join(twice)}: occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def load_text(text: str) -> Any:
    """What a text says; the recipes of a study say the same again and again, and are parsed once."""
    return copy.deepcopy(_parsed(text))


def read_yaml(path: Path, below: Sequence[Path] = ()) -> dict[str, Any]:
    """Mapping in a YAML file; `extends: other.yaml` is merged below it: a file beside it, or a packaged recipe.

    below: the files that extend this one. Raises ConfigError if the file is missing, is not YAML, holds no mapping,
    or extends itself.
    """
    if path.resolve() in below:
        raise ConfigError(f"{path}: extends itself, directly or through another file")
    try:
        values = load_text(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); set it to the path of a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping at the top level, got {type(values).__name__}")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    return merge(read_yaml(find(str(parent), beside=path.parent), [*below, path.resolve()]), values)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `over` merged into `base`; mappings are merged key by key, anything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as nested mapping, with the value read as YAML. Raises ConfigError if there is no `=`."""
    path, sep, raw = text.partition("=")
    if not sep or not path:
        raise ConfigError(f"override {text!r}: expected key=value, for example train.beta=0.1")
    try:
        value: Any = load_text(raw) if raw else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {text!r}: the value is not valid YAML: {error}") from error
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)
