"""A micro-batch with context between the model's messages: values and gradients by hand, and training from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from regretless.cli.app import main
from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.modeling.forward import grouped, response_scores
from regretless.modeling.layout import Ids, as_context, is_context, own_ids, read_ids
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.objectives import build
from regretless.smoke.tiny_models import smoke_architecture
from regretless.training.batch import build_batch
from regretless.training.data import TrainingPair
from regretless.training.pair_store import PairTable

PROMPT = (1, 20, 21, 22)
CHOSEN = (10, 7, 11, 2, *as_context((0, 30, 31)), 12, 2, *as_context((32,)), 13, 14, 2)
REJECTED = (10, 7, 11, 2, *as_context((0, 33)), 15, 16, 2)
CUT = CHOSEN[:8]
"""A masked pair's rejected side: it ends within the second message."""


def side(ids: Ids, first: float) -> TokenizedSide:
    return TokenizedSide(ids, tuple(first - 0.1 * place for place in range(len(own_ids(ids)))))


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
    assert batch.layout.tokens == len(PROMPT) + len(CHOSEN) - 1 + others
    assert (batch.layout.input_ids >= 0).all()
    assert batch.token_counts[0] == 2 * len(own_ids(CHOSEN)) == 18
    with grouped(policy):
        loss = objective(batch.logps(response_scores(policy, batch.layout)), batch.pairs).loss
        loss.backward()
    found = {key: parameter.grad.clone() for key, parameter in policy.named_parameters() if parameter.grad is not None}
    policy.zero_grad()

    scores = {ids: logps_by_hand(policy, ids) for ids in (CHOSEN, REJECTED, CUT)}
    means = {ids: values.mean() for ids, values in scores.items()}
    behavior = {each.ids: torch.tensor(np.float32(each.logps), dtype=torch.float64) for each in sides.values()}
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


def conversation(answer: str, *, openai: bool) -> list[dict[str, Any]]:
    arguments = {"a": 2, "b": 2}
    function = {"name": "add", "arguments": json.dumps(arguments) if openai else arguments}
    calls = [{"type": "function", "function": function}]
    return [
        {
            "role": "assistant",
            "content": None if openai else "",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": answer},
    ]


@pytest.mark.slow
def test_training_when_a_file_has_trl_or_openai_tool_calls_then_both_train_the_same_weights(
    tmp_path: Path, shared: Path
) -> None:
    tokenizer = str(shared / "data/tokenizers/qwen2")
    template = tmp_path / "qwen3.jinja"
    template.write_text((files("trl") / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8"))
    config = ModelConfig(
        architecture=smoke_architecture("qwen3", 151646), tokenizer=tokenizer, chat_template=str(template)
    )
    model = tmp_path / "model"
    load_model(config).save_pretrained(model)
    load_tokenizer(config).save_pretrained(model)
    question, tools = [{"role": "user", "content": "2+2?"}], [{"type": "function", "function": {"name": "add"}}]
    answers = [("It is 4.", "It is 5."), ("Four.", "I do not know.")]
    trl = [
        {"prompt": question, "chosen": conversation(one, openai=False), "rejected": conversation(two, openai=False)}
        | {"tools": json.dumps(tools)}
        for one, two in answers
    ]
    openai = [
        {
            "input": {"messages": question, "tools": tools, "parallel_tool_calls": True},
            "preferred_output": conversation(one, openai=True),
            "non_preferred_output": conversation(two, openai=True),
        }
        for one, two in answers
    ]
    weights = []
    for name, rows in (("trl", trl), ("openai", openai)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        common = ["--pairs", str(path), "--model", str(model), "--output"]
        main(["inspect", *common, str(tmp_path / f"inspect-{name}"), "objectives=[dpo]"])
        found = json.loads((tmp_path / f"inspect-{name}" / "inspect.json").read_text())
        # The tokens of a call and of an answer with their ends; the tool's output is not among them.
        assert found["lengths"]["chosen"]["max"] < found["tokens"]["pairwise"] / 8
        main(["train", *common, str(tmp_path / name), "objective=dpo", "steps=1", "learning_rate=0.01"])
        weights.append(load_model(ModelConfig(name_or_path=str(tmp_path / name))).state_dict())
    start = load_model(ModelConfig(name_or_path=str(model))).state_dict()
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert any(not torch.equal(value, start[key]) for key, value in weights[0].items())
