"""The trainer against plain computation: one sequence at a time, no sharing, no packing."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, modeling_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from regretless.core.errors import ConfigError, DataError, NonFiniteLossError
from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.modeling.training_folder import last_complete_checkpoint
from regretless.objectives import OBJECTIVES, Logps, Output, build
from regretless.objectives.dpo import DPO
from regretless.objectives.inputs import preferences
from regretless.training import trainer as trainer_module
from regretless.training.data import PairDataset
from regretless.training.trainer import PreferenceTrainer

Make = Callable[..., PreferenceTrainer]

METHODS: list[tuple[str, dict[str, Any]]] = [
    # An objective that needs further numbers of the data brings a test of its own.
    *((name, {}) for name in OBJECTIVES if not build(name).token_numbers),
    ("repo", {"formulation": "released", "sft_weight": 0.3}),
    ("repo", {"granularity": "step", "discount": 0.9}),
    ("repo", {"soft_labels": True}),
    ("kto", {"reference_point": "paired"}),
    ("dpo", {"reference": "behavior", "ld_alpha": 0.5, "importance": "mean", "importance_clip": 2.0}),
    ("weighted_sum", {"terms": [{"objective": "kto"}, {"objective": "sft", "weight": 0.5}, {"objective": "repo"}]}),
]


def logits_of(model: nn.Module, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    row = torch.tensor([prompt + response])
    return model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def chosen_logps(logits: Tensor, response: tuple[int, ...]) -> Tensor:
    return logits.gather(-1, torch.tensor(response)[:, None])[:, 0]


def plain_loss(
    policy: nn.Module,
    reference: Callable[[tuple[int, ...], tuple[int, ...]], Tensor],
    pairs: list[TokenizedPair],
    name: str,
    hyperparameters: dict[str, Any],
    mismatched: list[tuple[tuple[int, ...], ...]],
) -> Tensor:
    """The mean loss, every response of every pair by itself and one row of logits at a time."""
    responses = [(p.prompt_ids, side.ids, side.values["behavior"]) for p in pairs for side in p.sides]
    longest = max(len(ids) for _, ids, _ in responses)
    rows: dict[str, list[Tensor]] = {
        "policy": [],
        "reference": [],
        "behavior": [],
        "reference_kl": [],
        "mask": [],
        "steps": [],
    }
    for prompt, ids, logps in responses:
        mine, theirs = logits_of(policy, prompt, ids), reference(prompt, ids)
        columns = {
            "policy": chosen_logps(mine, ids),
            "reference": chosen_logps(theirs, ids),
            "behavior": torch.tensor(logps),
            "reference_kl": (theirs.exp() * (theirs - mine)).sum(-1),
            "mask": torch.ones(len(ids), dtype=torch.bool),
            "steps": torch.tensor([sum(token == 7 for token in ids[:position]) for position in range(len(ids))]),
        }
        for column, values in columns.items():
            rows[column].append(torch.nn.functional.pad(values, (0, longest - len(ids))))
    stacked = {column: torch.stack(values) for column, values in rows.items()}
    indices = torch.arange(len(responses)).reshape(-1, 2)
    if build(name, **hyperparameters).lists:
        of_chosen: dict[Any, list[int]] = {}
        for number, pair in enumerate(pairs):
            key = (pair.prompt_ids, pair.chosen.ids, pair.chosen.values["behavior"])
            of_chosen.setdefault(key, [2 * number]).append(2 * number + 1)
        assert len({len(rows) for rows in of_chosen.values()}) > 1
        indices = torch.tensor(list(itertools.zip_longest(*of_chosen.values(), fillvalue=-1))).T
    z_ref = None
    if (zero_point := build(name, **hyperparameters).zero_point) is not None:
        with torch.no_grad():
            if zero_point == "paired":
                items = [(prompt, ids) for prompt, ids, _ in responses]
            else:
                items = [(p.prompt_ids, ids) for p, others in zip(pairs, mismatched, strict=True) for ids in others]
            ratios = [
                (chosen_logps(logits_of(policy, *item), item[1]) - chosen_logps(reference(*item), item[1])).sum()
                for item in items
            ]
        z_ref = torch.stack(ratios).mean().clamp(min=0)
    objective = build(name, **hyperparameters)
    of_pairs = preferences(objective, [pair.preference_probability for pair in pairs])
    return objective(Logps(**stacked, z_ref=z_ref), indices, of_pairs).loss


@pytest.mark.parametrize(("name", "hyperparameters"), METHODS)
def test_training_step_when_compared_with_plain_computation_then_loss_and_lora_gradients_agree(
    name: str, hyperparameters: dict[str, Any], make_trainer: Make, pairs: list[TokenizedPair]
) -> None:
    labels = itertools.cycle([None, 0.3, 0.8])
    pairs = [dataclasses.replace(pair, preference_probability=next(labels)) for pair in pairs]
    trainer = make_trainer(objective=name, objective_kwargs=hyperparameters, seed=1, data=pairs)
    model = trainer.model
    # LoRA starts as the identity; moved away from it, policy and reference differ.
    numbers = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=numbers))
    trainer.prepare_reference()
    batch = list(trainer.train_dataset)
    loss = trainer.training_step(model, batch)
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()

    def reference(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            return logits_of(model, prompt, ids)

    wanted = plain_loss(model, reference, pairs, name, hyperparameters, [item.mismatched for item in batch])
    wanted.backward()
    assert len(trainer._weighted_microbatches(batch)[0]) > 2
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    mine = torch.cat([grads[key].flatten() for key in grads])
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    assert expected.norm() > 0
    assert (mine - expected).norm() <= 1e-5 * expected.norm()


def test_behavior_as_the_reference_when_trained_then_no_reference_is_computed(make_trainer: Make) -> None:
    trainer = make_trainer(objective="dpo", objective_kwargs={"reference": "behavior"}, max_steps=2)
    trainer._score_reference = lambda items: pytest.fail("the reference was asked")
    trainer.train()
    assert trainer._reference_logps is None and not (trainer.args.cache_dir / "reference").exists()
    line = next(line for line in trainer.state.log_history if "rewards/margins" in line)
    assert line["rewards/margins"] != 0  # relative to the behavior policy, also before the first step


def test_zero_point_of_kto_when_estimated_then_chosen_and_rejected_answers_to_other_prompts_count_alike(
    pairs: list[TokenizedPair],
) -> None:
    written = {(pair.prompt_ids, pair.chosen.ids, pair.rejected.ids) for pair in pairs}
    for item in PairDataset(pairs, mismatched=True):
        (prompt,) = {prompt for prompt, *answers in written if tuple(answers) == item.mismatched}
        assert prompt != item.pair.prompt_ids
        assert item.mismatched_items() == [(item.pair.prompt_ids, answer) for answer in item.mismatched]
    assert not any(item.mismatched for item in PairDataset(pairs, mismatched=False))


@pytest.mark.parametrize("objective", ["repo", "tdpo"])
def test_full_training_when_reference_is_the_start_then_gradients_agree_and_only_tdpo_copies_the_model(
    objective: str, make_trainer: Make, make_model: Callable[..., Any], pairs: list[TokenizedPair]
) -> None:
    trainer = make_trainer(objective=objective, lora=False, seed=1)
    start = make_model()
    trainer.prepare_reference()
    assert (trainer.reference.frozen is None) == (objective == "repo")
    for parameter in trainer.model.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    loss = trainer.training_step(trainer.model, list(trainer.train_dataset))
    grads = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    trainer.model.zero_grad()

    def reference(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            return logits_of(start, prompt, ids)

    wanted = plain_loss(trainer.model, reference, pairs, objective, {}, [])
    wanted.backward()
    expected = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert (grads - expected).norm() <= 1e-5 * expected.norm()


def weights_of(trainer: PreferenceTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", [True, False])
def test_resume_when_stopped_at_a_checkpoint_then_parameters_are_bit_equal(
    lora: bool, make_trainer: Make, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "lora": lora,
        "dropout": 0.2,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = make_trainer(**options, output_dir=str(tmp_path / "whole"))
    whole.train()
    assert whole.state.global_step == 16

    stopped = make_trainer(**options, output_dir=str(tmp_path / "parts"))
    stopped.args.max_steps = -1
    stopped.add_callback(_StopAt(10))
    stopped.train()
    # A save that was cut off must not be taken for a checkpoint.
    broken = tmp_path / "parts" / "checkpoint-12"
    broken.mkdir()
    (broken / "trainer_state.json").write_text('{"global_step": 1')
    problem = "checkpoint-12: trainer_state.json is broken"
    assert last_complete_checkpoint(tmp_path / "parts") == (str(tmp_path / "parts" / "checkpoint-9"), [problem])

    resumed = make_trainer(**options, output_dir=str(tmp_path / "parts"))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 16
    expected = weights_of(whole)
    for name, weight in weights_of(resumed).items():
        assert torch.equal(weight, expected[name]), name


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_steps_when_packed_differently_then_the_trained_weights_are_the_same(make_trainer: Make) -> None:
    results = []
    # Of 16 tokens, a query of two chosen and two rejected responses needs two rows.
    for budget, batch, accumulation in ((60, 6, 1), (16, 6, 1), (10_000, 2, 3)):
        trainer = make_trainer(
            objective="kto",
            max_tokens_per_microbatch=budget,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=1.0,
        )
        trainer.train()
        results.append(torch.cat([w.flatten() for w in weights_of(trainer).values()]))
    start = torch.cat([w.flatten() for w in weights_of(make_trainer()).values()])
    assert (results[0] - start).norm() > 1e-2
    for other in results[1:]:
        assert (results[0] - other).norm() <= 1e-5 * (results[0] - start).norm()


def test_order_when_grouped_or_shuffled_then_each_epoch_sees_every_pair_once(make_trainer: Make) -> None:
    for group_pairs in (True, False):
        trainer = make_trainer(group_pairs=group_pairs)
        sampler = trainer.get_train_dataloader().batch_sampler
        epochs = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            steps = list(sampler)
            assert [len(step) for step in steps[:-1]] == [5] * (len(steps) - 1)
            epochs.append([index for step in steps for index in step])
            assert sorted(epochs[-1]) == list(range(len(trainer.train_dataset)))
        assert epochs[0] == epochs[2] != epochs[1]
        prompts = [trainer.train_dataset[index].pair.prompt_ids for index in epochs[0]]
        changes = sum(a != b for a, b in itertools.pairwise(prompts))
        assert (changes == 11) == group_pairs


def test_reference_cache_when_weights_or_data_change_then_only_what_changed_is_recomputed(
    make_trainer: Make, make_model: Callable[..., Any], pairs: list[TokenizedPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    original = PreferenceTrainer._score_reference

    def counting(self: PreferenceTrainer, items: Any) -> Any:
        scored.append(len(items))
        return original(self, items)

    monkeypatch.setattr(PreferenceTrainer, "_score_reference", counting)

    def prepare(**options: Any) -> int:
        scored.clear()
        make_trainer(**options).prepare_reference()
        return sum(scored)

    distinct = len({(p.prompt_ids, ids) for p in pairs for ids in (p.chosen.ids, p.rejected.ids)})
    assert prepare(data=pairs[:4]) == len({ids for p in pairs[:4] for ids in (p.chosen.ids, p.rejected.ids)})
    first = sum(scored)
    assert prepare() == distinct - first
    assert prepare() == 0
    assert prepare(learning_rate=0.5, objective="dpo", seed=9) == 0
    assert prepare(model=make_model(seed=1)) == distinct
    assert prepare(lora=False) == distinct  # the same weights, but they will be trained


def test_loss_when_a_log_probability_is_not_a_number_then_training_stops_before_the_step_and_names_the_row(
    make_trainer: Make, pairs: list[TokenizedPair]
) -> None:
    poisoned = list(pairs)
    poisoned[6] = dataclasses.replace(
        pairs[6], chosen=TokenizedSide(pairs[6].chosen.ids, {"behavior": (float("nan"),) * len(pairs[6].chosen.ids)})
    )
    trainer = make_trainer(data=poisoned, num_train_epochs=1)
    with pytest.raises(NonFiniteLossError, match=r"step \d+: loss is nan .*pairs\.jsonl:7"):
        trainer.train()
    assert all(torch.isfinite(weight).all() for weight in weights_of(trainer).values())


class _BadRewards(DPO):
    """DPO whose rewards are no numbers where the behavior policy's log-probabilities are 0, though its loss is."""

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"behavior"}

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        output = super().compute(logps, pairs)
        assert output.rewards is not None and logps.behavior is not None
        unknown = torch.where(logps.behavior.sum(dim=1) == 0, torch.nan, 0.0)
        return dataclasses.replace(output, rewards=output.rewards + unknown)


def test_rewards_when_not_finite_beside_a_finite_loss_then_training_stops_and_names_method_and_rows(
    make_trainer: Make, pairs: list[TokenizedPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "dpo", _BadRewards)
    poisoned = list(pairs)
    poisoned[6] = dataclasses.replace(
        pairs[6], rejected=TokenizedSide(pairs[6].rejected.ids, {"behavior": (0.0,) * len(pairs[6].rejected.ids)})
    )
    trainer = make_trainer(data=poisoned, num_train_epochs=1, objective="dpo")
    with pytest.raises(NonFiniteLossError, match=r"step \d+: rewards of dpo are not finite for pairs\.jsonl:7;"):
        trainer.train()


def test_repo_when_data_has_no_log_probabilities_then_it_says_so_and_repo_det_trains(
    make_trainer: Make, pairs: list[TokenizedPair]
) -> None:
    bare = [
        dataclasses.replace(pair, chosen=TokenizedSide(pair.chosen.ids), rejected=TokenizedSide(pair.rejected.ids))
        for pair in pairs
    ]
    rows = [
        {"prompt": "w5 w6", "chosen": "w8 w9 w10", "rejected": "w11 w12"},
        {"prompt": "w5 w6", "chosen": "w13 w9 w10", "rejected": "w11 w12"},
    ]
    with pytest.raises(
        DataError, match=r"repo needs the behavior policy's .*2 of 2 pairs have none: the data has none.*repo_det"
    ):
        make_trainer(data=rows, objective="repo")
    with pytest.raises(DataError, match=r"dpo needs the behavior policy's .*or leave out importance"):
        make_trainer(data=rows, objective="dpo", objective_kwargs={"importance": "mean"})
    for data in (rows, bare):
        trainer = make_trainer(data=data, objective="repo_det", num_train_epochs=1)
        assert trainer.train().training_loss > 0


def test_repo_when_the_behavior_of_some_pairs_is_unknown_then_these_are_trained_as_by_repo_det(
    make_trainer: Make, pairs: list[TokenizedPair], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [dataclasses.replace(pair, rejected=TokenizedSide(pair.rejected.ids)) for pair in pairs]

    def loss(data: list[TokenizedPair], objective: str, **options: Any) -> float:
        more = {"per_device_train_batch_size": 3, "max_steps": 1, "objective_kwargs": options}
        state = make_trainer(data=data, objective=objective, lora=False, **more)
        state.train()
        return float(state.state.log_history[0]["loss"])

    mixed = loss([pairs[0], bare[4], bare[8]], "repo", unknown_behavior="dirac")
    assert (
        "2 of 3 pairs lack behavior log-probabilities and are trained with a Dirac behavior" in capsys.readouterr().err
    )
    # The three losses by themselves, each the whole step of one pair.
    alone = [
        loss(data, name) for data, name in (([pairs[0]], "repo"), ([bare[4]], "repo_det"), ([bare[8]], "repo_det"))
    ]
    assert mixed == pytest.approx(sum(alone) / 3, rel=1e-5)


def test_repo_when_its_horizon_is_stored_then_the_future_behind_a_cut_counts(
    make_trainer: Make, pairs: list[TokenizedPair]
) -> None:
    def loss(horizon: str, tokens: int) -> float:
        pair = pairs[0]
        future = (0.0,) * (len(pair.rejected.ids) - tokens) + (1.0,) * tokens
        cut = dataclasses.replace(pair.rejected, values={**pair.rejected.values, "future": future})
        more: dict[str, Any] = {"max_steps": 1, "objective": "repo", "objective_kwargs": {"horizon": horizon}}
        trainer = make_trainer(data=[dataclasses.replace(pair, rejected=cut)], lora=False, **more)
        trainer.train()
        return float(trainer.state.log_history[0]["loss"])

    assert loss("stored", 0) == pytest.approx(loss("cut", 0), rel=1e-6)
    # An objective that does not look behind a cut never sees what is there, and one that does counts it.
    rejected = pairs[0].rejected
    short = dataclasses.replace(pairs[0], rejected=rejected.cut(len(rejected.ids) - 2))
    trainer = make_trainer(data=[short], lora=False, max_steps=1, objective="repo")
    trainer.train()
    assert loss("cut", 2) == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-6)
    assert abs(loss("stored", 2) - loss("cut", 2)) > 1e-3


def test_adapter_when_saved_then_its_modules_stand_in_order(make_trainer: Make, tmp_path: Path) -> None:
    # peft keeps them as a set, whose order differs from process to process.
    make_trainer().save_model(str(tmp_path / "saved"))
    modules = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["target_modules"]
    assert len(modules) > 5 and modules == sorted(modules)


def test_rows_when_some_are_unusable_then_they_are_refused_and_the_rest_trains(
    make_trainer: Make, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "w5", "chosen": "w8", "rejected": "w8"},
        {"prompt": [{"role": "user", "content": "w5"}], "chosen": "", "rejected": "w9"},
        {"prompt": "w5 w6", "chosen": "w8 w9 w10", "rejected": "w11 w12"},
    ]
    trainer = make_trainer(data=rows, objective="dpo")
    assert len(trainer.train_dataset) == 1
    lines = (tmp_path / "out.cache" / "refused-train_dataset.jsonl").read_text(encoding="utf-8").splitlines()
    refused = [json.loads(line) for line in lines]
    assert [(row["source"], row["line"]) for row in refused] == [("train_dataset", 1), ("train_dataset", 2)]
    assert refused[0]["reason"].startswith("chosen and rejected are equal")
    assert refused[1]["row"]["rejected"] == "w9"
    with pytest.raises(DataError, match="no usable row is left"):
        make_trainer(data=rows[:2], objective="dpo")


def test_evaluation_when_run_during_training_then_metrics_match_a_direct_computation(
    make_trainer: Make, pairs: list[TokenizedPair]
) -> None:
    trainer = make_trainer(
        objective="dpo", data=pairs[:20], eval_dataset=pairs[20:], eval_strategy="steps", eval_steps=2, max_steps=4
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    model = trainer.model.eval()

    def reward(pair: TokenizedPair, ids: tuple[int, ...]) -> float:
        with torch.no_grad():
            mine = chosen_logps(logits_of(model, pair.prompt_ids, ids), ids).sum()
            with model.disable_adapter():
                theirs = chosen_logps(logits_of(model, pair.prompt_ids, ids), ids).sum()
        return 0.1 * float(mine - theirs)

    margins = [reward(p, p.chosen.ids) - reward(p, p.rejected.ids) for p in pairs[20:]]
    assert logged[-1]["eval_rewards/margins"] == pytest.approx(sum(margins) / len(margins), rel=1e-3, abs=1e-5)
    assert logged[-1]["eval_rewards/accuracies"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    train_entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    wanted = {
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    }
    assert wanted <= set(train_entry)


def test_adapter_when_training_goes_on_from_one_then_it_is_the_reference(
    make_trainer: Make, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    first = make_trainer(objective="dpo", num_train_epochs=1)
    first.train()
    first.save_model(str(tmp_path / "adapter"))
    peft = pytest.importorskip("peft")
    for objective in ("dpo", "tdpo"):
        model = peft.PeftModel.from_pretrained(make_model(), str(tmp_path / "adapter"), is_trainable=True)
        second = make_trainer(model=model, lora=False, objective=objective, max_steps=1, logging_steps=1)
        second.train()
        # Before the first step policy and reference agree, so the margin is zero and the loss log 2.
        assert second.state.log_history[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
        assert abs(second.state.log_history[0]["rewards/margins"]) < 1e-5


def test_trainer_when_settings_cannot_work_then_it_says_what_to_do(
    make_trainer: Make, make_model: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=r"objective: expected one of .*; got 'dpoo'"):
        make_trainer(objective="dpoo")
    with pytest.raises(ConfigError, match=r"(?s)2 problem.*max_length.*truncation"):
        make_trainer(truncation="keep_end", max_length=0)
    with pytest.raises(ConfigError, match="beta"):
        make_trainer(objective="dpo", beta=-1.0)
    trainer = make_trainer(objective="dpo", lora=False, max_steps=1)
    trainer.train()
    late = [{"prompt": "w5 w6", "chosen": "w8 w9", "rejected": "w11"}]
    with pytest.raises(ConfigError, match="reference is the model as it was before training"):
        trainer.evaluate(late)


def test_checkpoint_when_saved_then_it_loads_with_peft_and_carries_tokenizer_and_state(
    make_trainer: Make, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(objective="dpo", max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-2"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "trainer_state.json"} <= {
        file.name for file in folder.iterdir()
    }
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(make_model(), str(folder)).eval()
    row = torch.tensor([[1, 5, 6, 8]])
    torch.testing.assert_close(loaded(input_ids=row).logits, trainer.model.eval()(input_ids=row).logits)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("options", [{}, {"every_n_layers": 2}, {"offload": True}])
def test_gradient_checkpointing_when_on_then_the_trained_weights_are_the_same(
    lora: bool, options: dict[str, object], make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "offload" in options:
        with pytest.raises(ConfigError, match="this training has no GPU"):
            make_trainer(gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
        # Nevertheless moved, from a CPU's memory to the same: into memory that is not pinned, which needs a GPU.
        monkeypatch.setattr(trainer_module, "check_offloading", lambda args: None)
        monkeypatch.setattr(torch.cpu, "is_available", lambda: False)
    moves: list[object] = []

    class Counted(torch.autograd.graph.save_on_cpu):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            moves.append(self)

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Counted, raising=False)
    results = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            objective="repo",
            lora=lora,
            max_steps=2,
            optim="sgd",
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs=options or None,
            learning_rate=0.1,
        )
        trainer.train()
        results.append(torch.cat([weight.flatten() for weight in weights_of(trainer).values()]))
        layers = [layer for layer in trainer.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        flags = [layer.gradient_checkpointing for layer in layers]
        assert flags == [checkpointing, checkpointing and "every_n_layers" not in options]
    assert bool(moves) == ("offload" in options)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", ["dpo", "tdpo"])
def test_ref_model_when_given_then_rewards_are_measured_against_it(
    objective: str, make_trainer: Make, make_model: Callable[..., Any], pairs: list[TokenizedPair]
) -> None:
    other = make_model(seed=1)
    trainer = make_trainer(objective=objective, ref_model=other)
    trainer.prepare_reference()
    loss = trainer.training_step(trainer.model, list(trainer.train_dataset))

    def reference(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            return logits_of(other, prompt, ids)

    wanted = plain_loss(trainer.model, reference, pairs, objective, {}, [])
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert abs(loss.item() - 0.693147) > 0.01
