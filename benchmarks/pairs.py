"""Preference pairs as token ids for the benchmarks: model solutions of GSM8K, and random tokens of given lengths."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

Pair = dict[str, Any]
"""prompt_ids, chosen_ids, rejected_ids."""

SOLUTIONS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
"""The models whose solutions `example_model_solutions.jsonl` of openai/grade-school-math holds for each question."""


def gsm8k_pairs(data: Path, tokenizer_path: str, rule: str, vocabulary: int | None) -> list[Pair]:
    """Pairs of real model solutions with labels: `2x2` queries only, or `mixed` (every query with one of each).

    `vocabulary` renumbers the tokens that occur, so that the same texts fit a small vocabulary.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    eos = tokenizer.eos_token_id
    pairs = []
    for line in data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = tokenizer(f"Question: {row['question']}\nAnswer: ")["input_ids"]
        sides: dict[bool, list[list[int]]] = {True: [], False: []}
        for model in SOLUTIONS:
            ids = [*tokenizer(row[model]["solution"])["input_ids"], eos]
            if ids not in sides[row[model]["is_correct"]]:
                sides[row[model]["is_correct"]].append(ids)
        right, wrong = sides[True][:2], sides[False][:2]
        if not right or not wrong or (rule == "2x2" and (len(right), len(wrong)) != (2, 2)):
            continue
        pairs += [{"prompt_ids": prompt, "chosen_ids": r, "rejected_ids": w} for r in right for w in wrong]
    return pairs if vocabulary is None else _compact(pairs, vocabulary)


def _compact(pairs: list[Pair], vocabulary: int) -> list[Pair]:
    numbers: dict[int, int] = {}
    renumbered = [
        {side: [numbers.setdefault(token, len(numbers)) for token in ids] for side, ids in pair.items()}
        for pair in pairs
    ]
    if len(numbers) > vocabulary:
        raise SystemExit(f"{len(numbers)} distinct tokens do not fit a vocabulary of {vocabulary}")
    return renumbered


def with_masked(pairs: list[Pair], each: int = 1, seed: int = 0) -> list[Pair]:
    """The pairs, and behind each query's up to `each` masked pairs for each distinct chosen response."""
    numbers = random.Random(seed)
    queries: dict[tuple[int, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        queries[tuple(pair["prompt_ids"])].append(pair)
    result = []
    for query in queries.values():
        result += query
        for pair in {tuple(pair["chosen_ids"]): pair for pair in query}.values():
            lengths = [m for m in (16, 32, 48, 64, 80) if m < len(pair["chosen_ids"])]
            for masked in numbers.sample(lengths, min(each, len(lengths))):
                result.append({**pair, "rejected_ids": pair["chosen_ids"][:-masked]})
    return result


def synthetic_pairs(queries: int, right: int, wrong: int, prompt: int, response: int, vocabulary: int) -> list[Pair]:
    """Random tokens with lengths spread by a quarter around the given means."""
    numbers = random.Random(0)

    def words(mean: int) -> list[int]:
        return [numbers.randrange(10, vocabulary) for _ in range(max(2, round(numbers.gauss(mean, mean / 4))))]

    pairs = []
    for _ in range(queries):
        ids = words(prompt)
        chosen, rejected = [words(response) for _ in range(right)], [words(response) for _ in range(wrong)]
        pairs += [{"prompt_ids": ids, "chosen_ids": c, "rejected_ids": r} for c in chosen for r in rejected]
    return pairs


def conversation_pairs(
    queries: int, right: int, wrong: int, prompt: int, turns: int, part_at: int, turn: int, vocabulary: int
) -> list[Pair]:
    """Random tokens: conversations of so many turns, about `turn` tokens each, all alike before the turn `part_at`."""
    numbers = random.Random(0)

    def words(mean: int) -> list[int]:
        return [numbers.randrange(10, vocabulary) for _ in range(max(2, round(numbers.gauss(mean, mean / 4))))]

    pairs = []
    for _ in range(queries):
        ids, shared = words(prompt), words((part_at - 1) * turn)
        own = (turns - part_at + 1) * turn
        chosen, rejected = ([shared + words(own) for _ in range(count)] for count in (right, wrong))
        pairs += [{"prompt_ids": ids, "chosen_ids": c, "rejected_ids": r} for c in chosen for r in rejected]
    return pairs


def times_fewer_tokens(pairs: list[Pair]) -> float:
    """Tokens that a trainer reads which takes both sides of every pair, over those that occur once (masked: free)."""
    from regretless.modeling.layout import token_count

    sides = ("chosen_ids", "rejected_ids")
    items = [(tuple(pair["prompt_ids"]), tuple(pair[side])) for pair in pairs for side in sides]
    return sum(len(prompt) + len(answer) for prompt, answer in items) / token_count(items)


def whole_queries(pairs: list[Pair], about: int) -> list[Pair]:
    """The first `about` pairs and those that belong to the same query as the last of them."""
    end = min(about, len(pairs))
    while end < len(pairs) and pairs[end]["prompt_ids"] == pairs[end - 1]["prompt_ids"]:
        end += 1
    return pairs[:end]


def queries_up_to(pairs: list[Pair], longest: int) -> list[Pair]:
    """The pairs of all queries without a sequence, prompt and response, of more than `longest` tokens."""
    sides = ("chosen_ids", "rejected_ids")
    too_long = {
        tuple(pair["prompt_ids"])
        for pair in pairs
        if any(len(pair["prompt_ids"]) + len(pair[side]) > longest for side in sides)
    }
    return [pair for pair in pairs if tuple(pair["prompt_ids"]) not in too_long]
