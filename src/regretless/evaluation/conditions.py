"""How models were evaluated: settings and problems, which have to agree where two results are compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regretless.core.errors import DataError
from regretless.core.files import fingerprint, path_fingerprint, read_json
from regretless.workflow.stage_folder import MANIFEST

SAMPLES = "samples"
"""Folder of the answers before verification, among those of the models."""
GREEDY = "greedy"
"""Name of the pass without randomness; that of a sampled one is `seed-` and its seed."""
NOT_GRADING = {"workers"}
"""Settings of verification that change its speed only."""
NOT_DECODING = {"batch_size", "server", "vllm", "seed"}
"""Settings of sampling that change where answers are made, and the seed: greedy decoding has none, and that of a
sampled pass is in its name."""
NOT_JUDGING = {"server", "replies", "when_spent", "bootstrap", "seed", "benchmark", "judge", "questions", "limit"}
"""Settings of a chat benchmark that change no judgment, that name its column, or whose content is compared."""
JUDGING_FILES = ("judge_prompt", "references", "baseline", "gamed_baselines")
"""Settings of a chat benchmark that may name a file: its content counts, wherever it is."""
NOT_ASKING = {"model", "tasks", "device"}
"""Settings of the harness that change no problem and no score; `tasks` are columns."""
ANSWERING = ("benchmark", "questions", "limit", "template", "max_new_tokens", "stop", "seed")
"""Settings that the answers to a chat benchmark depend on."""
DRAWING = {f"evaluate.{name}" for name in ("temperature", "top_p", "top_k")}
"""Settings in which a sampled pass differs from the greedy one."""


@dataclass(frozen=True)
class Conditions:
    """How one model was evaluated on one benchmark."""

    where: str
    """The model, as messages name it."""
    settings: Mapping[str, str]
    """How it was decoded and graded, or judged, by keys of the recipe."""
    problems: Mapping[str, str]
    """Problem → hash of its content (empty where that is not known)."""


AskedFor = Collection[tuple[str, str]] | None
"""Models and benchmarks whose results count, by label; None for all that are there, of other recipes too."""


def results_in(root: Path, name: str, asked_for: AskedFor = None) -> dict[tuple[str, str], Any]:
    """Contents of the files of that name, by benchmark and model. root: the folder of all models' evaluations.

    Raises DataError for a file that cannot be read.
    """
    places = {path.parts[-3:-1]: path for path in sorted(root.glob(f"*/*/{name}"))}
    wanted = {place: path for place, path in places.items() if asked_for is None or place in asked_for}
    return {(benchmark, label): read_json(path) for (label, benchmark), path in wanted.items()}


def of_pass(root: Path, label: str, benchmark: str, where: str, name: str = GREEDY) -> Conditions:
    """Conditions of one pass over a benchmark with gold answers. root: the folder of all models' evaluations.

    What a missing manifest would say is left out. Raises DataError for a file that cannot be read.
    """
    folder = root / label / benchmark / ("" if name == GREEDY else name)
    graded = _settings_in(folder)
    settings = {f"verify.{key}": str(value) for key, value in graded.items() if key not in NOT_GRADING}
    return Conditions(
        where, settings | _decoding(root / SAMPLES / label / benchmark / name), _problems_with_gold_answers(folder)
    )


def of_chat(
    root: Path, label: str, benchmark: str, where: str, result: Mapping[str, Any], own_files: bool = False
) -> Conditions:
    """Conditions of a chat benchmark.

    root: the folder of all models' evaluations. result: what the evaluation has written. own_files: whether the files
    of the benchmark are made with the run's seed, like its problems; then only the judge's prompt is compared. What a
    missing manifest would say is left out.
    """
    manifest = _settings_in(root / label / benchmark)
    turns = _first_turns(root / SAMPLES / label, manifest) if manifest else []

    def text(key: str, value: Any) -> str:
        if key not in JUDGING_FILES or not isinstance(value, str):
            return str(value)
        if own_files and key != "judge_prompt":
            return "a file"
        if key in result.get("files", {}):
            return str(result["files"][key])
        # A result of an earlier version: the file as it is now.
        path = Path(value).expanduser()
        return path_fingerprint(path) if path.is_file() else value

    judging = {
        f"evaluate.chat.{benchmark}.{key}": text(key, value)
        for key, value in manifest.items()
        if key not in NOT_JUDGING
    }
    asked = [str(_settings_in(turn)["prompts"]) for turn in turns]
    return Conditions(
        where,
        judging | (_decoding(turns[0]) if turns else {}),
        {"questions": fingerprint([result["questions"], *asked])},
    )


def of_harness(root: Path, label: str, folder: str, where: str, problems: Mapping[str, str]) -> Conditions:
    """Conditions of the tasks of lm-evaluation-harness, whose results are in `root`/`label`/`folder`."""
    asked = {key: value for key, value in _settings_in(root / label / folder).items() if key not in NOT_ASKING}
    return Conditions(where, {f"evaluate.harness_settings.{key}": str(value) for key, value in asked.items()}, problems)


def _settings_in(folder: Path) -> Mapping[str, Any]:
    """The settings with which a unit was finished; empty without a manifest."""
    manifest = folder / MANIFEST
    settings: Mapping[str, Any] = read_json(manifest)["settings"] if manifest.is_file() else {}
    return settings


def _decoding(samples: Path) -> dict[str, str]:
    sampling = _settings_in(samples).get("sampling", {})
    # Versions without the setting stopped nowhere.
    settings = {"stop": [], **sampling} if sampling else {}
    return {f"evaluate.{key}": str(value) for key, value in settings.items() if key not in NOT_DECODING}


def _problems_with_gold_answers(folder: Path) -> dict[str, str]:
    file = folder / "responses.parquet"
    if not file.is_file():
        return dict.fromkeys(read_json(folder / "result.json")["verdicts"], "")

    # The help of commands needs names in this file, and no tables.
    import pyarrow.parquet as pq

    rows = pq.read_table(file, columns=["prompt_id", "prompt", "answer"]).to_pylist()
    return {row["prompt_id"]: fingerprint([row["prompt"], row["answer"]]) for row in rows}


def _first_turns(samples: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """Folders of the answers to the first prompts, one for each temperature."""
    return sorted(file.parent for file in samples.glob(f"{answers_folder(manifest)}/turn-1-*/{MANIFEST}"))


def answers_folder(settings: Mapping[str, Any]) -> str:
    """Name of the folder of a chat benchmark's answers: benchmarks that agree in `ANSWERING` share them."""
    asked = {name: settings.get(name) for name in ANSWERING}
    if not asked["stop"]:
        del asked["stop"]  # versions without this setting named their folders so
    return f"{asked['benchmark']}-{fingerprint(asked)[:8]}"


def differing_settings(group: Sequence[Conditions]) -> list[str]:
    """Settings in which some differ, each with its values; a setting that only some know is none of them."""
    differences = []
    for key in dict.fromkeys(key for conditions in group for key in conditions.settings):
        values: dict[str, list[str]] = {}
        for conditions in group:
            if key in conditions.settings:
                values.setdefault(conditions.settings[key], []).append(conditions.where)
        if len(values) > 1:
            differences.append(f"{key} is {listed(values)}")
    return differences


def other_problems(group: Sequence[Conditions]) -> str | None:
    """How the problems of the first and of another one differ; None if all answered the same."""
    first = group[0]
    for other in group[1:]:
        if other.problems == first.problems:
            continue
        alone = [len(a.problems.keys() - b.problems.keys()) for a, b in ((first, other), (other, first))]
        common = other.problems.keys() & first.problems.keys()
        changed = [
            key for key in common if "" not in (pair := {other.problems[key], first.problems[key]}) and len(pair) > 1
        ]
        if any(alone) or changed:
            return (
                f"{first.where} and {other.where} answered different problems: {alone[0]} only in the first, "
                f"{alone[1]} only in the second, {len(changed)} with other text or gold answer"
            )
    return None


def passes_alike(
    evaluate_dir: Path, label: str, benchmark: str, current: Sequence[int]
) -> tuple[list[str], str | None]:
    """Names of the sampled passes that one mean can be taken over, and a note about others, if there are any.

    They are graded as the greedy pass, on the same problems, and differ from it only in how tokens are drawn.
    """
    folder = evaluate_dir / label / benchmark
    names = [path.parent.name for path in sorted(folder.glob("seed-*/result.json"))]
    passes = {name: of_pass(evaluate_dir, label, benchmark, name, name) for name in names}
    if not passes:
        return [], None
    greedy = of_pass(evaluate_dir, label, benchmark, GREEDY)
    undrawn = {key: value for key, value in greedy.settings.items() if key not in DRAWING}
    greedy = replace(greedy, settings=undrawn)
    fitting = [name for name, conditions in passes.items() if _is_alike(greedy, conditions)]
    asked = [name for name in (f"seed-{seed}" for seed in current) if name in fitting]
    model = asked[0] if asked else max(fitting, key=lambda name: finished_at(folder / name), default=None)
    kept = [name for name in fitting if model is not None and _is_alike(passes[model], passes[name])]
    others = [name for name in names if name not in kept]
    if not others:
        return kept, None
    like = passes[model] if model is not None else greedy
    reasons = differing_settings([like, passes[others[0]]]) or [str(other_problems([like, passes[others[0]]]))]
    shown = "; ".join(map(without_section, reasons))
    return kept, f"{benchmark}: {', '.join(others)} of {label} not in the mean over seeds: {shown}"


def _is_alike(first: Conditions, second: Conditions) -> bool:
    return not differing_settings([first, second]) and other_problems([first, second]) is None


def without_section(text: str) -> str:
    """A difference with the setting's name as in the command `evaluate`; in a recipe it is in a section."""
    return text.removeprefix("evaluate.").removeprefix("verify.")


def finished_at(folder: Path) -> str:
    """When a unit was finished, as a text that sorts by time; empty without a manifest."""
    manifest = folder / MANIFEST
    return str(read_json(manifest)["finished"]) if manifest.is_file() else ""


def listed(values: Mapping[str, Sequence[str]]) -> str:
    """Values with the places that have them: the first one of each, and the number of others."""
    return "; ".join(
        f"{value} in {places[0]}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")
        for value, places in values.items()
    )


def check_alike(benchmark: str, first: Conditions, second: Conditions, folder: Path) -> None:
    """Raise DataError unless two models were evaluated on the same problems in the same way.

    folder: the results of the second, which a user may move away.
    """
    advice = f"evaluate both again with the same command, or move {folder} away"
    if problem := other_problems([first, second]):
        raise DataError(f"{benchmark}: {problem}; {advice}")
    if differing := differing_settings([first, second]):
        shown = "\n  ".join(map(without_section, differing))
        raise DataError(
            f"{benchmark}: {first.where} and {second.where} were not answered and graded alike:\n  {shown}\n{advice}"
        )
