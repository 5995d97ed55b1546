"""The mask stage: adds pairs of a chosen response and its own beginning (paper, ablation and data appendix).

The paper removes "the last m tokens". Here these are the last m recorded tokens, including the end-of-sequence token,
as in the authors' released code, so the rest never ends with it. By default each distinct chosen response yields at
most one masked pair: in the paper's math data, where most occur in two pairs, this gives its 31.5K for 63K pairs. With
`per_response` it yields several, each with another number of removed tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from regretless.core.errors import ConfigError, DataError
from regretless.core.paths import PathSetting
from regretless.core.settings import Section, Seed
from regretless.data.codec import Codec, codec_of
from regretless.data.columns import Pair, Side, Text
from regretless.data.conversations import response_parts
from regretless.data.pair_source import PairSource
from regretless.data.rows import write_records
from regretless.data.steps import first_steps
from regretless.modeling.layout import Ids
from regretless.modeling.load import ModelConfig, load_tokenizer


class MaskConfig(Section):
    """Settings of the mask stage."""

    lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(16, 32, 48, 64, 80), min_length=1)
    """Numbers of tokens to remove from the end; for each response one of those shorter than it is drawn. The default is
    the paper's; its released code uses 16, 32, 48 and 64."""
    count: (
        Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(gt=0, le=1, strict=True)] | Literal["all"]
    ) = "all"
    """Number of masked pairs to add: a whole number, a fraction of the number of original pairs (the paper: 0.5), or
    `all` that are possible. A smaller number takes a subset of what a larger one takes."""
    per_response: int = Field(default=1, ge=1)
    """Most masked pairs of one distinct chosen response, each with another of `lengths`. Second pairs are taken when
    every response that is long enough has its first one, and so on, so a `count` that fewer reach stays the same."""
    horizon: Literal["cut", "stored"] = "cut"
    """Whether the removed tokens are `stored` behind the cut, with their log-probabilities, for objectives that read
    them as the future of what is left (`repo` with the same setting)."""
    keep_originals: bool = True
    """Keep the original pairs beside the masked ones; without them, training shows what masked pairs teach alone."""
    tokenizer: PathSetting | None = None
    """Hub id or folder of the behavior model's tokenizer, used to write the remaining text. It is required unless the
    data has token strings in place of token ids."""
    seed: Seed = 0
    """Random seed. What is removed from a response depends on the seed and the response's id alone."""

    @model_validator(mode="after")
    def _enough_lengths(self) -> Self:
        if self.per_response > len(set(self.lengths)):
            raise ValueError(
                f"per_response: expected at most {len(set(self.lengths))}, the number of different `lengths`, got "
                f"{self.per_response}"
            )
        return self


@dataclass(frozen=True)
class _Source:
    """A masked pair that is possible: a chosen response, and the number of tokens to remove."""

    pair: Pair
    key: str
    length: int
    rank: int
    """0 for the first pair of its response, 1 for the second …"""

    @property
    def side(self) -> Side:
        """What is left of the response, with the text of all of it."""
        chosen = self.pair.chosen
        return chosen.first_tokens(chosen.length - self.length)

    @property
    def identity(self) -> tuple[str, int]:
        """What tells it from all others."""
        return self.key, self.rank


def run(config: MaskConfig, pairs: Path, output: Path) -> dict[str, Any]:
    """Add masked pairs to the pairs of a file; returns counts, also of chosen responses that were left out, by reason.

    Written into the folder `output`: pairs.parquet (the input pairs in their order, unless `keep_originals` is false,
    then the masked ones) and refused.jsonl. Raises DataError if no pair can be read, if fewer masked pairs are possible
    than `count` asks for, or if none would be written.
    """
    source = PairSource.read(pairs, one_kind=True)
    source.check(source.pairs, output / "refused.jsonl")
    masked, counts = mask_pairs(source.pairs, config)
    kept = [*(source.pairs if config.keep_originals else ()), *masked]
    if not kept:
        raise DataError(f"{pairs}: mask.keep_originals is false and there is no masked pair; raise mask.count")
    write_records(output / "pairs.parquet", kept)
    return {"pairs": len(kept), **counts, "refused": len(source.refused)}


def mask_pairs(pairs: Sequence[Pair], config: MaskConfig) -> tuple[list[Pair], dict[str, Any]]:
    """Masked pairs for the chosen responses of pairs, and counts. Raises DataError if `count` cannot be reached."""
    codec = codec_of(load_tokenizer(ModelConfig(name_or_path=config.tokenizer))) if config.tokenizer else None
    left_out: Counter[str] = Counter()
    sources = list(_sources(pairs, config, codec, left_out))
    originals = sum(pair.kind == "original" for pair in pairs)
    responses = sum(source.rank == 0 for source in sources)
    wanted = _wanted(config, originals, len(sources), responses, left_out)
    # Every response has its own random number, so that its selection does not depend on the other responses.
    order = sorted(
        sources, key=lambda source: (source.rank, Random(f"{config.seed}:take:{source.key}").random(), source.key)
    )
    selected = {source.identity for source in order[:wanted]}
    masked = [_masked(source, codec, config.horizon) for source in sources if source.identity in selected]
    lengths = Counter(source.length for source in sources if source.identity in selected)
    return masked, {
        "masked": len(masked),
        "chosen_responses": responses + sum(left_out.values()),
        "removed_tokens": {str(length): lengths[length] for length in sorted(lengths)},
        "left_out": dict(sorted(left_out.items())),
    }


def _wanted(config: MaskConfig, originals: int, available: int, responses: int, left_out: Counter[str]) -> int:
    if config.count == "all":
        wanted = max(available, 1)
    else:
        wanted = config.count if isinstance(config.count, int) else round(config.count * originals)
    if wanted > available:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(left_out.items())) or "none"
        possible = min(len(set(config.lengths)), config.per_response + 1)
        more = "" if possible <= config.per_response else f"; mask.per_response={possible} allows more of each"
        raise DataError(
            f"mask.count: expected at most {available}, those of the {responses} distinct chosen responses that can be "
            f"masked (up to {config.per_response} of each); got {wanted} (left out: {reasons}){more}"
        )
    return wanted


def _sources(
    pairs: Iterable[Pair], config: MaskConfig, codec: Codec | None, left_out: Counter[str]
) -> Iterable[_Source]:
    """Distinct chosen responses of original pairs that can be masked, in order; others are counted by reason."""
    seen: set[str] = set()
    usable, foreign = 0, None
    for pair in pairs:
        key = f"{pair.prompt_id}/{pair.chosen.id}"
        if pair.kind == "masked" or key in seen:
            continue
        seen.add(key)
        tokens = pair.chosen.pieces or ()
        spare = pair.chosen.length - (pair.prefix_tokens or 0)
        fitting = [length for length in config.lengths if length < spare]
        if not tokens:
            left_out["without_token_ids"] += 1
        elif pair.chosen.token_ids is None and not isinstance(pair.chosen.text, str) and len(pair.chosen.text) > 1:
            left_out["several_messages_without_token_ids"] += 1
        elif config.horizon == "stored" and not _is_storable(pair.chosen):
            left_out["cannot_store_what_is_removed"] += 1
        elif not fitting:
            left_out["too_short"] += 1
        elif reason := _unwritable(pair, codec):
            left_out[reason] += 1
            foreign = foreign or (pair.tokenizer_of("chosen") if reason == "another_tokenizer" else None)
        elif cuts := list(_cuts(pair, key, fitting, config, codec)):
            usable += 1
            yield from cuts
        else:
            left_out["no_text_left"] += 1
    if foreign is not None and codec is not None and not usable:
        raise ConfigError(
            f"mask.tokenizer: expected the tokenizer that made the ids ({foreign}), got another vocabulary "
            f"({codec.fingerprint}); set it to the behavior model's tokenizer"
        )


def _is_storable(side: Side) -> bool:
    """Whether tokens can be stored behind a cut: ids, of one message."""
    return side.token_ids is not None and (isinstance(side.text, str) or len(side.text) == 1)


def _cuts(pair: Pair, key: str, fitting: Sequence[int], config: MaskConfig, codec: Codec | None) -> Iterator[_Source]:
    """The masked pairs of one response, with different numbers of removed tokens; none if the first leaves no text."""
    rng = Random(f"{config.seed}:length:{key}")
    first = rng.choice(fitting)
    others = sorted(set(fitting) - {first})
    rng.shuffle(others)
    rank = 0
    for length in (first, *others):
        source = _Source(pair, key, length, rank)
        if _left(source, codec)[1].strip():
            yield source
            rank += 1
        elif length == first:
            return
        if rank == config.per_response:
            return


def _unwritable(pair: Pair, codec: Codec | None) -> str | None:
    """Why the remaining text of a response cannot be written, or None. Raises ConfigError without a tokenizer."""
    if pair.chosen.token_ids is None:
        return None
    if codec is None:
        raise ConfigError(
            "mask.tokenizer: required to write the text of the remaining tokens; set it to the hub id or folder of the "
            "behavior model's tokenizer"
        )
    if pair.tokenizer_of("chosen") not in (None, codec.fingerprint):
        return "another_tokenizer"
    try:
        parts = response_parts(codec, pair.prompt, pair.chosen.text, pair.chat_template_kwargs, sampled=True)
    except DataError:
        return "not_written_by_the_chat_template"
    texts = [part.text for part in parts if part.own]
    pieces = _by_message(pair, tuple(pair.chosen.token_ids[: pair.chosen.cut_at]), codec)
    stopped = pair.chosen.stopped
    spells = [codec.spells(*both, stopped=stopped) for both in zip(pieces, texts, strict=False)]
    return None if len(pieces) == len(texts) and all(spells) else "ids_do_not_spell_the_text"


def _by_message(pair: Pair, ids: Ids, codec: Codec) -> list[Ids]:
    """The ids of each of the assistant's messages."""
    several = not isinstance(pair.chosen.text, str) and len(pair.chosen.text) > 1
    return codec.split_at_ends(ids) if several else [ids]


def _left(source: _Source, codec: Codec | None) -> tuple[int, str]:
    """Number of messages that a cut leaves whole, and what it leaves of the next one: nothing if it falls between."""
    side = source.side
    if side.token_ids is None or codec is None:
        return 0, "".join(side.tokens or [])
    pieces = _by_message(source.pair, tuple(side.token_ids), codec)
    if len(pieces) > 1 and codec.without_end(pieces[-1]) != pieces[-1]:
        return len(pieces), ""
    return len(pieces) - 1, codec.decode([pieces[-1]])[0]


def _masked(source: _Source, codec: Codec | None, horizon: Literal["cut", "stored"]) -> Pair:
    pair, chosen, length = source.pair, source.pair.chosen, source.length
    whole, left = _left(source, codec)
    text: Text = left
    if not isinstance(chosen.text, str):
        answers = [position for position, message in enumerate(chosen.text) if message["role"] == "assistant"]
        # Of a tool call that is cut, too, the rest is plain text: what the model had written.
        text = [*chosen.text[: answers[whole]], {"role": "assistant", "content": left}]
    rejected = chosen.first_tokens(chosen.length - length, keep_rest=horizon == "stored")
    # What is stored behind the cut keeps its steps.
    steps = (
        {}
        if chosen.step_ends is None or rejected.cut_at
        else first_steps(chosen.step_ends, chosen.step_labels, len(left))
    )
    return replace(
        pair,
        rejected=replace(rejected, text=text, id=f"{chosen.id}-{length}", **steps),
        pair_id=f"{chosen.id}>-{length}",
        tokenizer=pair.tokenizer_of("chosen"),
        kind="masked",
        preference_probability=None,
    )
