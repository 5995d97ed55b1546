"""The command line: parsing only. Heavy imports wait until a command runs, so that `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from regretless.core import interrupt
from regretless.core.errors import RegretlessError, storage_error
from regretless.core.terminal import never_fail_to_print
from regretless.core.text_gate import printable

app = typer.Typer(
    help="Regret-based preference optimization (RePO) for language models: from prompts to a better model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings, for example seed=1 or train.objective=ipo."),
]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of this stage, for example seed=1.")
]
Config = Annotated[
    Path | None,
    typer.Option(help="YAML file with this stage's settings, or a recipe; a recipe alone runs in its run folder."),
]
Output = Annotated[Path | None, typer.Option(help="File (.parquet, .jsonl) or folder to write.")]
Folder = Annotated[Path | None, typer.Option(help="Folder to write.")]
Responses = Annotated[Path | None, typer.Option(help="Responses (.parquet, .jsonl, .json).")]
Pairs = Annotated[str | None, typer.Option(help="Preference pairs: a file, a data set folder, or a hub id.")]
Model = Annotated[str | None, typer.Option(help="Hub id or folder; more as settings, such as model.dtype=bfloat16.")]
Adapter = Annotated[str | None, typer.Option(help="Adapter to put on the model.")]


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML file, for example recipes/quickstart.yaml.")],
    overrides: Overrides = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The whole path in seconds, offline: real architecture class, tiny sizes.")
    ] = False,
    output_dir: Annotated[Path | None, typer.Option(help="Run folder, in place of the recipe's.")] = None,
) -> None:
    """Run all stages of a recipe; what is done and unchanged is skipped, what was killed goes on."""
    from regretless.cli import verbs

    verbs.run(recipe, overrides or [], smoke=smoke, output_dir=output_dir)


@app.command()
def world(config: Config = None, output: Folder = None, settings: Settings = None) -> None:
    """Make the embedded world: problems, held-out test, demonstrations, tokenizer."""
    _stage("world", config, output, settings)


@app.command()
def sample(
    prompts: Annotated[str | None, typer.Option(help="Prompts: a file, a data set folder, or a hub id.")] = None,
    model: Model = None,
    config: Config = None,
    output: Output = None,
    settings: Settings = None,
) -> None:
    """Answer prompts with a behaviour model, with the log-probability of every token."""
    _stage("sample", config, output, settings, prompts=prompts, model=model)


@app.command()
def verify(
    responses: Responses = None, config: Config = None, output: Output = None, settings: Settings = None
) -> None:
    """Judge responses against gold answers: correct, wrong or unknown."""
    _stage("verify", config, output, settings, responses=responses)


@app.command()
def judge(responses: Responses = None, config: Config = None, output: Output = None, settings: Settings = None) -> None:
    """Score responses with a language model on an OpenAI-compatible server."""
    _stage("judge", config, output, settings, responses=responses)


@app.command()
def pair(responses: Responses = None, config: Config = None, output: Output = None, settings: Settings = None) -> None:
    """Make preference pairs of verified or scored responses."""
    _stage("pair", config, output, settings, responses=responses)


@app.command()
def mask(pairs: Pairs = None, config: Config = None, output: Output = None, settings: Settings = None) -> None:
    """Add pairs of a chosen response against its own beginning."""
    _stage("mask", config, output, settings, pairs=pairs)


@app.command()
def inspect(
    pairs: Pairs = None,
    model: Model = None,
    objective: Annotated[list[str] | None, typer.Option(help="Objective to look at; repeat for several.")] = None,
    config: Config = None,
    output: Folder = None,
    settings: Settings = None,
) -> None:
    """Say before training what the objectives will see in the pairs."""
    _stage("inspect", config, output, settings, pairs=pairs, model=model, objective=objective or None)


@app.command()
def train(
    pairs: Pairs = None,
    model: Model = None,
    adapter: Adapter = None,
    config: Config = None,
    output: Folder = None,
    settings: Settings = None,
) -> None:
    """Train a model on preference pairs, for example with objective=dpo beta=0.1 learning_rate=1e-5."""
    _stage("train", config, output, settings, pairs=pairs, model=model, adapter=adapter)


@app.command()
def evaluate(
    model: Model = None,
    adapter: Adapter = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(help="gsm8k, math, …, or NAME=FILE with prompt and answer; repeat for several.")
    ] = None,
    config: Config = None,
    output: Folder = None,
    settings: Settings = None,
) -> None:
    """Pass@1 of a model on benchmarks: greedy, and over seeds, with intervals."""
    _stage("evaluate", config, output, settings, model=model, adapter=adapter, benchmark=benchmark or None)


@app.command()
def analyze(
    pairs: Pairs = None,
    model: Annotated[str | None, typer.Option(help="Model before training: the reference.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Trained model or adapter as NAME=PATH; repeat for several.")
    ] = None,
    config: Config = None,
    output: Folder = None,
    settings: Settings = None,
) -> None:
    """What training changed: token rewards, score distances, drift, gradients, calibration."""
    _stage("analyze", config, output, settings, pairs=pairs, model=model, policy=policy or None)


@app.command()
def report(
    run_dir: Annotated[Path | None, typer.Argument(help="Run folder to report on.")] = None,
    settings: Settings = None,
    config: Config = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write; RUN_DIR/report unless given.")] = None,
) -> None:
    """One self-contained HTML page about a run, with a regret explorer; figures.formats=[png,pdf] also draws files."""
    if run_dir is not None and "=" in run_dir.name:
        run_dir, settings = None, [str(run_dir), *(settings or [])]
    if run_dir is not None and output is None:
        output = run_dir / "report"
    _stage("report", config, output, settings, run_dir=run_dir)


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(help="Run folder, or the folder that training writes to.")],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch the training in a run folder until it ends: loss, margins, saturation, speed, time left."""
    from regretless.cli import watch as view

    with interrupt.saying("no longer watching; training goes on"):
        view.watch(run_dir, once=once, every=every)


@app.command()
def objectives() -> None:
    """Table of the objectives and their hyperparameters."""
    from regretless.cli import info as tables

    tables.show_objectives()


@app.command()
def env() -> None:
    """Versions and hardware, for a bug report."""
    from regretless.cli import info as tables

    tables.show_environment()


def _stage(
    name: str, config: Path | None, output: Path | None, settings: Sequence[str] | None, **given: object
) -> None:
    from regretless.cli import verbs
    from regretless.cli.request import Request

    verbs.stage(name, Request(name, config, output, settings or [], given))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a problem that the user can act on ends as its message and exit code."""
    never_fail_to_print()
    try:
        with interrupt.handled():
            app(arguments)
    except RegretlessError as error:
        _fail(error)
    except Exception as error:
        known = storage_error(error)
        if known is None:
            raise
        _fail(known)


def _fail(error: RegretlessError) -> NoReturn:
    """Say the error on the terminal and end with its exit code."""
    typer.echo(printable(f"error: {error}"), err=True)
    sys.exit(error.exit_code)
