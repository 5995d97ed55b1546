"""Settings as YAML: files, the files that they extend, and overrides of the command line."""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from regretless.core.bundled import find
from regretless.core.errors import ConfigError
from regretless.core.files import read_text
from regretless.core.paths import NamedPath, page
from regretless.core.settings import Unquoted
from regretless.core.text_cleaning import MOST_DIGITS, whole_text

LARGEST = 500_000
"""Most characters of a file of settings, and of its values with every alias written out."""
OTHERS: Sequence[tuple[str, frozenset[str], str]] = (
    ("LLaMA-Factory", frozenset({"stage", "finetuning_type", "cutoff_len", "dataset_dir"}), "from_llamafactory"),
    ("TRL", frozenset(), "from_trl"),
)
"""Other packages whose files name a model by `model_name_or_path`, keys by which the first is told from the second, and
the page that translates them."""
SHOWN = 100
"""Most characters of an override in a message."""
PREFIX = "tag:yaml.org,2002:"
PLAIN = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), ["", *"~nN"]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    "int": (re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        list("-+.0123456789"),
    ),
}
"""Texts that are something else without quotes, and how they begin: the core schema of YAML 1.2.2 (10.3.2)."""


class _Loader(yaml.SafeLoader):
    """YAML with the core schema of version 1.2, and merge keys; whatever is wrong with a text is a YAMLError.

    PyYAML itself follows version 1.1, where 1e-4 is a text, 1:30 is 90, 010 is 8, no is false and 2026-01-02 a date.
    A text of this kind is `Unquoted`.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (None, f"{PREFIX}seq", f"{PREFIX}map")
    }

    def get_single_node(self) -> yaml.Node | None:
        """The text's only node. Aliases that write out too much, or contain themselves, and duplicate keys are errors.

        YAML's own loader uses the last one of duplicate keys.
        """
        node = super().get_single_node()
        if node is not None:
            _size(node, {})
        return node

    def plain(self, node: yaml.ScalarNode) -> Any:
        """A text, number, boolean or null."""
        kind, text = node.tag.removeprefix(PREFIX), self.construct_scalar(node)
        if kind in PLAIN and not PLAIN[kind][0].match(text):
            raise _error(node, f"{text!r}: not a value of type {kind}")
        try:
            if kind == "int":
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            if kind != "str":
                return _CONVERTED[kind](text.lower())
            return whole_text(text) if node.style or not _was_another(text) else Unquoted(text)
        except ValueError as error:
            too_long = kind == "int" and f"an integer of more than {MOST_DIGITS} digits"
            raise _error(node, too_long or str(error)) from error


_CONVERTED: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text == "true",
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
}


def _was_another(text: str) -> bool:
    """True if a text without quotes is something else in YAML 1.1."""
    forms = yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], [])
    return any(form.match(text) for _, form in forms)


class _Dumper(yaml.SafeDumper):
    """YAML that versions 1.1 and 1.2 read alike: a text that either of them takes for something else is quoted."""


for _kind, (_form, _beginnings) in PLAIN.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(PREFIX + _kind, _form, _beginnings)
for _kind in (*PLAIN, "str"):
    _Loader.add_constructor(PREFIX + _kind, _Loader.plain)
_Dumper.add_representer(Unquoted, yaml.SafeDumper.represent_str)
_Dumper.add_representer(NamedPath, yaml.SafeDumper.represent_str)
_Loader.add_implicit_resolver(f"{PREFIX}merge", re.compile(r"<<\Z"), ["<"])


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Characters of a node with every alias written out; `sizes`: those so far by id, 0 while they are summed."""
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise _error(node, "an alias inside of what it stands for")
        return sizes[id(node)]
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.ScalarNode):
        size += len(node.value)
    elif isinstance(node, yaml.MappingNode):
        keys = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := sorted(name for (_, name), count in keys.items() if count > 1):
            raise _error(node, f"{', '.join(twice[:5])}: occurs twice")
        size += sum(_size(part, sizes) for entry in node.value for part in entry)
    else:
        size += sum(_size(part, sizes) for part in node.value)
    if size > LARGEST:
        raise _error(node, f"more than {LARGEST} characters with every alias written out")
    sizes[id(node)] = size
    return size


def _error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    if len(text) > LARGEST:
        raise yaml.YAMLError(f"{len(text)} characters, where settings have at most {LARGEST}")
    return yaml.load(text, Loader=_Loader)


def load_text(text: str) -> Any:
    """What a text says; the recipes of a study say the same again and again, and are parsed once.

    Raises yaml.YAMLError, and RecursionError for nesting that is too deep.
    """
    return copy.deepcopy(_parsed(text))


def dump_text(values: Any) -> str:
    """Values as YAML, which `load_text` and readers of YAML 1.1 read back as they are."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, below: Sequence[Path] = ()) -> dict[str, Any]:
    """Mapping in a YAML file; `extends: other.yaml` is merged below it: a file beside it, or a packaged recipe.

    below: the files that extend this one. Raises ConfigError if the file is missing, is not YAML, holds no mapping,
    or extends itself.
    """
    if path.resolve() in below:
        raise ConfigError(f"{path}: extends itself, directly or through another file")
    try:
        values = load_text(read_text(path, LARGEST)) or {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); set it to the path of a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping at the top level, got {type(values).__name__}")
    if "model_name_or_path" in values:
        package, where = next((package, where) for package, keys, where in OTHERS if not keys or keys & values.keys())
        raise ConfigError(f"{path}: a configuration of {package}; {page(where)} has the names of its settings here")
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
        raise ConfigError(f"override {text!r:.{SHOWN}}: expected key=value, for example train.beta=0.1")
    try:
        value: Any = load_text(raw) if raw else None
        node = yaml.compose(raw, _Loader)
        rest = raw if node is None else raw[node.end_mark.index :]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {text!r:.{SHOWN}}: the value is not valid YAML: {error}") from error
    if rest.strip():
        raise ConfigError(
            f"override {text!r:.{SHOWN}}: {rest.strip()!r} is a comment in YAML; put the value into quotes"
        )
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)
