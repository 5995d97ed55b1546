"""The engine `vllm` against vLLM's build for CPUs: `make test-engines` runs this in the environment that has it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from scipy.stats import chisquare
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers import LogitsProcessorList as Processors
from transformers import RepetitionPenaltyLogitsProcessor as Penalty
from transformers import TemperatureLogitsWarper as Temperature
from transformers import TopKLogitsWarper as TopK
from transformers import TopPLogitsWarper as TopP

from regretless.core.errors import ConfigError
from regretless.data.prompts import PromptRow
from regretless.data.responses import read_responses
from regretless.modeling.load import ModelConfig
from regretless.modeling.scoring import score_responses
from regretless.sampling.base import Completion
from regretless.sampling.engine_settings import SamplingParams, VllmOptions
from regretless.sampling.sample import sample_models
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.sampling.vllm_engine import VllmEngine, cause_of, check_vllm
from regretless.training.merge import merge_adapter
from regretless.workflow.cluster import connected
from regretless.workflow.workers import Need, executor

WORDS = ["<pad>", "<end>", "<stop>", *(f"w{number}" for number in range(21))]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [3, 3, 4], [20, 5, 6, 20, 21]]
ALL_ON = SamplingParams(n=1, max_new_tokens=12, repetition_penalty=1.3, top_k=12, top_p=0.9, temperature=1.5)
PLAIN = SamplingParams(n=1, max_new_tokens=12, repetition_penalty=1, top_k=0, top_p=1, temperature=1)
TOLERANCE = 1e-5
"""Nats per token, in float32."""
OPTIONS = {"max_model_len": 128, "engine_args": {"enforce_eager": True}}

ROOT = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
LOG = f"""(EngineCore pid=7) ERROR 11-29 10:00:00 [core.py:900] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 10:00:00 [core.py:900] ValueError: No available memory for the cache blocks.
RuntimeError: {ROOT}
"""


@pytest.mark.parametrize(
    ("error", "said", "reason"),
    [
        (RuntimeError(ROOT), LOG, f"ValueError: No available memory for the cache blocks. ({ROOT})"),
        (RuntimeError(ROOT), "a warning: nothing", ROOT),
        (ValueError("no such argument\nmore"), LOG, "no such argument"),
        (OSError(), LOG, "OSError"),
    ],
)
def test_reason_when_the_engines_process_failed_then_its_own_error_is_in_the_message(
    error: Exception, said: str, reason: str
) -> None:
    assert cause_of(error, said) == reason


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment: make test-engines"
)
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module", autouse=True)
def _settings() -> Iterator[None]:
    """vLLM reads them once, when it is imported; it and its settings stay in the process."""
    if importlib.util.find_spec("vllm") is None:
        yield
        return
    os.environ |= SETTINGS
    importlib.import_module("vllm")
    yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose generation_config.json recommends what nobody asked for."""
    folder = tmp_path_factory.mktemp("checkpoint")
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's attention on CPUs takes
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    recommended = {"temperature": 0.1, "top_k": 1, "top_p": 0.2, "repetition_penalty": 3.0}
    model.generation_config = GenerationConfig(eos_token_id=[1, 2], do_sample=True, **recommended)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["raw", "processed"])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[VllmEngine]:
    arguments = {**OPTIONS["engine_args"], "max_num_batched_tokens": 128}
    options = VllmOptions(logprobs_mode=request.param, max_model_len=128, engine_args=arguments)
    params = ALL_ON.model_copy(update={"vllm": options})
    yield VllmEngine(ModelConfig(name_or_path=str(checkpoint)), params)


def generated(engine: VllmEngine, params: SamplingParams, seeds: range = range(6)) -> list[Completion]:
    """Responses to all prompts; one loaded model serves all settings of sampling."""
    engine.params = params
    return [found for seed in seeds for found in engine.generate(PROMPTS, seed)]


def raw_logps(model: Any, found: list[Completion]) -> list[list[float]]:
    """Nats of every token in the model's own distribution, by the package's own scoring."""
    return [s.tolist() for s in score_responses(model, [(f.prompt_token_ids or [], f.token_ids or []) for f in found])]


def drawn_logps(model: Any, found: list[Completion], params: SamplingParams) -> list[list[float]]:
    """Nats of every token in the distribution that is drawn from, by the logits processors of transformers."""
    shape = Processors(
        [Penalty(params.repetition_penalty), Temperature(params.temperature), TopK(params.top_k), TopP(params.top_p)]
    )
    rows = []
    for item in found:
        prompt, response = item.prompt_token_ids or [], item.token_ids or []
        ids = torch.tensor([[*prompt, *response]])
        with torch.inference_mode():
            logits = model(ids).logits
        shaped = [shape(ids[:, :end], logits[:, end - 1]).log_softmax(-1) for end in range(len(prompt), ids.shape[1])]
        rows.append([scores[0, token].item() for scores, token in zip(shaped, response, strict=True)])
    return rows


def near(values: list[float], within: float = TOLERANCE) -> Any:
    return pytest.approx(values, abs=within, rel=0)


@needs_vllm
def test_logps_when_everything_shapes_the_distribution_equal_a_re_score_of_their_kind(
    engine: VllmEngine, checkpoint: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    found = generated(engine, ALL_ON)
    is_raw = engine.options.logprobs_mode == "raw"
    raw, drawn = raw_logps(model, found), drawn_logps(model, found, ALL_ON)
    for item, own, shaped in zip(found, raw, drawn, strict=True):
        assert item.logps == near(own if is_raw else shaped)
        assert item.sampled_logps == (None if is_raw else item.logps)
        assert item.logps_kind == ("raw" if is_raw else "sampled")
        assert min(shaped) > -20, "none lies outside what top-k and top-p leave"
    assert max(abs(a - b) for one, other in zip(raw, drawn, strict=True) for a, b in zip(one, other, strict=True)) > 0.5
    for item in found:
        ids = item.token_ids or []
        assert not {1, 2} & set(ids[:-1])
        assert item.finish_reason == ("stop" if ids[-1] in (1, 2) else "length")
        assert ids[-1] in (1, 2) or len(ids) == ALL_ON.max_new_tokens
        assert item.text == " ".join(WORDS[token] for token in ids if token > 2)
    assert {item.finish_reason for item in found} == {"stop", "length"}
    # Both tokens end responses; the checkpoint recommends one token to draw from.
    assert {(item.token_ids or [])[-1] for item in found} >= {1, 2}
    assert len({(item.token_ids or [])[0] for item in found}) > 5


@needs_vllm
def test_logps_when_nothing_shapes_the_distribution_are_those_drawn_from(engine: VllmEngine, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    found = generated(engine, PLAIN)
    for item, own in zip(found, raw_logps(model, found), strict=True):
        assert item.logps == item.sampled_logps == near(own)
        assert item.logps_kind == "raw"


@needs_vllm
def test_greedy_when_compared_with_transformers_gives_its_tokens(engine: VllmEngine, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    greedy = ALL_ON.model_copy(update={"temperature": 0.0, "max_new_tokens": 20})
    own = GenerationConfig(max_new_tokens=20, do_sample=False, repetition_penalty=1.3, eos_token_id=[1, 2])
    for prompt, found in zip(PROMPTS, generated(engine, greedy, range(1)), strict=True):
        expected = model.generate(torch.tensor([prompt]), generation_config=own)[0, len(prompt) :].tolist()
        assert found.token_ids == expected
        assert found.sampled_logps is None


@needs_vllm
def test_draws_when_many_follow_the_recorded_distribution(engine: VllmEngine, checkpoint: Path) -> None:
    engine.params = ALL_ON.model_copy(update={"max_new_tokens": 1})
    found = engine.generate([PROMPTS[0]] * 3000, 0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    tokens = sorted({(item.token_ids or [])[0] for item in found})
    one_each = [next(item for item in found if item.token_ids == [token]) for token in tokens]
    claimed = np.exp([row[0] for row in drawn_logps(model, one_each, ALL_ON)])
    assert claimed.sum() == pytest.approx(1, abs=1e-4), "every token that can be drawn was drawn"
    counts = [sum(item.token_ids == [token] for item in found) for token in tokens]
    assert chisquare(counts, claimed / claimed.sum() * len(found)).pvalue > 0.01


@needs_vllm
def test_generate_when_seeded_alike_repeats_and_each_response_has_a_seed_of_its_own(engine: VllmEngine) -> None:
    engine.params = ALL_ON
    first = engine.generate([PROMPTS[0]] * 8, 7)
    assert [item.token_ids for item in engine.generate([PROMPTS[0]] * 8, 7)] == [item.token_ids for item in first]
    assert len({tuple(item.token_ids or ()) for item in first}) > 4, "the eight draw from different seeds"
    assert [item.token_ids for item in engine.generate([PROMPTS[0]] * 8, 8)] != [item.token_ids for item in first]


@needs_vllm
def test_stream_when_steps_finish_nothing_gets_no_outputs(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.params = PLAIN
    step, outputs = engine.llm.llm_engine.step, []
    monkeypatch.setattr(engine.llm.llm_engine, "step", lambda: outputs.append(step()) or outputs[-1])
    engine.generate(PROMPTS, 0)
    assert len(outputs) > len(PROMPTS)
    assert sum(map(len, outputs)) == len(PROMPTS), "one output for each request, not one for each token"


@needs_vllm
def test_engine_when_prompts_exceed_the_tokens_of_a_step_reads_none_in_two(
    engine: VllmEngine, checkpoint: Path
) -> None:
    engine.params = PLAIN
    # 5 × 50 tokens do not fit into a step of 128; a split prompt would end vLLM's process.
    found = engine.generate([[number + 3] * 50 for number in range(5)], 0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    for item, own in zip(found, raw_logps(model, found), strict=True):
        assert item.logps == near(own)


def save_adapter(checkpoint: Path, folder: Path) -> PeftModel:
    """An adapter on the checkpoint that changes what it computes, also written to a folder."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.save_pretrained(folder)
    return adapted


@needs_vllm
def test_engine_when_an_adapter_is_merged_then_it_loads_the_folder_and_scores_as_the_adapter_did(
    checkpoint: Path, tmp_path: Path
) -> None:
    with_adapter = save_adapter(checkpoint, tmp_path / "adapter").eval()
    assert merge_adapter(tmp_path / "adapter", tmp_path / "merged").dtype == "float32"
    params = PLAIN.model_copy(update={"vllm": VllmOptions(**OPTIONS)})
    found = generated(VllmEngine(ModelConfig(name_or_path=str(tmp_path / "merged")), params), params, range(2))
    for item, own in zip(found, raw_logps(with_adapter, found), strict=True):
        # Merged weights are rounded to float32, which the adapter's sum is not.
        assert item.logps == near(own, within=1e-4)


@needs_vllm
def test_engine_when_the_model_has_an_adapter_scores_with_it_unmerged(checkpoint: Path, tmp_path: Path) -> None:
    save_adapter(checkpoint, tmp_path / "adapter")
    params = PLAIN.model_copy(update={"vllm": VllmOptions(**OPTIONS)})
    engine = VllmEngine(ModelConfig(name_or_path=str(checkpoint), adapter=str(tmp_path / "adapter")), params)
    found = generated(engine, params, range(2))
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    with_adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32"), tmp_path / "adapter"
    )
    for item, own in zip(found, raw_logps(with_adapter, found), strict=True):
        assert item.logps == near(own)
    assert (
        max(abs(np.subtract(a.logps or [], b)).max() for a, b in zip(found, raw_logps(plain, found), strict=True))
        > 0.01
    )


@needs_vllm
def test_greedy_texts_of_a_pretrained_model_when_both_engines_write_them_then_they_are_equal(
    real_models: Path, shared: Path
) -> None:
    model = ModelConfig(name_or_path=str(real_models / "smollm2-135m"), dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    messages = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines[:16]]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    options = {"max_model_len": 512, "engine_args": {"enforce_eager": True}}
    params = PLAIN.model_copy(update={"temperature": 0, "max_new_tokens": 48, "vllm": VllmOptions(**options)})
    served = VllmEngine(model, params).generate(prompts, 0)
    for one, other in zip(served, TransformersEngine(model, params).generate(prompts, 0), strict=True):
        assert one.text == other.text and one.token_ids == other.token_ids
        assert one.logps == near(other.logps, within=1e-3)


@needs_vllm
def test_engine_when_an_argument_has_a_setting_of_its_own_refuses_it(checkpoint: Path) -> None:
    params = PLAIN.model_copy(update={"vllm": VllmOptions(engine_args={"dtype": "float32"})})
    with pytest.raises(ConfigError, match=r"vllm\.engine_args: dtype"):
        VllmEngine(ModelConfig(name_or_path=str(checkpoint)), params)
    params = PLAIN.model_copy(update={"vllm": VllmOptions(engine_args={"no_such_argument": 1})})
    with pytest.raises(ConfigError, match=r"vLLM cannot load it: .*no_such_argument"):
        VllmEngine(ModelConfig(name_or_path=str(checkpoint)), params)


@needs_vllm
def test_stage_when_killed_and_taken_up_again_keeps_the_responses_that_exist(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"w{number} w3"}) + "\n" for number in range(12))
    )
    settings = {
        "prompts": {"dataset": str(tmp_path / "prompts.jsonl")},
        "models": [{"name_or_path": str(checkpoint)}],
        "engine": "vllm",
        "vllm": OPTIONS,
        **{"n": 8, "batch_size": 2, "max_new_tokens": 60},
    }
    code = (
        "import itertools, json, os, pathlib, signal, sys\n"
        "from regretless.sampling import job\n"
        "from regretless.sampling.sample import SampleConfig, run\n"
        "written, write, last = itertools.count(1), job.write_records, int(sys.argv[3])\n"
        "def write_and_die(*arguments):\n"
        "    write(*arguments)\n"
        "    if next(written) == last:\n"
        "        os.killpg(0, signal.SIGKILL)\n"  # vLLM's own processes too
        "if __name__ == '__main__':\n"
        "    job.write_records = write_and_die\n"
        "    run(SampleConfig.parse(json.loads(sys.argv[1]), 'sample'), pathlib.Path(sys.argv[2]))\n"
    )
    (tmp_path / "stage.py").write_text(code)

    def start(output: Path, last: int = 0) -> subprocess.Popen[bytes]:
        """The stage in a process of its own, which is killed after its `last` part (0: never)."""
        output.mkdir(exist_ok=True)
        command = [sys.executable, str(tmp_path / "stage.py"), json.dumps(settings), str(output), str(last)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)

    whole = tmp_path / "whole"
    assert start(whole).wait() == 0
    output = tmp_path / "killed"
    assert start(output, last=5).wait() == -signal.SIGKILL
    parts = {file.name: file.read_bytes() for file in output.rglob("responses.parts/*.parquet")}
    assert len(parts) == 5
    process = start(output)
    while process.poll() is None:
        for name, content in parts.items():
            with contextlib.suppress(FileNotFoundError):  # all parts go when the stage is done
                assert (output / "responses.parts" / name).read_bytes() == content
        time.sleep(0.05)
    assert process.returncode == 0
    ids = [[row.token_ids for row in read_responses(folder / "responses.parquet")[0]] for folder in (whole, output)]
    assert ids[0] == ids[1] and len(ids[0]) == 96


@pytest.fixture
def _own_environment() -> Iterator[None]:
    """Ray and vLLM leave settings in the environment."""
    before = dict(os.environ)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    yield
    os.environ.clear()
    os.environ.update(before)


@needs_vllm
@pytest.mark.skipif(os.environ.get("REGRETLESS_CLUSTER") != "1", reason="needs Ray in a network namespace")
@pytest.mark.usefixtures("_own_environment")
def test_stage_when_two_workers_of_a_cluster_run_vllm_then_tokens_are_those_of_one_process(
    checkpoint: Path, tmp_path: Path
) -> None:
    from ray_nodes import Nodes

    model = ModelConfig(name_or_path=str(checkpoint))
    prompts = [PromptRow(str(number), f"w{number} w3") for number in range(20)]
    params = ALL_ON.model_copy(
        update={"engine": "vllm", "vllm": VllmOptions(**OPTIONS), "n": 8, "batch_size": 8, "max_new_tokens": 60}
    )
    nodes = Nodes()
    with connected(nodes.config, tmp_path):
        assert executor().workers(Need("sample", gpus=1)) == 2
        sample_models([model], prompts, params, tmp_path / "together.parquet")
    nodes.cluster.shutdown()
    sample_models([model], prompts, params, tmp_path / "alone.parquet")
    names = ("alone", "together")
    alone, together = (read_responses(tmp_path / f"{name}.parquet")[0] for name in names)
    assert [row.response_id for row in together] == [row.response_id for row in alone]
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    assert len(together) == 160
    for one, other in zip(alone, together, strict=True):
        assert one.logps == near(other.logps or [])


def test_engine_when_vllm_is_missing_or_of_another_release_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def versions(known: Mapping[str, str]) -> None:
        def version(name: str) -> str:
            if name not in known:
                raise metadata.PackageNotFoundError(name)
            return known[name]

        monkeypatch.setattr(metadata, "version", version)

    versions({})
    with pytest.raises(ConfigError, match=r"vllm is not installed; install regretless\[vllm\]"):
        check_vllm()
    versions({"vllm": "0.11.2"})
    with pytest.raises(ConfigError, match=r"vllm 0\.11\.2 is installed, and 0\.32 is supported"):
        check_vllm()
