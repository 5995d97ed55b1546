"""What the claims' tables are made of: statistics by hand, equal search, and one world in miniature from end to end."""

from __future__ import annotations

from pathlib import Path

import claim_labels
import claim_masks
import claim_weights
import numpy as np
import pytest
import torch
import trials
from trials import BASE, BEHAVIOR, METHODS, TEST, VALIDATION, Experiment, Method, Trial, Unfinished, World

from regretless.data.preferences import read_pairs
from regretless.data.rows import read_rows
from regretless.objectives import build
from regretless.objectives.base import Logps

TINY = (
    "world.steps=[1,1]",
    "world.largest_amount=1",
    "world.prompts=40",
    "world.test=20",
    *(f"world.policies.{name}.demonstrations=400" for name in (BASE, BEHAVIOR)),
    *(f"pretrain.{name}.max_steps=40" for name in (BASE, BEHAVIOR)),
)


def test_differences_when_paired_then_mean_and_t_interval_are_those_worked_out_by_hand() -> None:
    # Differences 10, 20, 30 points: mean 20, sd 10; t(0.975, 2) = 4.3027, so the reach is 4.3027 · 10 / √3 = 24.84.
    assert trials.difference([0.5, 0.6, 0.7], [0.4, 0.4, 0.4]) == "+20.0 [-4.8, +44.8]"
    # 10, 11, 12: mean 11, sd 1, reach 2.484. The interval leaves out 0 although the seeds differ far more.
    assert trials.difference([0.2, 0.51, 0.92], [0.1, 0.4, 0.8]) == "+11.0 [+8.5, +13.5] *"
    assert trials.difference([0.1, 0.4, 0.8], [0.2, 0.51, 0.92]).endswith("*")
    with pytest.raises(ValueError, match="zip"):
        trials.difference([0.1, 0.2], [0.1])
    assert trials.spread([0.5, 0.6, 0.7]) == ["50.0 / 60.0 / 70.0", "60.0 [35.2, 84.8]", "10.0"]


def test_score_distance_is_the_mean_square_over_tokens_in_nats() -> None:
    assert trials.score_distance(np.array([-1.0, -2.0, -4.0]), np.array([-1.0, -1.0, -2.0])) == pytest.approx(5 / 3)


def test_search_when_methods_are_compared_then_each_has_as_many_different_settings() -> None:
    for methods in (METHODS, claim_weights.CHOSEN):
        names = [[cell.name for cell in method.cells] for method in methods.values()]
        assert {len(set(cells)) for cells in names} == {4}


def test_choice_when_validation_decides_then_other_seeds_and_problems_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning, other = (World(Path("unused"), seed, Path("unused")) for seed in (0, 1))
    shares = {0.1: {0: 0.5, 1: 0.9}, 1.0: {0: 0.6, 1: 0.1}}

    def accuracy(world: World, trial: Trial, problems: str) -> float:
        assert problems == VALIDATION
        return shares[trial.settings["beta"]][world.seed]

    monkeypatch.setattr(World, "accuracy", accuracy)
    method = Method("dpo", grid=({"beta": 0.1}, {"beta": 1.0}))
    assert Experiment([tuning, other], [tuning]).choose(method).settings["beta"] == 1.0
    assert Experiment([tuning, other], [tuning, other]).choose(method).settings["beta"] == 0.1


def test_repo_without_weights_is_dpo_and_its_scale_is_met_at_twice_beta() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference, behavior = (-torch.rand(2, 9, generator=generator) for _ in range(3))
    logps = Logps(policy, mask=torch.ones(2, 9, dtype=torch.bool), reference=reference, behavior=behavior)
    pairs = torch.tensor([[0, 1]])
    dpo = build("dpo", beta=0.7)(logps, pairs).loss
    assert build("repo", beta=0.7, discount=0.0)(logps, pairs).loss.item() == pytest.approx(dpo.item(), abs=1e-6)
    weights = build("repo").token_weights(logps.mask)
    assert (1 + weights).mean().item() == pytest.approx((2 * 9 - 1) / 9)
    dpo_trials = list(claim_weights.ablations(Trial("repo", {"beta": 0.5, "learning_rate": 1e-4})).values())[:2]
    assert [(trial.objective, trial.settings["beta"]) for trial in dpo_trials] == [("dpo", 0.5), ("dpo", 1.0)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    found = World(trials.HERE / "claims.yaml", 1, tmp_path_factory.mktemp("claims"), TINY)
    found.prepare()
    return found


def test_world_when_prepared_then_nothing_is_tested_that_was_validated_or_trained_on(world: World) -> None:
    prompts = {
        name: {row["prompt"] for _, row in read_rows(world.path / "problems" / f"{name}.jsonl")}
        for name in (VALIDATION, TEST)
    }
    pairs, _ = read_pairs(world.pairs)
    assert [len(found) for found in prompts.values()] == [8, 12]
    assert not prompts[VALIDATION] & prompts[TEST]
    assert not {pair.prompt for pair in pairs} & (prompts[VALIDATION] | prompts[TEST])


def test_labels_when_scored_by_the_writer_are_the_recorded_ones_and_by_others_are_not(world: World) -> None:
    pairs, _ = read_pairs(world.pairs)
    recorded = np.concatenate([np.array([*pair.chosen.logps, *pair.rejected.logps]) for pair in pairs])
    rescored = np.concatenate(trials.pair_logps(world.model(BEHAVIOR), world.pairs))
    assert np.abs(recorded - rescored).max() < 1e-4
    wrong = claim_labels.WRONG["wrong: of the base model"]
    relabeled, _ = read_pairs(world._pairs_of(Trial("repo", {}, wrong)))
    assert [pair.chosen.text for pair in relabeled] == [pair.chosen.text for pair in pairs]
    assert (
        trials.score_distance(
            np.concatenate([np.array([*pair.chosen.logps, *pair.rejected.logps]) for pair in relabeled]), recorded
        )
        > 0.01
    )


def test_trial_when_trained_prefers_the_chosen_more_and_is_not_trained_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial("dpo", {"beta": 0.1, "learning_rate": 1e-3, "num_train_epochs": 5})
    trial = trial.but(pairs=claim_masks.masked("all", alone=True))
    shown = World(world.recipe, world.seed, world.folder, world.overrides, show=True)
    with pytest.raises(Unfinished):
        shown.accuracy(trial, TEST)
    share = world.accuracy(trial, TEST)
    trained = trials.ModelConfig(name_or_path=str(world.path / "trials" / trial.name / "train"))
    masked = world._pairs_of(trial)

    def margin(model: trials.ModelConfig) -> float:
        sums = np.array([values.sum() for values in trials.pair_logps(model, masked)])
        return float((sums[::2] - sums[1::2]).mean())

    assert margin(trained) > margin(world.model(BASE))
    assert trials.score_distance(world.token_logps(trial), world.token_logps(None)) > 0

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(trials.training, "run", refuse)
    monkeypatch.setattr(trials, "_known", {})
    assert world.accuracy(trial, TEST) == share == shown.accuracy(trial, TEST)
