"""Parts that other packages add: used like this package's own, and refused with a reason when they cannot be used."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from regretless.cli.info import show_objectives
from regretless.core import plugins
from regretless.core.errors import ConfigError
from regretless.core.files import read_json, write_json
from regretless.objectives import OBJECTIVES, Objective
from regretless.runs.recipe import parse_recipe
from regretless.runs.stages import STAGES, Run
from regretless.training.train_config import TrainConfig
from regretless.workflow.run_folder import RunFolder
from regretless.workflow.stage_folder import MANIFEST, StageFolder

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.everyday
@pytest.mark.slow
def test_objective_of_a_plugin_when_trained_then_its_own_loss_is_taken(
    regretless: Command, model: Path, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"Tom has {n} apples.\n", "chosen": f"{n}+1={n + 1}", "rejected": f"{n}-1={n - 1}"}
        for n in range(1, 5)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = ["objective=exponential", "beta=0.5", "max_steps=1", "pairs_per_step=4", "lora=null"]
    done = regretless("train", "--pairs", pairs, "--model", model, "--output", tmp_path / "trained", *settings)
    assert done.returncode == 0, done.stderr
    manifest = read_json(tmp_path / "trained" / "manifest.json")
    # At the reference every margin is 0, so exp(0) is 1; DPO's loss would be log 2.
    assert manifest["summary"]["loss"] == pytest.approx(1.0, abs=1e-6)
    assert manifest["versions"]["regretless-example-plugin"].startswith("0.1.0 (code ")
    wrong = regretless("train", "--pairs", pairs, "--model", model, "--output", tmp_path / "no", "objective=exponental")
    assert wrong.returncode == 2 and "exponential" in wrong.stderr


@pytest.mark.parametrize("name", ["my_method.py", "my_method/losses/exponential.py"])
def test_plugin_when_its_code_changes_then_its_version_does_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The author of a part changes it many times before the version of its package.
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for text in ("beta = 1", "beta = 2", "beta = 1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        invalidate_caches()
        found.append(plugins._code_of.__wrapped__("my_method"))
    assert found[0] == found[2] != found[1]
    assert plugins._code_of("no_such_module") == "missing"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package with the objective `steep`, in the version that is given."""

    def install(version: str) -> None:
        info = tmp_path / "my_method-0.dist-info"
        info.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: my-method\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "entry_points.txt").write_text("[regretless.objectives]\nsteep = my_method:Steep\n", encoding="utf-8")
        (tmp_path / "my_method.py").write_text("", encoding="utf-8")
        invalidate_caches()
        plugins.offered.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    monkeypatch.undo()
    plugins.offered.cache_clear()


@pytest.mark.parametrize(
    "named",
    [
        {"objective": "steep"},
        {"objective": ["dpo", "steep"]},
        {"objectives": ("dpo", "steep")},
        {"objectives": {"steep": {}}},
        {"train": {"methods": {"steep": {"beta": 0.5}}}},
        {"objective": "weighted_sum", "values": {"terms": [{"objective": "dpo"}, {"objective": "steep", "weight": 2}]}},
    ],
)
def test_stage_when_a_plugin_changes_then_it_is_repeated_only_if_it_names_a_part_of_one(
    named: dict[str, Any], installed: Callable[[str], None]
) -> None:
    # Other texts and keys may contain the name.
    unrelated = {"values": {"lr_scheduler_type": "steepest", "steep_steps": 2}, "model": "{run}/steep/model"}

    def keys() -> list[str]:
        return [StageFolder.key_of("stage", settings, {}) for settings in (unrelated, named)]

    without = keys()
    installed("1.0")
    first = keys()
    installed("1.1")
    second = keys()
    assert without[0] == first[0] == second[0]
    assert len({without[1], first[1], second[1]}) == 3


def test_analysis_of_a_named_policy_when_a_plugin_trained_it_then_its_settings_name_that_part(
    installed: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("1.0")
    monkeypatch.setattr("regretless.modeling.training_folder.hyperparameter_names", lambda objective: ())
    for objective in ("dpo", "steep"):
        (tmp_path / f"of_{objective}").mkdir()
        write_json(tmp_path / f"of_{objective}" / MANIFEST, {"settings": {"objective": objective}})
    found = []
    for policies in ({"a": "of_dpo"}, {"a": "of_dpo", "b": "of_steep"}):
        settings = {"policies": {label: str(tmp_path / name) for label, name in policies.items()}}
        recipe = {"name": "x", "model": {"name_or_path": "m"}, "pairs": {"dataset": "p"}, "analyze": settings}
        run = Run.of(parse_recipe(recipe, "x"), RunFolder(tmp_path))
        ((unit,),) = STAGES["analyze"].units(run.recipe.analyze, run)
        found.append(unit.settings)
    assert "objectives_of_plugins" not in found[0]
    assert found[1]["objectives_of_plugins"] == {"b": "steep"}


@pytest.mark.slow
def test_verifier_of_a_plugin_when_named_then_it_decides(regretless: Command, tmp_path: Path) -> None:
    rows = [
        {"prompt": "Is 3 even or odd?", "response": response, "answer": "odd"}
        for response in ("It is Odd", "It is even", "")
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    output = tmp_path / "out.jsonl"
    done = regretless("verify", "--responses", tmp_path / "in.jsonl", "--output", output, "verifier=last_word")
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line)["verdict"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert verdicts == ["correct", "wrong", "wrong"]


@pytest.mark.slow
def test_benchmark_of_a_plugin_when_evaluated_then_its_problems_are_answered(
    regretless: Command, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "evaluated"
    done = regretless("evaluate", "--model", model, "--benchmark", "parity", "--output", output, "max_new_tokens=2")
    assert done.returncode == 0, done.stderr
    (row,) = read_json(output / "results.json")["rows"]
    assert (row["benchmark"], row["n"]) == ("parity", 12)


def __getattr__(name: str) -> Any:
    """`unannotated`: a class that cannot be made, as in a plug-in whose import fails."""
    if name == "unannotated":
        return type("Unannotated", (Objective,), {"beta": 0.1, "__module__": __name__})
    raise AttributeError(name)


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points that cannot be used."""
    points = {
        "dpo": [EntryPoint("dpo", "json:dumps", "regretless.objectives")],
        "twice": [EntryPoint("twice", value, "regretless.objectives") for value in ("json:dumps", "json:loads")],
        "absent": [EntryPoint("absent", "no_such_module:Thing", "regretless.objectives")],
        "function": [EntryPoint("function", "json:dumps", "regretless.objectives")],
        "unfinished": [EntryPoint("unfinished", "regretless.objectives:Objective", "regretless.objectives")],
        "unannotated": [EntryPoint("unannotated", f"{__name__}:unannotated", "regretless.objectives")],
        "misnamed": [EntryPoint("misnamed", "regretless.objectives.dpo:DPO", "regretless.objectives")],
    }
    monkeypatch.setattr(plugins, "offered", lambda kind: points if kind == "objectives" else {})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dpo", "'dpo' is defined by regretless itself and by an installed package"),
        ("twice", "defined by an installed package and by an installed package"),
        ("absent", "cannot be imported: ModuleNotFoundError"),
        ("function", "expected a subclass of regretless.objectives.Objective"),
        ("unfinished", "it has no compute; define it"),
        ("unannotated", r"non-annotated attribute was detected: `beta = 0\.1`\.[^\n]*; fix or uninstall that package$"),
        ("misnamed", "its `name` is 'dpo'"),
        ("nowhere", "expected one of repo, repo_det, .*, weighted_sum, twice"),
    ],
)
@pytest.mark.usefixtures("offer")
def test_part_that_cannot_be_used_when_looked_up_then_the_reason_is_given(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        OBJECTIVES.find(name)


@pytest.mark.usefixtures("offer")
def test_unusable_parts_when_installed_then_the_others_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert "absent" in OBJECTIVES and "nowhere" not in OBJECTIVES
    # `eta` is RPO's: IPO is trained without it, which asks every objective for its hyperparameters.
    config = TrainConfig.parse({"objective": ["ipo", "rpo"], "eta": 0.1}, "train")
    assert config.split_for("ipo") == ({}, {})
    show_objectives()
    shown = capsys.readouterr().out
    assert "tdpo" in shown and "no_such_module" in shown
