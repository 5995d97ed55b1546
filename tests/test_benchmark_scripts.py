"""The benchmark scripts: their data, their count of operations, and three of them run on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


def test_queries_when_one_pair_has_a_longer_sequence_then_all_pairs_of_its_query_are_left_out() -> None:
    from pairs import queries_up_to

    pairs = [
        {"prompt_ids": [1], "chosen_ids": [3], "rejected_ids": [4]},
        {"prompt_ids": [1], "chosen_ids": [3], "rejected_ids": [4, 5, 6]},
        {"prompt_ids": [2], "chosen_ids": [3, 4], "rejected_ids": [5]},
    ]
    assert queries_up_to(pairs, 3) == pairs[2:]
    assert queries_up_to(pairs, 4) == pairs


def test_tokens_when_pairs_share_answers_then_each_counts_once_and_a_masked_one_not_at_all() -> None:
    from pairs import times_fewer_tokens

    pairs = [
        {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 7], "rejected_ids": [5]},
        {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 7], "rejected_ids": [3, 4]},
    ]
    assert times_fewer_tokens(pairs) == (4 * 2 + 3 + 1 + 3 + 2) / (2 + 3 + 1)


def test_conversations_when_they_part_late_then_the_turns_before_count_once() -> None:
    from pairs import conversation_pairs, times_fewer_tokens

    pairs = conversation_pairs(2, 2, 2, prompt=10, turns=4, part_at=3, turn=20, vocabulary=5000)
    assert len(pairs) == 8
    read = distinct = 0
    for query in (pairs[:4], pairs[4:]):
        responses = [pair[side] for pair in query for side in ("chosen_ids", "rejected_ids")]
        first, second = query[0]["chosen_ids"], query[0]["rejected_ids"]
        shared = next(place for place, both in enumerate(zip(first, second, strict=False)) if both[0] != both[1])
        assert 20 < shared < 70
        assert all(ids[:shared] == first[:shared] for ids in responses)
        assert len({ids[shared] for ids in responses}) == 4
        prompt = len(query[0]["prompt_ids"])
        read += sum(prompt + len(ids) for ids in responses)
        distinct += prompt + shared + sum(len(ids) - shared for ids in {tuple(ids) for ids in responses})
    assert times_fewer_tokens(pairs) == read / distinct


def test_tokens_of_a_query_when_counted_by_hand_then_they_agree() -> None:
    from responses_per_query import query_tokens

    pairs = [{"prompt_ids": [1, 2], "chosen_ids": [c] * 3, "rejected_ids": [r] * 3} for c in (3, 4) for r in (5, 6)]
    counts = {"pairwise": 40, "distinct": 10, "computed": 10, "recomputed": 0, "cut into pairs": 10}
    assert query_tokens(pairs, 100) == counts
    # Two responses a row, or a pair a micro-batch; a response's last token is not read.
    assert query_tokens(pairs, 8) == counts | {"computed": 12, "recomputed": 6, "cut into pairs": 24}


def test_cost_on_paper_when_printed_then_it_is_the_table_of_the_docs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paper_cost import main

    monkeypatch.setattr(sys, "argv", ["paper_cost.py"])
    main()
    table, assumed = capsys.readouterr().out.strip().split("\n\n")
    page = (FOLDER.parent / "docs/scale.md").read_text()
    assert table in page
    assert assumed.removeprefix("assumed: ") in " ".join(page.split())


PAIRS = [
    {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 6], "rejected_ids": [5]},
    {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 6], "rejected_ids": [3, 4]},
    {"prompt_ids": [8, 1], "chosen_ids": [3, 4], "rejected_ids": [5, 2]},
]
"""Distinct responses of 3, 1, 2 and 2 tokens; their last ones are predicted only. One is a beginning of another."""


def test_attention_of_the_limit_when_counted_by_hand_then_it_is_what_tokens_see() -> None:
    from limit import products

    attention = sum(product.flops for product in products(SHAPE, 7, 1, PAIRS) if product.part == "attention")
    # Prompts: 1 + 2 each. Responses in the row have 2, 0, 1 and 1 tokens: 3 + 4, and 3 for each single one.
    seen = 3 + (3 + 4) + 3 + 3 + 3
    assert attention == pytest.approx(12 * 2 * seen)
    # 2 tokens of a prompt, 17 that both begin with and 2 and 1 of their own: what comes before is seen by all.
    begin = list(range(30, 47))
    pair = {"prompt_ids": [1, 2], "chosen_ids": [*begin, 3, 4, 5], "rejected_ids": [*begin, 6, 7]}
    attention = sum(product.flops for product in products(SHAPE, 7, 1, [pair]) if product.part == "attention")
    assert attention == pytest.approx(12 * 2 * (sum(range(1, 20)) + 20 + 21 + 20))


def test_products_of_the_limit_when_a_step_is_counted_by_torch_then_they_are_its_products() -> None:
    import torch
    from limit import products, seconds
    from peft import LoraConfig, get_peft_model
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry
    from transformers import AutoConfig, AutoModelForCausalLM

    from regretless.modeling.forward import grouped, response_scores
    from regretless.modeling.layout import lay_out

    shape = SHAPE | {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 6,
    }
    config = AutoConfig.for_model("qwen3", vocab_size=17, tie_word_embeddings=True, **shape)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    items = [
        (tuple(pair["prompt_ids"]), tuple(pair[side])) for pair in PAIRS for side in ("chosen_ids", "rejected_ids")
    ]
    layout, _ = lay_out(items)
    counted = []

    class Counter(TorchDispatchMode):
        """Not FlopCounterMode: its record of modules does not stand the head's call within an autograd function."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
                left, right = args[-2:]
                counted.append(flop_registry[torch.ops.aten.mm](left, right, out_val=result))
            return result

    with Counter(), grouped(model):
        response_scores(model, layout).logps.sum().backward()
    needed = products(shape, 17, 4, PAIRS)
    assert sum(product.flops for product in needed if product.part != "attention") == sum(counted)
    measured = seconds(needed, torch.float32, "cpu", 1)
    assert measured.keys() == {"frozen weights", "adapters", "head", "attention"}
    assert min(measured.values()) > 0


@pytest.mark.extended
@pytest.mark.slow
def test_gpu_script_when_run_in_miniature_then_shared_and_plain_gradients_agree(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, FOLDER / "gpu.py", "--tiny", "--skip-trl", "--repeats", "1", "--steps", "2"]
    # Kernels are compiled in the process itself, instead of in processes that take longer to start.
    here = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    subprocess.run([*command, "--json", result], check=True, cwd=tmp_path, env=os.environ | here)
    found = json.loads(result.read_text())
    assert found["float32"]["gradient_relative"] < 1e-5
    assert found["bfloat16"]["gradient_relative"] < 0.1
    assert found["bfloat16, layers compiled"]["gradient_relative"] < 0.1
    assert set(found["runs"]) == {"lengths", "2×2", "4 responses", "layers compiled", "checkpointing"}
    for runs in found["runs"].values():
        assert runs["ours"][0]["pairs_per_second"] > 0
        # Lengths of rows differ, and nothing is compiled again for them.
        assert runs["ours"][0]["compilations"] == 0


@pytest.mark.slow
def test_gpu_script_when_a_worker_fails_or_the_time_is_over_then_this_is_named_and_the_rest_is_measured() -> None:
    from gpu import Measured
    from pairs import synthetic_pairs
    from sides import SMALL_QWEN3, Case

    tiny = {**SMALL_QWEN3, "num_hidden_layers": 1}
    case = Case("tiny", 64, synthetic_pairs(1, 2, 2, 5, 5, 64), pairs_per_step=4, model=tiny)
    measured = Measured(time.monotonic() + 300, None)
    assert not measured.add("wrong", case, {"ours": ("ours", {"objective": "dpo", "no_such_setting": 1})})
    assert measured.add("right", case, {"ours": ("ours", {})})
    measured.end = time.monotonic()
    assert not measured.add("late", case, {"ours": ("ours", {})})
    assert not measured.add("right", case, {"ours": ("ours", {})})
    assert measured.missing == {"wrong": "failed", "late": "no time left", "repeat 2 of right": "no time left"}
    assert list(measured.runs) == ["right"] and len(measured.runs["right"]["ours"]) == 1


def test_gpu_script_when_a_micro_batch_of_trl_or_a_check_fails_then_it_is_named_and_the_others_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu
    from sides import Case

    def measure(side: str, case: Case, options: dict[str, Any], until: float) -> dict[str, Any]:
        size = options["per_device_train_batch_size"]
        if size == 16:
            raise SystemExit("out of memory")
        return {"pairs_per_second": size}

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(gpu, "agree", lambda case, until: {"loss_gap": 0.0})
    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "check", fail)
    measured = gpu.Measured(time.monotonic() + 300, None)
    assert gpu.checks(measured, {}, 64, 5, 5, "cpu") == {}
    best = gpu.trl_best(measured, Case("tiny", 64, PAIRS))
    assert best is not None and best["per_device_train_batch_size"] == 8
    assert measured.missing == {
        "check in float32": "failed",
        "check in bfloat16": "failed",
        "check in bfloat16, layers compiled": "failed",
        "TRL, micro-batch 16": "failed",
    }


@pytest.mark.slow
def test_sampling_script_when_run_in_miniature_then_stage_and_bare_loops_have_the_same_greedy_responses(
    tmp_path: Path,
) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, FOLDER / "sampling.py", "--engine", "transformers", "--tiny", "--repeats", "1"]
    subprocess.run(
        [*command, "--greedy", "--json", result], check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = json.loads(result.read_text())
    tokens = found["tokens"]
    assert tokens["stage, transformers"] == tokens["bare, transformers"] == tokens["bare with logps, transformers"]
    assert len({tuple(ids) for ids in tokens["stage, transformers"]}) == 4, "each prompt has its own"
    speeds = found["tokens_per_second"]
    assert all(speed > 0 for values in speeds.values() for speed in values)
    assert speeds["products alone, transformers"] > speeds["stage, transformers"], "it needs them, among others"


@pytest.mark.slow
def test_startup_script_when_run_then_each_row_has_its_seconds() -> None:
    command = [sys.executable, FOLDER / "startup.py", "--repeats", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    cells = [line.split("|")[1:3] for line in done.stdout.splitlines()[2:]]
    shown = {name.strip(" `"): float(value.split()[0]) for name, value in cells}
    assert len(shown) == 8 and min(shown.values()) > 0
    assert shown["regretless --help"] < 0.5 * shown["training on 100 pairs: imports and model"]
