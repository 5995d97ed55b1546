"""Text to token ids: prompts, responses and pairs; stored ids are used if they match the policy's tokenizer."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Literal

from regretless.core import continuations
from regretless.core.continuations import Continuation
from regretless.core.errors import ConfigError, DataError
from regretless.core.top_logps import first_rows, unpacked
from regretless.data.alignment import behind_space, common_units, sums_at_ends, within_text
from regretless.data.codec import Codec, Tokenizer, codec_of, parsed
from regretless.data.columns import CONTINUATIONS, TOKEN_VALUES, TOP, Pair, Side, SideName, Text
from regretless.data.conversations import ResponsePart, opening_of, response_parts
from regretless.data.messages import CLOSE, OPEN, only_text
from regretless.data.prompt_templates import asked_pair
from regretless.data.rejected_rows import Refusal
from regretless.data.rows import pair_row
from regretless.data.schema import check_continuations, check_lengths, check_numbers, check_top
from regretless.modeling.chat_templates import EndlessTemplate
from regretless.modeling.layout import Ids, as_context, is_context, own_ids, read_ids

Truncation = Literal["refuse", "keep_start"]
OTHER_PROMPTS = (
    "have responses that were recorded with other tokens of the prompt than the chat template writes now (another "
    "template, or one with the date of today); their log-probabilities are those behind the recorded prompt"
)
"""What is said of pairs with `TokenizedPair.other_prompt`."""
FUTURE = "future"
"""In `TokenizedSide.values` 1 for each token behind the side's cut, 0 for the others: what an objective needs by this
name."""
STEPS = "step_numbers"
"""In `TokenizedSide.values` the number of each token's step, rising, where the data says where steps end."""
UNITS = "unit_numbers"
"""In `TokenizedSide.values` the number of each token's unit, rising, of a response by another tokenizer: `behavior` has
the log-probability of a unit at its last token, and 0 at the others."""
NONE = continuations.packed([])
MAX_LENGTH = 2048
"""Most tokens in prompt and response together where settings give no other number."""


@dataclass(frozen=True)
class TokenizedSide:
    """One response as input of objectives: token ids, and a value of each kind for every id that the model wrote."""

    ids: Ids
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    """By the names that objectives have in `needs`: `behavior`, log-probabilities under the behavior policy (nats), and
    those of `Side.token_numbers`."""
    top: bytes | None = field(default=None, hash=False)
    """The most likely tokens in the place of each id that the model wrote: `Side.top_logps`."""
    continuations: bytes | None = field(default=None, hash=False)
    """How its writer went on from beginnings: `Side.continuations`; they start behind ids that the model wrote."""

    @property
    def own(self) -> Ids:
        """The ids that the model wrote: those that are not context."""
        return own_ids(self.ids)

    @property
    def listed(self) -> int:
        """Most likely tokens in the place of each id."""
        return 0 if self.top is None else unpacked(self.top, len(self.own)).shape[1]

    def has(self, name: str) -> bool:
        """Whether the response has the value that objectives call so in `needs`."""
        packed = {TOP: self.top, CONTINUATIONS: self.continuations}
        return packed[name] is not None if name in packed else name in self.values

    @property
    def context(self) -> int:
        """Ids of the context in front of all that the model wrote, if there is none behind."""
        return len(self.ids) - len(self.own)

    @property
    def longest(self) -> int:
        """Ids of the response, or of the longest that a continuation makes of it."""
        ends = (self.context + one.end for one in continuations.unpacked(self.continuations or NONE))
        return max(len(self.ids), *ends, 0)

    @property
    def continued(self) -> int:
        """Tokens of all continuations."""
        return continuations.continued_tokens(self.continuations)

    def paths(self) -> list[tuple[Continuation, Ids]]:
        """The continuations, each with the ids of the response that it makes: those before it and its own."""
        found = continuations.unpacked(self.continuations or NONE)
        return [(one, (*self.ids[: self.context + one.start], *one.ids.tolist())) for one in found]

    @property
    def steps(self) -> tuple[int, ...] | None:
        """The number of each token's step, from 0, for every id that the model wrote; None if the data says nothing."""
        return self._numbers(STEPS)

    @property
    def units(self) -> tuple[int, ...] | None:
        """The number of each token's unit, from 0 (`UNITS`); None where every token has its own log-probability."""
        return self._numbers(UNITS)

    def _numbers(self, name: str) -> tuple[int, ...] | None:
        numbers = self.values.get(name)
        return None if numbers is None else tuple(int(number - numbers[0]) for number in numbers)

    def only(self, names: Collection[str]) -> TokenizedSide:
        """The response with these values alone. Raises KeyError if it lacks one."""
        values = {name: self.values[name] for name in names if name not in (TOP, CONTINUATIONS)}
        kept = self.continuations if CONTINUATIONS in names else None
        return TokenizedSide(self.ids, values, self.top if TOP in names else None, kept)

    def cut(self, length: int) -> TokenizedSide:
        """The first `length` tokens, or less: context at the end is read by nothing, and units are not divided.

        Continuations end there, too.
        """
        kept = continuations.cut(self.continuations, length - self.context)
        length = min(length, len(self.ids))
        units = self.units or ()
        before = len(self.ids) - len(units)
        while before < length < before + len(units) and units[length - before - 1] == units[length - before]:
            length -= 1
        while length and is_context(self.ids[length - 1]):
            length -= 1
        ids = self.ids[:length]
        count = len(own_ids(ids))
        values = {name: values[:count] for name, values in self.values.items()}
        return TokenizedSide(ids, values, self.top and first_rows(self.top, count, len(self.own)), kept)

    def behind(self, count: int) -> TokenizedSide:
        """The same response with its first `count` tokens as context, those before them aside that are so anyway."""
        values = {name: numbers[count:] for name, numbers in self.values.items()}
        start = self.context + count
        top = self.top and self.top[len(self.top) // len(self.own) * count :]
        ids = (*as_context(read_ids(self.ids[:start])), *self.ids[start:])
        return TokenizedSide(ids, values, top, continuations.behind(self.continuations, count))

    def without_units(self) -> TokenizedSide:
        """The response without log-probabilities of the behavior policy, if it has them of units alone."""
        if UNITS not in self.values:
            return self
        return replace(self, values={name: of for name, of in self.values.items() if name not in (UNITS, "behavior")})

    def without_future(self) -> TokenizedSide:
        """The response up to its cut, without `FUTURE`."""
        future = self.values.get(FUTURE)
        if future is None:
            return self
        values = {name: numbers for name, numbers in self.values.items() if name != FUTURE}
        return replace(self, values=values).cut(len(self.ids) - int(sum(future)))


@dataclass(frozen=True)
class TokenizedPair:
    """A pair as input of the trainer."""

    pair_id: str
    prompt_ids: Ids
    chosen: TokenizedSide
    rejected: TokenizedSide | None
    """None in data for supervised training."""
    source: str
    """`file:line` of the row, for messages."""
    kind: Literal["original", "masked"]
    logps_dropped: str | None = None
    """Why the row's numbers of tokens were not used; log-probabilities may be there of units (`UNITS`)."""
    other_prompt: bool = field(default=False, compare=False)
    """Whether the responses were recorded with other tokens of the prompt. Not stored in a table for training."""
    wrapped: bool = field(default=False, compare=False)
    """Whether a text prompt was put into a template. Not stored in a table for training."""
    topic: str | None = field(default=None, compare=False)
    """`Pair.topic`."""
    preference_probability: float | None = None
    """`Pair.preference_probability`."""
    filled: tuple[str, ...] = field(default=(), compare=False)
    """Names of values that the pair lacked and got (`with_missing`). Not stored in a table for training."""
    row: Pair | None = field(default=None, compare=False, repr=False)
    """The pair as it was read. Not stored in a table for training."""

    @property
    def sides(self) -> tuple[TokenizedSide, ...]:
        """The chosen side, and the rejected one if it exists."""
        return (self.chosen,) if self.rejected is None else (self.chosen, self.rejected)

    @property
    def items(self) -> list[tuple[Ids, Ids]]:
        """The prompt with each of the responses."""
        return [(self.prompt_ids, side.ids) for side in self.sides]

    def with_missing(self, missing: Mapping[str, float]) -> TokenizedPair:
        """The pair, where a side lacks one of these values, with the number beside it for every token of both sides."""
        filled = tuple(name for name in missing if any(not side.has(name) for side in self.sides))
        if not filled:
            return self
        sides = [
            replace(side, values={**side.values, **{name: (missing[name],) * len(side.own) for name in filled}})
            for side in (self.without_units().sides if "behavior" in filled else self.sides)
        ]
        return replace(self, chosen=sides[0], rejected=sides[1] if len(sides) == 2 else None, filled=filled)

    def without_units(self) -> TokenizedPair:
        """The pair for objectives that read log-probabilities of single tokens alone."""
        rejected = None if self.rejected is None else self.rejected.without_units()
        return replace(self, chosen=self.chosen.without_units(), rejected=rejected)

    def with_future(self) -> TokenizedPair:
        """The pair with `FUTURE` on both sides: a side that lacks it has nothing stored behind it."""
        sides = [replace(side, values={FUTURE: (0.0,) * len(side.own), **side.values}) for side in self.sides]
        return replace(self, chosen=sides[0], rejected=sides[1] if len(sides) == 2 else None)

    def without_future(self) -> TokenizedPair:
        """The pair with both sides up to their cuts (`TokenizedSide.without_future`)."""
        rejected = None if self.rejected is None else self.rejected.without_future()
        return replace(self, chosen=self.chosen.without_future(), rejected=rejected)


def encode_prompt(tokenizer: Tokenizer, prompt: Text, arguments: str | None = None) -> list[int]:
    """Token ids of a prompt that a response can follow.

    Messages go through the chat template, with its generation prompt and `arguments` (JSON). A string is plain text,
    after the beginning-of-sequence token if the tokenizer sets one (once, even if the text spells it out).

    Raises ConfigError for messages with a tokenizer that has no chat template, DataError if the template rejects them
    or no token results.
    """
    codec = codec_of(tokenizer)
    return list(codec.finish_prompt(prompt, codec.encode([codec.prompt_text(prompt, arguments)])[0]))


def tokenize_pairs(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    *,
    max_length: int | None,
    max_prompt_length: int | None,
    truncation: Truncation = "refuse",
    need_logps: bool = True,
    keep: Collection[str] = (),
    first: int = 1,
    template: str | None = "plain",
) -> tuple[list[TokenizedPair], list[Refusal]]:
    """Pairs as token ids of the policy's tokenizer, and the rows that cannot be used, each with its reason.

    Stored ids are used, with their log-probabilities, if a tokenizer of the same vocabulary made them (by its
    fingerprint; without one, if they spell the text): sampled ids are never tokenized again, and never
    used unless its ids spell the stored text. Token strings are resolved to ids and checked in the same way. Any other
    text is tokenized; log-probabilities beside it are those of units (`UNITS`) if `token_bytes` says where its tokens
    end, else they are dropped. `logps_dropped` says why.

    max_length: most tokens of prompt and response together; max_prompt_length: most tokens of the prompt.
    truncation: a longer response is rejected, or truncated at its end (`keep_start`; it then has no end token).
    keep: what only some objectives need. `FUTURE` keeps the tokens that are stored behind the cut of a side, and says
    which they are; `CONTINUATIONS` keeps these, which then have to fit into max_length, or are truncated, too.
    need_logps: False also tokenizes the text of rows whose stored tokens do not fit, instead of rejecting them.
    first: number of the first pair, for messages about pairs without an origin.
    template: what text prompts are put into (`asked_pair`).

    Raises ConfigError if the tokenizer has no end-of-sequence token.
    """
    encoder = _PairEncoder(codec_of(tokenizer), max_length, max_prompt_length, truncation, need_logps, keep)
    ask = asked_pair(tokenizer, template)
    asked = [ask(pair) for pair in pairs]
    encoder.prepare(asked)
    kept: list[TokenizedPair] = []
    refused: list[Refusal] = []
    for number, (pair, given) in enumerate(zip(asked, pairs, strict=True), first):
        origin = pair.origin or f"pairs:{number}"
        try:
            kept.append(encoder.tokenize(pair, origin, wrapped=pair is not given))
        except DataError as reason:
            refused.append(Refusal.at(origin, str(reason), pair_row(pair)))
    return kept, refused


def share_of_continuations(continued: int, tokens: int) -> str:
    """What the continuations of pairs cost in training, in words: their tokens of all, beginnings counted once."""
    return (
        f"continuations are {continued:,} of {tokens:,} tokens ({100 * continued / max(tokens, 1):.0f} %) that a pass "
        "over the pairs computes, at most"
    )


def missing_values(pairs: Sequence[TokenizedPair], name: str = "behavior") -> dict[str, int]:
    """Why pairs lack one of `TokenizedSide.values`, and how many pairs for each reason."""
    counts: dict[str, int] = {}
    for pair in pairs:
        if not all(side.has(name) for side in pair.sides):
            reason = pair.logps_dropped or "the data has none"
            counts[reason] = counts.get(reason, 0) + 1
    return counts


def unit_counts(pairs: Sequence[TokenizedPair]) -> dict[str, int]:
    """Pairs and responses with units (`UNITS`), their units, and those that are longer than one token."""
    of_pairs = [[Counter(side.units) for side in pair.sides if side.units is not None] for pair in pairs]
    counts = [of_response for of_pair in of_pairs for of_response in of_pair]
    return {
        "pairs": sum(map(bool, of_pairs)),
        "responses": len(counts),
        "units": sum(map(len, counts)),
        "longer": sum(tokens > 1 for of_response in counts for tokens in of_response.values()),
    }


def said_of_units(counts: Mapping[str, int]) -> str:
    """What is said of pairs with units, behind their number. counts: of `unit_counts`, above 0."""
    return (
        "have responses by a model with another tokenizer, whose log-probabilities are sums over units, the spans "
        f"between bytes where tokens of both end; {100 * counts['longer'] / counts['units']:.1f} % of the units are "
        "longer than one token"
    )


@dataclass(frozen=True)
class _Stored:
    """One stored response: equal ones are processed once."""

    behind_text: bool
    before: str
    """The end of the prompt's text (`Codec.anchor`)."""
    tools: bool
    """Whether the chat template has received tools."""
    parts: tuple[ResponsePart, ...]
    ids: Ids | None
    """Of the tokens that the model wrote, those of several messages one after another."""
    tokens: tuple[str, ...] | None
    complete: bool | None
    stopped: bool | None
    cut_at: int | None
    prefix_tokens: int | None
    tokenizer: str | None
    token_bytes: tuple[int, ...] | None
    """Of tokens that may be by another tokenizer, behind the first spaces of the text (`behind_space`)."""

    @property
    def own(self) -> list[str]:
        """The text of each of the model's messages."""
        return [part.text for part in self.parts if part.own]


@dataclass(frozen=True)
class _Side:
    name: SideName
    stored: _Stored
    known: Side


@dataclass(frozen=True)
class _Resolved:
    ids: Ids
    dropped: str | None = None
    """Why numbers stored for the response do not belong to these ids."""
    units: tuple[Sequence[int], Sequence[int]] | None = None
    """Of the first stored tokens, and of these ids: what has a log-probability nevertheless."""


class _PairEncoder:
    """Tokenizes pairs, every distinct prompt and response once, in batches."""

    def __init__(
        self,
        codec: Codec,
        max_length: int | None,
        max_prompt_length: int | None,
        truncation: Truncation,
        need_logps: bool,
        keep: Collection[str],
    ) -> None:
        self.codec, self.need_logps, self.truncation = codec, need_logps, truncation
        self.keep = keep
        self.max_length, self.max_prompt_length = max_length, max_prompt_length
        # A text in place of ids is the reason for a rejection.
        self.prompts: dict[Hashable, Ids | str] = {}
        self.anchors: dict[Hashable, str] = {}
        self.texts: dict[tuple[str, str], list[int]] = {}
        self.resolved: dict[_Stored, _Resolved | str] = {}
        self.numbers: dict[tuple[float, ...], tuple[float, ...]] = {}

    def prepare(self, pairs: Sequence[Pair]) -> None:
        """Tokenize all prompts, and all responses whose text is needed."""
        # The texts: of prompts, and of responses that have no usable ids.
        rendered: dict[Hashable, tuple[Text, str]] = {}
        wanted: dict[tuple[str, str], None] = {}
        for pair in pairs:
            key = _key(pair)
            if key not in rendered and key not in self.prompts:
                try:
                    text = self.codec.prompt_text(pair.prompt, pair.chat_template_kwargs)
                    rendered[key], self.anchors[key] = (pair.prompt, text), self.codec.anchor(text)
                except EndlessTemplate:
                    raise  # it would be as long for the next row
                except (ConfigError, DataError) as reason:
                    self.prompts[key] = str(reason)
            # A response that cannot be written is reported with its row, when the pair is processed.
            with suppress(ConfigError, DataError):
                for side in self._sides(pair):
                    stored = side.stored
                    if stored.ids is None or self._is_foreign(stored.tokenizer):
                        wanted |= dict.fromkeys(_placed(self.codec, stored.before, stored.parts))

        # Their ids.
        ids = self.codec.encode([text for _, text in rendered.values()])
        for (key, (prompt, _)), ids_of_prompt in zip(rendered.items(), ids, strict=True):
            try:
                self.prompts[key] = self.codec.finish_prompt(prompt, ids_of_prompt)
            except DataError as reason:
                self.prompts[key] = str(reason)
        self.texts.update(zip(wanted, self.codec.encode_behind(list(wanted)), strict=True))

    def tokenize(self, pair: Pair, origin: str, *, wrapped: bool = False) -> TokenizedPair:
        """One pair. Raises DataError with the reason if it cannot be used."""
        prompt = self.prompts[_key(pair)]
        if isinstance(prompt, str):
            raise DataError(prompt)
        self._check_prompt(prompt)
        stored = self._sides(pair)
        fitted = [self._fitted(prompt, side) for side in stored]
        sides = [side for side, _ in fitted]
        if len({side.without_future().ids for side in sides}) < len(sides):
            raise DataError(self._equal(len(prompt) + len(sides[0].ids), stored[0].stored, stored[1].stored))
        dropped = [
            f"{side.name}: {reason}"
            for side, (_, reason) in zip(stored, fitted, strict=True)
            if reason and (side.known.token_values or side.known.top_logps or side.known.continuations)
        ]
        return TokenizedPair(
            pair_id=pair.pair_id or origin,
            prompt_ids=prompt,
            chosen=sides[0],
            rejected=sides[1] if len(sides) == 2 else None,
            source=origin,
            kind=pair.kind,
            logps_dropped="; ".join(dropped) or None,
            other_prompt=pair.tokenizer == self.codec.fingerprint
            and pair.prompt_token_ids is not None
            and tuple(pair.prompt_token_ids) != prompt,
            wrapped=wrapped,
            topic=pair.topic,
            preference_probability=pair.preference_probability,
            row=pair,
        )

    def _equal(self, length: int, chosen: _Stored, rejected: _Stored) -> str:
        """The respect in which two sides with the same ids are equal."""
        if chosen.parts == rejected.parts:
            return "chosen and rejected are equal"
        if self.truncation == "keep_start" and self.max_length == length:
            return f"chosen and rejected are equal when truncated to max_length {self.max_length}"
        return "chosen and rejected have the same token ids, though their texts differ: they cannot be distinguished"

    def _sides(self, pair: Pair) -> list[_Side]:
        """The one or two responses of a pair. Raises DataError if one cannot be written after its prompt."""
        sides = pair.sides
        if pair.kind == "masked" and pair.rejected is not None:
            sides["rejected"] = replace(pair.rejected, complete=False)  # also where its row does not say so
        responses = []
        for name, side in sides.items():
            stored = _Stored(
                behind_text=isinstance(pair.prompt, str),
                before=self.anchors.get(_key(pair), ""),
                tools="tools" in parsed(pair.chat_template_kwargs),
                parts=self._parts(pair, name, side),
                ids=None if side.token_ids is None else tuple(side.token_ids),
                tokens=None if side.tokens is None else tuple(side.tokens),
                complete=False if side.stopped else side.complete,
                stopped=side.stopped,
                cut_at=side.cut_at,
                prefix_tokens=pair.prefix_tokens,
                tokenizer=pair.tokenizer_of(name),
                token_bytes=self._token_bytes(pair, name, side),
            )
            responses.append(_Side(name, stored, side))
        return responses

    def _is_foreign(self, tokenizer: str | None) -> bool:
        return tokenizer not in (None, self.codec.fingerprint)

    def _token_bytes(self, pair: Pair, name: SideName, side: Side) -> tuple[int, ...] | None:
        text, lengths = only_text(side.text), side.token_bytes
        if lengths is None and side.tokens is not None and (text or "").startswith("".join(side.tokens)):
            lengths = [len(token.encode()) for token in side.tokens]
        is_mine = pair.tokenizer_of(name) == self.codec.fingerprint
        if text is None or side.logps is None or lengths is None or is_mine:
            return None
        return tuple(behind_space(lengths[: side.cut_at], text))

    def _parts(self, pair: Pair, name: SideName, side: Side) -> tuple[ResponsePart, ...]:
        try:
            sampled = side.pieces is not None and not self._is_foreign(pair.tokenizer_of(name))
            parts = response_parts(self.codec, pair.prompt, side.text, pair.chat_template_kwargs, sampled=sampled)
            if not sampled and side.complete is not False:
                self._check_reasoning(pair, parts[-1])
            return parts
        except DataError as reason:
            raise DataError(f"{name}: {reason}") from None

    def _check_reasoning(self, pair: Pair, last: ResponsePart) -> None:
        """Raise DataError for an answer that does not go on with the block of reasoning that its prompt ends with."""
        opening = opening_of(self.codec, pair.prompt, parsed(pair.chat_template_kwargs))
        where = "in the rows' column chat_template_kwargs (in a recipe also in model.chat_template_kwargs)"
        if CLOSE in opening and last.text.lstrip().startswith(OPEN):
            raise DataError(
                "the chat template ends the prompt with an empty block of reasoning, and this answer begins with "
                f"another; set enable_thinking {where}: true keeps its reasoning, false leaves it out"
            )
        if opening and CLOSE not in opening + last.text:
            raise DataError(
                f"the chat template begins each answer with {OPEN}, and this one has no {CLOSE}: it would be trained "
                f"as reasoning. If it has none, set enable_thinking to false {where}, or, with a template that has no "
                f"such switch, begin it with {OPEN}{CLOSE}; if it was cut, remove the row"
            )

    def _check_prompt(self, prompt: Ids) -> None:
        limits = [("max_prompt_length", self.max_prompt_length), ("max_length", self.max_length)]
        for name, limit in limits:
            room = 0 if name == "max_prompt_length" else 1
            if limit is not None and len(prompt) + room > limit:
                raise DataError(f"prompt: too long for {name} {limit}; raise it or drop the row")

    def _fitted(self, prompt: Ids, side: _Side) -> tuple[TokenizedSide, str | None]:
        """A response within max_length, and why the numbers stored for its tokens were dropped."""
        if side.stored not in self.resolved:
            try:
                self.resolved[side.stored] = self._resolve(side.stored)
            except DataError as reason:
                self.resolved[side.stored] = str(reason)
        resolved = self.resolved[side.stored]
        if isinstance(resolved, str):
            raise DataError(f"{side.name}: {resolved}")
        tokens = self._placed_side(resolved, side)
        if self.max_length is not None and len(prompt) + tokens.longest > self.max_length:
            if self.truncation == "refuse":
                what = "too long" if len(prompt) + len(tokens.ids) > self.max_length else "a continuation is too long"
                raise DataError(
                    f"{side.name}: {what}, with its prompt, for max_length {self.max_length}; raise it, or set "
                    "truncation=keep_start"
                )
            tokens = tokens.cut(self.max_length - len(prompt))
            if not tokens.ids:
                raise DataError(f"{side.name}: max_length {self.max_length} cuts it before its first token; raise it")
        return tokens, resolved.dropped

    def _placed_side(self, resolved: _Resolved, side: _Side) -> TokenizedSide:
        """The response up to its cut or with what is stored behind it, and what both sides begin with as context."""
        stored, tokens = side.stored, self._side(resolved, side)
        length = len(tokens.own)
        if side.known.step_ends is not None:
            steps = self._step_numbers(tokens.own, side.known)
            tokens = replace(tokens, values={**tokens.values, STEPS: self._shared(steps)})
        cut = length if stored.cut_at is None or resolved.dropped else stored.cut_at
        if FUTURE in self.keep:
            future = (0.0,) * cut + (1.0,) * (length - cut)
            read = continuations.up_to(tokens.continuations, cut)
            tokens = replace(tokens, values={**tokens.values, FUTURE: future}, continuations=read)
        elif cut < length:
            tokens = tokens.cut(len(tokens.ids) - (length - cut))
        if stored.prefix_tokens is None:
            return tokens
        if resolved.dropped:
            raise DataError(
                f"prefix_tokens: they count tokens that are not used ({resolved.dropped}); leave the column out, and "
                "what both sides begin with is a part of both"
            )
        return tokens.behind(stored.prefix_tokens)

    def _step_numbers(self, ids: Ids, side: Side) -> list[float]:
        """The number of each token's step; those that end within one token have the same."""
        text, ends = only_text(side.text), side.step_ends
        assert text is not None and ends is not None  # the reader has checked them
        *places, last = self.codec.tokens_at(ids, text, ends)
        places = sorted({place for place in places if place < last})
        return [float(bisect_right(places, token)) for token in range(len(ids))]

    def _side(self, resolved: _Resolved, side: _Side) -> TokenizedSide:
        """The resolved ids with the numbers stored for them. Raises DataError unless there is one for each id."""
        if resolved.units is not None and side.known.logps is not None:
            writers, mine = resolved.units
            sums = sums_at_ends(side.known.logps[: len(writers)], writers, mine)
            return TokenizedSide(
                resolved.ids, {"behavior": self._shared(sums), UNITS: self._shared([*map(float, mine)])}
            )
        if resolved.dropped:
            return TokenizedSide(resolved.ids)
        written, known = own_ids(resolved.ids), side.known
        problems = [check_lengths(f"{side.name}_{column}", written, getattr(known, column)) for column in TOKEN_VALUES]
        problems.append(check_numbers(f"{side.name}_token_numbers", written, known.token_numbers))
        problems.append(check_top(f"{side.name}_top_logps", written, known.top_logps))
        kept = known.continuations if CONTINUATIONS in self.keep else None
        problems.append(check_continuations(f"{side.name}_continuations", written, kept))
        if kept is not None and len(side.stored.own) > 1:
            problems.append(f"{side.name}_continuations: expected a response of one message, got several")
        for problem in problems:
            if problem is not None:
                raise DataError(problem)
        values = {name: self._shared(row) for name, row in known.token_values.items()}
        return TokenizedSide(resolved.ids, values, known.top_logps, kept)

    def _shared(self, values: Sequence[float]) -> tuple[float, ...]:
        """Numbers as a tuple, shared by equal numbers: a response occurs in several pairs."""
        row = tuple(values)
        return self.numbers.setdefault(row, row)

    def _resolve(self, stored: _Stored) -> _Resolved:
        """Ids of one response. Raises DataError if its stored tokens do not fit it and are required."""
        mine = self.codec.fingerprint
        if len(stored.own) > 1 and (stored.cut_at or stored.prefix_tokens):
            raise DataError("cut_at, prefix_tokens: expected a response of one message, got several; leave them out")
        if self._is_foreign(stored.tokenizer):
            foreign = f"made with another tokenizer ({stored.tokenizer}) than the policy's ({mine})"
            try:
                return self._aligned(stored, foreign)
            except DataError as reason:
                return self._tokenized(stored, f"{foreign}; {reason}")
        try:
            if stored.tokens is not None:
                ids = self._of_strings(stored, stored.tokens)
            elif stored.ids is not None:
                ids = self._checked(stored, stored.ids)
            else:
                return self._tokenized(stored, "present without token ids")
        except DataError as reason:
            with suppress(DataError):
                return self._aligned(stored, str(reason))
            if self.need_logps and (stored.tokens is not None or stored.tokenizer is not None):
                raise
            return self._tokenized(stored, str(reason))
        text_ids = own_ids(ids)[: stored.cut_at]
        if stored.complete is False and self.codec.without_end(text_ids) != text_ids:
            marked = "ended by a stop string" if stored.stopped else "truncated"
            raise DataError(f"marked as {marked}, yet its tokens end with an end-of-sequence token")
        return _Resolved(ids)

    def _of_strings(self, stored: _Stored, tokens: tuple[str, ...]) -> Ids:
        if len(stored.parts) > 1:
            raise DataError("token strings of a response of several messages; give token ids")
        # They come from a tokenizer that received the response alone.
        (text,) = stored.own
        if stored.stopped and text.startswith(spelled := "".join(tokens)):
            text = spelled
        return self.codec.resolve(tokens, text, tuple(self.codec.encode([text])[0]))

    def _checked(self, stored: _Stored, ids: Ids) -> Ids:
        """Stored ids, with the context between messages. Raises DataError unless they are the messages' tokens."""
        if max(ids) >= self.codec.size:
            raise DataError(f"token id {max(ids)} is not in the policy's vocabulary (0 to {self.codec.size - 1})")
        texts = stored.own
        pieces = [ids] if len(texts) == 1 else self.codec.split_at_ends(ids)
        if len(pieces) != len(texts):
            raise DataError(
                f"token ids of {len(pieces)} message(s), each with its end-of-sequence token, where the response has "
                f"{len(texts)} of the assistant; expected the ids that it generated, message after message, without "
                "what lies between"
            )
        for number, (piece, text) in enumerate(zip(pieces, texts, strict=True), 1):
            if not self.codec.spells(piece[: stored.cut_at], text, stopped=stored.stopped):
                message = "" if len(texts) == 1 else f" of the assistant's message {number}"
                raise DataError(f"token ids do not spell the text{message} with the policy's tokenizer")
        written = iter(pieces)
        ids_of_parts = [
            next(written) if part.own else ids for part, ids in zip(stored.parts, self._encoded(stored), strict=True)
        ]
        return _joined(stored.parts, ids_of_parts)

    def _aligned(self, stored: _Stored, dropped: str) -> _Resolved:
        """Ids of the text of tokens by another tokenizer, with units. Raises DataError if their bytes do not fit it.

        They end with an end token if the stored ones do.
        """
        if stored.token_bytes is None:
            raise DataError("its rows lack logps, or token_bytes, which say where its tokens end in the text")
        if FUTURE in self.keep and stored.cut_at is not None:
            raise DataError("what is stored behind its cut (cut_at) has no text; set horizon=cut")
        text = stored.own[-1]
        start = len(text) - len(text.lstrip(" "))
        cut = stored.complete is False
        count, body = within_text(stored.token_bytes, text[start:], cut=cut, longest=self.codec.longest)
        text, writer = text[:start] + body, stored.token_bytes[:count]
        has_end = writer[-1:] == (0,)
        if cut and has_end:
            raise DataError("marked as cut, yet its tokens end with an end-of-sequence token")
        parts = (*stored.parts[:-1], stored.parts[-1]._replace(text=text))
        *before, ids = self._encoded(replace(stored, parts=parts))
        lengths = self.codec.token_bytes(ids, text)
        ended = self.codec.finish_response(ids, has_end, behind_text=stored.behind_text, tools=stored.tools)
        if lengths is None or ended[: len(ids)] != tuple(ids):
            raise DataError("the policy's tokens do not spell its text byte by byte")
        reader = [*behind_space(lengths, text), *[0] * (len(ended) - len(ids))]
        return _Resolved(_joined(parts, [*before, ended]), dropped, common_units(writer, reader))

    def _tokenized(self, stored: _Stored, dropped: str) -> _Resolved:
        encoded = self._encoded(stored)
        encoded[-1] = self.codec.finish_response(
            encoded[-1], stored.complete, behind_text=stored.behind_text, tools=stored.tools
        )
        response = _joined(stored.parts, encoded)
        if not own_ids(response):
            raise DataError("no tokens")
        return _Resolved(response, dropped)

    def _encoded(self, stored: _Stored) -> list[Sequence[int]]:
        """Ids of each part of a response."""
        placed = _placed(self.codec, stored.before, stored.parts)
        missing = [part for part in placed if part not in self.texts]
        self.texts.update(zip(missing, self.codec.encode_behind(missing), strict=True))
        return [self.texts[part] for part in placed]


def _joined(parts: Sequence[ResponsePart], ids: Sequence[Sequence[int]]) -> Ids:
    """Ids of a response from those of its parts; the last part is never context."""
    return tuple(chain.from_iterable(of if part.own else as_context(of) for part, of in zip(parts, ids, strict=True)))


def _placed(codec: Codec, before: str, parts: Sequence[ResponsePart]) -> list[tuple[str, str]]:
    """The parts of a response behind a text, for `Codec.encode_behind`."""
    befores = accumulate((part.text for part in parts[:-1]), initial=before)
    return [(codec.anchor(text), part.text) for text, part in zip(befores, parts, strict=True)]


def _key(pair: Pair) -> Hashable:
    prompt = pair.prompt
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return isinstance(prompt, str), text, pair.chat_template_kwargs
