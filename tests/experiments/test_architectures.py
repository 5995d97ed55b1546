"""Every causal architecture of transformers: what the check accepts is right, and the page's table is the code's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import transformers
from peft import LoraConfig
from transformers import PreTrainedModel

from one_by_one import gradients, own_logps
from regretless.modeling.forward import in_rows, response_scores
from regretless.modeling.rows import RowKind, lay_out_rows
from regretless.training.adapter import no_products, with_adapter

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.splitlines() if line.startswith("| ")}
ADAPTED = ("falcon", "falcon_h1", "phimoe", "qwen2", "llama", "roc_bert")
"""Further ones that are checked with an adapter: layers of their own code, or a layer's output changed in place."""
COMMON = {"qwen3", "qwen2", "llama", "mistral", "gemma2", "gemma3_text", "olmo2", "olmo3", "phi3", "qwen3_moe"}

REPEATED = {"qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Long ones whose layers are those of qwen3_5_text and qwen3_next; `make test-extended` has them."""
LONG = {"blt", "dots3_note_text", "lara_mini", "qwen3_5_text", "zamba2"}


def cases(model_types: Iterable[str], long: set[str]) -> list[Any]:
    marks = dict.fromkeys(long, pytest.mark.slow) | dict.fromkeys(REPEATED, pytest.mark.extended)
    return [pytest.param(name, marks=marks.get(name, ())) for name in model_types]


def numbers(count: int, seed: int) -> tuple[int, ...]:
    """Ids of tokens that no model treats in a way of its own."""
    return tuple(torch.randint(3, 40, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


FIRST, SECOND = numbers(14, 1), numbers(3, 2)
# Prompts and responses that are longer than the windows (12), and shorter ones; the last is a masked response.
ITEMS = [(FIRST, numbers(16, 3)), (FIRST, numbers(4, 4)), (SECOND, numbers(18, 5)), (SECOND, numbers(5, 6))]
ITEMS += [(FIRST, ITEMS[0][1][:13])]


def assert_right(model: PreTrainedModel, rows: RowKind, tolerance: float = 1e-5) -> None:
    """Log-probabilities within the tolerance, and each parameter's gradient within that part of the largest one."""
    plain = own_logps(model, ITEMS, "eager")
    wanted = gradients(model, plain)
    layout, places = lay_out_rows(ITEMS, rows)
    with in_rows(model, rows):
        row = response_scores(model, layout).logps
        found = [row[place] for place in places]
        got = gradients(model, found)
    for values, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(values.double(), expected.double(), rtol=1e-6, atol=tolerance)
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name in got.keys() | wanted.keys():
        # An expert that no token takes has no gradient in one way of computing and a zero in another. Many models
        # compute norms and positions in float32, whatever their weights are.
        difference = torch.as_tensor(got.get(name, 0.0)) - torch.as_tensor(wanted.get(name, 0.0))
        assert float(difference.norm()) <= tolerance * largest, name


@pytest.mark.parametrize("model_type", cases(architectures.MODEL_TYPES, LONG))
def test_architecture_when_accepted_then_it_is_right_and_the_page_says_in_which_rows(model_type: str) -> None:
    found = architectures.verdict(model_type)
    if f"transformers {transformers.__version__}" in PAGE:
        assert ROWS.get(model_type) == architectures.row(model_type, found)
    assert found.answer == "grouped" or model_type not in COMMON, found.reason
    if found.model is None or found.answer == "refused":
        return
    model = found.model.double()
    if found.answer == "plain":
        try:
            model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
            assert_right(model, "plain")
        except RuntimeError:  # parts of some models compute in float32 only
            assert_right(model.float(), "plain", 1e-4)
        return
    assert_right(model, "grouped")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    assert_right(model, "grouped")


@pytest.mark.parametrize(
    "model_type",
    cases(sorted({*itertools.chain(*architectures.MODELS_OF_2026.values()), *ADAPTED}), {*LONG, "qwen3_next"}),
)
def test_architecture_when_it_has_an_adapter_then_it_is_computed_in_the_same_rows(model_type: str) -> None:
    found = architectures.verdict(model_type, adapter=True)
    # The page's rows are those that the test above finds.
    is_of_page = f"transformers {transformers.__version__}" in PAGE
    wanted = ROWS[model_type].split(" | ")[2] if is_of_page else architectures.verdict(model_type).answer
    assert found.answer == wanted, found.reason


def test_all_linear_when_a_layer_is_no_product_then_it_alone_has_no_adapter() -> None:
    left_out = {name: no_products(architectures.tiny_model(name)) for name in ("falcon", "phimoe", "qwen3")}
    assert left_out == {"falcon": [], "phimoe": ["model.layers.0.mlp.router", "model.layers.1.mlp.router"], "qwen3": []}
    with torch.device("meta"):
        empty = architectures.tiny_model("phimoe")
    config = LoraConfig(**architectures.LORA)
    adapted = {name for name, _ in with_adapter(empty, config).named_modules() if name.endswith(".lora_A")}
    assert len(adapted) == 2 * 4 and not any("router" in name for name in adapted)
    assert config.exclude_modules is None, "settings are the caller's"


def test_page_when_read_then_its_counts_are_those_of_its_table() -> None:
    answers = [ROWS[name].split(" | ")[2] for name in architectures.MODEL_TYPES if name in ROWS]
    for answer in architectures.ANSWERS:
        assert f"| {answer} | {answers.count(answer)} |" in PAGE
    assert all(line in PAGE.splitlines() for line in architectures.of_2026(ROWS))
