"""The verify stage: files in and out, processes that hang or die, resumption."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pyarrow.parquet as pq
import pytest

from regretless.core.errors import ConfigError, DataError, RegretlessError
from regretless.core.files import write_jsonl
from regretless.data.columns import Response, Verdict
from regretless.data.responses import read_responses
from regretless.data.rows import read_rows, write_records
from regretless.data.schema import quoted, read_gold
from regretless.labeling import verify as stage
from regretless.labeling import worker_pool
from regretless.labeling.base import Check, Verifier
from regretless.labeling.verifiers import VERIFIERS
from regretless.labeling.verify import VerifyConfig, run
from regretless.labeling.worker_pool import Pool

MISTAKES: dict[str, Any] = {
    "bool": True,
    "none": None,
    "verdict": Check(cast(Verdict, "right"), "compared"),
    "reason": Check(Verdict.CORRECT, cast(str, None)),
    "extracted": Check(Verdict.CORRECT, "compared", cast(str, 5)),
    "half": Check(Verdict.CORRECT, "compared", "a\ud800"),
}
"""What a verifier must not return."""


def answers_question(response: str, answer: str, prompt: Any) -> Check:
    """A verifier that reads the prompt, a text or messages."""
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return Check(Verdict.CORRECT if response == f"{asked} {answer}" else Verdict.WRONG, "compared", asked)


def fragile(response: str, answer: str) -> Check:
    """A verifier with every fault: it runs in a worker, which imports this module."""
    if response == "segfault":
        ctypes.string_at(0)
    if response == "exit":
        os._exit(7)
    if response == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(600)
    if response == "wait":
        time.sleep(2.5)  # beyond the limit on the clock, and no work for the processor
        return Check(Verdict.WRONG, "compared", response)
    if response == "spawn":
        Path(answer).write_text(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid))
        time.sleep(600)
    if response == "leave":
        sys.exit("no licence")
    if response == "close":
        os.closerange(0, 99)
        time.sleep(0.5)
        os._exit(7)
    if response == "raise":
        raise ZeroDivisionError
    if response == "explain":
        raise ValueError("no number \ud800\nin this answer")
    if response in MISTAKES:
        return MISTAKES[response]
    print("printing must not break the protocol")
    return Check(Verdict.CORRECT if response == answer else Verdict.WRONG, "compared", response)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def responses_file(path: Path, texts: list[str], answer: str) -> Path:
    rows = [
        Response(prompt_id=str(i), response_id=str(i), prompt="p", response=text, answer=answer)
        for i, text in enumerate(texts)
    ]
    write_records(path, rows)
    return path


@pytest.mark.slow
def test_run_when_workers_hang_die_and_raise_then_only_those_rows_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "fragile", Verifier(check=fragile))
    texts = ["5", "hang", "6", "segfault", "5", "exit", "raise", "wait", *["5"] * 40, "hang", "4"]
    source = responses_file(tmp_path / "in.parquet", texts, "5")
    summary = run(VerifyConfig(verifier="fragile", time_limit=1.0, workers=2), source, tmp_path)
    rows, _ = read_responses(tmp_path / "responses.parquet")
    assert [row.response for row in rows] == texts
    verdicts = dict(zip(texts, [(row.verdict, row.verdict_reason) for row in rows], strict=True))
    assert verdicts["5"] == (Verdict.CORRECT, "compared")
    assert verdicts["6"] == verdicts["4"] == verdicts["wait"] == (Verdict.WRONG, "compared")
    assert verdicts["hang"] == (Verdict.UNKNOWN, "verifier timed out")
    assert verdicts["raise"] == (Verdict.UNKNOWN, "verifier failed: ZeroDivisionError")
    assert verdicts["segfault"][1] == f"verifier died: exit code {-signal.SIGSEGV}"
    assert verdicts["exit"][1] == "verifier died: exit code 7"
    assert (summary["correct"], summary["wrong"], summary["unknown"]) == (42, 3, 5)
    assert summary["reasons"]["unknown: verifier died"] == 2


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("bool", "returned True; return a Check"),
        ("none", "returned None; return a Check"),
        ("verdict", "verdict 'right'; expected one of correct, wrong, unknown"),
        ("reason", "reason None; expected a text$"),
        ("extracted", "extracted 5; expected a text or None"),
        ("half", r"extracted 'a\\ud800'; expected whole characters, not halves of surrogate pairs"),
    ],
)
def test_run_when_a_verifier_returns_no_check_then_the_stage_ends_and_names_it(
    mistake: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "fragile", Verifier(check=fragile))
    monkeypatch.setitem(VERIFIERS, "quick", Verifier(check=fragile, quick=lambda *row: fragile(*row) or cast(Check, 0)))
    source = responses_file(tmp_path / "in.parquet", ["5", mistake], "5")
    with pytest.raises(ConfigError, match=rf"verifier .*test_verify\.fragile .*{told}"):
        run(VerifyConfig(verifier="fragile", workers=1), source, tmp_path)
    with pytest.raises(ConfigError, match=r"verifier .*test_verify: its function quick returned"):
        run(VerifyConfig(verifier="quick", workers=1), source, tmp_path)
    assert not (tmp_path / "responses.parquet").exists()


def test_run_when_a_verifier_raises_then_its_message_is_kept_and_no_row_at_all_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "fragile", Verifier(check=fragile))
    run(VerifyConfig(verifier="fragile"), responses_file(tmp_path / "one.parquet", ["explain", "5"], "5"), tmp_path)
    reasons = [row.verdict_reason for row in read_responses(tmp_path / "responses.parquet")[0]]
    assert reasons == ["verifier failed: ValueError: no number \ufffd", "compared"]
    rows = [
        Response(prompt_id=text, response_id="0", prompt="p", response=text, answer="5", finish_reason=reason)
        for text, reason in (("explain", "stop"), ("raise", "stop"), ("5", "length"))
    ]
    write_records(tmp_path / "all.parquet", rows)
    with pytest.raises(
        RegretlessError, match=r"fragile: failed on each of the 2 rows .* ValueError: no number \ufffd; correct"
    ):
        run(VerifyConfig(verifier="fragile"), tmp_path / "all.parquet", tmp_path / "all")
    assert not (tmp_path / "all" / "parts").exists()  # a corrected verifier begins anew


def test_run_when_a_verifier_ends_its_process_then_its_own_code_and_text_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "fragile", Verifier(check=fragile))
    source = responses_file(tmp_path / "in.parquet", ["leave", "close", "5"], "5")
    run(VerifyConfig(verifier="fragile", workers=1), source, tmp_path)
    reasons = [row.verdict_reason for row in read_responses(tmp_path / "responses.parquet")[0]]
    assert reasons == ["verifier failed: SystemExit: no licence", "verifier died: exit code 7", "compared"]
    for fault, told in (("leave", "SystemExit: no licence"), ("exit", "verifier died: exit code 7")):
        source = responses_file(tmp_path / f"{fault}.parquet", [fault], "5")
        with pytest.raises(RegretlessError, match=f"failed on each of the 1 rows .*{told}; correct"):
            run(VerifyConfig(verifier="fragile"), source, tmp_path / fault)


def test_run_when_a_verifier_has_started_a_process_then_it_ends_with_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "fragile", Verifier(check=fragile))
    source = responses_file(tmp_path / "in.parquet", ["spawn"], str(tmp_path / "process"))
    run(VerifyConfig(verifier="fragile", time_limit=0.3), source, tmp_path)
    assert read_responses(tmp_path / "responses.parquet")[0][0].verdict_reason == "verifier timed out"
    started = int((tmp_path / "process").read_text())
    _, left = psutil.wait_procs([psutil.Process(started)] if psutil.pid_exists(started) else [], timeout=5)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)  # nobody may wait for an orphan


def test_run_when_an_expression_explodes_then_its_worker_is_killed(tmp_path: Path) -> None:
    source = responses_file(tmp_path / "in.parquet", [r"\boxed{9^{9^{9^9}}}", r"\boxed{(x+1)^2}"], "x^2+2x+1")
    run(VerifyConfig(time_limit=3.0, workers=1), source, tmp_path)
    rows, _ = read_responses(tmp_path / "responses.parquet")
    assert [(row.verdict, row.verdict_reason) for row in rows] == [
        (Verdict.UNKNOWN, "verifier timed out"),
        (Verdict.CORRECT, "equal expressions"),
    ]


def test_run_when_rows_need_no_algebra_then_no_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "run", lambda self, rows: iter(()) if not rows else pytest.fail("a worker was needed"))
    texts = [f"{i}+1={i + 1}\n\\boxed{{{i + 1}}}" for i in range(5000)]
    source = responses_file(tmp_path / "in.parquet", texts, r"6+1=7 \boxed{7}")
    assert run(VerifyConfig(), source, tmp_path)["correct"] == 1


def test_run_when_killed_then_goes_on_behind_the_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "PART_ROWS", 4)
    seen: list[str] = []

    def dies_in_the_second_part(response: str, answer: str) -> Check:
        if response == "5" and "5" not in seen:
            seen.append(response)
            raise KeyboardInterrupt
        seen.append(response)
        return Check(Verdict.CORRECT, "seen", response)

    monkeypatch.setitem(VERIFIERS, "mortal", Verifier(check=fragile, quick=dies_in_the_second_part))
    source = responses_file(tmp_path / "in.parquet", [str(i) for i in range(10)], "x")
    with pytest.raises(KeyboardInterrupt):
        run(VerifyConfig(verifier="mortal"), source, tmp_path)
    assert run(VerifyConfig(verifier="mortal"), source, tmp_path)["correct"] == 10
    assert seen == ["0", "1", "2", "3", "4", "5", "4", "5", "6", "7", "8", "9"]
    rows, _ = read_responses(tmp_path / "responses.parquet")
    assert [row.extracted for row in rows] == [str(i) for i in range(10)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "refused.jsonl", "responses.parquet"]


def test_run_when_a_response_was_cut_then_unknown_whatever_it_says(tmp_path: Path) -> None:
    row = Response(prompt_id="0", response_id="0", prompt="p", response="#### 5", answer="5", finish_reason="length")
    write_records(tmp_path / "in.parquet", [row])
    summary = run(VerifyConfig(), tmp_path / "in.parquet", tmp_path)
    assert summary["reasons"] == {"unknown: truncated": 1}


def test_run_when_cut_responses_are_graded_then_they_count_as_the_others(tmp_path: Path) -> None:
    texts = [r"\boxed{5} and so on \boxed{6", r"\boxed{6} and", "so 2 + 3 = 5"]
    rows = [
        Response(prompt_id=str(i), response_id="0", prompt="p", response=text, answer="5", finish_reason="length")
        for i, text in enumerate(texts)
    ]
    write_records(tmp_path / "in.parquet", rows)
    verdicts = {}
    for verifier in ("math", "math_any"):
        run(VerifyConfig(verifier=verifier, grade_cut=True), tmp_path / "in.parquet", tmp_path)
        verdicts[verifier] = [row.verdict for row in read_responses(tmp_path / "responses.parquet")[0]]
    assert verdicts["math"] == [Verdict.WRONG, Verdict.WRONG, Verdict.CORRECT]
    assert verdicts["math_any"] == [Verdict.CORRECT, Verdict.WRONG, Verdict.WRONG]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_run_when_rows_are_mixed_then_columns_are_kept_and_bad_rows_are_refused(tmp_path: Path, suffix: str) -> None:
    source = write_rows(
        tmp_path / "in.jsonl",
        [
            {"prompt": "1+1?", "response": r"\boxed{2}", "answer": 2.0, "level": 1},
            '{"prompt": "broken',
            {"prompt": "1+2?", "response": "4", "answer": "3", "level": 2, "late": "column"},
            {"prompt": "1+3?", "response": "4", "level": 3},
            {"prompt": "1+4?", "response": 5, "answer": "5"},
        ],
    )
    output = tmp_path / f"out{suffix}"
    summary = run(VerifyConfig(), source, tmp_path, output.name)
    assert (summary["correct"], summary["wrong"], summary["refused"]) == (1, 1, 3)
    rows = (
        pq.read_table(output).to_pylist()
        if suffix == ".parquet"
        else [json.loads(line) for line in output.read_text().splitlines()]
    )
    assert [(row["level"], row["verdict"], row["extracted"]) for row in rows] == [
        (1, "correct", "2"),
        (2, "wrong", "4"),
    ]
    assert rows[1]["late"] == "column"
    refused = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert [row["line"] for row in refused] == [2, 4, 5]
    assert refused[1]["reason"] == "missing column(s) answer; found level, prompt, response"
    assert refused[2]["reason"] == "response: expected text, got 5"


@pytest.mark.parametrize(
    ("values", "kept", "expected"),
    [
        ([[0, False], [1], [2]], [[1], [2]], "a value that a table can hold"),
        ([[0, "x"]], [], "a value that a table can hold"),
        ([{"a": [{"b": [1, "x"]}]}, {"a": [{"b": [1]}]}], [{"a": [{"b": [1]}]}], "a value that a table can hold"),
        ([10**400, 1, 2], [1, 2], "a value that a table can hold"),
        ([{"a": 1}, {"a": "x"}, {"a": 2}], [{"a": 1}, {"a": 2}], "struct<a: int64>, as in most rows"),
        ([[None, 1], [None, "x"], [None, 2]], [[None, 1], [None, 2]], "list<item: int64>, as in most rows"),
        ([1, "x", 1.5], [1, 1.5], "a number, as in most rows"),
        ([{}, {"a": {}}, [{}], {"a": {"b": 1}}], [None, {"a": None}, {"a": {"b": 1}}], "an object, as in most rows"),
        ([{}], [None], ""),
    ],
)
def test_table_when_values_of_a_column_have_no_common_type_then_only_their_rows_are_refused(
    tmp_path: Path, values: list[Any], kept: list[Any], expected: str
) -> None:
    good = {"prompt": "1+1?", "response": "2", "answer": "2"}
    rows = [{**good, "more": value} for value in values] + [good]
    summary = run(VerifyConfig(), write_rows(tmp_path / "in.jsonl", rows), tmp_path)
    written = pq.read_table(tmp_path / "responses.parquet").to_pylist()
    assert [row.get("more") for row in written] == [*kept, None]
    assert summary["refused"] == len(values) - len(kept)
    refused = (tmp_path / "refused.jsonl").read_text() if summary["refused"] else ""
    assert all(f"more: expected {expected}, got " in line for line in refused.splitlines())


def test_verify_when_a_value_is_null_then_its_column_is_not_called_missing(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "response": "2", "answer": None},
        {"prompt": "1+1?", "response": None, "answer": "2"},
        {"prompt": None, "response": "2", "answer": None},
        {"prompt": None, "response": "2"},
        {"prompt": "1+1?", "response": "2", "answer": "2"},
    ]
    summary = run(VerifyConfig(), write_rows(tmp_path / "in.jsonl", rows), tmp_path)
    refused = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in refused] == [
        "answer: expected a value, got null; fill it in, or remove the row",
        "response: expected a value, got null; fill it in, or remove the row",
        "prompt, answer: expected a value, got null; fill it in, or remove the row",
        "missing column(s) answer; found prompt, response",
    ]
    assert (summary["correct"], summary["refused"]) == (1, 4)
    _, refusals = read_responses(tmp_path / "in.jsonl")  # as `pair` reads them
    assert [refusal.reason for refusal in refusals] == [
        "response: expected a value, got null; fill it in, or remove the row",
        *["prompt: expected a value, got null; fill it in, or remove the row"] * 2,
    ]


def test_verify_when_no_row_is_left_then_error_names_the_reasons(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "1+1?", "response": "2"}])
    with pytest.raises(DataError, match=r"in\.jsonl:1: missing column\(s\) answer"):
        run(VerifyConfig(), source, tmp_path)


def test_verify_config_when_the_verifier_is_unknown_then_error_lists_the_table() -> None:
    with pytest.raises(ConfigError, match=r"verifier: expected one of .*math"):
        VerifyConfig.parse({"verifier": "maths"}, "verify")


def test_pool_when_the_function_cannot_be_imported_then_error_says_why() -> None:
    with pytest.raises(ConfigError, match="top of a module"):
        Pool(lambda response, answer: Check(Verdict.CORRECT, ""), workers=1, seconds=1)
    with pytest.raises(ConfigError, match="top of a module"):
        Pool(partial(fragile), workers=1, seconds=1)
    at_the_top = eval("lambda response, answer: None", globals())  # its name has no dot
    with pytest.raises(ConfigError, match=r"<lambda>: expected a function at the top of a module"):
        Pool(at_the_top, workers=1, seconds=1)

    def homeless(response: str, answer: str) -> Check:
        return Check(Verdict.CORRECT, "")

    homeless.__module__, homeless.__qualname__ = "no_such_module", "homeless"
    with Pool(homeless, workers=1, seconds=1) as pool, pytest.raises(RegretlessError, match="no_such_module"):
        list(pool.run([("1", "1")]))


def test_pool_when_a_worker_does_not_start_in_time_then_the_others_check_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_stuck.py").write_text(
        "import pathlib, time\n"
        "from regretless.labeling.base import Check\n"
        "try:\n"
        f"    pathlib.Path({str(tmp_path / 'first')!r}).touch(exist_ok=False)\n"
        "except FileExistsError:\n"
        "    time.sleep(600)\n"
        "def compare(response, answer):\n"
        "    return Check('correct' if response == answer else 'wrong', 'compared')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def compare(response: str, answer: str) -> Check:
        raise AssertionError("called in a worker only")

    compare.__module__, compare.__qualname__ = "half_stuck", "compare"
    with Pool(compare, workers=2, seconds=5) as pool:
        checks = pool.run([(str(row % 3), "1") for row in range(70)])
        found = [next(checks)]
        (stuck,) = [worker for worker in pool.workers if not worker.is_ready]
        stuck.deadline = 0.0
        found += checks
        assert (pool.limit, len(pool.workers)) == (1, 1)
    assert stuck.process.returncode == -signal.SIGKILL
    assert {row: check.verdict for row, check in found} == {
        row: Verdict.CORRECT if row % 3 == 1 else Verdict.WRONG for row in range(70)
    }


def test_pool_when_no_worker_starts_in_time_then_error_says_how_long_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "START_SECONDS", 0.0)
    with (
        Pool(fragile, workers=1, seconds=1) as pool,
        pytest.raises(RegretlessError, match=r"no process was ready within 0 s .*fewer `workers`"),
    ):
        list(pool.run([("1", "1")]))


def test_write_jsonl_then_verify_real_solutions_then_counts_match(tmp_path: Path, shared: Path) -> None:
    rows = []
    with (shared / "data/gsm8k/example_model_solutions.jsonl").open(encoding="utf-8") as handle:
        for line in handle:
            row = json.loads(line)
            solution = row["175b_verification"]["solution"]
            rows.append({"prompt": row["question"], "response": solution, "answer": row["ground_truth"]})
    write_jsonl(tmp_path / "in.jsonl", rows)
    assert run(VerifyConfig(), tmp_path / "in.jsonl", tmp_path)["correct"] == 373


@pytest.mark.parametrize("quick", [False, True])
def test_verifier_when_it_reads_the_prompt_then_it_is_called_with_it_in_the_worker_and_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    at_once = {"quick": answers_question} if quick else {}
    monkeypatch.setitem(VERIFIERS, "reading", Verifier(check=answers_question, with_prompt=True, **at_once))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7+2?"}]
    rows = [
        {"prompt": "1+1?", "response": "1+1? 2", "answer": "2"},
        {"prompt": messages, "response": "1+1? 9", "answer": 9},
        {"prompt": messages, "response": "7+2? 9", "answer": 9},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    run(VerifyConfig(verifier="reading", workers=1), tmp_path / "rows.jsonl", tmp_path, "verified.jsonl")
    written = [json.loads(line) for line in (tmp_path / "verified.jsonl").read_text().splitlines()]
    assert [(row["verdict"], row["extracted"]) for row in written] == [
        ("correct", "1+1?"),
        ("wrong", "7+2?"),
        ("correct", "7+2?"),
    ]


GOLDS = [["9", 2, "x"], ["9", "8"], {"final": 2}, [["2"]], [True], "2", 2.0, "[9, 2]"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("verifier", ["math", "math_any"])
def test_math_when_gold_answers_are_lists_then_any_item_is_right_and_other_kinds_are_refused(
    tmp_path: Path, verifier: str, suffix: str
) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "1+1?", "response": r"\boxed{2}", "answer": gold} for gold in GOLDS])
    run(VerifyConfig(verifier=verifier, workers=1), tmp_path / "in.jsonl", tmp_path, f"out{suffix}")
    rows = [row for _, row in read_rows(tmp_path / f"out{suffix}") if isinstance(row, dict)]
    graded = [(read_gold(row), row["verdict"]) for row in rows]
    assert graded == [
        (["9", 2, "x"], "correct"),
        (["9", "8"], "wrong"),
        ("2", "correct"),
        ("2", "correct"),
        ("[9, 2]", "wrong"),
    ]
    refused = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    told = "answer: expected a text or a number, or a list of these of which any is right, got "
    assert [row["reason"] for row in refused] == [told + quoted(GOLDS[number]) for number in (2, 3, 4)]


def reports_gold(response: str, answer: Any) -> Check:
    return Check(Verdict.CORRECT, "seen", json.dumps(answer))


def test_verifier_when_gold_answers_are_lists_or_objects_then_it_gets_them_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "reporting", Verifier(check=reports_gold))
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "1+1?", "response": "2", "answer": gold} for gold in GOLDS])
    config = VerifyConfig(verifier="reporting", workers=1)
    run(config, tmp_path / "in.jsonl", tmp_path)
    run(config, tmp_path / "responses.parquet", tmp_path, "again.parquet")  # of our own table, too
    for name in ("responses.parquet", "again.parquet"):
        seen = [json.loads(text) for text in pq.read_table(tmp_path / name)["extracted"].to_pylist()]
        assert seen == [*GOLDS[:6], "2", GOLDS[7]]


def test_verify_when_the_json_of_a_gold_answer_is_broken_then_its_row_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "response": "2", "answer_is_json": True}
    write_jsonl(tmp_path / "in.jsonl", [{**row, "answer": '["2"'}, {**row, "answer": '["2"]'}])
    assert run(VerifyConfig(), tmp_path / "in.jsonl", tmp_path)["correct"] == 1
    refused = (tmp_path / "refused.jsonl").read_text()
    assert "answer: not valid JSON (" in refused and "), although answer_is_json is true" in refused
