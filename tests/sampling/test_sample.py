from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import pyarrow.parquet as pq
import pytest
import torch

from regretless.core.errors import ConfigError, DataError
from regretless.data.columns import Response
from regretless.data.prompts import PromptRow
from regretless.data.responses import read_responses
from regretless.modeling.load import ModelConfig, load_tokenizer, tokenizer_fingerprint
from regretless.sampling.base import Completion
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.engines import ENGINES, EngineKind
from regretless.sampling.sample import SampleConfig, run, sample_models
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.world.tiny_models import smoke_architecture


def parse(settings: dict[str, Any], **changes: Any) -> SampleConfig:
    return SampleConfig.parse({**settings, **changes}, "sample")


def sampled(config: SampleConfig, output: Path) -> list[Response]:
    output.mkdir(exist_ok=True)
    run(config, output)
    responses, refused = read_responses(output / "responses.parquet")
    assert not refused
    return responses


def test_stage_when_run_writes_every_response_with_what_made_it(settings: dict[str, Any], tmp_path: Path) -> None:
    second = {**settings["models"][0], "init_seed": 1}
    config = parse(settings, models=[settings["models"][0], second])
    summary = run(config, tmp_path)
    responses, refused = read_responses(tmp_path / "responses.parquet")
    assert not refused
    assert summary == {
        "prompts": 12,
        "responses": 48,
        "tokens": sum(len(row.token_ids or []) for row in responses),
        "cut": sum(row.finish_reason == "length" for row in responses),
        "refused": 0,
    }
    assert len({row.response_id for row in responses}) == 48
    assert [row.answer for row in responses[::4]] == [str(number) for number in range(12)], "in the prompts' order"
    assert [row.model for row in responses[:4]] == [
        "qwen3 (random weights, seed 0)",
        "qwen3 (random weights, seed 0)",
        "qwen3 (random weights, seed 1)",
        "qwen3 (random weights, seed 1)",
    ]
    tokenizer = load_tokenizer(config.models[0])
    for row in responses:
        assert row.prompt_token_ids == tokenizer(row.prompt)["input_ids"]
        assert row.response == tokenizer.decode(row.token_ids, skip_special_tokens=True)
        assert len(row.token_ids or []) == len(row.logps or []) == len(row.sampled_logps or [])
        assert (row.logps_kind, row.dtype, row.engine, row.seed) == ("raw", "float32", "transformers", 3)
        assert row.tokenizer == tokenizer_fingerprint(tokenizer)
        assert json.loads(row.sampling or "") == {
            "n": 2,
            "temperature": 0.7,
            "top_p": 0.95,
            "top_k": 40,
            "repetition_penalty": 1.05,
            "top_logps": 0,
            "top_logps_kind": "raw",
            "max_new_tokens": 6,
            "stop": [],
            "batch_size": 5,
        }
    assert not (tmp_path / "responses.parts").exists()


class Faulty:
    """An engine that generates batches, and whose completions are changed by the function `fault`."""

    fault: ClassVar[Callable[[list[Completion]], Any]]

    def __init__(self, config: ModelConfig, params: SamplingParams) -> None:
        self.right = TransformersEngine(config, params)
        self.context, self.encode, self.provenance = self.right.context, self.right.encode, self.right.provenance

    def with_params(self, params: SamplingParams) -> Self:
        return self

    def generate(self, prompts: Sequence[list[int]], seed: int) -> list[Completion]:
        return cast(list[Completion], type(self).fault(self.right.generate(prompts, seed)))


class FaultyStream(Faulty):
    """The same as a stream; `fault` makes the pairs of position and completion."""

    def stream(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> Iterator[tuple[int, Completion]]:
        yield from self.generate(prompts, 0)  # type: ignore[misc]


def last(**changes: Any) -> Callable[[list[Completion]], Any]:
    """The fault of a last completion with other values: a function of the right one, or the value itself."""

    def fault(given: list[Completion]) -> Any:
        new = {name: value(given[-1]) if callable(value) else value for name, value in changes.items()}
        return [*given[:-1], replace(given[-1], **new)]

    return fault


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda given: given[:-1], r"expected a list of 5 completions \(the first of row \d+ of the prompts\), got 4"),
        (lambda given: None, "expected a list of 5 completions .*, got null|None"),
        (lambda given: [*given[:-1], "hello"], "row 12 of the prompts: expected a Completion, got 'hello'"),
        (
            last(logps=lambda one: [*one.logps[:-1], float("nan")]),
            r"prompts: logps: value \d+ is nan; expected log-prob",
        ),
        (last(logps=lambda one: one.logps[:-1]), r"logps: expected one value per token, got \d values for \d tokens"),
        (last(sampled_logps=lambda one: [0.0] * 9), r"sampled_logps: expected one value per token, got 9 values"),
        (last(token_numbers={"entropy": [0.0] * 9}), r"token_numbers\.entropy: expected one value per token"),
        (last(token_ids=lambda one: torch.tensor(one.token_ids)), "token_ids: expected token ids"),
        (last(text="a\ud800b"), r"response: expected whole characters, not .*, got 'a\\ud800b'"),
        (last(token_ids=None, tokens=lambda one: ["\ud800"] * len(one.logps)), "tokens: expected whole characters"),
        (last(text=None), "response: expected a value, got null"),
        (last(finish_reason="eos"), "finish_reason: expected stop, length or stop_string, got 'eos'"),
    ],
)
def test_engine_when_it_returns_what_cannot_be_read_then_it_and_the_prompt_are_named_and_nothing_is_stored(
    fault: Callable[[list[Completion]], Any],
    told: str,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Faulty, "fault", staticmethod(fault), raising=False)
    monkeypatch.setitem(ENGINES, "faulty", EngineKind(Faulty))
    with pytest.raises(ConfigError, match=f"^engine faulty: returned what cannot be stored: .*({told})"):
        run(parse(settings, engine="faulty"), tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda given: list(enumerate(given))[:-1], r"got none of 1 \(the first: row \d+ of the prompts\)"),
        (lambda given: [(0, one) for one in given], "a prompt without a completion, got 0"),
        (lambda given: [(99, one) for one in given], "a prompt without a completion, got 99"),
        (lambda given: [(0, "hello")], "row 4 of the prompts: expected a Completion, got 'hello'"),
    ],
)
def test_streaming_engine_when_its_positions_are_wrong_then_it_is_named(
    fault: Callable[[list[Completion]], Any],
    told: str,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FaultyStream, "fault", staticmethod(fault), raising=False)
    monkeypatch.setitem(ENGINES, "faulty", EngineKind(FaultyStream))
    with pytest.raises(ConfigError, match=f"^engine faulty: returned what cannot be stored: .*{told}"):
        run(parse(settings, engine="faulty"), tmp_path / "out")


def test_samples_when_prompt_model_or_seed_differ_are_drawn_anew(settings: dict[str, Any], tmp_path: Path) -> None:
    hot = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    first = sampled(parse(settings, **hot), tmp_path / "a")
    twin = parse(settings, **hot, models=settings["models"] * 2)
    both = sampled(twin, tmp_path / "b")
    other = sampled(parse(settings, **hot, seed=4), tmp_path / "c")
    ids = [row.token_ids or [] for row in first]
    long = [tuple(row) for row in ids if len(row) > 4]
    assert len(set(long)) == len(long) > 10, "samples are no copies of each other"
    by_model = [[row.token_ids for row in both if f"-{number}-" in row.response_id] for number in range(2)]
    assert by_model[0] == ids, "what a model writes does not depend on those after it"
    assert by_model[1] != ids
    assert [row.token_ids for row in other] != ids


@pytest.mark.slow
def test_stage_when_killed_and_taken_up_again_gives_the_same_bytes(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "n": 5, "batch_size": 2}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    script = (
        "import json, sys; from pathlib import Path; from regretless.sampling.sample import SampleConfig, run; "
        "run(SampleConfig.parse(json.loads(Path(sys.argv[1]).read_text()), 'sample'), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "settings.json"), str(killed)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    parts = killed / "responses.parts"
    deadline = time.monotonic() + 120
    while len(list(parts.glob("*.parquet"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    done = {file.name: file.stat().st_mtime_ns for file in parts.glob("*.parquet")}
    assert 2 <= len(done) < 8
    assert not (killed / "responses.parquet").exists()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        written: list[str] = []
        config = parse(settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("regretless.sampling.job.write_records", _noting(written))
            run(config, killed)
        run(config, whole)
    finally:
        torch.set_num_threads(threads)
    assert set(written).isdisjoint(done), "finished parts are kept"
    assert len(written) + len(done) == 8
    assert (killed / "responses.parquet").read_bytes() == (whole / "responses.parquet").read_bytes()


def _noting(written: list[str]) -> Any:
    from regretless.data.rows import write_records

    def write(path: Path, records: list[Response], metadata: Any) -> None:
        written.append(path.name)
        write_records(path, records, metadata)

    return write


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"max_new_tokens": 5},
        # What an update of a data set on the hub does: neither its name nor the ids of its rows tell of it.
        {"prompt": "w2 w2"},
    ],
    ids=["seed", "length", "prompts"],
)
def test_work_when_parts_of_another_question_are_left_then_none_is_used(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    model = ModelConfig(**settings["models"][0])
    params: dict[str, Any] = {"n": 2, "max_new_tokens": 6, "batch_size": 1, "temperature": 5.0, "top_k": 0}
    asked = [PromptRow(str(number), "w1") for number in range(12)]
    others = [PromptRow(row.prompt_id, change.get("prompt", row.prompt)) for row in asked]
    changed = SamplingParams(**params | {name: value for name, value in change.items() if name != "prompt"})
    file, clean = tmp_path / "responses.parquet", tmp_path / "clean.parquet"

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr("regretless.sampling.job.write_records", _interrupted_after(3))
        sample_models([model], asked, SamplingParams(**params), file)
    assert len(list((tmp_path / "responses.parts").iterdir())) == 3
    sample_models([model], others, changed, file)
    sample_models([model], others, changed, clean)
    assert pq.read_table(file) == pq.read_table(clean)
    assert not (tmp_path / "responses.parts").exists()


def _interrupted_after(parts: int) -> Any:
    from regretless.data.rows import write_records

    left = iter(range(parts))

    def write(path: Path, records: list[Response], metadata: Any) -> None:
        if next(left, None) is None:
            raise InterruptedError
        write_records(path, records, metadata)

    return write


def test_stage_when_prompts_are_bad_or_long_refuses_them_with_line_and_reason(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with (tmp_path / "prompts.jsonl").open("a") as handle:
        handle.write('{"prompt": ""}\n')
    summary = run(parse(settings, max_prompt_tokens=3), tmp_path)
    assert (summary["prompts"], summary["refused"]) == (9, 4)
    refused = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert [row["line"] for row in refused] == [13, 4, 8, 12]
    assert refused[0]["reason"] == "prompt: empty"
    assert refused[1]["reason"] == "prompt of 4 tokens; max_prompt_tokens is 3"
    prompts = {**settings["prompts"], "dataset": str(tmp_path / "long.jsonl")}
    (tmp_path / "long.jsonl").write_text('{"prompt": "w1 w1", "answer": 1}\n')
    with pytest.raises(DataError, match="no usable row is left"):
        run(parse(settings, prompts=prompts, max_prompt_tokens=1), tmp_path)


def test_config_when_values_cannot_work_says_so_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(settings, engine="vlm", top_p=0, models=[])
    assert "engine: expected one of transformers, vllm, openai (got 'vlm')" in str(caught.value)
    assert "top_p" in str(caught.value)
    assert "models" in str(caught.value)
    with pytest.raises(ConfigError, match="with temperature 0 all 2 responses to a prompt are the same"):
        parse(settings, temperature=0)


def test_sample_models_when_the_context_is_too_short_says_what_to_lower(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model = ModelConfig(**settings["models"][0])
    small = model.model_copy(update={"architecture": {**(model.architecture or {}), "max_position_embeddings": 8}})
    prompts = [PromptRow("a", "w1 w1 w1"), PromptRow("b", "w1")]
    with pytest.raises(ConfigError, match=r"1 of 2 prompts \(the longest has 3 tokens\).*exceed its 8 positions"):
        sample_models([small], prompts, SamplingParams(n=1, max_new_tokens=6), tmp_path / "out.parquet")
    greedy = SamplingParams(n=1, temperature=0, max_new_tokens=5)
    summary = sample_models([small], prompts, greedy, tmp_path / "out.parquet")
    responses, _ = read_responses(tmp_path / "out.parquet")
    assert summary["responses"] == 2
    assert [(row.prompt_id, row.sampled_logps) for row in responses] == [("a", None), ("b", None)]
    with pytest.raises(DataError, match="same prompt_id"):
        sample_models([small], prompts * 2, greedy, tmp_path / "out.parquet")


def test_stage_when_the_template_is_math_writes_prompts_by_the_chat_template(
    settings: dict[str, Any], tmp_path: Path, shared: Path
) -> None:
    folder = str(shared / "data/tokenizers/qwen2")
    model = {"architecture": smoke_architecture("qwen2", 151646), "tokenizer": folder}
    prompts = {**settings["prompts"], "template": "math", "limit": 2}
    rows = sampled(parse(settings, models=[model], prompts=prompts), tmp_path / "out")
    assert load_tokenizer(ModelConfig(**model)).decode(rows[2].prompt_token_ids) == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nw1 w1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [row.prompt for row in rows[:2]] == [
        [
            {"role": "system", "content": "Please reason step by step, and put your final answer within \\boxed{}."},
            {"role": "user", "content": "w1"},
        ]
    ] * 2


def test_models_when_the_policy_has_another_tokenizer_then_it_is_said_before_sampling(
    settings: dict[str, Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = settings["models"][0], {"name_or_path": str(model)}
    policy = ModelConfig(**other)
    label = ModelConfig(**first).label

    def said(models: list[dict[str, Any]], **arguments: Any) -> list[str]:
        with pytest.raises(DataError, match="no usable row"):  # after the notes, before any answer
            run(parse(settings, models=models, max_prompt_tokens=1, prompts=long), tmp_path / "out", **arguments)
        return [line.removeprefix("note: ") for line in capsys.readouterr().err.splitlines() if "sample.models" in line]

    (tmp_path / "long.jsonl").write_text('{"prompt": "w1 w2 w3"}\n')
    long = {"dataset": str(tmp_path / "long.jsonl")}
    (tmp_path / "out").mkdir()
    assert said([first]) == said([first, {**first, "init_seed": 1}]) == said([other], policy=policy) == []
    assert said([first, other]) == []
    (of_policy,) = said([first, other], policy=policy)
    assert of_policy.startswith(f"sample.models: {label} and the policy {model} have different tokenizers: training")
