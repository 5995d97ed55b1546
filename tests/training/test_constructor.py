"""What the trainer is handed: used, or refused by its name in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from regretless.core.errors import ConfigError, DataError
from regretless.training.arguments import PreferenceConfig
from regretless.training.constructor import turn_off_dropout
from regretless.training.trainer import PreferenceTrainer

Make = Callable[..., PreferenceTrainer]
WORDS = ["w4", "w5", "w6", "w8", "w9"]
ROWS = [{"prompt": a, "chosen": f"{a} {b} w8", "rejected": f"{b} w9"} for a in WORDS for b in WORDS]


@pytest.fixture
def build(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel]) -> Any:
    def make(data: Any = ROWS, model: Any = None, **more: Any) -> PreferenceTrainer:
        args = {"objective": "dpo", "max_steps": 2, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
        args |= more.pop("args", {})
        config = PreferenceConfig(output_dir=str(tmp_path / "out"), logging_steps=1, disable_tqdm=True, **args)
        return PreferenceTrainer(
            make_model() if model is None else model,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            **more,
        )

    return make


def test_arguments_when_they_would_be_ignored_then_all_are_refused_at_once_with_what_to_do(build: Any) -> None:
    ignored = ("data_collator", "compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics", "model_init")
    others = {"tokenizer": object(), "call_backs": [], "sync_ref_model": True, "beta": 1, "tools": [{}]}
    with pytest.raises(ConfigError) as caught:
        build(**dict.fromkeys(ignored, print), **others)
    message = str(caught.value)
    assert "10 problem(s)" in message
    for name in (*ignored, "tools"):
        assert f"\n  - {name}: not used here: " in message
    assert "tokenizer: not used here: it is called processing_class" in message
    assert "call_backs: unknown argument; did you mean callbacks?" in message
    assert "beta: it belongs to PreferenceConfig" in message and "sync_ref_model: it belongs to" in message
    assert build(**dict.fromkeys(ignored)).train().global_step == 2  # what is None is not given


def test_optimizer_when_it_is_passed_then_it_trains_or_is_refused(
    build: Any, make_model: Callable[..., PreTrainedModel]
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = build(model=model, optimizers=(optimizer, None))
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer and not torch.equal(model.lm_head.weight, before)
    other = torch.optim.SGD(make_model().parameters(), lr=0.5)
    with pytest.raises(ConfigError, match=r"optimizers: the optimizer lacks 25 of 25 trainable weights"):
        build(optimizers=(other, None))
    by_class = build(optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}))
    by_class.train()
    assert isinstance(by_class.optimizer.optimizer, torch.optim.SGD)


def test_ref_model_when_given_by_name_then_rewards_are_those_against_the_model_itself(
    build: Any, make_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    make_model(seed=1).save_pretrained(tmp_path / "reference")
    losses = []
    for reference in (make_model(seed=1), str(tmp_path / "reference")):
        trainer = build(ref_model=reference)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == losses[1]
    assert abs(losses[0][0] - 0.6931472) > 1e-3


def test_ref_model_when_the_method_reads_none_then_it_is_refused_before_it_is_loaded(build: Any) -> None:
    by_behavior = {"objective": "dpo", "objective_kwargs": {"reference": "behavior"}}
    for args in ({"objective": "simpo"}, by_behavior):
        with pytest.raises(ConfigError, match=f"^ref_model: {args['objective']} reads no reference"):
            build(ref_model="nowhere", args=args)


def test_arguments_when_they_come_in_the_order_of_trl_then_each_has_its_meaning(
    tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    args = PreferenceConfig(
        str(tmp_path), objective="dpo", max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True
    )
    reference, seen = make_model(seed=1), []

    class See(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(1)

    optimizers = (torch.optim.SGD((model := make_model()).parameters(), lr=0.5), None)
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    messages = [
        {name: [{"role": roles[name], "content": [{"type": "text", "text": row[name]}]}] for name in row}
        for row in ROWS
    ]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    trainer = PreferenceTrainer(
        model, reference, args, None, messages, {"held": ROWS[:2]}, tokenizer, None, [See()], optimizers, None, None
    )
    trainer.train()
    assert trainer.reference.frozen is reference and trainer.optimizer.optimizer is optimizers[0] and seen == [1]
    assert len(trainer.train_dataset) == 25 and set(trainer.eval_dataset) == {"held"}
    assert trainer.processing_class is tokenizer and trainer.args is args
    with pytest.raises(ConfigError, match=r"ref_model: got training arguments; the order is model, ref_model, args"):
        PreferenceTrainer(make_model(), args, train_dataset=ROWS, processing_class=tokenizer)
    with pytest.raises(ConfigError, match="ref_model: the same object as model, which changes"):
        PreferenceTrainer(model, model, args, train_dataset=ROWS, processing_class=tokenizer)
    with pytest.raises(ConfigError, match="args: expected a PreferenceConfig, got TrainingArguments; build it with"):
        PreferenceTrainer(make_model(), args=TrainingArguments(str(tmp_path)), train_dataset=ROWS)


def test_tokenizer_when_it_is_not_given_then_it_is_that_of_the_models_name(
    build: Any, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    args = PreferenceConfig(str(tmp_path / "out"), objective="sft", use_cpu=True, report_to="none", pad_token="w5")
    for given in (model, str(tmp_path / "model")):
        trainer = PreferenceTrainer(given, args=args, train_dataset=ROWS)
        assert trainer.processing_class.get_vocab() == tokenizer.get_vocab()
        assert trainer.processing_class.pad_token == "w5" and trainer.model.config.pad_token_id == 5
    with pytest.raises(ConfigError, match="pad_token: 'zzz' is not in the tokenizer's vocabulary"):
        build(args={"pad_token": "zzz"})
    with pytest.raises(ConfigError, match="processing_class: required with a model object"):
        PreferenceTrainer(make_model(), args=args, train_dataset=ROWS)
    with pytest.raises(ConfigError, match="model_init_kwargs: the model is an object"):
        build(args={"model_init_kwargs": {"dtype": "float32"}})


def test_quantization_when_it_is_asked_for_then_the_model_is_loaded_with_it_and_needs_an_adapter(
    tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    @register_quantization_config("nothing")
    class NothingConfig(QuantizationConfigMixin):
        def __init__(self, **_: Any) -> None:
            self.quant_method = "nothing"

    @register_quantizer("nothing")
    class Nothing(HfQuantizer):
        requires_calibration = False
        is_trainable = True

        def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
            super().__init__(quantization_config, **kwargs)

        def is_serializable(self, *_: Any) -> bool:
            return True

    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    args = PreferenceConfig(str(tmp_path / "out"), max_steps=1, use_cpu=True, report_to="none", objective="dpo")
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    given: dict[str, Any] = {"args": args, "train_dataset": ROWS, "quantization_config": NothingConfig()}
    try:
        trainer = PreferenceTrainer(str(tmp_path / "model"), peft_config=adapter, **given)
        assert trainer.model.is_quantized and trainer.train().global_step == 1
        with pytest.raises(ConfigError, match="weights are quantized, which only an adapter can train"):
            PreferenceTrainer(str(tmp_path / "model"), **given)
        with pytest.raises(ConfigError, match="quantization_config: the model is an object"):
            PreferenceTrainer(make_model(), processing_class=tokenizer, peft_config=adapter, **given)
        args.model_init_kwargs = {"quantization_config": NothingConfig()}
        with pytest.raises(ConfigError, match="quantization_config: set twice"):
            PreferenceTrainer(str(tmp_path / "model"), peft_config=adapter, **given)
    finally:
        AUTO_QUANTIZER_MAPPING.pop("nothing")
        AUTO_QUANTIZATION_CONFIG_MAPPING.pop("nothing")


def test_processes_when_they_are_to_share_a_sequence_then_it_is_refused(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ConfigError, match=r"cp_size: .* PreferenceConfig's sequence_parallel_size instead"):
        build()


def test_deepspeed_when_it_is_asked_for_in_any_way_then_it_is_refused_with_what_to_use(
    build: Any, make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    advice = r": not used here: .*takes an optimizer step after each backward pass.* to shard a model, use FSDP2"
    with pytest.raises(ConfigError, match=f"deepspeed{advice}"):
        build(args={"deepspeed": {"zero_optimization": {"stage": 2}}})
    args = PreferenceConfig(str(tmp_path), use_cpu=True, report_to="none")
    # By `accelerate launch --use_deepspeed`, and by an Accelerator of the script's own with a plugin.
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match=f"ACCELERATE_USE_DEEPSPEED{advice}"):
        build()
    with pytest.raises(ConfigError, match=f"ACCELERATE_USE_DEEPSPEED{advice}"):
        PreferenceTrainer(make_model(), args=args, train_dataset=ROWS)


def test_liger_kernels_when_they_are_not_installed_then_one_line_says_so(build: Any) -> None:
    with pytest.raises(ConfigError, match=r"^use_liger_kernel: needs a GPU and a package: install liger-kernel$"):
        build(args={"use_liger_kernel": True})


def test_dropout_when_it_is_disabled_then_every_step_computes_the_same(
    build: Any, make_model: Callable[..., PreTrainedModel]
) -> None:
    def losses(**args: Any) -> list[float]:
        adapter = LoraConfig(r=2, lora_dropout=0.5, init_lora_weights=False, target_modules="all-linear")
        # Layers of this architecture keep the probability of attention's dropout as a number.
        model = make_model(attention_dropout=0.5)
        trainer = build(model=model, peft_config=adapter, args={"learning_rate": 1e-30, "seed": 3, **args})
        trainer.train()
        return [line["rewards/chosen"] for line in trainer.state.log_history if "loss" in line]

    expected = losses(disable_dropout=True, per_device_train_batch_size=25)
    assert expected[0] == pytest.approx(expected[1], rel=1e-6)
    other = losses(per_device_train_batch_size=25)
    assert other[0] != pytest.approx(other[1], rel=1e-3)


@pytest.mark.parametrize(("kind", "name"), [("falcon", "hidden_dropout"), ("persimmon", "attention_dropout")])
def test_dropout_when_layers_read_it_from_the_configuration_then_it_is_disabled_and_saved_so(
    kind: str, name: str, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **{name: 0.5})).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    turn_off_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path)
    assert getattr(AutoConfig.from_pretrained(tmp_path), name) == 0


def forms() -> Mapping[str, Any]:
    """The same rows in everything that holds rows."""
    table = datasets.Dataset.from_list(ROWS)
    return {
        "datasets.Dataset": table,
        "DatasetDict": datasets.DatasetDict({"train": table, "test": table.select(range(3))}),
        "streaming": table.to_iterable_dataset(),
        "pandas": pd.DataFrame(ROWS),
        "pandas with messages": pd.DataFrame(ROWS).assign(nothing=None),
        "arrow": pa.Table.from_pylist(ROWS),
        "generator": (row for row in ROWS),
        "tuple": tuple(ROWS),
    }


@pytest.mark.parametrize("form", list(forms()))
def test_rows_when_they_come_in_another_form_then_the_pairs_are_the_same(form: str, build: Any) -> None:
    def pairs(data: Any) -> list[Any]:
        table = build(data).train_dataset.table
        return [(pair.prompt_ids, pair.chosen.ids, pair.rejected.ids) for pair in table]

    assert pairs(forms()[form]) == pairs(ROWS)


def test_dataset_dict_when_evaluated_on_then_each_split_is_named(build: Any) -> None:
    trainer = build(eval_dataset=forms()["DatasetDict"])
    assert {name: len(data) for name, data in trainer.eval_dataset.items()} == {"train": 25, "test": 3}
    assert {"eval_train_loss", "eval_test_loss"} <= trainer.evaluate().keys()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS), "b": datasets.Dataset.from_list(ROWS)}),
            "of a, b;",
        ),
        ({"prompt": ["w4"], "chosen": ["w5"], "rejected": ["w6"]}, "got dict of prompt, chosen, rejected"),
        (["prompt", "chosen", "rejected"], "expected rows with columns, got str 'prompt'"),
        (pd.DataFrame([*ROWS, {"prompt": [{"role": "user"}], "chosen": "w4", "rejected": "w5"}]), "mixed types"),
        (3, "got int"),
    ],
    ids=["splits", "columns", "names", "mixed", "number"],
)
def test_data_when_it_holds_no_rows_then_one_line_says_so(
    data: Any, reason: str, build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError) as caught:
        build(data)
    assert reason in str(caught.value) and "train_dataset: " in str(caught.value) and "\n" not in str(caught.value)
    assert "refused" not in capsys.readouterr().err


def test_several_gpus_when_one_process_sees_them_then_it_uses_one_and_says_so(
    build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], make_trainer: Make
) -> None:
    alone = make_trainer(objective="dpo", lora=False, max_steps=2)
    alone.train()
    config = PreferenceConfig(**{**alone.args.to_dict(), "output_dir": str(tmp_path / "two")})
    assert config.device.type == "cpu"
    config._n_gpu = 2  # what the Trainer finds where two are visible
    assert config.train_batch_size == 2 * config.per_device_train_batch_size
    trainer = PreferenceTrainer(
        type(alone.model)(alone.model.config),
        args=config,
        train_dataset=alone.train_dataset,
        processing_class=alone.processing_class,
    )
    assert "2 GPUs are visible, and one process trains on one: cpu is used" in capsys.readouterr().err
    trainer.train()
    assert not isinstance(trainer.model_wrapped, torch.nn.DataParallel)
    assert trainer.state.global_step == 2 and trainer.state.train_batch_size == config.per_device_train_batch_size


def test_training_arguments_when_they_would_be_ignored_then_all_are_refused_at_once(tmp_path: Path) -> None:
    ignored = {"label_smoothing_factor": 0.1, "auto_find_batch_size": True, "dataloader_drop_last": True}
    ignored |= {"bf16_full_eval": True, "train_sampling_strategy": "group_by_length", "batch_eval_metrics": True}
    ignored |= {
        "neftune_noise_alpha": 5.0,
        "torch_compile": True,
        "torch_compile_backend": "inductor",
        "torch_compile_mode": "max-autotune",
    }
    ignored |= {"torch_empty_cache_steps": 1, "eval_accumulation_steps": 4, "prediction_loss_only": True}
    switched_off = {"eval_do_concat_batches": False, "average_tokens_across_devices": False}
    ignored |= switched_off
    with pytest.raises(ConfigError, match=r"15 problem\(s\)") as caught:
        PreferenceConfig(output_dir=str(tmp_path), use_cpu=True, **ignored)
    assert all(f"\n  - {name}: not used here: " in str(caught.value) for name in ignored)
    defaults = {name: getattr(TrainingArguments, name) for name in ignored}
    assert all(defaults[name] is True for name in switched_off)
    assert PreferenceConfig(output_dir=str(tmp_path), use_cpu=True, **defaults).max_steps == -1


def test_arguments_when_set_after_construction_then_they_count_or_are_refused(build: Any, tmp_path: Path) -> None:
    def logged(config: PreferenceConfig) -> list[float]:
        config.output_dir = str(tmp_path / "again")
        trainer = PreferenceTrainer(
            build().model, args=config, train_dataset=ROWS, processing_class=build().processing_class
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain = {"objective": "ipo", "logging_steps": 1, "report_to": "none", "save_strategy": "no", "max_steps": 3}
    whole = PreferenceConfig(output_dir=str(tmp_path / "whole"), per_device_train_batch_size=4, **plain)
    later = PreferenceConfig(output_dir=str(tmp_path / "later"), **plain)
    later.per_device_train_batch_size, later.gradient_accumulation_steps = 1, 4
    losses = logged(later)
    assert len(losses) == 3 and losses == logged(whole)
    later.loss_type = ["hinge"]
    with pytest.raises(ConfigError, match=r"loss_type: it was None at construction.* is \['hinge'\] now"):
        logged(later)
    with pytest.raises(ConfigError, match="num_steps; set gradient_accumulation_steps"):
        build(args={"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}})


def test_config_when_replaced_then_it_has_all_other_arguments(tmp_path: Path) -> None:
    config = PreferenceConfig(output_dir=str(tmp_path), loss_type="ipo", gradient_accumulation_steps=3)
    other = dataclasses.replace(config, beta=0.3)
    assert (other.objective, other.hyperparameters) == ("ipo", {"beta": 0.3, "reduction": "mean"})
    assert other.per_device_train_batch_size == 3 * PreferenceConfig(output_dir="x").per_device_train_batch_size


@pytest.fixture
def adapter(make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """Folder of an adapter that changes its model."""
    make_model().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(5)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_adapter_when_it_is_given_by_name_then_training_goes_on_from_it(build: Any, adapter: Path) -> None:
    trainer = build(model=str(adapter), args={"learning_rate": 0.1})
    before = load_file(adapter / "adapter_model.safetensors")
    assert {name.split(".lora_")[0][-6:] for name in before} == {"q_proj"}
    held = {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert {name.replace(".default", ""): weight.tolist() for name, weight in held.items()} == {
        name: weight.tolist() for name, weight in before.items()
    }
    trainer.train()
    assert all(not torch.equal(held[name], weight) for name, weight in trainer.model.named_parameters() if name in held)


def test_adapter_when_another_would_take_its_place_or_nothing_would_train_then_it_is_refused(
    build: Any, adapter: Path
) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="has an adapter already"):
        build(model=str(adapter), peft_config=lora)
    for more in ({}, {"peft_config": lora}):
        with pytest.raises(ConfigError, match="transformers has put an adapter into it, which would be lost"):
            build(model=AutoModelForCausalLM.from_pretrained(adapter), **more)
    with pytest.raises(ConfigError, match="none of its weights has requires_grad"):
        build(model=AutoPeftModelForCausalLM.from_pretrained(adapter))


def test_evaluation_when_given_data_of_any_form_then_these_are_evaluated_and_none_are_an_error(
    build: Any, tmp_path: Path
) -> None:
    trainer = build(eval_dataset=ROWS[:4], args={"objective": "ipo"})
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[5:9]))
    expected = trainer.evaluate(ROWS[5:9])["eval_rewards/margins"], trainer.evaluate(ROWS[5:9])["eval_logps/chosen"]
    assert expected[1] != trainer.evaluate()["eval_logps/chosen"]
    for data in (pd.DataFrame(ROWS[5:9]), str(tmp_path / "some.jsonl")):
        assert trainer.evaluate(data)["eval_logps/chosen"] == expected[1]
        assert len(trainer.predict(data).predictions) == 4
    with pytest.raises(DataError, match="eval_dataset: "):
        trainer.evaluate([])


def test_evaluation_when_its_data_set_has_several_splits_then_it_reads_the_one_that_is_not_trained_on(
    build: Any, tmp_path: Path
) -> None:
    table = datasets.Dataset.from_list(ROWS)
    splits = {"train": table, "test": table.select(range(3))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    for name, split in splits.items():
        split.to_parquet(tmp_path / "files" / f"{name}-00000-of-00001.parquet")
    for folder in ("saved", "files"):
        assert len(build(data=str(tmp_path / folder), eval_dataset=str(tmp_path / folder)).eval_dataset) == 3
    table.save_to_disk(str(tmp_path / "one"))
    assert len(build(eval_dataset={"one": str(tmp_path / "one")}).eval_dataset["one"]) == len(ROWS)
    datasets.DatasetDict({**splits, "dev": table}).save_to_disk(str(tmp_path / "more"))
    with pytest.raises(DataError, match=r"more: expected one split to evaluate on, found train, test, dev; give the"):
        build(eval_dataset=str(tmp_path / "more"))


def test_loss_when_a_subclass_adds_to_it_then_the_evaluations_has_it_too(
    build: Any, make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    class Dearer(PreferenceTrainer):
        def compute_loss(self, *args: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, output = super().compute_loss(*args, return_outputs=True, **more)
            return (loss + 100, output) if return_outputs else loss + 100

    plain = build(eval_dataset=ROWS[:4])
    dearer = Dearer(
        make_model(), args=plain.args, train_dataset=ROWS, eval_dataset=ROWS[:4], processing_class=tokenizer
    )
    assert dearer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"] + 100)


def test_adapter_when_it_cannot_be_trained_or_found_again_then_it_is_refused_with_what_to_do(
    build: Any, make_model: Callable[..., PreTrainedModel]
) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(
        ConfigError, match=r"its active adapter is 'mine'; only one called 'default' .* leave adapter_n"
    ):
        build(model=get_peft_model(make_model(), lora, adapter_name="mine"))
    two: Any = get_peft_model(make_model(), lora)
    two.add_adapter("mine", lora)
    assert build(model=two).train().global_step == 2
    kinds: dict[str, Any] = {
        "PROMPT_TUNING puts tokens of its own": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "layer_replication makes another model": LoraConfig(layer_replication=[(0, 2), (0, 2)]),
        "init_lora_weights=pissa_niter_4: .*use pissa": LoraConfig(init_lora_weights="pissa_niter_4"),
    }
    for message, kind in kinds.items():
        with pytest.raises(ConfigError, match=f"peft_config: {message}"):
            build(peft_config=kind)
    with pytest.raises(ConfigError, match=r"torch\.compile has wrapped it; .*compile_layers=True"):
        build(model=torch.compile(make_model()))


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("lr_scheduler_type: .*num_decay_steps", {"args": {"lr_scheduler_type": "warmup_stable_decay"}}),
        ("lr_scheduler_type: .*min_lr", {"args": {"lr_scheduler_type": "cosine_with_min_lr"}}),
        ("optim: .*schedulefree", {"args": {"optim": "schedule_free_adamw"}}),
        (r"optimizers: expected a pair .* got SGD", {"optimizers": torch.optim.SGD([torch.zeros(1)])}),
        (r"optimizers: got a class; .*optimizer_cls_and_kwargs", {"optimizers": (torch.optim.SGD, None)}),
    ],
)
def test_optimizer_and_schedule_when_they_cannot_be_made_then_construction_says_so(
    message: str, more: dict[str, Any], build: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**more)


def test_rows_when_they_have_pictures_then_they_are_refused_by_the_column(
    build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    build([*({**row, "images": []} for row in ROWS[:3]), {**ROWS[3], "image": None}])
    with pytest.raises(DataError):
        build([{**row, "images": ["a.png"]} for row in ROWS])
    assert "images: only text is read" in capsys.readouterr().err


def test_token_when_the_model_has_no_embedding_of_it_then_one_line_says_so(
    build: Any, make_model: Callable[..., PreTrainedModel]
) -> None:
    with pytest.raises(ConfigError, match="token id 9 is beyond the 9 embeddings of Qwen3ForCausalLM"):
        build(model=make_model(vocab_size=9)).train()


def test_peft_config_when_it_is_a_mapping_then_one_line_says_what_is_expected(build: Any) -> None:
    with pytest.raises(ConfigError, match=r"peft_config: expected a PeftConfig, such as .* got \{'r': 4\}"):
        build(peft_config={"r": 4})


def test_checkpoint_when_there_is_none_at_the_path_then_one_line_says_so(build: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: .*no complete checkpoint is there"):
        build().train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
