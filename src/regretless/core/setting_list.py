"""Every setting of a section with its type, default and meaning, read from where it is declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter

BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
LENGTHS = {"minItems": "at least", "maxItems": "at most"}
REQUIRED = "required"


class Setting(NamedTuple):
    """One row of a table of settings."""

    key: str
    """With those of the sections around it, joined by dots; NAME stands for a name of the user's, N for a number."""
    type: str
    default: Any
    """As JSON; `REQUIRED` where there is none."""
    meaning: str


def settings_of(annotation: Any, key: str = "") -> list[Setting]:
    """All settings of a section, those of sections inside it included, in order of declaration.

    annotation: a section's class, or the annotation of a field that holds one, a list of them or a mapping.
    """
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
        return "none"
    if kind == "array":
        items = schema.get("prefixItems")
        inner = ", ".join(map(type_text, items)) if items else type_text(schema.get("items", {}))
        return f"list of {inner}"
    if kind == "object" or "$ref" in schema:
        return "section" if "$ref" in schema else "mapping"
    limits = ", ".join(f"{sign} {schema[name]:g}" for name, sign in BOUNDS.items() if name in schema)
    return f"{kind} {limits}".strip()


def _walk(schema: Mapping[str, Any], defs: Mapping[str, Any], key: str, inside: tuple[str, ...]) -> Iterator[Setting]:
    """Settings below a schema; `inside`: the classes around it, so that one that holds itself ends."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in inside:
            yield from _walk(defs[name], defs, key, (*inside, name))
        return
    for several in ("anyOf", "oneOf"):
        for option in schema.get(several, ()):
            yield from _walk(option, defs, key, inside)
    if "items" in schema:
        yield from _walk(schema["items"], defs, f"{key}.N", inside)
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield from _walk(schema["additionalProperties"], defs, f"{key}.NAME", inside)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        full = f"{key}.{name}" if key else name
        default = REQUIRED if name in required else field.get("default")
        inner = list(_walk(field, defs, full, inside))
        shown = None if inner and isinstance(default, Mapping) else default
        yield Setting(full, type_text(field), shown, " ".join(str(field.get("description", "")).split()))
        yield from inner
