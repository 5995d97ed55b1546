from __future__ import annotations

import contextlib
import json
import math
import random
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from regretless.core.errors import BudgetError, ConfigError, ServerError
from regretless.core.top_logps import unpacked
from regretless.data.columns import Response, Verdict
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.labeling.pair import PairConfig
from regretless.labeling.pair import run as pair
from regretless.modeling.load import ModelConfig, tokenizer_fingerprint
from regretless.sampling.base import Completion
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.openai_engine import PROBES, OpenAIEngine
from regretless.sampling.sample import SampleConfig, run
from regretless.servers.reply_store import ReplyStore
from scripted_server import Act, Request, completion, failure, serving

WORDS = ["<end>", " red", " blue", " green", " grey", " pink"]
LOGITS = [0.4, 1.0, 0.3, -0.2, -1.0, 0.1]
HOT = {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "repetition_penalty": 1.0}
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def log_softmax(scores: Mapping[int, float]) -> dict[int, float]:
    total = math.log(sum(math.exp(score) for score in scores.values()))
    return {token: score - total for token, score in scores.items()}


class Model:
    """A server whose model has six tokens and draws each regardless of the others, in every form of reply there is."""

    def __init__(self, meaning: str = "raw", *, ids: bool = True, hosted: bool = False, more: int = 0) -> None:
        self.meaning, self.ids, self.hosted, self.more = meaning, ids, hosted, more
        self.close = 0
        """Number of probes whose likeliest tokens are too close to tell anything."""

    def distributions(self, body: Mapping[str, Any]) -> tuple[dict[int, float], dict[int, float]]:
        """Log-probabilities that are told, and those that are drawn from."""
        is_close = any(probe in json.dumps(body) for probe in PROBES[: self.close])
        raw = log_softmax(dict(enumerate([0.9, *LOGITS[1:]] if is_close else LOGITS)))
        heated = log_softmax({token: score / body["temperature"] for token, score in raw.items()})
        likely = sorted(heated, key=lambda token: -heated[token])
        kept, mass = [], 0.0
        for token in likely[: body["top_k"] if body.get("top_k", -1) > 0 else None]:
            if mass < body["top_p"]:
                kept.append(token)
                mass += math.exp(heated[token])
        drawn = log_softmax({token: heated[token] for token in kept})
        return {"raw": raw, "processed": drawn, "temperature": heated}[self.meaning], drawn

    def __call__(self, request: Request) -> Act:
        body = request.body
        if self.hosted and (unknown := {"top_k", "min_p", "return_token_ids"} & set(body)):
            return failure(400, f"Unknown parameters: {unknown}")
        told, drawn = self.distributions(body)
        most = body.get("max_completion_tokens") or body["max_tokens"]
        draw = random.Random(body.get("seed", request.number))
        tokens: list[int] = []
        while len(tokens) < most and (not tokens or tokens[-1] != 0):
            tokens += draw.choices(list(drawn), [math.exp(value) for value in drawn.values()])
        text = "".join(WORDS[token] for token in tokens if token)
        reason = "stop" if tokens[-1] == 0 else "length"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.hosted and reason == "stop":
            tokens.pop()  # as OpenAI's does not tell the end token
        names = [f"token_id:{token}" for token in range(6)] if body.get("return_tokens_as_token_ids") else WORDS
        pieces = [(names[token], told[token]) for token in tokens]
        listed = body.get("top_logprobs") or int(body.get("logprobs") or 0)
        likely = sorted({**dict.fromkeys(range(6), -9999.0), **told}.items(), key=lambda item: -item[1])
        top = {names[token]: value for token, value in likely[: max(listed, 5) + self.more]}
        ids = {"token_ids": tokens} if self.ids else {}
        if request.path.endswith("/chat/completions"):
            tops = [{"token": word, "logprob": value} for word, value in top.items()]
            content = [{"token": word, "logprob": value, "top_logprobs": tops} for word, value in pieces]
            choice |= {"message": {"role": "assistant", "content": text}, "logprobs": {"content": content}, **ids}
            return completion(choice, **({"prompt_token_ids": [7, 8]} if self.ids else {}))
        logprobs = {
            "tokens": [word for word, _ in pieces],
            "token_logprobs": [value for _, value in pieces],
            "top_logprobs": [top] * len(pieces),
        }
        return completion({**choice, "text": text, "logprobs": logprobs, **ids})


def engine_for(url: str, shape: Mapping[str, Any], server: Mapping[str, Any] | None = None) -> OpenAIEngine:
    settings = {"base_url": url, "retry_seconds": 0.01, "max_tries": 2, **(server or {})}
    params = SamplingParams.parse({"engine": "openai", "n": 1, "max_new_tokens": 9, "server": settings, **shape}, "s")
    return OpenAIEngine(ModelConfig(name_or_path="colors"), params)


def asked(engine: OpenAIEngine, count: int = 6, seed: int = 1) -> list[Completion]:
    chat = engine.server.endpoint == "chat"
    prompt: Any = [{"role": "user", "content": "Which?"}] if chat else "Which?"
    return engine.generate([engine.encode(prompt)] * count, seed)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("meaning", ["raw", "processed"])
def test_logps_when_what_they_mean_is_found_out_are_recorded_as_that(endpoint: str, meaning: str) -> None:
    model = Model(meaning)
    with serving(model) as server:
        engine = engine_for(server.url, HOT, {"endpoint": endpoint})
        found = asked(engine)
        told, _ = model.distributions({**HOT})
        assert asked(engine) == found and asked(engine, seed=2) != found
    for item in found:
        assert item.logps == pytest.approx([told[token] for token in item.token_ids or []])
        assert (item.logps_kind, item.tokens) == ("raw" if meaning == "raw" else "sampled", None)
        assert item.sampled_logps == (None if meaning == "raw" else item.logps)
        assert item.text == "".join(WORDS[token] for token in item.token_ids or [] if token)
        assert item.finish_reason == ("stop" if (item.token_ids or [])[-1] == 0 else "length")
        assert item.prompt_token_ids == ([7, 8] if endpoint == "chat" else None)
    assert len({tuple(item.token_ids or []) for item in found}) > 1, "each response has a seed of its own"
    sent = server.requests[-1].body
    assert sent | {"seed": 0, "model": ""} == {
        "model": "",
        "seed": 0,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        **(
            {"messages": [{"role": "user", "content": "Which?"}], "logprobs": True, "max_completion_tokens": 9}
            if endpoint == "chat"
            else {"prompt": "Which?", "logprobs": 1, "max_tokens": 9}
        ),
    }


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("kind", ["raw", "sampled"])
def test_top_logps_when_the_server_tells_ids_are_those_of_the_distribution(endpoint: str, kind: str) -> None:
    model = Model("raw" if kind == "raw" else "processed")
    shape = {**HOT, "top_logps": 5, "top_logps_kind": kind}
    with serving(model) as server:
        found = asked(engine_for(server.url, shape, {"endpoint": endpoint}))
    sent = server.requests[-1].body
    assert (
        sent["return_tokens_as_token_ids"] and (sent["top_logprobs"] if endpoint == "chat" else sent["logprobs"]) == 5
    )
    told = {**dict.fromkeys(range(6), -math.inf), **model.distributions(HOT)[0]}
    likely = sorted(told.items(), key=lambda item: (-item[1], item[0]))[:5]
    for item in found:
        assert item.token_ids is not None and item.top_logps_kind == kind and item.tokens is None
        assert item.logps == pytest.approx([told[token] for token in item.token_ids])
        for entries in unpacked(item.top_logps or b"", len(item.token_ids)).tolist():
            assert [token for token, _ in entries] == [token for token, _ in likely]
            assert [logp for _, logp in entries] == pytest.approx([logp for _, logp in likely])


@pytest.mark.parametrize(
    ("shape", "server", "model", "message"),
    [
        ({"top_logps": 3}, {"extensions": False}, Model(), "top_logps needs the ids of the most likely tokens"),
        ({"top_logps": 3}, {"logprobs": False}, Model(), "top_logps needs the ids of the most likely tokens"),
        ({"top_logps": 5, **HOT}, {}, Model("processed"), "top_logps_kind: raw, but with this server .* are sampled"),
        ({"top_logps": 9}, {}, Model(), "expected the ids of 9 tokens in the place of each one, .* lower top_logps"),
        ({"top_logps": 3}, {}, Model(more=-5), "expected the ids of 3 tokens in the place of each one"),
        ({"top_logps": 3, "temperature": 0, "top_logps_kind": "sampled"}, {}, Model(), "with temperature 0 nothing is"),
    ],
)
def test_top_logps_when_the_server_cannot_tell_them_then_they_are_refused(
    shape: dict[str, Any], server: dict[str, Any], model: Model, message: str
) -> None:
    with serving(model) as address, pytest.raises((ConfigError, ServerError), match=message):
        asked(engine_for(address.url, {**PLAIN, **shape}, server))


def test_logps_when_nothing_changes_the_distribution_are_both_and_nobody_is_asked() -> None:
    with serving(Model("processed")) as server:
        found = asked(engine_for(server.url, PLAIN))
        assert len(server.requests) == 6
        assert server.requests[0].body["top_k"] == -1, "what is left out, a server takes from the checkpoint"
    assert all(item.logps == item.sampled_logps and item.logps_kind == "raw" for item in found)


@pytest.mark.parametrize("close", range(len(PROBES) + 1))
def test_meaning_when_the_likeliest_tokens_of_a_probe_are_close_then_the_next_one_is_asked(close: int) -> None:
    model = Model("raw")
    model.close = close
    with serving(model) as server:
        if close == len(PROBES):
            with pytest.raises(ConfigError, match="logprobs_mode: cannot be determined"):
                asked(engine_for(server.url, HOT))
            return
        assert {item.logps_kind for item in asked(engine_for(server.url, HOT), count=2)} == {"raw"}
        assert len(server.requests) == 2 * (close + 1) + 2


def test_engine_when_the_meaning_is_unknown_wrong_or_neither_says_what_to_do() -> None:
    contradiction = "logprobs_mode: raw, but the server's log-probabilities are processed"
    with serving(Model("processed")) as server, pytest.raises(ConfigError, match=contradiction):
        asked(engine_for(server.url, HOT, {"logprobs_mode": "raw"}))
    with serving(Model("temperature")) as server:
        with pytest.raises(ConfigError, match="follow the temperature but not top-p"):
            asked(engine_for(server.url, HOT))
        found = asked(engine_for(server.url, {**PLAIN, "temperature": 0.7}))
        assert {item.logps_kind for item in found} == {"sampled"}

    def silent(request: Request) -> Act:
        reply = json.loads(Model()(request).body)
        for entry in reply["choices"][0]["logprobs"]["content"]:
            entry["top_logprobs"] = []
        return completion(reply["choices"][0])

    with serving(silent) as server:
        with pytest.raises(ConfigError, match=r"model colors: server.logprobs_mode: cannot be determined"):
            asked(engine_for(server.url, HOT))
        assert asked(engine_for(server.url, HOT, {"logprobs_mode": "processed"}))[0].logps_kind == "sampled"
    with pytest.raises(ServerError, match="the server does not answer"):
        asked(engine_for(server.url, HOT))


def test_engine_when_no_token_is_likely_still_finds_out_what_logps_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.WORDS", ["<end>", *(f" w{number}" for number in range(400))])
    monkeypatch.setattr(f"{__name__}.LOGITS", [1.0, 0.5, *[0.0] * 399])
    for meaning, kind in (("processed", "sampled"), ("raw", "raw")):
        with serving(Model(meaning)) as server:
            assert engine_for(server.url, HOT).kind == kind


def test_hosted_model_without_ids_keeps_token_strings_down_to_the_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hosted-0123456789")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One color?"}\n{"prompt": "Two colors?"}\n')
    settings: dict[str, Any] = {
        "engine": "openai",
        "prompts": {"dataset": str(tmp_path / "prompts.jsonl"), "template": "user"},
        "models": [{"name_or_path": "colors"}, {"name_or_path": "colors-2"}],
        "n": 4,
        "max_new_tokens": 30,
        **PLAIN,
    }
    with serving(Model(ids=False, hosted=True)) as server, serving(Model(ids=False, hosted=True)) as second:
        settings["server"] = {
            "base_url": server.url,
            "base_urls": {"colors-2": second.url},
            "api_key_env": "OPENAI_API_KEY",
            "extensions": False,
        }
        summary = run(SampleConfig.parse(settings, "sample"), tmp_path)
        assert {request.body["model"] for request in server.requests} == {"colors"}
        assert {request.body["model"] for request in second.requests} == {"colors-2"}
        with pytest.raises(ConfigError, match="this server has no top_k and no repetition_penalty"):
            run(SampleConfig.parse({**settings, "top_k": 40}, "sample"), tmp_path / "other")
    rows, refused = read_responses(tmp_path / "responses.parquet")
    assert not refused and len(rows) == 16
    assert summary["tokens"] == sum(len(row.tokens or []) for row in rows) > 16
    for row in rows:
        assert row.token_ids is None and "".join(row.tokens or []) == row.response
        assert len(row.logps or []) == len(row.tokens or [])
        assert (row.engine, row.tokenizer, row.logps_kind) == ("openai", None, "raw")
        assert "sk-hosted" not in str(row) and json.loads(row.sampling or "")["server"]["extensions"] is False

    verdicts = [Verdict.CORRECT, Verdict.WRONG] * 8
    labeled = [Response(**{**vars(row), "verdict": v}) for row, v in zip(rows, verdicts, strict=True) if row.response]
    write_records(tmp_path / "verified.parquet", labeled)
    (tmp_path / "pair").mkdir()
    pair(PairConfig(), tmp_path / "verified.parquet", tmp_path / "pair")
    pairs, _ = read_pairs(tmp_path / "pair/pairs.parquet")
    assert pairs
    for item in pairs:
        assert item.chosen.tokens and len(item.chosen.tokens) == len(item.chosen.logps or [])
        assert item.chosen.text == [{"role": "assistant", "content": "".join(item.chosen.tokens)}]


def test_completions_when_the_tokenizer_is_named_sends_and_records_its_ids(tmp_path: Path) -> None:
    backend = Tokenizer(WordLevel({"<end>": 0, "user": 1, "Which": 2, "one": 3}, unk_token="<end>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    with serving(Model()) as server:
        params = SamplingParams.parse(
            {"engine": "openai", "n": 1, "server": {"base_url": server.url, "endpoint": "completions"}, **PLAIN}, "s"
        )
        engine = OpenAIEngine(ModelConfig(name_or_path="colors", tokenizer=str(tmp_path)), params)
        (found,) = engine.generate([engine.encode([{"role": "user", "content": "Which one"}])], 0)
        (continued,) = engine.generate([engine.encode_ids([1, 2, 3, 3])], 0)
    assert server.requests[0].body["prompt"] == [1, 2, 3] == found.prompt_token_ids
    assert server.requests[-1].body["prompt"] == [1, 2, 3, 3] == continued.prompt_token_ids
    assert engine.provenance.tokenizer == tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_token_ids_when_the_server_is_sent_none_then_they_are_refused(endpoint: str) -> None:
    engine = engine_for("http://127.0.0.1:1/v1", PLAIN, {"endpoint": endpoint})
    with pytest.raises(ConfigError, match=r"server\.endpoint: .* only endpoint: completions"):
        engine.encode_ids([1, 2])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"logprobs": None, "token_ids": None}, "returns no log-probabilities; start it so that it does, or set"),
        ({"token_ids": [1, 2, 3, 0, 0]}, "expected one value per token, got 2 values for 5 tokens"),
        (
            {"logprobs": {"content": [{"token": "a", "logprob": None}] * 2}},
            "0.logprob: Input .* number, got None",
        ),
        ({"logprobs": {"content": [{"token": "a", "logprob": 0.5}] * 2}}, "less than or equal to 0.001, got 0.5"),
        ({"message": {"content": "b", "reasoning_content": "a"}}, "removes the model's thoughts from the text"),
        (
            {"message": {"content": "a b"}, "token_ids": None},
            "^model colors: the log-probabilities do not belong to the text: no token stands for the end of the text, "
            "'b'; .* set server.logprobs: false",
        ),
        (
            {"message": {"content": None}, "finish_reason": "tool_calls"},
            "do not belong to the text: token 0 is 'a', and the text has nothing there",
        ),
    ],
)
def test_reply_when_its_log_probabilities_cannot_be_those_of_its_text_is_refused(
    change: dict[str, Any], problem: str
) -> None:
    good = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"content": "a"},
        "token_ids": [1, 0],
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "<end>", "logprob": -0.5}]},
    }
    with serving(lambda request: completion({**good, **change})) as server:
        engine = engine_for(server.url, PLAIN)
        with pytest.raises(ServerError, match=problem):
            asked(engine)
        if "thoughts" in problem or "no log" in problem:
            without = asked(engine_for(server.url, PLAIN, {"logprobs": False}), count=1)[0]
            assert (without.logps, without.logps_kind) == (None, None)


def test_reply_when_one_is_bad_is_asked_for_again_and_half_characters_are_repaired(tmp_path: Path) -> None:
    model = Model()

    def script(request: Request) -> Act:
        reply = json.loads(model(request).body)
        if request.number % 3 == 0:
            entries = reply["choices"][0]["logprobs"]["content"]
            entries[0] = {**entries[0], "logprob": math.nan}
        reply["choices"][0]["message"]["content"] += "\ud800"
        return Act(json.dumps({**reply, "usage": [10**30]}).encode())

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One color?"}\n{"prompt": "Two colors?"}\n')
    settings: dict[str, Any] = {
        "engine": "openai",
        "prompts": {"dataset": str(tmp_path / "prompts.jsonl"), "template": "user"},
        "models": [{"name_or_path": "colors"}],
        "n": 4,
        **PLAIN,
    }
    with serving(script) as server:
        settings["server"] = {"base_url": server.url, "retry_seconds": 0.01, "concurrency": 1, "max_tokens": 10**6}
        run(SampleConfig.parse(settings, "sample"), tmp_path)
        assert len(server.requests) == 12
    rows, refused = read_responses(tmp_path / "responses.parquet")
    assert not refused and len(rows) == 8
    assert all(row.response.endswith("\ufffd") and len(row.logps or []) == len(row.token_ids or [0]) for row in rows)


def test_ids_when_the_named_tokenizer_lacks_one_are_refused(tmp_path: Path) -> None:
    backend = Tokenizer(WordLevel({"<end>": 0, "one": 1}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path)
    settings = {"endpoint": "completions", "max_tries": 2, "retry_seconds": 0.01}
    with serving(Model()) as server:
        params = {"engine": "openai", "n": 1, "server": {"base_url": server.url, **settings}, **PLAIN}
        engine = OpenAIEngine(
            ModelConfig(name_or_path="colors", tokenizer=str(tmp_path)), SamplingParams.parse(params, "s")
        )
        with pytest.raises(ServerError, match=r"token id beyond the vocabulary \(\d, and the tokenizer .* has 2; set"):
            engine.generate([engine.encode("one")], 0)
        assert len(server.requests) == 2


def test_server_when_it_fails_or_refuses_or_the_budget_ends_says_so() -> None:
    flaky = Model()
    with serving(lambda request: failure(500) if request.number % 2 else flaky(request)) as server:
        engine = engine_for(server.url, PLAIN, {"max_requests": 12, "max_tries": 9, "concurrency": 1})
        assert len(asked(engine)) == 6
        with pytest.raises(BudgetError, match="model colors: max_requests=12: all are used"):
            asked(engine)
    problem = r'colors: 1 of 1 prompts got no response:\n  - prompt \d: "Which\?": refused with HTTP 400: .*too long'
    off = dict.fromkeys(("extensions", "send_seed", "logprobs"), False)
    settings = {
        "server.extensions: false (top_k, min_p, repetition_penalty, return_token_ids) or "
        "server.send_seed: false (seed) or server.logprobs: false (logprobs) or ": {},
        "": off,
    }
    for advice, given in settings.items():
        with (
            serving(lambda request: failure(400, "too long")) as server,
            pytest.raises(ServerError, match=problem) as error,
        ):
            asked(engine_for(server.url, PLAIN, given))
        limit = "another server.limit_parameter (max_completion_tokens)."
        assert f"\nFor a parameter that it does not accept, set {advice}{limit} Check the" in str(error.value)


def test_seed_when_the_server_refuses_it_is_not_sent_and_replies_stay_apart(tmp_path: Path) -> None:
    plain = Model()
    with serving(lambda request: failure(422, "seed") if "seed" in request.body else plain(request)) as server:
        with pytest.raises(ServerError, match="refused with HTTP 422"):
            asked(engine_for(server.url, PLAIN))
        engine = engine_for(server.url, PLAIN, {"send_seed": False}).with_replies(tmp_path / "replies.db")
        first, requests = asked(engine), len(server.requests)
        # Each of the six equal requests has a reply of its own, and none is asked for again.
        assert asked(engine) == first and len(server.requests) == requests
        assert asked(engine, seed=2) != first and len(server.requests) == requests + 6


def test_settings_when_engine_and_server_do_not_fit_are_refused() -> None:
    given = {"prompts": {"dataset": "p.jsonl"}, "models": [{"name_or_path": "m"}]}
    with pytest.raises(ConfigError, match="server: required by the engine openai"):
        SampleConfig.parse({**given, "engine": "openai"}, "sample")
    with pytest.raises(ConfigError, match="server: the engine transformers uses none"):
        SampleConfig.parse({**given, "server": {"base_url": "http://127.0.0.1:1/v1"}}, "sample")
    with pytest.raises(
        ConfigError, match=r"base_urls: expected an http\(s\) address without user.*\(got '\(hidden\)'\)"
    ):
        SamplingParams.parse({"engine": "openai", "server": {"base_urls": {"a": "http://user:secret@host"}}}, "sample")
    engine = engine_for("http://127.0.0.1:1/v1", PLAIN)
    with pytest.raises(ConfigError, match="chat needs messages, and the prompts are plain texts"):
        engine.encode("text")
    engine = engine_for("http://127.0.0.1:1/v1", PLAIN, {"endpoint": "completions"})
    with pytest.raises(ConfigError, match="completions needs plain texts, and the prompts are messages"):
        engine.encode([{"role": "user", "content": "Which?"}])
    params = SamplingParams.parse({"engine": "openai", "server": {"base_url": "http://127.0.0.1:1/v1"}}, "sample")
    with pytest.raises(ConfigError, match="needs the server's name for it"):
        OpenAIEngine(ModelConfig(name_or_path="a", adapter="b"), params)


def stage(folder: Path, prompts: list[str], server: Mapping[str, Any], **changes: Any) -> SampleConfig:
    """Settings of a stage with two responses to each prompt, requested one at a time; `folder` is its own."""
    folder.mkdir(exist_ok=True)
    file = folder.parent / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    given = {
        "engine": "openai",
        "prompts": {"dataset": str(file), "template": "user"},
        "models": [{"name_or_path": "colors"}],
        "server": {"retry_seconds": 0.01, "max_tries": 2, "concurrency": 1, **server},
        "n": 2,
        "max_new_tokens": 9,
    }
    return SampleConfig.parse({**given, **PLAIN, **changes}, "sample")


def refusing(word: str, model: Callable[[Request], Act]) -> Callable[[Request], Act]:
    return lambda request: failure(400, "too long") if word in request.user else model(request)


PROMPTS = ["One color?", "Two of all the colors?", "Three colors?"]


def test_prompt_when_the_server_refuses_it_is_named_and_replies_to_the_others_are_paid_once(tmp_path: Path) -> None:
    folder, file = tmp_path / "sample", tmp_path / "sample.cache/responses.replies.sqlite"
    named = (
        r'model colors: 1 of 3 prompts got no response:\n  - row 2 of the prompts: "Two of all the colors\?": refused '
        r"with HTTP 400: .*too long.*\nAll other replies are kept"
    )
    with serving(refusing("Two", Model())) as server:
        with pytest.raises(ServerError, match=named):
            run(stage(folder, PROMPTS, {"base_url": server.url}), folder)
        asked_for = [request.user for request in server.requests]
        assert sorted(asked_for) == ["One color?", "One color?", "Three colors?", "Three colors?", PROMPTS[1]]
        with pytest.raises(ServerError, match=named):
            run(stage(folder, PROMPTS, {"base_url": server.url}), folder)
        assert [request.user for request in server.requests[5:]] == [PROMPTS[1]]
        assert run(stage(folder, PROMPTS[::2], {"base_url": server.url}), folder)["responses"] == 4
        assert len(server.requests) == 6, "a response does not depend on the other prompts"
        clean = tmp_path / "clean"
        run(stage(clean, PROMPTS[::2], {"base_url": server.url}), clean)
    rows = [read_responses(place / "responses.parquet")[0] for place in (folder, clean)]
    assert rows[0] == rows[1]
    with ReplyStore(file) as store:
        assert store.spent("colors").requests == 6
    with contextlib.closing(sqlite3.connect(file)) as opened:
        assert opened.execute("SELECT count(*) FROM replies").fetchone() == (0,), "they are in the responses now"


def test_prompts_when_none_gets_a_reply_then_each_is_named_once_and_in_order(tmp_path: Path) -> None:
    with serving(lambda request: failure(500)) as server, pytest.raises(ServerError) as error:
        run(stage(tmp_path, PROMPTS, {"base_url": server.url, "max_tries": 1, "retry_seconds": 0.001}), tmp_path)
    first, *lines, _ = str(error.value).splitlines()
    assert first == "model colors: 3 of 3 prompts got no response:"
    assert [line.split(":")[0] for line in lines] == [f"  - row {number} of the prompts" for number in (1, 2, 3)]


def test_prompts_when_many_in_a_row_are_refused_then_the_rest_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regretless.sampling.openai_engine.MOST_REFUSALS", 4)
    monkeypatch.setattr("regretless.sampling.base.MOST_NAMED", 2)
    with serving(refusing("w", Model())) as server:
        engine = engine_for(server.url, PLAIN, {"concurrency": 1})
        texts = ["w1", "w2", "w2", "w3", "ok", "w4", "w5", "w6", "w7", "ok"]
        prompts = [engine.encode([{"role": "user", "content": text}]) for text in texts]
        with pytest.raises(ServerError, match=r"7 of 8 prompts .* so many in a row .*no more were sent:") as error:
            engine.generate(prompts, 0)
        assert [request.user for request in server.requests] == ["w1", "w2", "w3", "ok", "w4", "w5", "w6", "w7"]
    assert 'prompt 2: "w2"' in str(error.value) and "w3" not in str(error.value)
    assert "and 5 more" in str(error.value)
    monkeypatch.setattr("regretless.sampling.openai_engine.MOST_FAILURES", 2)
    with serving(lambda request: failure(500)) as server:
        engine = engine_for(server.url, PLAIN, {"concurrency": 1})
        with pytest.raises(ServerError, match=r"2 of 8 prompts [^$]* no reply: 2 tries; the last one: HTTP 500"):
            engine.generate(prompts, 0)
        assert len(server.requests) == 4


def test_budget_when_runs_are_repeated_counts_all_of_them_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    model, folder = Model(), tmp_path / "sample"
    with serving(lambda request: Act(drop=True) if request.number == 1 else model(request)) as server:
        for requests in (4, 4, 5, 7):
            settings = stage(folder, PROMPTS, {"base_url": server.url, "max_requests": requests})
            if requests < 7:
                spent = (
                    rf"model colors: max_requests={requests}: all are used\nearlier runs are included, as counted in"
                )
                with pytest.raises(BudgetError, match=spent):
                    run(settings, folder)
            else:
                assert run(settings, folder)["responses"] == 6
            assert len(server.requests) == requests
        with ReplyStore(tmp_path / "sample.cache/responses.replies.sqlite") as store:
            spent_now = store.spent("colors")
        assert (spent_now.requests, spent_now.prompt_tokens) == (7, 600)
        lost = spent_now.unreported_tokens
        assert lost > 9, "a reply that was lost counts in full"
        more = stage(folder, [*PROMPTS, "Four?"], {"base_url": server.url, "max_tokens": 720 + lost + 100})
        with pytest.raises(BudgetError, match=f"{720 + lost} are used, and the next request may need up to"):
            run(more, folder)
        assert len(server.requests) == 7


def test_budget_when_it_is_spent_then_not_even_the_meaning_of_logps_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "sample"
    with serving(Model()) as server:
        settings = stage(folder, PROMPTS, {"base_url": server.url, "max_requests": 3}, **HOT)
        for _ in range(2):
            with pytest.raises(BudgetError, match="max_requests=3: all are used"):
                run(settings, folder)
        assert len(server.requests) == 3
        engine = engine_for(server.url, HOT).with_replies(tmp_path / "sample.cache/responses.replies.sqlite")
        again = engine.with_params(engine.params.model_copy(update={"top_k": 3})).with_replies(engine.replies or folder)
        assert again.spent is engine.spent and engine.spent.requests == 3, "what one file counts is added once"


def test_replies_when_the_server_then_tells_other_logps_are_not_used_again(tmp_path: Path) -> None:
    model = Model("raw")
    with serving(model) as server:
        for meaning, kind in (("raw", "raw"), ("raw", "raw"), ("processed", "sampled")):
            model.meaning = meaning
            engine = engine_for(server.url, HOT).with_replies(tmp_path / "replies.sqlite")
            assert {item.logps_kind for item in asked(engine, count=3)} == {kind}
        assert len(server.requests) == (2 + 3) + 2 + (2 + 3)


def test_replies_when_a_stream_is_left_early_are_kept(tmp_path: Path) -> None:
    with serving(Model()) as server:
        settings = {"concurrency": 1}
        engine = engine_for(server.url, PLAIN, settings).with_replies(tmp_path / "replies.sqlite")
        prompts = [engine.encode([{"role": "user", "content": f"Which, {number}?"}]) for number in range(4)]
        stream = engine.stream(prompts, range(4))
        found = dict([next(stream), next(stream)])
        del stream
        begun = len(server.requests)
        assert begun <= 3
        again = engine_for(server.url, PLAIN, settings).with_replies(tmp_path / "replies.sqlite")
        everything = dict(again.stream(prompts, range(4)))
        assert {number: everything[number] for number in found} == found and len(everything) == 4
        assert {request.user for request in server.requests[begun:]}.isdisjoint({"Which, 0?", "Which, 1?"})


def test_finish_reason_when_it_is_another_word_for_the_end_is_stop_and_unknown_ones_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = ["eos_token", "end_turn", None, "tool_calls", "tool_calls", "content_filter", "length", "stop"]

    def script(request: Request) -> Act:
        logprobs = {"content": [{"token": "a", "logprob": -0.5}]}
        reason = reasons[request.number]
        return completion({"index": 0, "finish_reason": reason, "message": {"content": "a"}, "logprobs": logprobs})

    with serving(script) as server:
        engine = engine_for(server.url, PLAIN, {"concurrency": 1})
        found = [item.finish_reason for item in asked(engine, count=len(reasons))]
    assert found == ["stop", "stop", "length", "length", "length", "length", "length", "stop"]
    said = capsys.readouterr().err
    assert said.count("unfamiliar finish_reason") == 1
    assert "were counted as cut: null (1), tool_calls (2);" in said


def test_logps_when_the_server_reports_an_unlikely_token_as_minus_9999_then_the_response_has_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replies = iter([-9999.0, -9998.0, -9999.0])

    def script(request: Request) -> Act:
        content = [{"token": " red", "logprob": -0.5}, {"token": " blue", "logprob": next(replies)}]
        message = {"role": "assistant", "content": " red blue"}
        return completion({"index": 0, "finish_reason": "stop", "message": message, "logprobs": {"content": content}})

    with serving(script) as server:
        found = asked(engine_for(server.url, PLAIN, {"concurrency": 1}), count=3)
    assert [(item.logps, item.sampled_logps, item.logps_kind) for item in found] == [
        (None, None, None),
        ([-0.5, -9998.0], [-0.5, -9998.0], "raw"),
        (None, None, None),
    ]
    assert [item.tokens for item in found] == [[" red", " blue"]] * 3
    said = capsys.readouterr().err
    assert said.count("no log-probabilities") == said.count("model colors: 2 responses have no log-probabilities") == 1


TOLD = ["The", " answer", ":", " 42", ".\n\n", "Q", ":", " 1"]
TEXT = "The answer: 42."


def cut_reply(tokens: list[str] | None, text: str = TEXT, reason: str = "stop", **told: Any) -> Act:
    """A chat completion that a server ended at the stop string, with these tokens."""
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}, **told}
    if tokens is not None:
        content = [{"token": token, "logprob": -float(place)} for place, token in enumerate(tokens)]
        choice["logprobs"] = {"content": content}
    return completion(choice)


@pytest.mark.parametrize(
    ("reply", "text", "tokens", "reason", "note"),
    [
        (cut_reply(TOLD[:7], stop_reason="\n\nQ:"), TEXT, 4, "stop_string", ""),
        (cut_reply(TOLD[:7], matched_stop="\n\nQ:"), TEXT, 4, "stop_string", ""),
        (cut_reply(TOLD[:7], TEXT + "\n\nQ:", stop_reason="\n\nQ:"), TEXT, 4, "stop_string", ""),
        (cut_reply(TOLD[:7]), TEXT, 4, "stop_string", ""),
        (cut_reply(TOLD, "".join(TOLD), "length"), TEXT, 4, "stop_string", ""),
        (cut_reply(TOLD[:4], reason="stop_sequence"), TEXT, 4, "stop_string", ""),
        (cut_reply(TOLD[:5], stop_reason="\n\nQ:"), TEXT, 4, "stop_string", ""),
        (cut_reply([" The", *TOLD[1:5]], stop_reason="\n\nQ:"), TEXT, 4, "stop_string", ""),
        (cut_reply(["\n", "\n", "Q:"], "", stop_reason="\n\nQ:"), "", 0, "stop_string", ""),
        (cut_reply([], "", stop_reason="\n\nQ:"), "", 0, "stop_string", ""),
        (cut_reply(["Nothing", " of", " it"], stop_reason="\n\nQ:"), TEXT, None, "stop_string", "show where the stop"),
        (cut_reply(None, stop_reason="\n\nQ:"), TEXT, None, "stop_string", ""),
        (cut_reply(None, TEXT + "\n\nQ: 1", "length"), TEXT, None, "stop_string", ""),
        (cut_reply([*TOLD[:4], ".", "<end>"], stop_reason=None), TEXT, 6, "stop", ""),
        (cut_reply([*TOLD[:4], ".", "<end>"]), TEXT, 6, "stop", ""),
        (cut_reply([*TOLD[:4], "."], reason="eos_token"), TEXT, 5, "stop", ""),
        (cut_reply([*TOLD[:4], "."], stop_reason="another"), TEXT, 5, "stop", ""),
        (cut_reply([*TOLD[:4], "."]), TEXT, 5, "stop", "does not say of 1 responses"),
        (cut_reply([*TOLD[:4], "."], reason="length"), TEXT, 5, "length", ""),
    ],
)
def test_reply_when_a_stop_string_is_set_then_text_and_tokens_end_before_it_however_the_server_cuts(
    reply: Act, text: str, tokens: int | None, reason: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    has_logps = b"logprobs" in reply.body
    with serving(lambda request: reply) as server:
        engine = engine_for(server.url, {**PLAIN, "stop": ["\n\nQ:"]}, {"logprobs": has_logps})
        (found,) = asked(engine, count=1)
    assert server.requests[-1].body["stop"] == ["\n\nQ:"]
    assert (found.text, found.finish_reason) == (text, reason)
    assert found.logps == (None if tokens is None else [-float(place) for place in range(tokens)])
    assert (None if found.tokens is None else len(found.tokens)) == tokens
    # The end token, which the text lacks, adds no byte to it.
    lengths = [0 if token == "<end>" else len(token) for token in found.tokens or []]
    assert (found.token_bytes or []) == lengths
    said = capsys.readouterr().err
    assert note in said and bool(said) == bool(note)


def test_reply_with_ids_when_a_stop_string_spans_tokens_then_the_ids_before_it_are_kept(tmp_path: Path) -> None:
    backend = Tokenizer(WordLevel({word.strip(): number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path)
    tokens = [1, 2, 3, 4, 5]
    content = [{"token": WORDS[token], "logprob": -float(token)} for token in tokens]
    message = {"role": "assistant", "content": " red blue"}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": tokens}
    with serving(lambda request: completion({**choice, "logprobs": {"content": content}})) as server:
        engine = engine_for(server.url, {**PLAIN, "stop": ["en gr"]})
        engine = OpenAIEngine(ModelConfig(name_or_path="colors", tokenizer=str(tmp_path)), engine.params)
        (found,) = asked(engine, count=1)
    assert (found.token_ids, found.logps, found.finish_reason) == ([1, 2], [-1.0, -2.0], "stop_string")
    assert found.text == "red blue gre"


def test_stop_strings_when_more_than_openais_servers_take_are_refused_for_those() -> None:
    stop = {**PLAIN, "stop": list("abcde")}
    assert engine_for("http://127.0.0.1:9/v1", stop).params.stop == list("abcde")
    with pytest.raises(ConfigError, match="at most 4 stop strings, and stop has 5"):
        engine_for("http://127.0.0.1:9/v1", stop, {"extensions": False})


def test_answer_when_a_filter_ends_it_before_its_first_token_then_its_prompt_is_named() -> None:
    nothing = {"index": 0, "finish_reason": "content_filter", "message": {"content": ""}, "logprobs": None}
    named = r'prompt \d: "Which\?": no text: a filter of the server ended the answer before its first token'
    with serving(lambda request: completion(nothing)) as server, pytest.raises(ServerError, match=named):
        asked(engine_for(server.url, PLAIN), count=2)
