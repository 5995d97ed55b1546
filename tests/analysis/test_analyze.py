"""Score distance, drift, gradient places, calibration and lengths, against plain computation and sums by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats

from flat_pairs import pair_of
from regretless.analysis.analyze import AnalyzeConfig, affordable, run
from regretless.analysis.calibration import calibration
from regretless.analysis.drift import evenly, logged
from regretless.analysis.gradients import gradient_places, tenths
from regretless.analysis.lengths import response_lengths
from regretless.core.files import read_json, write_json, write_jsonl
from regretless.core.intervals import mean_by_prompt, share_by_prompt, wilson
from regretless.data.columns import Response
from regretless.data.rows import write_parquet, write_records
from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.modeling.training_folder import Trained
from regretless.objectives import build
from regretless.world.tiny_models import smoke_architecture
from regretless.world.tokenizer import build_tokenizer

# --- estimates -------------------------------------------------------------------------------------------------------


def test_mean_by_prompt_when_prompts_have_several_rows_then_value_and_error_are_those_of_the_ratio() -> None:
    # Prompt a: 3 tokens with 1 + 5; prompt b: 1 token with 2. The mean is 8 / 4; residuals are 6 − 2·3 and 2 − 2·1.
    assert mean_by_prompt([1, 5, 2], [1, 2, 1], ["a", "a", "b"]) == {
        "value": 2.0,
        "standard_error": 0.0,
        "low": 2.0,
        "high": 2.0,
        "n": 4,
        "prompts": 2,
    }
    # Residuals 4 − 3·1 and 2 − 3·1 and 3 − 3·1: √(3/2 · 2) / 3; with one row a prompt, that is sd / √n.
    found = mean_by_prompt([4, 2, 3], [1, 1, 1], "abc")
    assert found["standard_error"] == pytest.approx(np.std([4, 2, 3], ddof=1) / math.sqrt(3)) == math.sqrt(3) / 3
    assert found["high"] == pytest.approx(3 + 4.302653 * math.sqrt(3) / 3)  # t with 2 degrees of freedom
    assert mean_by_prompt([4, 2], [1, 1], "aa")["standard_error"] is None
    assert mean_by_prompt([], [], [])["value"] is None


# --- gradients -------------------------------------------------------------------------------------------------------


def harmonic(count: int) -> float:
    return sum(1 / number for number in range(1, count + 1))


def paper_weights(length: int) -> list[float]:
    """1 + w_s = 1 + H_{T−1} − H_{T−s}: the derivative of RePO's score by the log-probability of token s, over β."""
    return [1 + harmonic(length - 1) - harmonic(length - place) for place in range(1, length + 1)]


LENGTHS = ((7, 4), (20, 13), (5, 5))
TOKENS = [
    TokenizedPair(
        pair_id=str(number),
        prompt_ids=(number,),
        chosen=TokenizedSide(tuple(range(chosen)), {"behavior": (-0.5,) * chosen}),
        rejected=TokenizedSide(tuple(range(100, 100 + rejected)), {"behavior": (-0.6,) * rejected}),
        source=f"pairs:{number}",
        kind="original",
    )
    for number, (chosen, rejected) in enumerate(LENGTHS)
]
REFERENCE = {
    (pair.prompt_ids, ids): np.linspace(-0.1, -0.9, len(ids), dtype=np.float32)
    for pair in TOKENS
    for ids in (pair.chosen.ids, pair.rejected.ids)
}


def places(name: str, **settings: Any) -> dict[str, Any]:
    return gradient_places(build(name, **settings), TOKENS, REFERENCE, lambda token: token % 4 == 3)


def values(entries: list[dict[str, Any]]) -> list[float]:
    return [entry["value"] for entry in entries]


def test_tenths_when_a_token_lies_on_a_border_then_it_counts_on_both_sides() -> None:
    assert tenths(np.ones(7)) == pytest.approx([0.1] * 10)
    assert tenths(np.array([1.0, 3.0])) == pytest.approx([0.05] * 5 + [0.15] * 5)
    # The first of four tokens reaches to the middle of the third tenth.
    assert tenths(np.array([4.0, 0, 0, 0])) == pytest.approx([0.4, 0.4, 0.2] + [0] * 7)


def test_gradient_of_repo_when_differentiated_then_it_lies_where_one_plus_w_says() -> None:
    for name in ("repo", "repo_det"):
        found = places(name, beta=0.3)
        for side, column in (("chosen", 0), ("rejected", 1)):
            exact = [np.array(paper_weights(lengths[column])) for lengths in LENGTHS]
            assert values(found[side]["shares"]) == pytest.approx(np.mean([tenths(w) for w in exact], axis=0).tolist())
            last = np.mean([w[-1] * len(w) / w.sum() for w in exact])
            assert found[side]["near_end"][0]["value"] == pytest.approx(last)
            # Ten tokens before the end: only responses that long.
            long = [w for w in exact if len(w) >= 10]
            tenth = np.mean([w[-10] * len(w) / w.sum() for w in long])
            assert found[side]["near_end"][9]["value"] == pytest.approx(tenth)
            assert found[side]["near_end"][9]["n"] == len(long)


@pytest.mark.parametrize("name", ["dpo", "ipo", "rpo", "kto", "tdpo", "sft"])
def test_gradient_of_the_other_methods_when_differentiated_then_it_is_spread_evenly(name: str) -> None:
    found = places(name)
    assert values(found["chosen"]["shares"]) == pytest.approx([0.1] * 10)
    assert values(found["chosen"]["near_end"]) == pytest.approx([1.0] * 10)
    if name == "sft":
        assert found["rejected"] is None
    else:
        assert values(found["rejected"]["shares"]) == pytest.approx([0.1] * 10)


def test_gradient_of_repo_when_weights_count_steps_then_it_is_even_inside_a_step() -> None:
    # The third pair's chosen response: tokens 0-3 are a step, token 4 the next: weights 1 and 1 + H_1 − H_0 = 2.
    only = gradient_places(build("repo_det", granularity="step"), TOKENS[2:], REFERENCE, lambda token: token % 4 == 3)
    assert values(only["chosen"]["shares"]) == pytest.approx(tenths(np.array([1.0, 1, 1, 1, 2])).tolist())


def test_gradient_when_a_response_is_in_several_pairs_then_it_counts_once_with_their_sum() -> None:
    first = TOKENS[0]
    longer = dataclasses.replace(first, rejected=TokenizedSide(tuple(range(100, 107)), {"behavior": (-0.6,) * 7}))
    reference = {**REFERENCE, (first.prompt_ids, longer.rejected.ids): np.full(7, -0.5, dtype=np.float32)}
    pairs = [first, longer, TOKENS[2]]
    # Behind the length that both sides of a pair have, a token counts half.
    found = gradient_places(build("dpo", ld_alpha=0.5), pairs, reference, lambda _: False)
    assert (found["chosen"]["responses"], found["rejected"]["responses"]) == (2, 3)
    summed = tenths(np.array([2.0] * 4 + [1.5] * 3))
    assert values(found["chosen"]["shares"]) == pytest.approx(((summed + 0.1) / 2).tolist())


def test_gradient_when_pairs_lack_what_the_method_needs_then_they_are_counted() -> None:
    bare = [dataclasses.replace(pair, chosen=TokenizedSide(pair.chosen.ids)) for pair in TOKENS[:2]]
    found = gradient_places(build("repo"), [*bare, TOKENS[2]], REFERENCE, lambda _: False)
    assert (found["without_behavior_logps"], found["chosen"]["responses"]) == (2, 1)
    assert gradient_places(build("repo"), bare, REFERENCE, lambda _: False)["chosen"] is None


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_when_confidences_are_constructed_then_bins_ece_and_brier_are_those_of_the_construction() -> None:
    def margin(confidence: float, right: bool) -> float:
        logit = math.log(confidence / (1 - confidence))
        return logit if right else -logit

    # Ten pairs at 0.62 of which seven are right, five at 0.93 of which four are, and one tie.
    margins = [margin(0.62, number < 7) for number in range(10)] + [margin(0.93, number < 4) for number in range(5)]
    found = calibration([*margins, 0.0], list(range(16)))
    assert (found["pairs"], found["ties"]) == (16, 1)
    low, high = found["bins"]
    assert (low["from"], low["to"], low["pairs"], high["from"], high["to"], high["pairs"]) == (
        0.6,
        0.65,
        10,
        0.9,
        0.95,
        5,
    )
    assert (low["confidence"], low["accuracy"]) == (pytest.approx(0.62), 0.7)
    assert (high["confidence"], high["accuracy"]) == (pytest.approx(0.93), 0.8)
    # Wilson's interval for 7 of 10, as published tables have it.
    assert (low["low"], low["high"]) == (pytest.approx(0.3968, abs=1e-4), pytest.approx(0.8922, abs=1e-4))
    assert found["ece"] == pytest.approx((10 * 0.08 + 5 * 0.13) / 15)
    assert found["accuracy"]["value"] == pytest.approx(11 / 15)
    squares = 7 * 0.38**2 + 3 * 0.62**2 + 4 * 0.07**2 + 1 * 0.93**2 + 0.5**2
    assert found["brier"]["value"] == pytest.approx(squares / 16)


def test_calibration_when_margins_are_extreme_or_all_ties_then_numbers_stay_finite() -> None:
    found = calibration([900.0, -900.0], ["a", "b"])
    assert found["bins"][0]["pairs"] == 2 and found["bins"][0]["to"] == 1.0
    assert (found["ece"], found["brier"]["value"]) == (0.5, 0.5)
    ties = calibration([0.0, 0.0], ["a", "b"])
    assert (ties["bins"], ties["ece"], ties["accuracy"]["value"], ties["brier"]["value"]) == ([], None, None, 0.25)


def test_share_of_pairs_when_prompts_are_few_then_its_interval_stays_within_0_and_1() -> None:
    # Mean ± t standard errors would be −0.05 to 1.55, and 1 ± 0 where all are right.
    three_of_four = calibration([2.0, 2.0, 2.0, -2.0], "abcd")
    assert 0.1 < three_of_four["accuracy"]["low"] < 0.2 and 0.9 < three_of_four["accuracy"]["high"] < 1
    assert three_of_four["brier"]["low"] == 0 and three_of_four["brier"]["high"] < 1
    right = share_by_prompt([True] * 6, "aabbcc")
    quantile = 4.302653  # t with 2 degrees of freedom
    assert (right["low"], right["high"]) == (pytest.approx(3 / (3 + quantile**2), abs=1e-6), pytest.approx(1.0))
    # Many prompts of one pair: Wilson's interval. Pairs that repeat their prompt's result add nothing.
    hits = [number % 10 < 7 for number in range(4000)]
    many, twice = share_by_prompt(hits, range(4000)), share_by_prompt(hits * 2, [*range(4000)] * 2)
    plain = wilson(2800, 4000)
    for found in (many, twice):
        assert (found["low"], found["high"]) == (
            pytest.approx(plain.low, abs=1e-5),
            pytest.approx(plain.high, abs=1e-5),
        )


# --- lengths and steps -----------------------------------------------------------------------------------------------


def test_lengths_when_models_answered_the_same_problems_then_the_change_is_paired(tmp_path: Path) -> None:
    def write(label: str, sizes: dict[str, int], ids: bool = True) -> Path:
        rows = [
            Response(
                prompt_id=key, response_id=key, prompt="p", response="x" * size, token_ids=[1] * size if ids else None
            )
            for key, size in sizes.items()
        ]
        write_records(tmp_path / f"{label}.parquet", rows)
        return tmp_path / f"{label}.parquet"

    files = {"base": write("base", {"a": 4, "b": 6, "c": 5}), "dpo": write("dpo", {"b": 9, "a": 6})}
    found = response_lengths(files)
    assert found["unit"] == "tokens" and found["models"]["base"]["change"] is None
    assert found["models"]["base"]["length"]["value"] == 5
    assert found["models"]["dpo"]["length"]["value"] == 7.5
    assert found["models"]["dpo"]["change"]["value"] == 2.5
    assert found["models"]["dpo"]["change"]["standard_error"] == 0.5
    files["repo"] = write("repo", {"a": 2}, ids=False)
    assert response_lengths(files)["unit"] == "characters"


def test_checkpoints_when_more_than_wanted_then_they_are_spread_over_the_training() -> None:
    assert evenly([10, 20, 30], 8) == [10, 20, 30]
    assert evenly(list(range(10, 100, 10)), 2) == [30, 70]
    assert evenly([10, 20, 30], 1) == [20]
    assert evenly([10, 20, 30], 0) == []


@pytest.mark.parametrize(
    ("tokens", "saved", "count"),
    # 100 pairs of 20 tokens: 2,000 for each of two models, and for one checkpoint.
    [([9_000, 20_000], 0, 50), ([20_000], 1, 33), ([10], 0, 8), ([], 0, 100)],
)
def test_sample_when_not_set_then_its_scores_take_a_tenth_of_the_tokens_that_training_computed(
    tokens: list[int], saved: int, count: int, tmp_path: Path
) -> None:
    write_json(tmp_path / "trainer_state.json", {"log_history": [{"num_tokens": number} for number in tokens]})
    for number in range(saved):
        write_json(tmp_path / f"checkpoint-{number + 1}" / "trainer_state.json", {"global_step": number + 1})
    side = TokenizedSide(tuple(range(5)))
    pairs = [
        TokenizedPair(
            pair_id=str(number), prompt_ids=tuple(range(10)), chosen=side, rejected=side, source="a:1", kind="original"
        )
        for number in range(100)
    ]
    policies = {"dpo": Trained(ModelConfig(name_or_path="m"), tmp_path)}
    assert affordable(AnalyzeConfig(), pairs, policies) == count


def test_log_when_read_for_drift_then_only_training_lines_with_log_probabilities_count() -> None:
    lines = [
        {"step": 5, "loss": 0.7, "logps/chosen": -9.0, "grad_norm": 1.0},
        {"step": 5, "eval_loss": 0.7, "eval_logps/chosen": -8.0},
        {"step": 10, "loss": 0.6},
        {"step": 10, "train_loss": 0.65},
    ]
    assert logged(lines) == [{"step": 5, "logps/chosen": -9.0}]


# --- the stage, on models --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    architecture = smoke_architecture("qwen3", len(build_tokenizer())) | {"initializer_range": 0.3}
    return ModelConfig(architecture=architecture, tokenizer=str(folder))


ROWS = [
    ("Tom has 7 apples. Tom buys 2. How many?\n", "7+2=9\n\\boxed{9}", "7-2=5\n\\boxed{5}"),
    ("Tom has 7 apples. Tom buys 2. How many?\n", "7+2=9\n\\boxed{9}", "7+2=8\n\\boxed{8}"),
    ("Tom has 3 apples. Tom buys 4. How many?\n", "3+4=7\n\\boxed{7}", "\\boxed{1}"),
]


def plain(model: ModelConfig) -> dict[tuple[str, str], np.ndarray]:
    """Log-probabilities of every distinct response, one sequence at a time by the model as it is."""
    network, tokenizer = load_model(model), load_tokenizer(model)
    found = {}
    for prompt, *sides in ROWS:
        for text in sides:
            before = tokenizer(prompt)["input_ids"]
            ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                logits = network(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1].double()
            found[prompt, text] = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].numpy()
    return found


def test_analyze_when_models_are_known_then_distance_and_drift_are_those_of_plain_forward_passes(
    model: ModelConfig, tmp_path: Path
) -> None:
    rows = [pair_of(prompt=p, chosen=c, rejected=r, pair_id=str(n), prompt_id=p) for n, (p, c, r) in enumerate(ROWS)]
    masked = pair_of(prompt=ROWS[0][0], chosen=ROWS[0][1], rejected="7+2", kind="masked", rejected_complete=False)
    write_records(tmp_path / "pairs.jsonl", [*rows, masked])
    others = {seed: model.model_copy(update={"init_seed": seed}) for seed in (1, 2)}
    # A trained model of 20 steps with a checkpoint at 10, one at its end, and one that was cut off.
    folder = tmp_path / "dpo"
    for step in (10, 20):
        load_model(others[step // 10]).save_pretrained(folder / f"checkpoint-{step}")
        load_tokenizer(model).save_pretrained(folder / f"checkpoint-{step}")
        write_json(folder / f"checkpoint-{step}" / "trainer_state.json", {"global_step": step})
    write_json(folder / "checkpoint-15" / "trainer_state.json", {"global_step": 1})
    log = [{"step": 5, "loss": 0.7, "logps/chosen": -9.0}]
    write_json(folder / "trainer_state.json", {"global_step": 20, "log_history": log})
    write_jsonl(
        folder / "pair_scores.jsonl",
        [{"pair_id": str(number), "chosen_reward": 1.0 + number, "rejected_reward": 2.0} for number in range(3)],
    )
    policies = {"dpo": Trained(others[2], folder, "dpo", {"beta": 0.1}), "mine": Trained(others[1], tmp_path / "none")}
    summary = run(AnalyzeConfig(pairs=1), tmp_path / "pairs.jsonl", model, policies, tmp_path / "out")
    assert (summary["sample"], summary["policies"]) == (3, 2)

    base, first, second = plain(model), plain(others[1]), plain(others[2])
    distances = read_json(tmp_path / "out" / "score_distance.json")["models"]
    assert [(row["first"], row["second"]) for row in distances] == [("base", "dpo"), ("base", "mine"), ("dpo", "mine")]
    tokens = sum(len(logps) for logps in base.values())  # the response in two pairs once
    for row, one, other in zip(distances, (base, base, second), (second, first, first), strict=True):
        wanted = sum(((one[key] - other[key]) ** 2).sum() for key in base) / tokens
        assert (row["value"], row["n"], row["prompts"]) == (pytest.approx(wanted, rel=1e-4), tokens, 2)
        assert row["standard_error"] > 0

    drift = read_json(tmp_path / "out" / "drift.json")["policies"]
    assert drift["dpo"]["logged"] == [{"step": 5, "logps/chosen": -9.0}]
    assert [entry["step"] for entry in drift["dpo"]["points"]] == [0, 10, 20]
    assert [entry["step"] for entry in drift["mine"]["points"]] == [0, None]
    chosen = [(ROWS[0][0], ROWS[0][1]), (ROWS[2][0], ROWS[2][1])]
    for entry, scores in zip(drift["dpo"]["points"], (base, first, second), strict=True):
        found = entry["chosen"]
        assert found["per_response"]["value"] == pytest.approx(np.mean([scores[key].sum() for key in chosen]), rel=1e-4)
        joined = np.concatenate([scores[key] for key in chosen])
        assert found["per_token"]["value"] == pytest.approx(joined.mean(), rel=1e-4)
        change = np.mean([(scores[key] - base[key]).sum() for key in chosen])
        assert found["change"]["value"] == pytest.approx(change, rel=1e-3, abs=1e-4)

    # Margins −1, 0 and 1 of the held-out pairs.
    (held_out,) = read_json(tmp_path / "out" / "calibration.json")["policies"].values()
    assert (held_out["pairs"], held_out["ties"], held_out["accuracy"]["value"]) == (3, 1, 0.5)
    assert list(read_json(tmp_path / "out" / "gradients.json")["policies"]) == ["dpo"]
    assert json.loads((tmp_path / "out" / "lengths.json").read_text()) == {"benchmarks": {}}


def test_analyze_when_a_bfloat16_model_was_trained_in_float32_then_the_type_makes_no_difference(
    model: ModelConfig, tmp_path: Path
) -> None:
    rows = [pair_of(prompt=p, chosen=c, rejected=r, pair_id=str(n), prompt_id=p) for n, (p, c, r) in enumerate(ROWS)]
    write_records(tmp_path / "pairs.jsonl", rows)
    start = load_model(model).to(torch.bfloat16)
    for name, dtype in (("start", torch.bfloat16), ("trained", torch.float32)):
        start.to(dtype).save_pretrained(tmp_path / name)
        load_tokenizer(model).save_pretrained(tmp_path / name)
    reference, trained = (ModelConfig(name_or_path=str(tmp_path / name)) for name in ("start", "trained"))
    run(AnalyzeConfig(), tmp_path / "pairs.jsonl", reference, {"same": Trained(trained, tmp_path)}, tmp_path / "out")
    (distance,) = read_json(tmp_path / "out" / "score_distance.json")["models"]
    assert distance["value"] == 0.0
    entry = read_json(tmp_path / "out" / "token_rewards.json")["pairs"][0]["responses"][0]
    assert set(entry["policies"]["same"]["reward"]) == {0.0}


def test_analyze_when_regret_was_measured_then_scores_are_compared_and_shown_beside_it(
    model: ModelConfig, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(model)
    rows, measured, table = [], [], []
    for number, (prompt, *sides) in enumerate(ROWS[1:]):
        names = [f"{number}-{side}" for side in ("right", "wrong")]
        rows.append(pair_of(prompt=prompt, chosen=sides[0], rejected=sides[1], pair_id=str(number), prompt_id=prompt))
        for name, text in zip(names, sides, strict=True):
            ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            known = {"prompt_token_ids": tokenizer(prompt)["input_ids"], "token_ids": ids, "logps": [-0.5] * len(ids)}
            measured.append(Response(prompt_id=prompt, response_id=name, prompt=prompt, response=text, **known))
            for start, end, regret in ((0, 3, 1.0), (3, len(ids), 2.0)):
                numbers = {"start": start, "end": end, "regret": regret, "regret_low": 0.0, "regret_high": 3.0}
                of_unit = {"response_id": name, "outcome": float(name.endswith("right")), "alpha": 0.5, **numbers}
                table.append(of_unit | {"local": regret - 0.25, "future": 0.25})
        rows[-1] = dataclasses.replace(
            rows[-1],
            chosen=dataclasses.replace(rows[-1].chosen, id=names[0]),
            rejected=dataclasses.replace(rows[-1].rejected, id=names[1]),
        )
    write_records(tmp_path / "pairs.jsonl", rows)
    write_records(tmp_path / "responses.parquet", measured)
    write_parquet(tmp_path / "regret.parquet", pa.Table.from_pylist(table))
    other = Trained(model.model_copy(update={"init_seed": 1}), tmp_path / "none")
    settings = {"rollout": tmp_path}
    run(AnalyzeConfig(), tmp_path / "pairs.jsonl", model, {"mine": other}, tmp_path / "out", **settings)

    policy, reference = plain(other.model), plain(model)
    pairs = read_json(tmp_path / "out" / "token_rewards.json")["pairs"]
    assert len(pairs) == 2
    for pair in pairs:
        prompt, *texts = ROWS[1 + int(pair["pair_id"])]
        for shown, text in zip(pair["responses"], texts, strict=True):
            assert shown["measured"]["alpha"] == 0.5
            first, last = shown["measured"]["units"]
            assert (first["start"], last["end"], last["regret"]) == (0, len(shown["tokens"]), 2.0)
            ratio = policy[prompt, text] - reference[prompt, text]
            ahead = (policy[prompt, text] + 0.5)[3:].sum()
            read = {"dpo": -ratio[:3].sum(), "repo": -ratio[:3].sum() - ahead}
            assert {name: first["policies"]["mine"][name] for name in read} == pytest.approx(read, abs=1e-4)
    content = read_json(tmp_path / "out" / "regret_calibration.json")
    assert (content["responses"], list(content["policies"])) == (4, ["base", "mine"])
    right = content["policies"]["mine"]["dpo"]["units"]["right"]["0.5"]
    minus = np.concatenate([np.add.reduceat(reference[key] - policy[key], [0, 3]) for key in [r[:2] for r in ROWS[1:]]])
    assert right["value"] == pytest.approx(stats.spearmanr(minus, [1, 2, 1, 2])[0])
    # The same numbers as columns: 4 responses × 2 units × 1 α × (base, mine) × 3 methods.
    table = pq.read_table(tmp_path / "out" / "unit_regret.parquet").to_pylist()
    assert len(table) == 48
    of_dpo = [row for row in table if (row["policy"], row["method"], row["outcome"]) == ("mine", "dpo", 1.0)]
    assert [row["own"] for row in of_dpo] == pytest.approx(minus, abs=1e-4)
    assert [row["regret"] for row in of_dpo] == [1.0, 2.0, 1.0, 2.0]
