"""AlpacaEval 2 from prompts to the result, with a scripted judge."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chat_helpers import parts_of, respond, server
from regretless.core.errors import ConfigError, DataError, ServerError
from regretless.core.files import read_json
from regretless.data.prompts import PromptRow
from regretless.data.responses import read_responses
from regretless.evaluation.chat import chat_results as stage
from regretless.evaluation.chat.alpaca_eval import AlpacaEvalConfig
from scripted_server import Act, Request, completion, serving

MODEL_SHARE = 0.8
"""Probability that the scripted judge gives to the model's answer."""


def reply(shares: Mapping[str, float]) -> Act:
    top = [{"token": token, "logprob": math.log(share)} for token, share in shares.items()]
    first = max(top, key=lambda item: float(str(item["logprob"])))
    choice = {
        "message": {"role": "assistant", "content": first["token"]},
        "logprobs": {"content": [{**first, "top_logprobs": top}]},
        "finish_reason": "length",
    }
    return completion(choice)


def script(request: Request) -> Act:
    parts = parts_of(request)
    if "answer 3 " in request.user:
        return reply({"The": 0.9, "Both": 0.1})
    share = MODEL_SHARE if parts["answer m"].startswith("answer") else 1 - MODEL_SHARE
    return reply({" m": 0.7 * share, "m": 0.2 * share, "M": 0.9 * (1 - share), "The": 0.1})


@pytest.fixture
def data(shared: Path) -> Path:
    return shared / "data" / "alpaca_eval"


def settings(data: Path, url: str, **changes: Any) -> AlpacaEvalConfig:
    values = {
        "questions": str(data / "alpaca_eval_gpt4_baseline.json"),
        "gamed_baselines": str(data / "gamed_baselines_reconstructed.csv"),
        "judge": "judge-1",
        "limit": 12,
        "bootstrap": 100,
        "server": server(url),
    }
    return AlpacaEvalConfig.parse({**values, **changes}, "alpaca_eval")


def answer(row: PromptRow) -> str:
    number = int(row.prompt_id.removeprefix("alpaca_eval-"))
    return f"answer {number} " + "{output_1} m " * number + ("…" if number == 5 else "")


def test_alpaca_eval_when_run_unshuffles_counts_failures_and_asks_nothing_twice(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "alpaca_eval"
    output.mkdir()
    with serving(script) as judge:
        config = settings(data, judge.url)
        ((temperature, prompts),) = stage.next_prompts(config, []).items()
        responses = respond(tmp_path / "responses.parquet", prompts, answer)
        assert (temperature, stage.next_prompts(config, [responses])) == (0.0, {})
        summary = stage.run(config, [responses], output)
        asked = len(judge.requests)
        again = stage.run(config, [responses], output)
    assert summary == again
    assert asked == 11 + 3, "an unreadable reply is asked for three times, and kept"
    assert len(judge.requests) == asked + 1, "and once more by another run"
    result = read_json(output / stage.RESULT)
    assert result["failed"] == {"neither answer among the most likely tokens": 1}
    assert (result["questions"], result["cut"]) == (12, 1)
    raw = result["metrics"]["win_rate"]
    assert (raw["n"], raw["wins"], raw["losses"]) == (11, 11, 0)
    assert raw["value"] == pytest.approx(100 * MODEL_SHARE)
    controlled = result["metrics"]["length_controlled_win_rate"]
    assert controlled["n"] == 11
    assert 0 < controlled["value"] < 100
    # The judge says the same of all answers: nothing is known of how its preferences vary.
    assert [rate[bound] for rate in (raw, controlled) for bound in ("low", "high")] == [None] * 4
    judgments = [json.loads(line) for line in (output / stage.JUDGMENTS).read_text().splitlines()]
    assert judgments[3]["preference"] is None
    assert [row["preference"] for row in judgments if row["index"] != 3] == pytest.approx([MODEL_SHARE] * 11)
    places = [parts_of(request)["answer m"].startswith("answer") for request in judge.requests]
    assert 2 < sum(places) < 12, "both orders are drawn"
    sent = {key: value for key, value in judge.requests[0].body.items() if key != "messages"}
    assert sent == {
        "model": "judge-1",
        "temperature": 1,
        "max_completion_tokens": 1,
        "logprobs": True,
        "top_logprobs": 5,
    }
    shown = [parts_of(request) for request in judge.requests]
    without = [parts for parts in shown if "{output_1} m" not in parts["answer m"] + parts["answer M"]]
    (first,) = without  # Requests arrive in any order; the answer of question 0 has none of it.
    assert "answer 0 " in first["answer m"] + first["answer M"], "texts are put in once"


def test_alpaca_eval_when_the_reference_is_another_models_responses_compares_with_them(
    data: Path, tmp_path: Path
) -> None:
    def other(row: PromptRow) -> str:
        return "reference " + "x" * 7

    with serving(lambda request: reply({"m": 0.5, "M": 0.5})) as judge:
        config = settings(data, judge.url, baseline=str(tmp_path / "base.parquet"), gamed_baselines=None)
        prompts = stage.next_prompts(config, [])[0.0]
        respond(tmp_path / "base.parquet", prompts, other)
        responses = respond(tmp_path / "responses.parquet", prompts, answer)
        stage.run(config, [responses], tmp_path)
    shown = {text for request in judge.requests for text in parts_of(request).values() if "x" * 7 in text}
    assert shown == {"reference xxxxxxx"}
    metrics = read_json(tmp_path / stage.RESULT)["metrics"]
    assert (metrics["win_rate"]["value"], metrics["win_rate"]["draws"]) == (50.0, 12)
    assert metrics["length_controlled_win_rate"]["problem"] == "needs `gamed_baselines`"


def test_alpaca_eval_when_gamed_baselines_are_of_other_answers_asks_nothing(data: Path, tmp_path: Path) -> None:
    with (data / "gamed_baselines_reconstructed.csv").open(newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if int(row["index"]) != 7]
    with (tmp_path / "few.csv").open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    prompts = stage.next_prompts(settings(data, "http://127.0.0.1:1/v1"), [])[0.0]
    responses = respond(tmp_path / "responses.parquet", prompts, answer)
    respond(tmp_path / "base.parquet", prompts, lambda row: "reference")
    changes = {
        r"^gamed_baselines: 0 instruction\(s\) without a difficulty, 12 with": {"baseline": tmp_path / "base.parquet"},
        r"^gamed_baselines: 1 instruction\(s\) without a difficulty, 0 with": {"gamed_baselines": tmp_path / "few.csv"},
    }
    with serving(script) as judge:
        for problem, change in changes.items():
            config = settings(data, judge.url, **{name: str(path) for name, path in change.items()})
            with pytest.raises(DataError, match=problem):
                stage.run(config, [responses], tmp_path)
    assert judge.requests == []


def test_alpaca_eval_when_the_server_gives_no_probabilities_stops_at_the_first_question(
    data: Path, tmp_path: Path
) -> None:
    bare = completion({"message": {"role": "assistant", "content": "m"}, "finish_reason": "length"})
    with serving(lambda request: bare) as judge:
        config = settings(data, judge.url, server=server(judge.url, concurrency=1, max_tries=3))
        responses = respond(tmp_path / "responses.parquet", stage.next_prompts(config, [])[0.0], answer)
        with pytest.raises(ServerError, match="returns no log-probabilities, which the answers are read from"):
            stage.run(config, [responses], tmp_path)
        assert len(judge.requests) == 3
        # One such reply, even the first of all, is another matter: a further try has them.
        judge.script = lambda request: bare if request.number == 3 else script(request)
        assert stage.run(config, [responses], tmp_path)["failed"] == 1, "the one that cannot be read"


def test_responses_that_are_not_the_benchmarks_are_refused(data: Path, tmp_path: Path) -> None:
    config = settings(data, "http://127.0.0.1:1/v1")
    prompts = stage.next_prompts(config, [])[0.0]
    renamed = [
        PromptRow(f"{row.prompt_id}0" if number == 2 else row.prompt_id, row.prompt)
        for number, row in enumerate(prompts)
    ]
    shifted = [
        PromptRow(row.prompt_id, other.prompt) for row, other in zip(prompts, prompts[1:] + prompts[:1], strict=True)
    ]
    cases = {
        r"1 question\(s\) without a response: alpaca_eval-11$": prompts[:-1],
        r"1 response\(s\) to no question of this benchmark: alpaca_eval-20$": renamed,
        r"12 response\(s\) to another text than the question's: alpaca_eval-0, .*, …$": shifted,
    }
    for problem, rows in cases.items():
        path = respond(tmp_path / "responses.parquet", rows, answer)
        with pytest.raises(DataError, match=problem):
            stage.run(config, [path], tmp_path)
    path = respond(tmp_path / "responses.parquet", prompts, answer)
    assert len(read_responses(path)[0]) == 12
    with pytest.raises(DataError, match=r"12 problem\(s\)\n.*second response to alpaca_eval-0; sample with n=1"):
        stage.run(config, [path, path], tmp_path)


def test_files_that_cannot_be_used_are_refused_before_anything_is_asked(data: Path, tmp_path: Path) -> None:
    config = settings(data, "http://127.0.0.1:1/v1")
    responses = respond(tmp_path / "responses.parquet", stage.next_prompts(config, [])[0.0], answer)
    with (data / "gamed_baselines_reconstructed.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))[:3]
    (tmp_path / "bare.jsonl").write_text(json.dumps({"instruction": "why?"}))
    (tmp_path / "template.txt").write_text("<|im_start|>user\n{instruction} {output_1}\n<|im_end|>")
    bad: dict[str, list[dict[str, Any]]] = {
        "columns.csv": [{"index": 1}],
        "number.csv": [{**rows[0], "std_delta_len": "x"}],
    }
    bad |= {"share.csv": [{**rows[0], "preference_fitted": "1.5"}]}
    for name, content in bad.items():
        with (tmp_path / name).open("w", newline="") as handle:
            writer = csv.DictWriter(handle, list(content[0]))
            writer.writeheader()
            writer.writerows(content)
    cases: list[tuple[dict[str, str], type[Exception], str]] = [
        ({"gamed_baselines": str(tmp_path / "columns.csv")}, DataError, "missing column.*std_delta_len.*found index"),
        ({"gamed_baselines": str(tmp_path / "number.csv")}, DataError, "expected numbers: could not convert"),
        ({"gamed_baselines": str(tmp_path / "share.csv")}, DataError, "preferences from 0 to 1"),
        ({"judge_prompt": str(tmp_path / "template.txt")}, ConfigError, "lacks {output_2}"),
        ({"judge_prompt": str(tmp_path / "nowhere.yaml")}, ConfigError, "cannot be read"),
        ({"questions": str(tmp_path / "responses.parquet")}, DataError, "missing column.s. instruction"),
        ({"questions": "hf://nonsense"}, ConfigError, "expected hf://datasets/<owner>/<name>/<file>"),
    ]
    for change, error, problem in cases:
        with pytest.raises(error, match=problem):
            stage.run(settings(data, "http://127.0.0.1:1/v1", **change), [responses], tmp_path)
    assert settings(data, "http://127.0.0.1:1/v1").files().keys() == {"questions", "gamed_baselines"}


def test_chatml_template_when_given_as_a_text_is_read_as_published(data: Path, tmp_path: Path) -> None:
    template = tmp_path / "alpaca_eval_clf.txt"
    template.write_text(
        "<|im_start|>system\nYou rank models.\n<|im_end|>\n<|im_start|>user\n"
        '{\n  "instruction": """{instruction}""",\n  "m": """{output_1}""",\n'
        '  "M": """{output_2}"""\n}\nBest:\n<|im_end|>\n'
    )
    with serving(lambda request: reply({"m": 0.5, "M": 0.5})) as judge:
        config = settings(data, judge.url, judge_prompt=str(template), limit=3)
        responses = respond(
            tmp_path / "responses.parquet", stage.next_prompts(config, [])[0.0], lambda row: "{output_2}"
        )
        stage.run(config, [responses], tmp_path)
    system, user = judge.requests[0].body["messages"]
    assert system == {"role": "system", "content": "You rank models."}
    assert user["content"].startswith('{\n  "instruction": """')
    assert user["content"].endswith("}\nBest:")
    assert user["content"].count('"""{output_2}"""') == 1, "braces in an answer stay"
