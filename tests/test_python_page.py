"""The Python interface: its names, its page, and the page's examples, run and type-checked."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import regretless
from regretless.core.files import read_json
from regretless.data.preferences import read_pairs
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.objectives import OBJECTIVES
from regretless.world import local_judge
from regretless.world.tiny_models import smoke_architecture
from regretless.world.tokenizer import build_tokenizer

PROJECT = Path(__file__).resolve().parents[1]
PAGE = (PROJECT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("name", regretless.__all__)
def test_public_name_when_imported_then_it_has_a_docstring_and_a_place_on_the_page(name: str) -> None:
    value = getattr(regretless, name)
    assert name == "__version__" or (value.__doc__ and value.__doc__.strip())
    assert f"`{name}`" in PAGE.split("\n## ")[0], f"docs/python.md: {name} is in no row of the table"
    assert name in dir(regretless)


def test_package_when_imported_then_neither_torch_nor_transformers_come_along() -> None:
    code = "import sys, regretless; print({'torch', 'transformers', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    with pytest.raises(AttributeError, match="'regretless' has no attribute 'Nothing'"):
        regretless.Nothing


MOVED = re.findall(
    r"^\| `(regretless\.[\w.]+)` \| `(regretless\.[\w.]+)` \|$",
    (PROJECT / "docs" / "renamed.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_moved_modules_when_imported_then_the_new_name_exists_and_the_old_one_does_not() -> None:
    assert len(MOVED) > 20
    for before, now in MOVED:
        assert importlib.util.find_spec(now), f"docs/renamed.md: there is no {now}"
        folder = before.rpartition(".")[0]
        assert not (importlib.util.find_spec(folder) and importlib.util.find_spec(before)), (
            f"docs/renamed.md: {before} is still there"
        )


@pytest.mark.slow
def test_examples_of_the_page_when_run_in_order_then_each_leaves_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "local")
    # A local folder with the name of the examples' model: they run as they are printed, and nothing is downloaded.
    (name,) = set(re.findall(r'"(Qwen/[^"]+)"', PAGE))
    build_tokenizer().save_pretrained(name)
    architecture = smoke_architecture("qwen3", len(build_tokenizer()))
    config = ModelConfig(architecture=architecture, tokenizer=name)
    load_model(config).save_pretrained(name)
    load_tokenizer(config).save_pretrained(name)
    rows = [{"prompt": f"Tom has {count} apples. How many?\n", "answer": str(count)} for count in range(1, 7)]
    for file in ("prompts.jsonl", "test.jsonl"):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    names: dict[str, Any] = {}
    monkeypatch.setattr(OBJECTIVES, "_parts", dict(OBJECTIVES._parts))  # an example adds one
    with local_judge.serving():
        for number, example in enumerate(EXAMPLES, 1):
            exec(compile(example, f"docs/python.md, example {number}", "exec"), names)
    assert names["counts"]["responses"] == 6 * 4 == len(names["responses"])
    pairs, refused = read_pairs("masked/pairs.parquet")
    assert {pair.kind for pair in pairs} == {"original", "masked"} and not refused
    assert all(pair.chosen.score is not None for pair in pairs if pair.kind == "original")
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (name, "trained"))
    assert any(not weight.equal(after[key]) for key, weight in before.items())
    (result,) = read_json(Path("runs/evaluation/evaluate/results.json"))["rows"]
    assert (result["benchmark"], result["n"]) == ("mine", 6)
    assert read_json(Path("analyzed/token_rewards.json"))
    assert set(names["folder"].outcomes) >= {"pair", "inspect", "train/repo", "train/dpo", "analyze"}
    assert "Demo" in Path("page/report.html").read_text(encoding="utf-8")
    assert (names["trainer"].args.objective, names["trainer"].state.global_step) == ("mine", 2)
    assert names["policy"].grad is not None and names["policy"].grad.abs().sum() > 0


@pytest.mark.slow
def test_examples_of_the_page_when_type_checked_strictly_then_nothing_is_wrong(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    wrong = "wrong: int = PreferenceConfig\nmissing = regretless.Nothing\n"
    # Calls of torch's own `backward` count as untyped.
    lines = ["# mypy: allow-untyped-calls", "import regretless", *EXAMPLES, wrong]
    user.write_text("\n".join(lines), encoding="utf-8")
    # With the project's own settings, which are strict, and so with what the check of the project has cached.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(user)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    found = [line.partition("error: ")[2] for line in done.stdout.splitlines() if "error: " in line]
    assert len(found) == 2 and "Incompatible types in assignment" in found[0], done.stdout + done.stderr
    assert 'has no attribute "Nothing"' in found[1], found
