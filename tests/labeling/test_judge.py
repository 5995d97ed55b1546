from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from judge_helpers import aspect_of, blocks, judge_by, last_digit, settings, texts_of, write_responses
from regretless.core.errors import BudgetError, ConfigError, DataError, ServerError
from regretless.data.columns import Response, Verdict
from regretless.data.prompts import TEMPLATES
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.labeling.judge import JudgeConfig, run
from regretless.labeling.pair import PairConfig
from regretless.labeling.pair import run as pair
from scripted_server import Act, Request, answer, failure, serving


def judged(config: JudgeConfig, responses: Path, output: Path) -> tuple[dict[str, Any], dict[str, float | None]]:
    output.mkdir(exist_ok=True)
    summary = run(config, responses, output)
    rows, _ = read_responses(output / "responses.parquet")
    return summary, {row.response_id: row.score for row in rows}


def four(number: int) -> list[str]:
    return [f"answer {(number + place) % 5 + 1}" for place in range(4)]


def test_scores_when_order_is_shuffled_belong_to_their_texts_and_average_the_aspects(tmp_path: Path) -> None:
    def rate(text: str, aspect: str) -> str:
        if aspect == "honesty" and text.endswith("5"):
            return "N/A"
        return "1" if aspect == "truthfulness" else text[-1]

    responses = write_responses(tmp_path / "in.parquet", 5, four)
    with serving(judge_by(rate)) as server:
        summary, scores = judged(settings(server.url), responses, tmp_path / "judge")
    for number in range(5):
        for place, text in enumerate(four(number)):
            value = int(text[-1])
            ratings = [value, value, 1] + ([] if value == 5 else [value])
            assert scores[f"p{number}-{place}"] == pytest.approx(sum(ratings) / len(ratings))
    assert len(server.requests) == 20, "one request per prompt and aspect, all responses in it"
    orders = {tuple(texts_of(request)) for request in server.requests if "question 0" in request.user}
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(four(0)))}
    assert len(orders) > 1, "aspects are shuffled apart"
    assert summary["scored"] == 20
    assert summary["aspects"]["honesty"] == {"rated": 16, "mean": 2.5, "not_applicable": 4, "unknown": 0}
    assert (summary["prompt_tokens"], summary["completion_tokens"], summary["dollars"]) == (2000, 400, None)
    kept = [json.loads(line) for line in (tmp_path / "judge/judgments.jsonl").read_text().splitlines()]
    assert kept[3]["aspects"]["helpfulness"] | {"reply": None} == {
        "rating": 4,
        "types": "1, 2",
        "rationale": "because.\nreason 4.",
        "attempts": 1,
        "reply": None,
    }


def test_request_when_made_carries_rubric_parameters_and_both_sides_of_a_conversation(tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "in.parquet", 1, lambda _: ["only 3"])
    rows, _ = read_responses(responses)
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    changed = [type(row)(**{**vars(row), "prompt": prompt, "verdict": Verdict.WRONG}) for row in rows]
    write_records(responses, changed)
    config: dict[str, Any] = {"aspects": ["honesty"], "temperature": 0, "reasoning_effort": "medium"}
    with serving(judge_by(last_digit)) as server:
        _, scores = judged(
            settings(server.url, max_reply_tokens=77, parameters={"top_k": 1}, **config), responses, tmp_path / "judge"
        )
    assert scores == {"p0-0": 3.0}
    rows, _ = read_responses(tmp_path / "judge/responses.parquet")
    assert rows[0].verdict is Verdict.WRONG, "verdicts are not the judge's business"
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    sent = {key: value for key, value in request.body.items() if key != "messages"}
    assert sent == {
        "model": "judge-1",
        "temperature": 0,
        "reasoning_effort": "medium",
        "max_completion_tokens": 77,
        "top_k": 1,
    }
    assert [message["role"] for message in request.body["messages"]] == ["system", "user"]
    assert "[system]\nbe brief\n\n[user]\nwhy?" in request.user
    assert "whole number from 1 to 5, or N/A" in request.user


@pytest.mark.parametrize(
    ("template", "own", "shown", "instruction"),
    [
        ("assistant", [], "own", "why?"),
        ("math", [], "own", "why?"),
        ("user", [], "own", "why?"),
        ("assistant", ["be brief"], "own", "[system]\nbe brief\n\n[user]\nwhy?"),
        ("assistant", ["be brief"], "none", "why?"),
        ("assistant", [], "all", "[system]\nYou are a helpful assistant.\n\n[user]\nwhy?"),
    ],
)
def test_instruction_when_a_sampling_template_put_a_system_line_in_front_is_shown_without_it(
    template: str, own: list[str], shown: str, instruction: str, tmp_path: Path
) -> None:
    framed = TEMPLATES[template]("why?")
    assert isinstance(framed, list)
    prompt = [*framed[:-1], *({"role": "system", "content": text} for text in own), framed[-1]]
    write_records(tmp_path / "in.parquet", [Response(prompt_id="p", response_id="r", prompt=prompt, response="so 3")])
    with serving(judge_by(last_digit)) as server:
        judged(settings(server.url, shown_system=shown), tmp_path / "in.parquet", tmp_path / "judge")
    found = {
        re.findall(r"<<<begin instruction \w+>>>\n(.*?)\n<<<end", each.user, re.DOTALL)[0] for each in server.requests
    }
    assert found == {instruction}


def test_instruction_when_messages_have_calls_reasoning_or_a_tools_name_then_the_judge_reads_them(
    tmp_path: Path,
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    prompt: list[dict[str, Any]] = [
        {"role": "user", "name": "Ann", "content": "rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Look it up."},
        {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "and tomorrow?"},
    ]
    write_records(tmp_path / "in.parquet", [Response(prompt_id="p", response_id="r", prompt=prompt, response="so 3")])
    with serving(judge_by(last_digit)) as server:
        judged(settings(server.url, aspects=["honesty"]), tmp_path / "in.parquet", tmp_path / "judge")
    (request,) = server.requests
    assert (
        """[user]
rain?

[assistant]
<think>
Look it up.
</think>
{"id": "c1", "name": "weather", "arguments": {"city": "Köln"}}

[tool]
name: weather
tool_call_id: c1
sunny

[assistant]
No.

[user]
and tomorrow?
"""
        in request.user
    )


def test_scores_feed_best_versus_random(tmp_path: Path) -> None:
    texts = {0: ["a 2", "b 5", "c 2", "d 1"], 1: ["a 3", "b 3"], 2: ["a 4", "b 1"]}

    def script(request: Request) -> Act:
        if "question 2" in request.user and aspect_of(request) == "honesty":
            return answer("I cannot say.")
        return judge_by(last_digit)(request)

    responses = write_responses(tmp_path / "in.parquet", 3, texts.__getitem__)
    with serving(script) as server:
        summary, _ = judged(settings(server.url), responses, tmp_path / "judge")
    assert summary["unknown"] == {"no output blocks": 2}
    (tmp_path / "pair").mkdir()
    counts = pair(PairConfig(rule="best_vs_random"), tmp_path / "judge/responses.parquet", tmp_path / "pair")
    assert counts["pairs"] == 1
    assert counts["prompts_dropped"] == {"equal_scores": 1, "no_usable_response": 1}
    assert counts["responses_left_out"]["without_score"] == 2


def test_reply_when_unreadable_is_asked_again_differently_and_then_unknown(tmp_path: Path) -> None:
    seen: list[Request] = []

    def script(request: Request) -> Act:
        seen.append(request)
        if "question 0" in request.user:
            return answer("Sure! All of them are great.")
        good = blocks(request, [text[-1] for text in texts_of(request)])
        return answer(good, finish_reason="length") if len(seen) == 3 else answer(good)

    responses = write_responses(tmp_path / "in.parquet", 2, lambda _: ["x 2", "y 4"])
    with serving(script) as server:
        config = settings(server.url, {"concurrency": 1}, aspects=["honesty"], attempts=2)
        summary, scores = judged(config, responses, tmp_path / "judge")
        again, scores_again = judged(config, responses, tmp_path / "judge")
    assert scores == scores_again == {"p0-0": None, "p0-1": None, "p1-0": 2.0, "p1-1": 4.0}
    assert summary["unknown"] == {"no output blocks": 2}
    assert summary["replies_unreadable"] == {"no output blocks": 2, "reply ended early: length": 1}
    assert len({request.user for request in seen}) == len(seen) == 4, "another attempt is another request"
    assert (again["requests"], again["replies_reused"]) == (4, 4), "unreadable replies are paid for and kept as well"


def test_equal_texts_are_shown_once_and_rated_alike(tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "in.parquet", 1, lambda _: ["same 4", "other 2", "same 4"])
    with serving(judge_by(last_digit)) as server:
        _, scores = judged(settings(server.url), responses, tmp_path / "judge")
    assert scores == {"p0-0": 4.0, "p0-1": 2.0, "p0-2": 4.0}
    assert all(sorted(texts_of(request)) == ["other 2", "same 4"] for request in server.requests)


def test_rerun_when_rubric_model_or_seed_change_asks_anew_and_otherwise_nothing(tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "in.parquet", 3, four)
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Is it sure of itself? 1 to 5.")
    changes: list[dict[str, Any]] = [
        {},
        {"when_spent": "go_on", "attempts": 5},
        {"rubrics": {"honesty": str(rubric)}},
        {"seed": 1},
        {"model": "judge-2"},
        {"parameters": {"top_p": 0.5}},
    ]
    counts = []
    with serving(judge_by(last_digit)) as server:
        for change in changes:
            before = len(server.requests)
            judged(settings(server.url, aspects=["honesty"], **change), responses, tmp_path / "judge")
            counts.append(len(server.requests) - before)
    assert counts == [3, 0, 3, 3, 3, 3]


def test_budget_when_used_up_stops_keeps_replies_and_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "in.parquet", 10, four)
    prices = {"prompt_price": 10.0, "completion_price": 100.0}
    with serving(judge_by(last_digit)) as server:
        config = settings(server.url, {"max_requests": 7, **prices}, aspects=["honesty"])
        with pytest.raises(BudgetError) as stopped:
            judged(config, responses, tmp_path / "judge")
        assert "max_requests=7: all are used" in str(stopped.value)
        assert "28 of 40 responses have a score so far (7 requests, 0.8k tokens, $0.02)" in str(stopped.value)
        with pytest.raises(BudgetError):
            judged(config, responses, tmp_path / "judge")
        assert len(server.requests) == 7, "a budget counts earlier runs"

        partial, scores = judged(config.model_copy(update={"when_spent": "go_on"}), responses, tmp_path / "judge")
        assert partial["unknown"] == {"not asked": 12}
        assert sum(score is not None for score in scores.values()) == 28

        larger = settings(server.url, {"max_requests": 10, **prices}, aspects=["honesty"])
        summary, _ = judged(larger, responses, tmp_path / "judge")
        assert (len(server.requests), summary["scored"], summary["requests"]) == (10, 40, 10)
        assert summary["dollars"] == pytest.approx((1000 * 10 + 200 * 100) / 1e6)


def test_budget_of_tokens_when_requests_run_side_by_side_is_never_exceeded(tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "in.parquet", 120, four)

    def script(request: Request) -> Act:
        reply = judge_by(last_digit)(request)
        return Act(reply.body, delay=0.005)

    with serving(script) as server:
        config = settings(
            server.url, {"max_tokens": 10_000, "concurrency": 32}, aspects=["honesty"], max_reply_tokens=500
        )
        with pytest.raises(BudgetError, match=r"max_tokens=10000: \d+ are used, and the next request may need up to"):
            judged(config, responses, tmp_path / "judge")
        used = 120 * len(server.requests)
        assert 10_000 - 4_000 < used <= 10_000, "what requests reserve and do not use comes back"
        assert server.most_at_once > 1


def test_server_when_it_refuses_or_is_down_ends_the_run_and_when_one_prompt_is_refused_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regretless.servers.ask.MOST_REFUSALS", 1)
    responses = write_responses(tmp_path / "in.parquet", 30, four)

    def too_long(request: Request) -> Act:
        if "question 7" in request.user:
            return failure(400, "maximum context length exceeded")
        return judge_by(last_digit)(request)

    with serving(too_long) as server:
        config = settings(server.url, {"max_tries": 2}, aspects=["honesty"])
        summary, scores = judged(config, responses, tmp_path / "judge")
        assert summary["unknown"] == {"refused with HTTP 400": 4}
        assert scores["p7-0"] is None
        said = " ".join(capsys.readouterr().err.split())
        assert "for example p7 honesty: refused with HTTP 400: Error code: 400 - maximum context length" in said
        server.script = lambda request: failure(404, "no model judge-2")
        with pytest.raises(ServerError, match="no model judge-2"):
            judged(config.model_copy(update={"model": "judge-2"}), responses, tmp_path / "judge")
        server.script = lambda request: failure(503, "loading")
        with pytest.raises(ServerError, match=r"10 questions in a row failed; no reply: 2 tries; .*: HTTP 503"):
            judged(config.model_copy(update={"model": "judge-3"}), responses, tmp_path / "judge")
        server.script = lambda request: answer("no idea")
        with pytest.raises(DataError, match="none of 120 responses have a score: no output blocks 120"):
            judged(config.model_copy(update={"model": "judge-4"}), responses, tmp_path / "judge")


@pytest.mark.parametrize(
    ("most", "asked", "outcome"),
    [
        (9, 16, "answered no question and refused 16, the first ones and others from all over the rest\n  0 of 120"),
        (99, 30, "400 120"),
    ],
)
def test_server_when_it_refuses_a_parameter_then_its_reason_is_shown_and_not_everything_is_asked(
    most: int, asked: int, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regretless.servers.ask.MOST_REFUSALS", most)
    responses = write_responses(tmp_path / "in.parquet", 30, four)
    with serving(lambda request: failure(400, "Unsupported: 'max_completion_tokens'")) as server:
        config = settings(server.url, {"concurrency": 1}, aspects=["honesty"], temperature=0, parameters={"top_k": 1})
        with pytest.raises(DataError) as error:
            judged(config, responses, tmp_path / "judge")
        assert len(server.requests) == asked
    assert outcome in str(error.value)
    assert "resumes" not in str(error.value)
    assert str(error.value).endswith(
        "\n  for example p0 honesty: refused with HTTP 400: Error code: 400 - Unsupported: 'max_completion_tokens'"
        "\n  for a parameter that the server does not accept, set another server.limit_parameter "
        "(max_completion_tokens) or temperature: null or parameters without it (top_k)"
    )


@pytest.mark.parametrize("is_refused", [lambda number: number % 2 == 0, lambda number: number < 12])
def test_server_when_it_refuses_many_before_its_first_answer_then_the_others_are_asked_once_and_scored(
    is_refused: Callable[[int], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regretless.servers.ask.MOST_REFUSALS", 3)
    responses = write_responses(tmp_path / "in.parquet", 30, four)
    slow_at_first = iter([0.5] * 4)

    def script(request: Request) -> Act:
        if is_refused(int(request.user.partition("question ")[2].split()[0])):
            return failure(400, "maximum context length exceeded")
        return Act(judge_by(last_digit)(request).body, delay=next(slow_at_first, 0.0))

    with serving(script) as server:
        _, scores = judged(settings(server.url, {"concurrency": 8}, aspects=["honesty"]), responses, tmp_path / "judge")
        assert len(server.requests) == 30
    assert {name for name, score in scores.items() if score is not None} == {
        f"p{number}-{place}" for number in range(30) if not is_refused(number) for place in range(4)
    }


def test_layout_with_the_papers_blocks_when_given_as_a_file_works(tmp_path: Path) -> None:
    layout = tmp_path / "layout.jinja"
    layout.write_text(
        "{{ aspect_guideline }}\n\n"
        "{% for i in range(1, completions|length + 1) %}\n#### Output for Text {{ i }}\n"
        "{% if identifier is defined %}\nType: [numbers, or None]\nRationale: [why]\n{% endif %}\n"
        "Rating: [for text {{ i }}]\nRational: [why]\n{% endfor %}\n"
        "### Instruction\n{{ instruction }}\n\n### Texts\n"
        "{% for completion in completions %}\n<text {{ loop.index }}> {{ completion }}\n{% endfor %}\n### Output\n"
    )

    def script(request: Request) -> Act:
        shown = [line for line in request.user.splitlines() if line.startswith("<text")]
        typed = "Type: None\nRationale: none.\n" if "Type:" in request.user else ""
        lines = [f"#### Output for Text {n}\n{typed}Rating: {t[-1]}\nRational: so." for n, t in enumerate(shown, 1)]
        return answer("\n\n".join(lines))

    responses = write_responses(tmp_path / "in.parquet", 2, four)
    with serving(script) as server:
        _, scores = judged(settings(server.url, layout=str(layout)), responses, tmp_path / "judge")
    assert scores == {f"p{number}-{place}": int(four(number)[place][-1]) for number in range(2) for place in range(4)}
    assert sum("Type:" in request.user for request in server.requests) == 4


def test_settings_and_templates_that_cannot_work_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    responses = write_responses(tmp_path / "in.parquet", 1, four)
    with pytest.raises(ConfigError, match="rubrics: needed for wit; typed: humor: no such aspect"):
        settings("http://127.0.0.1:1/v1", aspects=["honesty", "wit"], typed=["humor"])
    layouts = {
        "{{ instruction }} {{ completions[0] }} {{ aspect_guideline }}": "the second text missing in the result",
        "{{ instruction }} {{ completion }}": "'completion' is undefined; available variables: instruction, comp",
        "{% for text in completions %}": "layout.jinja:1: Unexpected end of template",
        "{{ instruction }}{{ completions }}{{ aspect_guideline }}": "headed '#### Output for Text 1'",
        "{{ ''.__class__ }}": "unsafe",
    }
    for source, problem in layouts.items():
        (tmp_path / "layout.jinja").write_text(source)
        with pytest.raises(ConfigError, match=problem):
            judged(settings("http://127.0.0.1:1/v1", layout=str(tmp_path / "layout.jinja")), responses, tmp_path / "o")
    with pytest.raises(ConfigError, match=r"nowhere\.md: cannot be read"):
        judged(settings("http://127.0.0.1:1/v1", rubrics={"honesty": "nowhere.md"}), responses, tmp_path / "o")
