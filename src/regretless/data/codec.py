"""Encoding and decoding of prompts and responses with a tokenizer and its chat template."""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from regretless.core.errors import ConfigError, DataError
from regretless.data.columns import Message, Text
from regretless.data.messages import CLOSE, OPEN, REASONING, without_thoughts
from regretless.modeling.chat_templates import (
    ANSWER,
    QUESTION,
    TEMPLATE_SETTING,
    answer_end,
    mentions,
    rendered,
    template_arguments,
    template_errors,
    template_name,
    templates,
    without_tools,
    written_around_answer,
)
from regretless.modeling.layout import Ids
from regretless.modeling.load import eos_token_ids, probe_ids, tokenizer_fingerprint

Tokenizer = Any
"""A `transformers` tokenizer (the library ships no types)."""
MARK, MARK_END = "\U000f0000", "\U000f0001"
"""Around a special token that is only text, while a template writes it: characters that no text has a use for."""
MARKED = re.compile(f"{MARK}([^{MARK}{MARK_END}]*){MARK_END}|[{MARK}{MARK_END}]")
WITHOUT_MARKS = str.maketrans("", "", MARK + MARK_END)
TEXTS_AT_ONCE = 2048
RESERVED = frozenset(
    {"conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
)
"""Arguments of a chat template that a row cannot set."""
OPENING = re.compile(rf"{OPEN}\s*({CLOSE}\s*)?$")
"""The beginning of a block of reasoning, or an empty block, at the end of a text."""
SYNONYMS = {"developer": "system", "function": "tool", "ipython": "tool"}
"""Other names of a role, for chat templates that do not write messages of that role."""
SWITCHES = re.compile(r"/(?:no_?)?think\b|/system_override\b|reasoning (?:effort|strength)", re.IGNORECASE)
"""What some chat templates take out of a content, or write in other words, because it sets how they write the rest."""
END_OF_THOUGHT = re.compile(rf"{CLOSE}|<channel\|>")
"""Behind the last of these in a content is the answer; `<channel|>` is Gemma 4's."""
SHOWN = 40
"""Characters of a content that a message shows."""
ANCHOR = 64
"""Characters: more than the longest special token, which may end a prompt."""
SPACE = "\u2581"
"""A space in SentencePiece vocabularies; decoding a text leaves out the first."""
CUT_CHARACTER = "\ufffd"
"""The replacement character: bytes that are not a whole character decode to it."""
ONE_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token of one byte in SentencePiece vocabularies."""


class _Written(NamedTuple):
    """How a chat template writes messages of certain roles."""

    roles: tuple[str, ...]
    """Their own, or `SYNONYMS` of these."""
    order: tuple[int, ...]
    """Places of the messages that have a content, in the order of the text: a system message may stand further back."""


def codec_of(tokenizer: Tokenizer) -> Codec:
    """The codec of a tokenizer, computed once for each state of it."""
    # A tokenizer's templates, tokens and options can change. Its vocabulary cannot be compared: this is called per row.
    state = repr((tokenizer.chat_template, tokenizer.special_tokens_map))
    return _cached(tokenizer, state, len(tokenizer), probe_ids(tokenizer))


@lru_cache(maxsize=8)
def _cached(tokenizer: Tokenizer, *_state: Any) -> Codec:
    return Codec(tokenizer)


@dataclass(eq=False)
class Codec:
    """One tokenizer: its special tokens, its chat template, and conversion between texts and ids."""

    tokenizer: Tokenizer
    _around: dict[str, tuple[str, str]] = field(default_factory=dict, init=False)
    _ends: dict[bool, Ids] = field(default_factory=dict, init=False)
    _written: dict[Hashable, _Written | str] = field(default_factory=dict, init=False)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without added special tokens; special tokens that a text spells out are recognized.

        But not those that `render` marked, because a content spells them: of a conversation, only the template's count.
        """
        ids: list[list[int]] = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            chunk = list(texts[start : start + TEXTS_AT_ONCE])
            found = self.tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
            ids.extend(self._encode_marked(text) if MARK in text else of for text, of in zip(chunk, found, strict=True))
        return ids

    @cached_property
    def special(self) -> re.Pattern[str]:
        """Finds special tokens in contents: all but those around reasoning, which models and data write there."""
        names = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        names = (names | set(self.tokenizer.all_special_tokens)) - {OPEN, CLOSE}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    @cached_property
    def never_text(self) -> frozenset[str]:
        """Special tokens that a tokenizer makes of their text even where it is told to split them."""
        names = [token for token in self.tokenizer.get_added_vocab() if self.special.fullmatch(token)]
        return frozenset(name for name in names if self.vocabulary[name] in self._ids(name, split_special_tokens=True))

    def _ids(self, text: str, **options: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False, **options)["input_ids"])

    def _as_text(self, value: Any) -> Any:
        """A value with marks around the special tokens in its texts, for `encode`. Raises DataError."""
        if isinstance(value, Mapping):
            return {name: self._as_text(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._as_text(item) for item in value]
        if not isinstance(value, str):
            return value
        text = value.translate(WITHOUT_MARKS)
        if found := self.never_text.intersection(self.special.findall(text)):
            raise DataError(f"the special token {min(found)} cannot be written as text with this tokenizer; remove it")
        return self.special.sub(rf"{MARK}\g<0>{MARK_END}", text)

    def _encode_marked(self, text: str) -> list[int]:
        ids: list[int] = []
        # At odd places what marks are around: None for a mark whose other half a template has cut off.
        for place, piece in enumerate(MARKED.split(text)):
            before = "\n" if place and self.adds_space else ""
            split = {"split_special_tokens": place % 2 == 1}
            if piece:
                ids += self._ids(before + piece, **split)[len(self._ids(before, **split)) :]
        return ids

    def special_in_answer(self, text: str, lead: str) -> str | None:
        """A special token that an answer spells, apart from what its template writes before and behind it, or None."""
        text, before = text.removeprefix(lead.strip()), ""
        while text != before:
            before, text = text, text.rstrip()
            for end in self.answer_end_texts:
                text = text.removesuffix(end)
        found = self.special.search(text)
        return found and found[0]

    def decode(self, ids: Sequence[Ids], *, special: bool = True) -> list[str]:
        """Text of each list of ids; `special=False` leaves special tokens out."""
        texts: list[str] = []
        for start in range(0, len(ids), TEXTS_AT_ONCE):
            chunk = [list(item) for item in ids[start : start + TEXTS_AT_ONCE]]
            texts.extend(
                self.tokenizer.batch_decode(chunk, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
            )
        return texts

    def encode_behind(self, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Ids of texts as they stand behind others: (what precedes, as `anchor` returns it; text).

        SentencePiece vocabularies put a space before a text by itself, which is there behind some texts and not behind
        others. Where the two share a token, the text is tokenized as behind a line break: the prompt's tokens stay.
        """
        if not self.adds_space:
            return self.encode([text for _, text in texts])
        found = []
        befores, wholes = self.encode([before for before, _ in texts]), self.encode([a + b for a, b in texts])
        for before, whole, (_, text) in zip(befores, wholes, texts, strict=True):
            if whole[: len(before)] != before:
                before, whole = self.encode(["\n", "\n" + text])
            found.append(whole[len(before) :])
        return found

    def anchor(self, text: str) -> str:
        """The end of a text that decides how what follows is tokenized: nothing with most vocabularies."""
        return text[-ANCHOR:] if self.adds_space else ""

    @cached_property
    def adds_space(self) -> bool:
        """True if a text by itself gets a leading space that it does not get after a line break."""
        anchor, alone, behind = self.encode(["\n", "a", "\na"])
        return behind[: len(anchor)] == anchor and behind[len(anchor) :] != alone

    @cached_property
    def bos(self) -> int | None:
        """The beginning-of-sequence token, if the tokenizer puts one before a text."""
        # A text, not an empty one: of that, a token that is put behind every text would come first.
        start = self.tokenizer("a")["input_ids"][:1]
        return self.tokenizer.bos_token_id if start == [self.tokenizer.bos_token_id] else None

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a response."""
        return frozenset(eos_token_ids(self.tokenizer))

    @cached_property
    def end_texts(self) -> list[str]:
        """How the end tokens are spelled."""
        return self.decode([(number,) for number in sorted(self.ends)])

    @cached_property
    def answer_end_texts(self) -> list[str]:
        """How the tokens are spelled that end a response, and those before them that the chat template writes."""
        written = {number for tools in (False, True) for number in self.answer_end(tools=tools)}
        return self.decode([(number,) for number in sorted(self.ends | written)])

    def answer_end(self, *, tools: bool) -> Ids:
        """The tokens that end an answer in the chat template (that for `tools`), else the end-of-sequence token."""
        if tools not in self._ends:
            self._ends[tools] = answer_end(self.tokenizer, tools=tools) or (self.eos,)
        return self._ends[tools]

    @cached_property
    def turn_tokens(self) -> frozenset[str] | None:
        """The special tokens that the chat template writes around a question; None if it writes nothing around one."""
        if not self.tokenizer.chat_template:
            return None
        text = ""
        with suppress(DataError):  # of a template that wants more than a question, a prompt will tell
            text = self.render([QUESTION], generate=True)
        return None if text == QUESTION["content"] else frozenset(self.special.findall(text))

    def opening(self, arguments: Mapping[str, Any]) -> str:
        """The beginning of a block of reasoning, or an empty block, that the template ends prompts with, or nothing.

        With the space behind it. `arguments`: further inputs of the template.
        """
        return self._around_prompt(arguments)[0]

    def lead(self, arguments: Mapping[str, Any]) -> str:
        """What the template writes between a prompt and a plain answer, or nothing: a header or a space, for example.

        No empty block of reasoning. `arguments`: further inputs of the template.
        """
        return self._around_prompt(arguments)[1]

    def _around_prompt(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        # Tools differ from row to row, and say nothing about the answer's beginning.
        given = without_tools(self.tokenizer, arguments)
        key = json.dumps(given, sort_keys=True)
        if key not in self._around:
            text = ""
            if self.tokenizer.chat_template:
                with suppress(DataError):  # of a template that wants more than a question, a prompt will tell
                    text = self.render([QUESTION], generate=True, arguments=given)
            found = OPENING.search(text)
            lead = written_around_answer(self.tokenizer, given)[0]
            if found or OPEN in lead or CLOSE in lead:
                lead = ""
            self._around[key] = found[0] if found else "", lead
        return self._around[key]

    @cached_property
    def eos(self) -> int:
        """The end-of-sequence token."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ConfigError("tokenizer: it has no end-of-sequence token, so no response can end; set eos_token")
        return int(eos)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the vocabulary and merges."""
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Tokens as the vocabulary writes them, with their ids."""
        return dict(self.tokenizer.get_vocab())

    @cached_property
    def pieces(self) -> dict[int, str]:
        """Text of each token by itself."""
        ids = sorted(self.vocabulary.values())
        return dict(zip(ids, self.decode([(number,) for number in ids]), strict=True))

    def shown(self, ids: Ids) -> list[str]:
        """Each token for a reader: its text, or as the vocabulary writes it where that shows a space (`▁It`)."""
        entries = self.tokenizer.convert_ids_to_tokens(list(ids))
        texts = self.decode([(number,) for number in ids])
        return [entry if SPACE in entry else text for entry, text in zip(entries, texts, strict=True)]

    @cached_property
    def ends_step(self) -> Callable[[int], bool]:
        """Whether a reasoning step ends with a token: whether its text by itself has a line break."""
        # Token by token: not all of a vocabulary is generated.
        return cache(lambda token: "\n" in self.decode([(token,)])[0])

    @cached_property
    def is_blank(self) -> Callable[[int], bool]:
        """Whether a token by itself is white space."""
        return cache(lambda token: not self.decode([(token,)])[0].strip())

    @cached_property
    def ids_of_piece(self) -> dict[str, list[int]]:
        """Tokens by their text; the bytes of a truncated character share one text."""
        found: dict[str, list[int]] = {}
        for number, piece in self.pieces.items():
            found.setdefault(piece, []).append(number)
        return found

    def render(
        self,
        messages: Sequence[Message],
        *,
        generate: bool,
        new_turn: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of messages in the chat template; with `generate`, it ends where the assistant's answer begins.

        That answer goes on with the last message if it is the assistant's, unless it is to be a new one (`new_turn`).
        `arguments`: further inputs of the template. Raises DataError if the template cannot render all of it.
        """
        goes_on = generate and not new_turn and messages[-1]["role"] == "assistant"
        messages, given, order = self._inputs(messages, arguments, generate=generate and not goes_on)
        text = rendered(
            self.tokenizer,
            messages,
            add_generation_prompt=generate and not goes_on,
            continue_final_message=goes_on,
            **given,
        )
        self._check_contents(text, messages, order)
        return text

    def render_marked(
        self, messages: Sequence[Message], *, generate: bool, arguments: Mapping[str, Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The same, and the start and end of the parts of the text that the template marks as generated."""
        messages, given, order = self._inputs(messages, arguments, generate=generate)
        with template_errors(self.tokenizer):
            texts, marks = render_jinja_template(
                conversations=[messages],
                chat_template=self.template(given),
                return_assistant_tokens_mask=True,
                add_generation_prompt=generate,
                **{**self.tokenizer.special_tokens_map, **given},
            )
        self._check_contents(texts[0], messages, order)
        return str(texts[0]), [(int(first), int(end)) for first, end in marks[0]]

    def template(self, arguments: Mapping[str, Any]) -> str:
        """The chat template in Jinja; a tokenizer may have another one for `tools`. Raises ConfigError without one."""
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"tokenizer: the prompts are conversations and it has no chat template; set {TEMPLATE_SETTING} to "
                "one (the first: chatml, llama3, gemma or a Jinja file), or use text prompts"
            )
        try:
            return str(self.tokenizer.get_chat_template(tools=arguments.get("tools")))
        except ValueError as error:
            names = ", ".join(templates(self.tokenizer))
            raise ConfigError(
                f"tokenizer: of its chat templates ({names}) none is called default; set {TEMPLATE_SETTING}"
            ) from error

    def messages(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> list[Message]:
        """Messages as they are written: without reasoning where the arguments, or the template's own, turn it off."""
        template = self.template(arguments) if self.tokenizer.chat_template else ""
        return without_thoughts(messages, template_arguments(template) | dict(arguments))

    def _inputs(
        self, messages: Sequence[Message], arguments: Mapping[str, Any] | None, *, generate: bool
    ) -> tuple[list[Message], dict[str, Any], Sequence[int]]:
        """Messages and arguments for the template, and the order of the messages in its text.

        Raises DataError if it does not use all that they have.
        """
        given = dict(arguments or {})
        template = self.template(given)
        given = template_arguments(template) | given
        for name in given:
            if name in RESERVED or not mentions(template, name):
                raise DataError(f"{name}: the chat template does not use it; remove it from the row")
        messages = without_thoughts(messages, given)
        for name, readers in (("tool_calls", ("tool_calls",)), (REASONING[0], REASONING)):
            if any(name in message for message in messages) and not any(mentions(template, one) for one in readers):
                raise DataError(
                    f"{name}: the chat template does not write it; set {TEMPLATE_SETTING} to one that does, "
                    "or write it into the content as the model generates it"
                )
        roles, order = self._how_written(messages, given, generate)
        written = [{**self._as_text(message), "role": role} for message, role in zip(messages, roles, strict=True)]
        return written, self._as_text(given), order

    def _how_written(self, messages: Sequence[Message], given: Mapping[str, Any], generate: bool) -> _Written:
        """Roles under which the template writes the contents of all messages, and their order.

        It is asked with other contents: a real one may be in the text anyway, or be written in another form. Raises
        DataError if a content is left out.
        """
        shape = [
            (message["role"], bool(message["content"].strip()), len(message.get("tool_calls", ())), *sorted(message))
            for message in messages
        ]
        key = repr((shape, generate, without_tools(self.tokenizer, given), "tools" in given))
        if key not in self._written:
            self._written[key] = self._find_roles(messages, given, generate)
        found = self._written[key]
        if isinstance(found, str):
            raise DataError(found)
        return found

    def _find_roles(self, messages: Sequence[Message], given: Mapping[str, Any], generate: bool) -> _Written | str:
        """These roles and their order, or the reason why there are none."""
        roles = tuple(message["role"] for message in messages)
        places = [place for place, message in enumerate(messages) if message["content"].strip()]
        order = self._order(messages, roles, places, given, generate)
        if order is not None and len(order) == len(places):
            return _Written(roles, order)
        # A template that refuses the messages does not tell which role it does not know.
        left_out = roles if order is None else {roles[place] for place in places if place not in order}
        others = {role: SYNONYMS[role] for role in left_out if role in SYNONYMS}
        renamed = tuple(others.get(role, role) for role in roles)
        again = self._order(messages, renamed, places, given, generate) if others else None
        if again is not None and len(again) == len(places):
            return _Written(renamed, again)
        if order is None:
            return _Written(roles, tuple(places))  # the real messages will tell why
        return (
            f"{template_name(self.tokenizer)} leaves out the content of messages with role "
            f"{', '.join(sorted(left_out))}: it does not know the role, or expects contents of other parts than text; "
            f"change the row, or set {TEMPLATE_SETTING} to one that writes it"
        )

    def _order(
        self,
        messages: Sequence[Message],
        roles: Sequence[str],
        places: Sequence[int],
        given: Mapping[str, Any],
        generate: bool,
    ) -> tuple[int, ...] | None:
        """Of the messages at these places, those whose content is in the template's text, as ordered there.

        None if it refuses them.
        """
        probes = {place: f"{ANSWER}-{place}-" for place in places}
        probing = [
            {**message, "role": role, "content": probes.get(place, message["content"])}
            for place, (message, role) in enumerate(zip(messages, roles, strict=True))
        ]
        try:
            text = rendered(self.tokenizer, probing, add_generation_prompt=generate, **given)
        except DataError:
            return None
        found = {place: text.find(probe) for place, probe in probes.items()}
        return tuple(sorted((place for place in places if found[place] >= 0), key=found.__getitem__))

    def _check_contents(self, text: str, messages: Sequence[Message], order: Sequence[int]) -> None:
        """Raise DataError unless a text has the contents of messages, each behind that of the one before in `order`.

        White space around a content, reasoning in the assistant's and `SWITCHES` may be missing, and JSON may quote it.
        """
        contents = [(place, _answer(messages[place])) for place in order]
        if _first_lost(text, contents) is None:
            return
        bare = [(place, SWITCHES.sub("", content)) for place, content in contents]
        if (lost := _first_lost(SWITCHES.sub("", text), bare)) is None:
            return
        place, missing = lost
        raise DataError(
            f"message {place + 1}: {template_name(self.tokenizer)} does not write the content of the role "
            f"{messages[place]['role']} as it is: the text lacks {missing.translate(WITHOUT_MARKS)!r}; change the row, "
            f"or set {TEMPLATE_SETTING} to one that writes it"
        )

    def prompt_text(self, prompt: Text, arguments: str | None = None) -> str:
        """Text whose tokens are the prompt's, up to a beginning-of-sequence token.

        `arguments`: inputs of the chat template besides messages, as JSON. Raises DataError.
        """
        if not isinstance(prompt, str):
            return self.render(prompt, generate=True, arguments=parsed(arguments))
        if arguments is not None:
            raise DataError(
                f"{', '.join(parsed(arguments))}: input for a chat template, which a plain-text prompt does not use"
            )
        return prompt

    def finish_prompt(self, prompt: Text, ids: Sequence[int]) -> Ids:
        """Ids of a prompt with its beginning-of-sequence token, never doubled. Raises DataError if there are none."""
        # A chat template writes the token itself.
        starts = isinstance(prompt, str) and self.bos is not None and ids[:1] != [self.bos]
        if not ids and not starts:
            raise DataError("prompt: empty, and the tokenizer sets no beginning-of-sequence token to start from")
        return (self.bos, *ids) if starts and self.bos is not None else tuple(ids)

    def finish_response(
        self, ids: Sequence[int], complete: bool | None, *, behind_text: bool, tools: bool = False
    ) -> Ids:
        """Ids of a response with exactly one end token, or with none if it was truncated (`complete` is False).

        `behind_text`: the prompt is a text, which no template closes. `tools`: the template has received some.
        """
        place = first = len(ids)
        while place and (ids[place - 1] in self.ends or self.is_blank(ids[place - 1])):
            place -= 1
            first = place if ids[place] in self.ends else first
        body = tuple(ids[:first])
        if complete is False:
            return body
        # A text prompt may be a conversation that was written out: what its answer spells is then right.
        if first < len(ids) and (behind_text or ids[first] != self.eos):
            return (*body, ids[first])
        end = (self.eos,) if behind_text else self.answer_end(tools=tools)
        spelled = len(end) - 1  # a text may have all of them but the last, which it cannot end with here
        return (*body, *end[spelled:]) if spelled and body[-spelled:] == end[:spelled] else (*body, *end)

    def without_end(self, ids: Ids) -> Ids:
        """Ids without trailing end tokens."""
        length = len(ids)
        while length and ids[length - 1] in self.ends:
            length -= 1
        return ids[:length]

    def split_at_ends(self, ids: Ids) -> list[Ids]:
        """Ids of several messages, each up to and with its end token; the last one may lack it."""
        ends = [place + 1 for place, token in enumerate(ids) if token in self.ends]
        bounds = [0, *ends, *([len(ids)] if ids and ids[-1] not in self.ends else [])]
        return [ids[start:end] for start, end in pairwise(bounds)]

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def longest(self) -> int:
        """Upper bound on the characters of a token."""
        return max(map(len, self.vocabulary))

    def spells(self, ids: Ids, text: str, *, stopped: bool | None = None) -> bool:
        """True if ids decode to a text, apart from end tokens and surrounding white space.

        The text may lack the tokens after its last whole character: vLLM omits those that could still become one.
        `stopped`: a stop string ended it, so the text may go on with the beginning of one more token.
        """
        if max(ids, default=0) >= self.size:
            return False
        body = self.without_end(ids)
        wanted = _plain(self._without_spelled_end(text))
        rest = self.longest - 1 if stopped else 0
        return any(
            wanted.startswith(plain := _plain(spelled)) and len(wanted) - len(plain) <= rest
            for special in (True, False)
            for spelled in self._spellings(body, special)
        )

    def tokens_at(self, ids: Ids, text: str, ends: Sequence[int]) -> list[int]:
        """Numbers of tokens that write the first `ends` characters (rising) of a text that ids begin with.

        A token that an end divides lies before it. Raises DataError if the ids begin with another text.
        """
        for form, special in product(FORMS, (False, True)):
            whole, wanted = form(self.decode([ids], special=special)[0]), form(text).rstrip()
            # A stop string may have ended the text within one more token.
            if whole.startswith(wanted) or (whole and wanted.startswith(whole)):
                break
        else:
            raise DataError("step_ends: its tokens spell another text, so where its steps end in them is unknown")

        def written(count: int) -> int:
            return len(form(self.decode([ids[:count]], special=special)[0].rstrip(CUT_CHARACTER)))

        # Behind the text, if its tokens are cut there, every character counts as one.
        lengths = [len(form(text[:end])) + max(0, end - len(text)) for end in ends]
        return [bisect_left(range(len(ids)), length, key=written) for length in lengths]

    def token_bytes(self, ids: Sequence[int], text: str) -> list[int] | None:
        """Bytes (UTF-8) that each token adds to a text; None unless ids decode to it, but for its first spaces.

        0 for a special token at the end, which closes the response; one before that is in the ids and not in the text,
        so that the bytes are unknown. The bytes of all tokens together are those of the text.
        """
        added = [self._bytes_behind(token) for token in ids]
        if None in added[:-1] or self.decode([tuple(ids)], special=False)[0].lstrip(" ") != text.lstrip(" "):
            return None
        lengths = [0 if one is None else one[0] for one in added]
        # What decoding leaves out of the first token: its space.
        spare = sum(lengths) - len(text.encode())
        if spare and (not added or added[0] is None or spare != added[0][1]):
            return None
        return [lengths[0] - spare, *lengths[1:]] if spare else lengths

    @cached_property
    def _bytes_behind(self) -> Callable[[int], tuple[int, int] | None]:
        """Bytes of a token behind another one, and how many of these decoding leaves out at the beginning of a text.

        None for a special token.
        """

        def find(token: int) -> tuple[int, int] | None:
            once, twice = self.decode([(token,), (token, token)], special=False)
            if not twice:
                return None
            entry = self.tokenizer.convert_ids_to_tokens(token)
            if CUT_CHARACTER not in twice or CUT_CHARACTER in entry:
                return len(twice.encode()) - len(once.encode()), len(twice.encode()) - 2 * len(once.encode())
            # A part of a character: byte-level vocabularies have a letter for each byte.
            return (1 if ONE_BYTE.fullmatch(entry) else len(entry)), 0

        return cache(find)

    def _spellings(self, ids: Ids, special: bool) -> Iterator[str]:
        """The text of ids; while it ends inside a character, also without the last token."""
        for length in range(len(ids), -1, -1):
            spelled = self.decode([ids[:length]], special=special)[0]
            yield spelled
            if not spelled.endswith(CUT_CHARACTER):
                return

    def resolve(self, tokens: Sequence[str], text: str, usual: Ids) -> Ids:
        """Ids of a response from token strings: decoded pieces, or entries of the vocabulary.

        usual: the ids from tokenizing the text, which decide the meaning of a piece of a truncated character.
        Raises DataError if the strings do not spell the text, or match no or no single token.
        """
        if len(usual) == len(tokens) and all(map(self.is_piece, usual, tokens)):
            return usual
        pieces = [self.ids_of_piece.get(token, []) for token in tokens]
        for candidates in (pieces, [[self.vocabulary[token]] if token in self.vocabulary else [] for token in tokens]):
            ids = tuple(found[0] for found in candidates if len(found) == 1)
            if len(ids) == len(tokens) and self.spells(ids, text):
                return ids
        spelled = "".join(tokens)
        if _plain(spelled) != _plain(text):
            differs = (index for index, (one, other) in enumerate(zip(spelled, text, strict=False)) if one != other)
            at = next(differs, min(len(spelled), len(text)))
            raise DataError(
                f"tokens spell {spelled[at : at + 20]!r} at character {at}, where the text has {text[at : at + 20]!r}"
            )
        position = next(index for index, found in enumerate(pieces) if len(found) != 1)
        kind = "several tokens" if pieces[position] else "no token"
        raise DataError(f"token {position} ({tokens[position]!r}) stands for {kind} of the policy's tokenizer")

    def is_piece(self, token_id: int, piece: str) -> bool:
        """True if a token by itself is written so."""
        return self.pieces.get(token_id) == piece

    def _without_spelled_end(self, text: str) -> str:
        for end in self.end_texts:
            text = text.removesuffix(end)
        return text


def _answer(message: Message) -> str:
    """What a template cannot leave out of a message: its content, without reasoning if it is the assistant's."""
    content = str(message["content"])
    if message["role"] == "assistant":
        content = END_OF_THOUGHT.split(content)[-1].partition(OPEN)[0]
    return content


def _first_lost(text: str, contents: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
    """The first of contents that a text lacks, behind those before it: its place, and where what is missing begins."""
    start = 0
    for place, content in contents:
        plain = content.strip()
        found = text.find(plain, start)
        if found < 0:
            found = text.find(json.dumps(plain, ensure_ascii=False)[1:-1], start)
        if found < 0:
            there = text[start:]
            lost = bisect_left(range(len(plain)), True, key=lambda end: plain[: end + 1] not in there)
            return place, plain[lost : lost + SHOWN]
        start = found + len(plain)
    return None


def parsed(arguments: str | None) -> dict[str, Any]:
    """Arguments of a chat template, from their JSON."""
    return {} if arguments is None else dict(json.loads(arguments))


def _plain(text: str) -> str:
    # Some tokenizers normalize what they read, so a text comes back in its composed form.
    return _composed(text).strip()


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


FORMS: Sequence[Callable[[str], str]] = (str, str.lstrip, _composed, lambda text: _composed(text).lstrip())
"""How a text may differ from what its tokens decode to: without the first spaces, and normalized."""
