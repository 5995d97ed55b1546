"""`PreferenceTrainer`: transformers' Trainer on preference pairs, every distinct token computed once."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from regretless.core.errors import ConfigError, NonFiniteLossError, reject
from regretless.core.files import read_json
from regretless.data.codec import codec_of
from regretless.data.columns import CONTINUATIONS
from regretless.modeling.forward import causal_model, check_ids, in_rows, response_scores
from regretless.modeling.layout import Item, Layout, token_count
from regretless.modeling.quantization import write_quantization
from regretless.modeling.router_loss import DistinctTokens, router_loss
from regretless.modeling.row_choice import choose_rows, note_plain_rows, why_not_grouped
from regretless.modeling.rows import RowKind, row_length, sequences
from regretless.modeling.scoring import score_responses
from regretless.modeling.token_logps import TokenScores
from regretless.modeling.training_folder import (
    STATE,
    checkpoint_problem,
    clear_checkpoints,
    last_complete_checkpoint,
)
from regretless.objectives import Output, build
from regretless.objectives.base import NO_ROW
from regretless.training.argument_checks import check_liger, check_schedule
from regretless.training.arguments import PreferenceConfig
from regretless.training.batch import PairBatch, build_batch
from regretless.training.card_facts import TrainerCard
from regretless.training.completions import CompletionTables
from regretless.training.constructor import (
    check_arguments,
    check_kinds,
    check_offloading,
    check_optimizer,
    check_parallelism,
    check_reference,
    compile_models,
    models_of,
    router_coefficient,
    taken,
    tokenizer_for,
    use_one_gpu,
)
from regretless.training.data import PairDataset, StepLoader, StepSampler, TrainingPair, split_evenly
from regretless.training.log_callback import LiveLog
from regretless.training.log_state import LogState
from regretless.training.metrics import RunningMeans, Speed, TokenCount, add_batch_metrics, add_step_tokens
from regretless.training.model_card import named
from regretless.training.packing import filled_tokens, most_tokens, pack_rows
from regretless.training.pair_reading import evaluation_data, pair_dataset
from regretless.training.passes import DummyPasses, Passes, joined
from regretless.training.reference import ReferenceLogps, ReferenceModel, adapter_settings
from regretless.training.reference_pass import ScoredPairs, fill, pairs_read
from regretless.training.resuming import (
    IN_EFFECT,
    Start,
    given_optimizer,
    note_skipped,
    optimization_of,
)
from regretless.training.same_start import share_weights
from regretless.training.sequence import check_together, sequence_group
from regretless.training.sharding import whole_weights
from regretless.training.step import weighed
from regretless.training.trainer_internals import HookedTrainer, check_internals


class PreferenceTrainer(HookedTrainer):
    """Train a causal language model on preference pairs; used like TRL's DPOTrainer, with its order of arguments.

    model: a model, a peft model, or a name for `from_pretrained`. The reference is, in this order: `ref_model`, a model
    or a name; the model with its adapters off, when `peft_config` adds one here that leaves the model's own weights
    alone (PiSSA and `bias="all"` do not); else the model as training begins, adapter included. Without `peft_config` or
    an adapter, all weights are trained.
    quantization_config: for a model by name, which is then trained through `peft_config`.
    processing_class: the model's tokenizer; by default that of the model's name.
    train_dataset, eval_dataset: a file or hub id, a `datasets.Dataset`, a table of pandas or Arrow, or rows with
    `prompt`, `chosen`, `rejected` (strings or messages, the prompt may be implicit), or rows of
    `regretless.data.columns.Pair` with token ids and behavior log-probabilities. Of a `DatasetDict`, `train` is
    trained on and all are evaluated on.
    callbacks, optimizers, and in kwargs optimizer_cls_and_kwargs: as transformers' Trainer takes them.
    data_collator, compute_metrics, and other arguments of the Trainer that would do nothing: refused unless None.

    Raises ConfigError for settings that cannot work, DataError if no row is left, NonFiniteLossError before an
    optimizer step that would follow a loss, reward or gradient that is not finite.
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
        # Refuse what cannot work before anything is loaded.
        check_internals()
        check_kinds(model, ref_model, args, peft_config, optimizers)
        check_arguments(kwargs | {"data_collator": data_collator, "compute_metrics": compute_metrics})
        args = args or PreferenceConfig(output_dir="trainer_output")
        args.settle()
        check_liger(args)
        if optimizers[0] is None and kwargs.get("optimizer_cls_and_kwargs") is None:
            check_schedule(args)
        use_one_gpu(args)
        check_parallelism(args)
        check_offloading(args)

        # The objective, and what it needs of a step.
        self.objective = build(args.objective, **args.hyperparameters)
        check_reference(ref_model, self.objective)
        self._needs_rejected = "rejected" in self.objective.required
        self._needs_distributions = "reference_kl" in self.objective.required

        # Tokenizer, policy and reference.
        processing_class = tokenizer_for(model, processing_class, args)
        name = model if isinstance(model, str) and peft_config is None else None
        model, frozen, adapters_off = models_of(
            model, ref_model, args, processing_class, quantization_config, peft_config
        )
        self._aux_coefficient = router_coefficient(model, args)
        self.reference = ReferenceModel(
            model, frozen, adapters_off=adapters_off, needs_distributions=self._needs_distributions
        )
        self._reference_logps: ReferenceLogps | None = None
        compile_models(args, model, self.reference.frozen)

        # How rows are computed: their kind (checked when a pass begins), their size, and by which processes.
        self._rows: RowKind = "grouped"
        self._microbatch_tokens = args.max_tokens_per_microbatch or most_tokens(args.device)
        self._filled_tokens = args.max_tokens_per_microbatch or filled_tokens(causal_model(model), args.device)
        self._sequence, self._sequence_is_checked = sequence_group(args, model, self._aux_coefficient), False
        self._ends_step = codec_of(processing_class).ends_step

        # What is measured between two log lines.
        self._means = {"train": RunningMeans(), "eval": RunningMeans()}
        self._speed, self._token_count, self._live_log = Speed(), TokenCount(), LiveLog()
        self._reference_seconds = 0.0

        # transformers' Trainer. It turns `use_cache` off, and saved models would decode slowly; training asks for no
        # cache anyway.
        cache = {name: value for name, value in vars(model.config).items() if name == "use_cache"}
        super().__init__(
            model=model,
            args=args,
            train_dataset=pair_dataset(train_dataset, processing_class, args, self.objective, "train_dataset"),
            eval_dataset=evaluation_data(eval_dataset, processing_class, args, self.objective),
            processing_class=processing_class,
            data_collator=list,
            callbacks=callbacks,
            optimizers=optimizers,
            **taken(kwargs),
        )
        vars(model.config).pop("use_cache", None)
        vars(model.config).update(cache)
        # Losses are sums over pairs divided by the step's number of pairs: the Trainer must not divide them again.
        self.model_accepts_loss_kwargs = True

        # An optimizer that was passed, and sharding, which only the Trainer has read.
        check_optimizer(self.optimizer, self.model)
        self._given_optimizer = given_optimizer(self.optimizer, self.optimizer_cls_and_kwargs)
        self._given_scheduler = None if self.lr_scheduler is None else type(self.lr_scheduler).__name__
        if self.is_fsdp_enabled and getattr(causal_model(model), "is_quantized", False):
            raise ConfigError("model: a quantized base is not sharded (untested); use ddp, one copy for each process")
        if self.is_fsdp_enabled and args.compile_layers:
            raise ConfigError("compile_layers: not together with FSDP, which gathers weights in the layers; remove one")

        # Logs, equal weights on every process, and the model's card.
        self._log_state = LogState(self, self._means["train"], self._token_count)
        for callback in (self._live_log, self._log_state, CompletionTables(self)):
            self.add_callback(callback)
        causal_model(self.model).add_model_tags(list(self._tag_names))
        if self.reference.frozen is not None:
            self.reference.frozen.to(self.args.device)
        share_weights(self.accelerator, self.model, self.reference.frozen)
        self.card = TrainerCard(self, train_dataset, start=name if isinstance(model, PeftModel) else None)
        self.card.attach()

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
            if self._rows == "plain":
                self._refuse_plain_rows(models[0])

    def _refuse_plain_rows(self, model: nn.Module) -> None:
        """Raise ConfigError for settings that need shared rows."""
        why = why_not_grouped(model)
        reason = "needs shared rows, and this model is computed in plain rows" + (f": {why}" if why else "")
        problems = {
            "sequence_parallel_size": f"{reason}; set it to 1" if self._sequence is not None else None,
            "compile_layers": f"{reason}; set it to false" if self.args.compile_layers else None,
        }
        reject("PreferenceConfig", [f"{name}: {problem}" for name, problem in problems.items() if problem])

    def _prepare_reference_of_steps(self, checkpoint: Path | None) -> None:
        """Reference log-probabilities for the remaining steps, and for the evaluation data if they may be read.

        A reference that is the start of training is lost afterwards: then evaluation data are always included.
        """
        if self.train_dataset is not None:
            state = None if checkpoint is None else checkpoint / STATE
            done = int(read_json(state)["global_step"]) if state is not None and state.is_file() else 0
            steps = self._sampler(self.train_dataset, self.args.per_device_train_batch_size).of_one_process()
            superset, numbers = pairs_read(steps, self.args, done, self.accelerator.num_processes)
            self._prepare_reference(self.train_dataset, numbers, superset)
        if self.reference.is_start_of_training or self.args.eval_strategy != "no" or self.args.eval_on_start:
            for data in self._evaluation_data():
                self._prepare_reference(data)

    def _evaluation_data(self) -> list[PairDataset]:
        data = list(self.eval_dataset.values()) if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        return [each for each in data if each is not None]

    def _prepare_reference(
        self, data: PairDataset, numbers: NDArray[np.int64] | None = None, superset: NDArray[np.int64] | None = None
    ) -> None:
        """Compute what is missing for the pairs with these indices (default: all); `superset`: see `ScoredPairs`."""
        if "reference" not in self.objective.required:
            return
        fill(
            self._open_reference(),
            ScoredPairs(data, numbers, superset, with_rejected=self._needs_rejected),
            self._score_reference,
            is_lost=self.state.global_step > 0 and self.reference.is_start_of_training,
            writes=self.args.should_save,
            wait=self.accelerator.wait_for_everyone,
        )

    def _seen_by_all(self, names: list[str]) -> list[str]:
        """Those of the names that all processes have, in order."""
        return sorted(set.intersection(*map(set, gather_object([names]))))

    def _open_reference(self) -> ReferenceLogps:
        """The stored log-probabilities of the reference, as it is when this is called for the first time."""
        if self._reference_logps is None:
            key = self.reference.key(self.model, str(self.accelerator.mixed_precision))
            root = Path(self.args.reference_cache_dir or self.args.cache_dir / "reference")
            self._reference_logps = ReferenceLogps(root / key, self._seen_by_all)
        return self._reference_logps

    @property
    def _prepared_reference(self) -> ReferenceLogps:
        """The reference log-probabilities; raises ConfigError before they are prepared."""
        if self._reference_logps is None:
            raise ConfigError("the reference's log-probabilities are not computed yet: call prepare_reference() first")
        return self._reference_logps

    def _score_reference(self, items: Sequence[Item]) -> list[Any]:
        """Reference log-probabilities of items, divided among the processes."""
        mine = self._share(len(items))
        policy = self.accelerator.unwrap_model(self.model)
        with self.reference.instead_of(policy) as model, self.accelerator.autocast():
            values = score_responses(
                model,
                [items[index] for index in mine],
                max_tokens=self._filled_tokens,
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

    @property
    def _computed(self) -> dict[str, bool]:
        """Which (prompt, response) token pairs a step computes for a pair, for `TrainingPair.items`."""
        return {"rejected": self._needs_rejected, "continued": CONTINUATIONS in self.objective.required}

    # --- training ----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; `resume_from_checkpoint=True` resumes from the last complete checkpoint in output_dir.

        Raises ConfigError for a checkpoint with a file that is missing or damaged, and for one of a training with
        another optimizer, schedule of the learning rate, reference or number of pairs in a step.
        """
        # The checkpoint to resume from.
        last, problems = self.last_complete_checkpoint() if resume_from_checkpoint else (None, [])
        self._check_model()
        if resume_from_checkpoint is True:
            if last is None:
                why = f" ({'; '.join(problems)})" if problems else ""
                raise ConfigError(f"{self.args.output_dir}: no complete checkpoint to resume from{why}")
            resume_from_checkpoint = last
        checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if checkpoint is not None:
            if last is not None and checkpoint == Path(last):
                note_skipped(problems)
                if self.args.should_save:
                    clear_checkpoints(checkpoint, self.args.save_total_limit)
            elif problem := self.of_first_process(checkpoint_problem, checkpoint):
                raise ConfigError(f"resume_from_checkpoint: {checkpoint}: no complete checkpoint is there: {problem}")
            self.accelerator.wait_for_everyone()
        self.resumed_from = checkpoint

        # It must be of this training; what is needed of the reference is computed before the first step.
        self._started = self._start()
        if checkpoint is not None:
            # Some adapters begin with a decomposition of the weights, which another machine rounds in another way.
            decomposed = self.reference.is_start_of_training and isinstance(self.model, PeftModel)
            self._started.check(checkpoint, same_bytes=not decomposed, parts=self._parts)
        try:
            began = time.monotonic()
            self._prepare_reference_of_steps(checkpoint)
            self._reference_seconds = time.monotonic() - began

            # Training itself.
            with self._live_log.until_the_end():
                output = super().train(resume_from_checkpoint=checkpoint and str(checkpoint), **kwargs)
        except torch.OutOfMemoryError as error:
            error.add_note(self._memory_advice())
            raise
        self.card.attach()  # an adapter that is saved by itself has the card of the trained model
        return output._replace(training_loss=output.metrics["train_loss"])

    def _memory_advice(self) -> str:
        """What to set where a step does not fit into the device's memory; the experiment stays the same, but for the
        last two."""
        limit = max(self._microbatch_tokens, self._filled_tokens)
        longest = max((data.longest for data in self._datasets()), default=0)
        advice = [
            "gradient_checkpointing=true",
            f"a max_length below {longest} tokens, those of the longest pair's side",
        ]
        if longest < limit:
            advice.insert(0, f"max_tokens_per_microbatch={max(longest, limit // 2)} (now {limit})")
        if not isinstance(self.model, PeftModel):
            advice.append("an adapter in place of all weights")
        return f"what helps, the first things first: {'; '.join(advice)}"

    def last_complete_checkpoint(self) -> tuple[str | None, list[str]]:
        """The checkpoint in output_dir that `train` can resume from, and why none of the later ones can be used."""
        return self.of_first_process(last_complete_checkpoint, Path(self.args.output_dir))

    def _start(self) -> Start:
        args, data = self.args, self.train_dataset
        steps = self.set_initial_training_values(args, self.get_train_dataloader())[-1]
        return Start(
            reference=self._open_reference().folder.name if "reference" in self.objective.required else None,
            pairs_per_step=self.pairs_per_step,
            optimization=optimization_of(args, steps, self._given_optimizer, self._given_scheduler),
            others={
                "objective": {"name": self.objective.name, **self.objective.model_dump(mode="json")},
                "data": {"hash": data.key, "pairs": len(data)},
                "seed": args.seed,
                "data_seed": args.data_seed,
                "adapter": adapter_settings(self.model),
                "processes": self.accelerator.num_processes,
                **{name: getattr(args, name) for name in IN_EFFECT},
            },
        )

    @property
    def pairs_per_step(self) -> int:
        """Pairs in an optimizer step, those of all processes together."""
        return int(self.args.per_device_train_batch_size) * self._parts

    @property
    def _parts(self) -> int:
        """Parts that a step is divided into; processes that compute each row together have the same one."""
        return int(self.accelerator.num_processes) // self.args.sequence_parallel_size

    def begin_checkpoint(self, folder: Path) -> None:
        self._log_state.save(folder)
        if self.args.should_save:
            self._started.write(folder)

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
            rank=self.accelerator.process_index // self.args.sequence_parallel_size,
            processes=self._parts,
        )

    def training_step(self, model: nn.Module, inputs: list[TrainingPair], num_items_in_batch: Any = None) -> Tensor:
        """Gradients of one optimizer step; returns the mean loss over the step's pairs."""
        # The model as it is in this step, and its start on the clock.
        self._check_model()
        model.train()
        self._speed.start()

        # What all processes have to agree on: the zero point, the weight of each micro-batch, the number of passes.
        z_ref = self._zero_point(inputs or [self.train_dataset[0]], counts=bool(inputs))
        work, dummy = self._weighted_microbatches(inputs)
        self._count_tokens(inputs, [batch for batch, weight in work if weight])

        # The passes: rows to scores, scores to a loss, and the loss's gradient back through the rows.
        def score(layout: Layout, statistics: bool) -> TokenScores:
            return self._scores(model, layout, statistics=statistics)

        def loss(batch: PairBatch, scores: TokenScores | None, counts: bool) -> Tensor:
            result: tuple[Tensor, Output] = self.compute_loss(
                model, batch, return_outputs=True, z_ref=z_ref, counts=counts, scores=scores
            )
            self._check_finite(*result, batch)
            return result[0]

        self._check_sequence(work[0][0].layouts[0])
        with in_rows(model, self._rows, self._sequence), self.reference.in_rows(self._rows):
            return Passes(self.accelerator, model, score, loss).gradients(work, dummy)

    def _check_sequence(self, layout: Layout) -> None:
        """Before the first step, check a row that several processes compute together."""
        if self._sequence is not None and not self._sequence_is_checked:
            check_together(self.accelerator.unwrap_model(self.model), layout, self._sequence, self.accelerator)
            self._sequence_is_checked = True

    def _count_tokens(self, pairs: Sequence[TrainingPair], batches: Sequence[PairBatch]) -> None:
        items = [item for pair in pairs for item in pair.items(**self._computed)]
        computed = sum(batch.tokens for batch in batches)
        if self._rows == "plain" and items:
            note_plain_rows(self.model, computed, items)
        if self._sequence is not None and self._sequence.rank > 0:
            items, computed, batches = [], 0, []  # the first process of a group counts for all of them
        pairwise = sum(len(prompt) + len(response) for prompt, response in items)
        self._token_count.mine += pairwise
        self._speed.add(computed)
        add_step_tokens(
            self._means["train"],
            pairwise=pairwise,
            computed=computed,
            recomputed=sum(batch.tokens_recomputed for batch in batches),
            first_process=self.accelerator.process_index == 0,
        )

    def _weighted_microbatches(
        self, pairs: Sequence[TrainingPair]
    ) -> tuple[list[tuple[PairBatch, float]], DummyPasses]:
        """Micro-batches, each with the weight of its mean loss, and passes to make besides them (`step.weighed`)."""
        used = pairs or [self.train_dataset[0]]
        items = [pair.items(**self._computed) for pair in used]
        distinct = DistinctTokens()
        batches = [
            self._batch([used[index] for index in row], distinct)
            for row in pack_rows(items, self._microbatch_tokens, self._rows, self._filled_tokens)
        ]
        return weighed(batches, len(pairs), self.accelerator, sharded=self.is_fsdp_enabled)

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
        """Mean loss over a micro-batch's pairs, with the load-balancing loss; its metrics are logged if it `counts`.

        `scores`: of the tokens of all its rows, if they have been computed, with statistics if it counts.
        """
        if scores is None:
            scores = joined([self._scores(model, layout, statistics=counts) for layout in inputs.layouts])
        logps = inputs.logps(scores, z_ref)
        output = self.objective(logps, inputs.pairs, inputs.preferences)
        loss = output.loss
        aux_loss = None
        if scores.routers is not None and inputs.counted_tokens:
            aux_loss = router_loss(scores.routers, inputs.counted_tokens)
            loss = loss + self._aux_coefficient * inputs.aux_weight * aux_loss
        if counts:
            means = self._means["train" if model.training else "eval"]
            add_batch_metrics(means, inputs, logps, scores, output, aux_loss, with_rejected=self._needs_rejected)
        return (loss, output) if return_outputs else loss

    def _batch(self, pairs: Sequence[TrainingPair], distinct: DistinctTokens | None = None) -> PairBatch:
        """One micro-batch of all these pairs, in rows of at most as many tokens as may be computed at a time.

        `distinct`: the tokens of the step's micro-batches before it.
        """
        lookup = self._prepared_reference.__getitem__ if "reference" in self.objective.required else None
        batch = build_batch(
            [*pairs],
            self.objective,
            reference=lookup,
            ends_step=self._ends_step,
            kind=self._rows,
            max_tokens=self._microbatch_tokens,
            distinct=(distinct or DistinctTokens()) if self._aux_coefficient else None,
        )
        for layout in batch.layouts:
            check_ids(self.model, layout)
        return batch.to(self.args.device)

    def _zero_point(self, pairs: Sequence[TrainingPair], *, counts: bool) -> Tensor | None:
        """Mean log-ratio (nats, without gradient) over the responses that the objective's `zero_point` selects.

        Over all of the step's pairs on all processes; a process without pairs does not contribute. None for an
        objective without a zero point.
        """
        if self.objective.zero_point is None:
            return None
        reference = self._prepared_reference
        if self.objective.zero_point == "mismatched":
            items = [item for pair in pairs for item in pair.mismatched_items()]
        else:
            items = [item for pair in pairs for item in pair.items(rejected=self._needs_rejected)]
        # Sharded models need equally many forward passes on every process: one.
        budget = sys.maxsize if self.is_fsdp_enabled else self._filled_tokens
        with self.accelerator.autocast():
            model = self.accelerator.unwrap_model(self.model)
            policy = score_responses(model, items, max_tokens=budget, rows=self._rows)
        ratios = [float((mine - reference[item]).sum()) for mine, item in zip(policy, items, strict=True)]
        sums = torch.tensor([sum(ratios), len(ratios)] if counts else [0.0, 0.0], device=self.args.device)
        total, count = self.accelerator.reduce(sums, reduction="sum")
        return total / count

    def check_grad_norm(self, norm: Any) -> None:
        if not torch.isfinite(torch.as_tensor(norm)):
            raise NonFiniteLossError(self._non_finite(f"gradient norm is {float(norm)}", ()))

    def _check_finite(self, loss: Tensor, output: Output, batch: PairBatch) -> None:
        """Raise NonFiniteLossError for a loss, score or reward that is not finite; metrics and checkpoints need all."""
        rows = output.rows
        if rows is None:
            rows = torch.where(batch.pairs == NO_ROW, batch.pairs[:, :1], batch.pairs)
        by_row = {"scores": output.scores, "rewards": output.rewards}
        shown = {name: values.detach()[rows] for name, values in by_row.items() if values is not None}
        # Together: each question to the device waits for it.
        if torch.stack([torch.isfinite(values).all() for values in (loss, *shown.values())]).all():
            return
        if not torch.isfinite(loss):
            raise NonFiniteLossError(self._non_finite(f"loss is {float(loss.detach())}", batch.sources))
        for name, values in shown.items():
            if bad := (~torch.isfinite(values)).any(dim=1).nonzero().flatten().tolist():
                places = ", ".join(dict.fromkeys(batch.sources[number] for number in bad))
                what = f"{name} of {self.objective.name} are not finite for {places}"
                raise NonFiniteLossError(self._non_finite(what, ()))

    def _non_finite(self, what: str, sources: Sequence[str]) -> str:
        rows = f" for one of {len(sources)} pairs: {', '.join(dict.fromkeys(sources))}" if sources else ""
        return (
            f"step {self.state.global_step + 1}: {what}{rows}; stopped before the optimizer step. "
            "Check these rows' log-probabilities, and `compute` of an objective of your own, or lower learning_rate"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model or adapter for `from_pretrained`, and the tokenizer; every process has to call it.

        Checkpoints of sharded models stay sharded if configured so; the model that a user saves is complete.
        """
        with contextlib.nullcontext() if _internal_call else whole_weights(self.accelerator):
            super().save_model(output_dir, _internal_call)

    @contextlib.contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        write_card = self.card.attach()
        yield
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model)
            if isinstance(model, PeftModel):
                write_quantization(causal_model(model), folder)
            write_card(folder)

    def create_model_card(
        self,
        language: str | Sequence[str] | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: Any = None,
        dataset_tags: Any = None,
        dataset: str | Sequence[str] | None = None,
        dataset_args: Any = None,
        dataset_name: str | Sequence[str] | None = None,
    ) -> None:
        """Write the card into output_dir; the arguments are those of transformers' Trainer, and change its metadata.

        dataset_name: TRL's name of `dataset`. tasks, dataset_tags, dataset_args: not used, because the card's metadata
        has no such fields.
        """
        base = {} if finetuned_from is None else dict(zip(("base", "base_on_hub"), named(finetuned_from), strict=True))
        datasets = _texts(dataset_name if dataset is None else dataset)
        self.card.change(
            languages=_texts(language), license=license, tags=_texts(tags), name=model_name, datasets=datasets, **base
        )
        if self.is_world_process_zero():
            self.card.attach()(str(self.args.output_dir))

    # --- evaluation and logging --------------------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[TrainingPair]:
        """Loader of evaluation pairs in order, this process's share."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(self.eval_dataset, dict) and isinstance(eval_dataset, str) and eval_dataset in self.eval_dataset:
            data = self.eval_dataset[eval_dataset]
        if data is None:
            raise ConfigError("eval_dataset: required to evaluate")
        data = pair_dataset(data, self.processing_class, self.args, self.objective, "eval_dataset", held_out=True)
        assert data is not None
        mine = self._share(len(data))
        size = self.args.per_device_eval_batch_size
        # Equally many batches on every process, the last ones empty: collective operations must match.
        most = math.ceil(math.ceil(len(data) / self._sharers) / size)
        batches = [list(mine[number * size : (number + 1) * size]) for number in range(most)]
        return DataLoader(data, batch_sampler=batches, collate_fn=list)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[TrainingPair]:
        """Loader of the pairs that `predict` is given, like that of evaluation."""
        return self.get_eval_dataloader(test_dataset)

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
        # The model as it is now, and the reference's log-probabilities of these pairs.
        data = dataloader.dataset
        assert isinstance(data, PairDataset)
        self._check_model(data)
        self.prepare_reference(data)

        # Loss, metrics and rewards of this process's pairs.
        model = self.accelerator.unwrap_model(self.model).eval()
        loss_means, rewards = RunningMeans(), []
        with torch.no_grad(), in_rows(model, self._rows), self.reference.in_rows(self._rows):
            for pairs in dataloader:
                z_ref = self._zero_point(pairs or [data[0]], counts=bool(pairs))
                if not pairs:
                    continue
                # The load-balancing loss is a mean over tokens, not over pairs: it is added at the end.
                batch = replace(self._batch(pairs), aux_weight=0.0)
                loss, output = self.compute_loss(model, batch, return_outputs=True, z_ref=z_ref)
                loss_means.add({"loss": loss.repeat(len(batch.pairs))})
                if (of_pairs := output.pair_rewards(batch.compared)) is not None:
                    rewards.append(of_pairs.float().cpu())

        # Those of all processes.
        metrics = loss_means.take(self.accelerator) | self._means["eval"].take(self.accelerator)
        if "aux_loss" in metrics:
            metrics["loss"] += self._aux_coefficient * metrics["aux_loss"]
        rewards = self._of_all(rewards)
        predictions = torch.cat(rewards).numpy() if rewards else None
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions, None, named, len(data))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the means of the training metrics since the last training log line.

        The final `train_loss` is the mean of all steps, including those before a checkpoint that training resumed from.
        `train_runtime` and the speeds computed from it include the seconds in which the reference was computed before
        the first step, `reference_runtime`: other trainers compute it in the steps.
        """
        if "loss" in logs:
            logs |= self._means["train"].take(self.accelerator)
            logs["tokens_per_second"] = self._speed.take(self.accelerator)
        if logs.keys() & {"loss", "train_loss"}:
            logs["num_tokens"] = self._token_count.total(self.accelerator)
        if "train_loss" in logs:
            logs["train_loss"] = self._log_state.mean_loss()
        if "train_runtime" in logs:
            steps, before = logs["train_runtime"], round(self._reference_seconds, 4)
            logs |= {"train_runtime": steps + before, "reference_runtime": before}
            for name in logs.keys() & {"train_samples_per_second", "train_steps_per_second"}:
                logs[name] = round(logs[name] * steps / (steps + before), 3)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Multiply-adds of a training step, 6 per parameter and token that is not padding."""
        items = [item for pair in inputs for item in pair.items(**self._computed)]
        plain = sum(map(row_length, set(sequences(items).values())))
        return (
            6
            * (token_count(items) if self._rows == "grouped" else plain)
            * causal_model(self.model).num_parameters(exclude_embeddings=True)
        )


def _texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)
