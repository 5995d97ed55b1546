"""The report: one HTML page that describes a run and needs no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pyarrow as pa
from markupsafe import Markup
from pydantic import Field

from regretless.core.errors import DataError
from regretless.core.files import write_text
from regretless.core.paths import check_page
from regretless.core.secrets import storable, without_secrets
from regretless.core.settings import Section, Seed
from regretless.core.terminal import print_note
from regretless.core.versions import version
from regretless.core.yaml_settings import dump_text
from regretless.data.messages import full_text, read_message
from regretless.reporting import views
from regretless.reporting.changes import changes
from regretless.reporting.collect import RunData, collect, objectives_of
from regretless.reporting.explorer import explorer
from regretless.workflow.run_folder import BASE


class ReportConfig(Section):
    """Content of the page."""

    title: str | None = None
    """Heading of the page; by default the recipe's name, or without a recipe that of the folder."""
    examples: int = Field(default=1, ge=0)
    """Number of example problems per benchmark that training solved, and of ones that it broke."""
    token_pairs: int = Field(default=100, ge=0)
    """Most pairs in the regret explorer, of those that were analyzed."""
    tokens: int = Field(default=1000, ge=1)
    """Most tokens to show of each response in the regret explorer."""
    seed: Seed = 0
    """Random seed for the choice of examples."""


def run(
    config: ReportConfig,
    run_dir: Path,
    output: Path,
    places: Sequence[str] = (),
    others: Sequence[str] = (),
    left_out: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write `output`/report.html about the run in `run_dir`.

    A section whose stage did not run says so. Model and data text is escaped, and the page's Content-Security-Policy
    blocks all scripts but its own. places, others, left_out: as in `collect`.
    Raises DataError if a file of the run is broken.
    """
    try:
        data = collect(
            run_dir, examples=config.examples, seed=config.seed, places=places, others=others, left_out=left_out
        )
        return _run(config, data, run_dir, output)
    except UNREADABLE as error:
        raise DataError(
            f"{run_dir}: contains a file with unexpected content ({type(error).__name__}: {error}); remove the folder "
            "of the stage that made it, and run the recipe again"
        ) from error


class PageSection(NamedTuple):
    """A section of the page, and its entry in the navigation."""

    anchor: str
    title: str

    @property
    def template(self) -> str:
        """File of the section."""
        return f"{self.anchor}.html.jinja"


SECTIONS = [
    PageSection("tokens", "Regret explorer"),
    PageSection("results", "Results"),
    PageSection("rounds", "Rounds"),
    PageSection("examples", "Examples"),
    PageSection("run", "What was run"),
    PageSection("data", "Data before training"),
    PageSection("training", "Training"),
    PageSection("scores", "Score distributions"),
    PageSection("changes", "What training changed"),
]
"""In the order of page and navigation; a page without token rewards has the first one last."""
FOLDED = 8
"""Rows above which a table about training's changes is folded."""

UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError, pa.ArrowException)
"""Exceptions for unexpected numbers and tables in a run folder: another program may have written into it."""


def _run(config: ReportConfig, data: RunData, run_dir: Path, output: Path) -> dict[str, Any]:
    if data.others:
        print_note(
            f"{run_dir}: results of {', '.join(data.others)} are not of its recipe.yaml, but of earlier settings: a "
            "partial or interrupted run has set others; run the recipe to the end"
        )
    # Prepare tables, charts and the explorer.
    colors = views.colors_of(data)
    # Answers through the rounds are by one model.
    colors |= {answer.label: colors[data.main_model or ""] for one in data.round_answers for answer in one.answers}
    shown_sections = [section for section in SECTIONS if section.anchor != "rounds" or data.rounds]
    rewards = data.token_rewards
    scripts = ["page.js", *["curves.js"] * bool(data.logs), *["figure.js", "token_explorer.js"] * bool(rewards)]
    objectives = objectives_of(data.stages)
    shown = (
        explorer(rewards, f"{run_dir}/", objectives, pairs=config.token_pairs, tokens=config.tokens)
        if rewards
        else None
    )
    page = (
        _environment()
        .get_template("report.html.jinja")
        .render(
            run=data,
            BASE=BASE,
            FOLDED=FOLDED,
            sections=shown_sections if shown else [*shown_sections[1:], shown_sections[0]],
            title=config.title or data.name,
            colors=colors,
            results=views.results(data, colors),
            chat_results=views.chat_results(data, colors),
            rounds=views.rounds(data, colors),
            harness_results=views.harness_results(data, colors),
            stages=views.stage_rows(data.stages),
            seconds=views.busy_seconds(data.stages),
            versions=views.versions(data.stages),
            inspect_tables=views.inspect_tables(data.inspect),
            curves=views.curves(data, colors),
            ends=views.curve_ends(data),
            histograms=views.histograms(data),
            changes=changes(data.comparisons, colors),
            explorer=shown,
            beta="" if not rewards or rewards["beta"] == 1 else f"{rewards['beta']:g}\u00a0",
            version=version(),
            style=Markup(_resource("report.css") + _resource("token_explorer.css")),
            scripts=[_script(name) for name in scripts],
        )
    )
    path = output / "report.html"
    check_page(path, [])
    write_text(path, page)
    return {"bytes": path.stat().st_size, "examples": len(data.examples), "objectives": len(data.logs)}


def _script(name: str) -> dict[str, Any]:
    """Text of a script, and the hash that allows it in the page's Content-Security-Policy."""
    text = _resource(name)
    return {"text": Markup(text), "hash": base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}


def _environment() -> jinja2.Environment:
    # Escaping is enabled explicitly: the default depends on the file's suffix, which is .jinja here.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("regretless.reporting"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    # The filter `tojson` escapes characters that could end a script element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "percent": lambda share: "–" if share is None else f"{100 * share:.1f}",
        "points": lambda share: "–" if share is None else f"{100 * share:+.1f}".replace("-", "−"),
        "decimals": lambda value: "–" if value is None else f"{value:.2f}".replace("-", "−"),
        "signed": lambda value: "–" if value is None else f"{value:+.2f}".replace("-", "−"),
        "duration": lambda seconds: f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds",
        "words": views.words,
        "cut": views.cut,
        # A table has tool calls as JSON, and null for what a message lacks.
        "full_text": lambda message: full_text(read_message(message)),
        # Run folders of earlier versions may have secrets.
        "settings": lambda value: dump_text(storable(without_secrets(value))),
    }
    return environment


def _resource(name: str) -> str:
    return resources.files("regretless.reporting").joinpath("templates", name).read_text(encoding="utf-8")
