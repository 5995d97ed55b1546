"""The interface of stages: light to import, in the recipe's order, and enough for a stage that is made of stages."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from regretless.core.files import write_text
from regretless.core.settings import Section, dump
from regretless.runs import pipeline
from regretless.runs.planning.dry_run import State, dry_run
from regretless.runs.recipe import Recipe
from regretless.runs.stages import STAGES, Listing, Run, Session, Stage
from regretless.workflow.run_folder import RUN, RunFolder, Unit
from regretless.workflow.workers import Need
from run_contents import contents, differences


def test_stages_when_imported_then_no_heavy_package_comes_along() -> None:
    heavy = {"torch", "transformers", "peft", "pyarrow"}
    code = f"import sys, regretless.runs.stages; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_stages_when_listed_then_each_is_a_section_of_recipes_in_their_order() -> None:
    sections = [name for name in Recipe.model_fields if name in STAGES]
    assert sections == list(STAGES) and all(name == stage.name for name, stage in STAGES.items())


class ToyConfig(Section):
    """Rounds that add a model's weight until the sum reaches a goal; afterwards the same for `inner` in a sub-run."""

    methods: list[str]
    """Names of the sums."""
    goal: int
    """The sum at which the rounds of a method end."""
    inner: list[str] = Field(default=[])
    """Methods of the sub-run."""


class ToyRecipe(Recipe):
    """A recipe with the toy stage."""

    toy: ToyConfig | None = None
    """The toy stage."""


class Toy(Stage[ToyConfig]):
    """Two units in each round, whose number is known only when they run; a model that stays loaded; a sub-run."""

    name = "toy"

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.events: list[str] = []
        self.loads = 0

    def event(self, kind: str) -> None:
        """One more moment at which the process can be killed."""
        if len(self.events) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.events.append(kind)

    def units(self, config: ToyConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """The rounds of each method, then those of the sub-run."""
        for method in config.methods:
            before: dict[str, Path] = {}
            for number in count():
                folder = f"toy/{method}/{number}"
                fields: dict[str, Any] = {"inputs": before, "need": Need("toy")}
                yield [
                    run.unit(self, f"{folder}/{half}", {"half": half, "of": RUN}, {"before": before}, **fields)
                    for half in ("a", "b")
                ]
                if run.awaits(folder):
                    break
                self.event("group")
                before = {half: run.path(folder, half, "sum") for half in ("a", "b")}
                if sum(int(path.read_text()) for path in before.values()) >= config.goal:
                    break
        if config.inner:
            inner = ToyRecipe(name="inner", toy=ToyConfig(methods=config.inner, goal=config.goal))
            yield from run.sub("toy/inner", inner).units()

    def run(self, units: Sequence[Unit], places: Sequence[Path], session: Session) -> list[dict[str, Any]]:
        """Add the model's weight to both halves."""
        weight = session.get("model", self.load)
        done = []
        for unit, place in zip(units, places, strict=True):
            before = unit.task["before"].get(unit.settings["half"])
            write_text(place / "sum", str(weight + (0 if before is None else int(before.read_text()))))
            self.event("unit")
            done.append({"sum": int((place / "sum").read_text())})
        return done

    def load(self) -> int:
        """The weight."""
        self.loads += 1
        return 3

    def after(self, config: ToyConfig, run: Run) -> None:
        """Write the number of rounds of every method."""
        self.event("after")
        rounds = [len(list(run.path("toy", method).iterdir())) for method in config.methods]
        write_text(run.path("toy", "rounds"), f"{rounds}")
        self.event("after")


def test_unit_when_its_settings_name_the_run_folder_then_only_the_work_has_its_path(tmp_path: Path) -> None:
    config = ToyConfig(methods=[f"{RUN}/a"], goal=1)
    run = Run.of(ToyRecipe(name="moved", toy=config), RunFolder(tmp_path)).sub("inner", ToyRecipe(name="inner"))
    unit = run.unit(Toy(), "toy", dump(config), {"config": config, "number": 1})
    assert unit.name == "inner/toy" and unit.settings["methods"] == [f"{RUN}/a"]
    assert unit.task == {"config": ToyConfig(methods=[f"{tmp_path}/a"], goal=1), "number": 1}


def recipe_in(folder: Path) -> ToyRecipe:
    toy = ToyConfig(methods=["one", "two"], goal=10, inner=["three"])
    return ToyRecipe(name="toys", output_dir=str(folder), toy=toy)


def run_toy(folder: Path, kill_at: int | None = None) -> Toy:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STAGES, "toy", toy := Toy(kill_at))
        pipeline.run_recipe(recipe_in(folder))
    return toy


def test_stage_made_of_stages_when_killed_anywhere_then_the_same_command_ends_with_the_same_bytes(
    tmp_path: Path,
) -> None:
    undisturbed = run_toy(tmp_path / "run")
    expected = contents(tmp_path / "run")
    # Sums of both halves: 6, then 12, which is above 10.
    assert expected["toy/rounds"] == b"[2, 2]" and expected["toy/inner/toy/rounds"] == b"[2]"
    assert expected["toy/inner/toy/three/1/b/sum"] == b"6"
    assert undisturbed.loads == 1, "the sub-run uses the model that is loaded"
    assert undisturbed.events == ["unit", "unit", "group"] * 6 + ["after"] * 4

    again = run_toy(tmp_path / "run")
    assert again.loads == 0 and "unit" not in again.events
    assert differences(expected, contents(tmp_path / "run")) == []

    shutil.rmtree(tmp_path / "run/toy/two/1/b")
    assert run_toy(tmp_path / "run").events.count("unit") == 1, "what is done of a group stays"
    assert differences(expected, contents(tmp_path / "run")) == []

    context = multiprocessing.get_context("fork")
    for number, kind in enumerate(undisturbed.events):
        (tmp_path / "run").rename(tmp_path / f"before-{number}")
        child = context.Process(target=run_toy, args=(tmp_path / "run", number))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert differences(expected, contents(tmp_path / "run")) != [] or kind == "after"
        run_toy(tmp_path / "run")
        assert differences(expected, contents(tmp_path / "run")) == [], f"killed at {kind} {number}"


def test_stage_made_of_stages_when_planned_then_units_are_those_known_before_it_runs_and_all_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned() -> dict[str, State]:
        return {name: unit.state for name, unit in dry_run(recipe_in(tmp_path / "run")).units.items()}

    monkeypatch.setitem(STAGES, "toy", Toy())
    first = [f"toy/{method}/0/{half}" for method in ("one", "two", "inner/toy/three") for half in ("a", "b")]
    assert planned() == dict.fromkeys(first, State.RUN)
    roots = [unit.unit.settings["of"] for unit in dry_run(recipe_in(tmp_path / "run")).units.values()]
    assert roots == ["{run}"] * 6
    listing = Listing(recipe_in(tmp_path / "run"), tmp_path / "run", "toy")
    assert [unit.name for units in listing.groups for unit in units] == first and not listing.done("toy")

    toy = run_toy(tmp_path / "run")
    monkeypatch.setitem(STAGES, "toy", toy)
    everything = planned()
    assert len(everything) == 12 and set(everything.values()) == {State.DONE}
    toy.events.clear()
    assert Listing(recipe_in(tmp_path / "run"), tmp_path / "run", "toy").done("toy")
    assert "after" not in toy.events, "a listing writes nothing"


def test_session_when_closed_then_blocks_that_it_keeps_are_left_and_made_anew_the_next_time() -> None:
    told: list[str] = []

    class Block:
        def __enter__(self) -> str:
            told.append("entered")
            return "model"

        def __exit__(self, *error: object) -> None:
            told.append("left")

    with Session() as session:
        assert session.get("model", Block) == session.get("model", Block) == "model"
        session.close()
        assert session.get("model", Block) == "model"
    assert told == ["entered", "left"] * 2
