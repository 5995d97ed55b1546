"""Python processes that a command starts: they import from where it does, and run no file of the working directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kill_sweep import RECIPE

PARENT = """
import json, os, sys
from regretless.workflow.children import Children
from regretless.workflow.python_process import run_code
{change}
import subprocess, where
printed = subprocess.run(run_code("import json; print(json.dumps(sys.path))"), stdout=subprocess.PIPE).stdout
with Children([]) as children:
    children.start("one", where.paths)
    while children: event = (children.events() or [None])[-1]
with open({output!r}, "w") as file: json.dump([sys.path, json.loads(printed), event.value or repr(event)], file)
"""
PLANTED = "import os; os.close(os.open(__file__ + '.ran', os.O_CREAT)); raise ImportError('planted')\n"
NAMES = ("json", "socket", "sympy", "random", "torch", "selectors", "runpy", "lm_eval", "yaml", "sitecustomize")
SCRIPT = "from regretless.__main__ import main\nmain()\n"
"""What a console script does: the folder that it lies in is in `sys.path`, the working directory is not."""


@pytest.mark.parametrize(
    ("options", "environment", "change"),
    [
        (["script"], {}, "sys.path.append('{modules}')"),
        (["script"], {"PYTHONPATH": "{modules}:relative"}, ""),
        (["-P", "script"], {"PYTHONPATH": "{modules}"}, ""),
        (["-I", "script"], {"PYTHONPATH": "nowhere"}, "sys.path.insert(0, '{modules}')"),
        (["-E", "script"], {"PYTHONPATH": "nowhere"}, "sys.path.insert(0, '{modules}')"),
        (["-c"], {}, "sys.path.insert(0, '{modules}')"),
        # As in a notebook, whose modules are in the folder that it has changed to.
        (["-c"], {}, "sys.path.remove(''); sys.path.insert(3, ''); os.chdir('{modules}')"),
        (["script"], {}, "sys.path[:] = ['{modules}', '/a:b', *sys.path[1:], '/with \\'quotes\\' and \\udcff']"),
        (["script"], {}, "sys.path[:] = [path for path in sys.path if path != '/nowhere'] + ['{modules}'] * 2"),
    ],
)
def test_children_when_started_then_they_have_their_parents_paths_in_its_order(
    tmp_path: Path, options: list[str], environment: dict[str, str], change: str
) -> None:
    modules, output = tmp_path / "modules", tmp_path / "paths.json"
    modules.mkdir()
    (modules / "where.py").write_text("import sys\ndef paths(): return sys.path\n")
    code = PARENT.format(change=change.replace("{modules}", str(modules)), output=str(output))
    if "-c" not in options:  # this parent imports from the working directory itself
        (tmp_path / "socket.py").write_text(PLANTED)
    (tmp_path / "scripts").mkdir()
    (script := tmp_path / "scripts" / "script.py").write_text(code)
    command = [sys.executable, *(str(script) if word == "script" else word for word in options)]
    command += [code] if options == ["-c"] else []
    values = {name: value.replace("{modules}", str(modules)) for name, value in environment.items()}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | values, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()
    mine, of_child, of_forked = json.loads(output.read_text())
    assert of_child == of_forked == mine and any(path in ("", str(modules)) for path in mine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory of files that are called like modules, and beside it the command line's script."""
    (tmp_path / "command.py").write_text(SCRIPT)
    (work := tmp_path / "work").mkdir()
    for name in NAMES:
        (work / f"{name}.py").write_text(PLANTED)
    return work


def run(folder: Path, *words: str, code: int = 0, **environment: str) -> str:
    command = [sys.executable, str(folder.with_name("command.py")), *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert not [path.name for path in folder.rglob("*.ran")], done.stderr
    return done.stderr


@pytest.mark.slow
def test_verify_when_files_are_called_like_modules_then_none_of_them_runs(folder: Path) -> None:
    row = {"prompt": "What is x + x?", "response": "It is $\\boxed{x + x}$.", "answer": "2x"}
    (folder / "responses.jsonl").write_text(json.dumps(row) + "\n")
    assert "correct 1" in run(folder, "verify", "--responses", "responses.jsonl", "--output", "verified")


@pytest.mark.slow
def test_harness_when_files_are_called_like_modules_then_the_environments_is_run(folder: Path, model: Path) -> None:
    package = folder.parent / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; sys.exit('the real one, ' + sys.argv[1])")
    recipe = {
        "name": "harness",
        "threads": 1,
        "model": {"name_or_path": str(model)},
        "evaluate": {"benchmarks": {}, "harness": ["task"]},
    }
    for python in (None, sys.executable):
        recipe["evaluate"]["harness_settings"] = {"python": python}  # type: ignore[index]
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        assert "the real one, run" in run(folder, "run", "recipe.yaml", code=1, PYTHONPATH=str(package.parent))


@pytest.mark.slow
def test_run_and_study_when_files_are_called_like_modules_then_no_process_of_theirs_runs_them(folder: Path) -> None:
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    del recipe["judge"], recipe["evaluate"]["chat"]
    recipe["pair"] = {}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run(folder, "run", "recipe.yaml", "--output-dir", "run", "parallel=2")
    said = run(folder, "run", "recipe.yaml", "--output-dir", "run", "train.processes=2", "train.seed=8")
    assert "sample: unchanged" in said and "train/repo: unchanged" not in said, said
    study = {"name": "study", "recipe": "recipe.yaml", "output_dir": "study", "seeds": {"training": [1, 2]}}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    run(folder, "study", "study.yaml", "--processes", "2")
