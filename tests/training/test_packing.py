"""How an optimizer step's pairs become micro-batches, and a micro-batch's responses rows."""

from __future__ import annotations

import random

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from regretless.modeling.layout import Item, token_count
from regretless.training.packing import cut_rows, filled_tokens, most_tokens, pack_rows


def test_responses_when_spread_over_rows_then_each_is_in_one_and_only_a_single_one_may_be_too_long() -> None:
    numbers = random.Random(0)

    def words(most: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(30) for _ in range(numbers.randint(1, most)))

    items: list[Item] = []
    for _ in range(4):
        prompt = words(8)
        for _ in range(numbers.randint(1, 9)):
            response = words(20)
            # Some with a masked response: a beginning, which costs nothing in the row of the whole one.
            items += [(prompt, response), (prompt, response[: max(1, len(response) - 3)])]
    responses_alone = token_count(items) - sum(map(len, {prompt for prompt, _ in items}))
    for budget in (1, 12, 24, 50, 120, 10_000):
        rows = cut_rows(items, budget)
        assert sorted(item for row in rows for item in row) == sorted(set(items))
        sizes = [token_count(row) for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        prompts = [{prompt for prompt, _ in row} for row in rows]
        assert sum(sizes) - sum(len(prompt) for each in prompts for prompt in each) == responses_alone
        for row, size in zip(rows, sizes, strict=True):
            longest = max(row, key=lambda item: len(item[1]))
            assert size <= budget or all(
                prompt == longest[0] and longest[1][: len(response)] == response for prompt, response in row
            )
    assert len(cut_rows(items, 10_000)) == 1


def test_query_when_larger_than_a_microbatch_then_it_is_cut_by_what_costs_less() -> None:
    prompt = (0, 0)
    chosen, rejected = [[(prompt, (start + n,) * 3) for n in range(8)] for start in (10, 20)]
    everyone = [[c, r] for c in chosen for r in rejected]
    # 50 tokens, 41 at a time. By pairs: 5 chosen with all rejected, then 3 (76 tokens); by responses: 13, then 3 (52).
    assert pack_rows(everyone, 41) == [list(range(64))]
    assert [len(row) for row in cut_rows([item for unit in everyone for item in unit], 41)] == [13, 3]
    # Pairs that share no response: 6, then 2 (52 tokens, all of them computed once).
    assert pack_rows([[c, r] for c, r in zip(chosen, rejected, strict=True)], 41) == [[*range(6)], [6, 7]]
    # One chosen response: with 12 rejected, then with 3 (55 tokens, against 52 of which 11 are computed twice).
    many = [[chosen[0], (prompt, (30 + n,) * 3)] for n in range(15)]
    assert pack_rows(many, 41) == [[*range(12)], [12, 13, 14]]
    # A pair that is too large is one micro-batch of two rows; with its own beginning, of one.
    long = [(prompt, (5,) * 30), (prompt, (6,) * 30)]
    assert pack_rows([long], 41) == [[0]] and [token_count(row) for row in cut_rows(long, 41)] == [32, 32]
    masked = [(prompt, (5,) * 50), (prompt, (5,) * 40)]
    assert pack_rows([masked], 41) == [[0]] and len(cut_rows(masked, 41)) == 1
    # A masked pair, which often comes after all others, stays with its chosen response.
    shorter = [(prompt, (5,) * 30), (prompt, (5,) * 20)]
    assert pack_rows([[shorter[0]], [(prompt, (6,) * 30)], shorter], 41) == [[0, 2], [1]]
    # One of two that share nothing is too large by itself: there is nothing to gain from a first pass.
    assert pack_rows([[masked[0]], [chosen[0]]], 41) == [[0], [1]]


def test_rows_of_several_prompts_when_filled_up_to_less_then_a_single_query_may_still_be_larger() -> None:
    queries = [
        [[((n, n), (m,) * 8), ((n, n), (m + 1,) * 8)] for m in range(0, 2 * pairs, 2)]
        for n, pairs in enumerate((1, 1, 2, 1))
    ]
    units = [unit for query in queries for unit in query]  # 18, 18, 34 and 18 tokens, the third with two pairs
    assert pack_rows(units, 100) == [[2, 3, 0, 1, 4]]
    assert pack_rows(units, 100, filled=40) == [[2, 3], [0, 1], [4]]
    assert pack_rows(units, 30, filled=40) == pack_rows(units, 30) == [[0], [1], [2], [3], [4]]
    assert pack_rows(units, 100, "plain", filled=40) == [[0, 1], [2, 3], [4]]


def test_filled_tokens_when_layers_are_wider_then_rows_of_several_prompts_are_smaller() -> None:
    def model(width: int) -> PreTrainedModel:
        shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": 2, "head_dim": width // 2}
        config = AutoConfig.for_model("qwen3", vocab_size=11, num_hidden_layers=2, num_key_value_heads=1, **shape)
        return AutoModelForCausalLM.from_config(config)

    cpu = torch.device("cpu")
    # Weights of a layer: queries and output w² each, keys and values w²/2 each, three matrices 3 w² in the MLP; norms.
    assert filled_tokens(model(32), cpu) == 2048
    assert abs(filled_tokens(model(160), cpu) - 4 * 10**8 / (12 * 160**2)) < 4  # norms have weights, too
    assert filled_tokens(model(256), cpu) == 1024
    assert filled_tokens(model(256), torch.device("cuda")) == most_tokens(torch.device("cuda")) == 16384


def test_responses_when_they_share_beginnings_then_rows_keep_them_together_and_count_them_once() -> None:
    numbers = random.Random(1)

    def words(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(5, 99) for _ in range(count))

    items: list[Item] = []
    prompt = words(4)
    for _ in range(3):
        first = words(20)
        for second in (words(10), words(10)):
            items += [(prompt, (*first, *second, *words(8))) for _ in range(2)]
    items = [items[n] for n in numbers.sample(range(12), 12)]

    def begins(row: list[Item], length: int) -> int:
        return len({response[:length] for _, response in row})

    # Four responses with their beginning: 4 + 20 + 2 · 10 + 4 · 8 = 76; two: 4 + 20 + 10 + 2 · 8 = 50; one: 42.
    for budget, rows, shared in [(300, 1, 3), (76, 3, 1), (75, 6, 1), (50, 6, 1), (49, 12, 1), (148, 2, 2)]:
        cut = cut_rows(items, budget)
        assert sorted(item for row in cut for item in row) == sorted(items)
        assert len(cut) == rows
        assert max(begins(row, 20) for row in cut) == shared
        if rows == 6:
            assert all(begins(row, 30) == 1 for row in cut)
        assert all(token_count(row) <= budget for row in cut)
    # Pairs of all of them: a micro-batch for each beginning would compute none of them twice.
    units = [[one, other] for one in items[:6] for other in items[6:]]
    assert pack_rows(units, 76) == [[*range(36)]]
