"""A tiny real model and tokenizer, and pairs for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.training.arguments import PreferenceConfig
from regretless.training.trainer import PreferenceTrainer
from tiny_kinds import SIZES

VOCABULARY = 40
LINE_BREAK = 7


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    vocabulary["\n"] = vocabulary.pop(f"w{LINE_BREAK}")
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    def make(seed: int = 0, model_type: str = "qwen3", **more: object) -> PreTrainedModel:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **(SIZES | {"vocab_size": VOCABULARY} | more))
        )

    return make


@pytest.fixture(scope="session")
def pairs() -> list[TokenizedPair]:
    """12 prompts with 2 × 2 pairs or 1 × 2, some with a masked pair; log-probabilities as a behavior policy's."""
    numbers = torch.Generator().manual_seed(3)

    def words(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, VOCABULARY, (count,), generator=numbers).tolist())

    def logps(count: int) -> tuple[float, ...]:
        return tuple((-4 * torch.rand(count, generator=numbers)).tolist())

    found: list[TokenizedPair] = []

    def add(prompt: tuple[int, ...], chosen: tuple, rejected: tuple, kind: str) -> None:
        number = len(found)
        found.append(
            TokenizedPair(
                pair_id=f"pair-{number}",
                prompt_ids=prompt,
                chosen=TokenizedSide(chosen[0], {"behavior": chosen[1]}),
                rejected=TokenizedSide(rejected[0], {"behavior": rejected[1]}),
                source=f"pairs.jsonl:{number + 1}",
                kind=kind,  # type: ignore[arg-type]
            )
        )

    for query in range(12):
        prompt = words(3 + query % 4)
        right = [(r := (*words(5 + query % 5), 2), logps(len(r))) for _ in range(1 + query % 2)]
        wrong = [(r := (*words(4 + query % 3), 2), logps(len(r))) for _ in range(2)]
        for chosen in right:
            for rejected in wrong:
                add(prompt, chosen, rejected, "original")
        if query % 3 == 0:
            ids, values = right[0]
            add(prompt, right[0], (ids[:-3], values[:-3]), "masked")
    return found


@pytest.fixture
def make_trainer(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[TokenizedPair],
    make_model: Callable[..., PreTrainedModel],
) -> Callable[..., PreferenceTrainer]:
    def make(
        *,
        lora: bool = True,
        adapter: Mapping[str, Any] = MappingProxyType({}),
        dropout: float = 0.0,
        data: object = None,
        **arguments: object,
    ) -> PreferenceTrainer:
        options: dict[str, object] = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 5,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "max_tokens_per_microbatch": 60,
        }
        others = ("eval_dataset", "ref_model", "callbacks", "optimizers", "optimizer_cls_and_kwargs")
        rest = {name: arguments.pop(name) for name in others if name in arguments}
        model = arguments.pop("model", None) or make_model()
        torch.manual_seed(11)
        plain = {"r": 4, "lora_alpha": 8, "lora_dropout": dropout, "target_modules": "all-linear"}
        config = LoraConfig(task_type="CAUSAL_LM", **{**plain, **adapter})
        return PreferenceTrainer(
            model,  # type: ignore[arg-type]
            args=PreferenceConfig(**(options | arguments)),
            train_dataset=pairs if data is None else data,
            processing_class=tokenizer,
            peft_config=config if lora else None,
            **rest,
        )

    return make
