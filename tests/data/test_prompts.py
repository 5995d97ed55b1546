from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regretless.core.errors import DataError
from regretless.data.columns import Response
from regretless.data.prompt_templates import TEMPLATES
from regretless.data.prompts import PromptSource, load_prompts, prompt_columns, read_prompts
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.schema import read_gold, stored_gold


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_prompts_when_template_is_math_are_the_papers_messages(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"q": "1+1?", "gold": 2.0, "level": 3})
    source = PromptSource(dataset=file, prompt_column="q", answer_column="gold", template="math")
    (row,) = load_prompts(source)
    assert row.prompt == [
        {"role": "system", "content": "Please reason step by step, and put your final answer within \\boxed{}."},
        {"role": "user", "content": "1+1?"},
    ]
    assert (row.answer, row.extra) == ("2", {"level": 3})


@pytest.mark.parametrize(
    ("suffix", "gold"),
    [
        (".jsonl", ["2", 3, 2.5, "é"]),
        (".json", {"final": "2", "steps": [1, None, {"ok": True}]}),
        (".parquet", ["2", "3"]),
        (".parquet", {"final": 2}),
        (".jsonl", '["2"]'),
    ],
)
def test_gold_answer_when_it_is_a_list_or_an_object_then_every_file_gives_it_back_as_it_was(
    tmp_path: Path, suffix: str, gold: Any
) -> None:
    file, row = tmp_path / f"a{suffix}", {"prompt": "1+1?", "gold": gold}
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps([row] if suffix == ".json" else row))
    (prompt,) = load_prompts(PromptSource(dataset=str(file), answer_column="gold"))
    assert prompt.answer == gold and type(prompt.answer) is type(gold)
    again = jsonl(tmp_path / "again.jsonl", prompt_columns(prompt))
    assert load_prompts(PromptSource(dataset=again, answer_column="answer"))[0].answer == gold
    kept = Response(prompt_id="a", response_id="a-1", prompt="1+1?", response="2", **stored_gold(prompt.answer))
    for name in ("kept.jsonl", "kept.parquet"):
        write_records(tmp_path / name, [kept, replace(kept, answer="[2]", answer_is_json=None)])
        (first, second), refused = read_responses(tmp_path / name)
        assert (read_gold(vars(first)), read_gold(vars(second)), refused) == (gold, "[2]", [])


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("[]", "expected text, a finite number, or a list or object of JSON with a value or more, got []"),
        ("{}", "expected text, a finite number, or a list or object of JSON with a value or more, got {}"),
        ("true", "expected text, a finite number, or a list or object of JSON with a value or more, got True"),
        ('["2", NaN]', "expected finite numbers, got NaN or infinity in ['2', 'nan']"),
    ],
)
def test_gold_answer_when_it_says_nothing_then_the_row_is_refused(tmp_path: Path, answer: str, told: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", f'{{"prompt": "1+1?", "gold": {answer}}}')
    _, (refused,) = read_prompts(PromptSource(dataset=file, answer_column="gold"))
    assert refused.reason == f"gold: {told}"


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda text: None, "expected a text or a list of messages, got nothing"),
        (lambda text: " ", "empty"),
        (lambda text: [{"role": "user"}], "message 0: expected messages with the texts role and content"),
        (lambda text: int(text[1:]), r"raised ValueError: invalid literal .* \(test_prompts\.py, line \d+\)"),
    ],
)
def test_prompts_when_a_template_makes_none_are_refused_and_name_it(
    made: Callable[[str], Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TEMPLATES, "mine", made)
    source = PromptSource(dataset=jsonl(tmp_path / "a.jsonl", {"prompt": "1+1?"}), template="mine")
    with pytest.raises(DataError, match=f"a.jsonl:1: template mine:? {told}"):
        load_prompts(source)


def test_prompts_when_repeated_keep_their_order_and_get_distinct_ids(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"prompt": text} for text in ("x", "y", "x", "x")))
    ids = [row.prompt_id for row in load_prompts(PromptSource(dataset=file))]
    assert ids[2:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert len(set(ids)) == 4
    own = jsonl(tmp_path / "b.jsonl", *({"prompt": "x", "id": name} for name in ("7-2", 7, 7)))
    assert [row.prompt_id for row in load_prompts(PromptSource(dataset=own))] == ["7-2", "7", "7-3"]


def test_prompts_when_shuffled_with_a_limit_are_a_choice_that_the_seed_repeats(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"prompt": f"x {number}"} for number in range(50)))
    datasets.Dataset.from_list([{"prompt": f"x {number}"} for number in range(50)]).save_to_disk(tmp_path / "a")
    first, again, other = (
        [(row.prompt, row.line) for row in load_prompts(PromptSource(dataset=source, shuffle=seed, limit=20))]
        for source, seed in ((file, 1), (str(tmp_path / "a"), 1), (file, 2))
    )
    assert first == again != other
    assert all(prompt == f"x {line - 1}" for prompt, line in first), "rows keep their numbers"
    assert len(set(first)) == 20 and max(line for _, line in first) > 20


def test_prompts_when_a_column_is_missing_list_the_columns_found(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"question": "x", "answer": "y"})
    with pytest.raises(DataError, match=r"no column prompt, gold; found answer, question"):
        load_prompts(PromptSource(dataset=file, answer_column="gold"))


def test_prompts_when_rows_are_bad_refuse_each_with_its_line_and_reason(tmp_path: Path) -> None:
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "fine"},
        "{broken",
        {"prompt": " "},
        {"prompt": 3},
        {"prompt": [{"role": "user"}]},
        {"prompt": answered},
        {"other": "x"},
    )
    kept, refused = read_prompts(PromptSource(dataset=file))
    assert [row.prompt for row in kept] == ["fine"]
    assert [refusal.line for refusal in refused] == [2, 3, 4, 5, 6, 7]
    reasons = ("not valid JSON", "empty", "int", "message 0", "the assistant's", "got nothing")
    assert all(reason in refusal.reason for reason, refusal in zip(reasons, refused, strict=True))
    with pytest.raises(DataError, match=r"6 row\(s\) cannot be used"):
        load_prompts(PromptSource(dataset=file))


def test_prompts_when_given_messages_keep_them_and_refuse_a_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    pq.write_table(pa.table({"prompt": [messages]}), tmp_path / "a.parquet")
    source = PromptSource(dataset=str(tmp_path / "a.parquet"))
    assert load_prompts(source)[0].prompt == messages
    with pytest.raises(DataError, match="template math needs a text"):
        load_prompts(source.model_copy(update={"template": "math"}))


def test_prompts_when_the_source_is_a_data_set_folder_are_the_same_as_from_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    file = jsonl(tmp_path / "a.jsonl", *rows)
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    (tmp_path / "plain").mkdir()
    jsonl(tmp_path / "plain/train.jsonl", *rows)
    wanted = load_prompts(PromptSource(dataset=file, answer_column="answer"))
    for name, split in (("saved", "dev"), ("plain", "train")):
        found = load_prompts(PromptSource(dataset=str(tmp_path / name), split=split, answer_column="answer"))
        assert found == wanted
    with pytest.raises(DataError, match=r"saved \(split test\): no such split; found dev"):
        load_prompts(PromptSource(dataset=str(tmp_path / "saved"), split="test"))


def test_prompts_when_a_hub_data_set_cannot_be_had_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"no/such \(subset main, split train\): .* could not be loaded"):
        load_prompts(PromptSource(dataset="no/such", subset="main"))
    with pytest.raises(DataError, match="no such file"):
        load_prompts(PromptSource(dataset="nowhere.jsonl"))


@pytest.mark.parametrize(
    ("file", "prompt", "answer", "rows"),
    [
        ("gsm8k/test.jsonl", "question", "answer", 1319),
        ("math500/test.jsonl", "problem", "answer", 500),
        ("amc23/test.jsonl", "problem", "answer", 40),
        ("minerva_math/test.jsonl", "problem", "solution", 272),
    ],
)
def test_prompts_when_read_from_real_benchmarks_are_all_there(
    shared: Path, file: str, prompt: str, answer: str, rows: int
) -> None:
    source = PromptSource(dataset=str(shared / "data" / file), prompt_column=prompt, answer_column=answer)
    found = load_prompts(source)
    assert len(found) == len({row.prompt_id for row in found}) == rows
    assert all(row.answer for row in found)
    assert len(load_prompts(source.model_copy(update={"limit": 7}))) == 7
