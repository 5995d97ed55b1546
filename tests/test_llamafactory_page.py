"""docs/from_llamafactory.md: the settings that it names exist, and their defaults are those that it says."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from regretless.cli import verbs
from regretless.cli.app import app
from regretless.core.errors import ConfigError
from regretless.core.yaml_settings import load_text, read_yaml
from regretless.modeling.load import ModelConfig
from regretless.objectives import OBJECTIVES
from regretless.runs.recipe import PairsSource
from regretless.training.arguments import PreferenceConfig
from regretless.training.train_config import LoraSettings, TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "from_llamafactory.md"


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").split("\n## Keys\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]


def declared(key: str) -> Any:
    """The default of a setting as the table names it: of its section, of `train`, or of an objective that has it."""
    section, _, name = key.rpartition(".")
    sections = {"lora": LoraSettings, "model": ModelConfig, "pairs": PairsSource, "": TrainConfig}
    kinds = [sections[section], *(OBJECTIVES.usable()[0].values() if not section else ())]
    found = [
        kind.model_fields[name].get_default(call_default_factory=True) for kind in kinds if name in kind.model_fields
    ]
    arguments = {field.name: field.default for field in dataclasses.fields(PreferenceConfig)}
    return arguments[name] if not section and name in arguments else found[0]


def test_table_when_it_names_settings_then_they_have_the_defaults_that_it_says() -> None:
    compared = 0
    for theirs, _, here, default, _ in rows():
        values = [load_text(text) for text in re.findall(r"`([^`]*)`", default)]
        for number, key in enumerate(re.findall(r"`([a-z_.]+)(?:=[^`]*)?`", here)):
            if key in ("pairs.dataset", "objective", "ref_model", "peft_config", "regretless"):
                continue
            found = declared(key)
            expected = values[min(number, len(values) - 1)] if values else None
            assert found == expected or (expected is None and found is None), f"{theirs}: {key} is {found!r}"
            compared += 1
    assert compared > 25


def test_file_of_llamafactory_when_translated_then_the_command_is_read_and_has_its_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    theirs = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    (command,) = re.findall(r"^    (regretless dpo .*)$", text, re.MULTILINE)
    read: list[Any] = []
    monkeypatch.setattr(verbs, "stage", read.append)
    with pytest.raises(SystemExit):
        app(shlex.split(command)[1:])
    monkeypatch.setattr("regretless.cli.request.recipe_problems", lambda *_: [])  # it looks for the files
    train = read[0].recipe().train
    values = train.values_for("dpo")
    assert train.objectives == ["dpo"] and values["max_length"] == theirs["cutoff_len"]
    assert values["pairs_per_step"] == theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
    same = ("learning_rate", "num_train_epochs", "lr_scheduler_type", "bf16")
    assert {name: values[name] for name in same} == {name: theirs[name] for name in same}
    assert (train.lora.r, train.lora.dropout, values["warmup_steps"]) == (
        theirs["lora_rank"],
        0,
        theirs["warmup_ratio"],
    )
    # Their file itself, and one of TRL.
    for content, page in (
        (theirs, "from_llamafactory"),
        ({"model_name_or_path": "a/b", "dataset_name": "c"}, "from_trl"),
    ):
        (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(ConfigError, match=rf"theirs\.yaml: a configuration of .*/{page}\.html has the names"):
            read_yaml(tmp_path / "theirs.yaml")
