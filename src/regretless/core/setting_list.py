"""Every setting of a section with its type, default and meaning, read from where it is declared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
REQUIRED = "required"
PLACEHOLDERS = {"NAME": "a name of your choice", "N": "a place in a list"}
"""Parts of a key that stand for something else."""


class Setting(NamedTuple):
    """One row of a table of settings."""

    key: str
    """With those of the sections around it, joined by dots; see `PLACEHOLDERS`."""
    type: str
    default: Any
    """As JSON; `REQUIRED` where there is none."""
    meaning: str

    @property
    def default_text(self) -> str:
        """The default for people: as it is written in a recipe."""
        if self.default == REQUIRED:
            return REQUIRED
        if self.type.startswith("section") and self.default:
            return "as listed for its settings"
        return json.dumps(self.default, ensure_ascii=False, default=str)


class Group(NamedTuple):
    """The settings of one section, without those of sections inside it."""

    key: str
    meaning: str
    """Of the section."""
    settings: list[Setting]


def grouped(settings: Sequence[Setting]) -> list[Group]:
    """Settings by the section that they belong to, an outer section before the sections inside it."""
    meanings = {setting.key: setting.meaning for setting in settings}
    groups: dict[str, Group] = {}
    for setting in settings:
        key = setting.key.rpartition(".")[0]
        section = key
        while section.rpartition(".")[2] in PLACEHOLDERS:
            section = section.rpartition(".")[0]
        groups.setdefault(key, Group(key, meanings.get(section, ""), [])).settings.append(setting)
    return list(groups.values())


def settings_of(annotation: Any, key: str = "") -> list[Setting]:
    """All settings of a section, those of sections inside it included, in order of declaration.

    annotation: a section's class, or the annotation of a field that holds one, a list of them or a mapping.
    """
    from pydantic import TypeAdapter  # takes time that those do not need who only print

    schema = TypeAdapter(annotation).json_schema()
    return list(_walk(schema, schema.get("$defs", {}), key, ()))


def type_text(schema: Mapping[str, Any]) -> str:
    """What a value may be, with bounds, in words, from its JSON schema."""
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(type_text(option) for option in schema[several]))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(str, schema.get("enum", [schema.get("const")])))
    kind = str(schema.get("type", "any"))
    if kind == "null":
        return "null"
    if kind == "array":
        items = schema.get("prefixItems")
        inner = ", ".join(map(type_text, items)) if items else type_text(schema.get("items", {}))
        return f"list of {inner}"
    if kind == "object" or "$ref" in schema:
        return "section" if "$ref" in schema else "mapping"
    limits = ", ".join(f"{sign} {schema[name]:.10g}" for name, sign in BOUNDS.items() if name in schema)
    return f"{kind} {limits}".strip()


def _walk(schema: Mapping[str, Any], defs: Mapping[str, Any], key: str, inside: tuple[str, ...]) -> Iterator[Setting]:
    """Settings below a schema; `inside`: the classes around it, so that one that holds itself ends."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in inside:
            yield from _walk(defs[name], defs, key, (*inside, name))
        return
    for several in ("anyOf", "oneOf"):
        options = [list(_walk(option, defs, key, inside)) for option in schema.get(several, ())]
        yield from _merged(options, schema.get("discriminator", {}).get("propertyName", ""))
    if "items" in schema:
        yield from _walk(schema["items"], defs, f"{key}.N", inside)
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield from _walk(schema["additionalProperties"], defs, f"{key}.NAME", inside)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        full = f"{key}.{name}" if key else name
        # The schema lacks a default that a function makes; here these are empty lists and mappings.
        empty: Any = {"array": [], "object": {}}.get(field.get("type"))
        default = REQUIRED if name in required else field.get("default", empty)
        yield Setting(full, type_text(field), default, " ".join(str(field.get("description", "")).split()))
        yield from _walk(field, defs, full, inside)


def _merged(options: Sequence[Sequence[Setting]], chooser: str) -> Iterator[Setting]:
    """Settings of a section that is one of several kinds, told apart by the setting `chooser`.

    A setting that all kinds share is listed once. One that differs is listed with the kinds that it belongs to.
    """
    names = [setting.key.rpartition(".")[2] for setting in options[0]] if options else []
    if chooser not in names:
        for option in options:
            yield from option
        return
    kinds = [
        next(setting.type for setting in option if setting.key.rpartition(".")[2] == chooser) for option in options
    ]
    having: dict[str, dict[str, list[str]]] = {}
    first: dict[str, Setting] = {}
    for kind, option in zip(kinds, options, strict=True):
        for setting in option:
            variant = repr(setting)
            first.setdefault(variant, setting)
            having.setdefault(setting.key, {}).setdefault(variant, []).append(kind)
    key = next(key for key in having if key.rpartition(".")[2] == chooser)
    some = first[next(iter(having.pop(key)))]
    yield Setting(key, " or ".join(kinds), REQUIRED, some.meaning)
    for variants in having.values():
        for variant, which in variants.items():
            setting = first[variant]
            only = "" if which == kinds else f"For {chooser}={' or '.join(which)}: "
            yield setting._replace(meaning=f"{only}{setting.meaning}")
