"""The judge's prompt: templates for the system message, the layout of a request, and the scale of each aspect."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from regretless.core.errors import ConfigError, reject
from regretless.core.files import read_text
from regretless.data.columns import Message, Text
from regretless.data.messages import full_text
from regretless.data.prompts import SYSTEM_LINES

ShownSystem = Literal["own", "all", "none"]
"""Which of a prompt's system messages the judge receives as part of the instruction."""
ASPECTS = ("instruction_following", "helpfulness", "honesty", "truthfulness")
"""Aspects whose scale is part of this package."""
PROBE_CODE, PROBE_INSTRUCTION, PROBE_GUIDELINE = "c0de", "an instruction", "a guideline"
PROBE_TEXTS = ("the first text", "the second text")


@dataclass(frozen=True)
class Aspect:
    """One quality to rate."""

    name: str
    guideline: str
    """Criteria and scale, as the judge receives them."""
    has_types: bool
    """True if the judge also names types of merit or fault."""
    not_applicable: bool
    """True if N/A is a valid rating."""


class JudgePrompt:
    """The messages of a request, rendered from two templates.

    Variables of the layout: `instruction`, `completions` (the texts in random order), `aspect_guideline`, `identifier`
    (defined for aspects with types), `not_applicable`, and `code`, which marks where texts begin and end, and which
    output blocks are genuine.
    """

    def __init__(self, system: str | None, layout: str | None, shown_system: ShownSystem = "own") -> None:
        """system, layout: template files; this package's own if None. shown_system: see `as_instruction`.
        Raises ConfigError for a layout that omits something required."""
        self._shown_system = shown_system
        self._system = Template("system", system).render()
        self._layout = Template("layout", layout)
        for has_types in (False, True):
            rendered = self._user(
                PROBE_INSTRUCTION, PROBE_TEXTS, Aspect("", PROBE_GUIDELINE, has_types, False), PROBE_CODE
            )
            _check_layout(rendered, self._layout.where)
        self.uses_code = f"[{PROBE_CODE}]" in _headings(rendered)[1]
        """True if the headings of output blocks contain the code."""

    def messages(self, prompt: Text, texts: Sequence[str], aspect: Aspect, code: str) -> list[Message]:
        """Messages that ask for ratings of these texts, in this order, as answers to a prompt."""
        instruction = as_instruction(prompt, self._shown_system)
        user: Message = {"role": "user", "content": self._user(instruction, texts, aspect, code)}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

    def _user(self, instruction: str, texts: Sequence[str], aspect: Aspect, code: str) -> str:
        return self._layout.render(
            instruction=instruction,
            completions=list(texts),
            aspect_guideline=aspect.guideline,
            not_applicable=aspect.not_applicable,
            code=code,
            **({"identifier": True} if aspect.has_types else {}),
        )


def load_aspects(
    names: Sequence[str], rubrics: Mapping[str, str], typed: Sequence[str], not_applicable: Sequence[str]
) -> list[Aspect]:
    """Aspects by name, with guidelines from `rubrics` (name → file) or from this package.

    Raises ConfigError if a file cannot be used.
    """
    return [
        Aspect(name, Template(name, rubrics.get(name)).render(), name in typed, name in not_applicable)
        for name in names
    ]


def as_instruction(prompt: Text, shown_system: ShownSystem = "own") -> str:
    """The instruction in a prompt, as one text: that of the message if the conversation has one, else every message
    with its role. Tool calls and reasoning are part of it (see `full_text`).

    shown_system: which system messages are included. `own`: all but those of this package's templates, which sampling
    added to the prompt; `all`; `none`.
    """
    if isinstance(prompt, str):
        return prompt
    included = [
        message for message in prompt if message["role"] != "system" or _is_shown(message, shown_system)
    ] or prompt
    if len(included) == 1:
        return full_text(included[0])
    return "\n\n".join(f"[{message['role']}]\n{full_text(message)}" for message in included)


def _is_shown(system: Message, shown_system: ShownSystem) -> bool:
    return shown_system == "all" or (shown_system == "own" and system["content"] not in SYSTEM_LINES.values())


class Template:
    """A Jinja template from a file, or of this package by name. Raises ConfigError if it cannot be used."""

    def __init__(self, name: str, path: str | None) -> None:
        self.where = path or f"{name}.jinja"
        try:
            packaged = resources.files("regretless.labeling").joinpath(f"rubrics/{name}.jinja")
            source = packaged.read_text("utf-8") if path is None else read_text(Path(path).expanduser())
            # Sandboxed, because a template may come with somebody else's recipe. Nothing is escaped: this is not HTML.
            environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
            self._template = environment.from_string(source)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"template {self.where}: cannot be read ({error}); set it to the path of a text file"
            ) from error
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template {self.where}:{error.lineno}: {error.message}") from error

    def render(self, **values: Any) -> str:
        """The rendered text, without white space at its ends."""
        try:
            return self._template.render(values).strip()
        except jinja2.TemplateError as error:
            allowed = ", ".join(values) or "nothing"
            raise ConfigError(f"template {self.where}: {error}; available variables: {allowed}") from error


def _headings(rendered: str) -> dict[int, str]:
    """Heading lines of output blocks, keyed by the number of the text."""
    return {int(match[1]): match[0] for match in re.finditer(r"output for text (\d+).*", rendered, re.IGNORECASE)}


def _check_layout(rendered: str, where: str) -> None:
    """Reject a layout that omits something required, before any paid request."""
    parts = (PROBE_INSTRUCTION, *PROBE_TEXTS, PROBE_GUIDELINE)
    missing = [part for part in parts if part not in rendered]
    problems = [f"{', '.join(missing)} missing in the result; show instruction, completions and aspect_guideline"]
    problems = problems if missing else []
    if (
        not {1, 2} <= set(_headings(rendered))
        or re.search(r"^[^\w\n]*rating\W*:", rendered, re.IGNORECASE | re.MULTILINE) is None
    ):
        problems.append(
            "ask for a block for each text, headed '#### Output for Text 1' and so on, with a line 'Rating:'"
        )
    reject(f"template {where}", problems)
