"""Reading preference data: what is read, and what is refused with which reason."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regretless.core.continuations import Continuation, packed
from regretless.core.errors import DataError
from regretless.core.top_logps import packed_top
from regretless.data import rows
from regretless.data.columns import Pair, Response, Side
from regretless.data.preferences import parse_pairs, read_pairs
from regretless.data.rejected_rows import check_some_left
from regretless.data.responses import read_responses
from regretless.data.rows import pair_row, write_records

QUESTION = [{"role": "user", "content": "2+2?"}]
SURE, BRIEF = {"role": "user", "content": "sure?"}, {"role": "system", "content": "Be brief."}
GOOD = {"prompt": "2+2?", "chosen": " 4", "rejected": " 5"}


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def only(row: dict[str, Any], **options: Any) -> Pair:
    pairs, refused = parse_pairs([row], **options)
    assert [str(refusal) for refusal in refused] == []
    return pairs[0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GOOD, ("2+2?", " 4", " 5")),
        # The prompt of two texts ends before the space of the word in which they part.
        ({"chosen": "2+2? It is 4", "rejected": "2+2? It is 5"}, ("2+2? It is", " 4", " 5")),
        ({"query": "2+2?", "chosen": "2+2? It is 4", "rejected": "2+2? It is 5"}, ("2+2? It is", " 4", " 5")),
        ({"source": "web", "chosen": "2+2? It is 4", "rejected": "2+2? It is 5"}, ("2+2? It is", " 4", " 5")),
        (
            {"chosen": [*QUESTION, *assistant("4")], "rejected": [*QUESTION, *assistant("5")]},
            (QUESTION, assistant("4"), assistant("5")),
        ),
        (
            {"prompt": QUESTION, "chosen": assistant("4"), "rejected": assistant("5")},
            (QUESTION, assistant("4"), assistant("5")),
        ),
        # Hub sets that give the question once more as a text beside whole conversations.
        (
            {"prompt": "2+2?", "chosen": [*QUESTION, *assistant("4")], "rejected": [*QUESTION, *assistant("5")]},
            (QUESTION, assistant("4"), assistant("5")),
        ),
        (
            {"prompt": "2+2?", "chosen": assistant("4"), "rejected": assistant("5")},
            (QUESTION, assistant("4"), assistant("5")),
        ),
        ({"instruction": "Add.", "input": "2+2", "chosen": "4", "rejected": "5"}, ("Add.\n2+2", "4", "5")),
        ({"instruction": "Say 4.", "input": "", "chosen": "4", "rejected": "5"}, ("Say 4.", "4", "5")),
        # What follows a prompt of messages is the response, also where both sides go on alike.
        (
            {
                "prompt": QUESTION,
                "chosen": [*QUESTION, *assistant("Hm."), SURE, *assistant("4")],
                "rejected": [*QUESTION, *assistant("Hm."), SURE, *assistant("5")],
            },
            (QUESTION, [*assistant("Hm."), SURE, *assistant("4")], [*assistant("Hm."), SURE, *assistant("5")]),
        ),
        (
            {"system": "Be brief.", "prompt": QUESTION, "chosen": assistant("4"), "rejected": assistant("5")},
            ([BRIEF, *QUESTION], assistant("4"), assistant("5")),
        ),
        (
            {
                "system": "Be brief.",
                "conversations": [{"from": "human", "value": "2+2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            ([BRIEF, *QUESTION], assistant("4"), assistant("5")),
        ),
        ({**GOOD, "system": " "}, ("2+2?", " 4", " 5")),
        # A transcript in the prompt has the question in it.
        (
            {
                "prompt": "Human: 2+2? Assistant:",
                "chosen": [*QUESTION, *assistant("4")],
                "rejected": [*QUESTION, *assistant("5")],
            },
            (QUESTION, assistant("4"), assistant("5")),
        ),
    ],
)
def test_columns_when_given_in_any_public_form_then_prompt_and_sides_come_apart(
    row: dict[str, Any], expected: tuple[Any, Any, Any]
) -> None:
    pair = only(row)
    assert (pair.prompt, pair.chosen.text, pair.rejected.text) == expected


def test_messages_when_turns_are_shared_then_they_all_belong_to_the_prompt() -> None:
    start = [*QUESTION, *assistant("4"), {"role": "user", "content": "sure?"}]
    pair = only({"chosen": [*start, *assistant("yes")], "rejected": [*start, *assistant("no")]})
    assert (pair.prompt, pair.chosen.text, pair.rejected.text) == (start, assistant("yes"), assistant("no"))


def test_released_jsonl_when_read_then_token_strings_and_log_probabilities_stay_together() -> None:
    pair = only(
        GOOD
        | {
            "chosen_logprob_with_token": {"tokens": [" ", "4"], "logprobs": [-0.5, -0.25]},
            "rejected_logprob_with_token": {"tokens": [" ", "5"], "token_ids": [220, 20], "logprobs": [-1.5, -0.75]},
            "rejected_mask_len": 0,
            "chosen_model": "qwen",
            "chosen_rating": 4.5,
        }
    )
    assert (pair.chosen.tokens, pair.chosen.token_ids, pair.chosen.logps) == ([" ", "4"], None, [-0.5, -0.25])
    assert (pair.rejected.tokens, pair.rejected.token_ids, pair.rejected.logps) == (None, [220, 20], [-1.5, -0.75])
    assert (pair.kind, pair.chosen.model, pair.chosen.score) == ("original", "qwen", 4.5)


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("Q: who? A:", " the first", " this one"),
        ("Q: who? A:", " the", " there"),
        ("Q: who? A:\n", "12", "13"),
        ("Q: who? A: Because", ", as said", " it is"),
        ("Q: \u8c01\uff1f A: \u8fd9", "\u4e2a", "\u4e9b"),  # no words between spaces
    ],
)
def test_prompt_when_it_is_the_common_beginning_then_no_word_is_divided(
    prompt: str, chosen: str, rejected: str
) -> None:
    pair = only({"chosen": prompt + chosen, "rejected": prompt + rejected})
    assert (pair.prompt, pair.chosen.text, pair.rejected.text) == (prompt, chosen, rejected)


@pytest.mark.parametrize(
    ("masks", "found"),
    [((0, 16), ("masked", None, False)), ((1, 2), ("masked", False, False)), ((1, 0), ("original", False, None))],
)
def test_released_mask_lengths_when_given_then_the_masked_sides_are_cut(
    masks: tuple[int, int], found: tuple[str, bool | None, bool | None]
) -> None:
    lengths = dict(zip(("chosen_mask_len", "rejected_mask_len"), masks, strict=True))
    pair = only({"prompt": "q", "chosen": "abc", "rejected": "ab", **lengths})
    assert (pair.kind, pair.chosen.complete, pair.rejected.complete) == found


@pytest.mark.parametrize("cut", [("chosen",), ("rejected",), ("chosen", "rejected")])
def test_sides_when_their_rows_say_that_they_are_cut_then_they_are_kept_as_such(cut: tuple[str, ...]) -> None:
    pair = only(GOOD | {f"{name}_complete": False for name in cut})
    assert [name for name, side in pair.sides.items() if side.complete is False] == list(cut)
    stored = only(GOOD | IDS | {f"{name}_cut_at": 1 for name in cut})
    assert [(side.complete, side.cut_at) for side in stored.sides.values()] == [
        (False, 1) if name in cut else (None, None) for name in ("chosen", "rejected")
    ]


IDS = {"chosen_token_ids": [220, 19], "rejected_token_ids": [220, 20]}
SIDES = {"chosen": assistant("4"), "rejected": assistant("5")}
BAD_ROWS = [
    ({"prompt": "q", "rejected": "b"}, "missing column(s) chosen; found prompt, rejected"),
    ({"prompt": "q", "chosen": "a"}, "missing column(s) rejected; found chosen, prompt"),
    ({"prompt": "q", "chosen": " \n", "rejected": "b"}, "chosen: empty completion"),
    ({"prompt": "q", "chosen": "a", "rejected": ""}, "rejected: empty completion"),
    (
        {"prompt": "q", "completion": "a", "label": False},
        "missing column(s) chosen, rejected; found completion, label, prompt; single responses with a label are "
        "unpaired data: give each row a good and a bad response",
    ),
    (
        {"prompt": QUESTION, "chosen": [{"role": "user", "content": "a"}], "rejected": assistant("b")},
        "chosen: expected it to start with an assistant message, got user",
    ),
    ({"prompt": QUESTION, "chosen": assistant("a"), "rejected": assistant("")}, "rejected: empty completion"),
    (
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        "chosen and rejected are equal: the pair expresses no preference",
    ),
    (GOOD | IDS | {"chosen_logps": [-1.0]}, "chosen_logps: expected one value per token, got 1 values for 2 tokens"),
    (
        GOOD | IDS | {"rejected_logps": [-1.0, None]},
        "rejected_logps: value 1 is None; expected log-probabilities in nats, finite and from -1e+09 to 0",
    ),
    (
        GOOD | IDS | {"rejected_logps": [float("-inf"), -1.0]},
        "rejected_logps: value 0 is -inf; expected log-probabilities in nats, finite and from -1e+09 to 0",
    ),
    (
        GOOD | IDS | {"chosen_logps": [-1.0, 0.5]},
        "chosen_logps: value 1 is 0.5, above 0; expected log-probabilities in nats",
    ),
    (
        GOOD | {"chosen_logps": [-1.0]},
        "chosen_logps: present without token ids, so their tokens are unknown",
    ),
    (
        GOOD | {"chosen_logprob_with_token": {"tokens": ["4"], "logprobs": [-1, -2]}},
        "chosen_logprob_with_token: expected one value per token, got 2 values for 1 tokens",
    ),
    (GOOD | {"chosen_cut_at": 1}, "chosen_cut_at: 1, of 0 token ids: expected fewer; leave it out for a side that"),
    (GOOD | IDS | {"rejected_cut_at": 2}, "rejected_cut_at: 2, of 2 token ids: expected fewer"),
    (GOOD | IDS | {"rejected_cut_at": 0}, "rejected_cut_at: expected a whole number, 1 or more, got 0"),
    (
        GOOD | IDS | {"chosen_cut_at": 1, "chosen_complete": True},
        "chosen_cut_at: 1 beside chosen_complete true: a side",
    ),
    (GOOD | IDS | {"prefix_tokens": 2}, "prefix_tokens: 2, and chosen has 2 token ids: expected more, because the"),
    (GOOD | IDS | {"prefix_tokens": 1, "rejected_cut_at": 1}, "prefix_tokens: 1, and rejected has 1 token ids: expect"),
    (GOOD | {"preference_probability": 1.5}, "preference_probability: expected a number from 0 to 1, got 1.5"),
    (GOOD | {"preference_probability": "0.7"}, "preference_probability: expected a number from 0 to 1, got '0.7'"),
    (GOOD | {"prefix_tokens": 1}, "prefix_tokens: 1, and chosen has 0 token ids: expected more"),
    (
        GOOD | IDS | {"prefix_tokens": 1, "rejected_token_ids": [221, 20]},
        "prefix_tokens: 1, and the sides do not begin with so many equal tokens",
    ),
    ({"chosen": "yes", "rejected": "no"}, "no prompt column, and chosen and rejected have no common beginning"),
    (
        {"prompt": "q", "chosen": None, "rejected": "b"},
        "missing column(s) chosen; found chosen (null), prompt, rejected",
    ),
    # Without the check, the prompt would be "It:".
    (
        {"query": "3 times 6 is", "chosen": "It: 18", "rejected": "It: 19"},
        "no prompt column, and query is not in the common beginning of chosen and rejected, 'It:'; name the prompt "
        "(prompt_key=query), or remove query if it is none",
    ),
    ({"chosen": "q: a", "rejected": "q: a b"}, "chosen: empty completion: it is the beginning of the other side"),
    (
        {"prompt": "q", "chosen": {"text": "a"}, "rejected": "b"},
        "chosen: expected text or a list of messages, got dict",
    ),
    (
        {"prompt": "q", "chosen": [{"role": "assistant"}], "rejected": "b"},
        "chosen: expected messages with the texts role",
    ),
    (["a"], "expected an object with columns, got list"),
    (
        {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "5"},
        "system: not read beside a prompt that is a text; write messages, or join the columns (prompt_key=system,",
    ),
    (
        {"system": "Be brief.", "prompt": [SURE | {"role": "system"}, *QUESTION], **SIDES},
        "system: another text than that of the prompt's system message",
    ),
    ({"instruction": "2+2?", "history": [["1+1?", "2"]], **SIDES}, "history: earlier turns beside the prompt"),
    (
        {"question": "How many?", "context": "There are 4.", "chosen": "4", "rejected": "5"},
        "context: not read beside question; name both (prompt_key=context,question), or question alone if it is no",
    ),
    (
        {"prompt": "Answer in JSON.", "chosen": [*QUESTION, *assistant("4")], "rejected": [*QUESTION, *assistant("5")]},
        "prompt: a text that is in no message of the conversation that chosen and rejected begin with",
    ),
    (
        {"prompt": QUESTION, "chosen": [*QUESTION, *assistant("4")], "rejected": assistant("5")},
        "rejected: expected it to begin with the messages of the prompt, as chosen does",
    ),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_row_when_it_cannot_be_used_then_it_is_refused_with_its_reason(row: Any, reason: str) -> None:
    pairs, refused = parse_pairs([GOOD, row, GOOD], source="data.jsonl")
    assert len(pairs) == 2
    assert [str(refusal)[: len(reason) + 14] for refusal in refused] == [f"data.jsonl:2: {reason}"]


def test_file_when_lines_are_broken_then_each_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [GOOD, '{"prompt": "q", "chosen"', "", "[1]", GOOD])
    with path.open("ab") as handle:
        handle.write(b'{"prompt": "\xff"}\n')
    pairs, refused = read_pairs(path)
    assert [pair.origin for pair in pairs] == [f"{path}:1", f"{path}:5"]
    assert [(refusal.line, refusal.reason[:20]) for refusal in refused] == [
        (2, "not valid JSON: Expe"),
        (4, "expected a JSON obje"),
        (6, "not valid UTF-8: inv"),
    ]
    with pytest.raises(DataError, match=r"pairs.jsonl: no usable row is left \(3 skipped\)\n  - .*:2: not valid JSON"):
        check_some_left([], refused, path)


def test_keys_when_named_then_those_columns_are_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"system": "Add.", "q": "2+2", "yes": "4", "no": "5"}])
    pairs, _ = read_pairs(path, prompt_key="system, q", chosen_key="yes", rejected_key="no")
    assert (pairs[0].prompt, pairs[0].chosen.text, pairs[0].rejected.text) == ("Add.\n2+2", "4", "5")


def test_supervised_data_when_rejected_is_not_needed_then_completions_and_conversations_are_read() -> None:
    rows = [
        {"prompt": "q", "completion": "a"},
        {"messages": [*QUESTION, *assistant("4")]},
        GOOD | {"rejected": None},
    ]
    pairs, refused = parse_pairs(rows, need_rejected=False)
    assert refused == []
    assert [(pair.prompt, pair.chosen.text, pair.rejected) for pair in pairs] == [
        ("q", "a", None),
        (QUESTION, assistant("4"), None),
        ("2+2?", " 4", None),
    ]


def test_supervised_data_when_a_single_response_is_called_bad_then_it_is_refused_and_not_imitated() -> None:
    row = {"prompt": "q", "completion": "a"}
    good: list[dict[str, Any]] = [row | {"label": value} for value in (True, 1, 1.0, "true", "True", None)]
    good += [row | {"kto_tag": True}, {"prompt": "q", "response": "a", "verdict": "correct"}]
    good += [
        {"prompt": "q", "chosen": "a", "rejected": "b", "label": "easy"},
        {"messages": [*QUESTION, *assistant("4")]},
    ]
    bad: list[dict[str, Any]] = [row | {"label": value} for value in (False, 0, 0.0, "false", "False")]
    bad += [row | {"kto_tag": False}, {"messages": [*QUESTION, *assistant("4")], "label": False}]
    bad += [{"prompt": "q", "response": "a", "verdict": verdict} for verdict in ("wrong", "unknown")]
    unclear: list[dict[str, Any]] = [row | {"label": value} for value in ("good", -1, 2, 0.5, [True], {})]
    pairs, refused = parse_pairs([*good, *bad, *unclear], need_rejected=False)
    assert [pair.origin for pair in pairs] == [f"rows:{line}" for line in range(1, len(good) + 1)]
    reasons = [refusal.reason for refusal in refused]
    assert all("supervised training imitates" in reason for reason in reasons[: len(bad)]), reasons
    assert all(reason.startswith("label: expected true or false") for reason in reasons[len(bad) :]), reasons


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_pairs_when_written_then_every_field_is_read_back_equal(suffix: str, tmp_path: Path) -> None:
    def side(text: str, ids: list[int]) -> Side:
        per_token: dict[str, Any] = {"logps": [-0.5, -0.25, 0.0], "token_numbers": {"entropy": [1.5, 0.5, 0.0]}}
        per_token |= {
            "top_logps": packed_top([[(ids[0], -0.5)], [(ids[1], -0.25)], [(2, 0.0)]]),
            "top_logps_kind": "raw",
        }
        per_token |= {"token_bytes": [1, 0, 0], "continuations": packed([Continuation(1, np.array([2]), np.zeros(1))])}
        others: dict[str, Any] = {"model": "m", "complete": False, "cut_at": 2, "stopped": False, "score": 1.5}
        others |= {"step_ends": [1, 3], "step_labels": [1, None]}
        return Side(text=assistant(text), id=text, token_ids=ids, **others, **per_token)

    pair = Pair(
        prompt=QUESTION,
        chosen=side("4", [7, 19, 2]),
        rejected=side("5", [7, 20, 2]),
        prefix_tokens=1,
        preference_probability=0.9,
        topic="sums",
        pair_id="p",
        prompt_id="q",
        prompt_token_ids=[1],
        logps_kind="raw",
        tokenizer="f",
        chat_template_kwargs='{"enable_thinking": true}',
        source_row="mine.jsonl:47",
    )
    # A new field needs a value here; token strings are read only where there are no ids.
    assert {name for name, value in pair_row(pair).items() if value is None} == {"chosen_tokens", "rejected_tokens"}
    write_records(tmp_path / f"pairs.{suffix}", [pair])
    assert read_pairs(tmp_path / f"pairs.{suffix}") == ([pair], [])


@pytest.mark.parametrize("value", ["strong", 2, 0.9])
def test_users_column_preference_when_read_then_it_is_no_probability(value: object) -> None:
    assert only(GOOD | {"preference": value}) == only(GOOD)


def test_saved_data_set_folder_when_read_then_its_split_is_taken(tmp_path: Path) -> None:
    split = datasets.Dataset.from_list([{"prompt": "q", "chosen": "a", "rejected": "b"}])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "set"))
    pairs, _ = read_pairs(tmp_path / "set", split="test")
    assert [(pair.prompt, pair.chosen.text) for pair in pairs] == [("q", "a")]


def test_file_when_packed_or_of_another_format_or_empty_then_the_error_says_what_to_do(tmp_path: Path) -> None:
    for name, said in (
        ("a.jsonl.gz", r"expected \.parquet, \.jsonl, \.json or \.csv, got \.gz; unpack it first$"),
        ("a.xlsx", r"got \.xlsx; convert it, for example with pandas$"),
    ):
        (tmp_path / name).write_bytes(b"prompt")
        with pytest.raises(DataError, match=said):
            read_pairs(tmp_path / name)
    with pytest.raises(DataError, match=r"a\.jsonl: expected rows, found none: the file or data set is empty$"):
        check_some_left([], [], "a.jsonl")


def test_folder_when_its_files_are_of_two_formats_then_none_is_left_out_in_silence(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [GOOD])
    assert len(read_pairs(tmp_path)[0]) == 1
    write_lines(tmp_path / "b.json", [GOOD])
    write_records(tmp_path / "c.parquet", [only(GOOD)])
    with pytest.raises(
        DataError, match=r"expected files of one format, found JSON \(a\.jsonl\), parquet \(c\.parquet\)"
    ):
        read_pairs(tmp_path)


def test_folder_when_one_file_is_expected_then_the_error_names_its_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.parquet", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"expected a file, found a folder with a\.parquet, b\.jsonl; name one$"):
        read_responses(tmp_path)


def test_folder_when_a_line_is_broken_then_the_error_gives_the_cause_and_a_way_to_find_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [GOOD, "{broken"])
    with pytest.raises(DataError, match=r"(?s)the folder could not be loaded: .*JSON parse error.*one at a time"):
        read_pairs(tmp_path)


def test_source_when_nothing_is_there_then_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl: no such file"):
        read_pairs(tmp_path / "no.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl: expected a file, found a pipe; write it to a file first"):
        read_pairs(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.parquet").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"zero\.parquet: expected a file, found a device"):
        read_pairs(tmp_path / "zero.parquet")
    with pytest.raises(DataError, match=r"\*\.jsonl: patterns are not read; give the folder"):
        read_pairs(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match="nothing: no such file or folder"):
        read_pairs(tmp_path / "nothing")


def test_public_preference_sets_when_read_then_only_pairs_without_a_preference_are_refused(shared: Path) -> None:
    pairs, refused = read_pairs(shared / "data/ultrafeedback/train_1000.jsonl")
    assert (len(pairs), [refusal.line for refusal in refused]) == (994, [307, 479, 656, 834, 911, 998])
    assert (pairs[0].chosen.score, pairs[0].rejected.score) == (9.0, 8.0)
    pairs, refused = read_pairs(shared / "data/preference_small/instruction_data_with_preference.json")
    assert (len(pairs), len(refused)) == (1094, 6)
    assert pairs[0].prompt.endswith("spelling given.\nfreind --> friend")


def test_messages_when_their_content_is_in_parts_then_the_texts_are_joined() -> None:
    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text, "image": None} for text in texts]

    row = {
        "prompt": [{"role": "user", "content": parts("2+", "2?")}],
        "chosen": [{"role": "assistant", "content": parts("4")}],
        "rejected": assistant("5"),
    }
    pair = only(row)
    assert (pair.prompt, pair.chosen.text, pair.rejected.text) == (QUESTION, assistant("4"), assistant("5"))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": [{"type": "image", "url": "x"}]}, "chosen: content: expected a text, or parts of type text"),
        ({"content": [{"type": "text", "text": 4}]}, "chosen: content: expected a text, or parts of type text"),
        ({"content": ["4"]}, "chosen: content: expected a text, or parts of type text"),
        ({"content": []}, "chosen: expected messages with the texts role and content"),
        ({"content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}, "chosen: tool_calls: call 0 is {"),
        (
            {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "2"}}]},
            "chosen: tool_calls: arguments of add: expected dict or JSON of one, got '2'",
        ),
        ({"content": "4", "function_call": {"name": "add"}}, "chosen: function_call: not read as a part of a message"),
        ({"content": "4", "images": ["x"]}, "chosen: images: not read as a part of a message; only text is read"),
        ({"content": "4", "channel": "final"}, "chosen: channel: not read as a part of a message"),
        ({"content": "4", "reasoning_content": 4}, "chosen: reasoning_content: expected text, got 4"),
        ({"content": "4", "weight": 0}, "chosen: weight: 0 leaves a message out of training"),
    ],
)
def test_messages_when_they_hold_more_than_text_then_the_row_is_refused(message: dict[str, Any], reason: str) -> None:
    row = {"prompt": QUESTION, "chosen": [{"role": "assistant", **message}], "rejected": assistant("5")}
    pairs, refused = parse_pairs([row, {**row, "chosen": assistant("4")}])
    assert [pair.chosen.text for pair in pairs] == [assistant("4")]
    assert refused[0].reason.startswith(reason), refused[0].reason


def test_template_arguments_when_given_in_columns_then_they_are_kept_through_a_file(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"b": {"type": "int"}, "a": None}}}
    row = {"prompt": QUESTION, "chosen": assistant("4"), "rejected": assistant("5")}
    given = [
        {**row, "tools": [tool], "chat_template_kwargs": {"enable_thinking": False, "other": None}},
        {**row, "tools": json.dumps([tool]), "chat_template_kwargs": '{"enable_thinking": false}'},
        {**row, "tools": [], "chat_template_kwargs": None},
        {**row, "chat_template_kwargs": {"enable_thinking": None}},
    ]
    pairs, refused = parse_pairs(given)
    assert not refused
    wanted = {
        "enable_thinking": False,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"b": {"type": "int"}}}}],
    }
    assert [json.loads(pair.chat_template_kwargs or "null") for pair in pairs] == [wanted, wanted, None, None]
    assert pairs[0].prompt_id == pairs[1].prompt_id != pairs[2].prompt_id
    write_records(tmp_path / "pairs.parquet", pairs)
    assert read_pairs(tmp_path / "pairs.parquet")[0] == pairs
    for column, value in (("tools", "add"), ("tools", {"a": 1}), ("chat_template_kwargs", [1])):
        (refusal,) = parse_pairs([{**row, column: value}])[1]
        assert refusal.reason.startswith(f"{column}: expected ")


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.parquet"])
def test_records_when_written_are_read_again_and_what_cannot_be_is_refused_before(name: str, tmp_path: Path) -> None:
    path, pair = str(tmp_path / name), only({**GOOD, "chosen_score": 1.5})
    response = Response(prompt_id="p", response_id="r", prompt="2+2?", response=" 4", score=0.5)
    write_records(path, [pair])
    assert read_pairs(path) == ([pair], [])
    write_records(path, [response])
    assert read_responses(path) == ([response], [])
    with pytest.raises(DataError, match=r"expected responses or pairs, got both; write them to two files"):
        write_records(path, [pair, response])  # type: ignore[list-item]
    if name != "a.parquet":
        for number in (float("nan"), np.float32("nan")):
            with pytest.raises(DataError, match=r"record 2: logps: expected finite numbers, got NaN or infinity"):
                write_records(path, [response, replace(response, logps=[0.0, number])])
    assert read_responses(path) == ([response], [])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_records_when_their_numbers_are_of_numpy_then_the_same_numbers_are_read(name: str, tmp_path: Path) -> None:
    path, logps = tmp_path / name, np.array([-0.5, -1.25], np.float32)
    response = Response(prompt_id="p", response_id="r", prompt="2+2?", response=" 4")
    given: Any = {
        "score": np.float32(1.5),
        "token_ids": np.array([3, 4]),
        "logps": list(logps),
        "token_numbers": {"bits": logps},
    }
    write_records(path, [replace(response, **given)])
    read: Any = {"score": 1.5, "token_ids": [3, 4], "logps": [-0.5, -1.25], "token_numbers": {"bits": [-0.5, -1.25]}}
    assert read_responses(path) == ([replace(response, **read)], [])


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.JSONL", "a.jsonl.gz", "a"])
def test_records_when_the_suffix_is_of_no_file_that_is_written_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{name}: expected a name that ends in \.parquet, \.jsonl or \.ndjson"):
        write_records(tmp_path / name, [only(GOOD)])
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"chosen_token_ids": [1.5, 2.0]}, "chosen_token_ids: value 0 is 1.5; expected one token id or more"),
        ({"chosen_token_ids": [-1]}, "chosen_token_ids: value 0 is -1;"),
        ({"chosen_token_ids": [3, None]}, "chosen_token_ids: value 1 is None;"),
        ({"chosen_token_ids": [3, True]}, "chosen_token_ids: value 1 is True;"),
        ({"chosen_token_ids": [2**31]}, "chosen_token_ids: value 0 is 2147483648;"),
        ({"chosen_token_ids": [[1], [2, 3]]}, "chosen_token_ids: value 0 is [1];"),
        (IDS | {"chosen_logps": [-0.5, -1e39]}, "chosen_logps: value 1 is -1e+39; expected log-probabilities in nats"),
        (IDS | {"chosen_logps": [-0.5, "-1"]}, "chosen_logps: value 1 is '-1';"),
        ({"chosen_score": float("nan")}, "chosen_score: expected a number from"),
        ({"rejected_rating": float("inf")}, "rejected_rating: expected a number from"),
        ({"score_chosen": True}, "score_chosen: expected a number from"),
        ({"metadata": {"chosen_score": "7"}}, "metadata.chosen_score: expected a number from"),
        ({"chosen_score": 10**400}, "chosen_score: expected a number from"),
        ({"tokenizer": []}, "tokenizer: expected text, got []"),
        ({"pair_id": {"a": 1}}, "pair_id: expected text or a whole number, got {'a': 1}"),
        ({"chosen_complete": 1}, "chosen_complete: expected true or false, got 1"),
        ({"logps_kind": "cooked"}, "logps_kind: expected raw or sampled, got 'cooked'"),
    ],
)
def test_column_when_of_another_type_then_nothing_is_converted_and_the_row_is_refused(
    columns: dict[str, Any], reason: str
) -> None:
    pairs, refused = parse_pairs([GOOD, GOOD | columns, GOOD])
    assert len(pairs) == 2
    assert [refusal.reason[: len(reason)] for refusal in refused] == [reason]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"chosen": " 4\ud800"}, r"chosen: half of a surrogate pair, '\ud800', which no file can store"),
        ({"pair_id": "\udfff"}, r"pair_id: half of a surrogate pair, '\udfff', which no file can store"),
        ({"x": {"a": [{"b\ude00": 1}]}}, r"x: half of a surrogate pair, '\ude00', which no file can store"),
        ({"tools": '[{"a": "\\ud800"}]'}, "tools: expected list or JSON of one, got"),
        ({"\ud83d": 1}, r"half of a surrogate pair, '\ud83d', which no file can store"),
    ],
)
def test_text_when_it_holds_half_a_character_then_the_row_is_refused_from_files_and_memory(
    tmp_path: Path, columns: dict[str, Any], reason: str
) -> None:
    rows = [GOOD | {"chosen": " 4\ud83d\ude00"}, GOOD | columns]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    lines = write_lines(tmp_path / "a.jsonl", rows)
    for pairs, refused in (parse_pairs(rows), read_pairs(lines), read_pairs(tmp_path / "a.json")):
        assert [pair.chosen.text for pair in pairs] == [" 4\U0001f600"]
        assert [refusal.reason[: len(reason)] for refusal in refused] == [reason]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ('"chosen": "4"', "'chosen' occurs twice in an object that begins with ('prompt', '1')"),
        ('"metadata": {"a": 1, "a": 2}', "'a' occurs twice in an object that begins with ('a', 1)"),
        (r'"tools": "[{\"a\": 1, \"a\": 2}]"', "tools: expected list or JSON of one"),
    ],
)
def test_key_when_an_object_has_it_twice_then_the_row_is_refused(tmp_path: Path, columns: str, reason: str) -> None:
    line = f'{{"prompt": "1", "chosen": "2", "rejected": "3", {columns}}}'
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
    pairs, refused = read_pairs(tmp_path / "a.jsonl")
    assert (len(pairs), refused[0].line) == (1, 2) and reason in refused[0].reason
    (tmp_path / "a.json").write_text(f"[{line}]")
    if refused[0].reason.startswith("not valid JSON"):
        with pytest.raises(DataError, match=re.escape(f"a.json: not valid JSON: {reason}")):
            read_pairs(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_row_when_it_is_longer_than_any_row_needs_then_it_is_refused_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(rows, "LONGEST_ROW", 2000)
    long = [GOOD, GOOD | {"chosen": "x" * 5000}, GOOD]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(long), tmp_path / name)
    elif name == "a.json":
        (tmp_path / name).write_text(json.dumps(long))
    else:
        write_lines(tmp_path / name, long)
    pairs, refused = read_pairs(tmp_path / name)
    assert len(pairs) == 2 and [(refusal.line, refusal.reason) for refusal in refused] == [(2, rows.TOO_LONG)]


AS_TEXT = [
    '[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "TEXT"}]',
    "[{'content': '2+2?', 'role': 'user'}\n {'content': 'TEXT', 'role': 'assistant'}]",  # as numpy prints a column
    ' [ {"from": "gpt", "value": "TEXT"} ]',
]


@pytest.mark.parametrize("written", AS_TEXT)
@pytest.mark.parametrize("column", ["chosen", "rejected", "prompt"])
def test_messages_when_a_column_has_them_as_text_then_the_row_is_refused(written: str, column: str) -> None:
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", column: written}
    kept, (refused,) = parse_pairs([row])
    assert kept == []
    assert refused.reason == f"{column}: a text that spells a list of messages; give the list itself (json.loads)"


@pytest.mark.parametrize(
    "answer", ['[{"name": "Tom", "role": "cook"}]', '[{"role": "cook"}]', '{"role": "a", "content": "b"}']
)
def test_answer_when_it_is_other_json_then_it_is_a_text(answer: str) -> None:
    (pair,), refused = parse_pairs([{"prompt": "Who?", "chosen": answer, "rejected": "5"}])
    assert (pair.chosen.text, refused) == (answer, [])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "2+2? 4", "rejected": "2+2? 5"},
        {"prompt": "2+2?\n", "chosen": "\n2+2? 4", "rejected": "2+2?5"},
        {"prompt": QUESTION, "chosen": "2+2? 4", "rejected": "2+2? 5"},
        {
            "prompt": QUESTION,
            "chosen": [{"role": "assistant", "content": "2+2? 4"}],
            "rejected": [{"role": "assistant", "content": "2+2? 5"}],
        },
    ],
)
def test_prompt_when_both_sides_repeat_it_then_the_row_is_refused(row: dict[str, Any]) -> None:
    kept, (refused,) = parse_pairs([row])
    assert kept == []
    assert refused.reason.startswith("chosen and rejected: both begin with the prompt, which precedes them anyway")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hello", "chosen": "Hello, you!", "rejected": "Hello."},
        {"prompt": "2+2?", "chosen": "2+2? 4", "rejected": "5"},
        {
            "prompt": "2+2?",
            "chosen": "2+2? 4",
            "rejected": "2+2? 5",
            "chosen_token_ids": [1],
        },
        {"chosen": "2+2? 4", "rejected": "2+2? 5"},
    ],
)
def test_prompt_when_an_answer_begins_like_it_for_another_reason_then_the_row_is_kept(row: dict[str, Any]) -> None:
    assert len(parse_pairs([row])[0]) == 1
