"""FlexAttention's block mask against the rule written out position by position."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from regretless.modeling import gpu_attention
from regretless.modeling.gpu_attention import BLOCK, RowMask, compiled, flex_grouped_attention, padded_length
from regretless.modeling.layout import Segment


@st.composite
def trees(draw: st.DrawFn) -> list[Segment]:
    """Segments in depth-first order: each is a prompt, or continues one of those that end in the one before it."""
    path: list[int] = []
    found: list[Segment] = []
    for number in range(draw(st.integers(1, 9))):
        path = path[: draw(st.integers(0, len(path)))]
        found.append(Segment(draw(st.integers(1, 300)), path[-1] if path else None))
        path.append(number)
    return found


def visible(segments: list[Segment], length: int, window: int | None) -> torch.Tensor:
    """(N, N) which position sees which, from the definition: its own sequence up to itself."""
    sees = torch.eye(length, dtype=torch.bool)
    start = 0
    sequences: list[list[int]] = []
    for segment in segments:
        before = [] if segment.parent is None else sequences[segment.parent]
        sequences.append([*before, *range(start, start + segment.length)])
        start += segment.length
        index = torch.tensor(sequences[-1])
        at = torch.arange(len(index))
        distance = at[:, None] - at[None, :]
        sees[index[:, None], index[None, :]] = (distance >= 0) & (distance < (window or length))
    return sees


@settings(max_examples=40, deadline=None)
@given(trees(), st.sampled_from([None, 1, 50, 128, 400]))
def test_block_mask_when_rows_are_random_then_it_is_the_rule(segments: list[Segment], window: int | None) -> None:
    used = sum(segment.length for segment in segments)
    length = used + -used % BLOCK
    wanted = visible(segments, length, window)
    mask = RowMask(segments, length, torch.device("cpu")).blocks(window)

    grid = torch.arange(length)
    rule = mask.mask_mod(torch.tensor(0), torch.tensor(0), grid[:, None], grid[None, :])
    assert torch.equal(rule, wanted)

    blocks = wanted.view(length // BLOCK, BLOCK, length // BLOCK, BLOCK).transpose(1, 2)
    listed = torch.zeros(blocks.shape[:2], dtype=torch.int)
    for kind, (counts, indices) in enumerate(
        [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)], start=1
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            listed[row, indices[0, 0, row, :count].long()] += kind
    # 0: skipped, so nothing in it may be visible. 2: computed without the rule, so all of it must be.
    assert not blocks[listed == 0].any()
    assert blocks[listed == 2].all()
    assert set(listed.unique().tolist()) <= {0, 1, 2}
    if window is None:
        assert torch.equal(listed == 1, blocks.any((2, 3)) & ~blocks.all(3).all(2))


def test_flex_when_it_would_be_silently_wrong_then_it_refuses() -> None:
    states = torch.zeros(1, 1, BLOCK, 16)
    with pytest.raises(ValueError, match="without `row_mask`"):
        flex_grouped_attention(torch.nn.Identity(), states, states, states, None)
    mask = RowMask([Segment(BLOCK)], BLOCK, torch.device("cpu"))
    with pytest.raises(ValueError, match="attention_dropout"):
        flex_grouped_attention(torch.nn.Identity(), states, states, states, None, dropout=0.1, row_mask=mask)


def test_flex_when_rows_have_ever_new_lengths_then_each_rule_is_compiled_once_and_never_left_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = CompileCounter()
    torch._dynamo.reset()
    numbers = random.Random(0)

    def attend(row: list[Segment], window: int | None) -> None:
        length = padded_length(sum(segment.length for segment in row))
        states = torch.randn(1, 2, length, 8)
        mask = RowMask(row, length, torch.device("cpu"))
        flex_grouped_attention(
            torch.nn.Identity(), states, states, states, None, scaling=0.3, sliding_window=window, row_mask=mask
        )

    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        function = compiled(counter)
        monkeypatch.setattr(gpu_attention, "_flex", lambda device: function)
        counts = []
        for _ in range(60):
            row: list[Segment] = []
            path: list[int] = []
            for number in range(numbers.randint(1, 9)):
                path = path[: numbers.randint(0, len(path))]
                row.append(Segment(numbers.randint(1, 90), path[-1] if path else None))
                path.append(number)
            # The first row is short enough for one block.
            row = row if counts else [Segment(5), Segment(3, 0)]
            for window in (None, 30, 40):
                attend(row, window)
            counts.append(counter.frame_count)
        # One for all rows without a window, one for all rows and windows.
        assert set(counts) == {2}
        with (
            torch._dynamo.config.patch(recompile_limit=2),
            torch.no_grad(),
            pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit),
        ):
            attend(row, None)
    torch._dynamo.reset()
