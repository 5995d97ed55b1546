"""What can be compared: labels of runs, and every reason against a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_runs import BENCHMARK, add_harness, made_run, rate
from regretless.core.errors import ConfigError, DataError
from regretless.core.files import read_json, write_json, write_text
from regretless.runs import stage_record
from regretless.studies.compared_runs import Run
from regretless.studies.observations import observe
from regretless.workflow.run_folder import RECIPE
from regretless.workflow.stage_folder import MANIFEST

VERDICTS = {"base": {BENCHMARK: [1, 0, 0, 1]}, "dpo": {BENCHMARK: [1, 1, 0, 1]}}


def refusal(*runs: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        observe([Run(run) for run in runs])
    return str(caught.value)


def test_labels_of_runs_when_read_then_they_come_from_recipe_and_manifests(tmp_path: Path) -> None:
    one = made_run(tmp_path / "a", VERDICTS, seed=3, train={"seed": 5})
    other = made_run(tmp_path / "b", VERDICTS, model={"name_or_path": "{run}/pretrain/base"}, name="quick")
    found = observe([Run(one), Run(other, model="given", data_seed=9)])
    assert [(run.model, run.variant, run.data_seed, run.train_seed) for run in found.runs] == [
        ("Tiny-1B", "", 3, 5),
        ("given", "", 9, 0),
    ]
    assert observe([Run(other)]).runs[0].model == "quick"
    base, dpo = found.observations[:2]
    assert (base.method, base.value, base.n, base.train_seed) == ("base", 50.0, 4, None)
    assert (dpo.method, dpo.value, dpo.train_seed, dpo.verdicts["test-2"]) == ("dpo", 75.0, 5, False)


def test_models_with_equal_short_names_when_read_then_they_keep_their_owners(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / name, VERDICTS, model={"name_or_path": f"{name}/Tiny-1B"}) for name in ("left", "right")
    ]
    assert [run.model for run in observe([Run(run) for run in runs]).runs] == ["left/Tiny-1B", "right/Tiny-1B"]


def test_models_that_runs_make_when_only_seeds_differ_then_they_are_one(tmp_path: Path) -> None:
    made = {"model": {"name_or_path": "{run}/pretrain/base"}, "world": {"prompts": 3}}
    runs = [
        made_run(tmp_path / str(seed), VERDICTS, seed=seed, name=f"quick-seed-{seed}", **made, pretrain={"seed": seed})
        for seed in (0, 1)
    ]

    def models(*runs: Path) -> list[str | None]:
        return [run.model for run in observe([Run(run) for run in runs]).runs]

    assert models(*runs) == ["quick-seed", "quick-seed"]
    other = made_run(tmp_path / "other", VERDICTS, name="quick-wide", **made, pretrain={"steps": 5})
    again = made_run(tmp_path / "again", VERDICTS, name="quick-again", **made)
    assert models(runs[0], other) == ["quick-seed-0", "quick-wide"]
    assert models(runs[0], again) == [
        "quick-seed-0",
        "quick-again",
    ]


def test_folders_that_are_no_runs_when_named_then_all_are_listed(tmp_path: Path) -> None:
    said = refusal(made_run(tmp_path / "a", VERDICTS), tmp_path, tmp_path / "none")
    assert "2 problem(s)" in said and f"{tmp_path}: expected the folder of a run, found no {RECIPE} in it" in said
    assert f"{tmp_path / 'none'}: expected the folder of a run, found no such folder" in said
    assert "expected at least one run" in refusal()
    run = tmp_path / "a"
    assert "named twice" in refusal(run, run)
    write_text(tmp_path / "alone" / "adapter_config.json", "{}")
    assert f"--policy NAME={tmp_path / 'alone'}" in refusal(tmp_path / "alone")
    assert f"it is inside the run {run}" in refusal(run / "evaluate")


def test_evaluation_that_is_not_finished_when_read_then_it_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", VERDICTS, sampled={label: {41: [1, 1, 0, 0]} for label in VERDICTS})
    (run / "evaluate" / "dpo" / BENCHMARK / "seed-41" / MANIFEST).unlink()
    assert f"not finished, evaluate/dpo/{BENCHMARK}/seed-41/{MANIFEST} missing" in refusal(run)
    trained = made_run(tmp_path / "b", VERDICTS, train={"objective": ["dpo", "repo"]})
    assert f"evaluate/repo/{BENCHMARK}/result.json and 1 more missing" in refusal(trained)
    nothing = made_run(tmp_path / "c", {}, evaluate={"benchmarks": {}})
    assert "nothing was evaluated" in refusal(nothing)


def test_run_when_a_partial_run_has_set_other_settings_then_it_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", VERDICTS)
    text = (run / RECIPE).read_text()
    stage_record.begin(run, text, ["train", "evaluate"])
    observe([Run(run)])
    stage_record.begin(run, f"{text}\nthreads: 1", ["train", "evaluate"])
    observe([Run(run)])
    changed = text.replace("seed: 0", "seed: 1", 1)
    stage_record.begin(run, changed, ["train", "evaluate"])
    write_text(run / RECIPE, changed)
    said = refusal(run)
    assert f"{run}: its evaluation is not of its recipe.yaml" in said and "evaluate not done with them" in said
    assert "run the same recipe to the end" in said


def test_problems_that_differ_when_compared_then_they_are_refused_with_counts(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", VERDICTS)
    more = made_run(tmp_path / "b", {label: {BENCHMARK: [1, 0, 0, 1, 1]} for label in VERDICTS}, train={"seed": 1})
    assert "0 only in the first, 1 only in the second, 0 with other text" in refusal(run, more)
    other = made_run(tmp_path / "c", VERDICTS, train={"seed": 1}, problem="What is {number} + 2?")
    assert "0 only in the first, 0 only in the second, 4 with other text or gold answer" in refusal(run, other)


def test_answers_that_are_empty_when_compared_then_a_note_counts_those_of_all_passes(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", VERDICTS, sampled={label: {41: [1, 1, 0, 0]} for label in VERDICTS})
    assert observe([Run(run)]).notes == ()
    for folder, empty in ((BENCHMARK, 2), (f"{BENCHMARK}/seed-41", 1)):
        file = run / "evaluate" / "dpo" / folder / "result.json"
        write_json(file, {**read_json(file), "empty": empty})
    assert observe([Run(run)]).notes == (f"{run} (dpo): {BENCHMARK}: answers that are empty: 3",)


def test_worlds_of_other_data_seeds_when_compared_then_each_has_its_own_problems(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / str(seed), VERDICTS, seed=seed, world={"seed": seed}, problem=f"{seed} + {{number}}?")
        for seed in (0, 1)
    ]
    assert any("made with the data seed" in note for note in observe([Run(run) for run in runs]).notes)
    # The same data seed has the same problems, and no world may have another number of them.
    changed = made_run(tmp_path / "c", VERDICTS, world={"seed": 0}, train={"seed": 4}, problem="2 + {number}?")
    assert "4 with other text" in refusal(runs[0], changed, runs[1])
    fewer = made_run(tmp_path / "d", {label: {BENCHMARK: [1, 0]} for label in VERDICTS}, seed=2, world={"seed": 2})
    assert "2 problems in" in refusal(*runs, fewer)


def test_grading_and_decoding_that_differ_when_compared_then_the_settings_are_named(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", VERDICTS)
    graded = made_run(tmp_path / "b", VERDICTS, train={"seed": 1}, verify={"grade_cut": True, "workers": 3})
    decoded = made_run(tmp_path / "c", VERDICTS, train={"seed": 2}, sampling={"max_new_tokens": 9, "batch_size": 3})
    said = refusal(run, graded, decoded)
    assert "2 problem(s)" in said  # neither workers nor batch size changes a verdict
    assert f"verify.grade_cut is False in {run} (base) and 3 more; True in {graded} (base) and 1 more" in said
    assert "evaluate.max_new_tokens is 64" in said and f"9 in {decoded} (base)" in said


def test_chat_benchmarks_when_questions_or_judging_differ_then_they_are_refused(tmp_path: Path) -> None:
    runs = []
    for seed in range(3):
        runs.append(made_run(tmp_path / str(seed), VERDICTS, train={"seed": seed}))
        for label in VERDICTS:
            asked, temperature = ("others" if seed == 1 else "asked"), (0.5 if seed == 2 else 0.0)
            rate(runs[-1], label, [3.0, 4.0], asked, temperature=temperature)
    assert "mt: " in refusal(runs[0], runs[1]) and "answered different problems" in refusal(runs[0], runs[1])
    assert "evaluate.chat.mt.temperature is 0.0" in refusal(runs[0], runs[2])


def test_prompts_of_a_judge_when_they_differ_then_worlds_are_no_excuse(tmp_path: Path) -> None:
    runs = []
    for seed in range(2):
        runs.append(made_run(tmp_path / str(seed), VERDICTS, seed=seed, world={"seed": seed}))
        for name in ("references", "judge_prompt"):
            (tmp_path / f"{name}-{seed}").write_text(f"{name} {seed}")
        files = {name: str(tmp_path / f"{name}-{seed}") for name in ("references", "judge_prompt")}
        for label in VERDICTS:
            rate(runs[-1], label, [3.0, 4.0], f"asked {seed}", **files)
    said = refusal(*runs)
    assert "1 problem(s)" in said and "evaluate.chat.mt.judge_prompt is" in said


def test_tasks_of_the_harness_when_asked_or_answered_differently_then_they_are_refused(tmp_path: Path) -> None:
    """Each task by itself: another task that only one run has is no obstacle."""
    asked: list[dict[str, Any]] = [{}, {"num_fewshot": 5}, {}, {}]
    runs = []
    for seed, settings in enumerate(asked):
        runs.append(made_run(tmp_path / str(seed), VERDICTS, train={"seed": seed}))
        for label in VERDICTS:
            scores = {"ifeval|strict|none": {f"{number}-hash": 1.0 for number in range(3 if seed == 2 else 2)}}
            more = {"mmlu|acc|none": {"0-hash": 1.0}} if seed == 3 else {}
            add_harness(runs[-1], label, {**scores, **more}, settings)
    assert "ifeval: answered or graded differently: evaluate.harness_settings.num_fewshot is None" in refusal(*runs[:2])
    assert "0 only in the first, 1 only in the second" in refusal(runs[0], runs[2])
    both = observe([Run(runs[0]), Run(runs[3])])
    assert [one.benchmark for one in both.observations].count("mmlu") == 2
    (runs[0] / "evaluate" / "dpo" / "harness" / MANIFEST).unlink()
    assert f"not finished, evaluate/dpo/harness/{MANIFEST} missing" in refusal(runs[0])


def test_decoding_seeds_that_differ_when_compared_then_it_is_said(tmp_path: Path) -> None:
    runs = [
        made_run(
            tmp_path / str(seed),
            VERDICTS,
            train={"seed": seed},
            sampled={label: {seed: [1, 0, 0, 1]} for label in VERDICTS},
        )
        for seed in (41, 42)
    ]
    (note,) = observe([Run(run) for run in runs]).notes
    assert "different decoding seeds" in note and f"41 in {runs[0]}; 42 in {runs[1]}" in note


def test_runs_of_equal_settings_and_seeds_when_compared_then_one_is_too_many(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, VERDICTS) for name in "ab"]
    assert "both have dpo of Tiny-1B on sums with data seed 0, training seed 0" in refusal(*runs)


def test_runs_of_one_model_when_they_have_other_benchmarks_then_they_go_together(tmp_path: Path) -> None:
    one = made_run(tmp_path / "a", VERDICTS)
    other = made_run(tmp_path / "b", {label: {"more": [1, 1, 0]} for label in VERDICTS})
    found = observe([Run(one), Run(other)])
    assert [(seen.method, seen.benchmark) for seen in found.observations] == [
        ("base", BENCHMARK),
        ("dpo", BENCHMARK),
        ("base", "more"),
        ("dpo", "more"),
    ]


def test_result_of_another_program_when_read_then_the_message_says_so(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", VERDICTS)
    (run / "evaluate" / "dpo" / BENCHMARK / "result.json").write_text('{"accuracy": 0.5}')
    with pytest.raises(DataError, match="unexpected content"):
        observe([Run(run)])


def test_settings_that_differ_when_read_then_they_are_listed_without_seeds(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / "a", VERDICTS, train={"learning_rate": 1e-4}),
        made_run(tmp_path / "b", VERDICTS, train={"seed": 1}, name="other"),
    ]
    found = observe([Run(run) for run in runs])
    assert found.differing == {"train.learning_rate": {str(runs[0]): "0.0001", str(runs[1]): "default"}}
