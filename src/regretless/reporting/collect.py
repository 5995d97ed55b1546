"""What a run folder holds, as plain data; a stage that did not run leaves its part empty."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from regretless.core.files import read_json
from regretless.core.run_folder import BASE, UNUSED
from regretless.core.stage_folder import MANIFEST
from regretless.core.stages import STAGES
from regretless.core.yaml_settings import read_yaml
from regretless.data.records import Text, Verdict
from regretless.data.rows import read_rows

T = TypeVar("T")

COMPARISONS = ("score_distance", "drift", "gradients", "calibration", "lengths")
SEPARATOR = " · "


@dataclass(frozen=True)
class FinishedStage:
    """One finished stage."""

    name: str
    """Its folder, relative to the run's."""
    seconds: float
    finished: str
    counts: Mapping[str, Any]
    """Its summary, flattened: `dropped · all_correct` → number."""
    settings: Any
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """Greedy Pass@1 of one model on one benchmark, as shares, with 95 % intervals."""

    benchmark: str
    label: str
    n: int
    value: float
    low: float | None
    high: float | None
    gain: float | None
    """Paired difference to the base model; None for the base itself."""
    gain_low: float | None
    gain_high: float | None
    cut: int
    """Responses that reached the longest length allowed; not correct."""
    unknown: int
    """Responses without a verdict, cut ones among them; not correct."""


@dataclass(frozen=True)
class SeedResult:
    """Pass@1 of one model sampled with several seeds, as shares: mean, standard deviation, 95 % t-interval."""

    benchmark: str
    label: str
    seeds: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ChatResult:
    """One number of one model on a chat benchmark, on the metric's own scale, with its 95 % interval."""

    benchmark: str
    label: str
    judge: str
    metric: str
    unit: str
    n: int
    """Questions it is made of."""
    value: float | None
    standard_error: float | None
    low: float | None
    high: float | None
    gain: float | None
    """Paired difference to the base model, of metrics that are means over questions."""
    gain_low: float | None
    gain_high: float | None
    failed: int
    """Judgments that failed; they are in no number."""
    cut: int
    """Answers that reached the longest length allowed; judged as they are."""
    requests: int
    """To the judge, retries included, for this model and benchmark."""
    dollars: float | None
    """What they cost, where prices are given."""


@dataclass(frozen=True)
class Change:
    """How a trained model's greedy verdicts differ from the base model's, in problems."""

    benchmark: str
    label: str
    solved: int
    broken: int
    both_correct: int
    both_wrong: int
    unknown: int
    """Problems that the verifier could not judge for one of the two."""


@dataclass(frozen=True)
class ModelAnswer:
    """What one model said to a problem."""

    label: str
    response: str
    verdict: str
    extracted: str | None


@dataclass(frozen=True)
class Example:
    """One problem, why it is shown, and what the base model and each trained model said."""

    kind: str
    benchmark: str
    prompt: Text
    answer: str | None
    answers: Sequence[ModelAnswer]


@dataclass(frozen=True)
class RunData:
    """Everything that the page shows."""

    name: str
    recipe: str | None
    stages: Sequence[FinishedStage]
    results: Sequence[Result]
    seed_results: Sequence[SeedResult]
    chat_results: Sequence[ChatResult]
    logs: Mapping[str, Sequence[Mapping[str, float]]]
    """Objective → log lines of its training."""
    inspect: Mapping[str, Any] | None
    scores: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """Objective → rewards (nats) of the chosen and of the rejected responses of held-out pairs."""
    changes: Sequence[Change]
    examples: Sequence[Example]
    token_rewards: Mapping[str, Any] | None
    comparisons: Mapping[str, Any]
    """What else the analyze stage found, by the names of its files."""


def collect(run_dir: Path, *, examples: int, seed: int) -> RunData:
    """Read a run folder. `examples`: problems of each kind (solved, broken) and benchmark to show, drawn with `seed`.

    Raises DataError, for the recipe ConfigError, when a file is there but broken.
    """
    recipe = run_dir / "recipe.yaml"
    stages = _stages(run_dir, _named(read_yaml(recipe) if recipe.is_file() else {}))
    trained = [stage.name.removeprefix("train/") for stage in stages if stage.name.startswith("train/")]
    order = [BASE, *trained]
    evaluated = _evaluated(run_dir / "evaluate", order)
    results = _json(run_dir / "evaluate" / "results.json") or {"rows": [], "seeds": []}
    return RunData(
        name=run_dir.resolve().name,
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else None,
        stages=stages,
        results=_in_order([_take(Result, row) for row in results["rows"]], order, lambda row: row.label),
        seed_results=_in_order([_take(SeedResult, row) for row in results["seeds"]], order, lambda row: row.label),
        chat_results=_in_order(
            [_take(ChatResult, row) for row in results.get("chat", [])], order, lambda row: row.label
        ),
        logs=_logs(run_dir / "train", trained),
        inspect=_json(run_dir / "inspect" / "inspect.json"),
        scores=_scores(run_dir / "train", trained),
        changes=_changes(evaluated),
        examples=list(_examples(evaluated, examples, random.Random(seed))),
        token_rewards=_json(run_dir / "analyze" / "token_rewards.json"),
        comparisons={
            name: content
            for name in COMPARISONS
            if (content := _json(run_dir / "analyze" / f"{name}.json")) is not None
        },
    )


def _json(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def _take(kind: Callable[..., T], row: Mapping[str, Any]) -> T:
    """Record of a JSON object's values; the ones it has no field for are left out."""
    return kind(**{name: row[name] for name in kind.__annotations__})


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by their joined keys, `outer · inner`."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flatten(item, f"{prefix}{key}{SEPARATOR}") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return found


def _named(recipe: Mapping[str, Any]) -> list[str]:
    """Folders of the trainings that a recipe names, in its order; a section that is none names nothing."""
    train, pretrain = (recipe.get(name) for name in ("train", "pretrain"))
    objective = train.get("objective") if isinstance(train, Mapping) else None
    objectives = [objective] if isinstance(objective, str) else objective if isinstance(objective, list) else []
    models = pretrain if isinstance(pretrain, Mapping) else {}
    return [*(f"pretrain/{name}" for name in models), *(f"train/{name}" for name in objectives)]


def _stages(run_dir: Path, named: Sequence[str]) -> list[FinishedStage]:
    """Finished stages: in the order of work, those that are alike in that of `named`, others by name.

    Not by time: the page about two equal runs would depend on how fast they were, and on what was run again.
    """
    found = []
    for path in run_dir.rglob(MANIFEST):
        name = path.parent.relative_to(run_dir).as_posix()
        # An earlier page about the same run, and what the recipe does not ask for any more.
        if name == "report" or name.startswith(f"{UNUSED}/"):
            continue
        manifest = read_json(path)
        found.append(
            FinishedStage(
                name=name,
                seconds=float(manifest["seconds"]),
                finished=str(manifest["finished"]),
                counts=flatten(manifest["summary"]),
                settings=manifest["settings"],
                versions=manifest["versions"],
            )
        )
    known = {stage.place: number for number, stage in enumerate(STAGES.values())}
    places = {name: place for place, name in enumerate(named)}
    return sorted(
        found,
        key=lambda stage: (
            known.get(stage.name.split("/")[0], len(known)),
            places.get(stage.name, len(places)),
            stage.name,
        ),
    )


def _in_order(items: Iterable[T], order: Sequence[str], label: Callable[[T], str]) -> list[T]:
    """Items by the place of their model in `order`; models that are not there come last, by name."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(items, key=lambda item: (places.get(label(item), len(places)), label(item)))


def _logs(train: Path, order: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    """Training log lines (not the evaluations and the final summary), by objective."""
    found = {}
    for path in _in_order(train.glob("*/trainer_state.json"), order, lambda path: path.parent.name):
        lines = [line for line in read_json(path)["log_history"] if "loss" in line]
        if lines:
            found[path.parent.name] = lines
    return found


def _scores(train: Path, order: Sequence[str]) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for path in _in_order(train.glob("*/pair_scores.jsonl"), order, lambda path: path.parent.name):
        rows = [row for _, row in read_rows(path) if isinstance(row, dict)]
        if rows:
            sides = ("chosen_reward", "rejected_reward")
            chosen, rejected = ([float(row[side]) for row in rows] for side in sides)
            found[path.parent.name] = (chosen, rejected)
    return found


Evaluated = dict[str, dict[str, Path]]
"""Benchmark → model label → its greedy responses."""


def _evaluated(folder: Path, order: Sequence[str]) -> Evaluated:
    found: Evaluated = {}
    for path in _in_order(sorted(folder.glob("*/*/responses.parquet")), order, lambda path: path.parts[-3]):
        found.setdefault(path.parts[-2], {})[path.parts[-3]] = path
    return {benchmark: models for benchmark, models in found.items() if BASE in models and len(models) > 1}


def _verdicts(path: Path) -> dict[str, str]:
    table = pq.read_table(path, columns=["prompt_id", "verdict"])
    verdicts = (verdict or Verdict.UNKNOWN for verdict in table["verdict"].to_pylist())
    return dict(zip(table["prompt_id"].to_pylist(), verdicts, strict=True))


def _changes(evaluated: Evaluated) -> list[Change]:
    found = []
    for benchmark, models in evaluated.items():
        verdicts = {label: _verdicts(path) for label, path in models.items()}
        base = verdicts.pop(BASE)
        for label, trained in verdicts.items():
            counts = Counter((base[key], trained[key]) for key in base.keys() & trained.keys())
            moves = [(old, new) for old in ("wrong", "correct") for new in ("correct", "wrong")]
            solved, both_wrong, both_correct, broken = (counts[move] for move in moves)
            known = solved + both_wrong + both_correct + broken
            unknown = counts.total() - known
            found.append(Change(benchmark, label, solved, broken, both_correct, both_wrong, unknown))
    return found


def _examples(evaluated: Evaluated, count: int, rng: random.Random) -> Iterator[Example]:
    """Problems that most trained models solved and the base did not, and the other way round."""
    for benchmark, models in evaluated.items():
        verdicts = {label: _verdicts(path) for label, path in models.items()}
        base = verdicts.pop(BASE)
        chosen: list[tuple[str, str]] = []
        for kind, before, after in (("solved", "wrong", "correct"), ("broken", "correct", "wrong")):
            hits = Counter(key for trained in verdicts.values() for key, verdict in trained.items() if verdict == after)
            keys = sorted(key for key, verdict in base.items() if verdict == before and hits[key])
            rng.shuffle(keys)
            chosen += [(kind, key) for key in sorted(keys, key=lambda key: -hits[key])[:count]]
        rows = {label: _rows(path, [key for _, key in chosen]) for label, path in models.items()}
        for kind, key in chosen:
            problem = rows[BASE][key]
            answers = [
                ModelAnswer(label, row["response"], row["verdict"] or Verdict.UNKNOWN, row["extracted"])
                for label, found in rows.items()
                if (row := found.get(key)) is not None
            ]
            yield Example(kind, benchmark, problem["prompt"], problem["answer"], answers)


def _rows(path: Path, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    columns = ["prompt_id", "prompt", "response", "answer", "verdict", "extracted"]
    if not keys:
        return {}
    table = pq.read_table(path, columns=columns, filters=[("prompt_id", "in", list(keys))])
    return {row["prompt_id"]: row for row in table.to_pylist()}
