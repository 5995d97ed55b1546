"""Settings that can be found: every one has a meaning, and the commands' help shows them as they are declared."""

from __future__ import annotations

import json

import pytest
from pydantic import Field
from typer.testing import CliRunner

from regretless.cli.app import app
from regretless.cli.info import settings_of_stage
from regretless.core.setting_list import REQUIRED, Setting, settings_of
from regretless.core.settings import Section
from regretless.core.stages import STAGES
from regretless.runs.recipe import Recipe


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


def test_settings_when_listed_then_nested_ones_come_with_their_key_type_default_and_meaning() -> None:
    assert settings_of(Outer, "outer") == [
        Setting("outer.name", "string or none", None, "What it is called."),
        Setting("outer.inner", "section or none", None, "One inside."),
        Setting("outer.inner.size", "integer ≥ 1", REQUIRED, "How many."),
        Setting("outer.several", "mapping", None, "Some by name."),
        Setting("outer.several.NAME.size", "integer ≥ 1", REQUIRED, "How many."),
    ]


@pytest.mark.parametrize("section", Recipe.model_fields)
def test_section_when_listed_then_every_setting_says_what_it_means(section: str) -> None:
    found = settings_of_stage(section)
    assert found
    assert not [setting.key for setting in found if not setting.meaning.strip()]


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES.values() if stage.about])
def test_help_of_a_command_when_asked_for_then_it_shows_every_setting(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = CliRunner().invoke(app, [stage, "--help"]).output
    missing = [one.key for one in settings_of_stage(stage) if f" {one.key.removeprefix(f'{stage}.')} " not in shown]
    assert not missing


def test_settings_command_when_asked_for_json_then_programs_can_read_it() -> None:
    rows = json.loads(CliRunner().invoke(app, ["settings", "pair", "--json"]).output)
    assert {"key": "pair.max_wrong", "type": "integer ≥ 1", "default": 2}.items() <= {
        key: value for row in rows if row["key"] == "pair.max_wrong" for key, value in row.items()
    }.items()
