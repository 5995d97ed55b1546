from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from regretless.core.errors import ConfigError
from regretless.data.prompts import PromptSource, load_prompts
from regretless.data.rows import read_rows
from regretless.world.world import WorldConfig, run

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "prompts": 300,
    "test": 400,
    "longer_test": 20,
    "policies": {"base": {"gives_as_plus": 0.6, "demonstrations": 3000}, "other": {"demonstrations": 1000}},
}


def build(folder: Path, **changes: Any) -> dict[str, bytes]:
    """Every file of a world, by its path."""
    folder.mkdir()
    run(WorldConfig.parse(SETTINGS | changes, "world"), folder)
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def stories(path: Path) -> list[tuple[str, ...]]:
    """Each problem without its names: all numbers and events of the prompt."""
    rows = [row for _, row in read_rows(path)]
    return [tuple(re.findall(r"\d+|buys|gives|doubles|loses", row["prompt"])) for row in rows]  # type: ignore[index]


def test_held_out_problems_occur_nowhere_in_training(tmp_path: Path) -> None:
    # Two-step problems are few, so that careless drawing would surely repeat some.
    build(tmp_path / "world", steps=(2, 3), largest_amount=3)
    test = stories(tmp_path / "world" / "test.jsonl")
    prompts = stories(tmp_path / "world" / "prompts.jsonl")
    assert len(set(test)) == len(test) == 400
    assert len(set(prompts)) == len(prompts) == 300
    trained_on = set(prompts)
    for policy, count in (("base", 3000), ("other", 1000)):
        demonstrations = stories(tmp_path / "world" / f"demonstrations-{policy}.jsonl")
        assert len(demonstrations) == count
        assert len(set(demonstrations)) < count
        trained_on.update(demonstrations)
    assert not trained_on & set(test)


def test_world_of_the_same_seed_is_the_same_and_of_another_differs(tmp_path: Path) -> None:
    first, again, other = build(tmp_path / "a"), build(tmp_path / "b"), build(tmp_path / "c", seed=4)
    assert first == again
    same = {name for name in first if first[name] == other[name]}
    assert same == {f"tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}


def test_a_policy_when_changed_leaves_the_other_files_as_they_are(tmp_path: Path) -> None:
    first = build(tmp_path / "a")
    policies = SETTINGS["policies"] | {"other": {"demonstrations": 500, "off_by_one": 0.1}}
    second = build(tmp_path / "b", policies=policies)
    assert {name for name in first if first[name] != second[name]} == {"demonstrations-other.jsonl"}


def test_world_files_are_read_as_prompts_with_answers(tmp_path: Path) -> None:
    build(tmp_path / "world")
    source = PromptSource(dataset=str(tmp_path / "world" / "longer-test.jsonl"), answer_column="answer")
    prompts = load_prompts(source)
    assert [row.prompt_id for row in prompts[:2]] == ["longer-test-00000", "longer-test-00001"]
    assert all(row.extra["steps"] == 5 and row.answer is not None and int(row.answer) > 0 for row in prompts)


def test_world_when_prompts_are_shorter_than_demonstrations_then_every_file_has_its_lengths(tmp_path: Path) -> None:
    lengths = {"steps": [2, 5], "prompt_steps": [2, 3], "longer_steps": [4, 5]}
    build(tmp_path / "world", validation=50, **lengths)
    steps = {
        name: {row["steps"] for _, row in read_rows(tmp_path / "world" / f"{name}.jsonl")}  # type: ignore[index]
        for name in ("prompts", "test", "validation", "longer-test")
    }
    assert steps == {"prompts": {2, 3}, "test": {2, 3}, "validation": {2, 3}, "longer-test": {4, 5}}
    held_out = [set(stories(tmp_path / "world" / f"{name}.jsonl")) for name in ("test", "validation", "longer-test")]
    assert not held_out[0] & held_out[1]
    seen = stories(tmp_path / "world" / "prompts.jsonl") + stories(tmp_path / "world" / "demonstrations-base.jsonl")
    assert not set(seen) & set.union(*held_out)
    assert max(len(story) for story in seen) > max(len(story) for story in held_out[0])


def test_world_settings_that_cannot_work_are_refused_with_their_names() -> None:
    bad = {"steps": [3, 2], "policies": {"base": {"gives_as_plus": 1.5}}, "demos": 1}
    with pytest.raises(ConfigError, match=r"(?s)policies.base.gives_as_plus.*demos: unknown key"):
        WorldConfig.parse(bad, "world")
    with pytest.raises(ConfigError, match="expected fewest and most"):
        WorldConfig.parse(SETTINGS | {"steps": [3, 2]}, "world")
    with pytest.raises(ConfigError, match="longer_steps: expected fewest and most"):
        WorldConfig.parse(SETTINGS | {"longer_steps": [3, 2]}, "world")
