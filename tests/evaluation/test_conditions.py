"""Results that are compared although they were made differently: they are refused."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from made_runs import BENCHMARK, add_harness, made_run, prefer, rate
from regretless.core.errors import DataError
from regretless.core.files import read_json
from regretless.evaluation.chat import chat_results
from regretless.evaluation.results import collect, results_table
from regretless.workflow.stage_folder import MANIFEST

VERDICTS: dict[str, dict[str, Any]] = {"base": {BENCHMARK: [1, 0, 0, 1]}, "dpo": {BENCHMARK: [1, 1, 0, 1]}}


def replace_model(run: Path, source: Path, label: str) -> Path:
    """Put another run's evaluation of a model into a run; returns the folder of all evaluations."""
    for place in (label, f"samples/{label}"):
        shutil.rmtree(run / "evaluate" / place)
        shutil.copytree(source / "evaluate" / place, run / "evaluate" / place)
    return run / "evaluate"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sampling": {"max_new_tokens": 9}}, "max_new_tokens is 64 in base; 9 in dpo"),
        ({"sampling": {"stop": ["Q:"]}}, "stop is [] in base; ['Q:'] in dpo"),
        ({"verify": {"grade_cut": True}}, "grade_cut is False in base; True in dpo"),
    ],
)
def test_gain_when_two_models_were_evaluated_with_other_settings_then_error_names_them(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    run = made_run(tmp_path / "a", VERDICTS, sampling={"batch_size": 2})
    assert collect(run / "evaluate")["rows"][1]["gain"] == 0.25
    # Neither workers nor batch size changes a verdict.
    like = made_run(tmp_path / "b", VERDICTS, sampling={"batch_size": 3}, verify={"workers": 2})
    assert collect(replace_model(run, like, "dpo"))["rows"][1]["gain"] == 0.25
    other = made_run(tmp_path / "c", VERDICTS, **changed)
    with pytest.raises(DataError) as error:
        collect(replace_model(run, other, "dpo"))
    assert f"{BENCHMARK}: base and dpo were not answered and graded alike:\n  {said}\n" in str(error.value)
    assert f"or move {run / 'evaluate' / 'dpo' / BENCHMARK} away" in str(error.value)


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ({"name_or_path": "owner/Tiny-1B"}, None),
        ({"name_or_path": "owner/Tiny-1B", "adapter": "first"}, "the adapter first on owner/Tiny-1B"),
        ({"name_or_path": "{run}/first"}, "the adapter {run}/first on owner/Tiny-1B"),
        ({"name_or_path": None, "adapter": "first"}, "the adapter first on a model with random weights"),
    ],
)
def test_gain_when_the_base_is_an_adapter_then_results_name_it_and_its_base(
    tmp_path: Path, model: dict[str, Any], base: str | None
) -> None:
    run = made_run(tmp_path / "run", VERDICTS)
    (run / "first").mkdir()
    (run / "first" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/Tiny-1B"}')
    for manifest in (run / "evaluate" / "samples" / "base").rglob(MANIFEST):
        values = read_json(manifest)
        values["settings"]["model"] = model
        manifest.write_text(json.dumps(values))
    found = collect(run / "evaluate")
    assert found.get("base") == base
    console = Console(file=io.StringIO(), width=200)
    console.print(results_table(found))
    said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert (f"base, which gains are over, is {base}" in said) == (base is not None)


def test_gain_when_a_gold_answer_was_changed_then_error_counts_the_problems(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", VERDICTS)
    file = run / "evaluate" / "dpo" / BENCHMARK / "responses.parquet"
    rows = pq.read_table(file)
    answers = ["100", *rows["answer"].to_pylist()[1:]]
    pq.write_table(rows.set_column(rows.schema.get_field_index("answer"), "answer", pa.array(answers)), file)
    with pytest.raises(DataError, match="0 only in the second, 1 with other text or gold answer"):
        collect(run / "evaluate")


def test_gain_when_judging_or_decoding_of_a_chat_benchmark_differs_then_error_names_it(tmp_path: Path) -> None:
    for name, settings, said in [
        ("judging", {"temperature": 0.5}, "chat.mt.temperature is 0.0 in base; 0.5 in dpo"),
        ("decoding", {"max_new_tokens": 9}, "chat.mt.max_new_tokens is 8 in base; 9 in dpo"),
    ]:
        run = made_run(tmp_path / name, VERDICTS)
        for label in VERDICTS:
            rate(run, label, [3.0, 4.0], temperature=0.0)
        assert len(collect(run / "evaluate")["chat"]) == 8
        rate(run, "dpo", [3.0, 4.0], **{"temperature": 0.0, **settings})
        with pytest.raises(DataError, match=f"mt: base and dpo were not answered and graded alike:\n  {said}"):
            collect(run / "evaluate")
    rate(run, "dpo", [3.0, 4.0], asked="others", temperature=0.0)
    with pytest.raises(DataError, match="mt: base and dpo answered different problems"):
        collect(run / "evaluate")


def test_gain_when_the_judges_prompt_was_changed_in_its_file_then_it_is_told_by_content(tmp_path: Path) -> None:
    run = made_run(tmp_path, VERDICTS)
    for label in VERDICTS:
        prefer(run, label, [0.0, 1.0, 1.0], judge_prompt="prompt.txt")
        file = run / "evaluate" / label / "alpaca" / chat_results.RESULT
        file.write_text(json.dumps(read_json(file) | {"files": {"judge_prompt": f"hash of {label}"}}))
    with pytest.raises(DataError, match="judge_prompt is hash of base in base; hash of dpo in dpo"):
        collect(run / "evaluate")


def test_gain_when_a_task_of_the_harness_was_asked_differently_then_error_names_the_setting(tmp_path: Path) -> None:
    run = made_run(tmp_path, VERDICTS)
    for label, asked in (("base", {}), ("dpo", {"num_fewshot": 5})):
        add_harness(run, label, {"ifeval|strict|none": {"0-hash": 1.0}}, asked)
    with pytest.raises(DataError, match=r"harness_settings\.num_fewshot is None in base; 5 in dpo"):
        collect(run / "evaluate")
    add_harness(run, "dpo", {"mmlu|acc|none": {"0-hash": 1.0}}, {"num_fewshot": 5})
    assert len(collect(run / "evaluate")["harness"]) == 2


def test_seeds_when_sampled_with_other_settings_then_the_current_ones_count_and_the_others_are_named(
    tmp_path: Path,
) -> None:
    run = made_run(tmp_path, VERDICTS, sampled={"base": {1: [1, 1, 1, 1], 2: [1, 1, 1, 0], 3: [0, 0, 0, 0]}})
    (row,) = collect(run / "evaluate")["seeds"]
    assert (row["seeds"], row["mean"]) == (3, pytest.approx(7 / 12))  # added one after the other, with equal settings
    manifest = run / "evaluate" / "samples" / "base" / BENCHMARK / "seed-3" / MANIFEST
    values = read_json(manifest)
    values["settings"]["sampling"]["temperature"] = 1.5
    manifest.write_text(json.dumps(values))
    for current, count, mean, others in [([3], 1, 0.0, "seed-1, seed-2"), ([1], 2, 0.875, "seed-3")]:
        found = collect(run / "evaluate", current)
        (row,) = found["seeds"]
        assert (row["seeds"], row["mean"]) == (count, mean)
        (note,) = found["left_out"]
        assert note.startswith(f"{BENCHMARK}: {others} of base not in the mean over seeds: temperature is ")
        console = Console(file=io.StringIO(), width=200, record=True)
        console.print(results_table(found))
        assert note.split("temperature")[0] in " ".join(console.export_text().split())
