"""The shared-prefix computation against plain one-sequence-at-a-time calls of unmodified models."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from one_by_one import own_logps
from regretless.core.errors import ConfigError
from regretless.modeling import token_logps
from regretless.modeling.cpu_attention import grouped_attention
from regretless.modeling.forward import grouped, reference_head, response_scores
from regretless.modeling.layout import Segment, lay_out, token_count
from regretless.modeling.model_check import check_grouped
from regretless.modeling.scoring import fill_rows, score_responses
from regretless.modeling.token_logps import Head, ReferenceHead, token_scores
from tiny_kinds import SIZES

# Short sliding windows, so that they cut into the test's sequences. SDPA leaves out soft caps in transformers 5.17.
EXTRAS = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {
        **{"sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
        "attn_implementation": "eager",
    },
}
PROMPT_A, PROMPT_B = (5, 6, 7, 8, 9, 10), (11, 12)
ITEMS = [
    (PROMPT_A, (20, 21, 22, 23, 24, 2)),
    (PROMPT_A, (20, 21, 22)),  # a prefix of the first: a masked response
    (PROMPT_A, (20, 30, 31, 2)),
    (PROMPT_B, (40, 2)),
    (PROMPT_B, (41,)),
    (PROMPT_A, (20, 30, 31, 2)),  # the same response again
]


def tiny(model_type: str, **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | {"vocab_size": 61} | EXTRAS[model_type] | more))
    return AutoModelForCausalLM.from_config(config).double()


def test_layout_when_responses_repeat_or_are_prefixes_then_each_distinct_token_stands_once() -> None:
    layout, places = lay_out(ITEMS)
    # Prompts 6 + 2; responses without their last tokens: 5 + 3 + 1 + 0.
    assert layout.tokens == 6 + 2 + 5 + 3 + 1
    assert layout.position_ids[0].tolist() == [*range(6), *range(6, 11), *range(6, 9), 0, 1, 2]
    assert places[1].tolist() == places[0][:3].tolist()
    assert places[5].tolist() == places[2].tolist()
    assert layout.targets[places[2]].tolist() == [20, 30, 31, 2]
    assert token_count(ITEMS) == 6 + 2 + 6 + 4 + 2 + 1


def test_layout_when_prompt_or_response_is_empty_then_it_is_refused() -> None:
    for item in (((), (1,)), ((1,), ())):
        with pytest.raises(ValueError, match="at least one prompt token"):
            lay_out([item])


@pytest.mark.parametrize("model_type", EXTRAS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_grouped_pass_when_compared_with_plain_calls_then_values_and_gradients_agree(
    model_type: str, checkpointing: bool
) -> None:
    model = tiny(model_type)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    weights = [torch.randn(len(response), dtype=torch.float64) for _, response in ITEMS]

    plain = own_logps(model, ITEMS)
    sum((w * p).sum() for w, p in zip(weights, plain, strict=True)).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    layout, places = lay_out(ITEMS)
    with grouped(model):
        scores = response_scores(model, layout)
        parts = [scores.logps[place] for place in places]
        sum((w * p).sum() for w, p in zip(weights, parts, strict=True)).backward()

    for part, expected in zip(parts, plain, strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=2e-6)  # Gemma-2 takes its softmax in float32
    # Models compute their norms in float32 whatever their own precision, so gradients agree to float32 only.
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name
    assert not model.config._attn_implementation.startswith("regretless")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("model_type", EXTRAS)
def test_flex_when_compared_with_plain_calls_then_values_agree(model_type: str) -> None:
    # On a CPU, FlexAttention has no backward pass; benchmarks/gpu.py compares gradients on a GPU.
    model = tiny(model_type).float()
    layout, places = lay_out(ITEMS)
    with torch.no_grad(), grouped(model, one_row=True):
        found = response_scores(model, layout).logps
    for place, wanted in zip(places, own_logps(model, ITEMS), strict=True):
        torch.testing.assert_close(found[place], wanted, rtol=0, atol=2e-5)


class Wrapped(torch.nn.Linear):
    """A layer that is not a plain linear one."""


@pytest.mark.parametrize("kind", ["frozen", "trained", "other"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_head_when_frozen_or_trained_then_logps_kl_and_gradients_equal_the_full_logits(
    kind: str, softcap: float | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = kind == "frozen"
    monkeypatch.setattr(token_logps, "CHUNK_TOKENS", 2)
    monkeypatch.setitem(token_logps.CHUNK_ELEMENTS, "cpu", 2 * 13)  # several chunks of two tokens
    torch.manual_seed(1)
    linear = (Wrapped if kind == "other" else torch.nn.Linear)(5, 13, bias).double().requires_grad_(not frozen)
    reference_linear = torch.nn.Linear(5, 13, bias=False).double().requires_grad_(False)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    reference_hidden = torch.randn(7, 5, dtype=torch.float64)
    targets = torch.randint(13, (7,))
    weight_logp, weight_kl = torch.randn(2, 7, dtype=torch.float64)
    head, reference = Head(linear, softcap), ReferenceHead(reference_hidden, Head(reference_linear, softcap))
    leaves = [hidden] if frozen else [hidden, *linear.parameters()]

    def capped(logits: torch.Tensor) -> torch.Tensor:
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    full = capped(linear(hidden)).log_softmax(-1)
    reference_full = capped(reference_linear(reference_hidden)).log_softmax(-1)
    logps = full.gather(-1, targets[:, None])[:, 0]
    kl = (reference_full.exp() * (reference_full - full)).sum(-1)
    wanted = torch.autograd.grad((weight_logp * logps + weight_kl * kl).sum(), leaves, retain_graph=True)

    found = token_scores(hidden, head, targets, reference, statistics=True)
    assert found.kl is not None and found.statistics is not None
    entropy, top = -(full.exp() * full).sum(-1), capped(linear(hidden)).argmax(-1) == targets
    plain = torch.stack([capped(linear(hidden)).mean(-1), entropy, top.double()])
    torch.testing.assert_close(found.statistics, plain.detach().float())
    assert top.any() and not found.statistics.requires_grad
    got = torch.autograd.grad((weight_logp * found.logps + weight_kl * found.kl).sum(), leaves)
    torch.testing.assert_close(found.logps, logps)
    torch.testing.assert_close(found.kl, kl)
    for mine, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, expected)
    # Only log-probabilities, as most methods have it.
    wanted = torch.autograd.grad((weight_logp * logps).sum(), leaves)
    got = torch.autograd.grad((weight_logp * token_scores(hidden, head, targets).logps).sum(), leaves)
    for mine, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("kind", ["frozen", "trained", "other"])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (None, 0.5), (2.0, 0.5)])
@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("count", [1, 4, 13])
def test_head_when_tokens_are_listed_then_their_logps_that_of_all_others_and_gradients_equal_the_full_logits(
    kind: str, softcap: float | None, scale: float, with_kl: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logps, "CHUNK_TOKENS", 2)
    monkeypatch.setitem(token_logps.CHUNK_ELEMENTS, "cpu", 2 * 13)
    torch.manual_seed(1)
    linear = (Wrapped if kind == "other" else torch.nn.Linear)(5, 13, bias=False).double()
    linear.requires_grad_(kind != "frozen")
    reference_linear = torch.nn.Linear(5, 13, bias=False).double().requires_grad_(False)
    hidden, reference_hidden = torch.randn(2, 7, 5, dtype=torch.float64)
    hidden.requires_grad_()
    ids = torch.stack([torch.randperm(13)[:count] for _ in range(7)])
    targets = torch.cat((ids[:3, 0], torch.randint(13, (4,))))
    head, leaves = Head(linear, softcap, scale), [hidden] if kind == "frozen" else [hidden, linear.weight]
    logits = linear(hidden) * scale if softcap is None else torch.tanh(linear(hidden) * scale / softcap) * softcap
    full = logits.log_softmax(-1)
    others = full.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny).log()
    listed = torch.cat((full.gather(-1, ids), others), dim=-1).t()
    wanted = {"logps": full.gather(-1, targets[:, None])[:, 0], "listed": listed}
    if with_kl:
        of_reference = reference_linear(reference_hidden).log_softmax(-1)
        wanted["kl"] = (of_reference.exp() * (of_reference - full)).sum(-1)
    reference = ReferenceHead(reference_hidden, Head(reference_linear)) if with_kl else None
    found = token_scores(hidden, head, targets, reference, listed=ids, statistics=True)
    assert found.statistics is not None
    torch.testing.assert_close(found.statistics[1], -(full.exp() * full).sum(-1).detach().float())
    gradients = []
    for scores in (wanted, found._asdict()):
        numbers = torch.Generator().manual_seed(2)
        total = hidden.new_zeros(())
        for name, values in wanted.items():
            torch.testing.assert_close(scores[name], values)
            factors = torch.randn(values.shape, generator=numbers, dtype=torch.float64)
            if name == "listed" and count == 13:
                factors[-1] = 0  # there are no others
            total = total + (factors * scores[name]).sum()
        gradients.append(torch.autograd.grad(total, leaves, retain_graph=True))
    for expected, mine in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected)
    with torch.no_grad():
        torch.testing.assert_close(token_scores(hidden, head, targets, listed=ids).listed, listed)


@pytest.mark.parametrize("frozen", [True, False])
def test_head_when_nearly_all_is_listed_then_the_others_have_their_digits(frozen: bool) -> None:
    # Two listed tokens have all but 1e-12 of the probability: 1 − Σ p is 0 in float32.
    linear = torch.nn.Linear(4, 40, bias=False).requires_grad_(not frozen)
    with torch.no_grad():
        linear.weight.normal_(generator=torch.Generator().manual_seed(1))
        linear.weight[:2, 0] += 30
    hidden = torch.tensor([[1.0, 0.2, -0.3, 0.1]], requires_grad=True)
    found = token_scores(hidden, Head(linear), torch.tensor([0]), listed=torch.tensor([[0, 1]])).listed
    full = (hidden.double() @ linear.weight.double().t()).log_softmax(-1)
    wanted = full[0, 2:].logsumexp(0)
    assert found is not None and wanted < math.log(1e-11)
    torch.testing.assert_close(found[-1, 0].double(), wanted, rtol=1e-6, atol=0)
    got, expected = (torch.autograd.grad(each, hidden, retain_graph=True)[0] for each in (found[-1, 0], wanted))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", [True, False])
def test_head_when_its_weights_are_bfloat16_and_tokens_are_listed_then_gradients_are_near_autograds(
    frozen: bool,
) -> None:
    torch.manual_seed(1)
    linear = torch.nn.Linear(16, 1 << 10, bias=False, dtype=torch.bfloat16).requires_grad_(not frozen)
    hidden = torch.randn(300, 16, dtype=torch.bfloat16, requires_grad=True)
    targets, ids = torch.randint(1 << 10, (300,)), torch.stack([torch.randperm(1 << 10)[:20] for _ in range(300)])
    full = linear(hidden).float().log_softmax(-1)
    others = full.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).log()
    plain = torch.cat((full.gather(-1, ids), others), dim=-1).t()
    found = token_scores(hidden, Head(linear), targets, listed=ids).listed
    assert found is not None
    torch.testing.assert_close(found, plain)
    factors = torch.randn(plain.shape)
    wanted, got = (torch.autograd.grad((factors * each).sum(), hidden)[0] for each in (plain, found))
    assert wanted.norm() > 0 and (got - wanted).norm() <= 2e-2 * wanted.norm()


def test_trained_head_when_under_autocast_then_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(token_logps.CHUNK_ELEMENTS, "cpu", 1)  # chunks of 128 tokens
    monkeypatch.setattr(token_logps, "ROWS_ADDED", 7)
    torch.manual_seed(1)
    linear, hidden = torch.nn.Linear(16, 24, bias=False), torch.randn(300, 16, requires_grad=True)
    targets, weights = torch.randint(24, (300,)), torch.randn(300)
    with torch.autocast("cpu", torch.bfloat16):
        plain = linear(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        found = token_scores(hidden, Head(linear), targets).logps
    assert found.dtype == torch.float32 and torch.equal(found, plain)
    wanted = torch.autograd.grad((weights * plain).sum(), [hidden, linear.weight])
    got = torch.autograd.grad((weights * found).sum(), [hidden, linear.weight])
    for mine, expected in zip(got, wanted, strict=True):
        assert mine.dtype == torch.float32
        # A sum over chunks, each rounded to bfloat16, against one rounded sum.
        assert expected.norm() > 0 and (mine - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize("frozen", [True, False])
def test_head_when_its_weights_are_bfloat16_then_logps_are_those_of_its_rounded_logits(frozen: bool) -> None:
    torch.manual_seed(1)
    linear = torch.nn.Linear(16, 1 << 13, bias=False, dtype=torch.bfloat16).requires_grad_(not frozen)
    hidden = torch.randn(300, 16, dtype=torch.bfloat16, requires_grad=True)  # three chunks, the last one smaller
    targets, weights = torch.randint(1 << 13, (300,)), torch.randn(300)
    plain = linear(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    found = token_scores(hidden, Head(linear), targets).logps
    assert found.dtype == torch.float32 and torch.equal(found, plain)
    wanted, got = (torch.autograd.grad((weights * logps).sum(), hidden)[0] for logps in (plain, found))
    assert wanted.norm() > 0 and (got - wanted).norm() <= 1e-2 * wanted.norm()


PEAK = """
import resource, sys, torch
from regretless.modeling.token_logps import Head, token_scores
torch.set_num_threads(1)
tokens, vocabulary = 2048, 65_536
linear = torch.nn.Linear(8, vocabulary, bias=False).requires_grad_(False)
hidden = torch.randn(tokens, 8, requires_grad=True)
token_scores(hidden[:1], Head(linear), torch.zeros(1, dtype=torch.int64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
scores = token_scores(hidden, Head(linear), torch.randint(vocabulary, (tokens,)))
scores.logps.sum().backward()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown / (2**20 if sys.platform == "darwin" else 2**10))
"""


def test_head_when_vocabulary_is_large_then_memory_is_some_chunks_and_never_all_logits() -> None:
    # A process of its own: what counts is the peak, of the allocator's waste too.
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    all_logits_mib = 2048 * 65_536 * 4 / 2**20
    assert float(done.stdout) < 0.4 * all_logits_mib


PEAK_TRAINED = """
import resource, sys, torch
from regretless.modeling.token_logps import Head, token_scores
torch.set_num_threads(1)
tokens, vocabulary, width = 512, 65_536, 128
unit = 2**20 if sys.platform == "darwin" else 2**10
targets = torch.randint(vocabulary, (tokens,))
for trained in (False, True):
    linear = torch.nn.Linear(width, vocabulary, bias=False).requires_grad_(trained)
    hidden = torch.randn(tokens, width, requires_grad=True)
    token_scores(hidden[:1], Head(linear), targets[:1])
    token_scores(hidden, Head(linear), targets).logps.sum().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)
    if not trained:
        del linear
"""


def test_trained_head_when_vocabulary_is_large_then_it_needs_the_frozen_heads_memory_and_its_own_gradient() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK_TRAINED], capture_output=True, text=True, check=True)
    frozen, trained = map(float, done.stdout.split())
    gradient_mib = 65_536 * 128 * 4 / 2**20
    assert trained - frozen < 1.25 * gradient_mib


def test_reference_head_when_model_is_its_own_reference_then_kl_is_zero() -> None:
    model = tiny("qwen3")
    layout, _ = lay_out(ITEMS)
    with grouped(model):
        scores = response_scores(model, layout, reference_head(model, layout))
    assert scores.kl is not None
    assert scores.kl.abs().max() < 1e-12


def test_score_responses_when_rows_are_small_then_order_and_values_stay() -> None:
    model = tiny("llama").float()
    everything = score_responses(model, ITEMS)
    for max_tokens in (1, 12, 20):
        for found, expected in zip(score_responses(model, ITEMS, max_tokens=max_tokens), everything, strict=True):
            torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=0, atol=1e-5)
    assert [len(values) for values in everything] == [len(response) for _, response in ITEMS]


def test_fill_rows_when_a_prompts_units_fit_together_then_they_share_a_row() -> None:
    units = [[((1, 2, 3), (4, 5))], [((1, 2, 3), (6, 7))], [((8,), (9, 9, 9))], [((8,), (9,))]]
    assert fill_rows(units, 8) == [[0, 1], [2, 3]]
    assert fill_rows(units, 100) == [[0, 1, 2, 3]]
    assert fill_rows(units, 5) == [[0], [1], [2, 3]]
    assert fill_rows(units, 1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (300, None), (None, 2.0), (300, 2.0)])
def test_attention_when_positions_pass_a_thousand_then_it_is_that_of_every_pair_of_positions(
    window: int | None, softcap: float | None
) -> None:
    numbers = torch.Generator().manual_seed(0)
    prompt, responses = 1000, (40, 30)  # masks grow at 1024 positions: within the first response
    rows = prompt + sum(responses)
    query, key, value = (torch.randn(1, 2, rows, 4, dtype=torch.double, generator=numbers) for _ in range(3))
    segments = (Segment(prompt), *(Segment(length, 0) for length in responses))
    module = torch.nn.Module()

    def attend(query: torch.Tensor) -> torch.Tensor:
        options = {"sliding_window": window, "softcap": softcap, "segments": segments}
        return grouped_attention(module, query, key, value, None, **options)[0]

    with torch.inference_mode():
        attend(query)  # what is kept from here must be of use in training
    found = attend(query.requires_grad_())
    found.sum().backward()

    place = torch.cat([torch.arange(prompt), *(prompt + torch.arange(length) for length in responses)])
    segment = torch.cat([torch.full((length,), n) for n, length in enumerate((prompt, *responses))])
    distance = place[:, None] - place
    seen = (distance >= 0) & ((segment == 0) | (segment == segment[:, None]))
    seen &= distance < (window or rows)
    scores = query @ key.transpose(2, 3) / 2
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    wanted = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    assert query.grad is not None


def test_check_grouped_when_logits_of_a_token_depend_on_other_tokens_then_it_is_refused() -> None:
    model = tiny("qwen3").float()
    plain_forward = type(model).forward

    class Mixed(type(model)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            output = plain_forward(self, *args, **kwargs)
            output.logits = output.logits + 0.5 * output.logits.cumsum(1)
            return output

    check_grouped(model)
    other = tiny("qwen3").float()
    other.__class__ = Mixed
    with pytest.raises(ConfigError, match=r"depends on .* tokens of other responses|differ from the model's own"):
        check_grouped(other)


def test_grouped_attention_when_called_without_segments_then_it_refuses_instead_of_guessing() -> None:
    model = tiny("qwen3")
    model.config._attn_implementation = "regretless_grouped"
    with pytest.raises(ValueError, match="without `segments`"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("frozen", [True, False])
def test_gradient_when_a_pair_is_saturated_then_it_is_zero_instead_of_subnormal(frozen: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 8, requires_grad=True)
    module = torch.nn.Linear(8, 20, bias=False).requires_grad_(not frozen)
    logps = token_scores(hidden, Head(module), torch.tensor([1, 2, 3])).logps
    upstream = torch.tensor([1e-30, -1e-18, 1.0])
    (gradient,) = torch.autograd.grad(logps, hidden, upstream, retain_graph=True)
    assert gradient[0].abs().max() == 0
    assert 0 < gradient[1].abs().max() < 1e-17
    plain = module(hidden).log_softmax(-1)[range(3), [1, 2, 3]]
    (expected,) = torch.autograd.grad(plain, hidden, upstream)
    assert torch.allclose(gradient[1:], expected[1:], rtol=1e-5, atol=0)
