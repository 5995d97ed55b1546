"""Messages of a conversation with tool calls and reasoning: reading, checks and storage."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regretless.core.errors import DataError
from regretless.core.files import parse_json
from regretless.core.text_cleaning import clean_text, whole_value
from regretless.data.columns import Message, Text
from regretless.data.schema import Unusable, quoted

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, as in transformers; it is kept under the first, which chat templates read."""
PARTS = ("tool_calls", "tool_call_id", "name", REASONING[0])
"""What a message may have besides role and content."""
SPEAKERS = {
    **{"user": "user", "human": "user", "system": "system"},
    **{"assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant"},
}
"""Roles by their names in data sets, in lower case."""
ROLES = SPEAKERS | {name: name for name in ("developer", "tool", "function", "ipython")}
"""The same, with those that chat templates treat in different ways."""
WRITTEN_OUT = re.compile(r"\s*\[\s*\{\s*['\"](?:role|content|from|value)['\"]\s*:.*\}\s*\]\s*", re.DOTALL)
"""A text that may be a list of messages: JSON of it, or how Python prints it."""
UNREADABLE = {
    "function_call": "write it as tool_calls, its present form",
    "audio": "only text is read",
    "images": "only text is read",
    "videos": "only text is read",
    "refusal": "write it into the content",
    "channel": "write what is not the answer as reasoning_content or tool_calls",
    "recipient": "write the call as tool_calls",
}
"""Parts of a message that are never dropped silently, and what to do about each."""


def read_message(item: Any) -> Message:
    """A message: role, content, and of `PARTS` those that it has. Raises Unusable.

    `from` and `value` are read as role and content, and roles by `ROLES`. A content of parts is joined; a message with
    tool calls needs none. Arguments of a tool call are an object, also where they are JSON of one, as in OpenAI's
    format: chat templates write objects. Null entries are dropped, because tables add the entries of all rows to every
    row.
    """
    if not isinstance(item, Mapping):
        raise Unusable(f"expected messages with the texts role and content, got {quoted(item)}")
    item = _from_sharegpt(item)
    for name, remedy in UNREADABLE.items():
        if item.get(name):
            raise Unusable(f"{name}: not read as a part of a message; {remedy}")
    if item.get("weight") == 0:
        raise Unusable("weight: 0 leaves a message out of training, which is not supported; remove the row")
    calls = _calls(item.get("tool_calls"))
    content = _content(item.get("content"))
    if content is None and calls:
        content = ""
    if content is None or not isinstance(item.get("role"), str):
        raise Unusable(f"expected messages with the texts role and content, got {quoted(item)}")
    role = item["role"].strip()
    message: Message = {"role": ROLES.get(role.lower(), role), "content": content}
    if calls:
        message["tool_calls"] = calls
    reasoning = next((item[name] for name in REASONING if item.get(name)), None)
    for name, value in (*((name, item.get(name)) for name in ("tool_call_id", "name")), (REASONING[0], reasoning)):
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise Unusable(f"{name}: expected text, got {quoted(value)}")
        message[name] = value
    if message["role"] != "assistant" and (extra := [name for name in ("tool_calls", REASONING[0]) if name in message]):
        raise Unusable(f"{extra[0]}: expected it in a message of the assistant, got role {message['role']}")
    return message


def check_is_text(text: str) -> str:
    """The text. Raises Unusable if it spells a list of messages, which no chat template would see as messages."""
    if WRITTEN_OUT.fullmatch(text) and all(
        re.search(rf"['\"](?:{names})['\"]\s*:", text) for names in ("role|from", "content|value")
    ):
        raise Unusable("a text that spells a list of messages; give the list itself (json.loads)")
    return text


def _from_sharegpt(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with `from` and `value` instead of a role, with role and content; any other as it is. Raises Unusable.

    Tools have other names and forms in each data set of this kind, so that their messages are refused.
    """
    speaker = item.get("from")
    if speaker is None or item.get("role") is not None:
        return item
    if not isinstance(speaker, str) or speaker.strip().lower() not in SPEAKERS:
        raise Unusable(f"from: expected one of {', '.join(SPEAKERS)}, got {quoted(speaker)}; write role and content")
    return {**item, "role": speaker, "content": item.get("value")}


def _content(content: Any) -> str | None:
    """Text of a content: plain, or joined from parts of type text; None for anything else. Raises Unusable."""
    if isinstance(content, list | tuple | np.ndarray):
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        for part in parts:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Unusable(f"content: expected a text, or parts of type text, got a part {quoted(part)}")
        return "".join(part["text"] for part in parts) if parts else None
    return content if isinstance(content, str) else None


def _calls(stored: Any) -> list[dict[str, Any]]:
    """Tool calls: a list, or JSON of one as this package's tables store it. Raises Unusable."""
    calls = from_json(stored, "tool_calls", list) or []
    read = []
    for number, call in enumerate(calls):
        call = without_nulls(call) if isinstance(call, Mapping) else {}
        function = call.get("function", call)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise Unusable(f"tool_calls: call {number} is {quoted(calls[number])}; expected a function with a name")
        arguments = from_json(function.get("arguments"), f"tool_calls: arguments of {name}", dict) or {}
        call = {"type": "function", **{key: value for key, value in call.items() if key in ("id", "type")}}
        if call["type"] != "function":
            raise Unusable(f"tool_calls: call {number} has type {quoted(call['type'])}; expected function")
        read.append({**call, "function": {"name": name, "arguments": arguments}})
    return read


def from_json(value: Any, name: str, kind: type) -> Any:
    """A value of a kind (dict or list), or of JSON of one; None for nothing. Raises Unusable."""
    given = value
    try:
        value = whole_value(parse_json(value)) if isinstance(value, str) and value else value
    except ValueError as error:
        raise Unusable(f"{name}: expected {kind.__name__} or JSON of one, got {quoted(given)} ({error})") from None
    if value is None or (isinstance(value, str) and value == ""):
        return None
    if isinstance(value, tuple | np.ndarray):
        value = list(value)
    if not isinstance(value, kind):
        raise Unusable(f"{name}: expected {kind.__name__} or JSON of one, got {quoted(given)}")
    return value


def read_template_arguments(row: Mapping[str, Any]) -> str | None:
    """The row's inputs of the chat template besides its messages, as JSON: `chat_template_kwargs`, and `tools` in it.

    Null entries are dropped, because tables add the entries of all rows to every row. Raises Unusable.
    """
    values = from_json(row.get("chat_template_kwargs"), "chat_template_kwargs", dict)
    tools = from_json(row.get("tools"), "tools", list)
    if tools:
        values = {**(values or {}), "tools": tools}
    try:
        values = without_nulls(values)
        return clean_text(json.dumps(values, ensure_ascii=False)) if values else None
    except (TypeError, ValueError, RecursionError):
        raise Unusable("chat_template_kwargs, tools: expected what JSON can hold") from None


def without_nulls(value: Any) -> Any:
    """A value without the null entries of its objects."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple | np.ndarray) else value


def stored_text(text: Text | None) -> Any:
    """A text or conversation as a table's column holds it: tool calls, whose arguments have any form, as JSON."""
    if text is None or isinstance(text, str):
        return text
    return [
        {**message, "tool_calls": clean_text(json.dumps(message["tool_calls"], ensure_ascii=False))}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in text
    ]


def full_text(message: Message) -> str:
    """All that a message says, for a reader: its content, with reasoning before it and tool calls as JSON behind it.

    A tool's output begins with the tool's name and the call's id. A message without these is its content.
    """
    of_tool = ("name", "tool_call_id") if message["role"] == "tool" else ()
    texts = [f"{name}: {message[name]}" for name in of_tool if name in message]
    if reasoning := message.get(REASONING[0]):
        texts.append(f"{OPEN}\n{reasoning}\n{CLOSE}")
    if message["content"]:
        texts.append(message["content"])
    for call in message.get("tool_calls", ()):
        number = {"id": call["id"]} if "id" in call else {}
        texts.append(json.dumps(number | call["function"], ensure_ascii=False))
    return "\n".join(texts)


def parts_of(texts: Sequence[Text | None]) -> tuple[str, ...]:
    """Those of `PARTS` that a message of the texts has."""
    messages = [message for text in texts if isinstance(text, list) for message in text]
    return tuple(name for name in PARTS if any(name in message for message in messages))


def only_text(text: Text) -> str | None:
    """A plain text, or that of a single message of nothing else; None for any other response."""
    if isinstance(text, str):
        return text
    plain = len(text) == 1 and not {"tool_calls", REASONING[0]} & text[0].keys()
    return str(text[0]["content"]) if plain else None


def is_empty(response: Text) -> bool:
    """True if a response says nothing: no text, no tool call, no reasoning by the assistant."""
    if isinstance(response, str):
        return not response.strip()
    assistant = [message for message in response if message["role"] == "assistant"]
    return not any(
        message["content"].strip() or message.get("tool_calls") or message.get(REASONING[0]) for message in assistant
    )


OPEN, CLOSE = "<think>", "</think>"
"""What a block of reasoning begins and ends with."""


def without_thoughts(messages: Sequence[Message], arguments: Mapping[str, Any]) -> list[Message]:
    """Messages without the assistant's reasoning if the template's argument `enable_thinking` is false, else as given.

    Reasoning is `reasoning_content`, or a block `<think>…</think>` at the start of the content. Raises DataError if
    the block has no end.
    """
    if arguments.get("enable_thinking") is not False:
        return list(messages)
    return [_without_thoughts(message) if message["role"] == "assistant" else message for message in messages]


def _without_thoughts(message: Message) -> Message:
    content = message["content"]
    begins = content.lstrip().startswith(OPEN)
    thoughts, end, answer = content.partition(CLOSE)
    if begins and not end:
        raise DataError(
            f"a message of the assistant has {OPEN} and no {CLOSE}, so it was cut within its reasoning, which "
            "enable_thinking=false would leave out; remove the row"
        )
    kept = {name: value for name, value in message.items() if name != REASONING[0]}
    # Where the prompt contains the beginning of the block, the content has its end only.
    has_thoughts = end and (begins or OPEN not in thoughts)
    return {**kept, "content": answer.lstrip() if has_thoughts else content}
