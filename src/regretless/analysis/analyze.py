"""The analyze stage: changes through training, in the models' scores of fixed tokens and in their own responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field, field_validator

from regretless.analysis import token_rewards
from regretless.analysis.calibration import OBSERVED, calibration
from regretless.analysis.drift import evenly, logged, point
from regretless.analysis.gradients import gradient_places
from regretless.analysis.lengths import response_lengths
from regretless.analysis.regret_calibration import read_measured, readings, regret_calibration, unit_rows
from regretless.analysis.score_distance import score_distances
from regretless.analysis.subset import Sample, Scores, whole_prompts
from regretless.analysis.tables import show_table, with_error
from regretless.analysis.token_rewards import TokenRewardsConfig
from regretless.core.files import write_json
from regretless.core.paths import PathSetting
from regretless.core.terminal import console, print_note
from regretless.data.codec import codec_of
from regretless.data.columns import SIDES, Pair
from regretless.data.pair_source import PairSource
from regretless.data.rows import read_rows, write_parquet
from regretless.data.tokenization import FUTURE, TokenizedPair
from regretless.modeling.load import ModelConfig, in_one_dtype, load_tokenizer, tokenizer_fingerprint
from regretless.modeling.training_folder import PAIR_SCORES, Trained, saved_checkpoints, trained_model
from regretless.objectives import build
from regretless.workflow.run_folder import BASE

MOST, FEWEST = 256, 8
"""Pairs that models are compared on by default."""
SHARE = 0.1
"""Most of the tokens that training computed."""
Responses = Mapping[str, Mapping[str, Path]]
"""Benchmark → label of a model → its greedy responses."""


class AnalyzeConfig(TokenRewardsConfig):
    """Responses to analyze, token by token and in aggregate."""

    policies: dict[str, PathSetting] = Field(default={})
    """Folders of trained models or adapters, by name; by default what `train` made."""
    sample: int | None = Field(default=None, ge=1)
    """Approximate number of pairs to compare the models on, drawn at random in whole prompts, of which none gives
    more than this number. Masked pairs are left out, so that runs with and without them are measured on the same
    data. By default 256, or fewer where their scores would take more than a tenth of the tokens that training
    computed, but not less than 8."""
    rollout: PathSetting | None = None
    """Folder of a `rollout`, whose measured regret the models' scores are compared with; by default the run's, if it
    has one."""
    checkpoints: int = Field(default=8, ge=0)
    """Most checkpoints of each training to score as well, evenly spread over those that were saved."""

    @field_validator("policies")
    @classmethod
    def _are_not_the_base(cls, value: dict[str, str]) -> dict[str, str]:
        if BASE in map(str.casefold, value):
            raise ValueError(f"the name {BASE} is the reference's; choose another one")
        return value


def run(
    config: AnalyzeConfig,
    pairs: Path,
    reference: ModelConfig,
    policies: Mapping[str, Trained],
    output: Path,
    responses: Responses | None = None,
    template: str | None = "plain",
    rollout: Path | None = None,
) -> dict[str, Any]:
    """Compare the reference and the trained models on pairs of a file; writes JSON into `output`, prints tables.

    token_rewards.json, score_distance.json, drift.json, gradients.json, calibration.json (from the held-out pairs that
    training scored), lengths.json (from `responses`, in which the reference is called base) and, from the folder
    `rollout`, regret_calibration.json and unit_regret.parquet. Every estimate is a mapping of value, standard_error,
    low, high (95 %), n and prompts. docs/analysis.md defines the numbers.

    Raises DataError if no pair can be used, or `rollout` has no measured regret of these models' tokens; ConfigError if
    a model cannot be loaded.
    """
    reference, *trained = in_one_dtype([reference, *(policy.model for policy in policies.values())])
    models = dict(zip(policies, trained, strict=True))

    # The sample of pairs that all models are compared on, and the responses whose regret was measured.
    source = PairSource.read(pairs, template)
    originals = [pair for pair in source.pairs if pair.kind == "original"] or source.pairs
    tokenizer = load_tokenizer(reference)
    drawn = whole_prompts(originals, config.sample or MOST, config.seed, _prompt)
    objectives = {
        name: build(policy.objective, **policy.hyperparameters)
        for name, policy in policies.items()
        if policy.objective is not None
    }
    keep = {FUTURE for objective in objectives.values() if FUTURE in objective.required}
    tokenized = source.tokenize(tokenizer, pairs=drawn, keep=keep)
    source.check(tokenized)
    if config.sample is None and (count := affordable(config, tokenized, policies)) < len(tokenized):
        print_note(
            f"analyze: {count} pairs are scored, so that it takes about a tenth of the tokens that training computed; "
            f"sample={MOST} scores more"
        )
        tokenized = whole_prompts(tokenized, count, config.seed, lambda pair: pair.prompt_ids)
    sample = Sample([pair.without_future() for pair in tokenized])
    measured = [] if rollout is None else read_measured(rollout, tokenizer_fingerprint(tokenizer))
    items = [one.item for one in measured]

    # What changed: scores, their distances, their course over the checkpoints, and where gradients were.
    longer = [item for pair in tokenized for item in pair.items]
    scores = {BASE: sample.score(reference, BASE, [*longer, *items])}
    scores |= {name: sample.score(model, name, items) for name, model in models.items()}
    distances = score_distances(sample, scores)
    drifts = {
        name: _drift(config, sample, reference, policy, name, scores[name], scores[BASE])
        for name, policy in policies.items()
    }
    gradients, calibrations = {}, {}
    ends_step = codec_of(tokenizer).ends_step
    for name, policy in policies.items():
        if name in objectives:
            gradients[name] = gradient_places(objectives[name], tokenized, scores[BASE], ends_step)
        if (result := _calibration(policy.folder, source.pairs)) is not None:
            calibrations[name] = result
    lengths = {benchmark: response_lengths(files) for benchmark, files in (responses or {}).items()}

    # A few pairs token by token, and what is read into the measured responses.
    read = readings(measured, scores)
    regret = regret_calibration(read, config.seed)
    summary = token_rewards.run(config, pairs, reference, models, output, template, read)

    write_json(output / "score_distance.json", {"unit": "nats squared per token", "models": distances})
    write_json(output / "drift.json", {"unit": "nats", "policies": drifts})
    write_json(output / "gradients.json", {"policies": gradients})
    write_json(output / "calibration.json", {"observed": OBSERVED, "policies": calibrations})
    write_json(output / "lengths.json", {"benchmarks": lengths})
    write_json(output / "regret_calibration.json", regret)
    if read:
        write_parquet(output / "unit_regret.parquet", pa.Table.from_pylist(list(unit_rows(read))))
    _show(distances, drifts, gradients, calibrations, lengths)
    _show_regret(regret)
    return summary | {"sample": len(tokenized), "refused": len(source.refused)}


def affordable(config: AnalyzeConfig, pairs: Sequence[TokenizedPair], policies: Mapping[str, Trained]) -> int:
    """Number of pairs of which all models' scores take a tenth of the tokens of the trainings; all for unknown ones."""
    states = [(policy.state, saved_checkpoints(policy.folder)) for policy in policies.values()]
    logs = [state.get("log_history", ()) for state, _ in states]
    trained = [[line["num_tokens"] for line in log if "num_tokens" in line] for log in logs]
    if not all(trained):
        return len(pairs)
    models = 1 + sum(1 + min(len(saved), config.checkpoints) for _, saved in states)
    tokens = sum(len(pair.prompt_ids) + sum(len(side.ids) for side in pair.sides) for pair in pairs)
    share = SHARE * sum(map(max, trained)) / (models * tokens)
    return max(FEWEST, int(share * len(pairs)))


def _prompt(pair: Pair) -> str:
    return pair.prompt_id or str(pair.prompt)


def _drift(
    config: AnalyzeConfig,
    sample: Sample,
    reference: ModelConfig,
    policy: Trained,
    name: str,
    scores: Scores,
    start: Scores,
) -> dict[str, Any]:
    state = policy.state
    end = state.get("global_step")
    saved = saved_checkpoints(policy.folder)
    steps = evenly([step for step in saved if step != end], config.checkpoints)
    points = [point(sample, 0, start, start)]
    for step in steps:
        model = trained_model(reference, str(saved[step]), Path())
        points.append(point(sample, step, sample.score(model, f"{name} {step}"), start))
    points.append(point(sample, end, scores, start))
    return {"points": points, "logged": logged(state.get("log_history", ()))}


def _calibration(folder: Path, pairs: Sequence[Pair]) -> dict[str, Any] | None:
    file = folder / PAIR_SCORES
    if not file.is_file():
        return None
    prompts = {pair.pair_id or pair.origin: _prompt(pair) for pair in pairs}
    rows = [row for _, row in read_rows(file) if isinstance(row, dict)]
    margins = [row["chosen_reward"] - row["rejected_reward"] for row in rows]
    return calibration(margins, [prompts.get(row["pair_id"], row["pair_id"]) for row in rows])


def _show_regret(regret: Mapping[str, Any]) -> None:
    """The rank correlations of units and of G at the first α."""
    rows: dict[str, dict[str, Any]] = {}
    for name, methods in regret["policies"].items():
        for method, targets in methods.items():
            rows[f"{name}, {method}"] = {
                f"{target}, {outcome}": with_error(next(iter(by_alpha.values())))
                for target, outcomes in targets.items()
                for outcome, by_alpha in outcomes.items()
            }
    columns = [f"{target}, {outcome}" for target in ("units", "G") for outcome in ("right", "wrong")]
    show_table("rank correlation of the regret that methods read with the measured one, by outcome", rows, columns)


def _show(
    distances: Sequence[Mapping[str, Any]],
    drifts: Mapping[str, Any],
    gradients: Mapping[str, Any],
    calibrations: Mapping[str, Any],
    lengths: Mapping[str, Any],
) -> None:
    show_table(
        "score distance, nats² a token",
        {f"{row['first']} – {row['second']}": {"mean ± error": with_error(row)} for row in distances},
        ("mean ± error",),
    )
    rows: dict[str, dict[str, Any]] = {}
    for name, drift in drifts.items():
        for entry in drift["points"]:
            if entry["step"] == 0:
                continue
            row = rows[f"{name}, step {entry['step']}"] = {}
            for side in SIDES:
                row[f"{side} a token"] = entry[side]["per_token"]["value"]
                row[f"{side}, change"] = with_error(entry[side]["change"])
    columns = ("chosen a token", "chosen, change", "rejected a token", "rejected, change")
    show_table("log-probability, nats; change a response since the start", rows, columns)
    shares: dict[str, dict[str, Any]] = {}
    for name, result in gradients.items():
        for side in SIDES:
            if (of_side := result[side]) is not None:
                row = {f"tenth {tenth}": of_side["shares"][tenth - 1]["value"] for tenth in (1, 5, 10)}
                shares[f"{name}, {side}"] = row | {"last token": of_side["near_end"][0]["value"]}
    columns = ("tenth 1", "tenth 5", "tenth 10", "last token")
    show_table("share of the gradient (even: 0.1), last token × even", shares, columns)
    held_out = {
        name: {**result, "accuracy": with_error(result["accuracy"]), "brier": with_error(result["brier"])}
        for name, result in calibrations.items()
    }
    show_table("calibration on held-out pairs", held_out, ("pairs", "confidence", "accuracy", "ece", "brier"))
    response_lengths_table = {
        f"{benchmark}, {label}": {"length": with_error(entry["length"]), "change": with_error(entry["change"])}
        for benchmark, result in lengths.items()
        for label, entry in result["models"].items()
    }
    units = " and ".join(dict.fromkeys(result["unit"] for result in lengths.values()))
    show_table(f"length of the models' own responses, {units}", response_lengths_table, ("length", "change"))
    for name in drifts.keys() - gradients.keys():
        console.print(f"note: {name}: its folder does not name the objective that trained it; no gradient shares")
    if not calibrations:
        console.print("note: no pairs were held out of training (train.eval_pairs); no calibration")
