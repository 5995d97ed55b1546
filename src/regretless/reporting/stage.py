"""The report: one HTML page that shows what a run did, with everything that it needs inside."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup
from pydantic import Field

from regretless import __version__
from regretless.config import Section
from regretless.reporting import views
from regretless.reporting.changes import changes
from regretless.reporting.collect import collect
from regretless.store import write_text

TEXT_LIMIT = 6000
"""Characters of a prompt or response that the page shows."""


class ReportConfig(Section):
    """What the page shows."""

    title: str | None = None
    """Heading; the name of the run folder unless given."""
    examples: int = Field(1, ge=0)
    """Problems solved and problems broken by training to show, of each benchmark."""
    token_pairs: int = Field(4, ge=0)
    """Pairs shown token by token, of those that were analyzed."""
    tokens: int = Field(400, ge=1)
    """Tokens shown of each of their responses."""
    seed: int = 0
    """Seed of the choice of examples."""


def run(config: ReportConfig, run_dir: Path, output: Path) -> dict[str, Any]:
    """Write `output`/report.html about the run in `run_dir`.

    A part whose stage did not run says so. Texts of models and data are escaped, and the page's policy lets no script
    but its own run. Raises DataError when a file of the run is broken.
    """
    data = collect(run_dir, examples=config.examples, seed=config.seed)
    colors = views.colors_of(data)
    rewards = data.token_rewards
    script = _resource("report.js")
    page = (
        _environment()
        .get_template("report.html.jinja")
        .render(
            run=data,
            folder=f"{run_dir}/",
            title=config.title or data.name,
            colors=colors,
            results=views.results(data, colors),
            chat_results=views.chat_results(data, colors),
            stages=views.stage_rows(data.stages),
            versions=views.versions(data.stages),
            inspect_tables=views.inspect_tables(data.inspect),
            curves=views.curves(data, colors),
            ends=views.curve_ends(data),
            histograms=views.histograms(data),
            changes=changes(data.comparisons, colors),
            tokens=rewards and views.token_rewards(rewards, pairs=config.token_pairs, tokens=config.tokens),
            beta="" if not rewards or rewards["beta"] == 1 else f"{rewards['beta']:g}\u00a0",
            version=__version__,
            style=Markup(_resource("report.css")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )
    path = output / "report.html"
    write_text(path, page)
    return {"bytes": path.stat().st_size, "examples": len(data.examples), "objectives": len(data.logs)}


def _environment() -> jinja2.Environment:
    # Escaping is on for every template: the default goes by the file's suffix, which is .jinja here.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("regretless.reporting"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "percent": lambda share: "–" if share is None else f"{100 * share:.1f}",
        "points": lambda share: "–" if share is None else f"{100 * share:+.1f}".replace("-", "−"),
        "decimals": lambda value: "–" if value is None else f"{value:.2f}".replace("-", "−"),
        "signed": lambda value: "–" if value is None else f"{value:+.2f}".replace("-", "−"),
        "duration": lambda seconds: f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds",
        "words": views.words,
        "cut": _cut,
        "settings": lambda value: yaml.safe_dump(value, sort_keys=False, allow_unicode=True),
    }
    return environment


def _resource(name: str) -> str:
    return resources.files("regretless.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def _cut(text: str, limit: int = TEXT_LIMIT) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"
