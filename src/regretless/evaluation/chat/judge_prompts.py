"""Judge templates with names in braces: this package's own, or a published file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from regretless.core.errors import ConfigError, reject
from regretless.core.files import parse_json, read_text
from regretless.core.yaml_settings import load_text
from regretless.data.columns import Message
from regretless.evaluation.chat.files import local_path

Slots = Mapping[str, Sequence[str]]
"""Content that a template must include, and the names in braces that stand for it."""
CODE = "code"
"""Name in braces of a code that the authors of the answers cannot know."""
CHATML_END = "<|im_end|>"
CHATML = re.compile(rf"<\|im_start\|>(\w+)\n(.*?){re.escape(CHATML_END)}", re.DOTALL)


@dataclass(frozen=True)
class JudgeTemplate:
    """A request to a judge, with names in braces as placeholders."""

    system: str
    user: str
    slots: Slots

    @property
    def uses_code(self) -> bool:
        """True if the judge receives the code, to write it before its verdict."""
        return "{" + CODE + "}" in self.user

    def messages(self, values: Mapping[str, str], code: str) -> list[Message]:
        """Messages with `values` inserted, keyed by slot name. Braces in inserted text are not interpreted."""
        texts = {name: values[slot] for slot, names in self.slots.items() for name in names} | {CODE: code}
        names = "|".join(re.escape(name) for name in texts)
        system, user = (
            re.sub("{(" + names + ")}", lambda match: texts[match[1]], text) for text in (self.system, self.user)
        )
        messages: list[Message] = [{"role": "user", "content": user}]
        return [{"role": "system", "content": system}, *messages] if system else messages


def load_templates(
    benchmark: str, path: str | None, wanted: Mapping[str, Slots], verdicts: Sequence[str], advice: str = ""
) -> dict[str, JudgeTemplate]:
    """Templates by name, from a file or from this package.

    wanted: name → content that the template must include. verdicts: labels, all of which the template must
    state. advice: what to do about a file that does not. Files: YAML with `system_prompt` and `prompt_template` (as
    in Arena-Hard's settings), or with such entries by name; JSONL of such rows with `name` (as MT-Bench's); a text in
    ChatML (as AlpacaEval's). Raises ConfigError if a template is missing or incomplete: a judge that receives two
    answers and no task would still reply.
    """
    where = path or f"templates/{benchmark}.yaml"
    entries = _entries(benchmark, path, where)
    if "prompt_template" in entries:
        entries = dict.fromkeys(wanted, entries)
    templates: dict[str, JudgeTemplate] = {}
    problems: list[str] = []
    for name, slots in wanted.items():
        entry = entries.get(name)
        if not isinstance(entry, Mapping) or not (user := _text(entry.get("prompt_template"))):
            problems.append(f"{name}: no prompt_template of that name; found {', '.join(map(str, entries)) or 'none'}")
            continue
        template = JudgeTemplate(_text(entry.get("system_prompt")), user, slots)
        problems += [
            f"{name}: lacks {{{names[0]}}}"
            for names in slots.values()
            if not any("{" + each + "}" in user for each in names)
        ]
        untold = [word for word in verdicts if not _occurs(word, f"{template.system}\n{user}")]
        if untold:
            problems.append(
                f"{name}: lacks the verdict labels: {' '.join(untold)} neither in system_prompt "
                f"({'present' if template.system else 'absent'}) nor in prompt_template{advice}"
            )
        templates[name] = template
    reject(f"judge prompt {where}", problems)
    return templates


def _occurs(word: str, text: str) -> bool:
    return word in text if not word.isalpha() else re.search(rf"\b{word}\b", text) is not None


def _entries(benchmark: str, path: str | None, where: str) -> Mapping[str, Any]:
    try:
        if path is None:
            source = resources.files("regretless.evaluation.chat").joinpath(f"templates/{benchmark}.yaml")
            values = load_text(source.read_text("utf-8"))
        else:
            text = read_text(local_path(path))
            values = _parse(path, text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"judge prompt {where}: cannot be read ({error}); set it to the path of a text file"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"judge prompt {where}: not valid: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"judge prompt {where}: expected templates by name, got {type(values).__name__}")
    return values


def _parse(path: str, text: str) -> Any:
    if path.endswith((".yaml", ".yml")):
        return load_text(text)
    if path.endswith(".jsonl"):
        rows = [parse_json(line) for line in text.splitlines() if line.strip()]
        return {row.get("name"): row for row in rows if isinstance(row, Mapping)}
    # Up to the last end: each beginning behind it would be followed to the end of the text.
    messages = CHATML.findall(text, 0, text.rfind(CHATML_END) + len(CHATML_END))
    parts = {role: content.strip() for role, content in messages} or {"user": text}
    return {"system_prompt": parts.get("system", ""), "prompt_template": parts.get("user", "")}


def _text(value: Any) -> str:
    # Arena-Hard's settings hold a list of turns, with one entry.
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else ""
