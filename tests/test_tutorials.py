"""The tutorials: their Python runs, and their recipes and rows are read without a complaint."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from regretless import parse_pairs, parse_recipe
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.objectives import OBJECTIVES

TUTORIALS = Path(__file__).resolve().parents[1] / "docs" / "tutorials"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a tutorial in one language."""
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_objective_of_the_tutorial_when_run_then_its_numbers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module in a file: the meaning of a hyperparameter is read from the source.
    name = "module_of_the_tutorial"
    (tmp_path / f"{name}.py").write_text("\n".join(blocks("objective", "python")), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    assert module.policy.grad is not None
    assert module.Exponential.hyperparameters()["beta"].meaning == "Inverse temperature β of the implicit reward."


def test_package_of_the_tutorial_when_installed_then_its_name_is_free_and_its_class_is_in_its_module() -> None:
    (project,) = (tomllib.loads(text) for text in blocks("objective", "toml"))
    points = project["project"]["entry-points"]["regretless.objectives"]
    (code, *_) = blocks("objective", "python")
    for name, target in points.items():
        module, _, kind = target.partition(":")
        assert module in project["tool"]["setuptools"]["py-modules"]
        assert f"class {kind}(Objective):" in code and f'name = "{name}"' in code
        assert name not in OBJECTIVES.own, f"{name}: an objective of the package; a plug-in of that name is refused"


@pytest.mark.parametrize("page", ["own_preferences", "verifier_data"])
def test_recipe_of_a_tutorial_when_parsed_then_nothing_is_wrong(page: str) -> None:
    (recipe,) = blocks(page, "yaml")
    assert parse_recipe(yaml.safe_load(recipe), page).train is not None


def test_rows_of_the_tutorial_when_read_then_both_are_pairs() -> None:
    (rows,) = blocks("own_preferences", "json")
    pairs, rejected = parse_pairs([json.loads(line) for line in rows.splitlines()])
    assert len(pairs) == 2 and not rejected


def test_tiny_model_of_the_page_when_made_then_it_answers_with_a_small_vocabulary(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (Path("Qwen")).mkdir()
    Path("Qwen/Qwen3-0.6B").symlink_to(shared / "data/tokenizers/qwen2")
    page = (TUTORIALS.parent / "tiny_models.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "docs/tiny_models.md", "exec"), {})
    (settings,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for config in (ModelConfig(name_or_path="tiny"), ModelConfig(**yaml.safe_load(settings)["model"])):
        model, tokenizer = load_model(config), load_tokenizer(config)
        assert model.config.hidden_size == 64 and model.config.vocab_size >= len(tokenizer)
        ids = encode_prompt(tokenizer, [{"role": "user", "content": "Name a prime above 10."}])
        assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
        assert model(torch.tensor([ids])).logits.isfinite().all()
    assert len(load_tokenizer(ModelConfig(name_or_path="tiny"))) <= 2000
