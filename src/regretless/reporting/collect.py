"""Content of a run folder as plain data; the part of a stage that did not run is empty."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from regretless.core.errors import ConfigError
from regretless.core.files import read_json
from regretless.core.yaml_settings import read_yaml
from regretless.data.columns import Text, Verdict
from regretless.data.rounds_table import folder_of, measured_rounds
from regretless.data.rows import read_rows
from regretless.modeling.training_folder import PAIR_SCORES, STATE
from regretless.workflow.run_folder import BASE, manifests
from regretless.workflow.stage_folder import UNUSED

T = TypeVar("T")

COMPARISONS = ("score_distance", "drift", "gradients", "calibration", "lengths", "regret_calibration")
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


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """A measure of one model on one benchmark, with a 95 % interval, as `results.json` has it."""

    benchmark: str
    label: str
    low: float | None
    high: float | None


R = TypeVar("R", bound=ModelResult)


@dataclass(frozen=True, kw_only=True)
class ComparedResult(ModelResult):
    """A measure of which there is a paired difference from the base model."""

    n: int
    """Number of problems or questions behind it."""
    gain: float | None
    """The difference; None for the base itself, and where the metric is no mean over problems."""
    gain_low: float | None
    gain_high: float | None


@dataclass(frozen=True, kw_only=True)
class GreedyResult(ComparedResult):
    """Greedy Pass@1 of one model on one benchmark, as shares."""

    value: float
    cut: int
    """Responses truncated at the length limit; not correct."""
    empty: int = 0
    """Responses without any text; not correct."""
    unknown: int
    """Responses without a verdict, including truncated ones; not correct."""


@dataclass(frozen=True, kw_only=True)
class SeedResult(ModelResult):
    """Pass@1 of one model sampled with several seeds, as shares: mean, standard deviation, 95 % t-interval."""

    seeds: int
    mean: float
    sd: float | None


@dataclass(frozen=True, kw_only=True)
class ChatResult(ComparedResult):
    """One metric of one model on a chat benchmark, on the metric's own scale."""

    judge: str
    metric: str
    unit: str
    value: float | None
    standard_error: float | None
    failed: int
    """Failed judgments; no metric includes them."""
    cut: int
    """Answers truncated at the length limit; judged as they are."""
    empty: int = 0
    """Answers without any text; judged as they are."""
    requests: int
    """Requests to the judge, retries included, for this model and benchmark."""
    dollars: float | None
    """Their cost, if prices are set."""


@dataclass(frozen=True, kw_only=True)
class HarnessResult(ComparedResult):
    """One metric of one model on a task of lm-evaluation-harness, on the metric's own scale."""

    metric: str
    value: float


@dataclass(frozen=True)
class Change:
    """Changes of a trained model's greedy verdicts relative to the base model, in problems."""

    benchmark: str
    label: str
    solved: int
    broken: int
    both_correct: int
    both_wrong: int
    unknown: int
    """Problems without a verdict for one of the two."""


@dataclass(frozen=True)
class ModelAnswer:
    """One model's response to a problem."""

    label: str
    response: str
    verdict: str
    extracted: str | None


@dataclass(frozen=True)
class Example:
    """One problem, why it is on the page, and the responses of the base model and each trained model."""

    kind: str
    benchmark: str
    prompt: Text
    answer: str | None
    answers: Sequence[ModelAnswer]


@dataclass(frozen=True)
class RunData:
    """All content of the page."""

    name: str
    recipe: Mapping[str, Any]
    """Its settings; empty without a recipe.yaml."""
    others: Sequence[str]
    """Stages whose results are of other settings than the recipe."""
    main_model: str | None
    """The model that the page is about: the first trained one with a regret term, else the first; None without one."""
    stages: Sequence[FinishedStage]
    results: Sequence[GreedyResult]
    seed_results: Sequence[SeedResult]
    passes_left_out: Sequence[str]
    """Notes on sampled passes that are in no mean over seeds, and why."""
    contaminated: Sequence[str]
    """Notes on benchmarks whose problems stand in the training prompts."""
    chat_results: Sequence[ChatResult]
    harness_results: Sequence[HarnessResult]
    logs: Mapping[str, Sequence[Mapping[str, float]]]
    """Objective → log lines of its training (`training_log`)."""
    inspect: Mapping[str, Any] | None
    scores: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """Objective → rewards (nats) of the chosen and of the rejected responses of held-out pairs."""
    changes: Sequence[Change]
    examples: Sequence[Example]
    token_rewards: Mapping[str, Any] | None
    comparisons: Mapping[str, Any]
    """Further results of the analyze stage, by the names of their files."""
    base: str | None = None
    """What the base model is, where it is an adapter on another model."""
    rounds: Sequence[Mapping[str, Any]] = ()
    """What was measured of each round and method, in the order of `rounds/rounds.jsonl`."""
    round_answers: Sequence[Example] = ()
    """Answers of the main model's rounds to a prompt that all of them asked; empty if there is none."""


def collect(
    run_dir: Path,
    *,
    examples: int,
    seed: int,
    places: Sequence[str] = (),
    others: Sequence[str] = (),
    left_out: Sequence[Path] = (),
) -> RunData:
    """Read a run folder, or the folder of a single training.

    examples: problems of each kind (solved, broken; where there is none of both, unchanged) and benchmark, selected at
    random with `seed`. places: the stages' folders in their order. others: stages whose results are of other settings.
    left_out: folders in it that are not read.

    Raises DataError if a file is broken (ConfigError for the recipe).
    """
    file = run_dir / "recipe.yaml"
    recipe = read_yaml(file) if file.is_file() else {}
    # Also what an earlier recipe asked for and has been set aside, and an earlier page about the same run.
    unread = [run_dir / UNUSED, run_dir / "report", *left_out]

    def is_read(path: Path) -> bool:
        return not any(map(path.is_relative_to, unread))

    def files(pattern: str) -> list[Path]:
        return sorted(filter(is_read, run_dir.glob(pattern)))

    stages = _stages(run_dir, filter(is_read, manifests(run_dir)), places, _named(recipe))
    trained = [stage.name.removeprefix("train/") for stage in stages if stage.name.startswith("train/")]
    folders = [run_dir] if is_training(run_dir) else files("train/*")
    order = [BASE, *trained]
    main = main_model(trained, objectives_of(stages))

    def logged(name: str) -> list[dict[str, Any]]:
        return _lines(run_dir) if is_training(run_dir) else training_log(run_dir, name)

    # Results and responses of the evaluation; a stage that did not run leaves its part empty.
    evaluated = _evaluated(files("evaluate/*/*/responses.parquet"), order)
    results = _json(run_dir / "evaluate" / "results.json") or {}
    for kind in ("rows", "seeds", "chat", "harness"):
        rows = results.get(kind, [])
        results[kind] = [row for row in rows if is_read(run_dir / "evaluate" / row["label"] / row["benchmark"])]
    return RunData(
        name=str(recipe.get("name") or run_dir.resolve().name),
        recipe=recipe,
        others=others,
        main_model=main,
        stages=stages,
        results=_records(GreedyResult, results["rows"], order),
        seed_results=_records(SeedResult, results["seeds"], order),
        passes_left_out=results.get("left_out", []),
        contaminated=results.get("contaminated", []),
        chat_results=_records(ChatResult, results.get("chat", []), order),
        harness_results=_records(HarnessResult, results.get("harness", []), order),
        logs={name: log for name in _in_order(map(_own_name, folders), trained, str) if (log := logged(name))},
        inspect=_json(run_dir / "inspect" / "inspect.json"),
        scores=_scores(folders, trained),
        changes=_changes(evaluated),
        examples=list(_examples(evaluated, examples, random.Random(seed), main)),
        token_rewards=_json(run_dir / "analyze" / "token_rewards.json"),
        comparisons={
            name: content
            for name in COMPARISONS
            if (content := _json(run_dir / "analyze" / f"{name}.json")) is not None
        },
        base=results.get("base"),
        rounds=(rounds := measured_rounds(run_dir)),
        round_answers=_round_answers(run_dir, main, max((row["round"] for row in rounds), default=0)),
    )


def is_training(folder: Path) -> bool:
    """True for the folder that a training's command has written, or a trainer in Python."""
    return (folder / STATE).is_file()


def objectives_of(stages: Iterable[FinishedStage]) -> dict[str, str]:
    """Objective of each trained model, by the model's name."""
    return {
        stage.name.removeprefix("train/"): str(stage.settings["objective"])
        for stage in stages
        if stage.name.startswith("train/") and "objective" in stage.settings
    }


def measure_of(model: str, objectives: Mapping[str, str]) -> str:
    """Value of a token under the model's objective (`Objective.token_value`); the reward for an unusable objective."""
    from regretless.objectives import OBJECTIVES  # loads torch

    try:
        return OBJECTIVES.find(objectives.get(model, model)).token_value
    except ConfigError:  # a plug-in that is not installed any more
        return "reward"


def main_model(models: Sequence[str], objectives: Mapping[str, str]) -> str | None:
    """The first model whose objective has a regret term, else the first; None without models."""
    return min(models, key=lambda model: measure_of(model, objectives) == "reward", default=None)


def _round_answers(run: Path, method: str | None, count: int) -> list[Example]:
    """The first answers to the prompt whose share of right responses rose most from the first round to the last."""
    places = [run / folder_of(number, method) for number in range(1, count + 1)]
    files = [path for place in places if (path := place / "verify" / "responses.parquet").is_file()]
    if len(files) < max(2, count):
        return []
    shares = [_shares(file) for file in files]
    asked = sorted(set.intersection(*map(set, shares)))
    if not asked:
        return []
    key = max(asked, key=lambda prompt: shares[-1][prompt] - shares[0][prompt])
    rows = [_rows(file, [key])[key] for file in files]
    answers = [
        ModelAnswer(f"round {number}", row["response"], row["verdict"] or Verdict.UNKNOWN, row["extracted"])
        for number, row in enumerate(rows, 1)
    ]
    return [Example("rounds", str(method), rows[0]["prompt"], rows[0]["answer"], answers)]


def _shares(path: Path) -> dict[str, float]:
    """Share of right responses to each prompt."""
    table = pq.read_table(path, columns=["prompt_id", "verdict"])
    prompts, verdicts = table["prompt_id"].to_pylist(), table["verdict"].to_pylist()
    right = Counter(prompt for prompt, verdict in zip(prompts, verdicts, strict=True) if verdict == Verdict.CORRECT)
    return {prompt: right[prompt] / number for prompt, number in Counter(prompts).items()}


def _json(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def _records(kind: type[R], rows: Iterable[Mapping[str, Any]], order: Sequence[str]) -> list[R]:
    """Records of JSON objects in the order of their models; values without a field are dropped."""
    names = {field.name for field in fields(kind)}
    records = [kind(**{name: value for name, value in row.items() if name in names}) for row in rows]
    return _in_order(records, order, lambda record: record.label)


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings, keyed by their joined keys, `outer · inner`."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}{key}{SEPARATOR}") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return flat


def _named(recipe: Mapping[str, Any]) -> list[str]:
    """Folders of the trainings that a recipe names, in its order; a malformed section names nothing."""
    train, pretrain = (recipe.get(name) for name in ("train", "pretrain"))
    objective = train.get("objective") if isinstance(train, Mapping) else None
    objectives = [objective] if isinstance(objective, str) else objective if isinstance(objective, list) else []
    models = pretrain if isinstance(pretrain, Mapping) else {}
    return [*(f"pretrain/{name}" for name in models), *(f"train/{name}" for name in objectives)]


def _stages(run_dir: Path, found: Iterable[Path], places: Sequence[str], named: Sequence[str]) -> list[FinishedStage]:
    """Finished stages, by their manifests, in the order of `places`; trainings in the order of `named`, others by name.

    Not by time: then the pages of two equal runs would depend on speed, and on which stages ran again.
    """
    stages = []
    for path in found:
        name = path.parent.relative_to(run_dir).as_posix() if path.parent != run_dir else f"train/{_own_name(run_dir)}"
        manifest = read_json(path)
        stages.append(
            FinishedStage(
                name=name,
                seconds=float(manifest["seconds"]),
                finished=str(manifest["finished"]),
                counts=flatten(manifest["summary"]),
                settings=manifest["settings"],
                versions=manifest["versions"],
            )
        )
    known = {place: number for number, place in enumerate(places)}
    positions = {name: position for position, name in enumerate(named)}
    return sorted(
        stages,
        key=lambda stage: (
            known.get(stage.name.split("/")[0], len(known)),
            positions.get(stage.name, len(positions)),
            stage.name,
        ),
    )


def _own_name(folder: Path) -> str:
    return folder.resolve().name


def _in_order(items: Iterable[T], order: Sequence[str], label: Callable[[T], str]) -> list[T]:
    """Items in the order of their models in `order`; models that are not listed come last, by name."""
    positions = {name: position for position, name in enumerate(order)}
    return sorted(items, key=lambda item: (positions.get(label(item), len(positions)), label(item)))


def training_log(run: Path, method: str) -> list[dict[str, Any]]:
    """Log lines of a method's training (not the evaluations and the final summary); with rounds, those of all rounds.

    `step` counts over all rounds, `round` is the line's, and `begin` the last step before that round.
    """
    rounds, lines, begin = [row for row in measured_rounds(run) if row["method"] == method], [], 0
    for row in rounds:
        folder = run / folder_of(row["round"], method) / "train" / method
        lines += _lines(folder, row["round"], begin)
        begin += row["steps"]
    return lines if rounds else _lines(run / "train" / method)


def _lines(folder: Path, number: int = 1, begin: int = 0) -> list[dict[str, Any]]:
    """Log lines of the training in a folder, which is that of a round, or the only one."""
    lines = [line for line in (_json(folder / STATE) or {}).get("log_history", ()) if "loss" in line]
    return [{**line, "step": begin + line["step"], "round": number, "begin": begin} for line in lines]


def _scores(folders: Iterable[Path], order: Sequence[str]) -> dict[str, tuple[list[float], list[float]]]:
    scores = {}
    for folder in _in_order(folders, order, _own_name):
        path = folder / PAIR_SCORES
        rows = [row for _, row in read_rows(path) if isinstance(row, dict)] if path.is_file() else []
        if rows:
            sides = ("chosen_reward", "rejected_reward")
            chosen, rejected = ([float(row[side]) for row in rows] for side in sides)
            scores[_own_name(folder)] = (chosen, rejected)
    return scores


Evaluated = dict[str, dict[str, Path]]
"""Benchmark → model label → its greedy responses."""


def _evaluated(files: Iterable[Path], order: Sequence[str]) -> Evaluated:
    evaluated: Evaluated = {}
    for path in _in_order(files, order, lambda path: path.parts[-3]):
        evaluated.setdefault(path.parts[-2], {})[path.parts[-3]] = path
    return {benchmark: models for benchmark, models in evaluated.items() if BASE in models and len(models) > 1}


def _verdicts(path: Path) -> dict[str, str]:
    table = pq.read_table(path, columns=["prompt_id", "verdict"])
    verdicts = (verdict or Verdict.UNKNOWN for verdict in table["verdict"].to_pylist())
    return dict(zip(table["prompt_id"].to_pylist(), verdicts, strict=True))


def _changes(evaluated: Evaluated) -> list[Change]:
    changes = []
    for benchmark, models in evaluated.items():
        verdicts = {label: _verdicts(path) for label, path in models.items()}
        base = verdicts.pop(BASE)
        for label, trained in verdicts.items():
            counts = Counter((base[key], trained[key]) for key in base.keys() & trained.keys())
            moves = [(old, new) for old in ("wrong", "correct") for new in ("correct", "wrong")]
            solved, both_wrong, both_correct, broken = (counts[move] for move in moves)
            judged = solved + both_wrong + both_correct + broken
            unknown = counts.total() - judged
            changes.append(Change(benchmark, label, solved, broken, both_correct, both_wrong, unknown))
    return changes


def _examples(evaluated: Evaluated, count: int, rng: random.Random, main: str | None) -> Iterator[Example]:
    """Problems that most trained models solved and the base model did not, and vice versa; those of `main` first.

    Where training changed no verdict, any problems: the answers may have changed.
    """
    for benchmark, models in evaluated.items():
        verdicts = {label: _verdicts(path) for label, path in models.items()}
        base = verdicts.pop(BASE)
        chosen: list[tuple[str, str]] = []
        for kind, before, after in (("solved", "wrong", "correct"), ("broken", "correct", "wrong")):
            hits = Counter(key for trained in verdicts.values() for key, verdict in trained.items() if verdict == after)
            keys = sorted(key for key, verdict in base.items() if verdict == before and hits[key])
            rng.shuffle(keys)
            shown = verdicts.get(main or "", {})
            keys.sort(key=lambda key: (shown.get(key) != after, -hits[key]))
            chosen += [(kind, key) for key in keys[:count]]
        if not chosen:
            keys = sorted(set(base).intersection(*verdicts.values()))
            chosen = [("unchanged", key) for key in rng.sample(keys, min(count, len(keys)))]
        rows = {label: _rows(path, [key for _, key in chosen]) for label, path in models.items()}
        for kind, key in chosen:
            problem = rows[BASE][key]
            answers = [
                ModelAnswer(label, row["response"], row["verdict"] or Verdict.UNKNOWN, row["extracted"])
                for label, responses in rows.items()
                if (row := responses.get(key)) is not None
            ]
            yield Example(kind, benchmark, problem["prompt"], problem["answer"], answers)


def _rows(path: Path, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    columns = ["prompt_id", "prompt", "response", "answer", "verdict", "extracted"]
    if not keys:
        return {}
    table = pq.read_table(path, columns=columns, filters=[("prompt_id", "in", list(keys))])
    return {row["prompt_id"]: row for row in table.to_pylist()}
