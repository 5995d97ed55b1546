"""Whether results in a run folder are those of its recipe.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from regretless.core.files import write_text
from regretless.runs import stage_record
from regretless.workflow.run_folder import RECIPE
from regretless.workflow.stage_folder import MANIFEST

STAGES = ("sample", "train", "evaluate", "analyze", "report")


def run(folder: Path, recipe: str, *stages: str, ran: bool = False) -> None:
    """A run of these stages with these settings, as the pipeline notes it; the last one's name may say `killed`."""
    stage_record.begin(folder, recipe, STAGES)
    write_text(folder / RECIPE, recipe)
    for stage in stages:
        if stage == "killed":
            return
        write_text(folder / stage / MANIFEST, "{}")
        stage_record.end(folder, stage, STAGES, ran=ran)


def others(folder: Path) -> list[str]:
    return stage_record.of_other_settings(folder)


def test_stages_when_a_run_is_partial_then_what_it_did_not_do_is_of_other_settings_until_it_is_done(
    tmp_path: Path,
) -> None:
    run(tmp_path, "seed: 0", *STAGES)
    assert others(tmp_path) == []
    run(tmp_path, "seed: 1", "sample")
    assert others(tmp_path) == ["train", "evaluate", "analyze"]
    run(tmp_path, "seed: 1", "evaluate", "analyze")
    assert others(tmp_path) == ["train"]
    run(tmp_path, "seed: 1", "train")
    assert others(tmp_path) == ["evaluate", "analyze"], "they were done on the models of the earlier training"
    run(tmp_path, "seed: 1", *STAGES)
    assert others(tmp_path) == []
    run(tmp_path, "seed: 0", "killed")
    assert others(tmp_path) == ["sample", "train", "evaluate", "analyze"]


def test_stages_when_done_one_by_one_or_again_with_the_same_settings_then_they_are_of_the_recipe(
    tmp_path: Path,
) -> None:
    for stage in STAGES:
        run(tmp_path, "lr: 1e-5\nname: 1e-5", stage)
    run(tmp_path, "name: other\nlr: 0.00001", "sample", "killed")
    assert others(tmp_path) == []
    run(tmp_path, "name: other\nlr: 1e-5", "train", ran=True)
    assert others(tmp_path) == ["evaluate", "analyze"], "an input has changed"


@pytest.mark.parametrize("again", ["seed: 0", "seed: 1"])
def test_run_of_an_earlier_version_when_it_goes_on_then_only_other_settings_count(tmp_path: Path, again: str) -> None:
    write_text(tmp_path / RECIPE, "seed: 0")
    for stage in STAGES:
        write_text(tmp_path / stage / MANIFEST, "{}")
    assert others(tmp_path) == []
    run(tmp_path, again, "report")
    assert others(tmp_path) == ([] if again == "seed: 0" else ["sample", "train", "evaluate", "analyze"])


def test_recipe_when_a_kill_left_an_earlier_one_beside_a_new_record_then_nothing_counts_as_its_own(
    tmp_path: Path,
) -> None:
    recipe = "sample: {}\ntrain: {}\nevaluate: {}"
    run(tmp_path, recipe, *STAGES)
    stage_record.begin(tmp_path, f"{recipe}\nseed: 1", STAGES)
    assert others(tmp_path) == ["sample", "train", "evaluate"]
