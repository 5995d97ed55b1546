"""The commands: a recipe, or one stage on files that the user names or in a recipe's run folder."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from regretless.cli.output import only_results, show_outcomes, stages_json
from regretless.cli.request import Request, refused_rows
from regretless.core.bundled import find
from regretless.core.errors import ConfigError, RegretlessError, reject
from regretless.core.files import atomic_path, check_writable, read_json, write_jsonl
from regretless.core.paths import refuse_urls, url_of
from regretless.core.ranks import is_first_process, processes
from regretless.core.terminal import console, print_json, print_note, terminal
from regretless.core.yaml_settings import read_yaml
from regretless.data.rejected_rows import Refusal
from regretless.data.rows import read_rows
from regretless.evaluation.results import results_table
from regretless.modeling.load import quiet_libraries
from regretless.reporting.collect import is_training
from regretless.reporting.report import ReportConfig
from regretless.runs import pipeline, stages
from regretless.runs.miniature import smoke_recipe, surroundings
from regretless.runs.planning.counts import Assumed
from regretless.runs.planning.plan import make_plan
from regretless.runs.planning.show import show_plan
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import Recipe, load_recipe
from regretless.runs.stages import STAGES
from regretless.runs.stages.report import dropped, report_on
from regretless.runs.stages.stage import PAIRS
from regretless.runs.stages.tiny import NOTE
from regretless.studies import tables
from regretless.studies.compare import compare as compare_runs
from regretless.studies.compared_runs import Run
from regretless.studies.distances import Distance, measure_distances
from regretless.studies.figures import check_formats
from regretless.studies.page import PAGE, write_page, write_study_page
from regretless.studies.runner import Failure, finished, run_study
from regretless.studies.search import Choice, search_settings, trials_of
from regretless.studies.search_problems import check_apart
from regretless.studies.study import Study, load_study
from regretless.workflow.run_folder import LOCK, PROGRESS, RECIPE, RunFolder, lock_beside
from regretless.workflow.stage_folder import CACHE, MANIFEST, StageFolder, check_ours

quiet_libraries()

MOST_NAMED = 5
"""Most run folders that a message names."""


def run(
    path: Path,
    overrides: Sequence[str],
    *,
    smoke: bool,
    output_dir: str | Path | None,
    cluster: str | None = None,
    first: str | None = None,
    last: str | None = None,
    as_json: bool = False,
) -> None:
    """Run a recipe, or its stages from `first` to `last`, and print the results. Raises what its stages raise."""
    refuse_urls({"RECIPE": path})
    if cluster is not None:
        overrides = [*overrides, f"cluster.address={cluster}"]
    recipe = load_recipe(path, [*overrides, *_at(output_dir)], None if smoke else recipe_problems)
    if smoke:
        recipe = smoke_recipe(recipe)
        if output_dir is not None:
            recipe = recipe.model_copy(update={"output_dir": str(output_dir)})
    with only_results(), surroundings(recipe) if smoke else contextlib.nullcontext():
        only = pipeline.between(recipe, first, last) if first or last else ()
        done = pipeline.run_recipe(recipe, only)
    if as_json:
        print_json(_run_json(done))
    else:
        pipeline.show(done)
    if smoke:
        console.print(NOTE)


def _run_json(folder: RunFolder) -> dict[str, Any]:
    """What a run did and found, for programs."""
    results, report = pipeline.results_of(folder)
    return {
        "run_dir": str(folder.path),
        "stages": stages_json(folder.outcomes),
        "results": results,
        "report": None if report is None else str(report),
    }


def _at(output_dir: str | Path | None) -> list[str]:
    """The flag `--output-dir` as an override of the recipe."""
    return [] if output_dir is None else [f"output_dir={json.dumps(str(output_dir), ensure_ascii=False)}"]


def study(
    path: Path,
    overrides: Sequence[str],
    *,
    processes: int | None,
    smoke: bool,
    output_dir: str | None,
    cluster: str | None,
    figures: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Run a study and compare its runs. Raises ConfigError for its problems, RegretlessError if a job failed."""
    refuse_urls({"STUDY": path})
    if cluster is not None:
        overrides = [*overrides, f"cluster.address={cluster}"]
    found = load_study(path, overrides, output_dir=output_dir, smoke=smoke)
    if figures:
        found = replace(found, config=found.config.model_copy(update={"figures": list(figures)}))
    check_formats(found.config.figures)  # which are drawn when all runs are done
    if not smoke:
        # Trials of a model differ in values only, which are checked already.
        searched = trials_of(found).cells if found.config.search is not None else []
        trials = {(cell.model, *cell.methods): cell for cell in searched}
        problems = {cell.name: recipe_problems(cell.recipe) for cell in [*found.cells, *trials.values()]}
        reject(str(path), [f"{name}: {text}" for name, texts in problems.items() for text in texts])
    choices: list[Choice] = []
    with only_results():
        if found.config.search is not None:
            found, choices = search_settings(found, processes)
            for choice in choices:
                score = f"{choice.metric} {choice.best.score:.2f}, best of {len(choice.trials)}"
                said = "; ".join([f"{', '.join(choice.overrides)} ({score})", *choice.remarks])
                console.print(f"search: {choice.target}: {said}", soft_wrap=True)
        failures = run_study(found, processes=processes)
        check_apart(found, finished(found, failures))
        distances: list[Distance] = []
        if found.config.distance_to:
            distances, lost = measure_distances(found, failures, processes=processes)
            failures += lost
    _show_study(found, failures, choices, distances, as_json=as_json)
    if smoke:
        console.print(NOTE)
    if failures:
        listed = "".join(f"\n  - {one.job.name}: {one.reason}" for one in failures)
        raise RegretlessError(
            f"{len(failures)} job(s) failed; the others are done, and the same command tries these again:{listed}"
        )


def _show_study(
    study: Study,
    failures: Sequence[Failure],
    choices: Sequence[Choice],
    distances: Sequence[Distance],
    *,
    as_json: bool,
) -> None:
    """Print the tables of the runs that are finished, and write the study's page."""
    runs = [cell.run for cell in finished(study, failures) if cell.recipe.evaluate is not None]
    if not runs:
        return
    try:
        found = compare_runs(runs, study.config.baseline)
    except ConfigError as error:
        if not failures:
            raise
        print_note(f"no table: {error}")  # the failures come next
        return
    if not as_json:  # before the page, which may fail
        screen = terminal()
        screen.print(tables.for_terminal(found, screen.width))
    page = write_study_page(study, found, failures, choices, distances)
    if as_json:
        print_json({**found.as_json(), "page": str(page)})
    console.print(f"study: {page}", soft_wrap=True)


def plan(
    path: Path,
    overrides: Sequence[str],
    *,
    output_dir: str | Path | None,
    assume: Sequence[str],
    as_json: bool,
) -> None:
    """Print what a recipe would do. Raises ConfigError for settings that cannot be parsed, and for nothing else."""
    refuse_urls({"RECIPE": path})
    recipe = load_recipe(path, [*overrides, *_at(output_dir)])
    values = {key: value for key, _, value in (text.partition("=") for text in assume)}
    assumed = Assumed.parse(values, "--assume")
    with only_results():
        made = make_plan(recipe, assumed)
    if as_json:
        print_json(made.as_json())
    else:
        show_plan(made, terminal())


def compare(
    runs: Sequence[str], *, baseline: str | None, output: Path | None, figures: Sequence[str], form: str, as_json: bool
) -> None:
    """Print the tables of several runs, and write their page. Raises ConfigError for runs that cannot be compared."""
    refuse_urls({"--output": output, "RUN": next(filter(url_of, runs), None)})
    reject("regretless compare", ["--figure-format: needs --output"] if figures and output is None else [])
    found = compare_runs([Run(Path(run)) for run in runs], baseline)
    if output is not None:
        write_page(found, output, figures)
    screen = terminal()
    if as_json:
        print_json(found.as_json())
    elif form in tables.FORMATS:
        screen.print(tables.FORMATS[form](found).rstrip("\n"), soft_wrap=True)
    else:
        screen.print(tables.for_terminal(found, screen.width))
    if output is not None:
        console.print(f"compare: {output / PAGE}", soft_wrap=True)


def stage(request: Request) -> None:
    """Run one stage: on the files that the flags name, or, with a recipe alone, in the recipe's run folder."""
    name = request.verb
    refuse_urls({"--config": request.config, "--output": request.output, "RUN_DIR": request.given.get("run_dir")})
    if request.config is not None and request.output is None and not any(request.given.values()):
        if name not in read_yaml(find(request.config)):
            raise ConfigError(f"{request.config}: not a recipe with a section {name}; name the input files by flags")
        overrides = [f"{name}.{text}" for text in request.overrides]
        recipe = load_recipe(request.config, overrides, partial(recipe_problems, names=[name]))
        with _results_of(request):
            done = pipeline.run_recipe(recipe, only=[name])
        show_outcomes(done, done.path, as_json=request.as_json)
    elif name == "report":
        _report(request)
    else:
        _on_files(request)


def _on_files(request: Request) -> None:
    """Run a stage as a recipe with only that section, on the files that the flags name."""
    recipe = request.recipe()
    output = request.output
    assert output is not None
    recipe = _with_readable_pairs(recipe, output)
    if request.is_to_file:
        check_writable(output)
        with _results_of(request):
            folder = _to_file(request.verb, recipe, output)
    elif request.outputs != [output]:
        folder = RunFolder(recipe.run_dir)
        with _results_of(request), folder.locked():
            pipeline.do_stage(_run_on_files(recipe, folder, output), request.verb)
        _show_results(request, read_json(folder.path / "results.json"))
        return
    else:
        folder = RunFolder(output.resolve().parent)
        with _results_of(request), _locked(output.resolve()):
            pipeline.do_stage(_run_on_files(recipe, folder, output.resolve(), is_unit=True), request.verb)
    show_outcomes(folder, output, as_json=request.as_json)


def _show_results(request: Request, results: dict[str, Any]) -> None:
    if request.as_json:
        print_json({"output": str(request.output), "results": results})
    else:
        terminal().print(results_table(results))
        console.print(f"{request.verb}: wrote {request.output}", soft_wrap=True)


def _run_on_files(recipe: Recipe, folder: RunFolder, output: Path, *, is_unit: bool = False) -> stages.Run:
    """A run of one stage's section on the files, or the hub data, that the recipe names."""
    alone = recipe.model_copy(update={"pairs": None})
    if recipe.pairs is None:
        return stages.Run.of(alone, folder, output=output, is_unit=is_unit)
    named, template = recipe.pairs.dataset, recipe.pairs.template
    run = stages.Run.of(alone, folder, output=output, is_unit=is_unit, template=template)
    return replace(run, inputs={PAIRS: Path(named) if Path(named).exists() else named})


def _results_of(request: Request) -> contextlib.AbstractContextManager[None]:
    """A block of a stage's work: nothing in it prints to standard output but the tables of a stage of numbers."""
    has_tables = request.stage.prints_tables and not request.as_json
    return contextlib.nullcontext() if has_tables else only_results()


def _with_readable_pairs(recipe: Recipe, output: Path) -> Recipe:
    """The recipe with pairs that its stage can read as they are: `pairs.…` settings say how to read those it names.

    They are written beside the output, in `<output>.cache/pair`. Raises ConfigError if a launcher started this process.
    """
    if recipe.pairs is None or recipe.pairs.model_fields_set <= {"dataset", "template"}:
        return recipe
    if processes() > 1:
        raise ConfigError(
            "pairs: with a launcher, pairs are read as they are; leave out pairs.… and convert the data, or train in a "
            "recipe (its section `pairs` takes the same settings)"
        )
    folder = RunFolder(output.resolve().with_name(output.name + CACHE))
    with only_results(), _locked(output.resolve()):
        pipeline.do_stage(stages.Run.of(recipe, folder), "pairs")
    read = {"dataset": str(folder.path / "pair" / "pairs.parquet"), "template": recipe.pairs.template}
    return recipe.model_copy(update={"pairs": type(recipe.pairs).parse(read, "pairs")})


def _to_file(name: str, recipe: Recipe, output: Path) -> RunFolder:
    """Run a stage in a work folder beside the output file, then copy its result and rejected rows to the output.

    Returns the work folder, which exists no more, for its outcomes.

    An interruption leaves the work folder, so that the same command resumes; otherwise the folder is deleted.
    """
    folder, made = RunFolder(recipe.run_dir), STAGES[name].result
    ours = {LOCK, PROGRESS, name, f"{name}{CACHE}"}
    if folder.path.is_dir() and (others := {path.name for path in folder.path.iterdir()} - ours):
        raise ConfigError(f"{folder.path}: not made by regretless ({min(others)} is there); move it away")
    if (rows := refused_rows(output)).exists() and not _has_refused_rows(rows):
        raise ConfigError(f"{rows}: skipped rows are written there, and it holds something else; move it away")
    with folder.locked():
        unit = StageFolder(folder.path / name, "none")
        check_ours(unit.path)
        refused = unit.path / "refused.jsonl"
        try:
            pipeline.do_stage(_run_on_files(recipe, folder, output), name)
            written = (unit.path / made).with_suffix(output.suffix)
            _publish(written if written.exists() else unit.path / made, output)
        except RegretlessError:
            _publish_refused(refused, output)
            _delete_work(folder.path, unit)
            raise
        _publish_refused(refused, output)
        _delete_work(folder.path, unit)
    return folder


def _delete_work(folder: Path, unit: StageFolder) -> None:
    """Delete a work folder, with its unit and what the unit keeps for later runs."""
    unit.set_strangers_aside()
    for path in (unit.path, folder / f"{unit.path.name}{CACHE}"):
        shutil.rmtree(path, ignore_errors=True)
    (folder / LOCK).unlink()
    with contextlib.suppress(OSError):  # not empty: somebody else's files are in its folder `unused`
        folder.rmdir()


def _report(request: Request) -> None:
    run_dir, output = request.given["run_dir"], request.output
    missing = [f"{name}: required" for name, value in (("RUN_DIR", run_dir), ("--output", output)) if value is None]
    absent = [] if run_dir is None else _no_run(run_dir)
    config = None
    try:
        config = request.section(ReportConfig)
    except ConfigError as error:
        absent += error.problems
    reject("regretless report", [*missing, *absent])
    assert config is not None and run_dir is not None and output is not None
    with only_results(), contextlib.ExitStack() as stack:
        if output.resolve() == (run_dir / "report").resolve():
            # The run's own report stage also writes here. Without this mark, that stage could refuse the folder, or
            # treat this page as its own result, although it has other settings and the run may not be finished.
            held = RunFolder(run_dir)
            stack.enter_context(held.locked())
            held.mark_unfinished("report")
        left_out: list[Path] = []
        with contextlib.suppress(ConfigError):  # no recipe, or one of an earlier version: then everything counts
            left_out = dropped(stages.Run.of(load_recipe(run_dir / RECIPE), RunFolder(run_dir)))
        report_on(config, run_dir, output, left_out)
    if request.as_json:
        print_json({"report": str(output / "report.html")})
    else:
        terminal().print(f"report: {output / 'report.html'}", soft_wrap=True)


def _no_run(folder: Path) -> list[str]:
    """Why a folder is not one of a run, with a recipe or with the outputs of stages' commands."""
    if not folder.is_dir():
        return [f"{folder}: no such run folder"]
    if (
        (folder / RECIPE).is_file()
        or is_training(folder)
        or any(any((folder / one.place).rglob(MANIFEST)) for one in STAGES.values())
    ):
        return []
    inside = sorted(str(path.parent) for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{RECIPE}"))
    named = f"; there are {len(inside)} in it: {', '.join(inside[:MOST_NAMED])}" + ", …" * (len(inside) > MOST_NAMED)
    return [
        f"{folder}: expected a run folder or a training's, found no {RECIPE} and no finished stage in it"
        f"{named if inside else ''}"
    ]


def _publish(source: Path, target: Path) -> None:
    if source.suffix != target.suffix:
        write_jsonl(target, (row for _, row in read_rows(source) if isinstance(row, dict)))
    else:
        _copy(source, target)


def _publish_refused(source: Path, output: Path) -> None:
    """Write rejected rows to `<name>.refused.jsonl`; if there are none, delete the file from an earlier run."""
    target = refused_rows(output)
    if _has_refused_rows(target):
        target.unlink()
    if source.is_file() and source.stat().st_size:
        _copy(source, target)
        print_note(f"skipped rows: {target}")


def _has_refused_rows(file: Path) -> bool:
    """True for a file of rejected rows that an earlier call has written."""
    if not file.is_file():
        return False
    with file.open("rb") as handle, contextlib.suppress(ValueError):
        row = json.loads(handle.readline())
        return isinstance(row, dict) and row.keys() == {one.name for one in fields(Refusal)}
    return False


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
