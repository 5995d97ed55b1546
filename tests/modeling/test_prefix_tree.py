"""Responses that share beginnings: the tree itself, and its computation against one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface

from one_by_one import gradients, own_logps
from regretless.core.errors import ConfigError
from regretless.modeling import cpu_attention, gpu_attention
from regretless.modeling.forward import grouped, reference_head, response_scores
from regretless.modeling.layout import Ids, Segment, as_context, lay_out, own_ids, token_count
from regretless.modeling.model_check import check_grouped
from regretless.modeling.prefix_tree import SHARED_AT_LEAST, hosts, prefix_tree
from regretless.modeling.scoring import score_responses
from tiny_kinds import tiny_of_kind

PROMPT, OTHER = (5, 6, 7, 8, 9, 10), (11, 12)
FIRST = (*range(13, 25), 2, *as_context((30, 31, 32)), 14, 15)
"""18 tokens: a message, context, and the beginning of the next message."""
SECOND = (*FIRST, 16, 2, *as_context((33,)), 17)
RESPONSES: list[Ids] = [
    (*SECOND, 20, 21, *as_context((22, 23)), 24, 2),
    (*SECOND, 30, 31, 2),
    (39, 38, 37, 2),  # shares nothing
    (*FIRST, 34, 35, 2),
    (*SECOND, 20, 36, 2),  # parts from the first one a token later
    (*SECOND, 33),  # one token of its own, which is predicted only
    (*SECOND, 20, 21, *as_context((22, 23)), 24),  # a prefix of the first: a masked response
    SECOND,  # a prefix that ends where others part
    FIRST[:7],
    (*FIRST, 34, 35, 2),  # the same response again
    (*FIRST[:15], 36, 2),  # 15 tokens in common
    (*FIRST[:14], 31, 36, 2),  # the same ids as the others; one is a token of the model, not context
]
ITEMS = [(PROMPT, response) for response in RESPONSES] + [(OTHER, response) for response in RESPONSES[:2]]
OWN_OF_ONE = {
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "gpt_oss": {"num_local_experts": 4},
}


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for values, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(values.double(), expected.double(), rtol=0, atol=1e-5)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """FlexAttention's mask, filled in by its rule: on a CPU FlexAttention itself has no backward pass."""
    at = torch.arange(query.shape[2])
    sees = options["block_mask"].mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None, :])
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, sees, scale=options["scale"], enable_gqa=options["enable_gqa"])


def test_row_when_responses_share_beginnings_then_each_is_read_once_and_predicts_all_that_follow() -> None:
    layout, places = lay_out(ITEMS)
    # A prompt, then the branches in depth-first order: what five share, what four of them go on to share, one more
    # token that two share, their ends; the ends of the second and of the fourth response. Last tokens are not read.
    ends = [Segment(4, 3), Segment(1, 3), Segment(2, 2), Segment(2, 1)]
    first = [Segment(6), Segment(18, 0), Segment(4, 1), Segment(1, 2), *ends]
    alone = [Segment(3, 0), Segment(16, 0), Segment(16, 0)]
    assert layout.segments == (*first, *alone, Segment(2), Segment(22, 11), Segment(5, 12), Segment(2, 12))
    assert layout.position_ids[0, 24:38].tolist() == [*range(24, 28), 28, *range(29, 33), 29, 28, 29, 24, 25]
    parts = [SECOND, (20,), RESPONSES[0][23:], (36, 2), (30, 31, 2), (33,), (34, 35, 2)]
    parts += [RESPONSES[2], RESPONSES[10], RESPONSES[11], SECOND, RESPONSES[0][22:], RESPONSES[1][22:]]
    assert layout.targets.tolist() == [token for part in parts for token in own_ids(part)]
    # Where three ways part, one position predicts three tokens.
    last = layout.predict[places[7][-1]] + 1
    assert [int(layout.predict[places[n][len(own_ids(SECOND))]]) for n in (0, 1, 4, 5)] == [last] * 4
    for (_, response), place in zip(ITEMS, places, strict=True):
        assert tuple(layout.targets[place].tolist()) == own_ids(response)
    # The last tokens of eight responses and of two are not in the row.
    assert token_count(ITEMS) == layout.tokens + 8 + 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=40).map(tuple), min_size=1, max_size=12, unique=True))
def test_tree_when_responses_are_random_then_its_tokens_are_the_distinct_beginnings(drawn: list[Ids]) -> None:
    # Few would share 16 tokens by chance: all but some go on from a common beginning.
    responses = [(1,) * SHARED_AT_LEAST + one if sum(one) % 3 else one for one in drawn]
    host = hosts(responses)
    leaves = [response for response in responses if host[response] == response]
    branches = prefix_tree(leaves)
    read: dict[int, Ids] = {}
    path: list[int] = []
    for number, branch in enumerate(branches):
        before = () if branch.parent is None else read[branch.parent]
        assert branch.start == len(before)
        assert branch.tokens
        read[number] = before + branch.tokens
        path = [*path[: 0 if branch.parent is None else path.index(branch.parent) + 1], number]  # depth first
    assert sorted(read[number] for number, branch in enumerate(branches) if branch.is_end) == sorted(leaves)
    distinct = {response[:end] for response in leaves for end in range(SHARED_AT_LEAST, len(response) + 1)}
    groups = {response[:SHARED_AT_LEAST] for response in leaves}
    shared = sum(len(one) for one in groups) - len(groups & distinct)
    assert sum(len(branch.tokens) for branch in branches) == len(distinct) + shared


def test_tree_when_responses_share_too_little_then_they_stand_side_by_side_in_their_order() -> None:
    begin = tuple(range(SHARED_AT_LEAST - 1))
    responses = [(*begin, 90, 5), (3, 4), (*begin, 91), (*begin, 89)]
    assert [(branch.parent, branch.tokens) for branch in prefix_tree(responses)] == [(None, one) for one in responses]
    assert len(prefix_tree([(*begin, 8, 5), (*begin, 8, 6)])) == 3


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        ("qwen3", None),
        ("mistral", 5),
        ("mistral", 20),
        ("gemma2", 20),
        ("gpt_oss", 6),
        ("qwen3", "padded"),
        ("mistral", "padded 20"),
    ],
)
def test_tree_when_compared_with_one_sequence_at_a_time_then_values_and_gradients_agree(
    kind: str, window: int | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = isinstance(window, str)
    size = int(window.removeprefix("padded") or 0) if isinstance(window, str) else window
    monkeypatch.setattr(gpu_attention, "_flex", lambda device: dense)
    model = tiny_of_kind(kind, **OWN_OF_ONE.get(kind, {}), **({"sliding_window": size} if size else {}))
    wanted = own_logps(model, ITEMS)
    expected = gradients(model, wanted)
    layout, places = lay_out(ITEMS)
    with grouped(model, one_row=padded):
        scores = response_scores(model, layout).logps
        found = [scores[place] for place in places]
        got = gradients(model, found)
    assert_same(found, wanted)
    for name, value in expected.items():
        # Models compute their norms in float32 whatever their own precision.
        assert float((got[name] - value).norm()) <= 1e-5 * float(value.norm()) + 1e-12, name


def test_tree_when_a_branch_sees_its_sibling_then_check_and_comparison_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_of_kind("qwen3")
    wanted = own_logps(model, ITEMS)
    layout, places = lay_out(ITEMS)

    def seeing(*arguments: Any, segments: tuple[Segment, ...], **options: Any) -> Any:
        wrong, last = list(segments), {}
        for number, segment in enumerate(segments):
            if segment.parent and segments[segment.parent].parent is not None:
                wrong[number] = Segment(segment.length, last.get(segment.parent, segment.parent))
                last[segment.parent] = number
        return cpu_attention.grouped_attention(*arguments, segments=tuple(wrong), **options)

    def compare() -> None:
        with grouped(model), torch.no_grad():
            scores = response_scores(model, layout).logps
        assert_same([scores[place] for place in places], wanted)

    compare()
    monkeypatch.setitem(AttentionInterface._global_mapping, cpu_attention.NAME, seeing)
    with pytest.raises(AssertionError):
        compare()
    with pytest.raises(ConfigError, match=r"depends on \d+ tokens of other responses"):
        check_grouped(model, 40)


@pytest.mark.parametrize("budget", [10, 30, 45, 10_000])
def test_scores_when_responses_share_beginnings_then_they_are_those_of_one_sequence_at_a_time(budget: int) -> None:
    model = tiny_of_kind("qwen3")
    found = score_responses(model, ITEMS, max_tokens=budget)
    assert_same([torch.from_numpy(values) for values in found], own_logps(model, ITEMS))


def test_scores_when_a_prompt_needs_several_rows_then_responses_that_share_a_beginning_are_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_of_kind("qwen3")
    check_grouped(model, 40)
    read: list[int] = []
    model.model.register_forward_hook(lambda _, args, output: read.append(output[0].shape[1]))
    begins = [tuple(range(number, number + 20)) for number in (10, 11, 12)]
    # As pairs bring them: one of each in turn.
    items = [(PROMPT, (*begin, end, 2)) for end in (5, 6, 7) for begin in begins]
    score_responses(model, items, max_tokens=40)
    assert read == [6 + 20 + 3] * 3


def test_divergence_when_responses_share_beginnings_then_each_token_has_its_own_distribution() -> None:
    model, other = tiny_of_kind("qwen3"), tiny_of_kind("qwen3")
    with torch.no_grad():
        other.get_output_embeddings().weight.add_(0.1 * torch.randn(40, 32).double())
    layout, places = lay_out(ITEMS)
    with grouped(model), grouped(other), torch.no_grad():
        together = response_scores(model, layout, reference_head(other, layout), statistics=True)
        for item, place in zip(ITEMS, places, strict=True):
            single, (index,) = lay_out([item])
            alone = response_scores(model, single, reference_head(other, single), statistics=True)
            for values, expected in zip(together[:3], alone[:3], strict=True):
                assert values is not None and expected is not None
                torch.testing.assert_close(values[..., place], expected[..., index], rtol=1e-5, atol=1e-6)
