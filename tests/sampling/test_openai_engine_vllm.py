"""The engine `openai` against a real server: vLLM, in the environment that `make test-engines` makes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from vllm_server import NAME, VllmServer, serving_vllm

from regretless.core.errors import ConfigError, ServerError
from regretless.data.codec import codec_of
from regretless.data.columns import Response
from regretless.data.responses import read_responses
from regretless.data.tokenization import encode_prompt
from regretless.modeling.chat_templates import CHAT_TEMPLATES
from regretless.modeling.scoring import score_responses
from regretless.sampling.sample import SampleConfig, run

pytestmark = pytest.mark.slow

QUESTIONS = ["Name any colour.", "One or two?", "Où est le café?", "Why?"]
HOT = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
SAMPLES, MOST_TOKENS, CONTEXT = 8, 24, 256
TOLERANCE = 1e-3
"""Nats per token, in float32."""
TRAINED = {"temperature": 0.3, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.7, "min_p": 0.2}
"""What the checkpoint's generation_config.json recommends: vLLM takes from there what a request leaves out."""
SERVERS = {
    "raw": ("--logprobs-mode", "raw_logprobs"),
    "processed": ("--logprobs-mode", "processed_logprobs"),
    # Tells of no token but the sampled one, so its meaning cannot be found out.
    "reticent": ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "1"),
}


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of an environment that has vLLM."""
    found = os.environ.get("REGRETLESS_VLLM")
    if not found:
        pytest.skip("needs vLLM: `make test-engines`, or the Python of an environment that has it in REGRETLESS_VLLM")
    if not Path(found).is_file():
        pytest.fail(f"REGRETLESS_VLLM={found}: no such file; expected the Python of an environment that has vLLM")
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights, whose tokens are bytes and pieces of words."""
    folder = tmp_path_factory.mktemp("checkpoint")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", *CHAT_TEMPLATES["chatml"].tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(QUESTIONS * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATES["chatml"].jinja
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's attention on CPUs takes
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        eos_token_id=end,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(36)
        model = Qwen3ForCausalLM(config)
    # So that some responses end and others are cut; the seed, so that the likeliest first tokens
    # are clearly apart, in what they say too: completions list them by their text.
    model.lm_head.weight.data[end] *= 1.5
    model.generation_config = GenerationConfig(eos_token_id=end, do_sample=True, **TRAINED)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, python: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with serving_vllm(python, checkpoint, log, "--max-model-len", str(CONTEXT), *SERVERS[request.param]) as server:
        yield server


@pytest.fixture
def server(running: VllmServer) -> Iterator[VllmServer]:
    """A running server; pytest shows what it logged during a test that fails."""
    start = running.log.stat().st_size
    yield running
    print(running.tail(start))


def on(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("running", [name], indirect=True, scope="module")


def sampled(
    server: VllmServer, folder: Path, settings: Mapping[str, Any], tokenizer: Path | None = None, **about: Any
) -> list[Response]:
    """Responses that the sample stage writes; `about`: settings of the server."""
    folder.mkdir(parents=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    chat = about.get("endpoint", "chat") == "chat"
    config = {
        "engine": "openai",
        "prompts": {"dataset": str(prompts), **({"template": "user"} if chat or tokenizer else {})},
        "models": [{"name_or_path": NAME, "tokenizer": None if tokenizer is None else str(tokenizer)}],
        "server": {"base_url": server.url, **about},
        "n": SAMPLES,
        "max_new_tokens": MOST_TOKENS,
        **settings,
    }
    run(SampleConfig.parse(config, "sample"), folder)
    rows, refused = read_responses(folder / "responses.parquet")
    assert not refused and len(rows) == len(QUESTIONS) * SAMPLES
    return rows


def raw_logps(checkpoint: Path, rows: list[Response]) -> list[list[float]]:
    """Nats of every token in the model's own distribution, by the package's own scoring."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    scores = score_responses(model, [(row.prompt_token_ids or [], row.token_ids or []) for row in rows])
    return [score.tolist() for score in scores]


def drawn_logps(checkpoint: Path, rows: list[Response]) -> list[list[float]]:
    """Nats of every token in the distribution that HOT draws from, by the logits processors of transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    shape = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(HOT["repetition_penalty"]),
            TemperatureLogitsWarper(HOT["temperature"]),
            TopKLogitsWarper(int(HOT["top_k"])),
            TopPLogitsWarper(HOT["top_p"]),
        ]
    )
    found: list[list[float]] = []
    for row in rows:
        prompt, response = row.prompt_token_ids or [], row.token_ids or []
        ids = torch.tensor([[*prompt, *response]])
        with torch.inference_mode():
            logits = model(ids).logits
            places = range(len(prompt), ids.shape[1])
            shaped = [shape(ids[:, :place], logits[:, place - 1]).log_softmax(-1) for place in places]
        found.append([scores[0, token].item() for scores, token in zip(shaped, response, strict=True)])
    return found


def near(values: list[float] | None) -> Any:
    return pytest.approx(values, abs=TOLERANCE, rel=0)


@pytest.mark.parametrize(
    ("endpoint", "named"), [("chat", False), ("completions", False), ("completions", True)], ids=str
)
@pytest.mark.parametrize("running", ["raw", "processed"], indirect=True, scope="module")
def test_logps_when_the_distribution_is_shaped_equal_a_re_score_of_what_they_are_recorded_as(
    server: VllmServer, checkpoint: Path, tmp_path: Path, endpoint: str, named: bool, request: pytest.FixtureRequest
) -> None:
    rows = sampled(server, tmp_path / "a", HOT, checkpoint if named else None, endpoint=endpoint)
    raw, drawn = raw_logps(checkpoint, rows), drawn_logps(checkpoint, rows)
    tells_raw = request.node.callspec.params["running"] == "raw"
    for row, own, shaped in zip(rows, raw, drawn, strict=True):
        assert row.logps == near(own if tells_raw else shaped)
        assert row.sampled_logps == (None if tells_raw else row.logps)
        assert row.logps_kind == ("raw" if tells_raw else "sampled")
        # None lies outside what top-k and top-p leave.
        assert min(shaped) > -10
    assert max(abs(one - other) for pair in zip(raw, drawn, strict=True) for one, other in zip(*pair, strict=True)) > 1

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    end = tokenizer.eos_token_id
    cut_characters = 0
    for row in rows:
        ids = row.token_ids or []
        assert row.prompt_token_ids == encode_prompt(tokenizer, row.prompt)
        assert end not in ids[:-1]
        assert row.finish_reason == ("stop" if ids[-1] == end else "length")
        assert ids[-1] == end or len(ids) == MOST_TOKENS
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert codec_of(tokenizer).spells(tuple(ids), row.response)
        assert row.response == text or text.endswith("\ufffd")
        cut_characters += row.response != text
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    assert cut_characters, "the case that a server keeps back part of a character occurs"

    again = sampled(server, tmp_path / "b", HOT, checkpoint if named else None, endpoint=endpoint)
    assert [(row.token_ids, row.response) for row in again] == [(row.token_ids, row.response) for row in rows]
    other = sampled(server, tmp_path / "c", {**HOT, "seed": 1}, checkpoint if named else None, endpoint=endpoint)
    assert sum(one.token_ids == two.token_ids for one, two in zip(rows, other, strict=True)) < len(rows) / 4


@pytest.mark.parametrize("running", ["raw", "processed"], indirect=True, scope="module")
def test_logps_when_nothing_shapes_the_distribution_are_raw_and_those_drawn_from(
    server: VllmServer, checkpoint: Path, tmp_path: Path
) -> None:
    rows = sampled(server, tmp_path / "a", PLAIN)
    for row, own in zip(rows, raw_logps(checkpoint, rows), strict=True):
        assert row.logps == row.sampled_logps == near(own)
        assert row.logps_kind == "raw"
    # What the checkpoint recommends would leave three tokens to start with.
    assert len({(row.token_ids or [])[0] for row in rows}) > len(QUESTIONS) * int(TRAINED["top_k"])


@on("reticent")
def test_engine_when_vllm_does_not_show_what_its_logps_mean_asks_and_takes_the_word(
    server: VllmServer, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"server\.logprobs_mode: cannot be determined from this server; set whether"):
        sampled(server, tmp_path / "a", HOT)
    rows = sampled(server, tmp_path / "b", HOT, logprobs_mode="processed")
    for row, shaped in zip(rows, drawn_logps(checkpoint, rows), strict=True):
        assert row.logps == row.sampled_logps == near(shaped)
        assert row.logps_kind == "sampled"


@on("raw")
def test_engine_when_vllm_refuses_or_contradicts_says_why(server: VllmServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="logprobs_mode: processed, but the server's log-probabilities are raw"):
        sampled(server, tmp_path / "a", HOT, logprobs_mode="processed")
    with pytest.raises(ServerError, match=rf"model {NAME}: .* got no response:[^$]*HTTP 400.*max_model_len=256"):
        sampled(server, tmp_path / "b", {**PLAIN, "max_new_tokens": CONTEXT + 1})
