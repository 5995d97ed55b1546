"""The documented example on real data: published solutions of four models, verified, paired and trained on."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from regretless.core.errors import DataError
from regretless.core.files import write_jsonl
from regretless.labeling import mask as masking
from regretless.labeling import pair as pairing
from regretless.labeling import verify as labeling

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gsm8k_solutions.py"
CORRECT = {"6b_finetuning": 145, "6b_verification": 257, "175b_finetuning": 211, "175b_verification": 373}
"""Labels `is_correct` among 660 solutions of each model, as published."""
QUESTIONS = 7
"""What training sees: every token costs a row of 151,646 logits, whatever the size of the model."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_solutions", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def solutions(shared: Path) -> Path:
    return shared / "data" / "gsm8k" / "example_model_solutions.jsonl"


@pytest.fixture(scope="module")
def verified(example: ModuleType, solutions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    write_jsonl(folder / "responses.jsonl", example.responses(solutions))
    labeling.run(labeling.VerifyConfig(workers=1), folder / "responses.jsonl", folder)
    return folder / "responses.parquet"


def _published(solutions: Path, questions: int | None = None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in solutions.read_text(encoding="utf-8").splitlines()[:questions]]


def _expected_pairs(solutions: Path, models: tuple[str, ...], questions: int | None = None) -> int:
    """Up to 2 × 2 pairs of each question's distinct texts, by the published labels."""
    total = 0
    for row in _published(solutions, questions):
        texts = {row[model]["solution"]: row[model]["is_correct"] for model in models}
        labels = Counter(texts.values())
        total += min(2, labels[True]) * min(2, labels[False])
    return total


def test_verdicts_of_published_solutions_when_verified_are_the_published_labels(
    example: ModuleType, solutions: Path, verified: Path
) -> None:
    rows = pq.read_table(verified).to_pylist()
    labels = [(model, row[model]["is_correct"]) for row in _published(solutions) for model in example.MODELS]
    assert [(row["model"], row["verdict"] == "correct") for row in rows] == labels
    assert {row["verdict"] for row in rows} == {"correct", "wrong"}
    assert Counter(row["model"] for row in rows if row["verdict"] == "correct") == CORRECT


def test_pairs_of_published_solutions_when_counted_are_those_of_the_labels(
    example: ModuleType, solutions: Path, verified: Path, tmp_path: Path
) -> None:
    summary = pairing.run(pairing.PairConfig(), verified, tmp_path)
    assert summary["pairs"] == _expected_pairs(solutions, example.MODELS) == 918
    # What the page prints.
    assert (summary["responses"], summary["distinct_responses"], summary["prompts_paired"]) == (2640, 1167, 354)
    assert summary["refused"] == 0
    # Nobody recorded what these models thought of their tokens.
    assert summary["pairs_without_logps"] == summary["pairs"]
    with pytest.raises(DataError, match=r"left out: without_token_ids \d+"):
        masking.run(masking.MaskConfig(), tmp_path / "pairs.parquet", tmp_path)


def test_selection_of_the_page_when_made_is_every_second_question(example: ModuleType, solutions: Path) -> None:
    rows = list(example.responses(solutions, questions=3, every=2))
    assert [row["prompt"][0]["content"] for row in rows[::4]] == [
        row["question"] for row in _published(solutions, 5)[::2]
    ]


def test_example_without_its_tokenizer_when_run_then_it_ends_with_a_message(
    example: ModuleType, solutions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"--data={solutions}", f"--output={tmp_path / 'run'}", "--questions=4"]
    with pytest.raises(SystemExit) as ended:
        example.main([*common, "--tokenizer=no-such-owner/no-such-tokenizer"])
    assert ended.value.code == 2
    assert "error: " in (said := capsys.readouterr().err) and "no-such-owner/no-such-tokenizer" in said
    example.main([*common, "--responses-only"])
    assert len((tmp_path / "run" / "responses.jsonl").read_text(encoding="utf-8").splitlines()) == 16


@pytest.mark.slow
def test_example_when_run_on_real_solutions_trains_two_adapters(
    example: ModuleType, solutions: Path, shared: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    example.main(
        [
            f"--data={solutions}",
            f"--tokenizer={shared / 'data' / 'tokenizers' / 'qwen2'}",
            f"--output={run}",
            f"--questions={QUESTIONS}",
            "train.max_steps=3",
            # All pairs in every step, so that the losses of two steps are of the same pairs.
            "train.pairs_per_step=64",
        ]
    )
    pairs = _expected_pairs(solutions, example.MODELS, QUESTIONS)
    seen = json.loads((run / "inspect" / "inspect.json").read_text(encoding="utf-8"))
    assert (seen["data"]["pairs"], seen["scored_pairs"]) == (pairs, pairs)
    for objective, label in (("repo_det", "repo_det β=0.01"), ("dpo", "dpo β=0.1")):
        folder = run / "train" / objective
        summary = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["summary"]
        assert (summary["pairs"], summary["steps"]) == (pairs, 3)
        log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        losses = [entry["loss"] for entry in log if "loss" in entry]
        assert len(losses) == 3
        assert all(later < earlier for earlier, later in itertools.pairwise(losses)), losses
        assert losses[0] == pytest.approx(seen["objectives"][label]["loss"], rel=1e-3)
        # DPO starts out indifferent; RePO_det prefers what the model finds likely already.
        assert (abs(losses[0] - math.log(2)) < 1e-3) == (objective == "dpo")
        for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
            assert (folder / name).is_file()
    # One reference for both methods: computed once.
    assert len(list((run / "reference").rglob("part-*.npy"))) == 1
    assert "gsm8k-solutions" in (run / "report" / "report.html").read_text(encoding="utf-8")
