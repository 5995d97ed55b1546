"""Chat benchmarks in a recipe and on the command line: a tiny model answers, a scripted judge on loopback reads."""

from __future__ import annotations

import json
import logging
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from chat_helpers import PART
from forked import started
from regretless.cli.app import main
from regretless.core.errors import ConfigError
from regretless.core.files import read_json
from regretless.core.yaml_settings import merge
from regretless.data.rows import read_rows
from regretless.evaluation.chat.alpaca_eval import AlpacaEvalConfig
from regretless.evaluation.results import EvaluateConfig
from regretless.workflow.stage_folder import MANIFEST
from regretless.world.chat_files import write_chat_benchmarks
from regretless.world.local_judge import reply_to
from regretless.world.problems import Generator
from regretless.world.tiny_models import smoke_architecture
from regretless.world.tokenizer import TOKENS
from scripted_server import Act, Request, answer, failure, serving

KEY = "sk-secret-0123456789"
QUESTIONS = 16
STOPS = [" ", "0", "1", "2", "3", "4"]
JUDGED = 16 + 2 * 16 + 2 * 16
"""Preferences, verdicts in both orders, grades of both turns."""


def by_lot(request: Request) -> Act:
    """Replies as the local judge of smoke runs gives them."""
    return Act(json.dumps(reply_to(request.body)[1]).encode())


def item_of(request: Request) -> str:
    """What a request asks, whatever its code."""
    code = PART.findall(request.user)[0][1]
    return request.user.replace(code, "") + json.dumps(request.body.get("logprobs"))


def recipe(folder: Path, url: str, **evaluate: Any) -> Path:
    """A recipe file: questions of the embedded world, a model with random weights, all three benchmarks."""
    world, files = "{run}/world", folder / "chat"
    rng = random.Random(0)
    problems = Generator((2, 4), 9)
    write_chat_benchmarks(files, [problems.draw(rng) for _ in range(4 * QUESTIONS)], rng)
    chat = {
        "ae": {"benchmark": "alpaca_eval", "gamed_baselines": f"{files}/gamed_baselines.csv", "bootstrap": 100},
        "ah": {"benchmark": "arena_hard", "baseline": f"{files}/arena_hard_baseline.jsonl", "bootstrap": 100},
        "mt": {"benchmark": "mt_bench", "references": f"{files}/mt_bench_references.jsonl", "attempts": 1},
    }
    chat = {
        name: {"judge": "judge-1", "questions": f"{files}/{entry['benchmark']}.jsonl", "max_new_tokens": 8, **entry}
        for name, entry in chat.items()
    }
    server = {"base_url": url, "api_key_env": "CHAT_KEY", "retry_seconds": 0.01, "concurrency": 4}
    values = {
        "name": "chat",
        "output_dir": str(folder / "run"),
        "threads": 1,
        "world": {"prompts": 1, "test": 1, "policies": {"none": {"demonstrations": 1}}},
        "model": {"architecture": smoke_architecture("qwen3", len(TOKENS)), "tokenizer": f"{world}/tokenizer"},
        "evaluate": merge({"server": server, "chat": chat}, evaluate),
        "report": {},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def rows_of(run: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of the results by benchmark and metric."""
    return {(row["benchmark"], row["metric"]): row for row in read_json(run / "evaluate" / "results.json")["chat"]}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "160")  # a table that does not wrap


def test_benchmarks_when_run_in_a_recipe_then_failures_are_shown_the_key_is_nowhere_and_a_repeat_asks_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def script(request: Request) -> Act:
        if request.number == 0:
            return failure(500, f"bad key {KEY}")
        if "[[A>>B]]" in request.user and request.number % 8 == 0:
            return failure(400, f"refused, {KEY}")
        if "Rating" in request.user and request.number % 5 == 0:
            return answer(f"No number, but your key: {KEY}")
        return by_lot(request)

    with serving(script) as server:
        path = recipe(tmp_path, server.url)
        assert call("run", str(path)) == 0
        asked = len(server.requests)
        assert call("run", str(path)) == 0
        assert len(server.requests) == asked == JUDGED + 1
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {KEY}"}
    out, err = capfd.readouterr()
    rows = rows_of(tmp_path / "run")
    refused, unreadable = rows["ah", "win_rate"], rows["mt", "score"]
    assert refused["failed"] > 0 and refused["n"] < QUESTIONS
    assert unreadable["failed"] > 0
    judged = read_json(tmp_path / "run/evaluate/base/mt/chat_result.json")
    assert judged["failed"] == {"no rating": unreadable["failed"]}
    assert judged["metrics"]["score"]["judgments"] == 2 * QUESTIONS - unreadable["failed"]
    page = (tmp_path / "run/report/report.html").read_text(encoding="utf-8")
    assert f'<td class="number">{unreadable["failed"]}</td>' in page and "failed judgments" in page
    unknown = {place for place, row in rows.items() if row["n"] > 2 and row["standard_error"] is None}
    # Of 16 judgments the penalty may leave nothing.
    assert unknown <= {("ae", "length_controlled_win_rate")} and all(rows[place]["value"] is None for place in unknown)
    assert re.search(rf"│ mt +│ base +│ score \(1–10\) +│ +{QUESTIONS} │.* {unreadable['failed']} │", out)
    texts = [out, err, caplog.text]
    assert not [text for text in texts if KEY in text]
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]


def test_answers_are_greedy_where_published_and_of_mt_bench_by_category_and_turn(tmp_path: Path) -> None:
    with serving(by_lot) as server:
        second_judge = {"mt-2": {**_mt_bench(tmp_path), "judge": "judge-2"}}
        stopped = {"ae": {"stop": STOPS}}
        assert call("run", str(recipe(tmp_path, server.url, chat=second_judge | stopped))) == 0
        assert len(server.requests) == JUDGED + 2 * QUESTIONS
    samples = tmp_path / "run" / "evaluate" / "samples" / "base"
    found: dict[tuple[str, str], int] = {}
    for file in samples.glob("*/*/" + MANIFEST):
        sampling = read_json(file)["settings"]["sampling"]
        assert (sampling["n"], sampling["top_p"], sampling["top_k"], sampling["repetition_penalty"]) == (1, 1, 0, 1)
        name = f"{file.parts[-3].partition('-')[0]} {file.parts[-2].partition('-t')[0]}"
        assert sampling["stop"] == (STOPS if name.startswith("alpaca") else [])
        found[name, sampling["temperature"]] = read_json(file)["summary"]["responses"]
    # Sixteen questions, two of each category: writing and roleplay; stem and humanities; the other four.
    turn = {0.7: 4, 0.1: 4, 0.0: 8}
    assert found == {
        ("alpaca_eval turn-1", 0.0): 16,
        ("arena_hard turn-1", 0.0): 16,
        **{(f"mt_bench turn-{number}", temperature): count for number in (1, 2) for temperature, count in turn.items()},
    }, "two judges of the same answers: answered once"
    (cut,) = samples.glob("alpaca_eval-*/turn-1-*/responses.parquet")
    assert any(row["finish_reason"] == "stop_string" for _, row in read_rows(cut))
    (folder,) = samples.glob("mt_bench-*")
    first = [row for _, row in read_rows(folder / "turn-1-temperature-0.1" / "responses.parquet")]
    second = [row for _, row in read_rows(folder / "turn-2-temperature-0.1" / "responses.parquet")]
    assert [row["prompt"][1]["content"] for row in second] == [row["response"] for row in first]  # type: ignore[index]


def _mt_bench(run: Path) -> dict[str, Any]:
    folder = run / "chat"
    files = {"questions": f"{folder}/mt_bench.jsonl", "references": f"{folder}/mt_bench_references.jsonl"}
    return {"benchmark": "mt_bench", "max_new_tokens": 8, "attempts": 1, **files}


@pytest.mark.slow
def test_run_when_killed_while_judging_then_only_what_was_under_way_is_asked_again(tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    def slowly(request: Request) -> Act:
        asked[item_of(request)] += 1
        return Act(by_lot(request).body, delay=0.05)

    with serving(slowly) as server:
        path = recipe(tmp_path, server.url)
        for enough in (5, 40):  # in the first benchmark, and in a later one
            with started("run", path, log=tmp_path / f"log-{enough}") as process:
                while len(server.requests) < enough and process.is_alive():
                    time.sleep(0.005)
                process.kill()
                process.join()
            assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed"
            assert enough <= len(server.requests) < JUDGED
        assert call("run", str(path)) == 0
    assert len(asked) == JUDGED
    assert asked.total() - JUDGED <= 2 * 4, "no more than what was under way at the two kills"
    assert {row["failed"] for row in rows_of(tmp_path / "run").values()} == {0}


def test_budget_when_used_up_stops_the_run_and_a_larger_one_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prices = {"prompt_price": 1.0, "completion_price": 2.0}
    with serving(by_lot) as server:
        path = recipe(tmp_path, server.url, server={"max_requests": 20, **prices})
        assert call("run", str(path)) == 5
        assert len(server.requests) == 16 + 20
        said = re.sub(r"\s+", " ", capfd.readouterr().err)
        assert "evaluate/base/ah: judge judge-1: max_requests=20: all are used" in said
        assert "20 of 32 judgments could be read so far (20 requests, " in said and "raise the budget first" in said
        assert call("run", str(path), "evaluate.server.max_requests=40") == 0
        assert len(server.requests) == JUDGED
    result = read_json(tmp_path / "run/evaluate/base/ah/chat_result.json")
    assert result["requests"] == 32 and result["replies_reused"] == 20
    assert result["dollars"] == pytest.approx((result["prompt_tokens"] + 2 * result["completion_tokens"]) / 1e6)


def test_evaluate_verb_when_given_a_model_and_settings_then_it_judges_its_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(by_lot) as server:
        path = recipe(tmp_path, server.url)
        assert call("world", "--config", str(path)) == 0
        files = tmp_path / "run" / "world"
        config = tmp_path / "evaluate.yaml"
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        section = json.loads(json.dumps(values["evaluate"]).replace("{run}", str(tmp_path / "run")))
        config.write_text(yaml.safe_dump(section), encoding="utf-8")
        model = tmp_path / "model"
        _save(model, files / "tokenizer")
        flags = ["--model", str(model), "--config", str(config), "--output", str(tmp_path / "out")]
        assert call("evaluate", *flags, "chat.ah.limit=4") == 0
        asked = len(server.requests)
        assert asked == JUDGED - 2 * (QUESTIONS - 4)
        assert call("evaluate", *flags, "chat.ah.limit=4") == 0
        assert len(server.requests) == asked
    results = read_json(tmp_path / "out" / "results.json")
    assert {(row["benchmark"], row["label"]) for row in results["chat"]} == {
        (name, "model") for name in ("ae", "ah", "mt")
    }
    assert "length controlled win rate (%)" in capfd.readouterr().out


def _save(folder: Path, tokenizer: Path) -> None:
    from regretless.modeling.load import ModelConfig, load_model, load_tokenizer

    config = ModelConfig(architecture=smoke_architecture("qwen3", len(TOKENS)), tokenizer=str(tokenizer))
    load_model(config).save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)


def test_judge_when_its_key_or_a_file_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(by_lot) as server:
        path = recipe(tmp_path, server.url)
        assert call("run", str(path), "evaluate.chat.mt.references=http://127.0.0.1:1/none.jsonl") == 2
        said = capfd.readouterr().err
        assert "evaluate.chat.mt: http://127.0.0.1:1/none.jsonl: cannot be downloaded" in said
        monkeypatch.delenv("CHAT_KEY")
        assert call("run", str(path)) == 2
        said = capfd.readouterr().err
        for name in ("ae", "ah", "mt"):
            assert f"evaluate.chat.{name}.server: the environment variable CHAT_KEY is not set" in said
        assert not (tmp_path / "run" / "world").exists()
        monkeypatch.setenv("CHAT_KEY", KEY)
        assert call("run", str(path)) == 0
        monkeypatch.delenv("CHAT_KEY")
        assert call("run", str(path)) == 0, "nothing to ask: no key is needed"


def test_settings_when_shared_go_to_each_benchmark_and_its_own_go_over_them() -> None:
    entry = {"benchmark": "alpaca_eval", "questions": "q.jsonl", "judge": "j"}
    config = EvaluateConfig.parse(
        {
            "server": {"base_url": "http://localhost:1/v1", "concurrency": 3},
            "seed": 7,
            "chat": {"a": entry, "b": {**entry, "seed": 1, "server": {"concurrency": 9}}},
        },
        "evaluate",
    )
    first, second = config.chat["a"], config.chat["b"]
    assert isinstance(first, AlpacaEvalConfig)
    assert (first.server.base_url, first.server.concurrency, first.seed) == ("http://localhost:1/v1", 3, 7)
    assert (second.server.base_url, second.server.concurrency, second.seed) == ("http://localhost:1/v1", 9, 1)
    for wrong, problem in (
        ({}, "at least one benchmark"),
        (
            {"benchmarks": {"a": {"benchmark": "gsm8k"}}, "chat": {"a": entry}},
            "chat: `benchmarks` has the same label: a",
        ),
        ({"chat": {"a": {**entry, "benchmark": "arena"}}}, "chat.a: .*'alpaca_eval', 'arena_hard', 'mt_bench'"),
        ({"chat": {"a": {**entry, "benchmark": "arena_hard"}}}, "baseline: required, not given"),
    ):
        with pytest.raises(ConfigError, match=problem):
            EvaluateConfig.parse(wrong, "evaluate")


@pytest.mark.parametrize(
    "mistake",
    [
        lambda key: {"server": {"api_key": key}},
        lambda key: {"server": {"api_key_env": key}},
        lambda key: {"server": key},
        lambda key: {"chat": {"a": {"server": {"token": key}}}},
        lambda key: {"chat": {"a": {"server": {"base_url": f"http://me:{key}@host/v1"}}}},
        lambda key: {"chat": {"a": {"server": key}}},
        lambda key: {"chat": {"a": {"api_key": key}}},
        lambda key: {"api_key": key},
    ],
)
def test_key_when_written_into_the_settings_is_refused_without_being_shown(
    mistake: Callable[[str], dict[str, Any]],
) -> None:
    entry = {"benchmark": "alpaca_eval", "questions": "q.jsonl", "judge": "j"}
    with pytest.raises(ConfigError) as caught:
        EvaluateConfig.parse(merge({"chat": {"a": entry}}, mistake(KEY)), "evaluate")
    assert KEY not in str(caught.value)
