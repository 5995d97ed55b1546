"""Recurrent layers in shared-prefix rows: numbers of one sequence at a time, and faults that the check must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regretless.core.errors import ConfigError
from regretless.modeling import model_check, recurrent
from regretless.modeling.forward import in_rows, response_scores
from regretless.modeling.layout import Item, Segment, lay_out
from regretless.modeling.model_check import check_grouped
from regretless.modeling.recurrent import BranchStates, recurrent_layers, run_segments
from regretless.modeling.row_choice import choose_rows, why_not_grouped
from regretless.modeling.rows import RowKind, lay_out_rows
from tiny_kinds import needs_states, tiny_of_kind

pytestmark = needs_states

RECURRENT = ("qwen3_5_text", "qwen3_next", "nemotron_h", "lfm2", "mamba2")


def numbers(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 40, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


SHARED = numbers(17, 8)
ITEMS: list[Item] = [
    (numbers(70, 1), numbers(80, 2)),  # both longer than a chunk of 64
    (numbers(70, 1), numbers(80, 2)[:9]),  # a masked response
    (numbers(70, 1), numbers(2, 3)),  # one token of its own in the row
    (numbers(1, 4), numbers(6, 5)),  # a prompt shorter than a convolution's kernel
    (numbers(1, 4), (*SHARED, *numbers(5, 6))),  # two that share a beginning
    (numbers(1, 4), (*SHARED, *numbers(9, 7))),
    # Single tokens that others continue: 12 behind a beginning, and 5 behind that.
    (numbers(1, 4), (*SHARED, 39, 9, 12, 5, 6, 7)),
    (numbers(1, 4), (*SHARED, 39, 9, 12, 5, 8, 7)),
    (numbers(1, 4), (*SHARED, 39, 9, 12, 8)),
    (numbers(1, 4), (*SHARED, 39, 9, 5, 11)),
]


def values_and_gradients(model: nn.Module, rows: RowKind) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all items, and the gradient of a weighted sum of them."""
    layout, places = lay_out_rows(ITEMS, rows)
    model.zero_grad()
    with in_rows(model, rows):
        scores = response_scores(model, layout).logps
        logps = torch.cat([scores[place] for place in places])
        (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
    return logps.detach(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_recurrent_layers_when_responses_share_a_row_then_values_and_gradients_are_those_of_plain_rows(
    kind: str, checkpointing: bool
) -> None:
    model = tiny_of_kind(kind)
    assert recurrent_layers(model)
    wanted, expected = values_and_gradients(model, "plain")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    found, got = values_and_gradients(model, "grouped")
    # The long prompt's two responses, the short one's, and those that continue a beginning.
    segments = lay_out(ITEMS)[0].segments
    assert [segment.parent for segment in segments] == [None, 0, 0, None, 3, 3, 5, 5, 5, 8, 9, 10, 10, 8]
    assert segments[9:11] == (Segment(1, 8), Segment(1, 9))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name in got.keys() | expected.keys():
        # An expert that no token takes has no gradient in one way of computing and a zero in another.
        difference = torch.as_tensor(got.get(name, 0.0)) - torch.as_tensor(expected.get(name, 0.0))
        assert float(difference.norm()) <= 1e-5 * largest, name


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_when_weights_are_in_bfloat16_then_they_share_rows_and_gradients_stay_near(kind: str) -> None:
    # Mamba-2 keeps its residual in float32 and rounds it before the output layer.
    model = tiny_of_kind(kind).bfloat16()
    assert choose_rows(model, 151) == "grouped"
    _, wanted = values_and_gradients(model, "plain")
    _, got = values_and_gradients(model, "grouped")
    together = [torch.cat([found[name].float().flatten() for name in wanted]) for found in (got, wanted)]
    assert torch.cosine_similarity(*together, dim=0) > 0.99


def test_row_when_padding_follows_then_it_changes_nothing_and_gets_zeros() -> None:
    calls: list[tuple[int, int]] = []

    def running_sum(hidden: Tensor, states: BranchStates) -> Tensor:
        calls.append((hidden.shape[0], hidden.shape[1]))
        before = states.get_recurrent_state(0)
        found = hidden.cumsum(1) + (0 if before is None else before)
        states.update_recurrent_state(found[:, -1:], 0)
        return found

    hidden = torch.tensor([1.0, 2, 4, 8, 16, 32, 99]).view(1, 7, 1)
    segments = (Segment(2), Segment(1, 0), Segment(1, 0), Segment(1), Segment(1))
    assert run_segments(running_sum, hidden, segments).flatten().tolist() == [1, 3, 7, 11, 16, 32, 0]
    # Of the prompt's three responses the two of two tokens are together, and the single token is padded.
    calls.clear()
    segments = (Segment(2), Segment(1, 0), Segment(2, 0), Segment(2, 0))
    run_segments(running_sum, torch.ones(1, 7, 1), segments)
    assert calls == [(1, 2), (1, 2), (2, 2)]
    # A single token that others continue, and one behind it, are computed with what follows: never one by itself.
    calls.clear()
    segments = (Segment(2), Segment(1, 0), Segment(1, 1), Segment(1, 2), Segment(3, 2), Segment(2, 1))
    found = run_segments(running_sum, torch.ones(1, 10, 1), segments)
    assert found.flatten().tolist() == [1, 2, 3, 4, 5, 5, 6, 7, 4, 5]
    assert calls == [(1, 2), (1, 2), (1, 2), (2, 3)]


def constant_states(patch: pytest.MonkeyPatch) -> None:
    """A kernel that takes the states before its tokens as constants: values are right, gradients are not."""
    get = BranchStates.get_recurrent_state
    patch.setattr(
        BranchStates,
        "get_recurrent_state",
        lambda self, *args, **kwargs: None if (state := get(self, *args, **kwargs)) is None else state.detach(),
    )


def constant_tail(patch: pytest.MonkeyPatch) -> None:
    """The same for what a convolution read before."""
    update = BranchStates.update_conv_state

    def detached(self: BranchStates, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = dict(self._convolution)
        self._convolution = {index: tail.detach() for index, tail in before.items()}
        return update(self, states, *args, **kwargs)

    patch.setattr(BranchStates, "update_conv_state", detached)


def no_tail(patch: pytest.MonkeyPatch) -> None:
    """A convolution that starts anew in each segment."""
    patch.setattr(BranchStates, "update_conv_state", lambda self, states, *args, **kwargs: states)


def no_states(patch: pytest.MonkeyPatch) -> None:
    """A scan that starts anew in each segment, as Mamba's does in transformers."""
    patch.setattr(BranchStates, "get_recurrent_state", lambda *args, **kwargs: None)


def states_of_the_segment_before(patch: pytest.MonkeyPatch) -> None:
    """A response that continues the other response instead of the prompt."""
    original = recurrent.run_segments

    def run(run: Any, hidden: Tensor, segments: Any) -> Tensor:
        chained = tuple(
            Segment(each.length, None if each.parent is None else number - 1) for number, each in enumerate(segments)
        )
        return original(run, hidden, chained)

    patch.setattr(recurrent, "run_segments", run)


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("qwen3_5_text", constant_states),
        ("qwen3_5_text", no_states),
        ("qwen3_5_text", no_tail),
        ("qwen3_5_text", states_of_the_segment_before),
        ("nemotron_h", constant_states),
        ("nemotron_h", no_tail),
        ("lfm2", constant_tail),
        ("lfm2", no_tail),
        ("lfm2", states_of_the_segment_before),
        ("mamba2", no_states),
    ],
)
def test_fault_when_planted_in_the_states_then_the_model_is_refused(
    kind: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small weights, as before any training: the states' part in the output is small as well.
    model = tiny_of_kind(kind, initializer_range=0.02).float()
    check_grouped(model, 150)
    plant(monkeypatch)
    with pytest.raises(ConfigError, match="cannot be trained or scored in rows that share prompts"):
        check_grouped(tiny_of_kind(kind, initializer_range=0.02).float(), 150)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "nemotron_h"])
def test_states_when_they_are_gone_after_a_token_then_the_model_shares_rows_and_faults_are_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_of_kind(kind).float()
    (layer, *_) = recurrent_layers(model)
    with torch.no_grad():
        layer.A_log.fill_(3.0)  # exp(3) nats a time step
    check_grouped(model, 150)
    assert layer.A_log.unique().tolist() == [3.0]
    no_states(monkeypatch)
    again = tiny_of_kind(kind).float()
    again.load_state_dict(model.state_dict())
    with pytest.raises(ConfigError, match="does not continue from the states behind earlier tokens"):
        check_grouped(again, 150)


def test_layers_when_their_states_are_an_argument_of_another_name_then_rows_are_plain_and_the_reason_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # transformers 5.24 renamed the argument.
    monkeypatch.setattr(recurrent, "STATES", ("states",))
    model = tiny_of_kind("qwen3_5_text").float()
    assert choose_rows(model, 40, "auto") == "plain"
    assert "Qwen3_5GatedDeltaNet takes states in none of the arguments states" in str(why_not_grouped(model))


def test_layers_when_transformers_is_too_old_for_their_states_then_rows_are_plain_and_the_reason_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Before 5.21 layers asked for their states by other names.
    monkeypatch.setattr(model_check, "CONTINUES", False)
    monkeypatch.setattr(recurrent, "_asks_for_states", lambda kind: False)
    model = tiny_of_kind("lfm2").float()
    assert choose_rows(model, 40, "auto") == "plain"
    reason = why_not_grouped(model)
    assert "(Lfm2ShortConv) mixes tokens" in reason
    assert reason.endswith("(recurrent layers can share rows with transformers 5.21 or newer)")
