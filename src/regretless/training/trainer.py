"""`PreferenceTrainer`: transformers' Trainer on preference pairs, every distinct token computed once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput

from regretless.errors import ConfigError, NonFiniteLossError
from regretless.modeling.check import check_grouped
from regretless.modeling.forward import causal_model, grouped, response_scores
from regretless.modeling.layout import token_count
from regretless.modeling.scoring import fill_rows, score_responses
from regretless.objectives import build
from regretless.trained import last_complete_checkpoint
from regretless.training.batch import PairBatch, build_batch
from regretless.training.config import PreferenceConfig
from regretless.training.data import PairDataset, StepLoader, StepSampler, TrainingPair, split_evenly
from regretless.training.live_log import LiveLog
from regretless.training.metrics import RunningMeans, Speed, pair_metrics
from regretless.training.packing import pack_rows
from regretless.training.reading import pair_table
from regretless.training.reference import Item, ReferenceLogps, ReferenceModel

Packing = Callable[[Sequence[Sequence[Item]], int], list[list[int]]]
"""Pairs' items and a budget of tokens to rows of pairs."""


class PreferenceTrainer(Trainer):
    """Train a causal language model on preference pairs; used as TRL's DPOTrainer is.

    model: a model, a peft model, or a name for `from_pretrained`. The reference is, in this order: `ref_model`; the
    model with its adapters off, when `peft_config` adds one here; else the model as it is given, adapter included.
    train_dataset, eval_dataset: a file or hub id, a `datasets.Dataset` or rows with `prompt`, `chosen`, `rejected`
    (strings or messages, the prompt may be implicit), or `regretless.records.Pair` rows with token ids and behaviour
    log-probabilities.

    Raises ConfigError for settings that cannot work, DataError when no row is left, NonFiniteLossError before an
    optimizer step that would follow a loss or gradient that is not finite.
    """

    _tag_names = ("regretless", "preference-optimization")

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        args: PreferenceConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        ref_model: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or PreferenceConfig(output_dir="trainer_output")
        self.objective = build(args.objective, **args.hyperparameters)
        if isinstance(model, str):
            processing_class = processing_class or AutoTokenizer.from_pretrained(model)
            model = AutoModelForCausalLM.from_pretrained(model, **args.model_init_kwargs)
        if processing_class is None:
            raise ConfigError("processing_class: required with a model object; pass its tokenizer")
        if peft_config is not None:
            if isinstance(model, PeftModel):
                raise ConfigError(
                    "peft_config: the model has an adapter already; merge it first, or pass no peft_config"
                )
            model = get_peft_model(model, peft_config)
        self.reference = ReferenceModel(
            model,
            ref_model,
            adapters_off=peft_config is not None,
            needs_distributions="reference_kl" in self.objective.needs,
        )
        self._microbatch_tokens = args.max_tokens_per_microbatch or (16384 if torch.cuda.is_available() else 2048)
        self._reference_logps: ReferenceLogps | None = None
        self._needs_rejected = "rejected" in self.objective.needs
        self._means = {"train": RunningMeans(), "eval": RunningMeans()}
        self._speed, self._live_log = Speed(), LiveLog()
        self._ends_step = cache(lambda token: "\n" in processing_class.decode([token]))

        def dataset(rows: Any, name: str) -> PairDataset | None:
            if rows is None or isinstance(rows, PairDataset):
                return rows
            table = pair_table(rows, processing_class, args, self.objective, name)
            return PairDataset(table, mismatched="z_ref" in self.objective.needs)

        if isinstance(eval_dataset, Mapping):
            evaluation: Any = {name: dataset(rows, name) for name, rows in eval_dataset.items()}
        else:
            evaluation = dataset(eval_dataset, "eval_dataset")
        super().__init__(
            model=model,
            args=args,
            train_dataset=dataset(train_dataset, "train_dataset"),
            eval_dataset=evaluation,
            processing_class=processing_class,
            data_collator=list,
            **kwargs,
        )
        self.add_callback(self._live_log)
        # Losses come out as sums over pairs divided by the step's pairs: the Trainer must not divide them again.
        self.model_accepts_loss_kwargs = True
        causal_model(self.model).add_model_tags(list(self._tag_names))
        if self.reference.frozen is not None:
            self.reference.frozen.to(self.args.device)

    # --- reference ---------------------------------------------------------------------------------------------------

    def prepare_reference(self, *datasets: PairDataset) -> None:
        """Compute the reference log-probabilities that the data sets (none given: all the trainer has) still lack.

        Raises ConfigError when the reference is the start of training and training has begun.
        """
        if "reference" not in self.objective.needs:
            return
        datasets = datasets or self._datasets()
        if self._reference_logps is None:
            key = self.reference.key(self.model, str(self.accelerator.mixed_precision))
            root = Path(self.args.reference_cache_dir or Path(self.args.output_dir) / "reference")
            self._reference_logps = ReferenceLogps(root / key)
        for data in datasets:
            self._prepare_reference(self._reference_logps, data)

    def _datasets(self) -> tuple[PairDataset, ...]:
        evaluation = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        return tuple(data for data in (self.train_dataset, *evaluation) if data is not None)

    def _check_model(self, *datasets: PairDataset) -> None:
        """Check the model where it computes by now (device, precision, sharding), unless it has passed there before."""
        with self.accelerator.autocast():
            longest = max((data.longest for data in datasets or self._datasets()), default=None)
            check_grouped(self.accelerator.unwrap_model(self.model), longest)

    def _prepare_reference(self, values: ReferenceLogps, data: PairDataset) -> None:
        # What is complete is not read again: a resumed run starts where it was. All processes look before one writes.
        key = data.key and f"{data.key}{'' if self._needs_rejected else '-chosen'}"
        complete = key is not None and values.covers(key)
        self.accelerator.wait_for_everyone()
        if complete:
            return
        gone = self.state.global_step > 0 and self.reference.is_start_of_training
        if gone and next(values.missing(self._reference_items(data)), None) is not None:
            raise ConfigError(
                "the reference is the model as it was before training, and these data came after it: give them to the "
                "trainer at construction, or pass ref_model"
            )
        writes = self.args.should_save
        values.compute(
            self._reference_items(data), self._score_reference, writes=writes, wait=self.accelerator.wait_for_everyone
        )
        if key is not None and writes:
            values.mark(key)
        self.accelerator.wait_for_everyone()

    def _reference_items(self, data: PairDataset) -> Iterator[Item]:
        for index in data.groups.members.tolist():
            pair = data[index]
            yield from pair.items(rejected=self._needs_rejected)
            if pair.mismatched:
                yield pair.pair.prompt_ids, pair.mismatched

    def _score_reference(self, items: Sequence[Item]) -> list[Any]:
        """Reference log-probabilities of items, shared out among the processes."""
        mine = self._share(len(items))
        policy = self.accelerator.unwrap_model(self.model)
        with self.reference.instead_of(policy) as model, self.accelerator.autocast():
            values = score_responses(
                model, [items[index] for index in mine], max_tokens=self._microbatch_tokens, description="reference"
            )
        return self._of_all(values)

    def _share(self, count: int) -> range:
        """This process's part of `count` things to score; all of them where the model is sharded over processes."""
        # Sharded models need equally many forward passes on every process.
        return split_evenly(count, self._sharers)[self.accelerator.process_index % self._sharers]

    def _of_all(self, values: list[Any]) -> list[Any]:
        """What the processes have each found for their part of something shared out, in order."""
        return values if self._sharers == 1 else list(gather_object(values))

    @property
    def _sharers(self) -> int:
        """Processes that share out what is to be scored."""
        return 1 if self._is_sharded else self.accelerator.num_processes

    @property
    def _is_sharded(self) -> bool:
        """Whether the weights lie spread over the processes by now; FSDP2 changes the model itself, FSDP1 wraps it."""
        return self.is_fsdp_enabled and (self.model_wrapped is not self.model or isinstance(self.model, FSDPModule))

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; `resume_from_checkpoint=True` goes on from the last complete checkpoint in output_dir."""
        self._check_model()
        self.prepare_reference()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(Path(self.args.output_dir))
            if resume_from_checkpoint is None:
                raise ConfigError(f"{self.args.output_dir}: no complete checkpoint to resume from")
        with self._live_log.until_the_end():
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def get_train_dataloader(self) -> DataLoader[TrainingPair]:
        """Loader of whole optimizer steps (this process's share); order by `data_seed`, `seed` and epoch alone."""
        if self.train_dataset is None:
            raise ConfigError("train_dataset: required to train")
        return StepLoader(self._sampler(self.train_dataset, self.args.per_device_train_batch_size))

    def _sampler(self, data: PairDataset, pairs_per_step: int) -> StepSampler:
        return StepSampler(
            data,
            pairs_per_step,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            grouped=self.args.group_pairs,
            rank=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
        )

    def training_step(self, model: nn.Module, inputs: list[TrainingPair], num_items_in_batch: Any = None) -> Tensor:
        """Gradients of one optimizer step; returns the mean loss over the step's pairs."""
        self._check_model()
        model.train()
        self._speed.start()
        z_ref = self._zero_point(inputs or [self.train_dataset[0]], counts=bool(inputs))
        work = self._weighted_microbatches(inputs)
        self._speed.add(sum(batch.layout.tokens for batch, weight in work if weight))
        loss_sum = torch.zeros((), device=self.args.device)
        with grouped(model), self.reference.grouped():
            for index, (batch, weight) in enumerate(work):
                last = index == len(work) - 1
                with nullcontext() if last else self.accelerator.no_sync(model):
                    loss = self.compute_loss(model, batch, z_ref=z_ref, counts=weight > 0)
                    if not torch.isfinite(loss):
                        raise NonFiniteLossError(self._non_finite(f"loss is {float(loss.detach())}", batch.sources))
                    self.accelerator.backward(loss * weight)
                    loss_sum += loss.detach() * weight
        return loss_sum

    def _weighted_microbatches(self, pairs: Sequence[TrainingPair]) -> list[tuple[PairBatch, float]]:
        """Micro-batches, and the weight of each one's mean loss.

        Gradients are averaged over processes: the weights make that average the mean over all the step's pairs. What
        processes do together has to match, so one without pairs (an epoch's last step), and under sharding one with
        fewer micro-batches than another, computes something again with weight 0.
        """
        processes = self.accelerator.num_processes
        batches = self._microbatches(pairs or [self.train_dataset[0]], pack_rows)
        total, most = len(pairs), len(batches)
        if processes > 1:
            counts = torch.tensor([[total, most]], device=self.args.device)
            everyone = self.accelerator.gather(counts)
            total, most = int(everyone[:, 0].sum()), int(everyone[:, 1].max())
        work = [(batch, len(batch.pairs) * processes / total if pairs else 0.0) for batch in batches]
        return work + [(batches[-1], 0.0)] * (most - len(work) if self.is_fsdp_enabled else 0)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: PairBatch,
        return_outputs: bool = False,
        z_ref: Tensor | None = None,
        counts: bool = True,
        **_: Any,
    ) -> Any:
        """Mean loss over a micro-batch's pairs; its metrics are logged if it `counts`."""
        with self.accelerator.autocast():
            reference = None
            if "reference_kl" in self.objective.needs:
                reference = self.reference.distribution(self.accelerator.unwrap_model(model), inputs.layout)
            scores = response_scores(model, inputs.layout, reference)
        logps = inputs.logps(scores)
        output = self.objective(logps, inputs.pairs, z_ref=z_ref)
        if counts:
            metrics = pair_metrics(logps, inputs.pairs, output, with_rejected=self._needs_rejected)
            self._means["train" if model.training else "eval"].add(metrics)
        return (output.loss, output) if return_outputs else output.loss

    def _microbatches(self, pairs: Sequence[TrainingPair], pack: Packing = fill_rows) -> list[PairBatch]:
        rows = pack([pair.items(rejected=self._needs_rejected) for pair in pairs], self._microbatch_tokens)
        lookup = None if self._reference_logps is None else self._reference_logps.__getitem__
        return [
            build_batch(
                [pairs[index] for index in row], self.objective.needs, reference=lookup, ends_step=self._ends_step
            ).to(self.args.device)
            for row in rows
        ]

    def _zero_point(self, pairs: Sequence[TrainingPair], *, counts: bool) -> Tensor | None:
        """KTO's z, without gradient: mean log-ratio (nats, at least 0) over all of the step's pairs, on all processes.

        Of mismatched prompts and responses, or of the pairs' own; None for a method without a reference point. What a
        process without pairs gives does not count.
        """
        point = getattr(self.objective, "reference_point", None)
        if point is None:
            return None
        assert self._reference_logps is not None
        if point == "mismatched":
            items = [(pair.pair.prompt_ids, pair.mismatched) for pair in pairs if pair.mismatched]
        else:
            items = [item for pair in pairs for item in pair.items(rejected=self._needs_rejected)]
        # Sharded models need equally many forward passes on every process: one.
        budget = sys.maxsize if self.is_fsdp_enabled else self._microbatch_tokens
        with self.accelerator.autocast():
            policy = score_responses(self.accelerator.unwrap_model(self.model), items, max_tokens=budget)
        ratios = [float((mine - self._reference_logps[item]).sum()) for mine, item in zip(policy, items, strict=True)]
        sums = torch.tensor([sum(ratios), len(ratios)] if counts else [0.0, 0.0], device=self.args.device)
        total, count = self.accelerator.reduce(sums, reduction="sum")
        return (total / count).clamp(min=0)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
            raise NonFiniteLossError(self._non_finite(f"gradient norm is {float(norm)}", ()))
        return norm

    def _non_finite(self, what: str, sources: Sequence[str]) -> str:
        rows = f" for one of {len(sources)} pairs: {', '.join(dict.fromkeys(sources))}" if sources else ""
        return (
            f"step {self.state.global_step + 1}: {what}{rows}; stopped before the optimizer step. "
            "Check these rows' log-probabilities, or lower learning_rate"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model or adapter for `from_pretrained`, and the tokenizer; every process has to call it.

        Checkpoints of sharded models stay sharded where the configuration says so; what a user saves is whole.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        kind = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(kind)

    # --- evaluation and logging --------------------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[TrainingPair]:
        """Loader of evaluation pairs in order, this process's share."""
        data = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset or self.eval_dataset
        if data is None:
            raise ConfigError("eval_dataset: required to evaluate")
        if not isinstance(data, PairDataset):
            table = pair_table(data, self.processing_class, self.args, self.objective, "eval_dataset")
            data = PairDataset(table, mismatched="z_ref" in self.objective.needs)
        mine = self._share(len(data))
        size = self.args.per_device_eval_batch_size
        # As many batches on every process, the last ones empty: what processes do together has to match.
        most = math.ceil(math.ceil(len(data) / self._sharers) / size)
        batches = [list(mine[number * size : (number + 1) * size]) for number in range(most)]
        return DataLoader(data, batch_sampler=batches, collate_fn=list)

    def evaluation_loop(
        self,
        dataloader: DataLoader[TrainingPair],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Mean loss and metrics over the pairs of all processes.

        `predictions`, in order, are each pair's (chosen, rejected) rewards: those of all processes on every one.
        """
        data = dataloader.dataset
        assert isinstance(data, PairDataset)
        self._check_model(data)
        self.prepare_reference(data)
        model = self.accelerator.unwrap_model(self.model).eval()
        loss_means, rewards = RunningMeans(), []
        with torch.no_grad(), grouped(model), self.reference.grouped():
            for pairs in dataloader:
                z_ref = self._zero_point(pairs or [data[0]], counts=bool(pairs))
                for batch in self._microbatches(pairs) if pairs else []:
                    loss, output = self.compute_loss(model, batch, return_outputs=True, z_ref=z_ref)
                    loss_means.add({"loss": loss.repeat(len(batch.pairs))})
                    if output.rewards is not None:
                        rewards.append(output.rewards[batch.pairs].float().cpu())
        metrics = loss_means.take(self.accelerator) | self._means["eval"].take(self.accelerator)
        rewards = self._of_all(rewards)
        predictions = torch.cat(rewards).numpy() if rewards else None
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions, None, named, len(data))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the means of the training metrics since the last training log line."""
        if "loss" in logs:
            logs |= self._means["train"].take(self.accelerator)
            logs["tokens_per_second"] = self._speed.take(self.accelerator)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Multiply-adds of a training step, 6 per parameter and distinct token."""
        items = [item for pair in inputs for item in pair.items(rejected=self._needs_rejected)]
        return 6 * token_count(items) * causal_model(self.model).num_parameters(exclude_embeddings=True)
