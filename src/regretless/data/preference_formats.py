"""Columns of a preference row, as in public data sets: read, checked, rejected with a reason."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np

from regretless.data.columns import OF_TOKENS, SIDES, ReleasedColumns, Side, SideName, Text
from regretless.data.labeled_pairs import hint
from regretless.data.messages import check_is_text, from_json, is_empty, only_text, read_message
from regretless.data.schema import (
    IN_RELEASE,
    OF_SCORE,
    OF_SIDE,
    Schema,
    Unusable,
    check_continuations,
    check_lengths,
    check_numbers,
    check_top,
    given_numbers,
    name_or,
    quoted,
)
from regretless.data.steps import check_steps

T = TypeVar("T")
PROMPT_COLUMNS = ("prompt", "instruction", "question", "conversations")
"""Default columns of the prompt; `instruction` is joined with a non-empty `input`."""
OF_PROMPT = {"instruction": ("context",), "question": ("input", "context")}
"""Columns that belong to the prompt beside one that was not named, in some data sets. They are not read."""
LIKELY_PROMPTS = ("query", "problem", "input", "inputs", "user", "context")
"""Columns that hold the prompt in some data sets. They are not read unless `prompt_key` names them."""
ASKING = ("system", "developer", "user")
"""Roles of a first message that belongs to the prompt."""
COMPLETION_COLUMNS = ("chosen", "completion", "response")
"""Default columns of the text to imitate, if rejected responses are not required."""
WHOLE_COLUMNS = ("messages", "conversations")
"""Columns of whole conversations, if there is neither a text to imitate nor a rejected response."""
MARKS = ("label", "kto_tag")
"""Columns that mark a single response as good or bad (TRL's and LLaMA-Factory's data for KTO)."""
SHORT = 4
"""Characters of a prompt of which nothing is concluded if responses begin with it."""
EQUAL = "chosen and rejected are equal: the pair expresses no preference"


def _schema(side: SideName, types: Mapping[str, Any]) -> Schema:
    return Schema(types, {name: f"score_{side}" if name == "score_of" else f"{side}_{name}" for name in types})


SIDE_SCHEMAS = {side: _schema(side, OF_SCORE | OF_SIDE | IN_RELEASE) for side in SIDES}
SCORE_SCHEMAS = {side: _schema(side, OF_SCORE) for side in SIDES}


@dataclass(frozen=True)
class Keys:
    """Names of the columns, and whether a rejected side is required."""

    prompt: str | None
    chosen: str
    rejected: str
    need_rejected: bool


def check_cuts(sides: Mapping[SideName, Side], kind: str, prefix_tokens: int | None) -> None:
    """Raise Unusable if what is said of where sides end, or of the tokens that they share, contradicts the sides."""
    for name, side in sides.items():
        tokens, place = len(side.token_ids or ()), f"{name}_cut_at: {side.cut_at}"
        if side.cut_at is not None and side.complete:
            raise Unusable(f"{place} beside {name}_complete true: a side that is cut is not complete")
        if side.cut_at is not None and side.cut_at >= tokens:
            raise Unusable(f"{place}, of {tokens} token ids: expected fewer; leave it out for a side that is not cut")
        if prefix_tokens is not None and prefix_tokens >= (length := side.length if side.token_ids else 0):
            raise Unusable(
                f"prefix_tokens: {prefix_tokens}, and {name} has {length} token ids: expected more, because the "
                "first ones are context"
            )
    beginnings = [(side.token_ids or [])[:prefix_tokens] for side in sides.values()]
    if prefix_tokens is not None and any(beginning != beginnings[0] for beginning in beginnings):
        raise Unusable(f"prefix_tokens: {prefix_tokens}, and the sides do not begin with so many equal tokens")
    if kind == "masked" and "rejected" in sides and sides["rejected"].complete:
        raise Unusable("rejected_complete: true in a row of kind masked, whose rejected side is cut by definition")


def check_no_repetition(prompt: Text, sides: Mapping[SideName, Side]) -> None:
    """Raise Unusable if both sides begin with the prompt, and so would have it twice; tokens tell what was generated.

    A single word does not count: to `Hello`, many answer `Hello`.
    """
    asked = (prompt if isinstance(prompt, str) else prompt[-1]["content"]).strip()
    texts = [side.text if isinstance(side.text, str) else side.text[0]["content"] for side in sides.values()]
    if len(asked) < SHORT or asked.isalpha() or any(side.pieces is not None for side in sides.values()):
        return
    if all(text.lstrip().startswith(asked) for text in texts):
        raise Unusable(
            "chosen and rejected: both begin with the prompt, which precedes them anyway; remove it from both (texts "
            "without a column for the prompt have it as their common beginning)"
        )


OPENAI = {"chosen": "preferred_output", "rejected": "non_preferred_output"}
"""Columns of OpenAI's preference fine-tuning format, beside `input: {messages, tools, parallel_tool_calls}`."""


def from_openai(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of OpenAI's preference format with TRL's columns; any other row as it is.

    `parallel_tool_calls` is no input of a chat template, and has no effect. Raises Unusable for an input that is none.
    """
    if row.get(OPENAI["chosen"]) is None:
        return row
    asked = from_json(row.get("input"), "input", dict)
    if asked is None or asked.get("messages") is None:
        raise Unusable(f"input: expected an object with messages beside {OPENAI['chosen']}, got {quoted(asked)}")
    rest = {name: value for name, value in row.items() if name not in ("input", *OPENAI.values())}
    sides = {side: row[column] for side, column in OPENAI.items() if row.get(column) is not None}
    tools = {} if asked.get("tools") is None else {"tools": asked["tools"]}
    return {**rest, **sides, **tools, "prompt": asked["messages"]}


# ---- texts ----------------------------------------------------------------------------------------------------------


def read_texts(row: Mapping[str, Any], keys: Keys) -> tuple[Text, Text, Text | None]:
    """Prompt, chosen and rejected of a row, with an implicit prompt split off from the two. Raises Unusable."""
    prompt = _prompt(row, keys.prompt)
    if not keys.need_rejected and row.get(keys.chosen) is None and row.get("chosen") is None:
        _check_worth_imitating(row)
    chosen = _text(row, *((keys.chosen,) if keys.need_rejected else (keys.chosen, *COMPLETION_COLUMNS)))
    if chosen is None and not keys.need_rejected and (messages := _text(row, *WHOLE_COLUMNS)) is not None:
        chosen, prompt = messages, None
    rejected = _text(row, keys.rejected)
    missing = [name for name, text in ((keys.chosen, chosen), (keys.rejected, rejected)) if text is None]
    if chosen is None or (keys.need_rejected and rejected is None):
        advice = hint(row) if len(missing) == 2 else ""
        if advice is None and (marks := [name for name in MARKS if row.get(name) is not None]):
            advice = f"single responses with a {marks[0]} are unpaired data: give each row a good and a bad response"
        if advice is None:
            advice = "chosen_key names a column with the better response in every row, rejected_key one with the worse"
        more = f"; {advice}" if advice else ""
        raise Unusable(f"missing column(s) {', '.join(missing)}; found {_present(row)}{more}")
    implicit = prompt is None
    prompt, chosen, rejected = _split_prompt(prompt, chosen, rejected, keys)
    if implicit and isinstance(prompt, str):
        _check_implicit(prompt, row, keys)
    prompt = _with_system(prompt, row, keys)
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if text is None or (name == "rejected" and not keys.need_rejected):
            continue
        if isinstance(text, list) and text and text[0]["role"] not in ("assistant", "tool"):
            raise Unusable(f"{name}: expected it to start with an assistant message, got {text[0]['role']}")
        if is_empty(text):
            raise Unusable(f"{name}: empty completion")
    return prompt, chosen, rejected if keys.need_rejected else None


def _present(row: Mapping[str, Any]) -> str:
    """The columns of a row, those without a value marked."""
    return ", ".join(name if row[name] is not None else f"{name} (null)" for name in sorted(row)) or "none"


def _check_implicit(prompt: str, row: Mapping[str, Any], keys: Keys) -> None:
    """Raise Unusable if a column that is not read looks like the prompt, which both sides then only seem to repeat."""
    for name in LIKELY_PROMPTS:
        text = row.get(name)
        if name not in (keys.chosen, keys.rejected) and isinstance(text, str) and text.strip() not in prompt:
            raise Unusable(
                f"no prompt column, and {name} is not in the common beginning of chosen and rejected, {prompt!r:.40}; "
                f"name the prompt (prompt_key={name}), or remove {name} if it is none"
            )


def _with_system(prompt: Text, row: Mapping[str, Any], keys: Keys) -> Text:
    """The prompt with the text of the column `system` as its first message. Raises Unusable if it would be lost."""
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or "system" in _names(keys.prompt):
        return prompt
    if isinstance(prompt, str):
        if system.strip() in prompt:
            return prompt
        raise Unusable(
            "system: not read beside a prompt that is a text; write messages, or join the columns "
            f"(prompt_key=system,{keys.prompt or 'prompt'}), or remove it"
        )
    if prompt[0]["role"] != "system":
        return [{"role": "system", "content": system}, *prompt]
    if prompt[0]["content"].strip() != system.strip():
        raise Unusable("system: another text than that of the prompt's system message; remove one of them")
    return prompt


def _names(key: str | None) -> list[str]:
    return [] if key is None else [name.strip() for name in key.split(",")]


def _check_worth_imitating(row: Mapping[str, Any]) -> None:
    """Raise Unusable for a single response that its row marks as bad, or that is not known to be right."""
    for name in MARKS:
        value = row.get(name)
        if value is None:
            continue
        good = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(good, bool | int | float | np.bool_ | np.number) or good not in (0, 1):
            raise Unusable(
                f"{name}: expected true or false (is the response a good one?), got {value!r:.40}; remove the column "
                "if it means something else"
            )
        if not good:
            raise Unusable(f"{name}: false; supervised training imitates, so it uses only good responses")
    if row.get("verdict") in ("wrong", "unknown"):
        raise Unusable(f"verdict: {row['verdict']}; supervised training imitates, so it uses only correct responses")


def _prompt(row: Mapping[str, Any], key: str | None) -> Text | None:
    if key is not None and "," not in key:
        prompt = _text(row, key)
        if prompt is None:
            raise Unusable(f"missing column(s) {key}; found {_present(row)}")
        return prompt
    if row.get("history") is not None and len(row["history"]) and "history" not in _names(key):
        raise Unusable("history: earlier turns beside the prompt are not read; write the prompt as messages")
    if key is None:
        key = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), "prompt")
        for name in OF_PROMPT.get(key, ()):
            if isinstance(text := row.get(name), str) and text.strip() and text.strip() not in str(row[key]):
                raise Unusable(
                    f"{name}: not read beside {key}; name both (prompt_key={name},{key}), or {key} alone if it is no "
                    "part of the prompt"
                )
        if key != "instruction":
            return _text(row, key)
        key = "instruction,input"
    parts = [row.get(name) for name in _names(key)]
    return "\n".join(part for part in parts if isinstance(part, str) and part) or None


def _text(row: Mapping[str, Any], *names: str) -> Text | None:
    """First of the columns that exists, checked to be text or messages; a single message is a list of one."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return _of(name, check_is_text, value)
        if isinstance(value, Mapping) and ("role" in value or "from" in value):
            return [_of(name, read_message, value)]
        if value is not None:
            return [_of(name, read_message, item) for item in _list(value, name, "text or a list of messages")]
    return None


def _of(name: str, read: Callable[[Any], T], value: Any) -> T:
    """A value of a column as `read` returns it. Raises Unusable with the column's name."""
    try:
        return read(value)
    except Unusable as reason:
        raise Unusable(f"{name}: {reason}") from None


def _list(value: Any, name: str, expected: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise Unusable(f"{name}: expected {expected}, got {type(value).__name__} {quoted(value)}")
    return list(value)


def _split_prompt(
    prompt: Text | None, chosen: Text, rejected: Text | None, keys: Keys
) -> tuple[Text, Text, Text | None]:
    """Prompt and completions, whether the two sides are completions or whole conversations or texts."""
    if rejected is not None and isinstance(chosen, str) != isinstance(rejected, str):
        raise Unusable("chosen and rejected: expected both texts or both messages")
    whole = isinstance(chosen, list) and (
        chosen[: len(prompt)] == prompt if isinstance(prompt, list) else chosen[0]["role"] in ASKING
    )
    if prompt is not None and not whole:
        if isinstance(prompt, str) and isinstance(chosen, list):
            prompt = [{"role": "user", "content": prompt}]
        return prompt, chosen, rejected
    if isinstance(prompt, list):
        length = len(prompt)
        if rejected is not None and rejected[:length] != prompt:
            raise Unusable("rejected: expected it to begin with the messages of the prompt, as chosen does")
        return prompt, chosen[length:], None if rejected is None else rejected[length:]
    if rejected is None:
        return *_last_answer(chosen, keys), None
    if chosen == rejected:
        raise Unusable(EQUAL)
    length = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and isinstance(rejected, str):
        length = _between_words(chosen, rejected, length)
    if length == 0:
        raise Unusable(
            "no prompt column, and chosen and rejected have no common beginning that could be the prompt; prompt_key "
            "names another column"
        )
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if length >= len(text):
            raise Unusable(f"{name}: empty completion: it is the beginning of the other side")
    if prompt is not None and not _is_repeated(prompt, chosen[:length]):
        raise Unusable(
            "prompt: a text that is in no message of the conversation that chosen and rejected begin with, which would "
            "replace it; write it as a message of that conversation, or remove it"
        )
    return chosen[:length], chosen[length:], rejected[length:]


def _last_answer(chosen: Text, keys: Keys) -> tuple[Text, Text]:
    """A conversation divided before its last answer. Raises Unusable."""
    if isinstance(chosen, str):
        raise Unusable(f"missing column(s) {keys.prompt or 'prompt'}; it is required without a rejected side")
    if len(chosen) == 1:
        raise Unusable("no prompt column, and only one message, so the prompt is missing")
    # With tool calls and their outputs between, an answer is all that follows its question.
    asked = max((index for index, message in enumerate(chosen[:-1]) if message["role"] == "user"), default=None)
    start = len(chosen) - 1 if asked is None else asked + 1
    return chosen[:start], chosen[start:]


def _is_repeated(prompt: str, messages: Text) -> bool:
    """Whether a text is in one of the messages, or has one of them in it, as a transcript does; spaces do not count."""
    text = " ".join(prompt.split())
    contents = [" ".join(message["content"].split()) for message in messages if not isinstance(message, str)]
    return any(content and (text in content or content in text) for content in contents)


def _between_words(chosen: str, rejected: str, length: int) -> int:
    """Where the responses of two texts begin that are equal up to `length`: not inside a word (`th` of this and the).

    Nor behind a space: a word and the space before it are one token in most vocabularies.
    """
    while _is_of_word(chosen[length - 1 : length]) and any(
        _is_of_word(text[length : length + 1]) for text in (chosen, rejected)
    ):
        length -= 1
    return length - 1 if chosen[:length].endswith(" ") else length


def _is_of_word(character: str) -> bool:
    # Wide letters, those of Chinese and Japanese, are no parts of words between spaces.
    return character.isalnum() and unicodedata.east_asian_width(character) not in ("W", "F")


# ---- tokens, log-probabilities, scores ------------------------------------------------------------------------------


def read_side(row: Mapping[str, Any], name: SideName, text: Text, default_id: str, responses: dict[str, Side]) -> Side:
    """A side of a row. Raises Unusable.

    default_id: its id if the row has none; responses: those read so far, by id, whose tokens equal responses share.
    """
    columns = SIDE_SCHEMAS[name].check(row)
    ids, tokens, logps, column = _tokens(columns, name)
    pieces = ids if ids is not None else tokens
    numbers = columns["token_numbers"]
    problem = (
        check_lengths(column, pieces, logps)
        or check_lengths(f"{name}_token_bytes", pieces, columns["token_bytes"])
        or check_numbers(f"{name}_token_numbers", pieces, numbers)
        or check_top(f"{name}_top_logps", pieces, columns["top_logps"])
        or check_continuations(f"{name}_continuations", ids, columns["continuations"])
        or check_steps(columns, only_text(text), f"{name}_")
    )
    if problem:
        raise Unusable(problem)
    values = {field: columns[field] for field in OF_SIDE} | {
        "id": name_or(columns["id"], default_id),
        "token_ids": ids,
        # Ids name tokens exactly; strings are for data without ids.
        "tokens": tokens if ids is None else None,
        "logps": logps,
        "token_numbers": given_numbers(numbers),
        "complete": False if columns["mask_len"] else columns["complete"],
        "score": _score(columns, row.get("metadata"), name),
    }
    if values["cut_at"] is not None and values["complete"] is None:
        values["complete"] = False
    side = Side(text=text, **values)
    # A response occurs in several pairs: its tokens, most of the memory, are stored once.
    same = responses.setdefault(str(side.id), side)
    shared = {field: getattr(same, field) for field in OF_TOKENS if getattr(same, field) == getattr(side, field)}
    return replace(side, **shared)


def _tokens(
    columns: Mapping[str, Any], side: SideName
) -> tuple[list[int] | None, list[str] | None, list[float] | None, str]:
    """Ids, token strings and log-probabilities of a side, and the column of the last."""
    released: ReleasedColumns | None = columns["logprob_with_token"]
    if released is not None and columns["logps"] is None:
        return released.token_ids, released.tokens, released.logprobs, f"{side}_logprob_with_token"
    return columns["token_ids"], columns["tokens"], columns["logps"], f"{side}_logps"


def _score(columns: Mapping[str, Any], metadata: Any, side: SideName) -> float | None:
    """Score of a side, from its columns or from those in `metadata`. Raises Unusable."""
    try:
        inner = SCORE_SCHEMAS[side].check(metadata) if isinstance(metadata, dict) else {}
    except Unusable as reason:
        raise Unusable(f"metadata.{reason}") from None
    values = (level.get(name) for level in (columns, inner) for name in ("score", "score_of", "rating"))
    return next((value for value in values if value is not None), None)
