"""Evaluation of models on benchmarks, composed of the stages that sample, verify or judge, and summarize."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from regretless.core.errors import DataError
from regretless.core.files import fingerprint, write_json
from regretless.core.run_folder import RunFolder, Unit, dump, resolve
from regretless.data.prompts import PromptRow, PromptSource, load_prompts
from regretless.evaluation import harness, results
from regretless.evaluation.chat import chat_results
from regretless.evaluation.conditions import SAMPLES
from regretless.labeling import verify
from regretless.modeling.load import ModelConfig
from regretless.sampling.base import SamplingParams
from regretless.sampling.job import SampleWork
from regretless.sampling.sample import KEEPS, sample_prompts, sample_together


def evaluate_models(
    folder: RunFolder,
    subfolder: str,
    models: Mapping[str, ModelConfig],
    config: results.EvaluateConfig,
    verify_config: verify.VerifyConfig,
) -> dict[str, Any]:
    """Answer, verify or judge, and summarize every benchmark with every model, in `subfolder` of a run folder.

    <label>/<benchmark>/ holds the greedy answers with verdicts and result.json, and seed-<n>/ in it the same for each
    sampling run; for a chat benchmark it holds the judgments and chat_result.json. samples/ holds the answers before
    verification; results.json combines all results and is returned (in a plan, once all of them are there).

    Responses are verified with the settings of `grading`.
    """
    for label, model in models.items():
        evaluate_model(folder, subfolder, label, model, config, verify_config)
    if folder.awaits(subfolder):
        return {}
    collected = results.collect(folder.path / subfolder, config.seeds)
    write_json(folder.path / subfolder / "results.json", collected)
    return collected


def evaluate_model(
    folder: RunFolder,
    subfolder: str,
    label: str,
    model: ModelConfig,
    config: results.EvaluateConfig,
    verify_config: verify.VerifyConfig,
) -> None:
    """Answer, verify or judge, and summarize every benchmark with one model (`evaluate_models`).

    Writes only to <label>/ and samples/<label>/ in `subfolder`. All benchmarks are answered with the model loaded once.
    """
    root = PurePosixPath(subfolder)
    sampled = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    passes: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}}
    passes |= {f"seed-{seed}": {**sampled, "seed": seed} for seed in config.seeds}
    common: dict[str, Any] = {"n": 1, "repetition_penalty": config.repetition_penalty}
    common |= {"max_new_tokens": config.max_new_tokens, "stop": config.stop, **engine_settings(config)}
    asked = {
        (benchmark, name): SamplingParams(**common, **decoding)
        for benchmark in config.benchmarks
        for name, decoding in passes.items()
    }
    samples = root / SAMPLES / label
    _answer(folder, samples, model, config, asked)
    for benchmark, name in asked:
        verified = (root / label / benchmark / ("" if name == "greedy" else name)).as_posix()
        responses = folder.path / samples / benchmark / name / "responses.parquet"
        _verify(folder, verified, responses, grading(config, verify_config, benchmark))
    # Keyed by what the answers depend on, so that benchmarks that differ only in the judge share their answers.
    answers: dict[str, list[Path]] = {}
    for benchmark, chat_config in config.chat.items():
        kind = chat_config.answers
        if kind not in answers:
            place_of = root / SAMPLES / label / kind
            answers[kind] = _converse(folder, place_of, model, chat_config, engine_settings(config))
        _judge(folder, (root / label / benchmark).as_posix(), answers[kind], chat_config)
    if config.harness:
        _run_harness(folder, (root / label / harness.FOLDER).as_posix(), model, config)


def grading(
    config: results.EvaluateConfig, verify_config: verify.VerifyConfig, benchmark: str | None = None
) -> verify.VerifyConfig:
    """Settings of verification of a benchmark: those of `verify`, overridden by `config`, then by the benchmark."""
    own = None if benchmark is None else config.benchmarks[benchmark].verifier
    verifier = own or config.verifier
    overrides = {"verifier": verifier, "grade_cut": config.grade_cut}
    set_here = {name: value for name, value in overrides.items() if value is not None}
    return verify.VerifyConfig.parse({**verify_config.model_dump(), **set_here}, "evaluate")


def engine_settings(config: results.EvaluateConfig) -> dict[str, Any]:
    """The engine's settings of an evaluation, as those of `SamplingParams`."""
    here = {"server": config.engine_server, "vllm": config.vllm}
    return {"engine": config.engine, "batch_size": config.batch_size, **here}


def _answer(
    folder: RunFolder,
    samples: PurePosixPath,
    model: ModelConfig,
    config: results.EvaluateConfig,
    asked: Mapping[tuple[str, str], SamplingParams],
) -> None:
    """Answer benchmarks, each with every kind of decoding, in the folders <samples>/<benchmark>/<decoding>."""
    units = {
        (samples / benchmark / name).as_posix(): (benchmark, params) for (benchmark, name), params in asked.items()
    }
    sources = {benchmark: config.benchmarks[benchmark].source for benchmark in config.benchmarks}
    # In a recipe, settings begin with the section's name; in the command's own arguments they do not.
    section = "evaluate." if samples.parts[0] == "evaluate" else ""

    def work(todo: Mapping[str, Path]) -> list[dict[str, Any]]:
        prompts = {
            benchmark: _problems(resolve(sources[benchmark], folder.path), f"{section}benchmarks.{benchmark}.")
            for benchmark in dict.fromkeys(units[name][0] for name in todo)
        }
        here = resolve(model, folder.path)
        return sample_together(
            [
                SampleWork([here], prompts[units[name][0]], units[name][1], output / "responses.parquet")
                for name, output in todo.items()
            ]
        )

    folder.do_together(
        [
            Unit(
                name,
                {"model": dump(model), "prompts": dump(sources[benchmark]), "sampling": dump(params)},
                keeps=KEEPS,
            )
            for name, (benchmark, params) in units.items()
        ],
        work,
    )


def _problems(source: PromptSource, setting: str) -> list[PromptRow]:
    """The problems of a benchmark. Raises DataError for one without a gold answer."""
    prompts = load_prompts(source, setting)
    without = [prompt.line for prompt in prompts if prompt.answer is None]
    if without:
        raise DataError(
            f"{source.dataset}: {len(without)} of {len(prompts)} problems have no gold answer (first: row "
            f"{without[0]}), so their responses cannot be verified; set {setting}answer_column"
        )
    return prompts


def _verify(folder: RunFolder, name: str, responses: Path, config: verify.VerifyConfig) -> None:
    def work(output: Path) -> dict[str, Any]:
        verify.run(config, responses, output)
        result = results.summarize(output / "responses.parquet")
        write_json(output / "result.json", result)
        return {key: result[key] for key in ("n", "correct", "cut")}

    folder.do(name, dump(config), work, {"responses": responses})


def _run_harness(folder: RunFolder, name: str, model: ModelConfig, config: results.EvaluateConfig) -> None:
    here, settings = resolve(model, folder.path), resolve(config.harness_settings, folder.path)
    # Neither the interpreter nor the batch changes what is asked.
    seen = {key: value for key, value in dump(config.harness_settings).items() if key not in ("python", "batch_size")}
    folder.do(
        name,
        {"model": dump(model), "tasks": config.harness, **seen},
        lambda output: harness.run(config.harness, settings, here, output),
    )


def _converse(
    folder: RunFolder,
    subfolder: PurePosixPath,
    model: ModelConfig,
    config: chat_results.ChatBenchmark,
    engine: Mapping[str, Any],
) -> list[Path]:
    """Answer the prompts of a chat benchmark, turn by turn and temperature by temperature; returns the responses."""
    here = resolve(config, folder.path)
    common: dict[str, Any] = {"n": 1, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": here.seed}
    common |= {"max_new_tokens": here.max_new_tokens, "stop": here.stop, **engine}
    responses: list[Path] = []
    for turn in itertools.count(1):
        if folder.awaits(subfolder.as_posix()):
            break  # a later turn's prompts contain the answers to the earlier one
        groups = chat_results.next_prompts(here, responses)
        if not groups:
            break
        for temperature, prompts in groups.items():
            params = SamplingParams(**common, temperature=temperature)
            name = (subfolder / f"turn-{turn}-temperature-{temperature:g}").as_posix()
            _respond(folder, name, model, prompts, params)
            responses.append(folder.path / name / "responses.parquet")
    return responses


def _respond(
    folder: RunFolder, name: str, model: ModelConfig, prompts: Sequence[PromptRow], params: SamplingParams
) -> None:
    # The prompts themselves are the input, because those of a second turn contain the first answers.
    asked = fingerprint([[row.prompt_id, row.prompt] for row in prompts])
    folder.do(
        name,
        {"model": dump(model), "prompts": asked, "sampling": dump(params)},
        lambda output: sample_prompts(resolve(model, folder.path), prompts, params, output / "responses.parquet"),
        keeps=KEEPS,
    )


def _judge(folder: RunFolder, name: str, responses: Sequence[Path], config: chat_results.ChatBenchmark) -> None:
    here = resolve(config, folder.path)
    answers = {f"responses-{number}": path for number, path in enumerate(responses)}
    folder.do(name, dump(config), lambda output: chat_results.run(here, responses, output), {**answers, **here.files()})
