"""A pretrained model of 135 million weights: what random tiny models cannot show. `make test-real` makes the models.

Token boundaries, special tokens, tied embeddings, a chat template, the noise of bfloat16, a full sliding window.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, PreTrainedTokenizerBase
from transformers import RepetitionPenaltyLogitsProcessor as Penalty
from transformers import TemperatureLogitsWarper as Temperature
from transformers import TopKLogitsWarper as TopK
from transformers import TopPLogitsWarper as TopP

from regretless import PreferenceConfig, PreferenceTrainer, build
from regretless.core.errors import RegretlessError
from regretless.core.files import read_json
from regretless.data.preferences import parse_pairs
from regretless.data.responses import read_responses
from regretless.data.tokenization import TokenizedPair, TokenizedSide, encode_prompt, tokenize_pairs
from regretless.modeling import decoding
from regretless.modeling.load import ModelConfig
from regretless.modeling.scoring import score_responses
from regretless.objectives import OBJECTIVES, Logps
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import parse_recipe
from regretless.sampling.base import SamplingParams
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.training.merge import merge_adapter

pytestmark = pytest.mark.real

PAPER = SamplingParams(n=1, max_new_tokens=32, temperature=0.8, top_p=0.95, top_k=40, repetition_penalty=1.1)
GREEDY = SamplingParams(n=1, max_new_tokens=32, temperature=0, top_p=1, top_k=0, repetition_penalty=1)


@pytest.fixture(scope="module")
def smollm(real_models: Path) -> Path:
    return real_models / "smollm2-135m"


@pytest.fixture(scope="module")
def tokenizer(smollm: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm)


@pytest.fixture(scope="module")
def problems(shared: Path) -> list[dict[str, str]]:
    """Problems of GSM8K with their solutions, the shortest first."""
    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda row: len(row["question"] + row["answer"]))


@pytest.fixture(scope="module")
def pairs(problems: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[TokenizedPair]:
    """28 pairs of conversations: the problem's solution against the next problem's, with log-probabilities."""
    rows = [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": other["answer"]}],
        }
        for row, other in itertools.pairwise(problems[:29])
    ]
    parsed, refused = parse_pairs(rows)
    tokenized, left_out = tokenize_pairs(parsed, tokenizer, max_length=None, max_prompt_length=None, need_logps=False)
    assert not refused and not left_out and len(tokenized) == 28
    numbers = np.random.default_rng(0)

    def side(ids: tuple[int, ...]) -> TokenizedSide:
        return TokenizedSide(ids, {"behavior": tuple(-numbers.exponential(1.0, len(ids)))})

    return [
        TokenizedPair(
            pair.pair_id, pair.prompt_ids, side(pair.chosen.ids), side(pair.rejected.ids), pair.source, "original"
        )
        for pair in tokenized
    ]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


LORA = LoraConfig(r=4, target_modules="all-linear")


def disturb(model: Any) -> None:
    """Let a new LoRA adapter do something, the same in every model."""
    numbers = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        if weight.requires_grad:
            size = 0.02 if "lora_B" in name else 0.05
            weight.data = size * torch.randn(weight.shape, generator=numbers)


def plain_logits(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """(T, V) logits before each response token, of this sequence alone."""
    logits: Tensor = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float()


def plain_logps(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    return plain_logits(model, prompt, response).log_softmax(1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.fixture(scope="module")
def questions(problems: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Prompts of different lengths, as the chat template writes them."""
    return [encode_prompt(tokenizer, [{"role": "user", "content": row["question"]}]) for row in problems[:120:30]]


@pytest.mark.parametrize(("dtype", "raw_noise", "drawn_noise"), [("float32", 1e-4, 1e-4), ("bfloat16", 0.1, 0.15)])
def test_sampled_logps_when_scored_again_by_plain_transformers_then_they_are_those(
    smollm: Path, questions: list[list[int]], dtype: str, raw_noise: float, drawn_noise: float
) -> None:
    engine = TransformersEngine(ModelConfig(name_or_path=str(smollm), dtype=dtype), PAPER)
    completions = engine.generate(questions, 0)
    processors = LogitsProcessorList([Penalty(1.1), Temperature(0.8), TopK(40), TopP(0.95)])
    for prompt, completion in zip(questions, completions, strict=True):
        ids = completion.token_ids
        with torch.no_grad():
            logits = plain_logits(engine.model, tuple(prompt), tuple(ids))
        raw = logits.log_softmax(1)[range(len(ids)), ids]
        shaped = torch.cat(
            [processors(torch.tensor([prompt + ids[:at]]), logits[at : at + 1].clone()) for at in range(len(ids))]
        )
        drawn = shaped.log_softmax(1)[range(len(ids)), ids]
        # A token at the edge of the list may be outside in a pass that rounds otherwise.
        inside = drawn.isfinite()
        assert inside.float().mean() >= (1 if dtype == "float32" else 0.9)
        differences = (torch.tensor(completion.logps) - raw).abs()
        assert differences.max() < raw_noise if dtype == "float32" else differences.mean() < raw_noise
        differences = (torch.tensor(completion.sampled_logps) - drawn)[inside].abs()
        assert differences.max() < drawn_noise if dtype == "float32" else differences.mean() < drawn_noise


@pytest.fixture(scope="module")
def beginnings(problems: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """200 texts of 6 to 13 tokens, which a model continues in as many ways."""
    return [tokenizer(row["question"])["input_ids"][: 6 + at % 8] for at, row in enumerate(problems[:400:2])]


def test_greedy_texts_when_200_prompts_are_continued_then_they_are_those_of_generate(
    smollm: Path, beginnings: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    params = GREEDY.model_copy(update={"max_new_tokens": 16})
    completions = TransformersEngine(ModelConfig(name_or_path=str(smollm), dtype="float32"), params).generate(
        beginnings, 0
    )
    model, found = load(smollm), []
    for first in range(0, 200, 50):
        batch = tokenizer.pad({"input_ids": beginnings[first : first + 50]}, padding_side="left", return_tensors="pt")
        ids = model.generate(**batch, do_sample=False, max_new_tokens=16, pad_token_id=tokenizer.pad_token_id)
        found += ids[:, batch["input_ids"].shape[1] :].tolist()
    assert len(completions) == len(found) == 200
    for completion, ids in zip(completions, found, strict=True):
        count = len(completion.token_ids)
        assert completion.token_ids == ids[:count]
        assert count == 16 or completion.token_ids[-1] == tokenizer.eos_token_id
    assert len({completion.text for completion in completions}) > 150


def test_texts_when_drawn_in_float32_then_they_do_not_depend_on_their_neighbors(
    smollm: Path, beginnings: list[list[int]]
) -> None:
    engine = TransformersEngine(ModelConfig(name_or_path=str(smollm), dtype="float32"), PAPER)
    some, seeds = beginnings[:40], range(40)
    together = dict(engine.stream(some, seeds))
    few = engine.with_params(PAPER.model_copy(update={"batch_size": 7})).stream(some[::-1], seeds[::-1])
    assert {39 - at: found.token_ids for at, found in few} == {at: found.token_ids for at, found in together.items()}


def test_evaluation_when_the_model_has_a_chat_template_then_it_asks_in_it_unless_plain_is_set(
    smollm: Path, problems: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    asked = problems[:12]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    source = {"dataset": str(tmp_path / "problems.jsonl"), "prompt_column": "question", "answer_column": "answer"}
    values = {
        "name": "templates",
        "output_dir": str(tmp_path / "run"),
        "threads": 1,
        "model": {"name_or_path": str(smollm), "dtype": "float32"},
        "evaluate": {"benchmarks": {"chat": source, "plain": {**source, "template": "plain"}}, "max_new_tokens": 24},
    }
    run_recipe(parse_recipe(values, "test"))
    messages = [[{"role": "user", "content": row["question"]}] for row in asked]
    expected = {
        "chat": tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"],
        "plain": tokenizer([row["question"] for row in asked])["input_ids"],
    }
    for name, ids in expected.items():
        answers, _ = read_responses(tmp_path / f"run/evaluate/samples/base/{name}/greedy/responses.parquet")
        assert [answer.prompt_token_ids for answer in answers] == ids
    # Without its template, this model ends most of the answers before they begin.
    results = read_json(tmp_path / "run" / "evaluate" / "results.json")["rows"]
    empty = {row["benchmark"]: row["empty"] for row in results}
    assert empty["chat"] == 0 and empty["plain"] >= 6


def _keys_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = decoding._attend
    monkeypatch.setattr(
        decoding, "_attend", lambda query, key, *more, **how: attend(query, key.roll(1, 1), *more, **how)
    )


def _no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shorter row sees what is behind its end."""
    mask = decoding._Continuing._mask
    monkeypatch.setattr(decoding._Continuing, "_mask", lambda *of: torch.zeros_like(mask(*of)))


def _newest_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = decoding._Continuing._mask

    def without_newest(self: Any, *of: Any) -> Tensor:
        hidden = mask(self, *of).clone()
        hidden[torch.arange(len(self.positions)), 0, 0, self.positions] = -torch.inf
        return hidden

    monkeypatch.setattr(decoding._Continuing, "_mask", without_newest)


def _positions_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = decoding.Decoder._hidden

    def moved(self: Any, tokens: Any, positions: Tensor, attention: Any, one_each: bool = False) -> Tensor:
        return hidden(self, tokens, positions + one_each, attention, one_each)

    monkeypatch.setattr(decoding.Decoder, "_hidden", moved)


@pytest.mark.parametrize("fault", [_keys_of_others, _no_mask, _newest_hidden, _positions_one_off])
def test_decoding_in_bfloat16_when_it_has_a_fault_then_it_is_not_used(
    fault: Callable[[pytest.MonkeyPatch], None], smollm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(smollm, torch.bfloat16)
    assert decoding.why_not(model) is None
    fault(monkeypatch)
    assert "log-probabilities differ from its own" in str(decoding.why_not(model))


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "What is 2 + 3?"), ("assistant", "5")],
        [("system", "You count."), ("user", " Say it.\n"), ("assistant", "**Sure**:\n\n1, 2, 3")],
        [("user", "Hi"), ("assistant", "Hello!"), ("user", "¿Qué es 7×8?"), ("assistant", "56 🙂")],
    ],
)
def test_conversation_when_split_into_prompt_and_response_then_ids_are_those_of_the_whole(
    tokenizer: PreTrainedTokenizerBase, messages: list[tuple[str, str]]
) -> None:
    rows = [{"role": role, "content": content} for role, content in messages]
    parsed, _ = parse_pairs([{"prompt": rows[:-1], "chosen": rows[-1:], "rejected": [{**rows[-1], "content": "No."}]}])
    (pair,), refused = tokenize_pairs(parsed, tokenizer, max_length=None, max_prompt_length=None, need_logps=False)
    whole = tokenizer.apply_chat_template(rows, tokenize=True, return_dict=False)
    assert not refused
    assert [*pair.prompt_ids, *pair.chosen.ids] == whole[: len(pair.prompt_ids) + len(pair.chosen.ids)]
    assert pair.chosen.ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(whole[len(pair.prompt_ids) + len(pair.chosen.ids) :]).strip() == ""


def trainer_of(
    model: Any, tokenizer: Any, pairs: list[TokenizedPair], folder: Path, lora: LoraConfig, **more: Any
) -> PreferenceTrainer:
    arguments = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return PreferenceTrainer(
        model,
        args=PreferenceConfig(output_dir=str(folder), **(arguments | more)),
        train_dataset=pairs[:20],
        eval_dataset=pairs[20:] or None,
        processing_class=tokenizer,
        peft_config=lora,
    )


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of the trained weights, which are then gone."""
    taken = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}
    model.zero_grad()
    return taken


@pytest.fixture(scope="module")
def short(pairs: list[TokenizedPair]) -> list[TokenizedPair]:
    """Two pairs of incomplete responses."""

    def cut(side: TokenizedSide | None) -> TokenizedSide:
        assert side is not None
        return side.cut(16)

    return [replace(pair, chosen=cut(pair.chosen), rejected=cut(pair.rejected)) for pair in pairs[:2]]


@pytest.fixture(scope="module")
def plain(smollm: Path, short: list[TokenizedPair]) -> tuple[Any, dict[str, Tensor]]:
    """A model with an adapter, and by plain transformers what objectives read of the responses, with its gradient."""
    model = get_peft_model(load(smollm), LORA)
    disturb(model)
    sequences = [(pair.prompt_ids, side) for pair in short for side in pair.sides]
    with torch.no_grad(), model.disable_adapter():
        frozen = torch.stack([plain_logits(model, prompt, side.ids).log_softmax(1) for prompt, side in sequences])
    current = torch.stack([plain_logits(model, prompt, side.ids).log_softmax(1) for prompt, side in sequences])
    ids = torch.tensor([side.ids for _, side in sequences])[:, :, None]
    return model, {
        "policy": current.gather(2, ids)[:, :, 0],
        "reference": frozen.gather(2, ids)[:, :, 0],
        "reference_kl": (frozen.exp() * (frozen - current)).sum(2),
        "behavior": torch.tensor([side.values["behavior"] for _, side in sequences]),
    }


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if not build(name).token_numbers])
def test_step_of_an_objective_when_computed_by_plain_transformers_then_loss_and_lora_gradient_are_equal(
    name: str,
    smollm: Path,
    tokenizer: PreTrainedTokenizerBase,
    short: list[TokenizedPair],
    plain: tuple[Any, dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    trainer = trainer_of(load(smollm), tokenizer, short, tmp_path, LORA, objective=name, per_device_train_batch_size=2)
    disturb(trainer.model)
    trainer.prepare_reference()
    z_ref = trainer._zero_point(list(trainer.train_dataset), counts=True)
    loss = float(trainer.training_step(trainer.model, list(trainer.train_dataset)))
    trained = gradients(trainer.model)

    objective, (model, values) = build(name), plain
    needed = {key: value for key, value in values.items() if key in objective.required}
    logps = Logps(values["policy"], mask=torch.ones_like(values["policy"]), z_ref=z_ref, **needed)
    expected = objective(logps, torch.arange(4).view(-1, 2)).loss
    expected.backward(retain_graph=True)
    by_itself = gradients(model)
    assert loss == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    assert trained.keys() == by_itself.keys()
    difference = torch.stack([(trained[key] - by_itself[key]).norm() for key in trained]).norm()
    assert difference < 1e-3 * torch.stack([value.norm() for value in by_itself.values()]).norm()


def test_training_when_it_runs_twenty_steps_then_held_out_loss_falls_and_the_adapter_is_one_of_plain_peft(
    smollm: Path, tokenizer: PreTrainedTokenizerBase, pairs: list[TokenizedPair], tmp_path: Path
) -> None:
    lora = LoraConfig(r=8, target_modules="all-linear")
    more = {"max_steps": 20, "per_device_train_batch_size": 2, "learning_rate": 2e-4, "objective": "dpo"}
    trainer = trainer_of(load(smollm), tokenizer, pairs, tmp_path / "dpo", lora, **more)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(np.log(2), abs=1e-4)
    assert after < before - 0.1
    trainer.save_model(str(tmp_path / "adapter"))
    items = [(pair.prompt_ids, pair.chosen.ids) for pair in pairs[:3]]
    in_training = score_responses(trainer.model, items)

    # In plain peft, and merged in both dtypes, it gives every token the log-probability that training gave it.
    adapter = PeftModel.from_pretrained(load(smollm), str(tmp_path / "adapter"))
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=str(smollm), dtype="float32")
    # So short a training changes less than bfloat16 can store, and the merge says so.
    with pytest.raises(RegretlessError, match="rounding to bfloat16 may lose small changes"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged16", base=str(smollm), dtype="bfloat16")
    with torch.no_grad():
        for model in (adapter, load(tmp_path / "merged")):
            for (prompt, response), row in zip(items, in_training, strict=True):
                assert row == pytest.approx(plain_logps(model, prompt, response).numpy(), abs=1e-3)


def test_training_when_it_goes_on_from_a_checkpoint_then_its_weights_are_those_of_one_that_never_stopped(
    smollm: Path, tokenizer: PreTrainedTokenizerBase, pairs: list[TokenizedPair], tmp_path: Path
) -> None:
    def trained(folder: Path, steps: int, resume: bool) -> dict[str, Tensor]:
        more = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps, "lr_scheduler_type": "constant"}
        trainer = trainer_of(load(smollm), tokenizer, pairs[:4], folder, LORA, per_device_train_batch_size=2, **more)
        trainer.train(resume_from_checkpoint=resume or None)
        return {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}

    whole = trained(tmp_path / "whole", 2, resume=False)
    trained(tmp_path / "parts", 1, resume=False)
    resumed = trained(tmp_path / "parts", 2, resume=True)
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_shared_rows_when_a_sliding_window_is_full_then_logps_are_those_of_plain_transformers(
    real_models: Path, problems: list[dict[str, str]]
) -> None:
    folder = real_models / "gemma3-270m"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load(folder)
    assert model.config.sliding_window == 512
    text = "\n\n".join(row["question"] + "\n" + row["answer"] for row in problems[-4:])
    prompt = tuple(tokenizer(text)["input_ids"][:640])
    responses = [tuple(tokenizer(row["answer"], add_special_tokens=False)["input_ids"][:40]) for row in problems[:2]]
    scored = score_responses(model, [(prompt, response) for response in responses])
    with torch.no_grad():
        for response, row in zip(responses, scored, strict=True):
            assert row == pytest.approx(plain_logps(model, prompt, response).numpy(), abs=2e-3)
