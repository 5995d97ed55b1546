"""Arena-Hard: the win rate and its intervals, and the benchmark from prompts to the result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from chat_helpers import code_of, parts_of, respond, server
from regretless.core.errors import BudgetError, ConfigError, DataError
from regretless.core.files import read_json
from regretless.data.prompts import PromptRow
from regretless.evaluation.chat import chat_results as stage
from regretless.evaluation.chat.arena_hard import ArenaHardConfig, Duel, at_equal_style, win_rate
from regretless.evaluation.chat.files import read_table
from regretless.evaluation.chat.style_control import style, style_difference
from scripted_server import Act, Request, answer, serving


def random_duels(n: int) -> list[Duel]:
    draw = Random(0)
    # Two games of one question mostly agree, as real ones do.
    leanings = [draw.choice([-2, -1, -1, 0, 1, 2, 2]) for _ in range(n)]
    return [
        Duel(f"q{number}", leaning, leaning if draw.random() < 0.8 else draw.choice([-1, 0, 1]))
        for number, leaning in enumerate(leanings)
    ]


def test_win_rate_is_that_of_a_bradley_terry_fit_to_weighted_verdicts() -> None:
    duels = random_duels(400)
    rows = [(np.sign(game), 3 if abs(game) == 2 else 1) for duel in duels for game in duel.verdicts]
    outcomes = [(1, weight * (1 + sign) / 2) for sign, weight in rows] + [
        (0, weight * (1 - sign) / 2) for sign, weight in rows
    ]
    fit = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10)
    fit.fit(np.ones((len(outcomes), 1)), [won for won, _ in outcomes], [weight for _, weight in outcomes])
    found = win_rate(duels, rounds=2000)
    metric = found["metrics"]["win_rate"]
    assert metric["value"] == pytest.approx(100 / (1 + np.exp(-fit.coef_[0, 0])), abs=1e-6)
    assert metric["n"] == 400
    assert sum(found["verdicts"].values()) == 800
    halved = (metric["published_high"] - metric["published_low"]) / (metric["high"] - metric["low"])
    assert halved < 0.65, "verdicts drawn one by one look far surer than the questions are"
    assert metric["low"] < metric["value"] < metric["high"]
    assert metric["high"] - metric["low"] == pytest.approx(2 * 1.96 * metric["standard_error"], rel=0.05)


def test_win_rate_when_a_game_has_no_verdict_leaves_the_question_out_and_counts_it() -> None:
    duels = [Duel("a", 2, 2), Duel("b", -1, 0), Duel("c", 2, None), Duel("d", None, None)]
    found = win_rate(duels, rounds=100)
    assert (found["questions"], found["questions_left_out"], found["metrics"]["win_rate"]["n"]) == (4, 2, 2)
    assert found["metrics"]["win_rate"]["value"] == pytest.approx(100 * (6 + 0.5) / 8)
    assert found["values"] == {"a": (6.0, 6.0), "b": (0.5, 2.0)}
    nothing = win_rate(duels[2:])["metrics"]["win_rate"]
    assert (nothing["value"], nothing["n"], nothing["published_low"]) == (None, 0, None)


@pytest.mark.parametrize(("verdict", "share"), [(0, 50), (2, 100), (-1, 0)])
def test_win_rate_when_all_verdicts_are_equal_has_no_interval(verdict: int, share: float) -> None:
    found = win_rate([Duel(f"q{number}", verdict, verdict) for number in range(6)], rounds=50)
    metric = found["metrics"]["win_rate"]
    assert (metric["value"], metric["low"], metric["high"]) == (share, None, None)
    texts = {f"q{number}": ("w" * (number + 1), "w" * 3) for number in range(6)}
    assert at_equal_style(found["values"], texts, rounds=5).shown()["low"] is None


def test_win_rate_at_equal_style_when_only_length_wins_is_even() -> None:
    draw = Random(1)
    texts, sums = {}, {}
    for number in range(400):
        extra = draw.randrange(0, 400)
        texts[f"q{number}"] = ("w" * (200 + extra), "w" * 300)
        sums[f"q{number}"] = (2.0 * (draw.random() < 1 / (1 + np.exp(-(extra - 100) / 60))), 2.0)
    raw = 100 * sum(won for won, _ in sums.values()) / 800
    controlled = at_equal_style(sums, texts, rounds=100)
    assert raw > 65
    assert controlled.value == pytest.approx(50, abs=6)
    assert controlled.interval.low < 50 < controlled.interval.high


def test_style_when_marks_stand_in_code_does_not_count_them() -> None:
    text = "# a\n- b\n1. c\n**d** __e__\n```\n# x\n- y\n**z**\n```"
    assert list(style(text)) == [len(text), 1, 2, 2]
    assert list(style(text.replace("y", "`y`"))[1:]) == [2, 3, 3], "a backtick inside: no block to the published tool"
    assert list(style("```\n- y\n```\n- y\n")[1:]) == [0, 0, 0], "what a block holds is taken out everywhere"
    differences = style_difference([text, "a", ""], ["a", text, ""])
    assert list(differences[2]) == [0, 0, 0, 0]
    assert list(differences[0]) == list(-differences[1])


def published_counts(text: str) -> list[int]:
    """Headings, items of lists and bold passages by the expressions of Arena-Hard's code."""
    for block in re.findall("```([^`]*)```", text):
        text = text.replace(block, "")
    forms = [
        [rf"^#{{{depth}}}\s" for depth in range(1, 7)],
        [r"^\s*\d+\.\s", r"^\s*[-*+]\s"],
        [r"\*\*[^*\n]+\*\*", r"__[^_\n]+__"],
    ]
    return [sum(len(re.findall(form, text, re.MULTILINE)) for form in kinds) for kinds in forms]


def test_style_of_real_answers_is_what_the_published_expressions_count(shared: Path) -> None:
    data = shared / "data"
    answers = read_table(str(data / "arena_hard/model_answer/gpt-4-0314.jsonl"), [])
    texts = [row["messages"][-1]["content"]["answer"] for row in answers]
    texts += [row["output"] for row in read_table(str(data / "alpaca_eval/alpaca_eval_gpt4_baseline.json"), [])]
    for row in read_table(str(data / "ultrafeedback/train_1000.jsonl"), []):
        texts += [row["chosen"], row["rejected"]]
    assert len(texts) == 500 + 805 + 2000
    assert [list(style(text)[1:]) for text in texts] == [published_counts(text) for text in texts]
    whole_blocks = [re.sub("```.*?```", "", text, flags=re.DOTALL) for text in texts]
    differ = [published_counts(a) != published_counts(b) for a, b in zip(texts, whole_blocks, strict=True)]
    assert sum(differ) == 10, "answers on which the plain reading of a code block counts otherwise"


@given(st.text(alphabet="`#*_-1. \na", max_size=60))
def test_style_of_any_text_is_what_the_published_expressions_count(text: str) -> None:
    assert list(style(text)) == [len(text), *published_counts(text)]


LABELS = {2: "A>>B", 1: "A>B", 0: "A=B", -1: "B>A", -2: "B>>A"}
STRENGTHS = [2, 1, 0, -1, -2, 1]
"""How much better the model's answers to the first questions are."""


def judge_script(request: Request) -> Act:
    parts = parts_of(request)
    model_is_a = parts["answer A"].startswith("mine")
    number = int(parts["answer A" if model_is_a else "answer B"].split()[1])
    label = LABELS[STRENGTHS[number] if model_is_a else -STRENGTHS[number]]
    if number == 5 and not model_is_a:
        return answer(f"The first answer says [[A>>B]]. Verdict: [[{label}]]")
    return answer(f"It claims [[A>>B]] itself.\nVerdict {code_of(request)}: [[{label}]]")


@pytest.fixture
def data(shared: Path) -> Path:
    return shared / "data" / "arena_hard"


def settings(data: Path, url: str, **changes: Any) -> ArenaHardConfig:
    values = {
        "questions": str(data / "question.jsonl"),
        "baseline": str(data / "model_answer" / "gpt-4-0314.jsonl"),
        "judge": "judge-1",
        "limit": 6,
        "bootstrap": 100,
        "server": server(url),
    }
    return ArenaHardConfig.parse({**values, **changes}, "arena_hard")


def mine(rows: list[PromptRow]) -> dict[str, str]:
    return {row.prompt_id: f"mine {number} Verdict: [[A>>B]]" for number, row in enumerate(rows)}


def test_arena_hard_when_run_plays_both_orders_and_joins_the_baseline_by_uid(data: Path, tmp_path: Path) -> None:
    baseline = {}
    for line in (data / "model_answer" / "gpt-4-0314.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        baseline[row["messages"][0]["content"]] = row["messages"][1]["content"]["answer"]
    with serving(judge_script) as judge:
        config = settings(data, judge.url)
        prompts = stage.next_prompts(config, [])[0.0]
        texts = mine(prompts)
        responses = respond(tmp_path / "responses.parquet", prompts, lambda row: texts[row.prompt_id])
        summary = stage.run(config, [responses], tmp_path)
    assert len(judge.requests) == 2 * 6 + 2
    orders = set()
    for request in judge.requests:
        parts = parts_of(request)
        own, other = ("answer A", "answer B") if parts["answer A"].startswith("mine") else ("answer B", "answer A")
        assert parts[other] == baseline[parts["prompt"]]
        orders.add((parts["prompt"], own))
    assert len(orders) == 12
    result = read_json(tmp_path / stage.RESULT)
    assert result["failed"] == {"no verdict": 1}
    assert (result["questions_left_out"], result["metrics"]["win_rate"]["n"]) == (1, 5)
    assert result["verdicts"] == {"much_better": 2, "better": 2, "tie": 2, "worse": 2, "much_worse": 2}
    assert summary["win_rate"] == pytest.approx(50)
    assert result["metrics"]["style_controlled_win_rate"]["n"] == 5
    judgments = [json.loads(line) for line in (tmp_path / stage.JUDGMENTS).read_text().splitlines()]
    assert [row["model_first"] for row in judgments] == STRENGTHS
    assert [row["baseline_first"] for row in judgments] == [*STRENGTHS[:5], None]
    assert judgments[5]["problems"] == ["no verdict", None]
    last = [request.user for request in judge.requests if parts_of(request)["answer B"].startswith("mine 5")]
    assert sorted("must end with the verdict" in user for user in last) == [False, True, True]


TASK = "Judge. End with one of [[A>>B]], [[A>B]], [[A=B]], [[B>A]] and [[B>>A]]."


@pytest.mark.parametrize(
    "template",
    [
        '["<|Prompt|>\\n{question_1}\\n<|A|>\\n{answer_1}\\n<|B|>\\n{answer_2}"]',
        '"<|Prompt|>\\n{QUESTION}\\n<|A|>\\n{ANSWER_A}\\n<|B|>\\n{ANSWER_B}"',
    ],
)
def test_arena_hard_settings_as_published_when_given_as_judge_prompt_are_read(
    template: str, data: Path, tmp_path: Path
) -> None:
    published = tmp_path / "judge_config.yaml"
    published.write_text(f"judge_model: gpt\nregex_pattern: \\[\\[([AB<>=]+)\\]\\]\nprompt_template: {template}\n")
    with serving(lambda request: answer("Mine quotes nothing. My final verdict is tie: [[A=B]]")) as judge:
        config = settings(data, judge.url, judge_prompt=str(published), limit=2, style_control=False)
        # The newer settings have no system prompt: the judge would see three texts and no task.
        problem = r"lacks the verdict labels: \[\[ A>>B .* system_prompt \(absent\).*utils/judge_utils"
        with pytest.raises(ConfigError, match=problem):
            config.fetch()
        published.write_text(f"{published.read_text()}system_prompt: '{TASK}'\n")
        config.fetch()
        prompts = stage.next_prompts(config, [])[0.0]
        responses = respond(tmp_path / "responses.parquet", prompts, lambda row: "mine")
        assert stage.run(config, [responses], tmp_path)["win_rate"] == 50
    assert {request.body["messages"][0]["content"] for request in judge.requests} == {TASK}
    users = {request.user.partition("<|A|>\n")[2] for request in judge.requests}
    assert any(user.startswith("mine\n<|B|>\n") for user in users)
    assert any(user.endswith("\n<|B|>\nmine") for user in users)


def test_arena_hard_when_the_budget_ends_stops_and_goes_on_with_a_larger_one(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "arena"
    output.mkdir()
    with serving(judge_script) as judge:
        config = settings(data, judge.url, limit=5, server=server(judge.url, max_requests=7, concurrency=1))
        prompts = stage.next_prompts(config, [])[0.0]
        texts = mine(prompts)
        responses = respond(tmp_path / "responses.parquet", prompts, lambda row: texts[row.prompt_id])
        with pytest.raises(BudgetError, match=r"7 of 10 judgments could be read so far .*raise the budget first"):
            stage.run(config, [responses], output)
        partial = config.model_copy(update={"when_spent": "go_on"})
        stage.run(partial, [responses], output)
        result = read_json(output / stage.RESULT)
        assert (result["failed"], result["metrics"]["win_rate"]["n"]) == ({"not asked": 3}, 3)
        summary = stage.run(settings(data, judge.url, limit=5), [responses], output)
    assert (len(judge.requests), summary["failed"]) == (10, 0)


def test_baseline_when_it_answers_other_questions_is_refused(data: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (data / "model_answer" / "gpt-4-0314.jsonl").read_text().splitlines()]
    config = settings(data, "http://127.0.0.1:1/v1", baseline=str(tmp_path / "baseline.jsonl"))
    prompts = stage.next_prompts(config, [])[0.0]
    responses = respond(tmp_path / "responses.parquet", prompts, lambda row: "mine 0")
    swapped = [{**row, "uid": other["uid"]} for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]
    for content, problem in ((swapped, "answers a question that differs from"), (rows[:3], "no answer to 6 question")):
        (tmp_path / "baseline.jsonl").write_text("\n".join(map(json.dumps, content)))
        with pytest.raises(DataError, match=problem):
            stage.run(config, [responses], tmp_path)
