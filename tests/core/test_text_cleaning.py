"""The gate that text passes: half characters, depth, and what a terminal gets to see."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from regretless.core.text_cleaning import MAX_DEPTH, clean_text, is_too_deep, json_value, one_line, printable

ANY_TEXT = st.text(st.characters(exclude_categories=()) | st.sampled_from("\ud800\udfff\ud83d\ude00\x00\x1b\u202e"))
ANY_VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
)


def test_halves_of_a_surrogate_pair_when_cleaned_then_joined_or_replaced() -> None:
    assert clean_text("a\ud83d\ude00b\ude00c\ud800") == "a\U0001f600b\ufffdc\ufffd"
    assert clean_text("é\x00\x1b") == "é\x00\x1b"


@given(ANY_TEXT)
def test_any_text_when_cleaned_then_utf8_holds_it_and_whole_characters_stay(text: str) -> None:
    cleaned = clean_text(text)
    assert cleaned.encode().decode() == cleaned
    if "\ufffd" not in cleaned:
        assert cleaned.encode("utf-16") == text.encode("utf-16", "surrogatepass")


@given(ANY_VALUE)
def test_any_value_when_made_json_then_it_parses_with_strict_readers(value: Any) -> None:
    line = json.dumps(json_value(value), ensure_ascii=False, allow_nan=False).encode()
    json.loads(line)


def test_values_without_a_json_form_when_made_json_then_they_stay_readable() -> None:
    deep: Any = "end"
    for _ in range(5000):
        deep = [deep]
    assert is_too_deep(deep)
    found = json_value({"score": math.nan, "ids": (1, 10**5000), 3: b"x", "deep": deep})
    assert found.pop("deep") != deep
    assert found == {"score": "nan", "ids": [1, "integer of 16610 bits"], "3": "eA=="}


def test_depth_when_at_the_limit_then_accepted() -> None:
    value: Any = {}
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert not is_too_deep(value)
    assert is_too_deep([[value]])


@given(ANY_TEXT)
def test_any_text_when_shown_then_nothing_steers_the_terminal(text: str) -> None:
    shown = printable(text)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown if c not in "\t\n")
    shown.encode()
    assert len(one_line(text).splitlines()) <= 1


def test_escapes_when_shown_then_visible() -> None:
    assert printable("a\x1b[31mb\x9b\udcff\u202e\n") == "a\\x1b[31mb\\x9b\\xff\\u202e\n"
    assert one_line("refused\nerror: x") == "refused\\nerror: x"
