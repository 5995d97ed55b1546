"""Plain rows and heads that call the model's code: values and gradients are those of one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from one_by_one import gradients, own_logps
from regretless.modeling.forward import grouped, in_rows, plain, reference_head, response_scores
from regretless.modeling.row_choice import choose_rows
from regretless.modeling.rows import RowKind, computed_tokens, lay_out_rows
from regretless.modeling.scoring import fill_rows, score_responses
from tiny_kinds import KINDS, needs_states, tiny_of_kind

PROMPT_A, PROMPT_B = (5, 6, 7, 8, 9, 10), (11, 12)
ITEMS = [
    (PROMPT_A, (20, 21, 22, 23, 24, 2)),
    (PROMPT_A, (20, 21, 22)),  # a prefix of the first: a masked response
    (PROMPT_A, (20, 30, 31, 2)),
    (PROMPT_B, (39, *range(10, 38), 2)),
    (PROMPT_B, (39,)),
    (PROMPT_A, (20, 30, 31, 2)),  # the same response again
    (PROMPT_B, (39, 2, ~35, ~36, 12, 2)),  # two messages, with context between them
]
PLAIN = {"jamba", "llama4_text", "bloom"}


@needs_states
@pytest.mark.parametrize("kind", KINDS)
def test_rows_when_a_model_cannot_share_them_or_scales_its_logits_then_values_and_gradients_are_its_own(
    kind: str,
) -> None:
    model = tiny_of_kind(kind)
    rows = choose_rows(model, 40)
    assert rows == ("plain" if kind in PLAIN else "grouped")
    wanted = own_logps(model, ITEMS)
    expected = gradients(model, wanted)
    layout, places = lay_out_rows(ITEMS, rows)
    for frozen in (False, True):
        model.get_output_embeddings().requires_grad_(not frozen)
        with in_rows(model, rows):
            scores = response_scores(model, layout).logps
            found = [scores[place] for place in places]
            got = gradients(model, found)
        for values, own in zip(found, wanted, strict=True):
            torch.testing.assert_close(values.double(), own.double(), rtol=0, atol=1e-5)
        largest = max(float(gradient.norm()) for gradient in expected.values())
        for name in got.keys() | (expected.keys() if not frozen else set()):
            # An expert that no token takes has no gradient in one way of computing and a zero in another.
            difference = torch.as_tensor(got.get(name, 0.0)) - torch.as_tensor(expected.get(name, 0.0))
            tied = frozen and "embed" in name
            assert tied or float(difference.norm()) <= 1e-5 * largest, name
    for values, own in zip(score_responses(model, ITEMS, max_tokens=30), wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(values).double(), own.detach().double(), rtol=0, atol=1e-5)


def test_plain_rows_when_responses_repeat_or_begin_another_one_then_they_have_no_row_of_their_own() -> None:
    layout, places = lay_out_rows(ITEMS, "plain")
    # Rows of 6 + 5, 6 + 3, 2 + 29 and 2 + 5 tokens; the last token of a response is predicted only.
    assert layout.is_plain
    assert layout.input_ids.shape == (4, 31)
    assert computed_tokens(ITEMS, "plain") == layout.tokens == 124
    assert layout.input_ids[1].tolist() == [*PROMPT_A, 20, 30, 31, *[31] * 22]
    assert places[1].tolist() == places[0][:3].tolist()
    assert places[5].tolist() == places[2].tolist()
    predict = layout.predict[places[2]].tolist()
    assert predict == [31 + 5, 31 + 6, 31 + 7, 31 + 8]
    assert layout.targets[places[2]].tolist() == [20, 30, 31, 2]


def test_plain_rows_when_filled_then_padding_counts_and_order_stays() -> None:
    units = [[((1, 2), (3 + number,) * length)] for number, length in enumerate((3, 3, 9, 2))]
    # 4 + 4 tokens; the third row has 10, and the others would be padded to it.
    assert fill_rows(units, 12, "plain") == [[0, 1], [2], [3]]
    assert fill_rows(units, 30, "plain") == [[0, 1, 2], [3]]


@pytest.mark.parametrize(("rows", "given"), [("grouped", "plain"), ("plain", "grouped")])
def test_rows_when_given_to_the_pass_of_the_other_kind_then_it_refuses(rows: RowKind, given: RowKind) -> None:
    model = tiny_of_kind("granite")
    layout, _ = lay_out_rows(ITEMS, given)
    with in_rows(model, rows), pytest.raises(ValueError, match="plain"):
        response_scores(model, layout)


def test_plain_rows_when_a_reference_distribution_is_asked_for_then_the_divergence_is_that_of_shared_rows() -> None:
    model = tiny_of_kind("cohere")
    other = tiny_of_kind("cohere")
    with torch.no_grad():
        other.get_output_embeddings().weight.add_(0.1 * torch.randn(40, 32).double())
    found = []
    for rows, context in (("grouped", grouped), ("plain", plain)):
        layout, places = lay_out_rows(ITEMS, rows)
        with context(model), context(other):
            scores = response_scores(model, layout, reference_head(other, layout), statistics=True)
        index = torch.cat(places)
        assert scores.kl is not None and scores.statistics is not None
        assert float(scores.kl.detach().min()) > 0
        found.append((scores.kl[index], scores.statistics[:, index]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
