"""Columns of a preference row, as public data sets have them: read, checked, refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from regretless.records import Message, Text, logps_problem, text_key

PROMPT_COLUMNS = ("prompt", "instruction", "question")
"""Where a prompt is looked for when no key is given; `instruction` takes a non-empty `input` along."""
COMPLETION_COLUMNS = ("chosen", "completion", "response")
"""Where the text to imitate is looked for when rejected responses are not needed."""
MARKS = ("label", "kto_tag")
"""Columns that say of a single response whether it is a good one (TRL's and LLaMA-Factory's data for KTO)."""
EQUAL = "chosen and rejected are equal: the pair says nothing"
Side = Literal["chosen", "rejected"]


class Unusable(Exception):
    """Reason why a row is refused; the reader makes a `Refusal` of it."""


@dataclass(frozen=True)
class Keys:
    """Names of the columns, and whether a rejected side is wanted."""

    prompt: str | None
    chosen: str
    rejected: str
    need_rejected: bool


def response_text(response: Text) -> str:
    """The text of a response that is a string or a list of messages (contents joined with line breaks)."""
    return response if isinstance(response, str) else "\n".join(message["content"] for message in response)


def read_kind(row: Mapping[str, Any]) -> Literal["original", "masked"]:
    """Whether the rejected side is the beginning of the chosen one. Raises Unusable for another kind."""
    kind = row.get("kind") or ("masked" if row.get("rejected_mask_len") else "original")
    if kind not in ("original", "masked"):
        raise Unusable(f"kind: expected original or masked, got {kind!r}")
    return "masked" if kind == "masked" else "original"


def check_complete(sides: Mapping[str, Mapping[str, Any]], kind: str) -> None:
    """Raise Unusable when a side is cut that should not be."""
    for side, values in sides.items():
        if values["complete"] is False and not (kind == "masked" and side == "rejected"):
            raise Unusable(
                f"{side}: cut before its end (no end-of-sequence token); only the rejected side of a masked pair may be"
            )


# ---- texts ----------------------------------------------------------------------------------------------------------


def read_texts(row: Mapping[str, Any], keys: Keys) -> tuple[Text, Text, Text | None]:
    """Prompt, chosen and rejected of a row, an implicit prompt taken out of the two. Raises Unusable."""
    prompt = _prompt(row, keys.prompt)
    if not keys.need_rejected and row.get(keys.chosen) is None and row.get("chosen") is None:
        _check_worth_imitating(row)
    chosen = _text(row, *((keys.chosen,) if keys.need_rejected else (keys.chosen, *COMPLETION_COLUMNS)))
    if chosen is None and not keys.need_rejected and (messages := _text(row, "messages")) is not None:
        chosen, prompt = messages, None
    rejected = _text(row, keys.rejected)
    missing = [name for name, text in ((keys.chosen, chosen), (keys.rejected, rejected)) if text is None]
    if chosen is None or (keys.need_rejected and rejected is None):
        raise Unusable(f"missing column(s) {', '.join(missing)}; found {', '.join(sorted(row)) or 'none'}")
    prompt, chosen, rejected = _split_prompt(prompt, chosen, rejected, keys)
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if text is None or (name == "rejected" and not keys.need_rejected):
            continue
        if not response_text(text).strip():
            raise Unusable(f"{name}: empty completion")
        if isinstance(text, list) and text[0]["role"] not in ("assistant", "tool"):
            raise Unusable(f"{name}: expected it to start with an assistant message, got {text[0]['role']}")
    return prompt, chosen, rejected if keys.need_rejected else None


def _check_worth_imitating(row: Mapping[str, Any]) -> None:
    """Raise Unusable for a single response that its row calls bad, or that no one knows to be right."""
    for name in MARKS:
        value = row.get(name)
        if value is None:
            continue
        good = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(good, bool | int | float | np.bool_ | np.number) or good not in (0, 1):
            raise Unusable(
                f"{name}: expected true or false (is the response a good one?), got {value!r:.40}; remove the column "
                "where it says something else"
            )
        if not good:
            raise Unusable(f"{name}: false, and supervised training imitates; only a good response is taken")
    if row.get("verdict") in ("wrong", "unknown"):
        raise Unusable(f"verdict: {row['verdict']}, and supervised training imitates; only a correct response is taken")


def _prompt(row: Mapping[str, Any], key: str | None) -> Text | None:
    if key is not None and "," not in key:
        prompt = _text(row, key)
        if prompt is None:
            raise Unusable(f"missing column(s) {key}; found {', '.join(sorted(row)) or 'none'}")
        return prompt
    if key is None:
        key = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), "prompt")
        if key != "instruction":
            return _text(row, key)
        key = "instruction,input"
    parts = [row.get(name.strip()) for name in key.split(",")]
    return "\n".join(part for part in parts if isinstance(part, str) and part) or None


def _text(row: Mapping[str, Any], *names: str) -> Text | None:
    """First of the columns that is there, checked to be text or messages."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if value is not None:
            return [_message(item, name) for item in _list(value, name, "text or a list of messages")]
    return None


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, Mapping) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
        raise Unusable(f"{name}: expected messages with the texts role and content, got {item!r:.80}")
    return {"role": item["role"], "content": item["content"]}


def _list(value: Any, name: str, expected: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise Unusable(f"{name}: expected {expected}, got {type(value).__name__} {value!r:.40}")
    return list(value)


def _split_prompt(
    prompt: Text | None, chosen: Text, rejected: Text | None, keys: Keys
) -> tuple[Text, Text, Text | None]:
    """Prompt and completions, whether the two sides are completions or hold the whole conversation or text."""
    if rejected is not None and isinstance(chosen, str) != isinstance(rejected, str):
        raise Unusable("chosen and rejected: expected both texts or both messages")
    whole = isinstance(chosen, list) and (
        chosen[: len(prompt)] == prompt if isinstance(prompt, list) else chosen[0]["role"] in ("system", "user")
    )
    if prompt is not None and not whole:
        if isinstance(prompt, str) and isinstance(chosen, list):
            prompt = [{"role": "user", "content": prompt}]
        return prompt, chosen, rejected
    if rejected is None:
        if isinstance(chosen, str):
            raise Unusable(f"missing column(s) {keys.prompt or 'prompt'}; without a rejected side it has to be given")
        return chosen[:-1], chosen[-1:], None
    if chosen == rejected:
        raise Unusable(EQUAL)
    length = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and chosen[:length].endswith(" "):
        length -= 1  # a word and the space before it are one token in most vocabularies
    if length == 0:
        raise Unusable("no prompt column, and chosen and rejected have no common beginning that could be the prompt")
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if length >= len(text):
            raise Unusable(f"{name}: empty completion: it is the beginning of the other side")
    return chosen[:length], chosen[length:], rejected[length:]


# ---- tokens and log-probabilities -----------------------------------------------------------------------------------


def read_side(
    row: Mapping[str, Any], side: Side, text: Text, prompt_id: str, known: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Columns of one side beyond its text; `known` holds the responses read so far. Raises Unusable."""
    ids = read_ids(row, f"{side}_token_ids")
    logps = _floats(row.get(f"{side}_logps"), f"{side}_logps")
    tokens = row.get(f"{side}_tokens")
    name = f"{side}_logps"
    released = row.get(f"{side}_logprob_with_token")
    if released is not None and logps is None:
        name = f"{side}_logprob_with_token"
        if not isinstance(released, Mapping) or not {"tokens", "logprobs"} <= set(released):
            raise Unusable(f"{name}: expected an object with tokens and logprobs, got {released!r:.60}")
        tokens = _list(released["tokens"], f"{name}.tokens", "a list of token strings")
        logps = _floats(released["logprobs"], f"{name}.logprobs")
        ids = read_ids(released, "token_ids", f"{name}.token_ids")
    if tokens is not None and not all(isinstance(token, str) for token in tokens):
        raise Unusable(f"{name}: expected token strings")
    problem = logps_problem(name, ids if ids is not None else tokens, logps)
    if problem:
        raise Unusable(problem)
    values = {
        "id": str(row.get(f"{side}_id") or f"{prompt_id}-{text_key(text)}"),
        "token_ids": ids,
        # Ids name tokens exactly; strings are for data that has nothing else.
        "tokens": tokens if ids is None else None,
        "logps": logps,
        "model": row.get(f"{side}_model"),
        "complete": _complete(row, side),
        "score": _score(row, side),
    }
    # A response stands in several pairs: its tokens, most of what is in memory, are kept once.
    same = known.setdefault(str(values["id"]), values)
    return values | {name: same[name] for name in ("token_ids", "tokens", "logps") if same[name] == values[name]}


def read_ids(columns: Mapping[str, Any], column: str, name: str | None = None) -> list[int] | None:
    """Token ids of a column, None where it is missing; `name` is what messages call it."""
    value, name = columns.get(column), name or column
    if value is None:
        return None
    ids = _list(value, name, "a list of token ids")
    if np.asarray(ids).dtype.kind != "i" or min(ids) < 0:
        raise Unusable(f"{name}: expected non-negative integers")
    return ids


def _floats(value: Any, name: str) -> list[float] | None:
    if value is None:
        return None
    try:
        # A null becomes NaN, which is refused with its position.
        floats: list[float] = np.asarray(_list(value, name, "a list of numbers"), dtype=np.float64).tolist()
    except (TypeError, ValueError):
        raise Unusable(f"{name}: expected a list of numbers") from None
    return floats


def _complete(row: Mapping[str, Any], side: Side) -> bool | None:
    complete = row.get(f"{side}_complete")
    if complete is not None and not isinstance(complete, bool):
        raise Unusable(f"{side}_complete: expected true or false, got {complete!r}")
    return False if row.get(f"{side}_mask_len") else complete


def _score(row: Mapping[str, Any], side: Side) -> float | None:
    metadata = row.get("metadata")
    for columns in (row, metadata if isinstance(metadata, Mapping) else {}):
        for name in (f"{side}_score", f"score_{side}", f"{side}_rating"):
            value = columns.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
    return None
