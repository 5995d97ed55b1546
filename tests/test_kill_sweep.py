"""The kill sweep finds a stage that a kill spoils, and nothing where there is none."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kill_sweep import RECIPE, ROUNDS, stage_of, sweep
from regretless.core.files import write_json
from regretless.runs.recipe import load_recipe
from regretless.runs.stages import STAGES
from run_contents import contents, differences


def lines_one_by_one(append: bool) -> None:
    """Put a slow stage of rows in the place of the world's: each row is written as it comes, as no stage should."""
    from regretless.world import world as stage

    def run(config: Any, output: Path) -> dict[str, Any]:
        with (output / "prompts.jsonl").open("a" if append else "w") as handle:
            for number in range(40):
                time.sleep(0.01)
                handle.write(f"{number}\n")
                handle.flush()
        return {"rows": 40}

    stage.run = run  # type: ignore[assignment]


def appends() -> None:
    """The fault: what a killed process wrote is kept, and written again."""
    lines_one_by_one(append=True)


def writes_anew() -> None:
    """No fault: the file of a killed process is written over."""
    lines_one_by_one(append=False)


def small(folder: Path) -> Path:
    """A recipe of one stage."""
    recipe = {"name": "x", "world": {"prompts": 4, "test": 4, "policies": {"p": {"demonstrations": 4}}}}
    write_json(folder / "recipe.yaml", recipe)  # JSON is YAML
    return folder / "recipe.yaml"


@pytest.mark.slow
def test_sweep_when_a_stage_does_not_survive_kills_then_it_says_so_and_else_all_is_equal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not sweep(small(tmp_path), tmp_path, kills=4, seed=0, prepare=appends)
    said = capfd.readouterr().out
    assert "DIFFERENT" in said and "differs: world/prompts.jsonl: " in said
    assert sweep(small(tmp_path), tmp_path, kills=2, seed=0, prepare=writes_anew)
    assert "0 trials did not end as the undisturbed run" in capfd.readouterr().out


def test_sweeps_recipes_when_read_then_they_ask_for_every_stage_but_the_import_of_pairs() -> None:
    recipes = [load_recipe(file, []) for file in (RECIPE, ROUNDS)]
    absent = [{name for name in STAGES if getattr(recipe, name) in (None, {})} for recipe in recipes]
    assert absent[0] == {"pairs", "rounds"} and "rounds" not in absent[1]


@pytest.mark.parametrize(
    ("unit", "stage"),
    [
        ("evaluate/samples/base/arithmetic/greedy", "evaluate: sampling"),
        ("rounds/1/train/dpo", "round 1: train"),
        ("rounds/2/prompts", "round 2: prompts"),
        ("rounds/2/dpo/train/dpo", "round 2: train"),
        ("rounds/3/dpo/writer", "round 3: writer"),
    ],
)
def test_stage_when_a_unit_is_of_a_round_then_it_says_which(unit: str, stage: str) -> None:
    assert stage_of(unit) == stage


def test_contents_when_two_folders_differ_then_only_times_costs_and_codes_are_passed_over(tmp_path: Path) -> None:
    manifest = {
        "key": "k",
        "summary": {"rows": 3, "requests": 4, "loss": float("nan")},
        "seconds": 1.5,
        "finished": "x",
    }
    log = {"global_step": 2, "log_history": [{"loss": 0.5, "step": 2, "tokens_per_second": 9.0}]}

    def folder(name: str, rows: int, requests: int, seconds: float, loss: float) -> dict[str, Any]:
        home = tmp_path / name
        (home / "train").mkdir(parents=True)
        summary = {**manifest["summary"], "rows": rows, "requests": requests}
        (home / "train" / "manifest.json").write_text(json.dumps({**manifest, "summary": summary, "seconds": seconds}))
        lines = [{**log["log_history"][0], "loss": loss, "tokens_per_second": seconds}]
        (home / "train" / "trainer_state.json").write_text(json.dumps({**log, "log_history": lines}))
        (home / "train" / "rows.bin").write_bytes(bytes(rows))
        return contents(home)

    one = folder("one", 3, 4, 1.5, 0.5)
    assert not differences(one, folder("two", 3, 6, 2.5, 0.5))
    found = differences(one, folder("three", 4, 4, 1.5, 0.25))
    assert found == [
        "differs: train/manifest.json: summary: rows: 3, now 4",
        "differs: train/rows.bin: 3 bytes, now 4",
        "differs: train/trainer_state.json: log_history: 0: loss: 0.5, now 0.25",
    ]
    assert differences(one, {}) == [f"missing: {name}" for name in sorted(one)]
