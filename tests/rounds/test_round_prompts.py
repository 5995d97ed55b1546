"""The prompts of each round."""

from __future__ import annotations

from pathlib import Path

import pytest

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import write_jsonl
from regretless.data.columns import Response, Verdict
from regretless.data.prompts import PromptSource, load_prompts
from regretless.data.rows import write_records
from regretless.rounds.round_prompts import run


def drawn(folder: Path, count: int, numbers: range, *, parts: int | None = None, size: int | None = None) -> list[str]:
    """Ids of the prompts of each round as one text, of `count` prompts, with the template and answer of each."""
    rows = [{"prompt_id": f"{row}", "prompt": f"{row}+1?", "gold": row + 1} for row in range(count)]
    write_jsonl(folder / "all.jsonl", rows)
    source = PromptSource(dataset=str(folder / "all.jsonl"), answer_column="gold", template="math")
    texts = []
    for number in numbers:
        assert run(source, number, parts=parts, size=size, seed=7, output=folder)["refused"] == 0
        written = load_prompts(PromptSource(dataset=str(folder / "prompts.jsonl"), answer_column="answer"))
        assert all(row.answer == str(int(row.prompt_id) + 1) and row.template == "math" for row in written)
        texts.append(" ".join(row.prompt_id for row in written))
    return texts


@pytest.mark.parametrize(
    ("parts", "size", "numbers", "of_a_pass"),
    [(3, None, range(1, 4), 3), (1, None, range(1, 2), 1), (None, 4, range(1, 3), 2), (None, 3, range(4, 7), 3)],
    ids=["disjoint", "one", "number", "second pass"],
)
def test_prompts_when_rounds_draw_them_then_no_two_of_a_pass_share_any_and_all_are_as_many(
    parts: int | None, size: int | None, numbers: range, of_a_pass: int, tmp_path: Path
) -> None:
    rounds = [text.split() for text in drawn(tmp_path, 10, numbers, parts=parts, size=size)]
    assert {len(ids) for ids in rounds} == {10 // parts if parts else size}
    assert len(set().union(*rounds)) == sum(map(len, rounds[:of_a_pass]))


def test_prompts_when_a_number_is_set_then_a_round_has_the_same_in_any_order_of_work_and_passes_differ(
    tmp_path: Path,
) -> None:
    first = drawn(tmp_path, 10, range(1, 7), size=3)
    assert drawn(tmp_path, 10, range(6, 7), size=3) == first[5:]
    assert set(first[:3]).isdisjoint(first[3:])


@pytest.mark.parametrize(("parts", "size"), [(11, None), (None, 11)])
def test_prompts_when_there_are_too_few_then_error_says_how_many(
    parts: int | None, size: int | None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^rounds\.prompts: .*11 .*all\.jsonl has 10 prompts"):
        drawn(tmp_path, 10, range(1, 2), parts=parts, size=size)


@pytest.mark.parametrize(
    ("earlier", "asked", "resting"),
    [
        ([], "0 1 2 3", None),
        ([{"0": "cc", "1": "cw", "2": "ww", "3": "wc"}], "1 3", 2),
        ([{"1": "cw", "3": "cc"}, {"0": "cc", "1": "ww", "2": "wc"}], "2", 3),
        ([{"0": "cw", "1": "cu", "2": "u"}], "0 3", 2),
    ],
    ids=["nothing before", "all right or all wrong", "two rounds", "unknown"],
)
def test_prompts_when_earlier_responses_had_one_verdict_then_they_rest(
    earlier: list[dict[str, str]], asked: str, resting: int | None, tmp_path: Path
) -> None:
    assert asking(tmp_path, earlier) == (asked, resting)


def test_prompts_when_all_rest_then_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^rounds\.rest: all 4 prompts of round 3 rest.*set a smaller rest"):
        asking(tmp_path, [{"0": "cc", "1": "cc", "2": "ww", "3": "c"}])


def asking(folder: Path, earlier: list[dict[str, str]]) -> tuple[str, int | None]:
    """Ids of the prompts of a third round as one text, and how many rest; earlier: verdicts of responses by prompt."""
    kinds = {"c": Verdict.CORRECT, "w": Verdict.WRONG, "u": Verdict.UNKNOWN}
    for age, verdicts in enumerate(earlier):
        rows = [
            Response(response_id=f"{name}-{number}", prompt_id=name, prompt="?", response="!", verdict=kinds[kind])
            for name, letters in verdicts.items()
            for number, kind in enumerate(letters)
        ]
        write_records(folder / f"{age}.parquet", rows)
    write_jsonl(folder / "all.jsonl", [{"prompt_id": f"{row}", "prompt": f"{row}+1?"} for row in range(4)])
    paths = [folder / f"{age}.parquet" for age in range(len(earlier))]
    source = PromptSource(dataset=str(folder / "all.jsonl"))
    summary = run(source, 3, parts=1, size=None, seed=0, output=folder, earlier=paths)
    rows = load_prompts(PromptSource(dataset=str(folder / "prompts.jsonl")))
    assert summary["prompts"] == len(rows)
    return " ".join(row.prompt_id for row in rows), summary.get("resting")
