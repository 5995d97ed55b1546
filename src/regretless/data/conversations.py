"""Responses of several messages: which parts of their text the model wrote, and which it only read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from regretless.core.errors import DataError
from regretless.data.codec import WITHOUT_MARKS, Codec, parsed
from regretless.data.columns import Message, Text
from regretless.data.messages import CLOSE, OPEN, REASONING, is_empty, without_thoughts
from regretless.modeling.chat_templates import TEMPLATE_SETTING

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Marks, in a chat template, what the assistant writes (transformers' `return_assistant_tokens_mask`)."""
EMPTY = re.compile(r"\s*<think>\s*</think>\s*")
"""A block of reasoning without any, which some templates write for a message that has none."""
AROUND = 24
"""Characters of a text that a message shows."""


class ResponsePart(NamedTuple):
    """Consecutive text of a response."""

    text: str
    own: bool
    """True if the model wrote it: it is trained on. False for what lies between its messages, which is context."""


def response_parts(
    codec: Codec, prompt: Text, response: Text, arguments: str | None = None, *, sampled: bool = False
) -> tuple[ResponsePart, ...]:
    """The text that follows a prompt in the chat template, up to the end of the assistant's last message, in parts.

    A text, and a single message without tool calls, is one part, as it is: templates trim what a model generated. So is
    the last message of several. But a `<think>` that the prompt ends with is not repeated, and a header that the
    template writes before answers (`Codec.lead`) precedes it as context, or as a part of its first word if it is a
    space, unless the response is `sampled`: its tokens are then known, and are all that followed the prompt.

    The other messages are written by the template, with `arguments` (JSON): their parts are those that it marks by
    `{% generation %}`. In a template without marks, a message begins where the prompt for it ends, and ends with the
    first end-of-sequence token after that. All end with this token, marked or not. An empty block of reasoning that the
    template adds is context: texts that are taken as they are have none. Reasoning that `enable_thinking` turns off is
    left out of all.

    Raises DataError if the template cannot write the response, if it leaves out a message's reasoning, if it writes its
    beginning differently when more messages follow, if it does not tell where a message ends, or if nothing is left
    without reasoning.
    """
    if isinstance(response, str):
        if isinstance(prompt, str):
            return (ResponsePart(response, True),)
        response = [{"role": "assistant", "content": response}]
    values = parsed(arguments)
    messages = codec.messages(response[: _last_own(response) + 1], values)
    if is_empty(messages) and not is_empty(response):
        raise DataError("nothing but reasoning, which enable_thinking=false leaves out; remove the row")
    as_it_is = not ("tool_calls" in messages[-1] or REASONING[0] in messages[-1])
    if not sampled and not isinstance(prompt, str):
        _check_special(codec, messages, codec.lead(values))
    last = _as_it_is(codec, prompt, messages[-1]["content"], values, sampled) if as_it_is else ()
    if len(messages) == 1 and as_it_is:
        return last
    if isinstance(prompt, str):
        raise DataError("messages with tool calls, reasoning or others between need a prompt of messages, not a text")
    start = codec.render(prompt, generate=True, arguments=values)
    template = codec.template(values)
    spans = _marked if GENERATION.search(template) else _between_prompts
    whole, spans_of_model = spans(codec, prompt, messages, values, as_it_is)
    if not whole.startswith(start):
        raise DataError(_disagreement(start, whole, 0))
    _check_reasoning_is_written(codec, prompt, messages[:-1] if as_it_is else messages, values)
    thinks = any(
        REASONING[0] in message or OPEN in message["content"] or CLOSE in message["content"] for message in messages
    )
    parts: list[ResponsePart] = []
    until = len(start)
    for first, end in spans_of_model:
        first = max(first, until)
        if not thinks and (block := EMPTY.match(whole, first, end)):
            first = block.end()
        if not whole[first:end].strip():
            continue  # a mark around nothing, or around the line break behind an end token
        end = _message_end(codec, whole, first, end)
        if first > until:
            parts.append(ResponsePart(whole[until:first], False))
        # Recorded ids are compared with the text as the model wrote it.
        parts.append(ResponsePart(whole[first:end].translate(WITHOUT_MARKS) if sampled else whole[first:end], True))
        until = end
    if as_it_is:
        parts += [ResponsePart(whole[until:], False), *last]
    return tuple(parts)


def _check_special(codec: Codec, messages: Sequence[Message], lead: str) -> None:
    """Raise DataError if the assistant's texts spell a special token, before the end."""
    for message in messages:
        said = (message["content"], message.get(REASONING[0], "")) if message["role"] == "assistant" else ()
        for text in said:
            if (special := codec.special_in_answer(text, lead)) is not None:
                raise DataError(
                    f"its text spells the special token {special}, which would be trained as that token; if the model "
                    "wrote it, give token ids, else remove it"
                )


def opening_of(codec: Codec, prompt: Text, arguments: Mapping[str, Any]) -> str:
    """The beginning of a block of reasoning, or an empty block, that a prompt ends with, or nothing."""
    return codec.opening(arguments) if _follows_prompt(prompt) else ""


def _follows_prompt(prompt: Text) -> bool:
    """Whether a response is a message of its own after these ones; it may also go on with the assistant's."""
    return not isinstance(prompt, str) and prompt[-1]["role"] != "assistant"


def _as_it_is(
    codec: Codec, prompt: Text, content: str, arguments: Mapping[str, Any], sampled: bool
) -> tuple[ResponsePart, ...]:
    """An answer that the template does not write, behind what it writes before answers and this one lacks."""
    content = _behind(opening_of(codec, prompt, arguments), content)
    lead = codec.lead(arguments) if _follows_prompt(prompt) and not sampled else ""
    if not lead or (lead.strip() and content.startswith(lead.strip())):
        return (ResponsePart(content, True),)
    if not lead.strip(" "):
        return (ResponsePart(lead + content.lstrip(" "), True),)
    return ResponsePart(lead, False), ResponsePart(content, True)


def _behind(opening: str, content: str) -> str:
    """A content behind the beginning of its block of reasoning, if the prompt ends with that."""
    text = content.lstrip()
    if not opening or CLOSE in opening or not text.startswith(OPEN):
        return content
    return text.removeprefix(opening if text.startswith(opening) else OPEN)


def _last_own(response: Sequence[Message]) -> int:
    assistant = [index for index, message in enumerate(response) if message["role"] == "assistant"]
    if not assistant:
        raise DataError("a response without a message of the assistant: nothing in it was generated")
    return assistant[-1]


Spans = tuple[str, list[tuple[int, int]]]
"""A text, and the start and end of each part of it that the model wrote."""


def _marked(
    codec: Codec, prompt: Sequence[Message], messages: Sequence[Message], values: Mapping[str, Any], as_it_is: bool
) -> Spans:
    """Parts that the template marks, behind the prompt. Raises DataError if there are fewer than messages."""
    before = messages[:-1] if as_it_is else messages
    whole, marks = codec.render_marked([*prompt, *before], generate=as_it_is, arguments=values)
    start = len(codec.render(prompt, generate=True, arguments=values))
    spans = [(first, end) for first, end in marks if whole[max(first, start) : end].strip()]
    wanted = sum(message["role"] == "assistant" for message in before)
    if len(spans) < wanted:
        raise DataError(
            f"the chat template marks {len(spans)} part(s) as generated, where the response has {wanted} messages of "
            "the assistant; correct its {% generation %} marks"
        )
    return whole, spans


def _between_prompts(
    codec: Codec, prompt: Sequence[Message], messages: Sequence[Message], values: Mapping[str, Any], as_it_is: bool
) -> Spans:
    """Parts from where the prompt for each message ends to its end token. Raises DataError without such places."""

    def asked(count: int) -> str:
        # Each is the prompt that the model received before it wrote message number `count`.
        return codec.render([*prompt, *messages[:count]], generate=True, new_turn=count > 0, arguments=values)

    assistant = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    last = asked(assistant[-1])
    whole = last if as_it_is else codec.render([*prompt, *messages], generate=False, arguments=values)
    starts = []
    for count in assistant:
        start = last if count == assistant[-1] else asked(count)
        if not whole.startswith(start):
            raise DataError(_disagreement(start, whole, count))
        starts.append(len(start))
    spans = list(pairwise(starts)) if as_it_is else [*pairwise(starts), (starts[-1], len(whole))]
    for count, (first, end) in zip(assistant, spans, strict=False):
        if not any(text in whole[first:end] for text in codec.end_texts):
            raise DataError(
                f"the chat template writes no end-of-sequence token ({', '.join(codec.end_texts)}) after message "
                f"{count + 1}, so where it ends is unknown; use a template with {{% generation %}} marks"
            )
    return whole, spans


def _check_reasoning_is_written(
    codec: Codec, prompt: Sequence[Message], messages: Sequence[Message], values: Mapping[str, Any]
) -> None:
    """Raise DataError if the text of a response's messages is the same without the reasoning of one of them."""

    def written(response: Sequence[Message]) -> str:
        return codec.render([*prompt, *response], generate=False, arguments=values)

    for index, message in enumerate(messages):
        content = message["content"]
        if REASONING[0] not in message and (CLOSE not in content or EMPTY.match(content)):
            continue
        bare = without_thoughts([message], {"enable_thinking": False})
        if bare != [message] and written(messages) == written([*messages[:index], *bare, *messages[index + 1 :]]):
            raise DataError(
                f"message {index + 1}: the chat template leaves out its reasoning, with which the model wrote it; put "
                "the messages before a later question into the prompt, or set enable_thinking=false in "
                "chat_template_kwargs"
            )


def _message_end(codec: Codec, whole: str, first: int, end: int) -> int:
    """Where a message in a text ends: behind its first end token, which a template may mark or not.

    What a template writes behind the token, such as a line break, no model gets to write.
    """
    ends = [start + len(spelled) for spelled in codec.end_texts if (start := whole.find(spelled, first, end)) >= 0]
    behind = [end + len(spelled) for spelled in codec.end_texts if whole.startswith(spelled, end)]
    return min(ends) if ends else max(behind, default=end)


def _disagreement(start: str, whole: str, count: int) -> str:
    at = next(_differing(start, whole), min(len(start), len(whole)))
    expected, actual = (text[max(0, at - AROUND) : at + AROUND] for text in (start, whole))
    return (
        f"the chat template writes what precedes message {count + 1} differently when more messages follow: the model "
        f"received {expected!r}, and the whole response has {actual!r}; set {TEMPLATE_SETTING} to one that "
        "keeps its beginning, or train on each message by itself"
    )


def _differing(one: str, other: str) -> Iterator[int]:
    return (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
