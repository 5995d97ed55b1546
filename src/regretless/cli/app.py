"""The command line: parsing only. Other imports wait until a command runs, so that help and completion are fast."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from regretless.cli.known import objective_names, stages, values_of
from regretless.core import interrupt
from regretless.core.errors import ConfigError, RegretlessError, storage_error
from regretless.core.ranks import lost_process_error
from regretless.core.text_cleaning import never_fail_to_print, printable


class Commands(TyperGroup):
    """All commands, and for each objective a short form: `regretless dpo …` is `regretless train objective=dpo …`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or the short form of the objective of that name."""
        command = super().get_command(ctx, cmd_name)
        return _short_form(cmd_name) if command is None and cmd_name in objective_names() else command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises ConfigError for an empty one: as a path it would be the current folder."""
        for before, text in zip(["regretless", *args], args, strict=False):
            is_flag = text.startswith("--") and text.endswith("=")
            if (is_flag or not text.strip()) and not ctx.resilient_parsing:  # as while a shell completes a command
                from regretless.core.paths import NOTHING

                flag = text.removesuffix("=") if is_flag else before
                raise ConfigError(f"{flag}: {NOTHING}")
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Completion of commands and of the objectives' short forms."""
        completions = super().shell_complete(ctx, incomplete)
        kind = type(super().shell_complete(ctx, "")[0])  # the class is click's, which typer may bring as its own
        return completions + [kind(name) for name in objective_names() if name.startswith(incomplete)]


def packaged(kind: str) -> Callable[[str], list[str]]:
    """Completion of the names of recipes or studies; where none fits, the shell completes files."""

    def names(incomplete: str) -> list[str]:
        from regretless.core.bundled import bundled

        return [entry.name for entry in bundled(kind) if entry.name.startswith(incomplete)]

    return names


def stage_names(incomplete: str) -> list[str]:
    """Completion of the names of stages."""
    return [name for name in stages() if name.startswith(incomplete)]


def settings_there(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completion of KEY=VALUE: keys of the command's stage, or of a recipe, and behind the key its values.

    The shell bash gives key, sign and value as words of their own; others give one word.
    """
    command = str(ctx.command.name)
    of_recipe = "overrides" in ctx.params
    keys = values_of(None if of_recipe else command if command in stages() else "train")
    words = ["", *(ctx.params["overrides" if of_recipe else "settings"] or [""])]
    before = words[-2 if words[-1] == "=" else -1]
    key, sign, _ = incomplete.partition("=")
    if before in keys and not sign:
        return keys[before]
    return [f"{key}={value}" for value in keys.get(key, [])] if sign else [f"{one}=" for one in keys]


def objectives_there(incomplete: str) -> list[str]:
    """Completion of the names of objectives."""
    return [name for name in objective_names() if name.startswith(incomplete)]


JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document, for programs.")]


app = typer.Typer(
    cls=Commands,
    help="Regret-based preference optimization (RePO) for language models: from prompts to a better model.",
    epilog="`regretless dpo …` is short for `regretless train objective=dpo …`; `regretless objectives` lists them.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings, for example seed=1 or train.objective=ipo.",
        autocompletion=settings_there,
    ),
]
RecipeArgument = Annotated[
    Path,
    typer.Argument(
        help="YAML file, or a name that `regretless recipes` lists, such as math/qwen3-1.7b.",
        autocompletion=packaged("recipes"),
    ),
]
SmokeFlag = Annotated[
    bool,
    typer.Option("--smoke", help="Run every stage in seconds, offline: the real architecture class with tiny sizes."),
]
FigureFormats = Annotated[
    list[str] | None,
    typer.Option(metavar="FORMAT", help="png, pdf or svg: figures as files in the output; repeat for several."),
]
RunFolderFlag = Annotated[str | None, typer.Option(help="Run folder; overrides the recipe's.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings of this stage, for example seed=1.", autocompletion=settings_there
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="YAML file with this stage's settings, or a recipe; a recipe alone runs in its run folder."),
]
OutputFlag = Annotated[Path | None, typer.Option(help="File (.parquet, .jsonl) or folder to write.")]
FolderFlag = Annotated[Path | None, typer.Option(help="Folder to write.")]
FLAGS: dict[str, Any] = {
    "prompts": Annotated[str | None, typer.Option(help="Prompts: a file, a data set folder, or a hub id.")],
    "responses": Annotated[Path | None, typer.Option(help="Responses (.parquet, .jsonl, .json).")],
    "pairs": Annotated[str | None, typer.Option(help="Preference pairs: a file, a data set folder, or a hub id.")],
    "model": Annotated[
        str | None, typer.Option(help="Hub id or folder; more as settings, such as model.dtype=bfloat16.")
    ],
    "adapter": Annotated[str | None, typer.Option(help="Adapter to put on the model.")],
    "objective": Annotated[
        list[str] | None,
        typer.Option(help="Objective to inspect; repeat for several.", autocompletion=objectives_there),
    ],
    "benchmark": Annotated[
        list[str] | None, typer.Option(help="gsm8k, math, …, or NAME=FILE with prompt and answer; repeat for several.")
    ],
    "policy": Annotated[
        list[str] | None,
        typer.Option(help="Trained model or adapter as NAME=PATH, compared with --model; repeat for several."),
    ],
    "run_dir": Annotated[Path | None, typer.Argument(help="Run folder to report on.")],
}
"""Options and arguments for what a stage reads, keyed by the names in `runs.stages`."""


class TableFormat(StrEnum):
    """How `compare` prints its tables."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"
    HTML = "html"


class StageCommand(TyperCommand):
    """A command of a stage, whose help also lists the stage's settings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises ConfigError for settings that are written as options (`--learning_rate 1e-5`)."""
        options = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        names = [text.partition("=")[0] for text in args if text.startswith("--") and len(text) > 2]
        # One that is only misspelled (`--ouput`) is left to the parser, which names the one that was meant.
        unknown = [name for name in names if name not in options and not get_close_matches(name, options)]
        if unknown and not ctx.resilient_parsing:  # as while a shell completes a command
            from regretless.core.paths import page

            trains = self.name not in stages() or self.name == "train"
            raise ConfigError(
                f"regretless {self.name}: no such option: {', '.join(dict.fromkeys(unknown))}; settings are written "
                f"KEY=VALUE{'; ' + page('from_trl') + ' translates those of TRL' if trains else ''}"
            )
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the flags, then every setting with type, default and meaning."""
        from regretless.cli.info import show_objectives, show_settings

        super().format_help(ctx, formatter)
        is_stage = self.name in stages()
        if not is_stage:
            show_objectives(str(self.name))
        # The short form of an objective sets it.
        show_settings(str(self.name) if is_stage else "train", without=() if is_stage else ("train.objective",))


@app.callback(invoke_without_command=True)
def common(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options of every command."""
    if version:
        from regretless.core import versions

        typer.echo(versions.version())
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    smoke: SmokeFlag = False,
    output_dir: RunFolderFlag = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster that does the work: auto, local, ray://host:port."),
    ] = None,
    first: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="STAGE", help="First stage to run; earlier ones do not run.", autocompletion=stage_names
        ),
    ] = None,
    last: Annotated[
        str | None, typer.Option("--until", metavar="STAGE", help="Last stage to run.", autocompletion=stage_names)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run all stages of a recipe. Finished, unchanged stages are skipped; an interrupted run resumes."""
    from regretless.cli import verbs

    verbs.run(
        recipe,
        overrides or [],
        smoke=smoke,
        output_dir=output_dir,
        cluster=cluster,
        first=first,
        last=last,
        as_json=as_json,
    )


@app.command()
def quickstart(
    overrides: Overrides = None,
    smoke: SmokeFlag = False,
    output_dir: RunFolderFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Train and compare small models in minutes, on a CPU and without downloads: `run quickstart`."""
    run(Path("quickstart"), overrides, smoke=smoke, output_dir=output_dir, as_json=as_json)


@app.command()
def recipes(
    copy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Copy this one, with the files that it builds on; repeat for several."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to copy to.")] = Path(),
    as_json: JsonFlag = False,
) -> None:
    """List the recipes, studies and examples that come with the package, or copy some of them to change them."""
    from regretless.cli.catalog import copy_recipes, show_recipes

    if copy:
        copy_recipes(copy, output)
    else:
        show_recipes(as_json=as_json)


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="What no data show yet: mean response_tokens, and reply_tokens of a judge; repeat for both.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    output_dir: RunFolderFlag = None,
) -> None:
    """Print what a recipe has done and would do: counts, judge cost. Runs nothing, and writes nothing there."""
    from regretless.cli import verbs

    verbs.plan(recipe, overrides or [], output_dir=output_dir, assume=assume or [], as_json=as_json)


@app.command()
def study(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="STUDY",
            help="YAML file, or a packaged study's name, such as table1-chat.",
            autocompletion=packaged("studies"),
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the study, for example output_dir=x.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Jobs at the same time; by default one for each GPU, or one.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run everything offline and in miniature; its numbers mean nothing.")
    ] = False,
    output_dir: Annotated[str | None, typer.Option(help="Folder of the study; overrides the file's.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster that does the work: auto, local, ray://host:port."),
    ] = None,
    figure_format: FigureFormats = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a recipe over models, methods, seeds and settings, and compare. The same command resumes and extends it."""
    from regretless.cli import verbs

    verbs.study(
        file,
        overrides or [],
        processes=processes,
        smoke=smoke,
        output_dir=output_dir,
        cluster=cluster,
        figures=figure_format or [],
        as_json=as_json,
    )


def _add_stage(stage: str, to: typer.Typer, objective: str | None = None) -> None:
    """Add the command of a stage: its own flags, then settings file, output and settings.

    With an objective it is that objective's command.
    """
    declared = stages()[stage]

    def command(**named: Any) -> None:
        config, output, settings = named.pop("config"), named.pop("output"), named.pop("settings") or []
        as_json = named.pop("as_json")
        if objective is not None:
            if other := [text for text in settings if text.startswith("objective=")]:
                raise ConfigError(f"{other[0]}: `regretless {objective}` trains {objective}; use `regretless train`")
            settings = [f"objective={objective}", *settings]

        if stage == "report" and (run_dir := named["run_dir"]) is not None:
            # A setting in its place: neither a folder, whose name may have the sign too, nor a path.
            key, sign, _ = str(run_dir).partition("=")
            if sign and "/" not in key and not run_dir.is_dir():
                named["run_dir"], settings = None, [str(run_dir), *settings]
            elif output is None:
                output = run_dir / "report"
        from regretless.cli import verbs
        from regretless.cli.request import Request

        verbs.stage(Request(stage, config, output, settings, named, as_json, objective or ""))

    options = {name: FLAGS[name] for name in declared["flags"]}
    options |= {"config": Config, "output": OutputFlag if declared["result"] else FolderFlag, "settings": Settings}
    options["as_json"] = JsonFlag
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False if kind is JsonFlag else None, annotation=kind)
        for name, kind in options.items()
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = options
    command.__name__ = name = objective or stage
    about = declared["about"] if objective is None else f"Short for `regretless train objective={objective}`."
    to.command(name=name, help=about.replace("[", r"\["), cls=StageCommand)(command)  # no markup of rich


def _short_form(objective: str) -> Any:
    """The command that trains with one objective."""
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    _add_stage("train", alone, objective)
    return typer.main.get_command(alone)


for _stage, _declared in stages().items():
    if _declared["about"]:
        _add_stage(_stage, app)


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(help="Run folder, or training's own.")],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two updates.")] = 1.0,
) -> None:
    """Watch a run until it ends: loss, margins and saturation of trainings; speed and time left of every stage."""
    from regretless.cli.watch import watch_training

    with interrupt.saying("stopped watching; the run continues"):
        watch_training(run_dir, once=once, every=every)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders.")],
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Method to take differences to; by default base, if it was evaluated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write: one HTML page, its tables and figures as files.")
    ] = None,
    figure_format: FigureFormats = None,
    form: Annotated[TableFormat, typer.Option("--format", help="How to print the tables.")] = TableFormat.TERMINAL,
    as_json: JsonFlag = False,
) -> None:
    """Compare runs: methods × benchmarks, means over seeds, paired differences with Holm's correction."""
    from regretless.cli import verbs

    verbs.compare(runs, baseline=baseline, output=output, figures=figure_format or [], form=form.value, as_json=as_json)


@app.command()
def push(
    model_folder: Annotated[Path, typer.Argument(help="Model or adapter, such as runs/NAME/train/repo.")],
    repo_id: Annotated[str, typer.Argument(help="Repository on the Hugging Face hub, OWNER/NAME.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files and their sizes; upload nothing.")] = False,
    with_report: Annotated[
        bool, typer.Option("--with-report", help="Also upload the run's report, which shows prompts and responses.")
    ] = False,
    license_name: Annotated[
        str | None, typer.Option("--license", help="License in the card, for example apache-2.0.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; by default the repository's main one.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Upload a model or adapter with tokenizer and card to the Hugging Face hub. Training data never goes along."""
    from regretless.cli import publish

    publish.push(
        model_folder,
        repo_id,
        dry_run=dry_run,
        with_report=with_report,
        license=license_name,
        private=private,
        revision=revision,
        as_json=as_json,
    )


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder of an adapter, such as runs/NAME/train/repo.")],
    out: Annotated[Path, typer.Argument(help="Folder to write: a model that needs no peft.")],
    base: Annotated[
        str | None, typer.Option(help="Hub id or folder of the base model; by default the one that the adapter names.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the merged weights: auto (the base's own), float32, bfloat16 or float16.")
    ] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Merge an adapter into its base model's weights, and compare the log-probabilities before and after."""
    from regretless.cli import publish

    publish.merge(adapter, out, base=base, dtype=dtype, as_json=as_json)


@app.command()
def settings(
    stage: Annotated[
        str | None,
        typer.Argument(metavar="[STAGE]", help="One section of a recipe; default: all.", autocompletion=stage_names),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print every setting of a stage, or of all stages, with type, default and meaning."""
    from regretless.cli.info import show_settings

    show_settings(stage, as_json=as_json)


@app.command()
def objectives(
    name: Annotated[str | None, typer.Argument(help="Only this objective.", autocompletion=objectives_there)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the objectives, or one, with their hyperparameters."""
    from regretless.cli.info import show_objectives

    show_objectives(name, as_json=as_json)


@app.command()
def doctor(
    as_json: JsonFlag = False,
) -> None:
    """Print versions, hardware and what will be used: device, dtype, attention, engines. For bug reports."""
    from regretless.cli.doctor import show_diagnosis

    show_diagnosis(as_json=as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a known error ends it with a message and an exit code."""
    never_fail_to_print()
    try:
        with interrupt.handled():
            app(arguments)
    except RegretlessError as error:
        _end(f"error: {error}", error.exit_code)
    except Exception as error:
        message = storage_error(error) or lost_process_error(error)
        if message is None:
            _end(traceback.format_exc(), 1)
        _end(f"error: {message}", message.exit_code)


def _end(text: str, code: int) -> NoReturn:
    """Print an error, without secrets, and exit."""
    from regretless.core.secrets import hide

    typer.echo(printable(hide(text)), err=True)
    sys.exit(code)
