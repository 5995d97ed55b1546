"""Settings that can be found: every one has a meaning, and the commands' help shows them as they are declared."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field
from typer.testing import CliRunner

from regretless.cli.app import app
from regretless.cli.declared import declared, settings_of_stage
from regretless.core.errors import ConfigError
from regretless.core.setting_list import REQUIRED, Setting, settings_of
from regretless.core.settings import Section
from regretless.core.yaml_settings import merge
from regretless.runs.recipe import Recipe
from regretless.runs.stages import STAGES
from regretless.studies.study import StudyConfig
from regretless.training.arguments import NOT_IN_RECIPES


class Inner(Section):
    """A section inside another."""

    size: int = Field(ge=1)
    """How many."""


class Outer(Section):
    """A section."""

    name: str | None = None
    """What it is
    called."""
    inner: Inner | None = None
    """One inside."""
    several: dict[str, Inner] = Field(default={})
    """Some by name."""


class Round(Section):
    """One of two kinds."""

    kind: Literal["round"] = "round"
    """Which kind."""
    color: str = "red"
    """Its color."""
    radius: int = 1
    """How far it reaches."""


class Square(Section):
    """The other kind."""

    kind: Literal["square"] = "square"
    """Which kind."""
    color: str = "blue"
    """Its color."""


class Holder(Section):
    """A section that holds one of two kinds."""

    shape: Round | Square = Field(discriminator="kind")
    """Its shape."""
    many: list[int] = Field(default_factory=list)
    """Some."""
    own: Inner = Inner(size=3)
    """One inside."""


def test_settings_when_listed_then_nested_ones_come_with_their_key_type_default_and_meaning() -> None:
    assert settings_of(Outer, "outer") == [
        Setting("outer.name", "string or null", None, "What it is called."),
        Setting("outer.inner", "section or null", None, "One inside."),
        Setting("outer.inner.size", "integer ≥ 1", REQUIRED, "How many."),
        Setting("outer.several", "mapping", {}, "Some by name."),
        Setting("outer.several.NAME.size", "integer ≥ 1", REQUIRED, "How many."),
    ]


def test_settings_when_a_section_is_of_several_kinds_then_it_says_which_kind_has_what() -> None:
    assert settings_of(Holder) == [
        Setting("shape", "section", REQUIRED, "Its shape."),
        Setting("shape.kind", "round or square", REQUIRED, "Which kind."),
        Setting("shape.color", "string", "red", "For kind=round: Its color."),
        Setting("shape.color", "string", "blue", "For kind=square: Its color."),
        Setting("shape.radius", "integer", 1, "For kind=round: How far it reaches."),
        Setting("many", "list of integer", [], "Some."),
        Setting("own", "section", {"size": 3}, "One inside."),
        Setting("own.size", "integer ≥ 1", REQUIRED, "How many."),
    ]
    assert settings_of(Holder)[6].default_text == "as listed for its settings"


def test_settings_when_listed_then_a_recipe_takes_every_one_and_those_of_no_section_too() -> None:
    """Some arguments of the trainer are no settings: a recipe refuses them."""
    keys = {one.key for one in settings_of_stage("train")}
    assert "train.max_length" in keys
    assert not {f"train.{name}" for name in NOT_IN_RECIPES} & keys
    assert settings_of_stage("seed") == [
        Setting("seed", "integer ≥ 0, ≤ 4294967295", 0, Recipe.model_fields["seed"].description or "")
    ]
    assert settings_of_stage("name")[0].default == REQUIRED


@pytest.mark.parametrize("section", Recipe.model_fields)
def test_section_when_listed_then_every_setting_says_what_it_means(section: str) -> None:
    found = settings_of_stage(section)
    assert found
    # A sentence: longer than a word or two, with a capital (or a name in code) in front and a period at its end.
    sentence = re.compile(r"(For \w+=[\w ]+: )?[`A-Z].{9,}[.]")
    assert not [f"{one.key}: {one.meaning}" for one in found if not sentence.fullmatch(one.meaning)]
    meanings = {key: {one.meaning for one in found if one.key == key} for key in {one.key for one in found}}
    assert not [key for key, several in meanings.items() if len(several) < sum(one.key == key for one in found)]


def nested(key: str, value: Any) -> Any:
    for part in reversed(key.split(".")):
        value = [value] if part == "N" else {part: value}
    return value


@pytest.mark.parametrize("section", [*Recipe.model_fields, "study"])
def test_text_when_it_is_empty_as_a_variable_that_is_not_set_then_every_setting_refuses_it(section: str) -> None:
    kind, found = (
        (StudyConfig, settings_of(StudyConfig)) if section == "study" else (Recipe, settings_of_stage(section))
    )
    for one in found:
        if not one.type.startswith("string") or one.default == "":
            continue
        values = nested(one.key, "")
        if "chat.NAME." in one.key and not one.key.endswith(".benchmark"):
            benchmark = one.meaning.partition("For benchmark=")[2].partition(":")[0] or "arena_hard"
            values = merge(values, nested("evaluate.chat.NAME.benchmark", benchmark))
        with pytest.raises(ConfigError) as refused:
            kind.parse(values, "")
        said = one.key.replace(".N.", ".0.")
        assert any(problem.startswith(f"{said}: ") for problem in refused.value.problems), said


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("stage", [stage.name for stage in STAGES.values() if stage.about])
def test_help_of_a_command_when_asked_for_then_it_shows_every_setting_in_full(
    stage: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = CliRunner().invoke(app, [stage, "--help"]).output
    assert max(map(len, shown.splitlines())) <= columns
    words = " ".join(shown.split())
    for one in settings_of_stage(stage):
        default = REQUIRED if one.default == REQUIRED else f"default: {one.default_text}"
        assert f" {one.key.removeprefix(f'{stage}.')} {one.type}; {default} {one.meaning} " in f"{words} "


def test_pages_of_settings_when_compared_with_the_code_then_they_are_up_to_date() -> None:
    script = Path(__file__).resolve().parents[2] / "docs" / "make_settings.py"
    spec = importlib.util.spec_from_file_location("make_settings", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = module.pages()
    assert len(expected) > 12
    actual = {page.name: page.read_text(encoding="utf-8") for page in module.FOLDER.glob("*.md")}
    actual[module.PRINTED.name] = module.PRINTED.read_text(encoding="utf-8")
    expected[module.PRINTED.name] = declared()
    stale = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    assert not stale, f"{', '.join(stale)} out of date; run: {module.COMMAND}"


def test_settings_command_when_asked_for_json_then_programs_can_read_it() -> None:
    rows = json.loads(CliRunner().invoke(app, ["settings", "pair", "--json"]).output)
    assert {"key": "pair.max_wrong", "type": "integer ≥ 1", "default": 2}.items() <= {
        key: value for row in rows if row["key"] == "pair.max_wrong" for key, value in row.items()
    }.items()
