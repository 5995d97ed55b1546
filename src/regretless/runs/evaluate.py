"""Evaluation of models on benchmarks, composed of the stages that sample, verify or judge, and summarize."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from regretless.core.errors import DataError
from regretless.core.files import fingerprint, write_json
from regretless.core.run_folder import RunFolder, dump, resolve
from regretless.data.prompts import PromptRow, PromptSource, load_prompts
from regretless.evaluation import results
from regretless.evaluation.chat import chat_results
from regretless.labeling import verify
from regretless.modeling.load import ModelConfig
from regretless.sampling.base import SamplingParams
from regretless.sampling.sample import sample_prompts


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
    verification; results.json combines all results and is returned.

    Responses are verified with the settings of `grading`, which raises ConfigError for an unknown verifier.
    """
    verify_config = grading(config, verify_config)
    sampled = {"temperature": config.temperature, "top_p": config.top_p}
    passes: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0, "top_p": 1.0}}
    passes |= {f"seed-{seed}": {**sampled, "seed": seed} for seed in config.seeds}
    common: dict[str, Any] = {"n": 1, "top_k": 0, "repetition_penalty": config.repetition_penalty}
    common |= {"max_new_tokens": config.max_new_tokens, "batch_size": config.batch_size}
    root = PurePosixPath(subfolder)
    for label, model in models.items():
        for benchmark, source in config.benchmarks.items():
            for name, decoding in passes.items():
                params = SamplingParams(**common, **decoding)
                samples = (root / "samples" / label / benchmark / name).as_posix()
                verified = (root / label / benchmark / ("" if name == "greedy" else name)).as_posix()
                _answer(folder, samples, model, source.source, params, f"benchmarks.{benchmark}.")
                _verify(folder, verified, folder.path / samples / "responses.parquet", verify_config)
        # Keyed by what the answers depend on, so that benchmarks that differ only in the judge share their answers.
        answers: dict[str, list[Path]] = {}
        for benchmark, chat_config in config.chat.items():
            kind = f"{chat_config.benchmark}-{fingerprint(chat_config.answering())[:8]}"
            if kind not in answers:
                place_of = root / "samples" / label / kind
                answers[kind] = _converse(folder, place_of, model, chat_config, config.batch_size)
            _judge(folder, (root / label / benchmark).as_posix(), answers[kind], chat_config)
    collected = results.collect(folder.path / subfolder)
    write_json(folder.path / subfolder / "results.json", collected)
    return collected


def grading(config: results.EvaluateConfig, verify_config: verify.VerifyConfig) -> verify.VerifyConfig:
    """Settings of verification in an evaluation: those of `verify`, overridden by those of `config`.

    Raises ConfigError for an unknown verifier.
    """
    overrides = {"verifier": config.verifier, "grade_cut": config.grade_cut}
    set_here = {name: value for name, value in overrides.items() if value is not None}
    return verify.VerifyConfig.parse({**verify_config.model_dump(), **set_here}, "evaluate")


def _answer(
    folder: RunFolder, name: str, model: ModelConfig, source: PromptSource, params: SamplingParams, setting: str
) -> None:
    def work(output: Path) -> dict[str, Any]:
        prompts = load_prompts(resolve(source, folder.path), setting)
        without = [prompt.line for prompt in prompts if prompt.answer is None]
        if without:
            raise DataError(
                f"{source.dataset}: {len(without)} of {len(prompts)} problems have no gold answer (first: row "
                f"{without[0]}), so their responses cannot be verified; set {setting}answer_column"
            )
        return sample_prompts(resolve(model, folder.path), prompts, params, output / "responses.parquet")

    folder.do(name, {"model": dump(model), "prompts": dump(source), "sampling": dump(params)}, work)


def _verify(folder: RunFolder, name: str, responses: Path, config: verify.VerifyConfig) -> None:
    def work(output: Path) -> dict[str, Any]:
        verify.run(config, responses, output)
        result = results.summarize(output / "responses.parquet")
        write_json(output / "result.json", result)
        return {key: result[key] for key in ("n", "correct", "cut")}

    folder.do(name, dump(config), work, {"responses": responses})


def _converse(
    folder: RunFolder, subfolder: PurePosixPath, model: ModelConfig, config: chat_results.ChatBenchmark, batch_size: int
) -> list[Path]:
    """Answer the prompts of a chat benchmark, turn by turn and temperature by temperature; returns the responses."""
    here = resolve(config, folder.path)
    common: dict[str, Any] = {"n": 1, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": here.seed}
    common |= {"max_new_tokens": here.max_new_tokens, "batch_size": batch_size}
    responses: list[Path] = []
    for turn in itertools.count(1):
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
    )


def _judge(folder: RunFolder, name: str, responses: Sequence[Path], config: chat_results.ChatBenchmark) -> None:
    here = resolve(config, folder.path)
    answers = {f"responses-{number}": path for number, path in enumerate(responses)}
    folder.do(name, dump(config), lambda output: chat_results.run(here, responses, output), {**answers, **here.files()})
