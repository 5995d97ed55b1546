"""What the command line's verbs do: one stage on files that the user names, or on a recipe's run folder."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers.utils.logging import disable_progress_bar

from regretless.analysis import analyze as analysis
from regretless.analysis import inspect as inspection
from regretless.cli.request import Request
from regretless.core.errors import ConfigError, RegretlessError, lookup
from regretless.core.files import MANIFEST, atomic_path, check_writable
from regretless.core.run_folder import RunFolder, dump, is_first_process, lock_beside, summary_line
from regretless.core.settings import Section, read_yaml
from regretless.core.terminal import console, terminal
from regretless.data.records import read_rows, write_jsonl
from regretless.evaluation import results as evaluation
from regretless.labeling import judge as judging
from regretless.labeling import verify as labeling
from regretless.modeling.trained import read_trained
from regretless.objectives import OBJECTIVES
from regretless.pairing import mask as masking
from regretless.pairing import pair as pairing
from regretless.reporting import report as reporting
from regretless.runs import pipeline
from regretless.runs.evaluate import evaluate_models
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import load_recipe
from regretless.sampling import sample as sampling
from regretless.smoke.miniature import NOTE, smoke_recipe, surroundings
from regretless.training import train as training
from regretless.world import world

T = TypeVar("T")
Work = Callable[[Path], dict[str, Any]]
FILE_SUFFIXES = (".parquet", ".jsonl")

disable_progress_bar()  # transformers' own, of loading and saving: the stages have theirs
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # between peft and transformers


def run(path: Path, overrides: Sequence[str], *, smoke: bool, output_dir: Path | None) -> None:
    """Run a recipe and show what came out. Raises what its stages raise."""
    recipe = load_recipe(path, overrides, None if smoke else recipe_problems)
    if smoke:
        recipe = smoke_recipe(recipe)
    if output_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": str(output_dir)})
    with surroundings(recipe) if smoke else contextlib.nullcontext():
        folder = pipeline.run_recipe(recipe)
    pipeline.show(folder)
    if smoke:
        console.print(NOTE)


def stage(name: str, request: Request) -> None:
    """Run one stage: on the files that the flags name, or, with a recipe alone, in the recipe's run folder."""
    given = [value for value in request.given.values() if value is not None]
    if request.config is not None and request.output is None and not given:
        if name not in read_yaml(request.config):
            raise ConfigError(f"{request.config}: is no recipe with a section {name}, so say on which files to work")
        overrides = [f"{name}.{text}" for text in request.overrides]
        recipe = load_recipe(request.config, overrides, partial(recipe_problems, names=[name]))
        pipeline.run_recipe(recipe, only=[name])
        return
    VERBS[name](request)


def _world(request: Request) -> None:
    config = request.settings(world.WorldConfig, "output")
    _to_folder(request, config, partial(world.run, config))


def _sample(request: Request) -> None:
    flags: dict[str, Any] = {}
    if request.given["prompts"] is not None:
        flags["prompts"] = {"dataset": request.given["prompts"]}
    if request.given["model"] is not None:
        flags["models"] = [request.model().model_dump(exclude_unset=True)]
    config = request.settings(sampling.SampleConfig, "output", flags=flags)
    _to_file(request, "responses.parquet", config, partial(sampling.run, config))


def _verify(request: Request) -> None:
    config, responses = request.settings(labeling.VerifyConfig, "responses", "output"), request.given["responses"]
    assert request.output is not None
    # Rows of any kind with prompt, response and answer: they keep their other columns.
    summary = labeling.verify_file(config, responses, request.output)
    console.print(f"verify: {summary_line(summary)}; wrote {request.output}", markup=False, soft_wrap=True)


def _judge(request: Request) -> None:
    # What was paid for outlives the work folder, which goes away.
    config = request.settings(judging.JudgeConfig, "responses", "output")
    if config.replies is None:
        config = config.model_copy(update={"replies": f"{request.output}.replies.sqlite"})
    responses = request.given["responses"]
    _to_file(request, "responses.parquet", config, partial(judging.run, config, responses), responses=str(responses))


def _pair(request: Request) -> None:
    config, responses = request.settings(pairing.PairConfig, "responses", "output"), request.given["responses"]
    work = partial(pairing.run, config, responses)
    _to_file(request, "pairs.parquet", config, work, responses=str(responses))


def _mask(request: Request) -> None:
    config, pairs = request.settings(masking.MaskConfig, "pairs", "output"), Path(request.given["pairs"])
    _to_file(request, "pairs.parquet", config, partial(masking.run, config, pairs), pairs=str(pairs))


def _inspect(request: Request) -> None:
    for name in request.given["objective"] or ():
        lookup("--objective", OBJECTIVES, name)
    config = request.settings(inspection.InspectConfig, "pairs", "model", "output")
    model, pairs = request.model(), Path(request.given["pairs"])
    # The recipe's methods with its hyperparameters, where there is one.
    recipe = request.other("train", training.TrainConfig)
    names = request.given["objective"] or (recipe.objectives if recipe is not None else ["repo_det", "dpo"])
    objectives = {name: recipe.split_for(name)[0] if recipe is not None else {} for name in names}
    _to_folder(
        request,
        config,
        lambda output: inspection.run(config, pairs, model, output, objectives),
        model=dump(model),
        objectives=objectives,
        pairs=str(pairs),
    )


def _train(request: Request) -> None:
    config = request.settings(training.TrainConfig, "pairs", "model", "output")
    model, pairs = request.model(), request.given["pairs"]
    if len(config.objectives) != 1:
        raise ConfigError(
            f"objective: one at a time here, got {', '.join(config.objectives)}; several train side by side in a recipe"
        )
    _to_folder(
        request,
        config,
        lambda output: training.run(config, config.objectives[0], model, pairs, output),
        objective=config.objectives[0],
        values=config.values_for(config.objectives[0]),
        model=dump(model),
        pairs=pairs,
    )


def _evaluate(request: Request) -> None:
    flags: dict[str, Any] = {}
    if request.given["benchmark"]:
        flags["benchmarks"] = _once("--benchmark", map(_benchmark, request.given["benchmark"]))
    done = [path.parent.name for path in request.output.glob(f"model/*/{MANIFEST}")] if request.output else []
    keys = [f"{kind}.{name}" for kind in ("benchmarks", "chat") for name in done]
    config = request.settings(evaluation.EvaluateConfig, "model", "output", flags=flags, done=keys)
    model, verify = request.model(), request.other("verify", labeling.VerifyConfig) or labeling.VerifyConfig()
    assert request.output is not None
    folder = RunFolder(request.output)
    with folder.locked():
        results = evaluate_models(folder, "", {"model": model}, config, verify)
    terminal().print(evaluation.results_table(results))


def _benchmark(text: str) -> tuple[str, dict[str, str]]:
    name, separator, dataset = text.partition("=")
    return name, {"dataset": dataset} if separator else {"benchmark": name}


def _analyze(request: Request) -> None:
    folders = _once("--policy", map(_named, request.given["policy"] or ()))
    absent = [
        f"--policy {name}: no such folder: {folder}" for name, folder in folders.items() if not Path(folder).is_dir()
    ]
    config = request.settings(analysis.AnalyzeConfig, "pairs", "model", "policy", "output", also=absent)
    model, pairs = request.model(), request.given["pairs"]
    policies = {name: read_trained(model, Path(folder)) for name, folder in folders.items()}
    _to_folder(
        request,
        config,
        lambda output: analysis.run(config, Path(pairs), model, policies, output),
        model=dump(model),
        policies={name: dump(policy.model) for name, policy in policies.items()},
        objectives={name: [policy.objective, policy.hyperparameters] for name, policy in policies.items()},
        pairs=pairs,
    )


def _named(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator:
        raise ConfigError(f"--policy {text}: expected NAME=PATH, for example dpo=runs/quickstart/train/dpo")
    return name, path


def _once(flag: str, named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """What a repeated flag names. Raises ConfigError for a name that comes twice."""
    found: dict[str, T] = {}
    for name, value in named:
        if name in found:
            raise ConfigError(f"{flag} {name}: named twice; give each its own name")
        found[name] = value
    return found


def _report(request: Request) -> None:
    run_dir = request.given["run_dir"]
    absent = [] if run_dir is None or run_dir.is_dir() else [f"{run_dir}: no such run folder"]
    config = request.settings(reporting.ReportConfig, "run_dir", "output", also=absent)
    assert request.output is not None
    if request.output.resolve() == (run_dir / "report").resolve():
        # Where the run's own stage writes: it must neither refuse the folder nor take this page, of other settings and
        # of a run that may still go on, for its own.
        RunFolder(run_dir).mark_unfinished("report")
    reporting.run(config, run_dir, request.output)
    console.print(f"report: {request.output / 'report.html'}")


VERBS: Mapping[str, Callable[[Request], None]] = {
    "world": _world,
    "sample": _sample,
    "verify": _verify,
    "judge": _judge,
    "pair": _pair,
    "mask": _mask,
    "inspect": _inspect,
    "train": _train,
    "evaluate": _evaluate,
    "analyze": _analyze,
    "report": _report,
}


def _to_folder(request: Request, config: Section, work: Work, **settings: Any) -> None:
    """Run `work` on the output folder itself; an unchanged one is left as it is, unfinished work goes on."""
    assert request.output is not None
    output = request.output.resolve()
    with _locked(output):
        RunFolder(output.parent).do(output.name, {"config": dump(config), **settings}, work, label=request.verb)
    if is_first_process():
        console.print(f"{request.verb}: wrote {request.output}", markup=False, soft_wrap=True)


def _to_file(request: Request, made: str, config: Section, work: Work, **settings: Any) -> None:
    """Run `work` in a folder beside the output file, then put the file `made` and what was refused in their places.

    The folder stays when the work is killed, so that the same command goes on, and goes away otherwise.
    """
    assert request.output is not None
    output = request.output
    if output.suffix not in FILE_SUFFIXES:
        _to_folder(request, config, work, **settings)
        return
    check_writable(output)
    folder = RunFolder(output.with_name(f".{output.name}.work"))
    with folder.locked():
        refused = folder.path / request.verb / "refused.jsonl"
        try:
            folder.do(request.verb, {"config": dump(config), **settings}, work)
            _publish(folder.path / request.verb / made, output)
        except RegretlessError:
            _publish_refused(refused, output)
            shutil.rmtree(folder.path)
            raise
        _publish_refused(refused, output)
        shutil.rmtree(folder.path)
    console.print(f"{request.verb}: wrote {output}", markup=False, soft_wrap=True)


def _publish(source: Path, target: Path) -> None:
    if target.suffix == ".jsonl":
        write_jsonl(target, (row for _, row in read_rows(source) if isinstance(row, dict)))
    else:
        _copy(source, target)


def _publish_refused(source: Path, output: Path) -> None:
    """Put refused rows beside the output file, as <name>.refused.jsonl; without any, none of an earlier run stays."""
    target = output.with_suffix(".refused.jsonl")
    target.unlink(missing_ok=True)
    if source.is_file() and source.stat().st_size:
        _copy(source, target)
        console.print(f"refused rows: {target}", style="yellow", markup=False, soft_wrap=True)


def _copy(source: Path, target: Path) -> None:
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    if not is_first_process():
        yield
        return
    with lock_beside(output):
        yield
