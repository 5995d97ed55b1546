from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from regretless.modeling.draws import Sampler, uniform_numbers

PAPER = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.05}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    PAPER,
    {"temperature": 1.5, "top_p": 0.3, "repetition_penalty": 1.2},
]


def logits_of(rows: int, vocabulary: int, *, tied: bool = False) -> tuple[Tensor, Tensor]:
    """Logits (B, V), with many equal ones where `tied`, and ids seen (B, S), some of them twice."""
    numbers = torch.Generator().manual_seed(rows + vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=numbers)
    seen = torch.randint(vocabulary, (rows, 12), generator=numbers)
    # Likely ones too: what is not drawn anyway shows no penalty.
    seen = torch.cat((seen, seen[:, :3], logits.topk(4)[1][:, ::2]), dim=1)
    return (logits.round() if tied else logits), seen


def of_transformers(logits: Tensor, seen: Tensor, settings: dict[str, Any]) -> Tensor:
    """(B, V) scores as transformers' processors leave them, in the order in which `generate` applies them."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "temperature" in settings:
        processors.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    scores: Tensor = processors(seen, logits)
    return scores


def is_listed(settings: dict[str, Any]) -> bool:
    return "top_k" in settings or "top_p" in settings


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocabulary", [30, 5000])
def test_candidates_are_those_of_transformers_and_few_are_looked_at(settings: dict[str, Any], vocabulary: int) -> None:
    logits, seen = logits_of(50, vocabulary)
    before = logits.clone()
    found = Sampler(**settings).candidates(logits, seen)
    assert torch.equal(logits, before), "the model's own logits are measured afterwards"
    # transformers sums up in the type of the logits; in float32 its sum over a vocabulary is rounded at each of them.
    wanted = of_transformers(logits.double(), seen, settings)
    assert torch.equal(found.spread(vocabulary).isfinite(), wanted.isfinite())
    torch.testing.assert_close(found.spread(vocabulary).double(), wanted, atol=1e-5, rtol=0)
    if not is_listed(settings):
        assert found.ids is None
    elif "top_k" in settings:
        assert found.scores.shape[1] == min(2 * settings["top_k"], vocabulary)
    elif settings["top_p"] < 0.99:
        assert found.scores.shape[1] == min(128, vocabulary)


@pytest.mark.parametrize("top_k", [1, 5, 40])
def test_candidates_when_scores_tie_with_the_last_of_the_top_k_keep_them_all(top_k: int) -> None:
    logits, seen = logits_of(50, 3000, tied=True)
    settings = {"top_k": top_k, "temperature": 0.7}
    found = Sampler(**settings).candidates(logits, seen)
    wanted = of_transformers(logits, seen, settings)
    assert torch.equal(found.spread(3000), wanted)
    assert int(wanted.isfinite().sum(1).max()) > 2 * top_k, "more than are looked at first"


def test_candidates_when_scores_tie_at_the_limit_of_top_p_have_its_mass_and_the_lower_ids() -> None:
    logits = torch.zeros(2, 2000)
    logits[1, :300] = 8
    found = Sampler(top_p=0.9003).candidates(logits, torch.zeros(2, 0, dtype=torch.long)).spread(2000)
    # Of 2000 equal ones 1801; of the 300 likely ones as many as have 0.9 of the mass of all.
    likely = int(np.ceil(0.9003 * (300 * np.exp(8) + 1700) / np.exp(8)))
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in found] == [[*range(1801)], [*range(likely)]]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logps_are_those_of_the_models_and_of_the_shaped_distribution(settings: dict[str, Any]) -> None:
    logits, seen = logits_of(300, 700)
    draw = Sampler(**settings)(logits, seen, torch.rand(300, dtype=torch.float64))
    for found, scores in (
        (draw.logps, logits),
        (draw.sampled_logps, of_transformers(logits.double(), seen, settings)),
    ):
        wanted = scores.double().log_softmax(1).gather(1, draw.tokens[:, None])[:, 0]
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["raw", "sampled"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("count", [1, 5, 200, 900])
def test_top_when_asked_for_has_the_most_likely_tokens_of_its_distribution(
    settings: dict[str, Any], kind: Any, count: int
) -> None:
    logits, seen = logits_of(40, 700)
    draw = Sampler(**settings, top=count, top_kind=kind)(logits, seen, torch.rand(40, dtype=torch.float64))
    assert draw.top is not None
    ids, logps = draw.top
    assert ids.shape == (40, min(count, 700)) and all(len(set(row)) == len(row) for row in ids.tolist())
    scores = logits if kind == "raw" else of_transformers(logits.double(), seen, settings)
    wanted = scores.double().log_softmax(1)
    torch.testing.assert_close(logps.double(), wanted.gather(1, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(logps.double(), wanted.topk(ids.shape[1])[0], atol=1e-5, rtol=0)


def test_top_when_decoding_is_greedy_is_that_of_the_model() -> None:
    logits, seen = logits_of(50, 700)
    draw = Sampler(temperature=0, repetition_penalty=1.4, top=3)(logits, seen, torch.zeros(50, dtype=torch.float64))
    assert draw.top is not None
    assert torch.equal(draw.top[0], logits.topk(3)[1])
    torch.testing.assert_close(draw.top[1], logits.log_softmax(1).topk(3)[0])


def chi_square(settings: dict[str, Any], draws: int, tied: bool) -> float:
    """p-value of this many draws from one distribution of 60 tokens against its exact probabilities."""
    logits, seen = (each[:1] for each in logits_of(3, 60, tied=tied))
    uniforms = torch.from_numpy(uniform_numbers(7, draws))
    chunks = [
        Sampler(**settings)(logits.repeat(len(part), 1), seen.repeat(len(part), 1), part).tokens
        for part in uniforms.split(10_000)
    ]
    counts = torch.cat(chunks).bincount(minlength=60)
    expected = of_transformers(logits, seen, settings)[0].double().softmax(0) * draws
    assert not counts[expected == 0].any()
    rare = expected < 5
    counts, expected = (
        torch.cat((each[~rare], each[rare].sum()[None])) if expected[rare].sum() >= 5 else each[~rare]
        for each in (counts.double(), expected)
    )
    return float(chisquare(counts, expected * counts.sum() / expected.sum()).pvalue) if len(counts) > 1 else 1.0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_when_very_many_follow_the_exact_probabilities(settings: dict[str, Any], tied: bool) -> None:
    # Which of equal tokens top-p leaves is not told by transformers.
    if not (tied and "top_p" in settings):
        assert chi_square(settings, 100_000, tied) > 0.001


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.9}, PAPER], ids=str)
def test_tokens_when_other_rows_stand_beside_them_are_the_same(settings: dict[str, Any]) -> None:
    logits, seen = logits_of(40, 3000)
    # Rows that need more candidates, by ties and by a flat distribution.
    others = torch.cat((logits.round(), torch.zeros(1, 3000)))
    uniforms = torch.from_numpy(uniform_numbers(3, 81))
    sampler = Sampler(**settings)
    alone = [sampler(logits[[row]], seen[[row]], uniforms[[row]]).tokens.item() for row in range(40)]
    more = sampler(torch.cat((logits, others)), torch.cat((seen, seen, seen[:1])), uniforms)
    assert more.tokens[:40].tolist() == alone
    assert len(set(alone)) > 20


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 4), (1 - 2.0**-53, 2)])
@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_token_when_the_number_is_at_an_end_is_the_first_or_last_candidate(
    settings: dict[str, Any], uniform: float, token: int
) -> None:
    logits = torch.tensor([[-9.0, -8.0, 1.0, 1.5, 2.0, -7.0]])
    found = Sampler(**settings)(logits, torch.zeros(1, 0, dtype=torch.long), torch.tensor([uniform]).double())
    assert found.tokens.tolist() == [token]


def test_token_when_greedy_is_the_most_likely_after_the_penalty() -> None:
    logits = torch.tensor([[2.0, 1.9, -3.0], [-1.0, -1.1, -9.0]])
    draw = Sampler(temperature=0, repetition_penalty=1.2)(logits, torch.tensor([[0], [0]]), torch.zeros(2).double())
    assert draw.tokens.tolist() == [1, 1]
    torch.testing.assert_close(draw.logps, logits.log_softmax(1)[:, 1])


def test_measure_sees_whole_distributions() -> None:
    logits, seen = logits_of(9, 4000)
    settings = {"temperature": 0.7, "top_k": 5}
    calls = []

    def measure(own: Tensor, shaped: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        calls.append(len(own))
        assert own.shape == shaped.shape == (len(own), 4000)
        return {"kept": shaped.isfinite().sum(1), "drawn": own.gather(1, tokens)[:, 0]}

    draw = Sampler(**settings, measure=measure)(logits, seen, torch.rand(9).double())
    assert sum(calls) == 9
    assert draw.numbers["kept"].tolist() == [5] * 9
    assert torch.equal(draw.numbers["drawn"], logits.gather(1, draw.tokens[:, None])[:, 0])


def test_uniform_numbers_of_seeds_are_known_and_independent() -> None:
    # By the algorithm's definition: numpy's own generator on the same key has the same numbers.
    assert uniform_numbers(5, 3).tolist() == np.random.Generator(np.random.Philox(key=5)).random(3).tolist()
    assert uniform_numbers(5, 9)[:3].tolist() == uniform_numbers(5, 3).tolist()
    many = np.stack([uniform_numbers(seed, 64) for seed in range(500)])
    assert many.min() >= 0 and many.max() < 1
    assert np.abs(np.corrcoef(many, rowvar=False) - np.eye(64)).max() < 0.2
    assert abs(many.mean() - 0.5) < 0.01
