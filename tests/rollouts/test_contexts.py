from __future__ import annotations

import pytest

from regretless.data.columns import Response
from regretless.data.schema import Unusable
from regretless.rollouts.contexts import Context, Measured, checked_ends, line_ends, unit_characters, unit_ends
from regretless.world.tokenizer import build_tokenizer


class Pieces:
    """A tokenizer of planned pieces of text."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        return [self.pieces[token] for (token,) in rows]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (("1", "\n", "2", "\n\n", "3", "<end>"), [2, 4]),
        (("1", ".\n", "2"), [2]),
        (("1", " \n  ", "2"), [2]),
        # A token that begins the next line, and a line that ends with the response, are no ends of units.
        (("1", "\n2", "3", "\n"), []),
        (("1",), []),
    ],
)
def test_line_ends_are_behind_the_token_that_ends_a_line(pieces: tuple[str, ...], expected: list[int]) -> None:
    assert line_ends(range(len(pieces)), Pieces(*pieces)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positions", "at", "expected"),
    [
        ([0.5], "tokens", [5, 10]),
        ([0.2, 0.4, 0.6, 0.8], "tokens", [2, 4, 6, 8, 10]),
        ([0.01, 0.99], "tokens", [1, 9, 10]),
        # Line ends at 3 and 7.
        ([0.2, 0.4, 0.6, 0.8], "lines", [3, 7, 10]),
        ([0.5], "lines", [3, 10]),
        ([0.9], "lines", [7, 10]),
    ],
)
def test_unit_ends_are_those_nearest_to_the_positions_each_once(
    positions: list[float], at: str, expected: list[int]
) -> None:
    tokenizer = Pieces(*"12\n456\n890")
    assert unit_ends(range(10), positions, at, tokenizer) == expected  # type: ignore[arg-type]


def test_unit_ends_when_there_is_one_line_or_one_token_then_one_unit() -> None:
    assert unit_ends(range(3), [0.5], "lines", Pieces(*"abc")) == [3]  # type: ignore[arg-type]
    assert unit_ends(range(1), [0.5], "tokens", Pieces("a")) == [1]  # type: ignore[arg-type]


def test_unit_characters_when_a_unit_divides_a_character_then_it_comes_behind_the_unit() -> None:
    class Bytes:
        def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
            return [bytes(row).decode(errors="replace") for row in rows]

    ids = list("aé\n7".encode())
    response = Response(
        prompt_id="p", response_id="r", prompt="q", prompt_token_ids=[1], response="aé\n7", token_ids=ids
    )
    assert unit_characters(Measured(response, 1.0, (2, 4, 5)), Bytes()) == [1, 3, 4]  # type: ignore[arg-type]


def test_line_ends_when_a_real_tokenizer_made_the_ids_then_the_text_before_them_ends_a_line() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("1+1=2\n2+2=4\n4+4=8")["input_ids"]
    ends = line_ends(ids, tokenizer)
    assert [tokenizer.decode(ids[:end]).count("\n") for end in ends] == [1, 2]
    assert all(tokenizer.decode(ids[:end]).endswith("\n") for end in ends)


@pytest.mark.parametrize("ends", [None, [0], [4], [2, 2], [3, 1], [1.0], [True], "12"])
def test_ends_when_a_row_gives_none_that_rise_within_the_response_then_refused(ends: object) -> None:
    assert checked_ends([1, 3], 4, "steps") == [1, 3, 4]
    assert checked_ends([], 4, "steps") == [4]
    with pytest.raises(Unusable, match="steps: expected rising numbers of tokens between 0 and 4"):
        checked_ends(ends, 4, "steps")


def test_context_names_tell_prompt_and_beginning_apart() -> None:
    contexts = [Context((1, 2), ()), Context((1,), (2,)), Context((), (1, 2)), Context((12,), ())]
    assert len({context.name for context in contexts}) == 4
    assert Context((1,), (2,)).name == contexts[1].name
