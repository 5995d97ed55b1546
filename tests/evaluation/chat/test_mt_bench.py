"""MT-Bench: two turns of prompts, ratings, and what is made of them; gains over the base model."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from chat_helpers import code_of, parts_of, respond, server
from regretless.core.errors import ConfigError, DataError
from regretless.core.files import path_fingerprint, read_json, write_json
from regretless.data.prompts import PromptRow
from regretless.evaluation.chat import chat_results as stage
from regretless.evaluation.chat.alpaca_eval import JudgedAnswer, win_rates
from regretless.evaluation.chat.mt_bench import Grade, MtBenchConfig, scores
from regretless.evaluation.results import results_table
from scripted_server import Act, Request, answer, serving

GROUPS = {0.7: 20, 0.0: 40, 0.1: 20}


@pytest.fixture
def data(shared: Path) -> Path:
    return shared / "data" / "mt_bench"


def settings(data: Path, url: str = "http://127.0.0.1:1/v1", **changes: Any) -> MtBenchConfig:
    values = {
        "questions": str(data / "question.jsonl"),
        "references": str(data / "reference_answer" / "gpt-4.jsonl"),
        "judge": "judge-1",
        "server": server(url),
    }
    return MtBenchConfig.parse({**values, **changes}, "mt_bench")


def answer_all(config: MtBenchConfig, folder: Path, text: str = "answer") -> list[Path]:
    """Responses to all prompts, turn by turn and temperature by temperature, as a pipeline makes them."""
    files: list[Path] = []
    while groups := stage.next_prompts(config, files):
        turn = 2 if files else 1
        made = [
            respond(folder / f"turn-{turn}-{temperature}.parquet", rows, lambda row: f"{text} to {row.prompt_id}")
            for temperature, rows in groups.items()
        ]
        files += made
    return files


def test_prompts_of_both_turns_come_by_temperature_and_the_second_holds_the_first_answer(
    data: Path, tmp_path: Path
) -> None:
    config = settings(data, template="assistant")
    first = stage.next_prompts(config, [])
    assert {temperature: len(rows) for temperature, rows in first.items()} == GROUPS
    files = [respond(tmp_path / f"{t}.parquet", rows, lambda row: f"said {row.prompt_id}") for t, rows in first.items()]
    second = stage.next_prompts(config, files)
    assert {temperature: len(rows) for temperature, rows in second.items()} == GROUPS
    question = json.loads((data / "question.jsonl").read_text(encoding="utf-8").splitlines()[0])
    row = second[0.7][0]
    assert (row.prompt_id, [message["role"] for message in row.prompt if isinstance(message, dict)]) == (
        "mt_bench-81-turn-2",
        ["system", "user", "assistant", "user"],
    )
    assert [message["content"] for message in row.prompt[1:] if isinstance(message, dict)] == [
        question["turns"][0],
        "said mt_bench-81-turn-1",
        question["turns"][1],
    ]
    files += [respond(tmp_path / f"{t}-2.parquet", rows, lambda row: "") for t, rows in second.items()]
    assert stage.next_prompts(config, files) == {}
    with pytest.raises(DataError, match=r"20 question\(s\) without a response"):
        stage.next_prompts(config, files[:2])


def test_mt_bench_when_run_shows_references_where_they_belong_and_reports_by_turn_and_category(
    data: Path, tmp_path: Path
) -> None:
    def script(request: Request) -> Act:
        parts = parts_of(request)
        if "turn-1 to" in request.user or "mt_bench-81-turn-2" in request.user:
            return answer("It says Rating: [[10]].")
        rating = 4 if "answer 2" in parts or "assistant's answer 2" in parts else 8
        return answer(f"Fine.\nRating {code_of(request)}: [[{rating}]]")

    with serving(script) as judge:
        config = settings(data, judge.url, seed=1)
        files = answer_all(config, tmp_path)
        summary = stage.run(config, files, tmp_path)
    result = read_json(tmp_path / stage.RESULT)
    assert result["failed"] == {"no rating": 1}
    assert (summary["questions"], summary["turn_1"], summary["turn_2"]) == (80, 8.0, 4.0)
    score = result["metrics"]["score"]
    assert score["value"] == pytest.approx((80 * 8 + 79 * 4) / 159)
    assert (score["n"], score["judgments"]) == (80, 159)
    assert {name: metric["judgments"] for name, metric in result["metrics"].items() if "category" in name} == {
        f"category_{name}": 19 if name == "writing" else 20
        for name in ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
    }
    assert all(request.body["temperature"] == 0 for request in judge.requests)
    references = {
        row["question_id"]: row["choices"][0]["turns"]
        for row in map(json.loads, (data / "reference_answer" / "gpt-4.jsonl").read_text().splitlines())
    }
    shown = [request.user for request in judge.requests if "right answer" in request.user]
    assert len(shown) == 2 * 30
    question_111 = [user for user in shown if "mt_bench-111-turn-1" in user]
    assert sorted(references[111][1] in user for user in question_111) == [False, True]
    assert all(references[111][0] in user for user in question_111)


def test_published_judge_prompts_when_given_are_sent_as_they_are(data: Path, tmp_path: Path) -> None:
    templates = {row["name"]: row for row in map(json.loads, (data / "judge_prompts.jsonl").read_text().splitlines())}
    questions = {
        f"{row['question_id']}": row for row in map(json.loads, (data / "question.jsonl").read_text().splitlines())
    }
    with serving(lambda request: answer("Good. Rating: [[6]]")) as judge:
        config = settings(data, judge.url, judge_prompt=str(data / "judge_prompts.jsonl"), limit=21)
        files = answer_all(config, tmp_path)
        assert stage.run(config, files, tmp_path)["score"] == 6.0
    sent = {json.dumps(request.body["messages"]) for request in judge.requests}
    for name, number in (("single-v1", "81"), ("single-math-v1", "101")):
        values = {"question": questions[number]["turns"][0], "answer": f"answer to mt_bench-{number}-turn-1"}
        values |= {"ref_answer_1": _reference(data, number)[0], "ref_answer_2": _reference(data, number)[1]}
        values |= {f"question_{turn}": questions[number]["turns"][turn - 1] for turn in (1, 2)}
        values |= {f"answer_{turn}": f"answer to mt_bench-{number}-turn-{turn}" for turn in (1, 2)}
        for published in (templates[name], templates[f"{name}-multi-turn"]):
            expected = [
                {"role": "system", "content": published["system_prompt"]},
                {"role": "user", "content": published["prompt_template"].format(**values)},
            ]
            assert json.dumps(expected) in sent, published["name"]


def _reference(data: Path, number: str) -> Sequence[str]:
    rows = map(json.loads, (data / "reference_answer" / "gpt-4.jsonl").read_text().splitlines())
    return {str(row["question_id"]): row["choices"][0]["turns"] for row in rows}.get(number, ["", ""])


def test_mt_bench_when_turns_or_references_do_not_fit_is_refused(data: Path, tmp_path: Path) -> None:
    config = settings(data)
    files = answer_all(config, tmp_path / "a")
    other = answer_all(config, tmp_path / "b", "another answer")
    with pytest.raises(DataError, match="second turn does not continue the first answer"):
        stage.run(config, files[:3] + other[3:], tmp_path)
    with pytest.raises(ConfigError, match=r"30 question\(s\) without a reference, such as 101: `references` is not"):
        stage.next_prompts(settings(data, references=None), [])
    plain = [
        PromptRow(row.prompt_id, str(row.prompt[-1]["content"]))
        for rows in stage.next_prompts(config, []).values()
        for row in rows
        if isinstance(row.prompt, list)
    ]
    path = respond(tmp_path / "plain.parquet", plain, lambda row: "said")
    with pytest.raises(DataError, match="a second turn needs a conversation"):
        stage.next_prompts(config, [path])


def test_score_when_turns_of_a_question_agree_has_the_error_of_its_questions() -> None:
    ratings = [3.0, 5.0, 6.0, 9.0, 8.0]
    grades = [Grade(str(number), "math", turn, rating) for number, rating in enumerate(ratings) for turn in (1, 2)]
    score = scores(grades)["metrics"]["score"]
    assert score["value"] == pytest.approx(mean(ratings))
    assert score["standard_error"] == pytest.approx(stdev(ratings) / math.sqrt(5))
    missing = [*grades, Grade("9", "math", 1, None, "no rating"), Grade("9", "math", 2, 1.0)]
    found = scores(missing)
    assert (found["failed"], found["questions"]) == ({"no rating": 1}, 6)
    assert found["metrics"]["score"]["value"] == pytest.approx((2 * sum(ratings) + 1) / 11)
    lonely = scores([Grade("1", "math", 1, 7.0)])["metrics"]["score"]
    assert (lonely["value"], lonely["standard_error"], lonely["low"]) == (7.0, None, None)


def test_scores_when_questions_are_few_then_intervals_stay_on_the_scale_or_are_empty() -> None:
    ratings = scores([Grade(str(number), "math", 1, rating) for number, rating in enumerate((10.0, 10.0, 9.0))])
    score = ratings["metrics"]["score"]
    assert score["low"] == pytest.approx(29 / 3 - 4.3027 / 3, abs=1e-3)
    assert score["high"] == 10, "the t-interval would end at 11.1"
    equal = scores([Grade(str(number), "math", turn, 7.0) for number in range(6) for turn in (1, 2)])
    assert {(part["value"], part["low"], part["high"]) for part in equal["metrics"].values()} == {(7.0, None, None)}


@pytest.mark.parametrize(
    ("before", "after", "low", "high"),
    [
        ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), pytest.approx(75 - 3.18245 * 25, abs=1e-3), 100),
        ((1.0, 0.5, 0.0), (1.0, 0.5, 0.0), None, None),
        ((0.5, 0.5), (1.0, 1.0), None, None),
    ],
)
def test_gain_when_questions_are_few_then_its_interval_stays_possible_or_is_empty(
    tmp_path: Path, before: tuple[float, ...], after: tuple[float, ...], low: float | None, high: float | None
) -> None:
    for label, outcomes in (("base", before), ("repo", after)):
        comparisons = [JudgedAnswer(number, outcome, 10, 10) for number, outcome in enumerate(outcomes)]
        result = win_rates(comparisons, None) | {"judge": "j", "cut": 0, "requests": 0, "dollars": None}
        write_json(tmp_path / label / "alpaca_eval" / stage.RESULT, result)
    rows = {(row["label"], row["metric"]): row for row in stage.collect(tmp_path)}
    trained = rows["repo", "win_rate"]
    assert (trained["gain_low"], trained["gain_high"]) == (low, high)


def test_results_of_models_come_together_with_gains_paired_by_question(data: Path, tmp_path: Path) -> None:
    def script(request: Request) -> Act:
        number = int(request.user.partition("to mt_bench-")[2].partition("-turn")[0])
        gain = 1 + number % 2 if "better answer to" in request.user else 0
        return answer(f"Rating {code_of(request)}: [[{number % 5 + 1 + gain}]]")

    with serving(script) as judge:
        config = settings(data, judge.url)
        for label, text in (("base", "answer"), ("repo", "better answer")):
            folder = tmp_path / "evaluate" / label / "mt_bench"
            folder.mkdir(parents=True)
            stage.run(config, answer_all(config, tmp_path / label, text), folder)
    rows = stage.collect(tmp_path / "evaluate")
    (base,), (trained,) = (
        [row for row in rows if (row["label"], row["metric"]) == (label, "score")] for label in ("base", "repo")
    )
    assert (base["gain"], base["value"], trained["value"]) == (None, 3.0, 4.5)
    assert trained["gain"] == pytest.approx(1.5)
    assert trained["gain_high"] - trained["gain_low"] == pytest.approx(2 * 1.99 * 0.503 / math.sqrt(80), rel=0.01)
    assert trained["gain_high"] - trained["gain_low"] < 0.4 * (trained["high"] - trained["low"])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(results_table({"rows": [], "seeds": [], "chat": rows}))
    shown = console.export_text()
    assert "+1.50 [+1.39, +1.61]" in shown
    assert "turn 1" not in shown, "parts are left to the report"
    written = read_json(tmp_path / "evaluate/repo/mt_bench" / stage.RESULT)
    assert written["files"] == {"references": path_fingerprint(config.files()["references"])}
    changed = written | {"judge": "judge-2"}
    (tmp_path / "evaluate/repo/mt_bench" / stage.RESULT).write_text(json.dumps(changed))
    with pytest.raises(DataError, match="base and repo were judged differently"):
        stage.collect(tmp_path / "evaluate")


def test_settings_are_told_apart_by_their_benchmark() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(dict[str, stage.ChatBenchmark])
    common = {"questions": "q.jsonl", "judge": "judge-1"}
    found = adapter.validate_python({"mt": {"benchmark": "mt_bench", "temperature": None, **common}})
    assert isinstance(found["mt"], MtBenchConfig)
    other = found["mt"].model_copy(update={"judge": "judge-2", "max_reply_tokens": 9})
    assert found["mt"].answers == other.answers == "mt_bench-a88361d2", "two judges can share the answers"
    for change in ({"max_new_tokens": 9}, {"stop": ["\n\nQ:"]}):
        assert found["mt"].model_copy(update=change).answers != other.answers
