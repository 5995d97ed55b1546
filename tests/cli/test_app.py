"""The command line: every bad row is named, nothing is lost, and a failure is one message and an exit code."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file

from regretless import PreferenceConfig, PreferenceTrainer
from regretless.cli.app import app, main
from regretless.cli.declared import settings_of_stage
from regretless.cli.output import only_results
from regretless.cli.request import OF_PAIRS
from regretless.core.files import read_json, write_jsonl
from regretless.data.rows import read_rows
from regretless.objectives import OBJECTIVES
from regretless.sampling.engines import ENGINES

HEAVY = ("torch", "transformers", "pyarrow", "datasets", "peft", "numpy", "sympy")
STAGES = ("world", "sample", "verify", "pair", "mask", "inspect", "train", "evaluate", "analyze", "report")
VERBS = ("run", "quickstart", "recipes", *STAGES, "watch", "compare", "objectives", "doctor")
PROMPT = "Tom has 7 apples. Tom buys 2. How many?\n"
GOOD = {"prompt": PROMPT, "chosen": "7+2=9\n\\boxed{9}", "rejected": "7-2=5\n\\boxed{5}"}
LABELED = {
    "chosen_token_ids": [10, 13, 5, 17, 12, 18, 19, 12, 20, 1],
    "chosen_logps": [-0.1] * 10,
    "rejected_token_ids": [10, 14, 5, 17, 8, 18, 19, 8, 20, 1],
    "rejected_logps": [-0.2] * 10,
}
"""Token ids and log-probabilities as the world's tokenizer would have them; the reader checks lengths and values."""


def regretless(*arguments: object) -> int:
    """Exit code of a command."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(path) if isinstance(row, dict)]


BAD_PAIRS: dict[str, tuple[str, str]] = {
    "empty completion": (json.dumps({**GOOD, "chosen": ""}), "empty"),
    "log-probabilities of another length": (
        json.dumps({**GOOD, **LABELED, "chosen_logps": [-0.1] * 9}),
        "9 values for 10 tokens",
    ),
    "NaN": (json.dumps({**GOOD, **LABELED, "rejected_logps": [math.nan] + [-0.2] * 9}), "value 0 is nan"),
    "positive": (json.dumps({**GOOD, **LABELED, "chosen_logps": [-0.1] * 9 + [0.5]}), "value 9 is 0.5, above 0"),
    "prompt longer than the limit": (json.dumps({**GOOD, "prompt": PROMPT * 5}), "max_prompt_length"),
    "chosen = rejected": (json.dumps({**GOOD, "rejected": GOOD["chosen"]}), "equal"),
    "missing column": (json.dumps({"prompt": PROMPT, "chosen": "9"}), "rejected"),
    "broken line": ('{"prompt": "' + PROMPT.strip(), "not valid JSON"),
    "masked side without a cut": (json.dumps({**GOOD, "kind": "masked", "rejected_complete": True}), "cut by defin"),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_bad_pair_among_good_ones_when_inspected_then_it_is_named_and_kept_and_the_rest_goes_on(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, reason = BAD_PAIRS[case]
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
    command = ("inspect", "--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "out")
    assert regretless(*command, "sample=0", "max_prompt_length=40") == 0
    said = [text for text in capsys.readouterr().err.splitlines() if f"{tmp_path / 'pairs.jsonl'}:2: " in text]
    assert len(said) == 1 and reason in said[0], said
    refused = rows_of(tmp_path / "out" / "refused.jsonl")
    assert [(row["line"], reason in row["reason"]) for row in refused] == [(2, True)]
    assert read_json(tmp_path / "out" / "inspect.json")["data"]["pairs"] == 1


LONG = {**GOOD, "rejected": "7+2=9\n" * 500}


def test_pair_when_too_long_for_training_then_inspect_rejects_it_too(model: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [GOOD, LONG])
    command = ("inspect", "--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "out")
    assert regretless(*command, "sample=0") == 0
    assert read_json(tmp_path / "out" / "inspect.json")["data"]["pairs"] == 1
    (refused,) = rows_of(tmp_path / "out" / "refused.jsonl")
    assert f"for max_length {PreferenceConfig.max_length}; " in refused["reason"]
    assert regretless(*command, "sample=0", "max_length=null") == 0
    assert read_json(tmp_path / "out" / "inspect.json")["data"]["pairs"] == 2


def test_inspect_in_a_recipe_when_training_limits_lengths_then_these_hold_for_what_it_does_not_set(
    model: Path, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [GOOD, LONG])
    recipe = {
        "name": "lengths",
        "output_dir": str(tmp_path / "run"),
        "pairs": {"dataset": str(tmp_path / "pairs.jsonl")},
        "model": {"name_or_path": str(model)},
        "inspect": {"sample": 0},
        "train": {"objective": ["dpo", "ipo"]},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))

    def used(*overrides: str) -> int:
        assert regretless("run", tmp_path / "recipe.yaml", "--until", "inspect", *overrides) == 0
        return int(read_json(tmp_path / "run" / "inspect" / "inspect.json")["data"]["pairs"])

    assert used() == 1
    assert used("train.max_length=4000") == 2
    assert used("train.methods.dpo.max_length=4000") == 2
    assert used("train.methods.ipo.max_length=4000") == 1
    assert used("train.truncation=keep_start", "train.methods.dpo.max_prompt_length=60") == 2
    assert used("train.max_length=4000", "inspect.max_length=100") == 1
    assert used("train.max_length=100", "inspect.max_length=null") == 2


@pytest.mark.parametrize(
    ("verb", "kept_in"), [("inspect", "refused.jsonl"), ("train", "../out.cache/refused-pairs.jsonl")]
)
def test_bad_pairs_alone_when_read_then_each_is_named_and_the_command_fails(
    verb: str, kept_in: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text("".join(f"{line}\n" for line, _ in BAD_PAIRS.values()))
    command = (verb, "--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "out")
    settings = {"inspect": ("sample=0",), "train": ("objective=dpo", "lora=null", "bf16=false")}[verb]
    assert regretless(*command, "max_prompt_length=40", *settings) == 3
    said = capsys.readouterr().err
    for number, (_, reason) in enumerate(BAD_PAIRS.values(), 1):
        assert any(f"pairs.jsonl:{number}: " in text and reason in text for text in said.splitlines()), (number, said)
    assert "no usable row is left (9 skipped)" in said and "Traceback" not in said
    assert sorted(row["line"] for row in rows_of(tmp_path / "out" / kept_in)) == list(range(1, 10))


def response(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "response": text, "answer": "9", **columns}


def test_bad_responses_when_verified_then_they_are_named_and_other_columns_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [response("\\boxed{9}", mine=1), {"prompt": PROMPT, "response": "9"}, response("\\boxed{8}", mine=2)]
    write_jsonl(tmp_path / "in.jsonl", rows)
    assert regretless("verify", "--responses", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl") == 0
    assert f"{tmp_path / 'in.jsonl'}:2: missing column(s) answer" in capsys.readouterr().err
    assert [(row["mine"], row["verdict"]) for row in rows_of(tmp_path / "out.jsonl")] == [(1, "correct"), (2, "wrong")]
    assert [row["line"] for row in rows_of(tmp_path / "out.refused.jsonl")] == [2]
    write_jsonl(tmp_path / "in.jsonl", rows[1:2])
    assert regretless("verify", "--responses", tmp_path / "in.jsonl", "--output", tmp_path / "none.jsonl") == 3
    assert not (tmp_path / "none.jsonl").exists()


def test_bad_responses_when_paired_then_they_are_named_and_refused_beside_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        response("\\boxed{9}", verdict="correct"),
        response("\\boxed{8}", verdict="wrong"),
        response("", verdict="wrong"),
        response("\\boxed{7", verdict="wrong", finish_reason="length"),
        response("\\boxed{6}", verdict="wrong", token_ids=[1, 2], logps=[-1.0]),
        response("\\boxed{5}", verdict="maybe"),
    ]
    write_jsonl(tmp_path / "in.jsonl", rows)
    assert regretless("pair", "--responses", tmp_path / "in.jsonl", "--output", tmp_path / "pairs.jsonl") == 0
    said = capsys.readouterr().err
    for line, reason in ((3, "empty"), (4, "end-of-sequence"), (5, "1 values for 2 tokens"), (6, "verdict")):
        assert any(f"in.jsonl:{line}: " in text and reason in text for text in said.splitlines()), (line, said)
    assert [row["rejected"] for row in rows_of(tmp_path / "pairs.jsonl")] == ["\\boxed{8}"]
    assert sorted(row["line"] for row in rows_of(tmp_path / "pairs.refused.jsonl")) == [3, 4, 5, 6]
    assert not list(tmp_path.glob(".*.work"))
    write_jsonl(tmp_path / "in.jsonl", rows[2:])
    assert regretless("pair", "--responses", tmp_path / "in.jsonl", "--output", tmp_path / "none.jsonl") == 3
    assert sorted(row["line"] for row in rows_of(tmp_path / "none.refused.jsonl")) == [1, 2, 3, 4]


def test_pairs_without_log_probabilities_when_trained_with_repo_then_it_says_what_to_do(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [GOOD])
    command = ("train", "--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "out")
    assert regretless(*command, "objective=repo") == 3
    said = capsys.readouterr().err
    assert "log-probabilities" in said and "repo_det" in said and "Traceback" not in said


def test_model_when_trained_evaluated_and_analyzed_by_verbs_then_files_are_there_and_a_repeat_does_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [GOOD, {**GOOD, "prompt": PROMPT.replace("Tom", "Eva")}])
    write_jsonl(tmp_path / "test.jsonl", [{"prompt": PROMPT, "answer": "9"}])
    train = ("train", "--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "dpo")
    settings = ("objective=dpo", "beta=0.2", "max_steps=2", "lora.r=4", "model.dtype=float32")
    assert regretless(*train, *settings) == 0
    assert (tmp_path / "dpo" / "adapter_model.safetensors").is_file()
    assert read_json(tmp_path / "dpo" / "manifest.json")["settings"]["values"]["beta"] == 0.2
    capsys.readouterr()
    assert regretless(*train, *settings) == 0
    assert "train: unchanged, skipped" in capsys.readouterr().err

    tested = ("--benchmark", f"easy={tmp_path / 'test.jsonl'}", "--output", tmp_path / "eval")
    assert regretless("evaluate", "--model", model, "--adapter", tmp_path / "dpo", *tested, "max_new_tokens=4") == 0
    assert [row["n"] for row in read_json(tmp_path / "eval" / "results.json")["rows"]] == [1]

    analyzed = ("--policy", f"dpo={tmp_path / 'dpo'}", "--output", tmp_path / "tokens")
    assert regretless("analyze", "--pairs", tmp_path / "pairs.jsonl", "--model", model, *analyzed, "pairs=1") == 0
    for name in ("token_rewards", "drift", "gradients"):  # the method is known from the folder's manifest
        assert list(read_json(tmp_path / "tokens" / f"{name}.json")["policies"]) == ["dpo"]
    assert [row["first"] for row in read_json(tmp_path / "tokens" / "score_distance.json")["models"]] == ["base"]


def test_training_when_started_in_python_and_as_a_command_then_both_give_the_same_weights_by_default(
    model: Path, tmp_path: Path
) -> None:
    names = ("Eva", "Ann", "Bob", "Kim", "Sue", "Max", "Leo", "Mia", "Zoe", "Ben")
    write_jsonl(tmp_path / "pairs.jsonl", [{**GOOD, "prompt": PROMPT.replace("Tom", name)} for name in names])
    given = ("--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "command")
    assert regretless("train", *given, "objective=dpo", "num_train_epochs=1") == 0
    args = PreferenceConfig(str(tmp_path / "python"), objective="dpo", num_train_epochs=1)
    trainer = PreferenceTrainer(str(model), args=args, train_dataset=str(tmp_path / "pairs.jsonl"))
    trainer.train()
    trainer.save_model()
    command, python = (load_file(tmp_path / folder / "model.safetensors") for folder in ("command", "python"))
    before = load_file(model / "model.safetensors")
    assert command.keys() == python.keys() and all(command[name].equal(python[name]) for name in command)
    assert not any(command[name].equal(before[name]) for name in command)  # all weights are trained, in both
    assert trainer.state.global_step == 2


def test_objective_when_it_is_the_command_then_it_is_trained(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [GOOD])
    given = ("--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "out")
    assert regretless("ipo", *given, "reduction=mean", "max_steps=1", "save_strategy=no") == 0
    settings = read_json(tmp_path / "out" / "manifest.json")["settings"]
    assert (settings["objective"], settings["values"]["reduction"]) == ("ipo", "mean")
    assert regretless("train", *given, "objective=ipo", "reduction=mean", "max_steps=1", "save_strategy=no") == 0
    assert "train: unchanged, skipped" in capsys.readouterr().err
    assert regretless("ipo", *given, "objective=dpo") == 2
    assert "objective=dpo: `regretless ipo` trains ipo; use `regretless train`" in capsys.readouterr().err
    assert regretless("ipo", *given[:2]) == 2
    assert "regretless ipo" in capsys.readouterr().err
    assert regretless("ipo", "--help") == 0
    assert "\n  objective  " not in (page := capsys.readouterr().out) and "\n  beta  " in page
    assert regretless("dop") == 2 and "No such command 'dop'" in capsys.readouterr().err


def test_help_when_objectives_have_short_forms_then_it_names_them_without_listing_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert regretless("--help") == 0
    page = capsys.readouterr().out
    assert "regretless train objective=dpo" in " ".join(page.split()) and "repo_det" not in page
    for name in OBJECTIVES:
        assert app_command().get_command(None, name).name == name
    assert app_command().get_command(None, "nothing") is None
    assert regretless("kto", "--help") == 0
    page = capsys.readouterr().out
    assert "regretless train objective=kto" in " ".join(page.split()) and "pairs_per_step" in page
    assert regretless("simpo", "--help") == 0
    page = capsys.readouterr().out
    assert "gamma  number ≥ 0; default: 0.5" in page and "importance  " in page and "omega" not in page


def app_command() -> Any:
    """The command line as its library sees it."""
    return typer.main.get_command(app)


def test_output_folder_with_the_users_files_when_named_then_nothing_in_it_is_touched(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [GOOD])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    command = ("train", "--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "mine")
    assert regretless(*command, "objective=dpo") == 2
    assert "not made by regretless" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_missing_flags_and_bad_settings_when_given_then_all_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert regretless("train", "objective=dpo") == 2
    said = capsys.readouterr().err
    assert all(flag in said for flag in ("--pairs: required", "--model: required", "--output: required"))
    given = ("--pairs", "p.jsonl", "--model", "m", "--output", tmp_path / "out")
    assert regretless("train", *given, "objective=dpo", "bta=0.1", "learnin_rate=1") == 2
    said = capsys.readouterr().err
    assert "did you mean beta" in said and "did you mean learning_rate" in said and "Traceback" not in said


def test_single_stage_of_a_recipe_when_run_by_its_verb_then_it_works_in_the_run_folder(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    world = {"prompts": 3, "test": 2, "policies": {"a": {"demonstrations": 2}}}
    recipe.write_text(json.dumps({"name": "x", "output_dir": str(tmp_path / "run"), "world": world}))
    assert regretless("world", "--config", recipe, "prompts=4") == 0
    assert len(rows_of(tmp_path / "run" / "world" / "prompts.jsonl")) == 4


def test_recipes_when_listed_and_copied_then_names_stand_in_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert regretless("recipes", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in rows} == {"recipes", "studies", "examples"}
    assert regretless("recipes") == 0
    listed = capsys.readouterr().out
    assert all(row["name"] in listed for row in rows)
    assert regretless("recipes", "--copy", "math/qwen3-1.7b", "--output", "mine") == 0
    assert {path.relative_to("mine").as_posix() for path in Path("mine").rglob("*.yaml")} == {
        "recipes/math/qwen3-1.7b.yaml",
        "recipes/base/math.yaml",
    }
    started: list[tuple[Path, bool]] = []
    monkeypatch.setattr(
        "regretless.cli.verbs.run", lambda path, overrides, *, smoke, **_: started.append((path, smoke))
    )
    assert regretless("quickstart", "--smoke") == 0
    assert started == [(Path("quickstart"), True)]


@pytest.mark.parametrize("verb", VERBS)
def test_verb_when_asked_for_help_then_it_gives_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert regretless(verb, "--help") == 0
    assert "Usage:" in capsys.readouterr().out


def test_tables_when_printed_then_they_name_every_objective_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert regretless("objectives") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("repo", "repo_det", "tdpo", "beta"))
    assert regretless("objectives", "simpo", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["objectives"]
    assert listed.keys() == {"simpo", "(all)"}
    assert {one["key"]: one["default"] for one in listed["simpo"]} == {"beta": 2.0, "gamma": 0.5}
    assert regretless("objectives", "simp") == 2
    assert "expected one of" in capsys.readouterr().err


def test_doctor_when_asked_then_it_says_what_this_machine_will_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert regretless("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"].startswith(torch.__version__.partition("+")[0]) and "vllm" in found["versions"]
    assert found["machine"]["cores"] == os.cpu_count() and found["machine"]["memory (GiB)"] > 0.5
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert found["used"]["device"].startswith(device)
    assert ("FlexAttention" in found["used"]["attention in training"]) == (device == "cuda")
    assert found["sampling engines"]["transformers"] == "yes"
    assert found["problems"] == []
    assert regretless("doctor") == 0
    shown = capsys.readouterr().out
    assert all(section in shown for section in found if found[section])


def test_doctor_when_the_check_of_an_engine_fails_then_its_row_says_so_and_the_others_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> None:
        raise RuntimeError("no licence")

    monkeypatch.setitem(ENGINES, "mine", dataclasses.replace(ENGINES["transformers"], check=check))
    assert regretless("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)["sampling engines"]
    assert (found["mine"], found["transformers"]) == ("no: RuntimeError: no licence", "yes")


@pytest.mark.slow
def test_table_when_the_terminal_has_no_such_letters_then_they_are_escaped_and_nothing_fails() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "200"}
    command = [sys.executable, "-m", "regretless", "objectives"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **plain}, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"number \u2265 0" in done.stdout and rb"\u03b2" in done.stdout


def test_recipe_with_flags_when_given_to_a_verb_then_its_model_and_methods_are_used(
    model: Path, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [GOOD])
    recipe = {
        "name": "x",
        "model": {"name_or_path": str(model)},
        "pairs": {"dataset": "elsewhere.jsonl"},
        "train": {"objective": ["ipo"], "methods": {"ipo": {"beta": 0.25}}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    given = ("--config", tmp_path / "recipe.yaml", "--pairs", tmp_path / "pairs.jsonl", "--output", tmp_path / "out")
    assert regretless("inspect", *given, "sample=null") == 0
    settings = read_json(tmp_path / "out" / "manifest.json")["settings"]
    assert settings["model"]["name_or_path"] == str(model)
    assert settings["objectives"] == {"ipo": {"beta": 0.25}}


def test_benchmark_with_other_columns_when_evaluated_then_the_setting_that_is_suggested_is_taken(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "test.jsonl", [{"question": PROMPT, "answer": "9"}])
    tested = ("--model", model, "--benchmark", f"mine={tmp_path / 'test.jsonl'}", "--output", tmp_path / "eval")
    assert regretless("evaluate", *tested, "max_new_tokens=2") == 3
    said = capsys.readouterr().err
    suggested = re.search(r"set the right names in (\S+) and (\S+)", said)
    assert suggested is not None and suggested[2] == "benchmarks.mine.answer_column", said
    assert regretless("evaluate", *tested, "max_new_tokens=2", f"{suggested[1]}=question") == 0
    given = ("--prompts", tmp_path / "test.jsonl", "--model", model, "--output", tmp_path / "responses.parquet")
    capsys.readouterr()
    assert regretless("sample", *given, "max_new_tokens=2", "n=1") == 3
    suggested = re.search(r"set the right names in (\S+) and", said := capsys.readouterr().err)
    assert suggested is not None, said
    assert regretless("sample", *given, "max_new_tokens=2", "n=1", f"{suggested[1]}=question") == 0


LIGHT = {
    "--help": (["--help"], 0),
    "no command": ([], 0),
    "--version": (["--version"], 0),
    "recipes": (["recipes"], 0),
    "help of an objective": (["dpo", "--help"], 0),
    "help of a stage": (["inspect", "--help"], 0),
    "settings": (["settings"], 0),
    "an objective": (["objectives", "simpo"], 0),
    "objectives": (["objectives", "--json"], 0),
    "unknown command": (["dop"], 2),
    "unknown option": (["run", "--smoek"], 2),
    "missing argument": (["plan"], 2),
}


@pytest.mark.parametrize("case", LIGHT)
def test_command_that_computes_nothing_when_run_then_it_loads_nothing_heavy(case: str) -> None:
    """What takes its time is imports: without these it answers at once."""
    words, code = LIGHT[case]
    script = (
        "import sys, regretless.__main__\n"
        "sys.argv[1:], heavy = {!r}, {!r}\n"
        "try: regretless.__main__.main()\n"
        "finally: print('loaded:', *(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script.format(words, HEAVY)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
    if words in ([], ["--help"]):
        assert all(verb in done.stdout for verb in VERBS)


def test_completion_when_asked_for_then_it_knows_commands_objectives_and_packaged_recipes() -> None:
    def completed(*words: str) -> list[str]:
        """What bash is offered behind these words, the last of them unfinished."""
        given = {
            "_REGRETLESS_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["regretless", *words]),
            "COMP_CWORD": str(len(words)),
        }
        command = [sys.executable, "-c", COMPLETES.format(COMPLETION)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **given}, check=False)
        *lines, loaded = done.stdout.splitlines()
        assert loaded == "loaded:", done.stdout + done.stderr
        return lines

    assert completed("tr") == ["train"]
    assert "repo_det" in completed("rep") and "report" in completed("rep") and "base" not in completed("b")
    assert completed("run", "math/qwen3-1") == ["math/qwen3-1.7b"]
    assert completed("run", "quickstart", "--until", "ver") == ["verify"]
    assert completed("inspect", "--objective", "si") == completed("objectives", "si") == ["simpo"]
    assert completed("train", "learning_r") == ["learning_rate="]
    assert completed("run", "quickstart", "train.learning_r") == ["train.learning_rate="]
    # One word in zsh and fish, three in bash.
    names = ["repo", "repo_det", "repo_unpaired", "repo_listwise"]
    assert completed("train", "objective=rep") == [f"objective={name}" for name in names]
    assert completed("run", "quickstart", "seed=1", "train.objective", "=", "rep") == names
    assert completed("sample", "max_new_tokens", "=") == [""]
    assert completed("study", "table1-chat", "train.objective=") == [""]


COMPLETION = {
    *("__main__", "cli", "cli.app", "cli.known"),
    *("core", "core.bundled", "core.errors", "core.files", "core.interrupt", "core.plugins", "core.ranks"),
    *("core.setting_list", "core.text_cleaning"),
}
"""All modules that completion may load, while a person waits: with settings, stages or the terminal come pydantic and
rich. (Newer versions of typer import pydantic themselves.)"""
COMPLETES = (
    "import sys\n"
    "sys.argv = ['regretless']\n"
    "import regretless.__main__\n"
    "try: regretless.__main__.main()\n"
    "finally: print('loaded:', *(name for name in sys.modules\n"
    "    if name.startswith('regretless.') and name.removeprefix('regretless.') not in {!r}))"
)


def test_results_when_asked_for_as_json_then_standard_output_is_one_document(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [response("\\boxed{9}", verdict="correct"), response("\\boxed{8}", verdict="wrong")]
    write_jsonl(tmp_path / "in.jsonl", rows)
    pair = ("pair", "--responses", tmp_path / "in.jsonl", "--output", tmp_path / "pairs.jsonl")
    assert regretless(*pair, "--json") == 0
    said = json.loads(capfd.readouterr().out)
    assert said["output"] == str(tmp_path / "pairs.jsonl")
    assert said["stages"]["pair"]["ran"] is True and said["stages"]["pair"]["summary"]["pairs"] == 1
    inspect = ("inspect", "--pairs", tmp_path / "pairs.jsonl", "--model", model, "--output", tmp_path / "inspected")
    assert regretless(*inspect, "sample=1", "--json") == 0
    assert list(json.loads(capfd.readouterr().out)["stages"]) == ["inspected"]
    write_jsonl(tmp_path / "test.jsonl", [{"prompt": PROMPT, "answer": "9"}])
    tested = ("--benchmark", f"easy={tmp_path / 'test.jsonl'}", "--output", tmp_path / "eval", "max_new_tokens=2")
    assert regretless("evaluate", "--model", model, *tested, "--json") == 0
    assert [row["n"] for row in json.loads(capfd.readouterr().out)["results"]["rows"]] == [1]


def test_prints_during_work_when_they_come_from_anywhere_then_none_is_on_standard_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with only_results():
        print("of Python")
        subprocess.run(["echo", "of another program"], check=True)
    print("result")
    said = capfd.readouterr()
    assert said.out == "result\n"
    assert "of Python" in said.err and "of another program" in said.err


def test_pairs_with_columns_of_their_own_when_a_stage_reads_them_then_settings_name_the_columns(
    model: Path, tmp_path: Path
) -> None:
    rows = [{"question": PROMPT, "good": GOOD["chosen"], "bad": GOOD["rejected"]}, {"question": PROMPT, "good": "9"}]
    write_jsonl(tmp_path / "own.jsonl", [*rows, *rows])
    command = ("inspect", "--pairs", tmp_path / "own.jsonl", "--model", model, "--output", tmp_path / "out", "sample=0")
    assert regretless(*command) == 3
    own = ("chosen_key=good", "pairs.rejected_key=bad")
    assert regretless(*command, *own) == 0
    assert read_json(tmp_path / "out" / "inspect.json")["data"]["pairs"] == 2
    refused = rows_of(tmp_path / "out.cache" / "pair" / "refused.jsonl")
    assert [row["line"] for row in refused] == [2, 4]
    assert regretless(*command, *own, "pairs.limit=1") == 0
    assert read_json(tmp_path / "out" / "inspect.json")["data"]["pairs"] == 1
    assert regretless(*command, "pairs.chosen=good") == 2


def test_settings_of_how_pairs_are_read_when_compared_with_those_of_stages_then_no_stage_has_one_of_that_name() -> None:
    of_pairs = {text.removesuffix("=") for text in OF_PAIRS}
    for stage in ("mask", "inspect", "train", "analyze"):
        assert not of_pairs & {row.key.removeprefix(f"{stage}.") for row in settings_of_stage(stage)}, stage
    assert not of_pairs & {one.name for one in dataclasses.fields(PreferenceConfig)}


@pytest.mark.parametrize(
    ("command", "named", "trl"),
    [
        ("dpo --model_name_or_path m --learning_rate=5e-7", "--model_name_or_path, --learning_rate; settings", 1),
        ("train --use_peft --pairs p", "--use_peft; settings are written KEY=VALUE", 1),
        ("verify --time_limit 9 --responses r", "--time_limit; settings are written KEY=VALUE", 0),
    ],
)
def test_settings_when_written_as_options_then_they_are_refused_and_the_page_on_trl_is_named(
    command: str, named: str, trl: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"no such option: {named}" in said
    assert said.count("/from_trl.html") == trl


def test_option_when_it_is_misspelled_then_the_one_that_was_meant_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--ouput", "out"])
    assert ended.value.code == 2 and "--output" in capsys.readouterr().err


NO_VALUE = "expected a value, got nothing"
NO_URL = "expected a path on this machine, got the URL s3://bucket/x"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        *((f"{verb} quickstart --output-dir ", f"--output-dir: {NO_VALUE}") for verb in ("run", "plan", "study")),
        ("run quickstart --output-dir=", f"--output-dir: {NO_VALUE}"),
        ("run ", f"run: {NO_VALUE}"),
        ("run quickstart output_dir=''", f"output_dir: {NO_VALUE}"),
        ("run quickstart model.name_or_path=''", f"model.name_or_path: {NO_VALUE}"),
        ("run quickstart evaluate.policies.d=''", f"evaluate.policies.d: {NO_VALUE}"),
        ("run quickstart train.pairs_cache_dir=''", f"train.pairs_cache_dir: {NO_VALUE}"),
        ("inspect --pairs p --model m --output o model.tokenizer=''", f"model.tokenizer: {NO_VALUE}"),
        ("analyze --pairs p --model m --policy d= --output o", f"--policy d: {NO_VALUE}"),
        ("inspect --pairs  --model m --output o", f"--pairs: {NO_VALUE}"),
        ("train --pairs p --model  --output o", f"--model: {NO_VALUE}"),
        ("sample --prompts  --model m --output o", f"--prompts: {NO_VALUE}"),
        ("verify --responses  --output o", f"--responses: {NO_VALUE}"),
        ("compare a b --output ", f"--output: {NO_VALUE}"),
        ("compare a ", f"a: {NO_VALUE}"),
        ("report ", f"report: {NO_VALUE}"),
        ("merge a ", f"a: {NO_VALUE}"),
        ("push  owner/name", f"push: {NO_VALUE}"),
        ("watch ", f"watch: {NO_VALUE}"),
        ("recipes --copy quickstart --output ", f"--output: {NO_VALUE}"),
        ("run quickstart --output-dir s3://bucket/x", f"output_dir: {NO_URL}"),
        ("plan quickstart --output-dir s3:/bucket/x", f"output_dir: {NO_URL}"),
        ("study table1-chat --output-dir s3://bucket/x", f"output_dir: {NO_URL}"),
        ("run s3://bucket/x", f"RECIPE: {NO_URL}"),
        ("verify --config s3://bucket/x", f"--config: {NO_URL}"),
        ("inspect --pairs p --model m --output s3://bucket/x", f"--output: {NO_URL}"),
        ("report s3://bucket/x --output page", f"RUN_DIR: {NO_URL}"),
        ("compare a s3://bucket/x", f"RUN: {NO_URL}"),
        ("compare a b --output s3://bucket/x", f"--output: {NO_URL}"),
        ("watch s3://bucket/x", f"RUN_DIR: {NO_URL}"),
        ("merge a s3://bucket/x", f"OUT: {NO_URL}"),
        ("recipes --copy quickstart --output s3://bucket/x", f"--output: {NO_URL}"),
    ],
)
def test_paths_when_empty_or_of_another_machine_then_they_are_refused_and_nothing_is_written(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert regretless(*command.split(" ")) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


MANIFEST = {
    **{"stage": "train/dpo", "key": "0" * 32, "settings": {}, "summary": {}, "seconds": 1.0},
    **{"finished": "2026-11-20T10:00:00+0000", "versions": {}},
}
RECIPE: dict[str, Any] = {
    "name": "x",
    "model": {"name_or_path": "m"},
    "pairs": {"dataset": "data/p.jsonl"},
    "inspect": {},
}
EMPTIED, INSIDE, THEIRS = "is emptied, moved or replaced", "which it would change", "move it away"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train --pairs data/p.jsonl --model m --output m", EMPTIED),
        ("train --pairs data/p.jsonl --model m --output m/", EMPTIED),
        ("train --pairs data/p.jsonl --model m --output sub/../m", EMPTIED),
        ("train --pairs data/p.jsonl --model m --output link", EMPTIED),
        ("train --pairs data/p.jsonl --model link --output m", EMPTIED),
        ("train --pairs data/p.jsonl --model m --output .", EMPTIED),
        ("train --pairs data/p.jsonl --model m --adapter top/train/dpo --output top", EMPTIED),
        ("dpo --pairs data/p.jsonl --model m model.tokenizer=top/train/dpo --output top/train/dpo", EMPTIED),
        ("inspect --pairs data/p.jsonl --model m --output data", EMPTIED),
        ("inspect --pairs data --model m --output data/out", INSIDE),
        ("analyze --pairs data/p.jsonl --model m --policy d=top/train/dpo --output top/train/dpo", EMPTIED),
        ("evaluate --model top/base --benchmark a=data/p.jsonl --output top --policy d=m", EMPTIED),
        ("verify --responses data/p.jsonl --output data/p.jsonl", EMPTIED),
        ("verify --responses data/out.refused.jsonl --output data/out.jsonl", EMPTIED),
        ("mask --pairs data --output data/out.jsonl", INSIDE),
        ("inspect --pairs data/p.jsonl --model m --output top/train/dpo", "holds the result of train/dpo"),
        ("inspect --pairs data/p.jsonl --model m --output extension", THEIRS),
        ("inspect --pairs data/p.jsonl --model m --output sub", THEIRS),
        ("inspect --pairs data/p.jsonl --model m --output ..", EMPTIED),
        ("inspect --pairs data/p.jsonl --model m --output /", EMPTIED),
        ("run r.json --output-dir .", f"recipe.yaml: not written by a run; choose another output folder, or {THEIRS}"),
        ("run r.json --output-dir data pairs.dataset=data", INSIDE),
        ("run r.json --output-dir data/x/y pairs.dataset=data", INSIDE),
        ("run r.json --output-dir data/run\U0001f600 pairs.dataset=data", INSIDE),
        ("run r.json --output-dir extension", THEIRS),
        ("run r.json --output-dir top train.objective=dpo model.name_or_path=top/train/dpo", EMPTIED),
        ("run r.json --output-dir top model.name_or_path=top/train/dpo", EMPTIED),
        ("inspect --config r.json output_dir=sub", "output_dir"),
    ],
)
def test_output_when_it_is_an_input_or_somebody_elses_then_it_is_refused_and_all_stays_as_it_is(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        **dict.fromkeys(("data/p.jsonl", "data/out.refused.jsonl"), json.dumps(GOOD)),
        **dict.fromkeys(("m/config.json", "top/base/config.json", "top/train/dpo/adapter_config.json"), "{}"),
        "top/train/dpo/manifest.json": json.dumps(MANIFEST),
        "top/stages.json": json.dumps({"settings": "0" * 32, "left": []}),
        "extension/manifest.json": json.dumps({"manifest_version": 3, "name": "x", "version": "1"}),
        "extension/inspect/manifest.json": "{}",
        "extension/src/a": "x",
        "sub/thesis.txt": "years of work",
        "r.json": json.dumps(RECIPE),
        "recipe.yaml": "name: soup",
    }
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    work = tmp_path / "work"
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    (work / "link").symlink_to("m")
    monkeypatch.chdir(work)
    before = {path: path.is_dir() or path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert regretless(*command.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert {path: path.is_dir() or path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
