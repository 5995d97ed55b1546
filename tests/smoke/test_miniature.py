"""Smoke runs: whatever a recipe asks for, nothing leaves the machine."""

from __future__ import annotations

from pathlib import Path

from regretless.runs.recipe import load_recipe
from regretless.smoke.miniature import smoke_recipe

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


def test_smoke_run_when_the_recipe_uploads_and_tracks_then_no_training_of_it_does() -> None:
    upload = ("push_to_hub=true", "report_to=all", "log_completions_steps=1")
    places = ("train", "train.methods.dpo", "pretrain.base")
    recipe = load_recipe(QUICKSTART, [f"{place}.{text}" for place in places for text in upload])
    small = smoke_recipe(recipe)
    assert recipe.train is not None and small.train is not None
    assert recipe.train.split_for("dpo")[1]["push_to_hub"] is True
    trainings = [(small.train, name) for name in small.train.objectives]
    trainings += [(section, section.objectives[0]) for section in small.pretrain.values()]
    assert len(trainings) > 4
    for section, method in trainings:
        arguments = section.split_for(method)[1]
        wanted = {"push_to_hub": False, "report_to": "none", "log_completions_steps": None}
        assert {name: arguments[name] for name in wanted} == wanted, method


def test_smoke_run_when_the_recipe_needs_a_gpu_then_no_training_of_it_does() -> None:
    checkpointing = ("gradient_checkpointing=true", "gradient_checkpointing_kwargs={offload: true}")
    needs = (*checkpointing, "use_liger_kernel=true", "compile_layers=true", "bf16=true")
    small = smoke_recipe(load_recipe(QUICKSTART, [f"train.{text}" for text in needs]))
    assert small.train is not None
    arguments = small.train.split_for("dpo")[1]
    assert "gradient_checkpointing_kwargs" not in arguments and arguments["gradient_checkpointing"] is True
    assert not any(arguments[name] for name in ("use_liger_kernel", "compile_layers", "bf16"))


def test_smoke_run_when_processes_share_rows_then_it_trains_in_one() -> None:
    recipe = load_recipe(QUICKSTART, ["train.processes=4", "train.methods.dpo.sequence_parallel_size=2"])
    assert recipe.train.division_problems("dpo", 4) == []
    small = smoke_recipe(recipe).train
    assert small.process_count("dpo") == 1 and small.division_problems("dpo", 1) == []
