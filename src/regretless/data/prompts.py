"""Prompts with their gold answers: from the hub, a data set folder, or a JSONL, JSON or parquet file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from regretless.core.errors import DataError, error_place
from regretless.core.paths import PathSetting
from regretless.core.settings import Section, Seed
from regretless.data.columns import Message, Text, text_key
from regretless.data.messages import check_is_text, read_message, read_template_arguments
from regretless.data.prompt_templates import PLAIN, TEMPLATES, TextPrompts
from regretless.data.rejected_rows import Refusal, of_one_kind, other_kind
from regretless.data.rows import read_rows
from regretless.data.schema import PROMPT, GoldAnswer, Unusable, read_gold
from regretless.data.sources import open_source

TEMPLATE = "prompt_template"
"""Column in which `prompt_columns` writes what a source's `template` says."""


class PromptSource(Section):
    """Where prompts come from and which columns hold them."""

    dataset: PathSetting
    """Prompts to read: a hub id, a folder of a data set, or a .jsonl, .json, .csv or .parquet file."""
    split: str = "train"
    """Split to read, of a hub data set or a folder."""
    subset: str | None = None
    """Configuration of a hub data set, for example `main` of GSM8K."""
    prompt_column: str = "prompt"
    """Column with the prompt, a text or a list of messages."""
    answer_column: str | None = None
    """Column with the gold answer: a text or a number; or a list or an object, which the verifier gets as it is."""
    limit: int | None = Field(default=None, ge=1)
    """Most rows to read; all by default."""
    shuffle: Seed | None = None
    """Random seed for the order of the rows; the data set's own order by default. Together with `limit` it gives a
    random subset."""
    template: Annotated[str, AfterValidator(TEMPLATES.check)] | None = None
    """Template that makes a prompt of a text: math, assistant, user, plain, or the name of a plug-in. By default a text
    is asked as a user message (`user`) where the models have a chat template, and as it is (`plain`) where they have
    none or it has special tokens of the chat template already."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt, its gold answer, and the other columns of its row."""

    prompt_id: str
    prompt: Text
    answer: GoldAnswer | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0
    """1-based line (or row) of its source, for messages."""
    token_ids: tuple[int, ...] | None = None
    """The prompt as the model receives it, where that is more than its text: with the beginning of a response."""
    template: str | None = None
    """The template that settings name, or the stage `prompts` was told to use."""


def prompt_columns(row: PromptRow) -> dict[str, Any]:
    """A prompt as a row of a file that `read_prompts` reads again, with its template and without other columns."""
    named = {TEMPLATE: row.template} if row.template else {}
    return {"prompt_id": row.prompt_id, "prompt": row.prompt, "answer": row.answer, **named}


def load_prompts(source: PromptSource, setting: str = "", texts: TextPrompts = PLAIN) -> list[PromptRow]:
    """All prompts of a source, in order. Raises DataError if a row cannot be used: no prompt may be lost unnoticed."""
    prompts, refused = read_prompts(source, setting, texts)
    if refused:
        shown = [str(refusal) for refusal in refused[:20]]
        raise DataError("\n  - ".join([f"{source.dataset}: {len(refused)} row(s) cannot be used", *shown]))
    return prompts


def read_prompts(
    source: PromptSource, setting: str = "", texts: TextPrompts | None = PLAIN
) -> tuple[list[PromptRow], list[Refusal]]:
    """Prompts of a source, in order, and the rows that cannot be used.

    setting: prefix of the source's settings in the user's configuration, for messages.
    texts: what becomes of texts without a template; None leaves that open, and texts beside conversations.
    A prompt's id is its row's `prompt_id` or `id`, else a hash of its prompt; a repeated id gets a number as suffix.
    Raises DataError if a column is in no row, there are no rows, or the data set cannot be loaded.
    """
    prompts: list[PromptRow] = []
    refused: list[Refusal] = []
    taken: set[str] = set()
    columns: set[str] = set()
    for number, row in itertools.islice(_rows(source), source.limit):
        if isinstance(row, Refusal):
            refused.append(row)
            continue
        columns.update(row)
        try:
            prompts.append(_prompt_row(source, number, row, taken))
        except DataError as error:
            refused.append(Refusal(source.dataset, number, str(error), row))
    others: list[PromptRow] = []
    if texts is not None:
        asked = texts.asked(
            [row.prompt if row.template is None else None for row in prompts], source.dataset, f"{setting}template"
        )
        prompts = [replace(row, prompt=prompt or row.prompt) for row, prompt in zip(prompts, asked, strict=True)]
        prompts, others = of_one_kind(prompts, lambda row: (isinstance(row.prompt, str),))
    refused += [Refusal(source.dataset, row.line, other_kind(row.prompt), {"prompt": row.prompt}) for row in others]
    wanted = [name for name in (source.prompt_column, source.answer_column) if name is not None]
    missing = [name for name in wanted if name not in columns]
    if columns and missing:
        raise DataError(
            f"{source.dataset}: no column {', '.join(missing)}; found {', '.join(sorted(columns))}; "
            f"set the right names in {setting}prompt_column and {setting}answer_column"
        )
    if not prompts and not refused:
        raise DataError(f"{source.dataset}: expected at least one row, found none")
    return prompts, refused


def _prompt_row(source: PromptSource, number: int, row: Mapping[str, Any], taken: set[str]) -> PromptRow:
    """Prompt of a row; its id is added to `taken`. Raises DataError with the reason if there is no usable prompt."""
    text = original = _checked(source.prompt_column, row.get(source.prompt_column))
    if source.template is not None:
        if not isinstance(text, str):
            raise DataError(
                f"{source.prompt_column}: template {source.template} needs a text, got messages; remove the template"
            )
        template = TEMPLATES.find(source.template)
        try:
            made = template(text)
        # A plug-in may raise anything.
        except Exception as error:
            raise DataError(f"template {source.template} raised {error_place(error)}") from error
        text = _checked(f"template {source.template}", made)
    try:
        columns = PROMPT.check(row)
        if read_template_arguments(row) is not None:
            raise Unusable(
                "tools, chat_template_kwargs: answers are sampled without them, so that the row would be asked another "
                "question; remove the columns, or write the tools into a system message; model.chat_template_kwargs "
                "holds for all prompts"
            )
        answer = None if source.answer_column is None else read_gold(row, source.answer_column)
    except Unusable as reason:
        raise DataError(str(reason)) from None
    id_of_row = columns["prompt_id"] if columns["prompt_id"] is not None else columns["id"]
    first = text_key(original) if id_of_row is None else str(id_of_row)
    numbered = (f"{first}-{copy}" for copy in itertools.count(2))
    prompt_id = next(name for name in itertools.chain([first], numbered) if name not in taken)
    taken.add(prompt_id)
    used = {source.prompt_column, source.answer_column, TEMPLATE}
    return PromptRow(
        prompt_id=prompt_id,
        prompt=text,
        answer=answer,
        extra={name: content for name, content in row.items() if name not in used},
        line=number,
        template=source.template or row.get(TEMPLATE),
    )


def _checked(name: str, value: Any) -> Text:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{name}: empty")
        try:
            return check_is_text(value)
        except Unusable as reason:
            raise DataError(f"{name}: {reason}") from None
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{name}: expected a text or a list of messages, got {'nothing' if not value else type(value).__name__}"
        )
    messages: list[Message] = []
    for position, message in enumerate(value):
        try:
            messages.append(read_message(message))
        except Unusable as reason:
            raise DataError(f"{name}: message {position}: {reason}") from None
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{name}: the last message is the assistant's, so there is no question to answer")
    return messages


def _rows(source: PromptSource) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    opened = open_source(source.dataset, source.split, source.subset)
    if source.shuffle is None:
        return read_rows(opened) if isinstance(opened, Path) else enumerate(opened, 1)
    # Indices are shuffled, not rows: rows of a data set stay on disk until they are used.
    rows: Sequence[Any] = list(read_rows(opened)) if isinstance(opened, Path) else opened
    places = list(range(len(rows)))
    random.Random(source.shuffle).shuffle(places)
    return (rows[index] if isinstance(opened, Path) else (index + 1, rows[index]) for index in places)
