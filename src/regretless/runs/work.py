"""The work of each stage of `workflow.stages`: its inputs, and its call. One function `do_<name>` per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regretless.analysis import analyze, inspect
from regretless.core.errors import ConfigError
from regretless.core.files import write_jsonl
from regretless.core.plugins import plugin_parts
from regretless.core.settings import dump
from regretless.data.preferences import read_pairs, split_kinds
from regretless.data.prompts import read_prompts
from regretless.data.rejected_rows import check_some_left, report_refusals
from regretless.data.rows import write_records
from regretless.evaluation.results import EvaluateConfig
from regretless.labeling import judge, mask, pair, verify
from regretless.modeling.load import ModelConfig
from regretless.modeling.training_folder import PAIR_SCORES, Trained, read_trained, trained_model
from regretless.reporting import report
from regretless.runs.evaluate import evaluate_model, evaluate_models
from regretless.runs.recipe import Recipe
from regretless.sampling import sample
from regretless.training import train
from regretless.training.ray_train import workers_of
from regretless.training.train_config import TrainConfig
from regretless.workflow import stage_record
from regretless.workflow.cluster import ClusterConfig
from regretless.workflow.run_folder import BASE, RUN, Outcome, RunFolder, resolve, substitute
from regretless.workflow.stage_folder import MANIFEST
from regretless.world import world

MODEL = "model"
"""Label of the model when it is evaluated on its own."""
DEFAULT_OBJECTIVES = ("repo_det", "dpo")
"""Objectives that `inspect` uses if no training is configured: they accept any pairs."""
LENGTHS = ("max_length", "max_prompt_length", "truncation")
"""Settings that decide which pairs are too long. `inspect` and `train` have the same defaults."""


@dataclass(frozen=True)
class Job:
    """The work of one stage: its recipe, its run folder, and the location of its result."""

    recipe: Recipe
    folder: RunFolder
    on_files: bool = False
    """True if inputs are the files that the recipe names, false if they are results of earlier stages."""
    form: str = ".parquet"
    """Suffix of the requested file, for a stage with several output formats."""
    output: Path | None = None
    """The folder for the stage's only unit of work; by default, units have their own folders in the run folder."""
    cluster: ClusterConfig | None = None
    """The cluster that trains, if the recipe has one; by default, training runs on this machine."""

    def do(
        self,
        name: str,
        settings: Mapping[str, Any],
        work: Callable[[Path], dict[str, Any]],
        inputs: Mapping[str, Path] | None = None,
        keeps: Sequence[str] = (),
    ) -> Outcome:
        """Run one unit of work (`RunFolder.do`), in the folder `name` unless the job sets an output."""
        if self.output is None:
            return self.folder.do(name, settings, work, inputs, keeps=keeps)
        return self.folder.do(self.output.name, settings, work, inputs, name.partition("/")[0], keeps)

    def path(self, *parts: str) -> Path:
        """A path in the run folder."""
        return self.folder.path.joinpath(*parts)

    def responses(self, before: str) -> Path:
        """The responses as the last of the recipe's stages before `before` wrote them."""
        labels = ("verify", "judge", "pair")
        for name in reversed(labels[: labels.index(before)]):
            if getattr(self.recipe, name) is not None:
                return self.path(name, "responses.parquet")
        if self.recipe.responses is not None:
            return Path(substitute(self.recipe.responses, self.folder.path))
        return self.path("sample", "responses.parquet")

    def pairs(self, *, masked: bool = True) -> Path | str:
        """The pairs that stages read: a file, or the id of a hub data set that a command names."""
        if self.on_files and self.recipe.pairs is not None:
            named = self.recipe.pairs.dataset
            return Path(named) if Path(named).exists() else named
        return self.path("mask" if masked and self.recipe.mask is not None else "pair", "pairs.parquet")

    @property
    def model(self) -> ModelConfig:
        """The policy before preference training."""
        assert self.recipe.model is not None  # the recipe's own check
        return self.recipe.model

    def trained(self) -> dict[str, Trained]:
        """The models that the recipe trains, by method; their paths still contain `{run}`."""
        if (train := self.recipe.train) is None:
            return {}
        return {
            name: Trained(
                trained_model(self.model, f"{RUN}/train/{name}", self.folder.path),
                self.path("train", name),
                name,
                train.split_for(name)[0],
            )
            for name in train.objectives
        }


def _input(name: str, source: Path | str) -> dict[str, Path]:
    """A file as an input of a unit of work; hub data has no content to compare."""
    return {name: source} if isinstance(source, Path) else {}


def _hub(name: str, source: Path | str) -> dict[str, str]:
    """The id of a hub data set as a setting of a unit of work."""
    return {name: source} if isinstance(source, str) else {}


def do_world(section: world.WorldConfig, job: Job) -> None:
    """Problems, demonstrations and tokenizer of the embedded world."""
    job.do("world", dump(section), lambda output: world.run(section, output))


def do_pretrain(section: Mapping[str, Any], job: Job) -> None:
    """Models trained before everything else, each from its own data."""
    for name in section:
        _pretrain(name, job)


def _pretrain(name: str, job: Job) -> None:
    config = job.recipe.pretrain[name]
    here = resolve(config, job.folder.path)
    _train_one(job, f"pretrain/{name}", config, config.objectives[0], config.model, here.data)


def do_prompts(section: Mapping[str, Any], job: Job) -> None:
    """Prompts of several sources in one file."""

    def work(output: Path) -> dict[str, Any]:
        rows, refused = [], []
        for name, source in section.items():
            source_rows, unusable = read_prompts(resolve(source, job.folder.path), f"prompts.{name}.")
            refused += unusable
            rows += [
                {"prompt_id": f"{name}-{row.prompt_id}", "prompt": row.prompt, "answer": row.answer}
                for row in source_rows
            ]
        report_refusals(refused, output / "refused.jsonl")
        check_some_left(rows, refused, "prompts")
        write_jsonl(output / "prompts.jsonl", rows)
        return {"prompts": len(rows), "refused": len(refused)}

    job.do("prompts", {name: dump(source) for name, source in section.items()}, work)


def do_sample(section: sample.SampleConfig, job: Job) -> None:
    """Responses of the behavior models."""
    here = resolve(section, job.folder.path)
    job.do("sample", dump(section), lambda output: sample.run(here, output), keeps=sample.KEEPS)


def do_verify(section: verify.VerifyConfig, job: Job) -> None:
    """Verdicts on the responses."""
    responses = job.responses("verify")
    job.do(
        "verify",
        dump(section),
        lambda output: verify.run(section, responses, output, f"responses{job.form}"),
        {"responses": responses},
    )


def do_judge(section: judge.JudgeConfig, job: Job) -> None:
    """Scores of the responses."""
    responses, here = job.responses("judge"), resolve(section, job.folder.path)
    inputs = {"responses": responses, **here.files()}
    job.do("judge", dump(section), lambda output: judge.run(here, responses, output), inputs)


def do_pair(section: pair.PairConfig, job: Job) -> None:
    """Preference pairs of the responses."""
    responses, here = job.responses("pair"), resolve(section, job.folder.path)
    job.do("pair", dump(section), lambda output: pair.run(here, responses, output), {"responses": responses})


def do_pairs(section: Any, job: Job) -> None:
    """Preference pairs that exist already, in this package's form."""
    here = resolve(section, job.folder.path)

    def work(output: Path) -> dict[str, Any]:
        read = read_pairs(
            here.dataset,
            split=here.split,
            subset=here.subset,
            prompt_key=here.prompt_key,
            chosen_key=here.chosen_key,
            rejected_key=here.rejected_key,
        )
        usable, refused = split_kinds(*read)
        report_refusals(refused, output / "refused.jsonl")
        check_some_left(usable, refused, here.dataset)
        write_records(output / "pairs.parquet", usable[: here.limit])
        return {"pairs": len(usable[: here.limit]), "refused": len(refused)}

    job.do("pair", dump(section), work)


def do_mask(section: mask.MaskConfig, job: Job) -> None:
    """The pairs, with masked pairs appended."""
    source, here = job.pairs(masked=False), resolve(section, job.folder.path)
    job.do("mask", dump(section), lambda output: mask.run(here, Path(source), output), _input("pairs", source))


def as_trained(section: inspect.InspectConfig, train: TrainConfig | None) -> inspect.InspectConfig:
    """The settings of `inspect`, with the lengths of the first method to train where `inspect` sets none itself."""
    if train is None:
        return section
    values = train.values_for(train.objectives[0])
    missing = [name for name in LENGTHS if name in values and name not in section.model_fields_set]
    return section.model_copy(update={name: values[name] for name in missing})


def do_inspect(section: inspect.InspectConfig, job: Job) -> None:
    """Numbers about the pairs as the objectives will see them."""
    source, train = job.pairs(), job.recipe.train
    section = as_trained(section, train)
    objectives: dict[str, Mapping[str, Any]] = {name: {} for name in section.objectives or DEFAULT_OBJECTIVES}
    if train is not None and not section.objectives:
        objectives = {name: train.split_for(name)[0] for name in train.objectives}
    here, model = resolve(section, job.folder.path), resolve(job.model, job.folder.path)
    job.do(
        "inspect",
        {**dump(section), "model": dump(job.model), "objectives": objectives, **_hub("pairs", source)},
        lambda output: inspect.run(here, Path(source), model, output, objectives),
        _input("pairs", source),
    )


def do_train(section: TrainConfig, job: Job) -> None:
    """A trained model for each method."""
    if job.output is not None and len(section.objectives) != 1:
        raise ConfigError(
            f"objective: expected one for this command, got {', '.join(section.objectives)}; a recipe trains several"
        )
    for objective in section.objectives:
        _train(objective, job)


def _train(objective: str, job: Job) -> None:
    assert job.recipe.train is not None
    _train_one(job, f"train/{objective}", job.recipe.train, objective, job.model, job.pairs())


def _train_one(
    job: Job,
    name: str,
    config: TrainConfig,
    objective: str,
    model: ModelConfig,
    data: Path | str,
) -> None:
    workers = None if job.cluster is None else workers_of(job.cluster.train, config.processes)
    count = config.process_count(objective) if workers is None else workers.count
    # Only settings of this method: a change of another method does not affect it. Neither does the number of processes.
    seen = {
        "objective": objective,
        "values": config.result_settings(objective, count),
        "lora": config.lora and dump(config.lora),
        "eval_pairs": config.eval_pairs,
        "model": dump(model),
        **_hub("data", getattr(config, "data", data)),
    }
    here, start = resolve(config, job.folder.path), resolve(model, job.folder.path)
    job.do(
        name,
        seen,
        lambda output: train.run(here, objective, start, data, output, workers),
        _input("pairs", data),
    )


def do_evaluate(section: EvaluateConfig, job: Job) -> None:
    """Base and trained models on the benchmarks."""
    models = _evaluated(job)
    if job.on_files:
        # Compared with others, the model is their base: gains are taken to it.
        own = BASE if models else MODEL
        evaluate_models(job.folder, "", {own: job.model, **models}, section, _verify_config(job))
    else:
        evaluate_models(job.folder, "evaluate", {BASE: job.model, **models}, section, _verify_config(job))


def _evaluate(label: str, job: Job) -> None:
    config = job.recipe.evaluate
    assert config is not None
    model = {BASE: job.model, **_evaluated(job)}[label]
    evaluate_model(job.folder, "evaluate", label, model, config, _verify_config(job))


def _evaluated(job: Job) -> dict[str, ModelConfig]:
    """Models to evaluate besides the policy before preference training, by label."""
    assert job.recipe.evaluate is not None
    models = {name: trained.model for name, trained in job.trained().items()}
    return models | {name: _named_model(job, text) for name, text in job.recipe.evaluate.policies.items()}


def _verify_config(job: Job) -> verify.VerifyConfig:
    return job.recipe.verify or verify.VerifyConfig()


def _named_model(job: Job, text: str) -> ModelConfig:
    """A model that settings name: the folder of a model, or of an adapter for the run's model; or a hub id."""
    if Path(substitute(text, job.folder.path)).is_dir() or text.startswith(RUN):
        return trained_model(job.model, text, job.folder.path)
    return ModelConfig(name_or_path=text)


def do_analyze(section: analyze.AnalyzeConfig, job: Job) -> None:
    """Changes through training."""
    source, run = job.pairs(), job.folder.path
    named = {name: read_trained(job.model, Path(substitute(folder, run))) for name, folder in section.policies.items()}
    trained = named or job.trained()
    responses: dict[str, dict[str, Path]] = {}
    # Not every recipe evaluates or has held-out pairs.
    inputs = _input("pairs", source) | {
        f"train/{name}": path for name, one in trained.items() if job.folder.has(path := one.folder / PAIR_SCORES)
    }
    for benchmark in job.recipe.evaluate.benchmarks if job.recipe.evaluate else ():
        for label in (BASE, *trained):
            name = f"evaluate/{label}/{benchmark}"
            if job.folder.has(path := job.path(name, "responses.parquet")):
                responses.setdefault(benchmark, {})[label] = inputs[name] = path
    settings = {
        **dump(section),
        "model": dump(job.model),
        "policies": {name: dump(one.model) for name, one in trained.items()},
        "objectives": {name: one.hyperparameters for name, one in trained.items()},
        **_hub("pairs", source),
    }
    # The label of a named policy is not its method; one of a plug-in counts with the plug-in's version.
    if of_plugins := {name: one.objective for name, one in named.items() if one.objective in plugin_parts()}:
        settings["objectives_of_plugins"] = of_plugins
    here = {
        name: Trained(resolve(one.model, run), one.folder, one.objective, one.hyperparameters)
        for name, one in trained.items()
    }
    model = resolve(job.model, run)
    job.do(
        "analyze",
        settings,
        lambda output: analyze.run(section, Path(source), model, here, output, responses),
        inputs,
    )


def do_report(section: report.ReportConfig, job: Job) -> None:
    """The HTML page of the run."""
    # A manifest changes exactly when its stage ran again.
    run = job.folder.path
    files = [*job.folder.manifests(), run / "evaluate" / "results.json", run / "recipe.yaml", run / stage_record.FILE]
    inputs = {path.relative_to(run).as_posix(): path for path in files if job.folder.has(path)}
    inputs.pop(f"report/{MANIFEST}", None)
    job.do("report", dump(section), lambda output: report.run(section, run, output), inputs)


@dataclass(frozen=True)
class Parts:
    """The independent parts of a stage: each has folders of its own, and reads none of the others'."""

    names: Callable[[Recipe], Sequence[str]]
    do: Callable[[str, Job], None]
    """Does the work of one part that nothing else of the stage does."""


def _evaluated_apart(recipe: Recipe) -> Sequence[str]:
    config = recipe.evaluate
    # Others share something: a server and its budget, kept replies, another program's devices.
    if config is None or config.engine != "transformers" or config.chat or config.harness:
        return ()
    return [BASE, *(recipe.train.objectives if recipe.train is not None else ()), *config.policies]


PARTS: Mapping[str, Parts] = {
    "pretrain": Parts(lambda recipe: list(recipe.pretrain), _pretrain),
    "train": Parts(lambda recipe: recipe.train.objectives if recipe.train is not None else (), _train),
    "evaluate": Parts(_evaluated_apart, _evaluate),
}
"""Stages whose parts can be done at the same time, by other processes too."""


def do_stage(name: str, job: Job) -> None:
    """Do the work of the stage `name`, as the recipe's section of that name says."""
    globals()[f"do_{name}"](getattr(job.recipe, name), job)
