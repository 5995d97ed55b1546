"""Stage `analyze`: what training changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regretless.core.plugins import plugin_parts
from regretless.core.settings import dump
from regretless.data.regret_table import REGRET
from regretless.runs.stages.stage import PAIRS, RESPONSES, Run, Stage, file_input, hub_setting
from regretless.workflow.run_folder import BASE, RUN, Unit, resolve, substitute
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.analysis.analyze import AnalyzeConfig
    from regretless.runs.preflight import Machine


class Analyze(Stage["AnalyzeConfig"]):
    """Compares models with the one that training began from."""

    name = "analyze"
    writes = (
        "token_rewards.json",
        "score_distance.json",
        "drift.json",
        "gradients.json",
        "calibration.json",
        "lengths.json",
        "regret_calibration.json",
    )
    work = "regretless.analysis.analyze"
    about = "What training changed: token rewards, score distances, drift, gradients, calibration."
    reads = "pairs, trained models"
    makes = "what training changed: token rewards, score distances, drift, gradients, calibration"
    flags = ("pairs", "model", "policy")
    prints_tables = True
    uses = ("pairs", "model")
    is_read = False

    def units(self, config: AnalyzeConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the numbers about all models, from whatever the run has."""
        from regretless.modeling.training_folder import PAIR_SCORES, Trained, read_trained

        source, root = run.latest(PAIRS, self.name), run.root
        named = {name: read_trained(run.model, Path(substitute(path, root))) for name, path in config.policies.items()}
        trained = named or run.trained()
        responses: dict[str, dict[str, Path]] = {}
        # Not every recipe evaluates or has held-out pairs.
        inputs = file_input("pairs", source) | {
            f"train/{name}": path for name, model in trained.items() if run.has(path := model.folder / PAIR_SCORES)
        }
        for benchmark in run.recipe.evaluate.benchmarks if run.recipe.evaluate else ():
            for label in (BASE, *trained):
                name = f"evaluate/{label}/{benchmark}"
                if run.has(path := run.path(name, RESPONSES)):
                    responses.setdefault(benchmark, {})[label] = inputs[name] = path
        rollout = Path(substitute(config.rollout, root)) if config.rollout else run.path("rollout")
        measured = {f"rollout/{name}": rollout / name for name in (REGRET, RESPONSES)}
        has_rollout = config.rollout is not None or all(map(run.has, measured.values()))
        if has_rollout:
            inputs |= measured
        settings = {
            **dump(config),
            "model": dump(run.model),
            "policies": {name: dump(model.model) for name, model in trained.items()},
            "objectives": {name: model.hyperparameters for name, model in trained.items()},
            **hub_setting("pairs", source),
            "template": run.template,
        }
        # The label of a named policy is not its method; one of a plug-in counts with the plug-in's version.
        if of_plugins := {name: model.objective for name, model in named.items() if model.objective in plugin_parts()}:
            settings["objectives_of_plugins"] = of_plugins
        task = {
            "config": config,
            "pairs": Path(source),
            "reference": run.model,
            "policies": {
                name: Trained(resolve(model.model, root), model.folder, model.objective, model.hyperparameters)
                for name, model in trained.items()
            },
            "responses": responses,
            "template": run.template,
            "rollout": rollout if has_rollout else None,
        }
        yield [run.unit(self, self.place, settings, task, inputs=inputs, need=Need("analyze", gpus=1))]

    def problems(self, config: AnalyzeConfig, machine: Machine) -> None:
        """Folders that are not there."""
        super().problems(config, machine)
        folders = {f"policies.{name}": folder for name, folder in config.policies.items()}
        for name, folder in (folders | ({"rollout": config.rollout} if config.rollout else {})).items():
            key = f"{self.name}.{name}"
            if RUN in folder:
                machine.path(key, folder)
            elif not Path(folder).is_dir():
                machine.add(key, f"no such folder: {folder}")


STAGE = Analyze()
