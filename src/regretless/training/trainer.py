"""`PreferenceTrainer`: transformers' Trainer on preference pairs, every distinct token computed once."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from accelerate.utils import gather_object
from numpy.typing import NDArray
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints

from regretless.core.errors import ConfigError, NonFiniteLossError, reject
from regretless.core.files import read_json
from regretless.core.settings import check_name
from regretless.data.codec import codec_of
from regretless.modeling.forward import causal_model, in_rows, response_scores
from regretless.modeling.layout import Item, Layout, token_count
from regretless.modeling.row_choice import choose_rows, note_plain_rows
from regretless.modeling.rows import RowKind, row_length, sequences
from regretless.modeling.scoring import score_responses
from regretless.modeling.token_logps import TokenScores
from regretless.modeling.training_folder import STATE, complete_checkpoints, last_complete_checkpoint
from regretless.objectives import build
from regretless.training.arguments import PreferenceConfig
from regretless.training.batch import PairBatch, build_batch
from regretless.training.completions import CompletionTables
from regretless.training.constructor import (
    check_arguments,
    check_kinds,
    check_optimizer,
    check_quantized,
    load_by_name,
    policy_of,
    taken,
    tokenizer_for,
    turn_off_dropout,
    use_one_gpu,
)
from regretless.training.data import PairDataset, StepLoader, StepSampler, TrainingPair, split_evenly
from regretless.training.log_callback import LiveLog
from regretless.training.log_state import LogState
from regretless.training.metrics import (
    RunningMeans,
    Speed,
    TokenCount,
    add_step_tokens,
    add_token_metrics,
    pair_metrics,
)
from regretless.training.packing import pack_rows
from regretless.training.pair_reading import pair_table
from regretless.training.passes import Idle, Passes, joined
from regretless.training.precision import fit_trained_weights, match_reference
from regretless.training.publish import PublishingTrainer
from regretless.training.reference import ReferenceLogps, ReferenceModel


def _sort_sets(configs: Iterable[PeftConfig]) -> None:
    """Sort settings that peft stores as sets, so that equal runs write equal files."""
    for config in configs:
        for name, value in vars(config).items():
            if isinstance(value, set):
                setattr(config, name, sorted(value))


class PreferenceTrainer(PublishingTrainer):
    """Train a causal language model on preference pairs; used like TRL's DPOTrainer, with its order of arguments.

    model: a model, a peft model, or a name for `from_pretrained`. The reference is, in this order: `ref_model`, a model
    or a name; the model with its adapters off, when `peft_config` adds one here; else the model as it is given, adapter
    included. Without `peft_config` or an adapter, all weights are trained.
    quantization_config: for a model by name, which is then trained through `peft_config`.
    processing_class: the model's tokenizer; by default that of the model's name.
    train_dataset, eval_dataset: a file or hub id, a `datasets.Dataset`, a table of pandas or Arrow, or rows with
    `prompt`, `chosen`, `rejected` (strings or messages, the prompt may be implicit), or rows of
    `regretless.data.records.Pair` with token ids and behavior log-probabilities. Of a `DatasetDict`, `train` is
    trained on and all are evaluated on.
    callbacks, optimizers, and in kwargs optimizer_cls_and_kwargs: as transformers' Trainer takes them.
    data_collator, compute_metrics, and other arguments of the Trainer that would do nothing: refused unless None.

    Raises ConfigError for settings that cannot work, DataError if no row is left, NonFiniteLossError before an
    optimizer step that would follow a loss or gradient that is not finite.
    """

    _tag_names = ("regretless", "preference-optimization")

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        ref_model: str | PreTrainedModel | None = None,
        args: PreferenceConfig | None = None,
        data_collator: None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ) -> None:
        check_kinds(model, ref_model, args)
        check_arguments(kwargs | {"data_collator": data_collator, "compute_metrics": compute_metrics})
        args = args or PreferenceConfig(output_dir="trainer_output")
        use_one_gpu(args)
        self.objective = build(args.objective, **args.hyperparameters)
        # For a model by name and without an adapter, a dtype applies to the trained weights.
        chosen = args.loading().get("dtype", args.loading().get("torch_dtype", "auto"))
        as_loaded = isinstance(model, str) and peft_config is None and chosen != "auto"
        processing_class = tokenizer_for(model, processing_class, args)
        model = policy_of(model, args, processing_class, quantization_config)
        check_quantized(model, adapter=peft_config is not None)
        if peft_config is not None:
            if isinstance(model, PeftModel):
                raise ConfigError("peft_config: the model has an adapter already; merge it first, or omit peft_config")
            set_seed(args.seed)  # the adapter's first weights are random
            model = get_peft_model(model, peft_config)
            _sort_sets(model.peft_config.values())
        fit_trained_weights(model, args, as_loaded=as_loaded)
        reference = load_by_name(ref_model, args, reference=True) if isinstance(ref_model, str) else ref_model
        if reference is not None:
            match_reference(reference, model)
        if args.disable_dropout:
            turn_off_dropout(model, reference)
        self._needs_distributions = "reference_kl" in self.objective.required
        self.reference = ReferenceModel(
            model,
            reference,
            adapters_off=peft_config is not None,
            needs_distributions=self._needs_distributions,
        )
        self._rows: RowKind = "grouped"
        self._microbatch_tokens = args.max_tokens_per_microbatch or (16384 if torch.cuda.is_available() else 2048)
        self._reference_logps: ReferenceLogps | None = None
        self._needs_rejected = "rejected" in self.objective.required
        self._means = {"train": RunningMeans(), "eval": RunningMeans()}
        self._speed, self._token_count, self._live_log = Speed(), TokenCount(), LiveLog()
        self._ends_step = codec_of(processing_class).ends_step

        def dataset(rows: Any, name: str) -> PairDataset | None:
            if rows is None or isinstance(rows, PairDataset):
                return rows
            table = pair_table(rows, processing_class, args, self.objective, name)
            return PairDataset(table, mismatched=self.objective.zero_point == "mismatched")

        if isinstance(eval_dataset, Mapping):
            reject("eval_dataset", _unusable_names(eval_dataset))
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
            callbacks=callbacks,
            optimizers=optimizers,
            **taken(kwargs),
        )
        check_optimizer(self.optimizer, self.model)
        self._log_state = LogState(self, self._means["train"], self._token_count)
        for callback in (self._live_log, self._log_state, CompletionTables(self)):
            self.add_callback(callback)
        # Losses are sums over pairs divided by the step's number of pairs: the Trainer must not divide them again.
        self.model_accepts_loss_kwargs = True
        causal_model(self.model).add_model_tags(list(self._tag_names))
        if self.reference.frozen is not None:
            self.reference.frozen.to(self.args.device)
        self.begin_cards(train_dataset)

    # --- reference ---------------------------------------------------------------------------------------------------

    def prepare_reference(self, *datasets: PairDataset) -> None:
        """Compute the reference log-probabilities that the data sets (default: all of the trainer's) still lack.

        `train` computes those that its steps and evaluations will read.
        Raises ConfigError if the reference is the start of training and training has begun.
        """
        for data in datasets or self._datasets():
            self._prepare_reference(data)

    def _datasets(self) -> tuple[PairDataset, ...]:
        return tuple(data for data in (self.train_dataset, *self._evaluation_data()) if data is not None)

    def _check_model(self, *datasets: PairDataset) -> None:
        """Check the model on its current device, precision and sharding, unless it has passed there before."""
        with self.accelerator.autocast():
            longest = max((data.longest for data in datasets or self._datasets()), default=None)
            models = [self.accelerator.unwrap_model(self.model)]
            # A reference that is asked for distributions at every step reads the policy's rows.
            models += [self.reference.frozen] if self.reference.frozen and self._needs_distributions else []
            kinds = {choose_rows(model, longest, self.args.rows) for model in models}
            if len(kinds) > 1:
                kinds = {choose_rows(model, longest, "plain") for model in models}
            (self._rows,) = kinds

    def _prepare_reference_of_steps(self, checkpoint: Path | None) -> None:
        """Reference log-probabilities for the remaining steps, and for the evaluation data if they may be read.

        A reference that is the start of training is lost afterwards: then evaluation data are always included.
        """
        if self.train_dataset is not None:
            state = None if checkpoint is None else checkpoint / STATE
            done = int(read_json(state)["global_step"]) if state is not None and state.is_file() else 0
            steps = self._sampler(self.train_dataset, self.args.per_device_train_batch_size).of_one_process()
            epochs = self.args.num_train_epochs
            last = self.args.max_steps if self.args.max_steps > 0 else math.ceil(epochs * len(steps))
            # Without skipping, a resumed run starts with the first step of its epoch.
            first = done - done % len(steps) if self.args.ignore_data_skip else done
            numbers = [steps.read_by(0, last), steps.read_by(first, first + last - done)]
            if self.accelerator.num_processes > 1:
                # What a process without pairs computes in an epoch's last step.
                numbers = [np.union1d(each, [0]) for each in numbers]
            self._prepare_reference(self.train_dataset, numbers[1], known=numbers[0])
        if self.reference.is_start_of_training or self.args.eval_strategy != "no" or self.args.eval_on_start:
            for data in self._evaluation_data():
                self._prepare_reference(data)

    def _evaluation_data(self) -> list[PairDataset]:
        data = list(self.eval_dataset.values()) if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        return [each for each in data if each is not None]

    def _prepare_reference(
        self, data: PairDataset, numbers: NDArray[np.int64] | None = None, known: NDArray[np.int64] | None = None
    ) -> None:
        """Compute what is missing for the pairs with these indices (default: all); `known`: for more than them."""
        if "reference" not in self.objective.required:
            return
        if self._reference_logps is None:
            key = self.reference.key(self.model, str(self.accelerator.mixed_precision))
            root = Path(self.args.reference_cache_dir or self.args.cache_dir / "reference")
            self._reference_logps = ReferenceLogps(root / key)
        values = self._reference_logps
        # Complete data are not read again: a resumed run starts where it was. All processes check before one writes.
        marks = [self._mark(data, each) for each in (numbers, known, None)]
        complete = any(mark is not None and values.covers(mark) for mark in marks)
        self.accelerator.wait_for_everyone()
        if complete:
            return
        gone = self.state.global_step > 0 and self.reference.is_start_of_training
        if gone and next(values.missing(self._reference_items(data, numbers)), None) is not None:
            raise ConfigError(
                "the reference is the model as it was before training, and these data came after it: pass them to the "
                "trainer at construction, and call prepare_reference() before training if it reads more of them later; "
                "or pass ref_model"
            )
        writes = self.args.should_save
        values.compute(
            self._reference_items(data, numbers),
            self._score_reference,
            writes=writes,
            wait=self.accelerator.wait_for_everyone,
        )
        if marks[0] is not None and writes:
            values.mark(marks[0])
        self.accelerator.wait_for_everyone()

    def _mark(self, data: PairDataset, numbers: NDArray[np.int64] | None) -> str | None:
        """Identity of these pairs of the data, if their table is cached under one."""
        if data.key is None:
            return None
        part = "" if numbers is None or len(numbers) == len(data) else f"-{xxhash.xxh3_64_hexdigest(numbers.tobytes())}"
        return f"{data.key}{part}{'' if self._needs_rejected else '-chosen'}"

    def _reference_items(self, data: PairDataset, numbers: NDArray[np.int64] | None = None) -> Iterator[Item]:
        # Pairs of a prompt are adjacent, so that they share a computation.
        members = data.groups.members
        for index in (members if numbers is None else members[np.isin(members, numbers)]).tolist():
            pair = data[index]
            yield from pair.items(rejected=self._needs_rejected)
            yield from pair.mismatched_items()

    def _score_reference(self, items: Sequence[Item]) -> list[Any]:
        """Reference log-probabilities of items, divided among the processes."""
        mine = self._share(len(items))
        policy = self.accelerator.unwrap_model(self.model)
        with self.reference.instead_of(policy) as model, self.accelerator.autocast():
            values = score_responses(
                model,
                [items[index] for index in mine],
                max_tokens=self._microbatch_tokens,
                description="reference",
                rows=self.args.rows,
            )
        return self._of_all(values)

    def _share(self, count: int) -> range:
        """This process's part of `count` items to score; all of them if the model is sharded over processes."""
        # Sharded models need equally many forward passes on every process.
        return split_evenly(count, self._sharers)[self.accelerator.process_index % self._sharers]

    def _of_all(self, values: list[Any]) -> list[Any]:
        """The results of all processes for their parts, in order."""
        return values if self._sharers == 1 else list(gather_object(values))

    @property
    def _sharers(self) -> int:
        """Processes that divide the scoring among them."""
        return 1 if self._is_sharded else self.accelerator.num_processes

    @property
    def _is_sharded(self) -> bool:
        """True if the weights are sharded over the processes by now; FSDP2 changes the model itself, FSDP1 wraps it."""
        return self.is_fsdp_enabled and (self.model_wrapped is not self.model or isinstance(self.model, FSDPModule))

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; `resume_from_checkpoint=True` resumes from the last complete checkpoint in output_dir."""
        last = last_complete_checkpoint(Path(self.args.output_dir)) if resume_from_checkpoint else None
        self._check_model()
        if resume_from_checkpoint is True:
            if last is None:
                raise ConfigError(f"{self.args.output_dir}: no complete checkpoint to resume from")
            resume_from_checkpoint = last
        if last is not None and Path(str(resume_from_checkpoint)) == Path(last):
            self._clear_checkpoints(Path(last))
        self._log_state.checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self._prepare_reference_of_steps(self._log_state.checkpoint)
        with self._live_log.until_the_end():
            output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        self.write_cards_in_saved_adapters()
        return output._replace(training_loss=output.metrics["train_loss"])

    def _clear_checkpoints(self, last: Path) -> None:
        """Delete remains of interrupted checkpoints: half-written ones, and old ones whose deletion was interrupted.

        The Trainer deletes by a folder's modification time, and an interrupted deletion has made that of an
        old checkpoint later than that of newer ones: it would be kept in their place.
        """
        if self.args.should_save:
            complete = complete_checkpoints(last.parent).values()
            for path in last.parent.glob("checkpoint-*"):
                if path.name.removeprefix("checkpoint-").isdigit() and path not in complete:
                    shutil.rmtree(path)
            best = read_json(last / STATE).get("best_model_checkpoint")
            rotate_checkpoints(str(last.parent), self.args.save_total_limit, best)
        self.accelerator.wait_for_everyone()

    def _run_epoch(self, **kwargs: Any) -> None:
        """One pass over the data; none if the checkpoint that training resumes from is after its last step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, which is complete when its `trainer_state.json` is: the last file."""
        self._log_state.save(Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        """Evaluate; not again at the start (`eval_on_start`) of a resumed training."""
        if skip_scheduler and self._log_state.checkpoint is not None:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def get_train_dataloader(self) -> DataLoader[TrainingPair]:
        """Loader of whole optimizer steps (this process's share); the order depends on `data_seed`, `seed`, epoch."""
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
        work, idle = self._weighted_microbatches(inputs)
        self._count_tokens(inputs, [batch for batch, weight in work if weight])

        def score(layout: Layout, statistics: bool) -> TokenScores:
            return self._scores(model, layout, statistics=statistics)

        def loss(batch: PairBatch, scores: TokenScores | None, counts: bool) -> Tensor:
            found: Tensor = self.compute_loss(model, batch, z_ref=z_ref, counts=counts, scores=scores)
            if not torch.isfinite(found):
                raise NonFiniteLossError(self._non_finite(f"loss is {float(found.detach())}", batch.sources))
            return found

        with in_rows(model, self._rows), self.reference.in_rows(self._rows):
            return Passes(self.accelerator, model, score, loss).gradients(work, idle)

    def _count_tokens(self, pairs: Sequence[TrainingPair], batches: Sequence[PairBatch]) -> None:
        items = [item for pair in pairs for item in pair.items(rejected=self._needs_rejected)]
        pairwise = sum(len(prompt) + len(response) for prompt, response in items)
        computed = sum(batch.tokens for batch in batches)
        if self._rows == "plain" and items:
            note_plain_rows(self.model, computed, items)
        self._token_count.mine += pairwise
        self._speed.add(computed)
        add_step_tokens(
            self._means["train"],
            pairwise=pairwise,
            computed=computed,
            recomputed=sum(batch.tokens_recomputed for batch in batches),
            first_process=self.accelerator.process_index == 0,
        )

    def _weighted_microbatches(self, pairs: Sequence[TrainingPair]) -> tuple[list[tuple[PairBatch, float]], Idle]:
        """Micro-batches, each with the weight of its mean loss, and passes to make besides them.

        Gradients are averaged over processes: the weights make that average the mean over all the step's pairs.
        Collective operations must match. So a process without pairs (an epoch's last step) computes one with weight 0,
        and under sharding one with fewer passes than another makes as many.
        """
        processes = self.accelerator.num_processes
        used = pairs or [self.train_dataset[0]]
        items = [pair.items(rejected=self._needs_rejected) for pair in used]
        rows = pack_rows(items, self._microbatch_tokens, self._rows)
        batches = [self._batch([used[index] for index in row]) for row in rows]
        total, trained = len(pairs), sum(len(batch.layouts) for batch in batches)
        idle = Idle()
        if processes > 1:
            first = trained - len(batches)
            counts = torch.tensor([[total, first, trained]], device=self.args.device)
            everyone = self.accelerator.gather(counts)
            total = int(everyone[:, 0].sum())
            if self.is_fsdp_enabled:
                most = everyone.max(dim=0).values.tolist()
                idle = Idle(most[1] - first, most[2] - trained)
        return [(batch, len(batch.pairs) * processes / total if pairs else 0.0) for batch in batches], idle

    def _scores(self, model: nn.Module, layout: Layout, *, statistics: bool) -> TokenScores:
        with self.accelerator.autocast():
            reference = None
            if self._needs_distributions:
                reference = self.reference.distribution(self.accelerator.unwrap_model(model), layout)
            return response_scores(model, layout, reference, statistics=statistics)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: PairBatch,
        return_outputs: bool = False,
        z_ref: Tensor | None = None,
        counts: bool = True,
        scores: TokenScores | None = None,
        **_: Any,
    ) -> Any:
        """Mean loss over a micro-batch's pairs; its metrics are logged if it `counts`.

        `scores`: of the tokens of all its rows, if they have been computed, with statistics if it counts.
        """
        if scores is None:
            scores = joined([self._scores(model, layout, statistics=counts) for layout in inputs.layouts])
        logps = inputs.logps(scores, z_ref)
        output = self.objective(logps, inputs.pairs)
        if counts:
            metrics = pair_metrics(logps, inputs.pairs, output, with_rejected=self._needs_rejected)
            means = self._means["train" if model.training else "eval"]
            means.add(metrics)
            assert scores.statistics is not None
            add_token_metrics(
                means,
                scores.statistics[:, inputs.gather],
                inputs.mask,
                inputs.pairs,
                inputs.token_counts,
                sides=2 if self._needs_rejected else 1,
            )
        return (output.loss, output) if return_outputs else output.loss

    def _batch(self, pairs: Sequence[TrainingPair]) -> PairBatch:
        """One micro-batch of all these pairs, in rows of at most as many tokens as may be computed at a time."""
        lookup = None if self._reference_logps is None else self._reference_logps.__getitem__
        batch = build_batch(
            [*pairs],
            self.objective,
            reference=lookup,
            ends_step=self._ends_step,
            kind=self._rows,
            max_tokens=self._microbatch_tokens,
        )
        return batch.to(self.args.device)

    def _zero_point(self, pairs: Sequence[TrainingPair], *, counts: bool) -> Tensor | None:
        """Mean log-ratio (nats, without gradient) over the responses that the objective's `zero_point` selects.

        Over all of the step's pairs on all processes; a process without pairs does not contribute. None for an
        objective without a zero point.
        """
        if self.objective.zero_point is None:
            return None
        assert self._reference_logps is not None
        if self.objective.zero_point == "mismatched":
            items = [item for pair in pairs for item in pair.mismatched_items()]
        else:
            items = [item for pair in pairs for item in pair.items(rejected=self._needs_rejected)]
        # Sharded models need equally many forward passes on every process: one.
        budget = sys.maxsize if self.is_fsdp_enabled else self._microbatch_tokens
        with self.accelerator.autocast():
            model = self.accelerator.unwrap_model(self.model)
            policy = score_responses(model, items, max_tokens=budget, rows=self._rows)
        ratios = [float((mine - self._reference_logps[item]).sum()) for mine, item in zip(policy, items, strict=True)]
        sums = torch.tensor([sum(ratios), len(ratios)] if counts else [0.0, 0.0], device=self.args.device)
        total, count = self.accelerator.reduce(sums, reduction="sum")
        return total / count

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

        Checkpoints of sharded models stay sharded if configured so; the model that a user saves is complete.
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
            data = PairDataset(table, mismatched=self.objective.zero_point == "mismatched")
        mine = self._share(len(data))
        size = self.args.per_device_eval_batch_size
        # Equally many batches on every process, the last ones empty: collective operations must match.
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

        `predictions`, in order, are each pair's (chosen, rejected) rewards, of all processes, on every process.
        """
        data = dataloader.dataset
        assert isinstance(data, PairDataset)
        self._check_model(data)
        self.prepare_reference(data)
        model = self.accelerator.unwrap_model(self.model).eval()
        loss_means, rewards = RunningMeans(), []
        with torch.no_grad(), in_rows(model, self._rows), self.reference.in_rows(self._rows):
            for pairs in dataloader:
                z_ref = self._zero_point(pairs or [data[0]], counts=bool(pairs))
                if not pairs:
                    continue
                batch = self._batch(pairs)
                loss, output = self.compute_loss(model, batch, return_outputs=True, z_ref=z_ref)
                loss_means.add({"loss": loss.repeat(len(batch.pairs))})
                if (found := output.pair_rewards(batch.pairs)) is not None:
                    rewards.append(found.float().cpu())
        metrics = loss_means.take(self.accelerator) | self._means["eval"].take(self.accelerator)
        rewards = self._of_all(rewards)
        predictions = torch.cat(rewards).numpy() if rewards else None
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions, None, named, len(data))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the means of the training metrics since the last training log line.

        The final `train_loss` is the mean of all steps, including those before a checkpoint that training resumed from.
        """
        if "loss" in logs:
            logs |= self._means["train"].take(self.accelerator)
            logs["num_tokens"] = self._token_count.total(self.accelerator)
            logs["tokens_per_second"] = self._speed.take(self.accelerator)
        if "train_loss" in logs:
            logs["train_loss"] = self._log_state.mean_loss()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Multiply-adds of a training step, 6 per parameter and token that is not padding."""
        items = [item for pair in inputs for item in pair.items(rejected=self._needs_rejected)]
        own = sum(map(row_length, set(sequences(items).values())))
        return (
            6
            * (token_count(items) if self._rows == "grouped" else own)
            * causal_model(self.model).num_parameters(exclude_embeddings=True)
        )


def _unusable_names(names: Iterable[Any]) -> list[str]:
    """Problems of the names of data sets, which become part of file names."""
    problems = []
    for name in names:
        try:
            check_name(str(name))
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
    return problems
