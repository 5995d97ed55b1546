"""Texts that are nearly equal: most of their sequences of five words are the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from regretless.data.columns import Pair, Text, text_key
from regretless.data.contamination import words

SEQUENCE = 5
ALIKE = 0.8
"""Least share of all sequences of two texts that both have (Jaccard index); this and the length are those of Lee et al.
2022, appendix A. They estimate the share by MinHash; here it is computed."""
FACTORS = np.random.default_rng(0).integers(1, 2**63, SEQUENCE, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def first_alike(texts: Sequence[str]) -> list[int]:
    """For each text, the index of the first one that it is nearly equal to: its own if there is no earlier one.

    A text that is nearly equal to an earlier one stands for itself no longer, so that the work grows with the number of
    different texts. Words are compared as in `data.contamination`. A text of less than five words has one sequence.
    """
    # Sequences as numbers, the rare ones first: two nearly equal texts have one of their first few in common
    # (Chaudhuri et al. 2006, prefix filter), and a phrase that many texts have is not among these.
    known: dict[str, int] = {}
    numbers = [_sequences([known.setdefault(word, len(known) + 1) for word in words(text)]) for text in texts]
    if not numbers:
        return []
    _, inverse, counts = np.unique(np.concatenate(numbers), return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(counts, kind="stable"))[inverse]
    bounds = np.cumsum([0, *map(len, numbers)])

    first: list[int] = []
    sets: dict[int, NDArray[np.int64]] = {}
    having: dict[int, list[int]] = {}
    for index in range(len(texts)):
        mine = np.sort(rank[bounds[index] : bounds[index + 1]])
        some = mine[: len(mine) - math.ceil(ALIKE * len(mine)) + 1].tolist()
        others = sorted({other for number in some for other in having.get(number, ())})
        alike = next((other for other in others if _share(mine, sets[other]) >= ALIKE), index)
        first.append(alike)
        if alike == index:
            sets[index] = mine
            for number in some:
                having.setdefault(number, []).append(index)
    return first


def near_duplicates(pairs: Sequence[Pair]) -> tuple[dict[int, int], dict[int, int]]:
    """Prompts, and pairs, that are nearly equal to an earlier one and not the same; by index of a pair, the earlier's.

    Of a prompt that several pairs have, the index is that of the first. Two pairs are nearly equal if their prompts
    are, and both of their responses.
    """
    first_of_prompt: dict[str, int] = {}
    keys = [text_key(pair.prompt) for pair in pairs]
    for index, key in enumerate(keys):
        first_of_prompt.setdefault(key, index)
    firsts = list(first_of_prompt.values())
    alike = first_alike([_plain(pairs[index].prompt) for index in firsts])
    group_of = {key: firsts[same] for key, same in zip(first_of_prompt, alike, strict=True)}
    prompts = {index: group_of[key] for key, index in first_of_prompt.items() if group_of[key] != index}

    groups: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(group_of[key], []).append(index)
    near: dict[int, int] = {}
    for members in groups.values():
        if len(members) > 1:
            near |= _near_pairs(pairs, members)
    return prompts, near


def _near_pairs(pairs: Sequence[Pair], members: Iterable[int]) -> dict[int, int]:
    """Pairs of nearly equal prompts that are nearly equal to an earlier one of them, and not the same."""
    sides = {index: [_plain(side.text) for side in pairs[index].sides.values()] for index in members}
    texts = list(dict.fromkeys(text for both in sides.values() for text in both))
    alike = dict(zip(texts, first_alike(texts), strict=True))
    near: dict[int, int] = {}
    earlier: dict[tuple[int, ...], int] = {}
    seen: set[tuple[str, ...]] = set()
    for index, both in sides.items():
        exact = (text_key(pairs[index].prompt), *both)
        other = earlier.setdefault(tuple(alike[text] for text in both), index)
        if other != index and exact not in seen:
            near[index] = other
        seen.add(exact)
    return near


def _plain(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(message["content"] for message in text)


def _sequences(ids: list[int]) -> NDArray[np.uint64]:
    """The distinct sequences of words of a text, each as a number: two differ with a probability of 1 in 2⁶³."""
    padded = np.array([*ids, *[0] * (SEQUENCE - len(ids))], dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, SEQUENCE)
    return np.unique((windows * FACTORS).sum(axis=1, dtype=np.uint64))


def _share(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    shorter, longer = sorted((len(first), len(second)))
    if shorter < ALIKE * longer:
        return 0.0
    both = len(np.intersect1d(first, second, assume_unique=True))
    return both / (shorter + longer - both)
