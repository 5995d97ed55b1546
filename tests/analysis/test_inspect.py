"""The numbers of `inspect`, against plain forward passes and sums written out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flat_pairs import changed, pair_of
from regretless.analysis.inspect import InspectConfig, run
from regretless.core.errors import ConfigError
from regretless.data.columns import Pair
from regretless.data.contamination import Benchmarks
from regretless.data.rows import write_records
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer, tokenizer_fingerprint
from regretless.modeling.model_check import ModelCheck
from regretless.world.tiny_models import smoke_architecture

IM_END = 151645
PROMPT = 23
"""Tokens of the question in the chat template."""
QUESTION = [{"role": "user", "content": "How many trees?"}]
OBJECTIVES: dict[str, dict[str, Any]] = {"repo": {}, "dpo": {"beta": 0.1}, "repo_det": {"beta": 0.5}, "sft": {}}


@pytest.fixture(autouse=True)
def _without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of shared rows, which has tests of its own and takes long with so many tokens."""
    monkeypatch.setattr(ModelCheck, "run", lambda check: None)


@pytest.fixture(scope="module")
def policy(shared: Path) -> ModelConfig:
    tokenizer = str(shared / "data/tokenizers/qwen2")
    return ModelConfig(architecture=smoke_architecture("qwen3", 151646), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def plain(policy: ModelConfig) -> Any:
    """(text) → token ids and log-probabilities of an answer, one sequence at a time with the model as it is."""
    model, tokenizer = load_model(policy), load_tokenizer(policy)
    prompt = encode_prompt(tokenizer, QUESTION)

    def score(text: str) -> tuple[list[int], list[float]]:
        ids = [*tokenizer(text)["input_ids"], IM_END]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        logps = torch.log_softmax(logits.double(), dim=-1)[torch.arange(len(ids)), torch.tensor(ids)]
        return ids, logps.tolist()

    return score


@pytest.fixture(scope="module")
def pairs(policy: ModelConfig, plain: Any) -> list[Pair]:
    """Two correct and two wrong answers in four pairs, and one masked; written by a policy 0.25 nats less likely."""
    answers = {}
    for name, text in {"c1": "6 trees\nin all", "c2": "six", "w1": "7 trees, I think so", "w2": "five"}.items():
        ids, logps = plain(text)
        answers[name] = text, ids, [value - 0.25 for value in logps]
    fingerprint = tokenizer_fingerprint(load_tokenizer(policy))

    def pair(chosen: str, rejected: str, cut: int | None = None) -> Pair:
        (text, ids, logps), (other, other_ids, other_logps) = answers[chosen], answers[rejected]
        return pair_of(
            prompt=QUESTION,
            chosen=text,
            rejected=other[:7] if cut else other,
            chosen_token_ids=ids,
            rejected_token_ids=other_ids[:cut],
            chosen_logps=logps,
            rejected_logps=other_logps[:cut],
            logps_kind="raw",
            tokenizer=fingerprint,
            chosen_complete=True,
            rejected_complete=cut is None,
            chosen_model="writer",
            rejected_model="writer",
            kind="masked" if cut else "original",
        )

    return [*(pair(c, w) for c in ("c1", "c2") for w in ("w1", "w2")), pair("c1", "c1", cut=3)]


def inspect(
    path: Path, rows: list[Pair], policy: ModelConfig, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    write_records(path / "pairs.jsonl", rows)
    summary = run(InspectConfig(**settings), path / "pairs.jsonl", policy, path, OBJECTIVES)
    return json.loads((path / "inspect.json").read_text()), summary


def double_sum(policy: list[float], behavior: list[float]) -> float:
    """RePO's score at the start, β = 1, as the paper writes it (the log-ratio is zero)."""
    total, length = 0.0, len(policy)
    for position in range(length - 1):
        ahead = [policy[later] - behavior[later] for later in range(position + 1, length)]
        total += sum(ahead) / len(ahead)
    return total


def test_counts_when_responses_are_shared_then_distinct_tokens_are_counted_once(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    found, summary = inspect(tmp_path, [*pairs, pairs[0]], policy, sample=0)
    lengths = {pair.chosen.text: len(pair.chosen.token_ids or []) for pair in pairs} | {
        pair.rejected.text: len(pair.rejected.token_ids or []) for pair in pairs
    }
    c1, c2, w1, w2 = (lengths[text] for text in ("6 trees\nin all", "six", "7 trees, I think so", "five"))
    # Six pairs: c1 in four of them (once against its own first three tokens), c2 in two, w1 in three, w2 in two.
    pairwise = 12 * PROMPT + 4 * c1 + 3 + 2 * c2 + 3 * w1 + 2 * w2
    distinct = PROMPT + c1 + c2 + w1 + w2
    assert found["tokens"] == {
        "pairwise": pairwise,
        "distinct": distinct,
        "distinct_token_ratio": round(pairwise / distinct, 4),
        "continued": 0,
    }
    data = found["data"]
    assert (data["pairs"], data["original"], data["masked"], data["prompts"]) == (6, 5, 1, 1)
    assert (data["responses"], data["distinct_responses"], data["repeated_pairs"]) == (12, 5, 1)
    assert found["lengths"]["prompt"]["median"] == PROMPT
    assert found["lengths"]["chosen"]["max"] == c1
    assert found["steps"] == {}
    text = pairs[0].chosen.text
    stepwise = replace(pairs[0], chosen=replace(pairs[0].chosen, step_ends=[1, len(text)]))
    assert inspect(tmp_path, [stepwise], policy, sample=0)[0]["steps"]["chosen"]["mean"] == 2
    assert "objectives" not in found
    assert found["notes"] == [
        "1 of 6 pairs repeat an earlier one (same prompt, same responses): each is trained on as often as it occurs",
        "no model was loaded (inspect.sample is 0): no margins and no gap to the reference",
    ]
    assert summary["scored_pairs"] == 0


def test_pairs_when_some_contradict_each_other_then_a_note_counts_them(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    first = pairs[0]
    other_way = replace(first, chosen=first.rejected, rejected=first.chosen)
    found, _ = inspect(tmp_path, [*pairs, other_way], policy, sample=0)
    assert (found["data"]["repeated_pairs"], found["data"]["reversed_pairs"]) == (0, 2)
    assert found["notes"][0] == (
        f"2 of {len(pairs) + 1} pairs are also there with chosen and rejected exchanged: they contradict each other"
    )


def test_logps_when_no_model_could_have_written_the_token_then_a_note_counts_their_pairs(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    assert pairs[0].rejected.logps is not None
    values = pairs[0].rejected.logps[:-1]
    odd, rare = (changed(pairs[0], rejected_logps=[*values, last]) for last in (-9999.0, -99.0))
    found, _ = inspect(tmp_path, [odd, rare, *pairs[1:3]], policy, sample=0)
    assert found["data"]["impossible_behavior_logps"] == {"pairs": 1, "lowest": -9999.0}
    said = "1 of 4 pairs have behavior log-probabilities below -100 nats (the lowest: -9999), which no model gives"
    assert found["notes"][0].startswith(said)


def test_margins_when_the_policy_is_the_reference_then_dpo_starts_at_zero_and_repo_at_its_formula(
    policy: ModelConfig, pairs: list[Pair], plain: Any, tmp_path: Path
) -> None:
    found, _ = inspect(tmp_path, pairs[:4], policy, betas=[2.0])
    objectives = found["objectives"]
    assert list(objectives) == ["repo β=1", "repo β=2", "dpo β=0.1", "dpo β=2", "repo_det β=0.5", "repo_det β=2", "sft"]
    assert objectives["dpo β=0.1"]["margin"] | {"mean": 0.0} == dict.fromkeys(objectives["dpo β=0.1"]["margin"], 0.0)
    assert objectives["dpo β=0.1"]["loss"] == pytest.approx(np.log(2))
    assert (objectives["sft"]["margin"], objectives["sft"]["saturated"]) == (None, None)

    def margins(behavior: bool) -> list[float]:
        def score(text: Any, logps: list[float] | None) -> float:
            own = plain(text)[1]
            return double_sum(own, (logps or []) if behavior else [0.0] * len(own))

        return [score(p.chosen.text, p.chosen.logps) - score(p.rejected.text, p.rejected.logps) for p in pairs[:4]]

    repo, det = margins(behavior=True), margins(behavior=False)
    assert objectives["repo β=1"]["margin"]["mean"] == pytest.approx(np.mean(repo), abs=1e-4)
    assert objectives["repo β=2"]["margin"]["max"] == pytest.approx(2 * max(repo), abs=1e-4)
    assert objectives["repo_det β=0.5"]["margin"]["min"] == pytest.approx(0.5 * min(det), rel=1e-4)
    assert objectives["repo_det β=2"]["saturated"] == np.mean(np.abs(det) > 5)
    assert objectives["repo β=1"]["loss"] == pytest.approx(np.mean(np.logaddexp(0, -np.array(repo))), abs=1e-4)
    assert any(note.startswith("repo_det β=2: 75 % of pairs start with a margin") for note in found["notes"])


def test_behavior_when_stored_then_its_gap_to_reference_and_to_its_author_is_a_quarter_nat(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    found, _ = inspect(tmp_path, pairs, policy, rescore=True, behavior=policy)
    gap = found["behavior_minus_reference"]
    assert gap["chosen"]["nats_per_token"]["mean"] == pytest.approx(-0.25, abs=1e-4)
    assert gap["rejected"]["nats_per_token"]["max"] == pytest.approx(-0.25, abs=1e-4)
    # Distinct responses: the masked pair brings none.
    assert (gap["chosen"]["responses"], gap["rejected"]["responses"]) == (2, 2)
    assert gap["chosen"]["share_of_exact_zeros"] == 0
    entry = found["stored_minus_rescored"][policy.label]
    assert entry["responses"] == 4
    assert entry["tokens"] == gap["chosen"]["tokens"] + gap["rejected"]["tokens"]
    assert entry["mean"] == pytest.approx(-0.25, abs=1e-4)
    assert entry["max_distance"] == pytest.approx(0.25, abs=1e-4)
    assert entry["share_far"] == 1.0
    far = (
        f"{policy.label}: 100 % of the stored log-probabilities are more than 0.1 nats from those that this model gives"
    )
    assert sum(note.startswith(far) for note in found["notes"]) == 1


def test_rescore_when_authors_are_several_or_unknown_then_one_model_is_not_taken_for_all(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    unknown = changed(pairs[0], chosen_model=None, rejected_model=None)
    found, _ = inspect(tmp_path, [unknown], policy, rescore=True)
    assert found["stored_minus_rescored"] == {"unknown model": {"responses": 2}}
    with pytest.raises(ConfigError, match=r"generated by several models \(another, writer\); omit it"):
        inspect(tmp_path, [changed(pairs[0], chosen_model="another")], policy, rescore=True, behavior=policy)


def test_data_when_it_has_no_log_probabilities_then_the_rest_is_shown_and_it_says_so(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [
        changed(pair, chosen_logps=None, rejected_logps=None, chosen_score=3.0, rejected_score=3.0) for pair in pairs
    ]
    found, _ = inspect(tmp_path, bare, policy)
    repo = found["objectives"]["repo β=1"]
    assert (repo["pairs"], repo["without_behavior_logps"], repo["margin"], repo["saturated"]) == (0, 5, None, None)
    assert found["objectives"]["repo_det β=0.5"]["pairs"] == 5
    assert found["behavior_minus_reference"]["chosen"]["nats_per_token"] is None
    assert found["notes"][0] == (
        "no pair has behavior log-probabilities (the data has none): repo cannot use them without "
        "unknown_behavior=dirac, repo_det and others can"
    )
    assert found["notes"][1] == "5 of 5 pairs have equal scores on both sides: they express no preference"
    shown = capsys.readouterr().out
    assert "margin at the start" in shown and "behavior − reference" not in shown
    found, _ = inspect(tmp_path, [*bare[1:], changed(bare[0], chosen_score=2.5)], policy, sample=0)
    assert (found["data"]["equal_scores"], found["data"]["lower_scores"]) == (4, 1)
    assert "1 of 5 pairs have a lower score on the chosen side: check which side is the better one" in str(
        found["notes"]
    )


def test_margins_when_the_behavior_of_some_is_unknown_then_both_kinds_of_pairs_are_shown_by_themselves(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [pairs[0], *(changed(pair, rejected_logps=None) for pair in pairs[1:4])]
    objectives = {"repo": {"unknown_behavior": "dirac"}, "repo_det": {}}

    def started(of: list[Pair]) -> dict[str, Any]:
        write_records(tmp_path / "pairs.jsonl", of)
        run(InspectConfig(), tmp_path / "pairs.jsonl", policy, tmp_path, objectives)
        found: dict[str, Any] = json.loads((tmp_path / "inspect.json").read_text())["objectives"]
        return found

    both, known, unknown = started(rows), started(rows[:1])["repo β=1"], started(rows[1:])["repo_det β=1"]
    repo = both["repo β=1"]
    assert (repo["recorded"]["pairs"], repo["filled"]["pairs"], repo["without_behavior_logps"]) == (1, 3, 0)
    assert repo["recorded"]["margin"] == pytest.approx(known["margin"], abs=1e-6)
    assert repo["filled"]["margin"] == pytest.approx(unknown["margin"], abs=1e-6)
    assert repo["loss"] == pytest.approx((known["loss"] + 3 * unknown["loss"]) / 4, abs=1e-6)
    chosen, rejected = repo["filled"]["chosen"], repo["filled"]["rejected"]
    assert chosen["mean"] - rejected["mean"] == pytest.approx(unknown["margin"]["mean"], abs=1e-6)
    assert "recorded" not in known and "filled" not in both["repo_det β=1"]
    assert "scores at the start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        (({"chosen_complete": False},), (1, 0, 1)),
        (({"chosen_complete": False, "rejected_complete": False},), (1, 1, 0)),
        (({"kind": "masked", "rejected": "6 trees"},), (0, 1, 0)),
        (({},), (0, 0, 0)),
    ],
)
def test_sides_when_cut_then_they_are_counted_and_unmarked_ones_beside_them_are_noted(
    sides: tuple[dict[str, Any], ...], expected: tuple[int, int, int], policy: ModelConfig, tmp_path: Path
) -> None:
    texts: dict[str, Any] = {"prompt": QUESTION, "chosen": "6 trees in all", "rejected": "five"}
    found, _ = inspect(tmp_path, [pair_of(**{**texts, **side}) for side in sides], policy, sample=0)
    data = found["data"]
    assert (data["cut"]["chosen"], data["cut"]["rejected"], data["unmarked_beside_cut"]) == expected
    noted = [note for note in found["notes"] if "one that is not marked, which gets an end token" in note]
    assert len(noted) == expected[2]


def test_pairs_when_their_responses_have_different_models_then_they_are_counted_and_the_note_says_what_that_does(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    unknown = changed(pairs[1], chosen_model=None)
    found, _ = inspect(tmp_path, [changed(pairs[0], chosen_model="another"), unknown, pairs[2]], policy, sample=0)
    assert found["data"]["different_models"] == 1
    assert found["notes"][0].startswith("1 of 3 pairs compare responses of different models")


def test_prompts_when_recorded_with_other_tokens_then_they_are_counted(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    prompt = encode_prompt(load_tokenizer(policy), QUESTION)
    rows = [changed(pairs[0], prompt_token_ids=[*prompt[:-2], 0, 0]), changed(pairs[1], prompt_token_ids=prompt)]
    found, _ = inspect(tmp_path, rows, policy, sample=0)
    assert found["data"]["other_prompts"] == 1
    assert found["notes"][0].startswith(
        "1 of 2 pairs have responses that were recorded with other tokens of the prompt"
    )


def test_first_pairs_when_shown_then_the_assistants_tokens_are_trained_and_all_others_are_context(
    policy: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("assistant", "Oaks?"), ("user", '"All"'), ("assistant", "6é")]
    row = {
        "prompt": QUESTION,
        "chosen": [{"role": role, "content": content} for role, content in turns],
        "rejected": [{"role": "assistant", "content": "5"}],
    }
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    run(InspectConfig(sample=0, show=1), tmp_path / "rows.jsonl", policy, tmp_path, {"repo_det": {}})
    (shown,) = json.loads((tmp_path / "inspect.json").read_text())["shown"]
    start, end = "<|im_start|>", "<|im_end|>"
    between = f'\n{start}user\n"All"{end}\n{start}assistant\n'
    texts = [(part["side"], part["trained"], part["text"]) for part in shown["parts"]]
    assert texts[0][2].endswith(f"{start}user\nHow many trees?{end}\n{start}assistant\n")
    assert texts[0][:2] == ("prompt", False)
    assert texts[1:] == [
        ("chosen", True, f"Oaks?{end}"),
        ("chosen", False, between),
        ("chosen", True, f"6é{end}"),
        ("rejected", True, f"5{end}"),
    ]
    tokenizer = load_tokenizer(policy)
    assert [part["tokens"] for part in shown["parts"]] == [
        PROMPT,
        *(len(tokenizer(text)["input_ids"]) for *_, text in texts[1:]),
    ]
    assert all("".join(part["pieces"]) == part["text"] for part in shown["parts"] if "é" not in part["text"])
    printed = capsys.readouterr().out
    assert "rows.jsonl:1" in printed and "rows.jsonl:2" not in printed
    assert "trained" in printed and "·<|im_end|>" in printed
    assert "\\n" in printed and '\\"' not in printed, "line breaks as escapes, quotes as they are"


def test_refused_rows_when_there_are_some_then_they_are_counted_by_reason(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    rows = [*pairs[:2], changed(pairs[0], rejected=""), changed(pairs[0], rejected=pairs[0].chosen.text)]
    found, summary = inspect(tmp_path, rows, policy, sample=0, max_length=PROMPT + len(pairs[0].chosen.token_ids or []))
    assert summary["refused"] == found["data"]["refused"] == 3
    assert found["data"]["refused_because"] == {
        "rejected: empty completion": 1,
        "chosen and rejected are equal: the pair expresses no preference": 1,
        "rejected: too long, with its prompt, for max_length …; raise it, or set truncation=keep_start": 1,
    }
    lines = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == [1, 3, 4]


def test_sample_when_smaller_than_the_data_then_whole_prompts_are_scored(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    other = [{"role": "user", "content": "How many cars?"}]
    rows = [changed(pair, prompt=prompt) for prompt in (QUESTION, other) for pair in pairs[:4]]
    found, summary = inspect(tmp_path, rows, policy, sample=3)
    assert (summary["pairs"], summary["scored_pairs"]) == (8, 3), "a prompt gives no more than were asked for"
    found, summary = inspect(tmp_path / "five", rows, policy, sample=5)
    assert (summary["pairs"], summary["scored_pairs"]) == (8, 8)
    found, summary = inspect(tmp_path / "four", rows, policy, sample=4)
    assert (summary["pairs"], summary["scored_pairs"]) == (8, 4)
    assert found["objectives"]["dpo β=0.1"]["pairs"] == 4
    assert found["data"]["prompts"] == 2


def test_prompts_when_they_stand_in_a_benchmark_then_rows_and_problems_are_named(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path
) -> None:
    write_records(tmp_path / "pairs.jsonl", pairs[:2])
    benchmarks = Benchmarks({"forest": {"7": "how many trees", "8": "How many birds?"}})
    run(InspectConfig(sample=0), tmp_path / "pairs.jsonl", policy, tmp_path, OBJECTIVES, benchmarks=benchmarks)
    found = json.loads((tmp_path / "inspect.json").read_text())
    assert found["contaminated"] == [
        {"source": f"{tmp_path}/pairs.jsonl:{line}", "benchmark": "forest", "problem_id": "7", "both": "equal"}
        for line in (1, 2)
    ]
    assert found["notes"][0].startswith("forest: 1 of 2 problems stand in the training prompts")


def test_pairs_when_nearly_equal_then_they_and_the_earlier_ones_are_named(policy: ModelConfig, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "chosen": "six", "rejected": "five"} for prompt in ("How many?", "how many", "Which?")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(InspectConfig(sample=0), tmp_path / "rows.jsonl", policy, tmp_path, {"repo_det": {}})
    found = json.loads((tmp_path / "inspect.json").read_text())
    assert found["near_pairs"] == found["near_prompts"] == [[f"{tmp_path}/rows.jsonl:{line}" for line in (2, 1)]]
    notes = [note for note in found["notes"] if "differ from an earlier one in a few words" in note]
    assert [note.split(" differ")[0] for note in notes] == ["1 of 3 pairs", "1 of 3 prompts"]


def test_pairs_when_sorted_then_the_lowest_come_first_and_what_has_no_number_is_said(
    policy: ModelConfig, pairs: list[Pair], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = [(2.0, 1.0), (1.0, 3.0), (4.0, None), (1.0, 1.5)]
    rows = [
        changed(pair, chosen_score=one, rejected_score=other) for pair, (one, other) in zip(pairs, scored, strict=False)
    ]

    def shown(**settings: Any) -> list[tuple[int, float | None]]:
        found, _ = inspect(tmp_path, rows, policy, show=2, **settings)
        return [(int(pair["source"].rpartition(":")[2]), pair["value"]) for pair in found["shown"]]

    assert shown(sample=0) == [(1, None), (2, None)]
    assert shown(sample=0, sort="score") == [(2, -2.0), (4, -0.5)]
    assert "pairs.jsonl:2 (-2)" in capsys.readouterr().out
    assert shown(sample=0, sort="chosen_score") == [(2, 1.0), (4, 1.0)]
    found, _ = inspect(tmp_path, rows, policy)
    margins = shown(sort="repo_det")
    assert margins[0][1] == pytest.approx(found["objectives"]["repo_det β=0.5"]["margin"]["min"])
    assert margins[0][1] < margins[1][1]
    for name, settings, problem in (
        ("dpo", {}, "dpo gives no pair a margin before training"),
        ("repo_det", {"sample": 0}, "set inspect.sample"),
        ("simpo", {}, "name it in inspect.objectives"),
        ("rating", {"sample": 0}, r"no pair has a number rating.*chosen_score"),
    ):
        with pytest.raises(ConfigError, match=problem):
            shown(sort=name, **settings)


def test_lists_when_a_method_trains_on_them_then_they_are_counted_and_its_loss_is_over_them(
    policy: ModelConfig, pairs: list[Pair], plain: Any, tmp_path: Path
) -> None:
    def score(text: Any, logps: list[float] | None) -> float:
        return double_sum(plain(text)[1], logps or [])

    mixed = [pairs[0], pairs[2], pairs[1]]  # c1 > w1, c2 > w1, c1 > w2
    write_records(tmp_path / "pairs.jsonl", mixed)
    settings = InspectConfig(sort="repo_listwise", show=3)
    run(settings, tmp_path / "pairs.jsonl", policy, tmp_path, {"repo_listwise": {}, "dpo": {}})
    found = json.loads((tmp_path / "inspect.json").read_text())
    assert (found["lists"]["lists"], found["lists"]["responses"]["min"], found["lists"]["responses"]["max"]) == (
        2,
        2,
        3,
    )
    scores = [[score(side.text, side.logps) for side in (p.chosen, p.rejected)] for p in mixed if p.rejected]
    of_lists = [[scores[0][0], scores[0][1], scores[2][1]], scores[1]]
    expected = np.mean([np.logaddexp.reduce(one) - one[0] for one in of_lists])
    assert found["objectives"]["repo_listwise β=1"]["loss"] == pytest.approx(expected, abs=1e-4)
    assert found["objectives"]["dpo β=0.1"]["loss"] == pytest.approx(np.log(2))
    margins = {int(one["source"].rpartition(":")[2]): one["value"] for one in found["shown"]}
    assert margins == pytest.approx({number: c - r for number, (c, r) in enumerate(scores, 1)}, abs=1e-4)
