"""One HTML page of a comparison, with its tables and figures also as files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from regretless.core.errors import ConfigError
from regretless.core.files import write_json, write_text
from regretless.core.paths import check_page
from regretless.core.versions import version
from regretless.studies.compared_runs import Run
from regretless.studies.comparison import Comparison
from regretless.studies.costs import cost_table, costs_of
from regretless.studies.distances import Distance, show_distances
from regretless.studies.figures import as_svg, check_formats, drawings, write_figures
from regretless.studies.runner import Failure
from regretless.studies.search import Choice
from regretless.studies.search_section import search_section
from regretless.studies.study import Study
from regretless.studies.tables import as_csv, as_html, as_latex, as_markdown

PAGE = "comparison.html"


def write_page(
    comparison: Comparison,
    output: Path,
    formats: Sequence[str] = (),
    *,
    title: str = "Comparison of runs",
    more: Mapping[str, Markup] | None = None,
) -> None:
    """Write `output`/comparison.html, which needs no other file, and its tables and figures as files beside it.

    Tables: comparison.md, .tex, .csv and .json. Figures: figures/<name>.<format> for each of `formats` (png, pdf, svg).
    more: further sections of the page, HTML by heading. Without matplotlib the page has no figures and says so.
    Raises ConfigError for an unknown format, and without matplotlib if a format is given.
    """
    check_formats(formats)
    check_page(output / PAGE, [*(f"comparison.{suffix}" for suffix in ("md", "tex", "csv", "json")), "figures"])
    missing = ""
    try:
        figures = drawings(comparison)
    except ConfigError as error:
        if formats:
            raise
        figures, missing = [], str(error)
    costs = costs_of(comparison)
    shown = {"What it took": cost_table(costs)} if costs else {}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("regretless.studies"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("comparison.html.jinja").render(
        title=title,
        comparison=comparison,
        names=_short(comparison.runs),
        links={str(run.path): report_link(run, output) for run in comparison.runs},
        tables=as_html(comparison, lambda run: report_link(run, output)),
        figures=[(drawing, Markup(as_svg(drawing))) for drawing in figures],
        differing={key: _by_value(values) for key, values in comparison.observed.differing.items()},
        missing=missing,
        more={**shown, **(more or {})},
        version=version(),
        style=Markup(_style("regretless.reporting", "report.css") + _style("regretless.studies", "comparison.css")),
    )
    write_text(output / PAGE, page)
    for suffix, text in (("md", as_markdown), ("tex", as_latex), ("csv", as_csv)):
        write_text(output / f"comparison.{suffix}", text(comparison))
    took = [
        {"model": model, "method": row.method, "variant": row.variant, **asdict(cost)} for model, row, cost in costs
    ]
    write_json(output / "comparison.json", {**comparison.as_json(), "costs": took})
    write_figures(figures, output / "figures", formats)


def write_study_page(
    study: Study,
    comparison: Comparison,
    failures: Sequence[Failure],
    choices: Sequence[Choice],
    distances: Sequence[Distance] = (),
) -> Path:
    """Write the page of a study, with its failed jobs, the trials of its search and its score distances.

    Returns the page's file.
    """
    more: dict[str, Markup] = {}
    if distances:
        more["Score distance"] = show_distances(study, comparison, distances)
    if failures:
        items = (Markup("<li>{}: {}</li>").format(failure.job.name, failure.reason) for failure in failures)
        more["Jobs that failed"] = Markup("<ul>{}</ul>").format(Markup("").join(items))
    if study.config.search is not None:
        more["Search"] = search_section(choices, study.config.search)
    output = study.folder / "comparison"
    write_page(comparison, output, study.config.figures, title=study.config.name, more=more)
    return output / PAGE


def report_link(run: Run, output: Path) -> str | None:
    """Address of the run's own report, relative to a page in `output`; None if it has none."""
    report = run.path / "report" / "report.html"
    if not report.is_file():
        return None
    return quote(Path(os.path.relpath(report.resolve(), output.resolve())).as_posix())


def _short(runs: Sequence[Run]) -> dict[str, str]:
    """The runs' folders without the folders that all of them are in."""
    parts = [run.path.parts for run in runs]
    common = 0
    while len(runs) > 1 and len({tuple(folders[: common + 1]) for folders in parts}) == 1:
        common += 1
    return {str(run.path): str(Path(*folders[common:])) for run, folders in zip(runs, parts, strict=True)}


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Runs by the value that a setting has in them."""
    groups: dict[str, list[str]] = {}
    for run, value in values.items():
        groups.setdefault(value, []).append(run)
    return groups


def _style(package: str, name: str) -> str:
    return resources.files(package).joinpath("templates", name).read_text(encoding="utf-8")
