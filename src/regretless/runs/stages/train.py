"""Stage `train`: a trained model for each method."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.errors import ConfigError
from regretless.core.settings import Section, dump
from regretless.runs.stages.stage import PAIRS, C, Run, Stage, file_input, hub_setting
from regretless.workflow.run_folder import Unit
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.modeling.load import ModelConfig
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import Recipe
    from regretless.training.train_config import TrainConfig

MINIATURE: Mapping[str, Any] = {
    # What needs special hardware, or time, or is meaningless for a few steps.
    **{"bf16": False, "fp16": False, "fsdp": None, "use_liger_kernel": False, "compile_layers": False},
    "num_train_epochs": 1,
    # Nothing leaves the machine: no model goes to the hub, no log to a tracker.
    **{"push_to_hub": False, "report_to": "none", "log_completions_steps": None},
    # Too small to be trained faster by several processes.
    **{"processes": 1, "sequence_parallel_size": 1, "strategy": "ddp", "gradient_accumulation_steps": 1},
}
"""Arguments of every training in miniature."""
SHORT = {**MINIATURE, "max_steps": 2, "pairs_per_step": 4, "warmup_steps": 0, "logging_steps": 1}
"""Those of a training on preference pairs."""
LEFT_OUT = ("per_device_train_batch_size", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
"""Arguments that a training in miniature does not have: `pairs_per_step` replaces them, or they may need a GPU."""


class Training(Stage[C]):
    """A stage that trains models, each in a folder and a group of its own."""

    work = "regretless.training.train"
    writes = (
        *("README.md", "card.json", "training.log", "trainer_state.json", "training_args.bin", "pair_scores.jsonl"),
        "optimizer.pt",
        *("checkpoint-*", "_final", "runs", "*model*.safetensors*", "*config.json", "quantization.json"),
        *("*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates"),
        *("configuration_*.py", "modeling_*.py", "tokenization_*.py"),
    )

    def unit(
        self,
        run: Run,
        name: str,
        config: TrainConfig,
        objective: str,
        model: ModelConfig,
        data: Path | str,
        source: Mapping[str, str | None],
    ) -> Unit:
        """One training. source: the data as a setting, if a setting names them."""
        from regretless.training.ray_train import workers_of

        workers = None if run.cluster is None else workers_of(run.cluster.train, config.processes)
        count = config.process_count(objective) if workers is None else workers.count
        # Only settings of this method: a change of another method does not affect it. Neither does the number of
        # processes.
        settings = {
            "objective": objective,
            "values": config.result_settings(objective, count),
            "lora": config.lora and dump(config.lora),
            **config.holding_out,
            "model": dump(model),
            **source,
            **{name: dump(value) for name, value in run.training.items() if isinstance(value, Section)},
            **{name: value for name, value in run.training.items() if isinstance(value, bool)},
        }
        task = {
            "config": config,
            "objective": objective,
            "model": model,
            "pairs": data,
            "ray_workers": workers,
            "template": source.get("template", "plain"),
            **run.training,
        }
        files = {name: value for name, value in run.training.items() if isinstance(value, Path)}
        inputs, place = file_input("pairs", data) | files, f"{self.place}/{name}"
        return run.unit(self, place, settings, task, inputs=inputs, need=Need("train", gpus=1), group=name)

    def check(self, key: str, config: TrainConfig, machine: Machine) -> None:
        """Add the problems of a training's settings."""
        from regretless.training.ray_train import ONE_NUMBER

        machine.sections(config, key)
        if machine.is_done(key):
            return
        workers: int | None = None
        if (cluster := machine.recipe.cluster) is not None:
            asked = cluster.train.workers
            if isinstance(asked, tuple):
                machine.add("cluster.train.workers", ONE_NUMBER)
            # How many `auto` is will be known when the cluster is connected.
            processes = 1 if config.processes == "auto" else config.processes
            workers = asked if isinstance(asked, int) else processes
        for objective in config.objectives:
            machine.problems += [f"{key}.{problem}" for problem in config.problems_here(objective, workers)]


class Train(Training["TrainConfig"]):
    """Trains on preference pairs."""

    name = "train"
    about = "Train a model on preference pairs, for example with objective=dpo beta=0.1 learning_rate=1e-5."
    reads = "pairs, a model"
    makes = "a trained model or adapter"
    flags = ("pairs", "model", "adapter")
    optional = ("adapter",)
    uses = ("pairs", "model")
    independent = True

    def units(self, config: TrainConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """A group for each method."""
        if run.is_unit and len(config.objectives) != 1:
            methods = ", ".join(config.objectives)
            raise ConfigError(f"objective: expected one for this command, got {methods}; a recipe trains several")
        pairs = run.latest(PAIRS, self.name)
        source = {**hub_setting("data", pairs), "template": run.template}
        for objective in config.objectives:
            yield [self.unit(run, objective, config, objective, run.model, pairs, source)]

    def problems(self, config: TrainConfig, machine: Machine) -> None:
        """Problems of every method's arguments, and of the run's data for it."""
        self.check(self.name, config, machine)
        # Also of a finished training: its stages before may run again with other settings.
        for objective in config.objectives:
            for key, problem in _not_in_data(config, objective, machine.recipe):
                machine.add(f"{self.name}.{config.key_of(objective, key)}", problem)

    def contents(self, config: TrainConfig) -> Collection[str]:
        """The models."""
        return config.objectives

    def after(self, config: TrainConfig, run: Run) -> None:
        """Add the run's data to the models' cards."""
        from regretless.runs import cards

        cards.refresh_cards(run, lambda method, facts: {"data": {**facts.data, **cards.data_of(run)}})

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """Two steps of every method."""
        if section is None:
            return None
        methods = {
            name: {key: value for key, value in kept(entry).items() if key not in SHORT}
            for name, entry in section.get("methods", {}).items()
        }
        # Held-out pairs are of more than one prompt: KTO needs answers to another prompt.
        held_out = min(section.get("eval_pairs", 0), 8)
        return {**kept(section), **SHORT, "methods": methods, "eval_pairs": held_out}


def _not_in_data(config: TrainConfig, objective: str, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Settings of a method that read what this run's stages do not write, with the reason."""
    from regretless.labeling.pairing_rules import RULES
    from regretless.objectives import build

    try:
        reads = build(objective, **config.split_for(objective)[0])
    except ConfigError:  # `check` has reported it
        return
    if reads.soft_labels and recipe.pair is not None and RULES.find(recipe.pair.rule).probability is None:
        yield (
            "soft_labels",
            f"it reads preference_probability, which pair.rule={recipe.pair.rule} does not write; leave it out, or set "
            "pair.rule to one that does, such as regret",
        )
    if "top_logps" in reads.required and recipe.sample is not None and not recipe.sample.top_logps:
        yield (
            "estimator",
            "topk reads the writer's most likely tokens, and sample records none; set sample.top_logps, for example to "
            "20, or leave it out",
        )
    # Responses and pairs from elsewhere may have continuations.
    makes_pairs = recipe.rollout is not None or (recipe.responses is None and recipe.pair is not None)
    keeps = recipe.rollout is not None and recipe.rollout.keep_continuations
    if "continuations" in reads.required and makes_pairs and not keeps:
        yield (
            "estimator",
            "rollouts reads the writers' continuations, and no stage of the recipe keeps them; set "
            "rollout.keep_continuations=true (section rollout, between verify and pair), or estimator=sampled",
        )


def kept(section: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a training that it has in miniature, too."""
    return {key: value for key, value in section.items() if key not in LEFT_OUT}


STAGE = Train()
