"""Running recipes: what is skipped, what runs again, and that kill -9 at any moment changes nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import read_json, write_jsonl
from regretless.data.rows import read_rows
from regretless.reporting import report
from regretless.reporting.collect import RunData
from regretless.runs.pipeline import results_of, run_recipe, show
from regretless.runs.recipe import Recipe, parse_recipe
from regretless.studies.compared_runs import Run as CompareRun
from regretless.studies.compared_runs import RunToCompare
from run_contents import contents
from small_runs import small


def run(recipe: Recipe) -> set[str]:
    """Run it; what did not stand there already."""
    return {name for name, outcome in run_recipe(recipe).outcomes.items() if outcome.ran}


def test_run_when_repeated_in_a_moved_folder_then_nothing_runs(folder: Path) -> None:
    assert run(small(folder)) == set()


def test_files_of_units_when_a_run_is_finished_then_each_is_on_its_units_list(finished: Path) -> None:
    units = {path.parent: {path.name, *read_json(path)["files"]} for path in finished.rglob("manifest.json")}
    for unit, listed in units.items():
        inner = [other for other in units if unit in other.parents]
        files = [path for path in unit.rglob("*") if path.is_file() and not set(inner) & set(path.parents)]
        assert {path.relative_to(unit).as_posix() for path in files} == listed, "workflow/stages.py has the names"


def test_threads_of_a_recipe_when_it_has_run_then_the_process_has_its_own_number_again(tmp_path: Path) -> None:
    values = {"name": "x", "output_dir": str(tmp_path / "run"), "threads": torch.get_num_threads() + 1}
    world = {"prompts": 3, "test": 2, "policies": {"a": {"demonstrations": 2}}}
    run_recipe(parse_recipe({**values, "world": world}, "x"))
    assert torch.get_num_threads() == values["threads"] - 1


def test_cards_of_a_run_when_a_method_is_trained_anew_then_they_hold_results_of_these_weights_and_no_texts(
    folder: Path,
) -> None:
    card = folder / "train" / "dpo" / "README.md"
    before = card.read_text()
    (row,) = [one for one in read_json(folder / "evaluate" / "results.json")["rows"] if one["label"] == "dpo"]
    assert f"| `arithmetic` | Pass@1 (%), greedy | {row['n']} | {100 * row['value']:.2f} [" in before
    assert "| behavior policy | `behavior` |" in before
    assert "(../../report/report.html)" in before
    assert str(folder) not in before
    written = pq.read_table(folder / "pair" / "pairs.parquet", columns=["prompt", "chosen", "rejected"]).to_pylist()
    texts = {text.strip() for pair in written for text in pair.values() if len(text.strip()) > 8}
    assert len(texts) > 20
    for name in ("README.md", "card.json"):
        content = (folder / "train" / "dpo" / name).read_text()
        assert not [text for text in texts if text in content or json.dumps(text)[1:-1] in content]
    run_recipe(small(folder, "train.methods.dpo.beta=0.5"), ["train"])
    anew = card.read_text()
    assert "| `beta` | `0.5` |" in anew
    assert "No benchmark results are recorded" in anew
    assert "report.html" not in anew


def test_setting_of_one_method_when_changed_then_the_other_method_stays(folder: Path) -> None:
    ran = run(small(folder, "train.methods.dpo.beta=0.5"))
    evaluated = {f"evaluate/{place}" for place in ("dpo/arithmetic", "dpo/arithmetic/seed-41")}
    sampled = {f"evaluate/samples/dpo/arithmetic/{name}" for name in ("greedy", "seed-41")}
    assert ran - evaluated == {"inspect", "train/dpo", *sampled, "analyze", "report"}


def test_stage_that_runs_again_with_the_same_outcome_then_later_stages_stay(folder: Path) -> None:
    ran = run(small(folder, "verify.time_limit=9"))
    assert "verify" in ran and "evaluate/base/arithmetic" in ran
    assert not ran & {"pair", "inspect", "train/dpo", "evaluate/samples/base/arithmetic/greedy"}


def test_input_file_when_edited_then_the_stage_that_reads_it_runs(folder: Path) -> None:
    prompts = folder / "world" / "prompts.jsonl"
    rows = [row for _, row in read_rows(prompts) if isinstance(row, dict)]
    write_jsonl(prompts, rows[:-1])
    ran = run(small(folder))
    assert "sample" in ran and not ran & {"world", "pretrain/base", "pretrain/behavior"}


def test_finished_run_when_a_file_that_it_was_made_of_is_missing_then_it_is_refused_and_stays_as_it_is(
    folder: Path, tmp_path: Path
) -> None:
    model, pairs = tmp_path / "model", tmp_path / "pairs.parquet"
    shutil.copytree(folder / "pretrain" / "base", model)
    shutil.copy(folder / "pair" / "pairs.parquet", pairs)
    values = {
        "name": "x",
        "output_dir": str(tmp_path / "trained"),
        "model": {"name_or_path": str(model)},
        "pairs": {"dataset": str(pairs)},
        "train": {"objective": "dpo", "max_steps": 1, "lora": None},
    }
    recipe = parse_recipe(values, "x")
    assert run(recipe) == {"pair", "train/dpo"}
    before = contents(tmp_path / "trained")
    for path in (model, pairs):
        path.rename(tmp_path / "away")
        with pytest.raises(ConfigError, match=f"no such file or folder: {path}"):
            run_recipe(recipe)
        assert contents(tmp_path / "trained") == before
        (tmp_path / "away").rename(path)
    assert run(recipe) == set()


def test_run_when_only_some_stages_get_other_settings_then_page_and_comparison_say_that_the_rest_is_not_of_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*overrides: str, only: Sequence[str] = ()) -> tuple[list[str], bool]:
        done = run_recipe(small(folder, *overrides), only)
        assert "report" in done.outcomes
        problems = RunToCompare(CompareRun(folder)).unfinished()
        return problems, "Not of this recipe" in (folder / "report" / "report.html").read_text(encoding="utf-8")

    assert said() == ([], False)
    (problem,), on_page = said("train.methods.dpo.beta=0.5", only=["report"])
    assert on_page and "sample, verify, pair, train, evaluate not done" in problem
    assert f"{folder}: results of world, " in capsys.readouterr().err
    assert said() == ([], False)


def test_results_when_a_run_is_partial_then_it_has_those_of_its_stages_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*only: str) -> tuple[bool, bool]:
        done = run_recipe(small(folder), only)
        results, report = results_of(done)
        capsys.readouterr()
        show(done)
        printed = capsys.readouterr().out
        assert ("Pass@1" in printed) == (results is not None)
        assert ("report.html" in printed) == (report is not None)
        return results is not None, report is not None

    assert shown() == (True, True)
    assert shown("world", "pretrain") == (False, False)
    assert shown("evaluate") == (True, False)
    assert shown("report") == (False, True)


def test_method_that_is_no_longer_asked_for_then_it_is_set_aside_and_comes_back(folder: Path) -> None:
    assert "train/repo" not in run(small(folder, "train.objective=dpo"))
    labels = {row["label"] for row in read_json(folder / "evaluate" / "results.json")["rows"]}
    assert labels == {"base", "dpo"}
    assert [place for place in ("train", "evaluate", "evaluate/samples") if (folder / place / "repo").exists()] == []
    assert (folder / "train" / "repo.cache").is_dir()  # where it is looked for when the method comes back
    assert not {name for name in run(small(folder)) if name.startswith(("train/", "evaluate/"))}
    labels = {row["label"] for row in read_json(folder / "evaluate" / "results.json")["rows"]}
    assert labels == {"base", "dpo", "repo"}


def test_results_when_only_they_are_made_anew_then_they_are_of_what_the_recipe_asks_for(folder: Path) -> None:
    def labels(*overrides: str) -> tuple[set[str], set[str]]:
        run_recipe(small(folder, *overrides), only=["evaluate"])
        rows = read_json(folder / "evaluate" / "results.json")["rows"]
        return {row["label"] for row in rows}, {row["benchmark"] for row in rows}

    benchmarks = {path.name for path in (folder / "evaluate" / "base").iterdir()}
    (folder / "evaluate" / "base" / "dropped").mkdir()
    shutil.copy(folder / "evaluate" / "base" / "arithmetic" / "result.json", folder / "evaluate" / "base" / "dropped")
    assert labels("train.objective=dpo") == ({"base", "dpo"}, benchmarks)
    assert (folder / "train" / "repo").is_dir() and (folder / "evaluate" / "repo").is_dir()
    assert labels() == ({"base", "dpo", "repo"}, benchmarks)


def test_page_when_a_partial_run_has_dropped_a_method_then_nothing_of_it_is_on_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[RunData] = []
    monkeypatch.setattr(report, "_run", lambda config, data, run_dir, output: pages.append(data) or {})
    run_recipe(small(folder, "train.objective=dpo"), only=["report"])
    run_recipe(small(folder), only=["report"])
    for page, methods in zip(pages, ({"dpo"}, {"dpo", "repo"}), strict=True):
        for part in (page.results, page.seed_results, page.changes):
            assert {one.label for one in part} - {"base"} == methods
        assert page.logs.keys() == page.scores.keys() == methods
        named = {name for stage in page.stages for name in stage.name.split("/")}
        assert named & {"dpo", "repo"} == methods
        assert "analyze" in page.others, "it compares what the recipe does not have"


def test_folder_that_is_not_ours_when_in_the_way_then_it_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "run" / "world" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    with pytest.raises(ConfigError, match="not made by regretless"):
        run(small(tmp_path / "run"))
    assert precious.read_text() == "years of work"


def test_run_folder_when_another_process_works_in_it_then_the_error_names_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from regretless.workflow.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked(): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(ConfigError, match=f"another run uses it .process {other.pid} "):
            run(small(tmp_path / "run"))
        other.kill()
    world = small(tmp_path / "run").model_copy(update={"pretrain": {}, "sample": None, "verify": None, "pair": None})
    only_world = parse_recipe({"name": "x", "world": world.world, "output_dir": str(tmp_path / "run")}, "x")
    assert run(only_world) == {"world"}


def test_pairs_that_exist_when_imported_then_refused_rows_are_kept_apart(tmp_path: Path) -> None:
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    write_jsonl(tmp_path / "pairs.jsonl", [good, {**good, "rejected": "a"}, {"prompt": "q", "chosen": "a"}])
    values = {"name": "x", "output_dir": str(tmp_path / "run"), "pairs": {"dataset": str(tmp_path / "pairs.jsonl")}}
    folder = run_recipe(parse_recipe(values, "x"))
    assert folder.outcomes["pair"].summary == {"pairs": 1, "refused": 2}
    refused = [row for _, row in read_rows(tmp_path / "run" / "pair" / "refused.jsonl") if isinstance(row, dict)]
    assert [row["line"] for row in refused] == [2, 3]


def test_single_stage_when_what_it_reads_is_missing_then_it_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"verify: .*sample/responses.parquet not found"):
        run_recipe(small(tmp_path / "run"), only=["verify"])


def outputs(folder: Path) -> dict[str, Any]:
    """Everything that a run makes and that does not say when or how fast."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".parquet":
            found[name] = pq.read_table(path).replace_schema_metadata(None)
        elif path.suffix in (".safetensors", ".jsonl") and "checkpoint-" not in name:
            found[name] = path.read_bytes()
        elif path.name in ("results.json", "result.json", "inspect.json", "tokenizer.json") or (
            path.parent.name == "analyze" and path.name != "manifest.json"
        ):
            found[name] = read_json(path)
        elif path.name == "trainer_state.json" and "checkpoint-" not in name:
            found[name] = [
                {key: row.get(key) for key in ("step", "loss", "grad_norm")} for row in read_json(path)["log_history"]
            ]
    return found


def under_way(run: Path) -> set[str]:
    """The stages of a run that have begun and not ended."""
    # os.walk passes over a folder that the run removes meanwhile; rglob raises.
    return {Path(folder).relative_to(run).as_posix() for folder, _, names in os.walk(run) if "pending.json" in names}


def attempt(folder: str) -> None:
    run_recipe(small(Path(folder)))


@pytest.mark.slow
def test_run_when_killed_at_random_moments_then_the_same_command_ends_with_the_same_result(tmp_path: Path) -> None:
    # At the same place, because responses name the folders of the models that wrote them.
    folder = tmp_path / "run"
    run(small(folder))
    expected = outputs(folder)
    folder.rename(tmp_path / "uninterrupted")
    # Forked from a process that has imported everything: the time goes into the work that is to be killed.
    context = multiprocessing.get_context("forkserver")
    preload = ["regretless.runs.pipeline", "small_runs", "regretless.workflow.fork_origin"]
    context.set_forkserver_preload(preload)
    rng = random.Random(0)
    begun: set[str] = set()
    killed_in: set[str] = set()
    while True:
        process = context.Process(target=attempt, args=(str(folder),))
        process.start()
        # One kill for every stage that is seen to begin, however fast the machine; every second one at once.
        while process.exitcode is None and not under_way(folder) - begun:
            process.join(0.005)
        begun |= under_way(folder)
        process.join(rng.choice([0.0, rng.uniform(0.0, 2.0)]))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        killed_in |= under_way(folder)
    assert process.exitcode == 0
    assert len(killed_in) >= 3, killed_in
    found = outputs(folder)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize("parallel", [1, 2])
def test_methods_when_one_cannot_train_then_the_others_are_trained_and_its_error_ends_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: int
) -> None:
    rows = [{"prompt": f"Tom has {n}.", "chosen": f"{n}", "rejected": f"{n + 1}"} for n in range(3)]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    train = {"objective": ["repo", "dpo", "sft"], "max_steps": 1, "pairs_per_step": 2, "save_strategy": "no"}
    values = {"name": "x", "output_dir": str(tmp_path / "run"), "threads": 1, "parallel": parallel}
    values |= {"model": {"name_or_path": str(model)}, "pairs": {"dataset": str(tmp_path / "mine.jsonl")}}
    recipe = parse_recipe({**values, "train": {**train, "use_cpu": True}, "report": {}}, "x")
    with pytest.raises(DataError, match="repo needs the behavior policy's token log-probabilities"):
        run_recipe(recipe)
    finished = {path.parent.relative_to(tmp_path / "run").as_posix() for path in tmp_path.rglob("manifest.json")}
    assert finished == {"pair", "train/dpo", "train/sft"}
    said = capsys.readouterr().err
    assert "train/repo failed: " in said
    assert "train: repo failed, and stopped nothing else: dpo, sft finished" in said
