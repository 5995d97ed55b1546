"""A micro-batch with context between the model's messages: values and gradients by hand, and training from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from regretless.cli.app import main
from regretless.core import continuations
from regretless.core.continuations import Continuation
from regretless.core.top_logps import packed, unpacked
from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.modeling.forward import grouped, in_rows, response_scores
from regretless.modeling.layout import Ids, as_context, is_context, own_ids, read_ids
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.objectives import build
from regretless.training.batch import build_batch
from regretless.training.data import TrainingPair
from regretless.training.metrics import pair_metrics
from regretless.training.pair_store import PairTable
from regretless.training.passes import joined
from tiny_model import save_tiny_model

PROMPT = (1, 20, 21, 22)
CHOSEN = (10, 7, 11, 2, *as_context((0, 30, 31)), 12, 2, *as_context((32,)), 13, 14, 2)
REJECTED = (10, 7, 11, 2, *as_context((0, 33)), 15, 16, 2)
CUT = CHOSEN[:8]
"""A masked pair's rejected side: it ends within the second message."""


def side(ids: Ids, first: float) -> TokenizedSide:
    return TokenizedSide(ids, {"behavior": tuple(first - 0.1 * place for place in range(len(own_ids(ids))))})


def logps_by_hand(model: PreTrainedModel, response: Ids) -> Tensor:
    """(own tokens,) one plain causal sequence, tokens of the context left out by a mask."""
    row = torch.tensor([[*PROMPT, *read_ids(response)]])
    logps = model(input_ids=row, use_cache=False).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    found = logps.gather(-1, row[0, len(PROMPT) :, None])[:, 0]
    return found[torch.tensor([not is_context(token) for token in response])]


def harmonic(count: int) -> float:
    return sum(1 / number for number in range(1, count + 1))


def repo_score(policy: Tensor, reference: Tensor, behavior: Tensor) -> Tensor:
    length = len(policy)
    values = [harmonic(length - 1) - harmonic(length - s) for s in range(1, length + 1)]
    weights = torch.tensor(values, dtype=torch.float64)
    return ((1 + weights) * policy - reference - weights * behavior).sum()


@pytest.mark.parametrize("name", ["repo", "repo steps", "simpo", "orpo", "sft"])
def test_objective_when_context_lies_between_messages_then_value_and_gradient_are_those_by_hand(
    name: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    policy, reference = make_model(1).double(), make_model(2).double()
    sides = {"chosen": side(CHOSEN, -0.3), "rejected": side(REJECTED, -0.4), "cut": side(CUT, -0.3)}
    stored = PairTable.temporary(
        TokenizedPair(f"p{kind}", PROMPT, sides["chosen"], sides[other], "rows:1", kind)
        for other, kind in (("rejected", "original"), ("cut", "masked"))
    )
    pairs = [TrainingPair(stored[0]), TrainingPair(stored[1])]
    assert pairs[1].pair.sides[1].own == (10, 7, 11, 2, 12)
    # Both pairs share the chosen response, whose beginning is the masked side: 4 prompt tokens, 13 − 1 and 9 − 1.
    objective = build(name.split(maxsplit=1)[0], **({"granularity": "step"} if "steps" in name else {}))
    with torch.no_grad():
        of_reference = {ids: logps_by_hand(reference, ids) for ids in (CHOSEN, REJECTED, CUT)}
    batch = build_batch(
        pairs, objective, reference=lambda item: of_reference[item[1]].numpy(), ends_step=lambda token: token == 7
    )
    others = len(REJECTED) - 1 if "rejected" in objective.needs else 0
    assert batch.layouts[0].tokens == len(PROMPT) + len(CHOSEN) - 1 + others
    assert (batch.layouts[0].input_ids >= 0).all()
    assert batch.token_counts[0] == 2 * len(own_ids(CHOSEN)) == 18
    with grouped(policy):
        loss = objective(batch.logps(response_scores(policy, batch.layouts[0])), batch.pairs).loss
        loss.backward()
    found = {key: parameter.grad.clone() for key, parameter in policy.named_parameters() if parameter.grad is not None}
    policy.zero_grad()

    scores = {ids: logps_by_hand(policy, ids) for ids in (CHOSEN, REJECTED, CUT)}
    means = {ids: values.mean() for ids, values in scores.items()}
    behavior = {
        each.ids: torch.tensor(np.float32(each.values["behavior"]), dtype=torch.float64) for each in sides.values()
    }
    losses = []
    for rejected in (REJECTED, CUT):
        both = (CHOSEN, rejected)
        if name == "repo":
            one, other = (repo_score(scores[ids], of_reference[ids], behavior[ids]) for ids in both)
            losses.append(-F.logsigmoid(one - other))
        elif name == "repo steps":
            # Steps end with token 7, and with a message.
            sizes = {CHOSEN: (2, 2, 2, 3), REJECTED: (2, 2, 3), CUT: (2, 2, 1)}
            sums = [
                [torch.stack([part.sum() for part in values[ids].split(sizes[ids])]) for ids in both]
                for values in (scores, of_reference, behavior)
            ]
            one, other = (repo_score(*(values[number] for values in sums)) for number in (0, 1))
            losses.append(-F.logsigmoid(one - other))
        elif name == "simpo":
            losses.append(-F.logsigmoid(2.0 * (means[CHOSEN] - means[rejected]) - 0.5))
        elif name == "orpo":
            one, other = (means[ids] - torch.log1p(-means[ids].exp()) for ids in both)
            losses.append(-means[CHOSEN] - 0.1 * F.logsigmoid(one - other))
        else:
            losses.append(-means[CHOSEN])
    wanted = torch.stack(losses).mean()
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-9)
    wanted.backward()
    for key, parameter in policy.named_parameters():
        assert parameter.grad is not None
        # Models compute their norms in float32 whatever their own precision, so gradients agree to float32 only.
        assert (found[key] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-12, key


def listing(ids: Ids, seed: int, same: int = 0) -> bytes:
    """Lists of five tokens of a response; in the first `same` places those of the writer with seed 0."""
    first, own = (np.random.default_rng(each).normal(size=(len(ids), 40)) for each in (0, seed))
    writer = torch.from_numpy(np.concatenate((first[:same], own[same:]))).log_softmax(-1)
    logps, tokens = writer.topk(5)
    return packed(tokens.numpy(), logps.numpy()).tobytes()


COMMON = tuple(range(10, 27))
"""Long enough for a row to have it once."""
LISTED, BESIDE = (*COMMON, 11, 12, 13), (*COMMON, 14, 15)


@pytest.mark.parametrize("max_tokens", [1000, 24])
@pytest.mark.parametrize("kind", ["grouped", "plain"])
def test_lists_when_responses_of_two_writers_share_a_beginning_then_each_has_its_own_divergence(
    kind: Any, max_tokens: int, make_model: Callable[..., PreTrainedModel]
) -> None:
    policy = make_model(1).double()
    vocabulary = policy.config.vocab_size
    lists = {LISTED: listing(LISTED, 0), BESIDE: listing(BESIDE, 5, same=16), LISTED[:18]: listing(LISTED[:18], 0)}
    assert lists[LISTED].startswith(lists[LISTED[:18]])
    sides = {ids: TokenizedSide(ids, top=top) for ids, top in lists.items()}
    stored = PairTable.temporary(
        TokenizedPair(f"p{number}", PROMPT, sides[LISTED], sides[other], "rows:1", "original")
        for number, other in enumerate((BESIDE, LISTED[:18]))
    )
    objective = build("repo", estimator="topk", reference_weight=0)
    batch = build_batch([TrainingPair(each) for each in stored], objective, kind=kind, max_tokens=max_tokens)
    # Of the 17 places in common one has two lists; plain rows have all of them twice, and so have rows of few tokens.
    assert len(batch.layouts) == (1 if max_tokens == 1000 else 2)
    predicted = sum(len(layout.targets) for layout in batch.layouts)
    assert predicted == (17 + 1 + 3 + 2 if (kind, max_tokens) == ("grouped", 1000) else 20 + 19)
    with in_rows(policy, kind):
        scores = joined([response_scores(policy, layout) for layout in batch.layouts])
        logps = batch.logps(scores)
        loss = objective(logps, batch.pairs).loss
        loss.backward()
    found = {key: parameter.grad.clone() for key, parameter in policy.named_parameters() if parameter.grad is not None}
    policy.zero_grad()

    values = []
    for ids, top in lists.items():
        row = torch.tensor([[*PROMPT, *ids]])
        full = policy(input_ids=row, use_cache=False).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        total = torch.zeros((), dtype=torch.float64)
        for at, entries in enumerate(unpacked(top, len(ids))):
            weight = harmonic(len(ids) - 1) - harmonic(len(ids) - at - 1)
            listed = entries["id"].astype(int).tolist()
            mine = torch.from_numpy(entries["logp"].astype(np.float64))
            rest, others = 1 - mine.exp().sum(), [token for token in range(vocabulary) if token not in listed]
            kl = (mine.exp() * (mine - full[at, listed])).sum() + rest * (rest.log() - full[at, others].logsumexp(0))
            total = total + full[at, ids[at]] - weight * kl
        values.append(total)
    wanted = torch.stack([-F.logsigmoid(values[0] - values[1]), -F.logsigmoid(values[0] - values[2])]).mean()
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-9)
    wanted.backward()
    for key, parameter in policy.named_parameters():
        assert parameter.grad is not None
        assert (found[key] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-12, key
    metrics = pair_metrics(logps, batch.pairs, objective(logps, batch.pairs), with_rejected=True)
    assert logps.top_logps is not None
    rejected = logps.top_logps.divergence()[batch.pairs[:, 1]].sum(1)
    assert metrics["behavior_kl/rejected"].tolist() == pytest.approx(rejected.tolist()) and rejected.min() > 0


def drawn(start: int, ids: Ids, seed: int) -> Continuation:
    logps = -np.random.default_rng(seed).exponential(2.0, len(ids)).astype(np.float32)
    return Continuation(start, np.array(ids, np.int32), logps)


def future_of(ratios: Tensor, units: list[int], unit: int) -> Tensor:
    """Mean over the units behind one of Σ (π − m), of a response's tokens with the numbers of their units."""
    last = units[-1]
    ahead = [ratio for ratio, number in zip(ratios, units, strict=True) if number > unit]
    return torch.stack(ahead).sum() / (last - unit) if ahead else torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("granularity", ["token", "step"])
@pytest.mark.parametrize(("kind", "max_tokens"), [("grouped", 1000), ("grouped", 30), ("plain", 60)])
def test_continuations_when_a_response_shares_its_beginning_with_them_then_values_and_gradients_are_those_by_hand(
    kind: Any, max_tokens: int, granularity: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    policy = make_model(1).double()
    # Two of one beginning, of which one is the path that was taken, and one of a later beginning; tokens 12 end steps.
    of_chosen = [drawn(16, (10, 14, 12, 15, 2), 1), drawn(16, LISTED[16:], 2), drawn(18, (12, 30, 31, 2), 3)]
    of_rejected = [drawn(3, (14, 15, 2), 4)]
    sides = []
    for number, (ids, of_side) in enumerate(((LISTED, of_chosen), (BESIDE, of_rejected))):
        values = {"behavior": tuple((-np.random.default_rng(9 + number).exponential(2.0, len(ids))).tolist())}
        sides.append(TokenizedSide(ids, values, continuations=continuations.packed(of_side)))
    table = PairTable.temporary([TokenizedPair("p", PROMPT, *sides, "rows:1", "original")])
    assert (table.continued.tolist(), table.tokens.tolist()) == ([16], [4 + len(LISTED) + len(BESIDE) + 16])
    assert table.response_tokens.tolist() == [22]
    pair = TrainingPair(table[0])
    assert table[0].sides[0].continuations == sides[0].continuations
    objective = build("repo", estimator="rollouts", granularity=granularity, reference_weight=0)
    batch = build_batch([pair], objective, kind=kind, max_tokens=max_tokens, ends_step=lambda token: token == 12)
    # The prompt; of five paths 16, then 26, 11, 12, and what each has of its own but its last token; the sixth path.
    if (kind, max_tokens) == ("grouped", 1000):
        assert batch.tokens == 4 + (16 + 3) + (0 + 2 + 1 + 4) + 5
    assert (len(batch.layouts) > 1) == (max_tokens < 1000)
    with in_rows(policy, kind):
        scores = joined([response_scores(policy, layout) for layout in batch.layouts])
        loss = objective(batch.logps(scores), batch.pairs).loss
        loss.backward()
    found = {key: parameter.grad.clone() for key, parameter in policy.named_parameters() if parameter.grad is not None}
    policy.zero_grad()

    by_hand = []
    for side, of_side in zip(table[0].sides, (of_chosen, of_rejected), strict=True):
        behavior = torch.tensor(side.values["behavior"], dtype=torch.float64)
        paths = {0: [(side.ids, behavior)]}
        for one in of_side:
            theirs = torch.cat((behavior[: one.start], torch.from_numpy(one.logps).double()))
            paths.setdefault(one.start, []).append(((*side.ids[: one.start], *one.ids.tolist()), theirs))
        read: dict[int, list[tuple[Tensor, list[int]]]] = {}
        for start, of_start in paths.items():
            for ids, theirs in of_start:
                breaks = np.cumsum([0, *(token == 12 for token in ids[:-1])]).tolist()
                units = breaks if granularity == "step" else list(range(len(ids)))
                read.setdefault(start, []).append((logps_by_hand(policy, ids) - theirs, units))
        own, units = read.pop(0)[0]
        score = (own + behavior).sum()
        for unit in range(units[-1] + 1):
            following = [start for start in sorted(read) if read[start][0][1][start] > unit]
            of_unit = read[following[0]] if following else [(own, units)]
            score = score + torch.stack([future_of(ratios, numbers, unit) for ratios, numbers in of_unit]).mean()
        by_hand.append(score)
    wanted = -F.logsigmoid(by_hand[0] - by_hand[1])
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-9)
    wanted.backward()
    for key, parameter in policy.named_parameters():
        assert parameter.grad is not None
        assert (found[key] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-12, key


TEMPLATE = (
    "{{ (tools or []) | length }}{% for message in messages %}{% if message.role == 'assistant' %}={% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def conversation(answer: str, *, openai: bool) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": json.dumps({"a": 22}) if openai else {"a": 22}}
    calls = [{"type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None if openai else "", "tool_calls": calls},
        {"role": "tool", "content": "444"},
        {"role": "assistant", "content": answer},
    ]


def row(chosen: str, rejected: str, *, openai: bool) -> dict[str, Any]:
    question, tools = [{"role": "user", "content": "2+2"}], [{"type": "function", "function": {"name": "add"}}]
    sides = [conversation(answer, openai=openai) for answer in (chosen, rejected)]
    if not openai:
        return {"prompt": question, "chosen": sides[0], "rejected": sides[1], "tools": json.dumps(tools)}
    given = {"messages": question, "tools": tools, "parallel_tool_calls": True}
    return {"input": given, "preferred_output": sides[0], "non_preferred_output": sides[1]}


def command(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert not ended.value.code


@pytest.mark.slow
def test_training_when_a_file_has_trl_or_openai_tool_calls_then_both_train_the_same_weights(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    load_tokenizer(ModelConfig(name_or_path=str(model), chat_template=str(tmp_path / "tools.jinja"))).save_pretrained(
        model
    )
    weights = []
    for name in ("trl", "openai"):
        rows = [row(*answers, openai=name == "openai") for answers in (("4", "5"), ("=4", "44"))]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        common = ["--pairs", tmp_path / f"{name}.jsonl", "--model", model, "--output"]
        command("train", *common, tmp_path / name, "objective=dpo", "learning_rate=0.01")
        weights.append(load_model(ModelConfig(name_or_path=str(tmp_path / name))).state_dict())
    start = load_model(ModelConfig(name_or_path=str(model))).state_dict()
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert any(not torch.equal(value, start[key]) for key, value in weights[0].items())

    command("inspect", *common, tmp_path / "inspected", "objectives=[dpo]")
    found = json.loads((tmp_path / "inspected" / "inspect.json").read_text())
    # 22 <eos> and 4 <eos> or =4 <eos>; between them the model reads 444=.
    assert (found["lengths"]["chosen"]["min"], found["lengths"]["chosen"]["max"]) == (5, 6)
    assert found["tokens"]["pairwise"] == 4 * len("12+2=") + (5 + 5 + 6 + 6) + 4 * len("444=")
