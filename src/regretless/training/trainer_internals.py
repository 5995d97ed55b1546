"""Where training depends on what is private in transformers' Trainer: all of it is in this file.

`METHODS` and `ATTRIBUTES` say what is used, and what for; the overrides were written against transformers 5.24.0, and
have the same parameters in 5.17.0. A trainer checks at construction that they are still there: an override that nothing
calls any more would change results without a word.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import transformers
from accelerate.utils import gather_object
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import HubStrategy

from regretless.core.errors import ConfigError, reject
from regretless.modeling.training_folder import CHECKPOINT, FILES, checkpoint_problem, list_files, load_weights
from regretless.training.argument_checks import behind
from regretless.training.resuming import reading
from regretless.training.upload import public_files

T = TypeVar("T")
TESTED = "5.17.0 to 5.24.0"
"""Versions of transformers that the tests pass with: those of constraints/lowest.txt and of constraints/cpu.txt."""


class Method(NamedTuple):
    """A private method of the Trainer that is overridden or called."""

    parameters: tuple[str, ...]
    """Those that are passed on or read."""
    why: str


METHODS: Mapping[str, Method] = {
    # --- overridden
    "_run_epoch": Method((), "so that a checkpoint after the last step is resumed from without another epoch"),
    "_evaluate": Method(
        ("trial", "ignore_keys_for_eval", "skip_scheduler"),
        "so that a resumed training does not evaluate at its start again",
    ),
    "_get_grad_norm": Method(
        ("model", "grad_norm"), "so that training stops before a step with a gradient that is not finite"
    ),
    "_save": Method(
        ("output_dir", "state_dict"), "so that saved arguments hold no token, and a saved model has its card"
    ),
    "_save_checkpoint": Method(
        ("model", "trial"), "so that a checkpoint holds what a resumed training is compared with"
    ),
    "_save_rng_state": Method(("output_dir",), "so that a checkpoint lists its files, and a damaged one is noticed"),
    "_load_from_checkpoint": Method(
        ("resume_from_checkpoint", "model"), "to read weights into the model as it is, with errors that name the file"
    ),
    "_load_optimizer_and_scheduler": Method(("checkpoint",), "so that errors name the checkpoint"),
    "_load_best_model": Method((), "so that a damaged best checkpoint is refused"),
    "_push_from_checkpoint": Method(("checkpoint_folder",), "so that only files of the model go to the hub"),
    "create_scheduler": Method(
        ("num_training_steps", "optimizer"), "so that a training can have a part of a longer schedule"
    ),
    "save_model": Method(
        ("output_dir", "_internal_call"), "so that a model that a user saves is whole, also a sharded one"
    ),
    # --- called
    "_get_output_dir": Method(("trial",), "for the folder of a checkpoint"),
    "_finish_current_push": Method((), "so that an upload waits for the one before it"),
    "set_initial_training_values": Method(("args", "dataloader"), "for the number of steps, its last value"),
}
"""`create_scheduler`, `save_model` and `set_initial_training_values` are public, but not what is used of them."""
ATTRIBUTES = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""Sums behind the next log line and the final loss, which training creates: checkpoints hold them (`log_state`)."""


def internal_problems(kind: type = Trainer) -> list[str]:
    """What `kind`, the Trainer of the installed transformers, does not have as `METHODS` says."""
    problems = []
    for name, (parameters, why) in METHODS.items():
        if not callable(method := getattr(kind, name, None)):
            problems.append(f"Trainer.{name} is gone; it is needed {why}")
            continue
        signature = inspect.signature(method).parameters
        if missing := [parameter for parameter in parameters if parameter not in signature]:
            problems.append(f"Trainer.{name} has no parameter {', '.join(missing)}; it is needed {why}")
    return problems


def check_internals(kind: type = Trainer) -> None:
    """Raise ConfigError if the installed transformers lacks a private part of the Trainer that training needs."""
    advice = f"install transformers {TESTED}, or adapt training/trainer_internals.py"
    reject(f"transformers {transformers.__version__}", [f"{line}; {advice}" for line in internal_problems(kind)])


class LossSums(NamedTuple):
    """The Trainer's sums of the loss on this process."""

    loss: Tensor
    """Scalar: losses since the last log line."""
    total: float
    """Losses up to the last log line."""
    last_logged: int
    """Step of the last log line."""


class HookedTrainer(Trainer):
    """transformers' Trainer with hooks where it has private methods only, and with checked checkpoints and uploads."""

    resumed_from: Path | None = None
    """The checkpoint that training resumes from."""

    # --- hooks for a subclass -----------------------------------------------------------------------------------------

    def begin_checkpoint(self, folder: Path) -> None:
        """Write into the empty folder of a checkpoint what belongs there besides; every process calls it."""

    def check_grad_norm(self, norm: Any) -> None:
        """Look at the norm of a step's gradient before the optimizer's step; it may be infinite in fp16."""

    def saving(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        """The context in which a model is written to a folder; every process that saves calls it."""
        return contextlib.nullcontext()

    # --- epochs, steps and evaluations --------------------------------------------------------------------------------

    def of_first_process(self, function: Callable[[Path], T], path: Path) -> T:
        """What the first process finds at a path, on every process: they have to agree."""
        value = function(path) if self.accelerator.is_main_process else None
        result: T = gather_object([value])[0]
        return result

    def _run_epoch(self, **kwargs: Any) -> None:
        """One pass over the data; none if the checkpoint that training resumes from is after its last step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        """Evaluate; not again at the start (`eval_on_start`) of a resumed training."""
        if skip_scheduler and self.resumed_from is not None:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scaler = getattr(self.accelerator, "scaler", None)
        # In fp16 the loss is multiplied by a factor. If a gradient overflows, the step is skipped and the factor
        # becomes smaller. When it is down to 1, the gradient itself is not finite.
        overflows = scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1
        if norm is not None and not overflows:
            self.check_grad_norm(norm)
        return norm

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule of the learning rate; with `schedule_part`, the whole one behind the parts before."""
        part = getattr(self.args, "schedule_part", None)
        if part is None or getattr(self, "lr_scheduler", None) is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        number, count = part
        whole = super().create_scheduler(count * num_training_steps, optimizer)
        self.lr_scheduler = behind(whole, (number - 1) * num_training_steps)
        return self.lr_scheduler

    # --- sums of the loss ---------------------------------------------------------------------------------------------

    @property
    def loss_sums(self) -> LossSums:
        """The sums as they are now. Raises ConfigError if the installed transformers has none under these names."""
        if missing := [name for name in ATTRIBUTES if not hasattr(self, name)]:
            raise ConfigError(
                f"transformers {transformers.__version__}: Trainer has no {', '.join(missing)} in training, which "
                f"checkpoints hold; install transformers {TESTED}, or adapt training/trainer_internals.py"
            )
        return LossSums(self._tr_loss, float(self._total_loss_scalar), self._globalstep_last_logged)

    @loss_sums.setter
    def loss_sums(self, sums: LossSums) -> None:
        """Replace the sums, by those of a checkpoint; raises ConfigError as above."""
        self.loss_sums.loss.copy_(sums.loss)
        self._total_loss_scalar, self._globalstep_last_logged = sums.total, sums.last_logged

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, which is complete when its `trainer_state.json` is: the last file."""
        folder = Path(self._get_output_dir(trial)) / f"{CHECKPOINT}{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)  # what an earlier training has left may be damaged
        self.begin_checkpoint(folder)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the last of the files that every process writes to a checkpoint, then the list of them all."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            list_files(Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights that `_save_checkpoint` wrote into the model."""
        target = self.model if model is None else model
        with reading(resume_from_checkpoint):
            if self._has_plain_weights(target):
                load_weights(target, Path(resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with contextlib.nullcontext() if checkpoint is None else reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / FILES).is_file() and (problem := self.of_first_process(checkpoint_problem, best)):
            raise ConfigError(
                f"load_best_model_at_end: {best}: {problem}; resume with load_best_model_at_end=False to take the last "
                "model, or train anew"
            )
        if self._has_plain_weights(self.model):
            load_weights(self.model, best)
        else:
            super()._load_best_model()

    def _has_plain_weights(self, model: nn.Module) -> bool:
        """Whether checkpoints of the model are those that its `save_pretrained` writes."""
        return isinstance(model, PreTrainedModel) and not self.is_fsdp_enabled

    # --- saved models and uploads -------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        args: Any = vars(self)["args"]
        with self.saving(Path(output_dir or str(args.output_dir))):
            # It writes all arguments beside the model.
            self.args = args.without_secrets()
            try:
                super()._save(output_dir, state_dict)
            finally:
                self.args = args

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save model, tokenizer and card to output_dir and upload these, and nothing else that lies there.

        kwargs: those of `create_model_card`. Returns what transformers' Trainer returns; every process has to call it.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**{"model_name": self.hub_model_id, **kwargs})
        self._finish_current_push()
        return self._upload(
            Path(str(self.args.output_dir)),
            commit_message=commit_message,
            token=token,
            revision=revision or self.args.hub_revision,
            run_as_future=not blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the model of a checkpoint, without the optimizer's state and the Trainer's arguments."""
        args, folder = self.args, Path(checkpoint_folder)
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self._finish_current_push()
        message = f"Training in progress, step {self.state.global_step}"
        for path in [None, folder.name] if args.hub_strategy == HubStrategy.ALL_CHECKPOINTS else [None]:
            self._upload(
                folder, path_in_repo=path, commit_message=message, token=args.hub_token, revision=args.hub_revision
            )

    def _upload(self, folder: Path, **options: Any) -> Any:
        """Upload the model in a folder, its tokenizer and card; `options`: those of `HfApi.upload_folder`."""
        patterns = public_files(folder)
        return HfApi().upload_folder(
            repo_id=str(self.hub_model_id), folder_path=folder, allow_patterns=patterns, **options
        )
