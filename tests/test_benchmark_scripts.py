"""The benchmark scripts: their data, their count of operations, and two of them in miniature on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SHAPE = {
    "hidden_size": 2,
    "intermediate_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
}


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_masked_pairs_when_added_then_each_is_a_beginning_of_a_chosen_response_behind_its_query() -> None:
    from pairs import synthetic_pairs, whole_queries, with_masked

    pairs = synthetic_pairs(3, 2, 2, 10, 100, 50)
    found = with_masked(pairs, each=2)
    assert len(pairs) == 12
    assert len(found) == 12 + 3 * 2 * 2
    for query in range(3):
        masked = found[8 * query + 4 : 8 * query + 8]
        for pair in masked:
            cut = len(pair["chosen_ids"]) - len(pair["rejected_ids"])
            assert cut in (16, 32, 48, 64, 80)
            assert pair["chosen_ids"][:-cut] == pair["rejected_ids"]
            assert pair["prompt_ids"] == found[8 * query]["prompt_ids"]
    assert len(whole_queries(pairs, 5)) == 8


def test_tokens_when_pairs_share_answers_then_each_counts_once_and_a_masked_one_not_at_all() -> None:
    from pairs import times_fewer_tokens

    pairs = [
        {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 7], "rejected_ids": [5]},
        {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 7], "rejected_ids": [3, 4]},
    ]
    assert times_fewer_tokens(pairs) == (4 * 2 + 3 + 1 + 3 + 2) / (2 + 3 + 1)


def test_tokens_of_a_query_when_counted_by_hand_then_they_agree() -> None:
    from responses_per_query import query_tokens

    pairs = [{"prompt_ids": [1, 2], "chosen_ids": [c] * 3, "rejected_ids": [r] * 3} for c in (3, 4) for r in (5, 6)]
    counts = {"pairwise": 40, "distinct": 10, "computed": 10, "recomputed": 0, "cut into pairs": 10}
    assert query_tokens(pairs, 100) == counts
    # Two responses a row, or a pair a micro-batch; a response's last token is not read.
    assert query_tokens(pairs, 8) == counts | {"computed": 12, "recomputed": 6, "cut into pairs": 24}


def test_cost_on_paper_when_printed_then_it_is_the_table_of_the_docs() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "paper_cost.py")], capture_output=True, text=True, check=True)
    table, assumed = done.stdout.strip().split("\n\n")
    page = (FOLDER.parent / "docs/scale.md").read_text()
    assert table in page
    assert assumed.removeprefix("assumed: ") in " ".join(page.split())


def test_model_flops_when_counted_by_hand_then_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    monkeypatch.setitem(gpu.LORA, "r", 1)
    pairs = [
        {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]},
        {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [6]},
    ]
    # Distinct tokens: 2 + 2 + 1 + 1. Weights: 4 × 2·2 and 3 × 2·3; adapters: 4 × (2 + 2) and 3 × (2 + 3).
    linear = 6 * (4 * (16 + 18) + 6 * (16 + 15))
    head = 4 * 7 * 2 * 4
    seen = 2 * 2 / 2 + 2 * (2 + 1) + 2 * 1 * (2 + 0.5)
    assert gpu.model_flops(SHAPE, 7, pairs) == pytest.approx(linear + head + 12 * 2 * seen)


@pytest.mark.slow
def test_gpu_script_when_run_in_miniature_then_shared_and_plain_gradients_agree(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, FOLDER / "gpu.py", "--tiny", "--skip-trl", "--repeats", "1", "--steps", "2"]
    subprocess.run([*command, "--json", result], check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = json.loads(result.read_text())
    assert found["torch.float32"]["gradient_relative"] < 1e-5
    assert found["torch.bfloat16"]["gradient_relative"] < 0.1
    assert found["runs"]["ours"][0]["pairs_per_second"] > 0


@pytest.mark.slow
def test_sampling_script_when_run_in_miniature_then_stage_and_bare_loops_draw_the_same_responses(
    tmp_path: Path,
) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, FOLDER / "sampling.py", "--engine", "transformers", "--tiny", "--repeats", "1"]
    subprocess.run([*command, "--json", result], check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = json.loads(result.read_text())
    tokens = found["tokens"]
    assert tokens["stage, transformers"] == tokens["bare, transformers"] == tokens["bare with logps, transformers"]
    assert len({tuple(ids) for ids in tokens["stage, transformers"]}) > 24, "32 responses, each drawn by itself"
    assert all(speed > 0 for speeds in found["tokens_per_second"].values() for speed in speeds)
