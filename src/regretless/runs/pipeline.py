"""Runs the stages of a recipe in its run folder, in order: what is done is skipped, what was killed goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from regretless.analysis import analyze as analysis
from regretless.analysis import inspect as inspection
from regretless.core.errors import ConfigError, lookup, reject
from regretless.core.files import MANIFEST, read_json, write_text
from regretless.core.run_folder import BASE, RUN, RunFolder, dump, is_first_process, processes, resolve
from regretless.core.terminal import terminal
from regretless.data.preferences import check_some_left, read_pairs, report_refusals, split_kinds
from regretless.data.prompts import read_prompts
from regretless.data.records import write_jsonl, write_records
from regretless.evaluation import results as evaluation
from regretless.labeling import judge as judging
from regretless.labeling import verify as labeling
from regretless.modeling.load import ModelConfig
from regretless.modeling.trained import PAIR_SCORES, Trained, trained_model
from regretless.pairing import mask as masking
from regretless.pairing import pair as pairing
from regretless.reporting import report as reporting
from regretless.runs.evaluate import evaluate_models
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import Recipe
from regretless.sampling import sample as sampling
from regretless.training import train as training
from regretless.world import world


def run_recipe(recipe: Recipe, only: Collection[str] = ()) -> RunFolder:
    """Run the stages of a recipe (or `only` some) in its run folder; returns the folder with what became of each.

    Raises ConfigError for everything that can be known to go wrong, before the first stage; when another process works
    in the folder; and what the stages raise.
    """
    for name in only:
        if getattr(recipe, lookup("stage", {stage: stage for stage in STAGES}, name)) is None:
            raise ConfigError(f"{name}: this recipe has no such section")
    if processes() > 1 and set(only) != {"train"}:
        raise ConfigError(
            "several processes were launched, and only training can use them: run the other stages in one process, "
            "and this one as `torchrun --nproc-per-node N -m regretless train --config RECIPE "
            "per_device_train_batch_size=B`, where B is the pairs of a step divided by N"
        )
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    # In one process: several share a folder, and train at once.
    if processes() == 1:
        reject("recipe", recipe_problems(recipe, only or None))
    folder = RunFolder(recipe.run_dir)
    with folder.locked():
        if is_first_process():
            values = recipe.model_dump(mode="json", exclude_unset=True, exclude={"output_dir"})
            write_text(folder.path / "recipe.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        if not only:
            _set_aside(recipe, folder)
        for name, stage in STAGES.items():
            section = getattr(recipe, name)
            if section not in (None, {}) and (not only or name in only):
                stage(section, recipe, folder)
    return folder


def _set_aside(recipe: Recipe, folder: RunFolder) -> None:
    """Put away what an earlier recipe left in the folder and this one does not ask for: reports read what is there."""
    given = {"pair" if name == "pairs" else name for name in STAGES if getattr(recipe, name) not in (None, {})}
    folder.select("", given, among=STAGES)
    folder.select("pretrain", recipe.pretrain)
    objectives = recipe.train.objectives if recipe.train else []
    folder.select("train", objectives)
    if recipe.evaluate is not None:
        folder.select("evaluate", [BASE, *objectives, "samples"])
        for label in [BASE, *objectives]:
            folder.select(f"evaluate/{label}", [*recipe.evaluate.benchmarks, *recipe.evaluate.chat])
            for benchmark in recipe.evaluate.benchmarks:
                place = f"evaluate/{label}/{benchmark}"
                seeds = [path.name for path in (folder.path / place).glob("seed-*")]
                folder.select(place, [f"seed-{seed}" for seed in recipe.evaluate.seeds], among=seeds)


def _world(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    folder.do("world", dump(section), lambda output: world.run(section, output))


def _pretrain(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    for name, config in section.items():
        here = resolve(config, folder.path)
        _train(folder, f"pretrain/{name}", config, config.objectives[0], config.model, here.data, data=config.data)


def _prompts(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    def work(output: Path) -> dict[str, Any]:
        rows, refused = [], []
        for name, source in section.items():
            prompts, unusable = read_prompts(resolve(source, folder.path), f"prompts.{name}.")
            refused += unusable
            rows += [
                {"prompt_id": f"{name}-{row.prompt_id}", "prompt": row.prompt, "answer": row.answer} for row in prompts
            ]
        report_refusals(refused, output / "refused.jsonl")
        check_some_left(rows, refused, "prompts")
        write_jsonl(output / "prompts.jsonl", rows)
        return {"prompts": len(rows), "refused": len(refused)}

    folder.do("prompts", {name: dump(source) for name, source in section.items()}, work)


def _sample(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    folder.do("sample", dump(section), lambda output: sampling.run(resolve(section, folder.path), output))


def _responses(recipe: Recipe, folder: RunFolder, before: str) -> Path:
    """What the last of the recipe's stages ahead of `before` made of the responses."""
    labels = ("verify", "judge", "pair")
    for name in reversed(labels[: labels.index(before)]):
        if getattr(recipe, name) is not None:
            return folder.path / name / "responses.parquet"
    if recipe.responses is not None:
        return Path(recipe.responses.replace(RUN, str(folder.path)))
    return folder.path / "sample" / "responses.parquet"


def _verify(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    responses = _responses(recipe, folder, "verify")
    folder.do(
        "verify", dump(section), lambda output: labeling.run(section, responses, output), {"responses": responses}
    )


def _judge(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    responses, here = _responses(recipe, folder, "judge"), resolve(section, folder.path)
    folder.do(
        "judge",
        dump(section),
        lambda output: judging.run(here, responses, output),
        {"responses": responses, **here.files()},
    )


def _pair(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    responses = _responses(recipe, folder, "pair")
    folder.do("pair", dump(section), lambda output: pairing.run(section, responses, output), {"responses": responses})


def _import_pairs(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    here = resolve(section, folder.path)

    def work(output: Path) -> dict[str, Any]:
        read = read_pairs(
            here.dataset,
            split=here.split,
            subset=here.subset,
            prompt_key=here.prompt_key,
            chosen_key=here.chosen_key,
            rejected_key=here.rejected_key,
        )
        pairs, refused = split_kinds(*read)
        report_refusals(refused, output / "refused.jsonl")
        check_some_left(pairs, refused, here.dataset)
        write_records(output / "pairs.parquet", pairs[: here.limit])
        return {"pairs": len(pairs[: here.limit]), "refused": len(refused)}

    folder.do("pair", dump(section), work)


def _pairs(recipe: Recipe, folder: RunFolder) -> Path:
    return folder.path / ("pair" if recipe.mask is None else "mask") / "pairs.parquet"


def _mask(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    pairs = folder.path / "pair" / "pairs.parquet"
    folder.do(
        "mask",
        dump(section),
        lambda output: masking.run(resolve(section, folder.path), pairs, output),
        {"pairs": pairs},
    )


def _inspect(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    model, pairs = _model(recipe), _pairs(recipe, folder)
    objectives = {name: recipe.train.split_for(name)[0] for name in recipe.train.objectives} if recipe.train else {}
    folder.do(
        "inspect",
        {**dump(section), "model": dump(model), "objectives": objectives},
        lambda output: inspection.run(
            resolve(section, folder.path), pairs, resolve(model, folder.path), output, objectives
        ),
        {"pairs": pairs},
    )


def _train_all(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    for objective in section.objectives:
        _train(folder, f"train/{objective}", section, objective, _model(recipe), _pairs(recipe, folder))


def _train(
    folder: RunFolder,
    name: str,
    config: training.TrainConfig,
    objective: str,
    model: ModelConfig,
    pairs: Path | str,
    **settings: Any,
) -> None:
    # Only what this method sees: a change of another one leaves it alone.
    seen = {
        "objective": objective,
        "values": config.values_for(objective),
        "lora": config.lora and dump(config.lora),
        "eval_pairs": config.eval_pairs,
        "model": dump(model),
        **settings,
    }
    here, start = resolve(config, folder.path), resolve(model, folder.path)
    folder.do(
        name,
        seen,
        lambda output: training.run(here, objective, start, pairs, output),
        {"pairs": pairs} if isinstance(pairs, Path) else {},
    )


def _model(recipe: Recipe) -> ModelConfig:
    assert recipe.model is not None  # the recipe's own check
    return recipe.model


def _policies(recipe: Recipe, folder: RunFolder) -> dict[str, ModelConfig]:
    names = recipe.train.objectives if recipe.train else []
    return {name: trained_model(_model(recipe), f"{RUN}/train/{name}", folder.path) for name in names}


def _analyze(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    model, pairs, policies = _model(recipe), _pairs(recipe, folder), _policies(recipe, folder)
    objectives = {name: recipe.train.split_for(name)[0] for name in policies} if recipe.train else {}
    trained = {
        name: Trained(resolve(policy, folder.path), folder.path / "train" / name, name, objectives[name])
        for name, policy in policies.items()
    }
    responses: dict[str, dict[str, Path]] = {}
    # Not every recipe evaluates or holds pairs out.
    inputs = {"pairs": pairs} | {
        f"train/{name}": path for name, one in trained.items() if (path := one.folder / PAIR_SCORES).is_file()
    }
    for benchmark in recipe.evaluate.benchmarks if recipe.evaluate else ():
        for label in (BASE, *policies):
            place = f"evaluate/{label}/{benchmark}"
            if (path := folder.path / place / "responses.parquet").is_file():
                responses.setdefault(benchmark, {})[label] = inputs[place] = path
    folder.do(
        "analyze",
        {
            **dump(section),
            "model": dump(model),
            "policies": {name: dump(one) for name, one in policies.items()},
            "objectives": objectives,
        },
        lambda output: analysis.run(section, pairs, resolve(model, folder.path), trained, output, responses),
        inputs,
    )


def _evaluate(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    models = {BASE: _model(recipe), **_policies(recipe, folder)}
    evaluate_models(folder, "evaluate", models, section, recipe.verify or labeling.VerifyConfig())


def show(folder: RunFolder) -> None:
    """Print the table of results and where the report lies, as far as the run has them."""
    results, report = folder.path / "evaluate" / "results.json", folder.path / "report" / "report.html"
    screen = terminal()
    if results.is_file():
        screen.print(evaluation.results_table(read_json(results)))
    if report.is_file():
        screen.print(f"report: {report}", soft_wrap=True, highlight=False)


def _report(section: Any, recipe: Recipe, folder: RunFolder) -> None:
    # Manifests change exactly when a stage ran again.
    files = [*folder.path.rglob(MANIFEST), folder.path / "evaluate" / "results.json", folder.path / "recipe.yaml"]
    inputs = {path.relative_to(folder.path).as_posix(): path for path in files if path.is_file()}
    inputs.pop(f"report/{MANIFEST}", None)
    folder.do("report", dump(section), lambda output: reporting.run(section, folder.path, output), inputs)


STAGES: Mapping[str, Callable[[Any, Recipe, RunFolder], None]] = {
    "world": _world,
    "pretrain": _pretrain,
    "prompts": _prompts,
    "sample": _sample,
    "verify": _verify,
    "judge": _judge,
    "pair": _pair,
    "pairs": _import_pairs,
    "mask": _mask,
    "inspect": _inspect,
    "train": _train_all,
    "evaluate": _evaluate,
    "analyze": _analyze,
    "report": _report,
}
"""The recipe's sections that do something, in the order of their work."""
