"""What a training would do: its pairs, steps and tokens, from the data where they are at hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from regretless.core.errors import ConfigError, RegretlessError
from regretless.core.run_folder import RUN, resolve
from regretless.modeling.layout import token_count
from regretless.modeling.load import ModelConfig, empty_model, load_tokenizer
from regretless.objectives import build
from regretless.runs.recipe import PretrainConfig, Recipe
from regretless.runs.work import Job
from regretless.training.adapter import with_adapter
from regretless.training.arguments import PreferenceConfig
from regretless.training.data import PairDataset, StepSampler
from regretless.training.train import arguments_of, lora_config, read_data
from regretless.training.train_config import TrainConfig

HARDWARE = (
    "bf16",
    "fp16",
    "tf32",
    "fsdp",
    "fsdp_config",
    "optim",
    "use_cpu",
    "pairs_cache_dir",
)
"""Arguments that may need other hardware, or name another place, and that no count depends on."""
MOST_PAIRS = 40_000
"""Pairs to read for an exact number of tokens; of more, whole steps spread over the training are read."""


@dataclass(frozen=True)
class Data:
    """The pairs of one training, and how it goes through them."""

    train: PairDataset
    held_out: PairDataset | None
    args: PreferenceConfig

    @property
    def _needs(self) -> frozenset[str]:
        return build(self.args.objective, **self.args.hyperparameters).required

    @property
    def needs_reference(self) -> bool:
        """True if the reference's log-probabilities are computed."""
        return "reference" in self._needs

    @cached_property
    def sampler(self) -> StepSampler:
        """The order of the pairs."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        pairs = self.args.per_device_train_batch_size
        return StepSampler(self.train, pairs, seed=seed, grouped=self.args.group_pairs)

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        return math.ceil(float(self.args.num_train_epochs) * len(self.sampler))

    def tokens_of(self, numbers: list[int]) -> int:
        """Distinct tokens of these pairs in one step."""
        with_rejected = "rejected" in self._needs
        return token_count([item for number in numbers for item in self.train[number].items(rejected=with_rejected)])

    @cached_property
    def trained_tokens(self) -> tuple[int, bool]:
        """Distinct tokens of all steps together, and whether this is exact."""
        every = max(1, math.ceil(self.steps * self.args.per_device_train_batch_size / MOST_PAIRS))
        read = [self.tokens_of(step) for step in itertools.islice(self._in_order(), 0, self.steps, every)]
        return round(sum(read) * self.steps / len(read)), every == 1

    def reference_tokens(self, steps: int) -> int:
        """Tokens that the reference scores for the first steps: prompt and responses of every pair once."""
        return int(self.train.tokens[self.sampler.read_by(0, steps)].sum()) if self.needs_reference else 0

    def _in_order(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            self.sampler.set_epoch(epoch)
            yield from self.sampler


@dataclass
class Trainings:
    """The trainings of a recipe, by the name of their unit."""

    recipe: Recipe
    _data: dict[str, Data | None] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Why data are not at hand, by the name of the unit."""

    def config(self, name: str) -> tuple[TrainConfig, str, ModelConfig]:
        """Settings, method and start of a training; the model's strings may hold `{run}`."""
        stage, _, inner = name.partition("/")
        if stage == "pretrain":
            entry: PretrainConfig = self.recipe.pretrain[inner]
            return entry, entry.objectives[0], entry.model
        assert self.recipe.train is not None and self.recipe.model is not None
        return self.recipe.train, inner, self.recipe.model

    def pairs(self, name: str, job: Job) -> Path | str:
        """The file, or the hub id, of a training's pairs."""
        config = self.config(name)[0]
        return resolve(config, self.recipe.run_dir).data if isinstance(config, PretrainConfig) else job.pairs()

    def data(self, name: str, pairs: Path | str | None = None) -> Data | None:
        """The pairs of a training; None if they, or the tokenizer, are not at hand."""
        if name not in self._data:
            try:
                self._data[name] = self._read(name, pairs)
            except RegretlessError as error:
                self._data[name] = None
                self.problems[name] = str(error)
        return self._data[name]

    def _read(self, name: str, pairs: Path | str | None) -> Data:
        config, objective, model = self.config(name)
        here = resolve(config, self.recipe.run_dir)
        source = here.data if isinstance(here, PretrainConfig) else pairs
        if source is None or (isinstance(source, Path) and not source.is_file()):
            raise ConfigError(f"{name}: the pairs are not there yet")
        args = arguments_of(here, objective, self.recipe.run_dir.parent / "read" / name, 1, HARDWARE)
        args.per_device_train_batch_size = here.step_pairs(objective, here.process_count(objective))
        # Methods that read the same of the pairs share them.
        args.pairs_cache_dir = str(self.recipe.run_dir.parent / "read" / "pairs")
        return Data(*read_data(here, args, self.tokenizer(model), source), args)

    def tokenizer(self, model: ModelConfig) -> PreTrainedTokenizerBase:
        """Tokenizer of a model. Raises ConfigError if it is not at hand."""
        return load_tokenizer(self.with_tokenizer(model))

    def with_tokenizer(self, model: ModelConfig) -> ModelConfig:
        """The model, resolved; one that a stage has yet to make names the tokenizer of the model it starts from."""
        here, named = resolve(model, self.recipe.run_dir), model.name_or_path or ""
        if here.tokenizer is not None or here.name_or_path is None or Path(here.name_or_path).exists():
            return here
        start = self._start_of(named)
        if start is None:
            return here
        first = self.with_tokenizer(start)
        kept = {"tokenizer": first.tokenizer or first.name_or_path}
        names = ("chat_template", "chat_template_kwargs")
        return here.model_copy(update=kept | {name: getattr(here, name) or getattr(first, name) for name in names})

    def _start_of(self, named: str) -> ModelConfig | None:
        stage, _, name = named.removeprefix(f"{RUN}/").partition("/")
        if not named.startswith(RUN):
            return None
        if stage == "pretrain" and name in self.recipe.pretrain:
            return self.recipe.pretrain[name].model
        return self.recipe.model if stage == "train" else None

    def shape(self, model: ModelConfig) -> ModelConfig:
        """A model of the same shape that is at hand: the one that it will be trained from, if it is not there yet."""
        here = resolve(model, self.recipe.run_dir)
        if here.name_or_path is None or Path(here.name_or_path).exists():
            return here
        start = self._start_of(model.name_or_path or "")
        return here if start is None else self.shape(start)

    def weights(self, name: str) -> Mapping[str, int] | None:
        """Numbers of `stored` and `trained` weights of a training; None if the model's configuration is not at hand."""
        config, _, model = self.config(name)
        try:
            empty = empty_model(self.shape(model))
        except RegretlessError:
            return None
        adapter = lora_config(config.lora)
        if adapter is None:
            total = empty.num_parameters()
            return {"stored": total, "trained": total}
        trained = sum(weight.numel() for weight in with_adapter(empty, adapter).parameters() if weight.requires_grad)
        return {"stored": trained, "trained": trained}
