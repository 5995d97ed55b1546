"""Tasks of lm-evaluation-harness: a task of this machine, run for a base model and an adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from regretless.core.errors import ConfigError, DataError, RegretlessError
from regretless.evaluation import harness
from regretless.evaluation.harness import HarnessSettings, check_harness, command, read_scores, rows_of
from regretless.evaluation.results import EvaluateConfig
from regretless.modeling.load import ModelConfig

PYTHON = os.environ.get("REGRETLESS_LM_EVAL", sys.executable)
"""Python of an environment that has lm_eval."""
HAS_HARNESS = (
    subprocess.run([PYTHON, "-c", "import importlib.util as u; assert u.find_spec('lm_eval')"], check=False).returncode
    == 0
)
TASK = """
task: local_sums
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["1", "2"]
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_HARNESS, reason="needs lm_eval here, or its Python in REGRETLESS_LM_EVAL")
def test_task_of_this_machine_when_run_for_base_and_adapter_then_results_are_paired(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [{"question": f"{n} + 1 = ", "label": n % 2} for n in range(8)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "local_sums.yaml").write_text(TASK.format(data=tmp_path / "test.jsonl"))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=2, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    settings = HarnessSettings(python=PYTHON, include_path=str(tasks), device="cpu")
    check_harness(settings)
    scores = {}
    for label, adapter in (("base", None), ("tuned", str(tmp_path / "adapter"))):
        output = tmp_path / label
        output.mkdir()
        config = ModelConfig(name_or_path=str(model), adapter=adapter)
        assert harness.run(["local_sums"], settings, config, output) == {"tasks": 1, "scores": 8}
        scores[label] = json.loads((output / harness.SCORES).read_text())
    base, tuned = rows_of(scores)
    assert (base["benchmark"], base["metric"], base["n"]) == ("local_sums", "acc", 8)
    assert base["value"] == tuned["value"]
    assert tuned["gain"] == 0  # an adapter that was not trained changes nothing
    assert tuned["gain_low"] < 0 < tuned["gain_high"]


def test_task_when_lm_eval_fails_then_the_error_has_its_exit_code_and_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Tasks not found: no_such_task\nexit 3\n")
    python.chmod(0o755)
    model = ModelConfig(name_or_path=str(tmp_path))
    with pytest.raises(RegretlessError, match=r"lm_eval ended with exit code 3 \(.*\):\n.*no_such_task"):
        harness.run(["no_such_task"], HarnessSettings(python=str(python)), model, tmp_path)


def write_samples(folder: Path, task: str, time: str, values: list[object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"doc_id": n, "doc_hash": f"h{n}", "filter": "none", "metrics": ["acc", "parts"], "acc": value, "parts": [1, 0]}
        for n, value in enumerate(values)
    ]
    (folder / f"samples_{task}_{time}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_scores_when_read_then_problems_are_paired_by_number_and_content(tmp_path: Path) -> None:
    write_samples(tmp_path / "base", "a_task", "2026-01-01T00-00-00.000000", [1, 0, 0, 0])
    write_samples(tmp_path / "dpo", "a_task", "2026-01-01T00-00-00.000000", [True, True, True, False])
    scores = {label: read_scores(tmp_path / label) for label in ("base", "dpo")}
    assert scores["base"] == {"a_task|acc|none": {"0-h0": 1.0, "1-h1": 0.0, "2-h2": 0.0, "3-h3": 0.0}}
    base, dpo = rows_of(scores)
    assert (base["value"], base["gain"]) == (0.25, None)
    assert (dpo["value"], dpo["gain"]) == (0.75, 0.5)
    assert dpo["gain_low"] < 0.5 < dpo["gain_high"]
    scores["dpo"]["a_task|acc|none"]["9-h9"] = scores["dpo"]["a_task|acc|none"].pop("3-h3")
    with pytest.raises(DataError, match="a_task: dpo and base answered different problems"):
        rows_of(scores)


def test_scores_that_are_no_shares_when_compared_then_the_interval_is_over_problems(tmp_path: Path) -> None:
    write_samples(tmp_path / "base", "t", "x", [0.1, 0.2, 0.4])
    write_samples(tmp_path / "dpo", "t", "x", [0.2, 0.4, 0.5])
    _, dpo = rows_of({label: read_scores(tmp_path / label) for label in ("base", "dpo")})
    assert dpo["gain"] == pytest.approx(0.4 / 3)
    assert dpo["gain_low"] == pytest.approx(-0.0101, abs=1e-3)  # mean ± 4.303 · 0.0577 / √3


def test_scores_when_those_of_one_model_are_0_or_1_by_chance_then_all_have_intervals_of_one_kind(
    tmp_path: Path,
) -> None:
    scores = {"base": [0, 0, 0, 1], "dpo": [0.2, 0.4, 0.5, 0.5], "repo": [1, 1, 0, 0], "sft": [0, 0, 0, 0]}
    for label, values in scores.items():
        write_samples(tmp_path / label, "t", "x", list(values))
    rows = {row["label"]: row for row in rows_of({label: read_scores(tmp_path / label) for label in scores})}
    assert rows["base"]["low"] == pytest.approx(0.25 - 3.182446 * 0.25)  # mean ± t · s / √n
    assert (rows["sft"]["low"], rows["sft"]["high"]) == (None, None)
    assert rows["repo"]["gain_high"] == pytest.approx(0.25 + 3.182446 * 0.957427 / 2)


def test_command_when_a_path_has_a_comma_then_the_model_is_still_one_argument(tmp_path: Path) -> None:
    settings = HarnessSettings(python="python3", limit=5, apply_chat_template=True)
    folder = tmp_path / "a,b"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    words = command(["ifeval", "mmlu_pro"], settings, ModelConfig(name_or_path=str(folder)), tmp_path)
    assert json.loads(words[words.index("--model_args") + 1]) == {"pretrained": str(folder), "dtype": "auto"}
    assert words[words.index("--tasks") + 1 :][:2] == ["ifeval", "mmlu_pro"]
    assert words[-1] == "--apply_chat_template"
    assert words[words.index("--limit") + 1] == "5"


def test_harness_when_its_python_has_it_not_then_that_is_said_ahead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be run"):
        check_harness(HarnessSettings(python=str(tmp_path / "python")))
    with pytest.raises(ConfigError, match="a meaning of its own"):
        EvaluateConfig.parse({"benchmarks": {"harness": {"benchmark": "gsm8k"}}, "harness": ["ifeval"]}, "x")
