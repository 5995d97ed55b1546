"""Recipes, studies and examples by name: found, listed with what they are, and copied so that they work."""

from __future__ import annotations

from pathlib import Path

import pytest

from regretless.core.bundled import KINDS, bundled, copy_files, find, home
from regretless.core.errors import ConfigError
from regretless.core.yaml_settings import read_yaml
from regretless.runs.recipe import load_recipe
from regretless.studies.study import load_study

PROJECT = Path(__file__).resolve().parents[2]


def test_packaged_files_when_listed_then_none_is_missing_and_each_says_what_it_is() -> None:
    recipes = [path for path in (PROJECT / "recipes").rglob("*.yaml") if path.parent.name != "base"]
    assert {one.path for one in bundled("recipes")} == set(recipes)
    assert {one.path for one in bundled("studies")} == set((PROJECT / "studies").rglob("*.yaml"))
    files = [path.relative_to(PROJECT) for path in (PROJECT / "examples").rglob("*") if path.is_file()]
    examples = {path.parts[1] for path in files if "__pycache__" not in path.parts}
    listed = {Path(one.name).parts[1] for one in bundled("examples")}
    assert listed == examples - {"gsm8k_solutions.yaml", "own_file.yaml"}, "a recipe goes with its script"
    for one in (one for kind in KINDS for one in bundled(kind)):
        assert len(one.about) > 25 and "\n" not in one.about and one.about[-1].isalnum() | (one.about[-1] in ")`."), one


def test_name_when_a_file_has_it_then_the_file_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = PROJECT / "recipes" / "quickstart.yaml"
    for name in ("quickstart", "quickstart.yaml", "recipes/quickstart", "recipes/quickstart.yaml"):
        assert find(name) == find(Path(name)) == packaged
    assert find("quickstart", "studies") == PROJECT / "studies" / "quickstart.yaml"
    assert find("math/qwen3-1.7b") == PROJECT / "recipes" / "math" / "qwen3-1.7b.yaml", "a dot in the name"
    (tmp_path / "quickstart").mkdir()
    assert find("quickstart") == packaged, "a folder is no recipe"
    (tmp_path / "quickstart.yaml").write_text("name: mine\n")
    assert load_recipe(Path("quickstart.yaml")).name == "mine"
    assert load_recipe(Path("quickstart")).name == "quickstart"
    with pytest.raises(ConfigError, match=r"math/qwen3: cannot be read .*similar ones: .*math/qwen3-4b"):
        load_recipe(Path("math/qwen3"))
    with pytest.raises(ConfigError, match="found a folder"):
        load_recipe(tmp_path)


def test_own_recipe_when_it_extends_a_packaged_one_by_name_then_it_has_its_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: math/qwen3-1.7b\nname: mine\n")
    packaged = read_yaml(find("math/qwen3-1.7b"))
    assert read_yaml(tmp_path / "mine.yaml") == {**packaged, "name": "mine"}
    (tmp_path / "study.yaml").write_text("name: s\nrecipe: quickstart\nmethods: [dpo]\n")
    (cell,) = load_study(tmp_path / "study.yaml").cells
    assert cell.recipe_name == "quickstart" and cell.methods == ["dpo"]


def test_copies_when_made_then_they_stand_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [one.name for kind in ("recipes", "examples") for one in bundled(kind)]
    names += [f"studies/{one.name}" for one in bundled("studies")]
    written = copy_files(names, tmp_path)
    files = {path for kind in KINDS for path in (PROJECT / kind).rglob("*") if path.is_file()}
    left = {path.relative_to(PROJECT) for path in files if "__pycache__" not in path.parts}
    assert {path.relative_to(tmp_path) for path in written} == left
    copy_files(["math-released/qwen3-4b"], tmp_path / "recipe")
    copy_files(["table1-chat"], tmp_path / "study")
    monkeypatch.setattr("regretless.core.bundled.home", lambda: tmp_path / "nothing")
    recipe = load_recipe(tmp_path / "recipe" / "recipes" / "math-released" / "qwen3-4b.yaml")
    assert recipe.name == "math-released-qwen3-4b"
    assert len(load_study(tmp_path / "study" / "studies" / "table1-chat.yaml").cells) == 2


def test_copies_when_something_is_in_the_way_then_nothing_is_written(tmp_path: Path) -> None:
    copy_files(["quickstart"], tmp_path)
    assert [path.name for path in copy_files(["quickstart"], tmp_path)] == ["quickstart.yaml"], "the same content"
    (tmp_path / "recipes" / "quickstart.yaml").write_text("name: changed\n")
    with pytest.raises(ConfigError, match=r"recipes/quickstart\.yaml: exists with other content"):
        copy_files(["quickstart", "studies/quickstart"], tmp_path)
    assert not (tmp_path / "studies").exists()
    assert (tmp_path / "recipes" / "quickstart.yaml").read_text() == "name: changed\n"
    with pytest.raises(ConfigError, match=r"2 problem(?s:.)*similar: .*table1-chat(?s:.)*xyz: unknown"):
        copy_files(["table-chat", "xyz"], tmp_path)


def test_home_when_in_a_checkout_then_it_is_the_top_of_the_repository() -> None:
    assert home() == PROJECT
