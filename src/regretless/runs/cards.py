"""Cards of a run's trained models, with what later stages know: who wrote the responses, results, the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from regretless.core.files import read_json
from regretless.core.ranks import is_first_process
from regretless.core.terminal import console
from regretless.evaluation.results import PASS_AT_1
from regretless.runs.stages.stage import PAIRS, Run
from regretless.training.model_card import CARD, FACTS, Facts, Result, named, read_facts, update_card
from regretless.workflow.run_folder import substitute
from regretless.workflow.stage_folder import MANIFEST


def refresh_cards(run: Run, changes: Callable[[str, Facts], Mapping[str, Any]]) -> None:
    """Write the card of every model that a run has trained again, with what a stage has just added to the run.

    changes: those of a method's facts. Nothing of other stages: their files may be about an earlier training. A card
    that somebody edited stays, and that is printed.
    """
    if run.recipe.train is None or not is_first_process():
        return
    for method in run.recipe.train.objectives:
        model = run.path("train", method)
        facts = read_facts(model)
        if facts is not None and not update_card(model, **changes(method, facts)):
            console.print(f"{model / CARD}: was edited by hand, and stays; {FACTS} has the facts")


def data_of(run: Run) -> dict[str, Any]:
    """Names and counts of the run's data."""
    recipe = run.recipe
    facts: dict[str, Any] = {}
    sources = [source.dataset for source in (recipe.prompts or {}).values()]
    if recipe.pairs is not None:
        sources.append(recipe.pairs.dataset)
    if names := [named(str(substitute(source, run.root)))[0] for source in sources]:
        facts["sources"] = ", ".join(dict.fromkeys(names))
    if authors := _authors(run):
        facts["behavior policy"] = ", ".join(authors)
    for name, key in (("pair", "pairs"), ("mask", "masked")):
        manifest = run.path(name, MANIFEST)
        count = read_json(manifest)["summary"].get(key) if manifest.is_file() else None
        if isinstance(count, int):
            facts["pairs made" if name == "pair" else "masked pairs added"] = count
    return facts


def _authors(run: Run) -> list[str]:
    """Names of the models that wrote the responses of the pairs, where the pairs say it."""
    names: set[str] = set()
    for path in (run.path("pair", PAIRS), run.path("mask", PAIRS)):
        if not path.is_file():
            continue
        try:
            with pq.ParquetFile(path) as file:
                columns = [name for name in AUTHORS if name in file.schema_arrow.names]
                for column in file.read(columns).columns:
                    names |= {str(name) for name in column.unique().to_pylist() if name is not None}
        except (pa.ArrowException, OSError):
            continue  # whoever reads the pairs says what is wrong with them
    return sorted({named(name)[0] for name in names})


AUTHORS = ("chosen_model", "rejected_model")


def results_of(run: Run, label: str) -> Sequence[Result]:
    """The results of one model in a run's `results.json`, as a card shows them; empty before `evaluate`."""
    file, evaluate = run.path("evaluate", "results.json"), run.recipe.evaluate
    if not file.is_file() or evaluate is None:
        return ()
    results = read_json(file)
    datasets = {name: benchmark.source.dataset for name, benchmark in evaluate.benchmarks.items()}

    def dataset(benchmark: str) -> str | None:
        name, on_hub = named(str(substitute(datasets.get(benchmark, ""), run.root)))
        return name if on_hub else None

    # Each kind of result: its metric, the key of its value, and the factor that makes the value a share in %.
    kinds: Mapping[str, tuple[Callable[[Mapping[str, Any]], str], str, float]] = {
        "rows": (lambda row: f"{PASS_AT_1}, greedy", "value", 100),
        "seeds": (lambda row: f"{PASS_AT_1}, mean of {row['seeds']} sampled passes", "mean", 100),
        "chat": (lambda row: f"{row['metric']} (judge: {row['judge']})", "value", 1),
        "harness": (lambda row: f"{row['metric']} (lm-evaluation-harness)", "value", 1),
    }
    return tuple(
        Result(
            row["benchmark"],
            metric(row),
            row.get("n"),
            scale * row[key],
            _bounds(row, "low", "high", scale),
            None if row.get("gain") is None else scale * row["gain"],
            _bounds(row, "gain_low", "gain_high", scale),
            dataset(row["benchmark"]) if kind in ("rows", "seeds") else None,
        )
        for kind, (metric, key, scale) in kinds.items()
        for row in results.get(kind, ())
        if row["label"] == label and row[key] is not None
    )


def _bounds(row: Mapping[str, Any], low: str, high: str, scale: float) -> tuple[float, float] | None:
    if row.get(low) is None or row.get(high) is None:
        return None
    return scale * row[low], scale * row[high]
