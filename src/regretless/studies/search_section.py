"""The search of a study as a section of its page: every trial of every method."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from regretless.core.intervals import over_seeds
from regretless.studies.search import Choice
from regretless.studies.study import SearchConfig


def search_section(choices: Sequence[Choice], search: SearchConfig) -> Markup:
    """All trials as a section of the study's page: a table for each metric."""
    remarks = Markup("").join(
        Markup("<li>{}: {}</li>").format(choice.target, remark) for choice in choices for remark in choice.remarks
    )
    kinds = {"data": search.data_seeds, "training": search.seeds}
    how = "every combination" if search.trials is None else f"values chosen by the sampler {search.sampler} of Optuna"
    return Markup(
        "<p>Every method had {} trials, {}. A score is the mean ± standard deviation over {}; the best "
        "is bold and used in the study.</p>{}{}"
    ).format(
        search.budget,
        how,
        " × ".join(f"{len(seeds)} {kind} seed{'s' * (len(seeds) > 1)}" for kind, seeds in kinds.items() if seeds),
        Markup("<ul>{}</ul>").format(remarks) if remarks else "",
        Markup("").join(_tables(choices, search)),
    )


def _tables(choices: Iterable[Choice], search: SearchConfig) -> Iterator[Markup]:
    keys = list(dict.fromkeys(key for values in (search.values, *search.methods.values()) for key in values))
    titles = Markup("").join(Markup("<th>{}</th>").format(key) for key in keys)
    for metric, group in groupby(choices, lambda choice: choice.metric):
        rows = Markup("").join(row for choice in group for row in _rows(choice, keys))
        yield Markup(
            '<div class="wide"><table><thead><tr><th>method</th>{}<th class="number">{}</th></tr></thead>'
            "<tbody>{}</tbody></table></div>"
        ).format(titles, metric, rows)


def _rows(choice: Choice, keys: Sequence[str]) -> list[Markup]:
    rows = []
    for trial in choice.trials:
        if trial.score is None:
            text = Markup("{} of {} failed").format(trial.failed, trial.failed + len(trial.scores))
        else:
            spread = over_seeds(trial.scores)
            text = Markup(f"{spread.mean:.2f}" + (f" ± {spread.sd:.2f}" if spread.n > 1 else ""))
        if trial is choice.best:
            text = Markup("<strong>{}</strong>").format(text)
        shown = {key: _shown(value) for key, value in trial.values.items()}
        cells = Markup("").join(Markup("<td>{}</td>").format(shown.get(key, "")) for key in keys)
        row = Markup('<tr><th>{}</th>{}<td class="number">{}</td></tr>')
        rows.append(row.format(choice.target, cells, text))
    return rows


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
