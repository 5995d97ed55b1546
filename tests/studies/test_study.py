"""Studies: which runs a file stands for, and what of their work is shared, kept and resumed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from regretless.cli import verbs
from regretless.core.errors import ConfigError, RegretlessError
from regretless.runs.pipeline import run_recipe
from regretless.studies.runner import finished as finished_cells
from regretless.studies.runner import run_study
from regretless.studies.study import Study, load_study
from regretless.workflow.stage_folder import MANIFEST
from run_contents import contents, differences

PROJECT = Path(__file__).resolve().parents[2]
RECIPE = {
    "name": "small",
    "seed": 7,
    "threads": 1,
    "world": {
        "prompts": 32,
        "test": 8,
        "longer_test": 0,
        "steps": [1, 1],
        "largest_amount": 1,
        "policies": {"behavior": {"off_by_one": 0.3, "demonstrations": 960}},
    },
    "pretrain": {
        "behavior": {
            "model": {
                "architecture": {
                    "model_type": "qwen3",
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 8,
                    "max_position_embeddings": 512,
                },
                "tokenizer": "{run}/world/tokenizer",
            },
            "data": "{run}/world/demonstrations-behavior.jsonl",
            "lora": None,
            "max_steps": 60,
            "pairs_per_step": 16,
            "learning_rate": 0.01,
        }
    },
    "model": {"name_or_path": "{run}/pretrain/behavior"},
    "sample": {
        "prompts": {"dataset": "{run}/world/prompts.jsonl", "answer_column": "answer"},
        "models": [{"name_or_path": "{run}/pretrain/behavior"}],
        **{"n": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
        **{"max_new_tokens": 16, "batch_size": 64},
    },
    "verify": {},
    "pair": {},
    "train": {
        "objective": ["dpo", "repo", "ipo"],
        "lora": {"r": 4, "dropout": 0.1},
        "max_steps": 4,
        "pairs_per_step": 8,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "save_steps": 2,
    },
    "evaluate": {
        "max_new_tokens": 16,
        "batch_size": 64,
        "benchmarks": {"arithmetic": {"dataset": "{run}/world/test.jsonl", "answer_column": "answer"}},
    },
    "report": {},
}
STUDY: dict[str, Any] = {
    "name": "small",
    "recipe": "small.yaml",
    "methods": ["dpo", "repo"],
    "seeds": {"training": [0, 1]},
}
JUDGED: dict[str, Any] = {
    "benchmarks": {"other": {"dataset": "{run}/world/test.jsonl", "answer_column": "answer"}},
}


def load(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Study:
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    values = {**STUDY, "output_dir": str(folder / "out"), **(changes or {})}
    (folder / "study.yaml").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return load_study(folder / "study.yaml", **options)


def made(folder: Path) -> dict[str, int]:
    """Units in the store, by name, each with the time when it was made."""
    return {str(path): path.stat().st_mtime_ns for path in (folder / "out" / "units").glob(f"*/{MANIFEST}")}


def stages(folder: Path) -> list[str]:
    """Labels of the units in the store."""
    return sorted(json.loads(Path(path).read_text())["stage"] for path in made(folder))


def test_study_when_read_then_it_is_every_combination_with_each_seed_where_it_belongs(tmp_path: Path) -> None:
    changes = {
        "models": {"one": {}, "two (wide)": {"train": {"lora": {"r": 8}}}},
        "seeds": {"training": [0, 1], "data": [5], "decoding": [41, 42]},
        "overrides": {"train.beta": [0.1, 1.0], "mask": {"unmasked": None, "masked": {"count": 10}}},
        "settings": {"train.max_steps": 3},
    }
    study = load(tmp_path, changes, overrides=["train.learning_rate=5e-4"])
    assert len(study.cells) == 2 * 2 * 4
    assert len({cell.name for cell in study.cells}) == 16
    names = [cell.name for cell in study.cells]
    assert "one_train.beta=0.1_mask=unmasked_data-5_training-0" in names
    assert "two-wide-_train.beta=1.0_mask=masked_data-5_training-1" in names
    for cell in study.cells:
        recipe = cell.recipe
        assert recipe.train is not None and recipe.evaluate is not None and recipe.sample is not None
        assert recipe.train.objectives == ["dpo", "repo"]
        values = recipe.train.values_for("dpo")
        assert values["seed"] == cell.training_seed
        assert values["beta"] == float(cell.variant["train.beta"])
        assert (values["max_steps"], values["learning_rate"]) == (3, 5e-4)
        assert recipe.sample.seed == recipe.seed == cell.data_seed == 5
        assert recipe.evaluate.seeds == [41, 42]
        assert (recipe.mask is None) == (cell.variant["mask"] == "unmasked")
        assert recipe.train.lora is not None and recipe.train.lora.r == (4 if cell.model == "one" else 8)
        assert recipe.run_dir == tmp_path / "out" / "runs" / cell.name


LONG = "a" * 300
TEN = [*range(10)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": None}, "recipe: required"),
        ({"methods": ["dpoo"]}, "dpoo"),
        ({"overrides": {"train.bet": [0.1]}}, "train.bet"),
        ({"overrides": {"train.beta": []}}, "expected at least one value"),
        ({"overrides": {"train.beta, seed": [[1, 2], 3]}}, "train.beta, seed: expected a list of 2 values .*got 3"),
        ({"overrides": {"train.beta, seed": {"a": [1]}}}, r"train.beta, seed: expected a list of 2 values .*got \[1\]"),
        ({"overrides": {"train.beta, seed": [[1, 2], [1, 3]]}}, "overrides: train.beta, seed=1: a value occurs twice"),
        ({"overrides": {"train.beta, seed": [[1, 2]], "seed": [3]}}, "overrides: seed: named by two keys"),
        ({"overrides": {"train.beta": [1, "1"]}}, "overrides: train.beta=1: a value occurs twice"),
        ({"seeds": {"training": [1, 1]}}, "a seed occurs twice"),
        ({"models": {"a b": {}, "a-b": {}}, "seeds": {}}, "a-b: two runs have this folder"),
        ({"models": {"a": {}, "A": {}}, "seeds": {}}, "A: two runs have this folder"),
        ({"models": {"..": {}}, "seeds": {}}, r"\.\.: expected at most 200 bytes, beginning with a letter"),
        ({"models": {"..": {}}}, r"\.\._training-0: expected at most 200 bytes, beginning with a letter"),
        ({"models": {".": {}}, "seeds": {}}, r"\.: expected at most 200 bytes, beginning with a letter"),
        ({"models": {LONG: {}}, "seeds": {}}, f"{LONG}: expected at most 200 bytes"),
        ({"overrides": {"train.beta": {LONG: 1, "b": 2}}}, f"train.beta={LONG}_training-0: expected at most 200 bytes"),
        ({"models": {"": {}, "b": {}}}, "models: expected labels that are not empty"),
        ({"seed": [0]}, "seed"),
        ({"store": "s3://bucket/units"}, "store: expected a path on this machine"),
        ({"store": ""}, "store: expected a value, got nothing"),
        ({"distance_to": "nope"}, "distance_to: expected one of dpo, repo, got nope"),
        ({"distance_to": "nope", "methods": []}, "distance_to: expected one of dpo, repo, ipo, got nope"),
        ({"baseline": "nope"}, "baseline: expected one of base, dpo, repo, got nope"),
        (
            {"baseline": "train.beta=1", "overrides": {"train.beta": [2, 3]}},
            "dpo, repo, train.beta=2, train.beta=3, got",
        ),
        (
            {"search": {"values": {"train.beta": [1, 2]}, "methods": {"nope": {"train.beta": [1, 2]}}, **JUDGED}},
            "search.methods: expected one of dpo, repo, got nope",
        ),
        (
            {"overrides": {f"train.{name}": TEN for name in "abcdefgh"}},
            "expected at most 10,000 runs, got 200,000,000: every combination is one",
        ),
        (
            {"search": {"values": {f"train.{name}": TEN for name in "abcdefgh"}, **JUDGED}},
            "search: expected at most 10,000 runs, got 300,000,000: every combination is one",
        ),
    ],
)
def test_study_when_it_cannot_work_then_it_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, changes)


def test_variants_when_a_key_names_several_settings_then_these_vary_together_and_the_first_is_the_label(
    tmp_path: Path,
) -> None:
    together: dict[str, Any] = {"train.max_steps, train.learning_rate": [[48, 1e-4], [6, 3e-4]]}
    study = load(tmp_path, {"overrides": {**together, "train.beta": [1, 2]}, "seeds": {}})
    trains = [(cell.run.variant, cell.recipe.train.values_for("dpo")) for cell in study.cells if cell.recipe.train]
    assert [(name, *(train[key] for key in ("max_steps", "learning_rate", "beta"))) for name, train in trains] == [
        *[("train.max_steps=48, train.beta=1", 48, 1e-4, 1), ("train.max_steps=48, train.beta=2", 48, 1e-4, 2)],
        *[("train.max_steps=6, train.beta=1", 6, 3e-4, 1), ("train.max_steps=6, train.beta=2", 6, 3e-4, 2)],
    ]


@pytest.mark.parametrize("label", ["a/b", "../a", "a\x00b", "a b", "😀a", "-a", "con"])
def test_run_when_its_label_is_no_name_of_a_folder_then_its_folder_is_in_the_study(tmp_path: Path, label: str) -> None:
    study = load(tmp_path, {"models": {f"m{label}": {}}, "seeds": {}})
    (cell,) = study.cells
    assert cell.model == f"m{label}"
    assert cell.recipe.run_dir.parent == tmp_path / "out" / "runs" and "\0" not in cell.name


def test_values_when_their_labels_are_no_names_of_folders_then_their_folders_are_in_the_study(tmp_path: Path) -> None:
    labels = ("..", ".", "", "a/b", "../../a")
    study = load(tmp_path, {"overrides": {"train.beta": {label: 1 + n for n, label in enumerate(labels)}}, "seeds": {}})
    assert [cell.variant["train.beta"] for cell in study.cells] == list(labels)
    assert {cell.recipe.run_dir.parent for cell in study.cells} == {tmp_path / "out" / "runs"}
    assert len({cell.recipe.run_dir for cell in study.cells}) == len(labels)


def test_value_when_it_has_a_character_beyond_16_bits_then_the_run_has_it(tmp_path: Path) -> None:
    study = load(tmp_path, {"settings": {"sample.prompts.answer_column": "😀"}})
    assert all(cell.recipe.sample and cell.recipe.sample.prompts.answer_column == "😀" for cell in study.cells)


def test_problems_of_names_and_of_recipes_when_read_then_they_are_reported_together(tmp_path: Path) -> None:
    models = {"a": {"sample": {"n": 0}}, "..": {}}
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"models": models, "distance_to": "nope", "baseline": "other", "seeds": {}})
    starts = ["distance_to: expected", "baseline: expected", "sample.n: ", "..: expected at most"]
    assert [text[: len(start)] for text, start in zip(caught.value.problems, starts, strict=True)] == starts


def test_problems_of_several_runs_when_read_then_they_are_reported_together(tmp_path: Path) -> None:
    models = {"a": {"sample": {"n": 0}}, "b": {"train": {"learning_rate": -1}}}
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"models": models})
    (first, second) = caught.value.problems
    assert "sample.n" in first and first.endswith("(in a)")
    assert "learning_rate" in second and second.endswith("(in b)")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    assert run_study(load(folder), processes=2) == []
    return folder


def test_runs_when_done_then_each_is_that_of_the_recipe_alone_and_common_work_was_done_once(
    finished: Path, tmp_path: Path
) -> None:
    found = stages(finished)
    for name in ("world", "pretrain/behavior", "sample", "verify", "pair", "evaluate/base/arithmetic"):
        assert found.count(name) == 1, found
    for name in ("train/dpo", "train/repo", "evaluate/dpo/arithmetic", "report"):
        assert found.count(name) == 2, found
    cell = load(finished).cells[0]
    expected = contents(cell.recipe.run_dir)
    cell.recipe.run_dir.rename(tmp_path / "of the study")
    try:
        run_recipe(cell.recipe)
        assert differences(contents(cell.recipe.run_dir), expected) == []
    finally:
        shutil.rmtree(cell.recipe.run_dir)
        (tmp_path / "of the study").rename(cell.recipe.run_dir)


@pytest.mark.slow
def test_study_when_run_again_then_nothing_is_done_and_when_extended_only_what_is_new(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "study")
    folder = tmp_path / "study"
    before = made(folder)
    assert run_study(load(folder)) == []
    assert made(folder) == before
    assert (
        run_study(load(folder, {"methods": ["dpo", "repo", "ipo"], "seeds": {"training": [0, 1, 2]}}), processes=2)
        == []
    )
    after = made(folder)
    assert after.items() >= before.items()
    new = [json.loads(Path(path).read_text())["stage"] for path in after.keys() - before.keys()]
    trained = sorted(name for name in new if name.startswith("train/"))
    assert trained == ["train/dpo", "train/ipo", "train/ipo", "train/ipo", "train/repo"]
    assert not {"world", "sample", "pair", "evaluate/base/arithmetic"} & set(new)


def test_method_when_it_fails_then_the_others_are_done_and_the_run_is_put_together_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"settings": {"train.methods.repo.learning_rate": 1e30, "train.methods.repo.optim": "sgd"}}
    study = load(tmp_path, {**broken, "seeds": {}})
    (failure,) = run_study(study, processes=2)
    assert failure.job.name == "run: repo"
    assert "step" in failure.reason and "output.log" in failure.reason
    (cell,) = study.cells
    assert {path.name for path in (cell.recipe.run_dir / "train").iterdir() if path.suffix != ".cache"} == {"dpo"}
    assert (cell.recipe.run_dir / "report" / "report.html").is_file()
    options: dict[str, Any] = {"processes": 1, "smoke": False, "output_dir": None, "cluster": None}
    load(tmp_path, {**broken, "seeds": {}, "baseline": "repo"})
    with pytest.raises(RegretlessError, match=r"1 job\(s\) failed.*\n  - run: repo: "):
        verbs.study(tmp_path / "study.yaml", [], **options)
    assert "no table: " in capsys.readouterr().err
    load(tmp_path, {**broken, "seeds": {}})
    with pytest.raises(RegretlessError, match=r"1 job\(s\) failed"):
        verbs.study(tmp_path / "study.yaml", [], **options, figures=["svg"])
    assert list((tmp_path / "out" / "comparison" / "figures").glob("*.svg"))
    assert "run: repo" in (tmp_path / "out" / "comparison" / "comparison.html").read_text()
    assert run_study(load(tmp_path, {"seeds": {}})) == []
    assert {path.name for path in (cell.recipe.run_dir / "evaluate").iterdir()} >= {"base", "dpo", "repo"}


def test_figures_when_matplotlib_is_missing_then_a_study_is_refused_before_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"processes": 1, "smoke": False, "output_dir": None, "cluster": None}
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    load(tmp_path, {"figures": ["pdf"]})
    with pytest.raises(ConfigError, match="figures need matplotlib: pip install"):
        verbs.study(tmp_path / "study.yaml", [], **options)
    assert not (tmp_path / "out").exists()


def test_data_when_they_fail_then_no_method_is_tried_and_each_says_why(tmp_path: Path) -> None:
    study = load(tmp_path)
    first, second = (cell.recipe.run_dir for cell in study.cells)
    (first / "pair").mkdir(parents=True)
    (first / "pair" / "mine.txt").write_text("of somebody else")
    failures = run_study(study, processes=2)
    assert [failure.job.name for failure in failures] == [f"training-0: {kind}" for kind in ("data", "dpo", "repo")]
    assert "was not made by regretless" in failures[0].reason
    assert [failure.reason for failure in failures[1:]] == ["training-0: data failed"] * 2
    assert [cell.name for cell in finished_cells(study, failures)] == ["training-1"]
    assert (second / "report" / "report.html").is_file(), "a run with the same data makes the rest of them itself"


@pytest.mark.extended
def test_study_when_killed_ten_times_at_random_then_the_same_command_ends_as_undisturbed(tmp_path: Path) -> None:
    cells = load(tmp_path).cells
    out, draw = tmp_path / "out", random.Random(0)
    command = [sys.executable, "-m", "regretless", "study", str(tmp_path / "study.yaml"), "--processes", "2"]

    def finish() -> list[dict[str, Any]]:
        assert subprocess.run(command, check=False, capture_output=True).returncode == 0
        return [contents(cell.recipe.run_dir) for cell in cells]

    expected = finish()
    units = {path.parent: json.loads(path.read_bytes())["seconds"] for path in out.glob(f"runs/**/{MANIFEST}")}
    kills = 0
    while kills < 10:
        left = [unit for unit in units if not (unit / MANIFEST).is_file()]
        if not left:
            assert list(map(differences, expected, finish())) == [[] for _ in cells]
            shutil.rmtree(out)
            left = list(units)
        unit = draw.choice(left)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and not ((unit / "pending.json").is_file() or (unit / MANIFEST).is_file()):
            time.sleep(0.001)
        time.sleep(draw.random() * units[unit])
        if process.poll() is not None:
            continue  # it ended before it could be killed
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        _, alive = psutil.wait_procs(below, timeout=30)
        assert not alive
    assert list(map(differences, expected, finish())) == [[] for _ in cells]
    page = (tmp_path / "out" / "comparison" / "comparison.html").read_text()
    assert "over 2 training seeds" in page
    assert all(f"../runs/{cell.name}/report/report.html" in page for cell in cells)
