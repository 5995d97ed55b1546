"""YAML of recipes and overrides: the types of version 1.2, and limits on what a text may ask for."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

from regretless.core.errors import ConfigError
from regretless.core.settings import DECIDED, Section
from regretless.core.yaml_settings import LARGEST, dump_text, load_text, parse_override, read_yaml

PLAIN = {
    "1:30": "1:30",
    "190:20:30.15": "190:20:30.15",
    "010": 10,
    "08": 8,
    "0o17": 15,
    "0x1F": 31,
    "0b11": "0b11",
    "1_000": "1_000",
    "1e5": 100000.0,
    "1E-4": 0.0001,
    ".5e3": 500.0,
    "1.": 1.0,
    "-.INF": -math.inf,
    "-5": -5,
    "+5": 5,
    "1.2.3": "1.2.3",
    "12e": "12e",
    "yes": "yes",
    "no": "no",
    "On": "On",
    "y": "y",
    "True": True,
    "FALSE": False,
    "tRUE": "tRUE",
    "2026-01-02": "2026-01-02",
    "2026-01-02 10:00:00": "2026-01-02 10:00:00",
    "": None,
    "~": None,
    "Null": None,
    "nULL": "nULL",
    "=": "=",
    "'1:30'": "1:30",
    '"no"': "no",
    "!!str 1": "1",
    '"\\ud83d\\ude00"': "\U0001f600",
    "\U0001f600 e\u0301": "\U0001f600 e\u0301",
}
"""What stands in a file, and its value by YAML 1.2.2, chapter 10.3."""


@pytest.mark.parametrize("text", PLAIN)
def test_value_when_it_has_no_type_of_its_own_then_yaml_1_2_decides(text: str) -> None:
    for found in (load_text(f"x: {text}")["x"], load_text(f"[{text}]")[0] if text else None):
        assert found == PLAIN[text] and isinstance(found, type(PLAIN[text]))


@pytest.mark.parametrize("value", [*PLAIN, *PLAIN.values(), "a: b", "#", "<<", " a", 1e-5, 1e300, 3, [{"a": None}]])
def test_values_when_written_then_readers_of_both_versions_read_them_back(value: Any) -> None:
    written = dump_text({"x": value})
    assert load_text(written) == yaml.safe_load(written) == {"x": value}


class Both(Section):
    seed: int = 0
    flag: bool = True
    text: str = ""
    either: bool | str = True
    anything: Annotated[dict[str, Any], DECIDED] = Field(default={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1_000", Both(seed=1000)),
        ("seed: 010", Both(seed=10)),
        ("flag: off", Both(flag=False)),
        ("text: no", Both(text="no")),
        ("text: 2026-01-02", Both(text="2026-01-02")),
        ("anything: {x: ['no', \"1_000\", 1e5]}", Both(anything={"x": ["no", "1_000", 1e5]})),
        ("seed: 1:30", r"seed: .* integer.*'1:30'"),
        ("anything: {x: [no]}", r'anything: no without quotes .*; write true, false or a plain number, or "no"'),
        ("anything: {x: {y: 1_000}}", "anything: 1_000 without quotes"),
        ("anything: {x: 2026-01-02}", "anything: 2026-01-02 without quotes"),
    ],
)
def test_section_when_versions_of_yaml_differ_then_the_type_decides_or_it_is_refused(
    text: str, expected: Section | str
) -> None:
    if isinstance(expected, Section):
        found = Both.parse(load_text(text), "r.yaml")
        assert found == expected and type(found.text) is str
    else:
        with pytest.raises(ConfigError, match=expected):
            Both.parse(load_text(text), "r.yaml")


MERGED = [
    ("a: &a {x: 1, y: 1}\nb: {<<: *a, x: 2}", {"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 1}}),
    ("c: {<<: &b {<<: {x: 1}, x: 2}, y: 3}\nd: *b", {"c": {"x": 2, "y": 3}, "d": {"x": 2}}),
    ("- {<<: &b {<<: {x: 1}, x: 2}, x: 3}\n- *b", [{"x": 3}, {"x": 2}]),
    ("<<: [{x: 1}, {x: 2, y: 2}]\nx: 3", {"x": 3, "y": 2}),
]


@pytest.mark.parametrize(("text", "expected"), MERGED)
def test_merge_key_when_a_key_overrides_it_then_the_key_wins(text: str, expected: Any) -> None:
    assert load_text(text) == expected


def _laughs(levels: int) -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x: 1\nx: 2", "x: occurs twice"),
        ("a: [{x: 1, 'x': 2}]", "x: occurs twice"),
        ("{<<: {a: 1}, <<: {a: 2}}", "<<: occurs twice"),
        (_laughs(9), f"more than {LARGEST} characters with every alias written out"),
        (f"a: &a {'x' * 1000}\nb: [{', '.join(['*a'] * 500)}]", "with every alias written out"),
        ("a: &a [*a]", "an alias inside of what it stands for"),
        ("a: &a {b: {c: *a}}", "an alias inside of what it stands for"),
        ("".join(f"k{number}: 1\n" for number in range(200_000)), f"more than {LARGEST} characters"),
        ("[" * 5000, "recursion"),
        ('x: "\\ud800"', r"half of a surrogate pair, '\\ud800'"),
        ("x: " + "9" * 5000, "4300"),
        ("x: !!int no", "'no': not a value of type int"),
        ("x: !!bool ''", "'': not a value of type bool"),
        ("x: !!timestamp now", "could not determine a constructor"),
        ("x: <<", "could not determine a constructor"),
    ],
)
def test_file_when_it_cannot_be_meant_then_a_message_says_why(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"r\.yaml: not valid YAML: (.|\n)*{problem}"):
        read_yaml(tmp_path / "r.yaml")


def test_section_when_very_many_keys_are_unknown_then_the_first_are_listed() -> None:
    with pytest.raises(ConfigError) as refused:
        Both.parse(dict.fromkeys(map(str, range(5000))), "r.yaml")
    assert len(refused.value.problems) == 101 and refused.value.problems[-1] == "and 4900 more"


def test_path_when_it_is_no_file_then_it_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/zero")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "nothing.yaml").symlink_to(tmp_path / "gone")
    problems = {"pipe": "found a pipe", "device": "found a device", "folder": "found a folder", "nothing": "No such"}
    for name, problem in problems.items():
        with pytest.raises(ConfigError, match=rf"{name}\.yaml: cannot be read .*{problem}"):
            read_yaml(tmp_path / f"{name}.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1:30", {"a": {"b": "1:30"}}),
        ("a='x #y'", {"a": "x #y"}),
        ("a=http://x/#y", {"a": "http://x/#y"}),
        ("a=", {"a": None}),
        ("a=\U0001f600", {"a": "\U0001f600"}),
        ("a=|\n  x # y", {"a": "x # y"}),
        ("a=x #y", "'#y' is a comment in YAML; put the value into quotes"),
        ("a=#1", "'#1' is a comment"),
        ("a=[1, 2] # c", "'# c' is a comment"),
        ('a={"b": 1, "b": 2}', "b: occurs twice"),
        ("a=&a [*a]", "an alias inside"),
        ("a=" + "9" * 5000, "not valid YAML"),
    ],
)
def test_override_when_read_then_nothing_of_it_is_dropped(text: str, expected: dict[str, Any] | str) -> None:
    if isinstance(expected, dict):
        assert parse_override(text) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            parse_override(text)
