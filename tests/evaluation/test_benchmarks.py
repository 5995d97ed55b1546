"""The benchmarks' table on the real files, and the verifier on their gold answers."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from regretless.core import plugins
from regretless.core.errors import ConfigError
from regretless.data.columns import Verdict
from regretless.data.prompts import load_prompts
from regretless.evaluation.benchmarks import BENCHMARKS
from regretless.evaluation.results import BenchmarkSource
from regretless.labeling.grading.extraction import answer_in_gold
from regretless.labeling.grading.grader import grade, grade_by_algebra

ROWS = {"gsm8k": 1319, "math": 5000, "math500": 500, "amc23": 40, "minerva_math": 272}
UNPARSED = {
    "minerva_math": {
        r"\frac{dM}{dt}=\frac{10^{5} L_{\odot}}{0.007 c^{2} M_{\odot}^{6}} M^{6}",
    },
    "math": {r"\frac \pi4 + 2 - \sqrt2"},
}
"""Gold answers that math-verify cannot parse: a response matches them by its text, else it is unknown."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "math" else ()) for name in ROWS]
)
def test_benchmark_when_local_then_all_gold_answers_are_accepted_and_the_unparsed_are_known(
    shared: Path, name: str
) -> None:
    local = shared / "data" / name / "test.jsonl"
    prompts = load_prompts(BenchmarkSource(benchmark=name, dataset=str(local)).source)
    assert len(prompts) == ROWS[name]
    unparsed = set()
    for prompt in prompts:
        gold = answer_in_gold(prompt.answer or "")
        assert gold is not None, prompt
        response = rf"The answer is \boxed{{{gold}}}."
        assert grade(response, prompt.answer or "").verdict == Verdict.CORRECT, gold
        by_algebra = grade_by_algebra(response, prompt.answer or "")
        if by_algebra.verdict != Verdict.CORRECT:
            assert by_algebra.reason == "gold answer cannot be parsed", gold
            unparsed.add(gold)
    assert unparsed == UNPARSED.get(name, set())


def test_benchmarks_when_listed_then_every_one_has_a_test() -> None:
    assert BENCHMARKS.keys() == ROWS.keys()


MISSPELLED = {"dataset": "mine.jsonl", "answer_columns": "gold"}
COLUMNS = {"prompt_column": "q", "answer_column": "gold"}


def test_benchmark_of_a_plugin_when_a_key_is_misspelled_then_error_names_plugin_and_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = {"mine": [EntryPoint("mine", f"{__name__}:MISSPELLED", "regretless.benchmarks")]}
    monkeypatch.setattr(plugins, "offered", lambda kind: points if kind == "benchmarks" else {})
    wanted = (
        r"'mine' of an installed package .*: expected settings of PromptSource: answer_columns: unknown key .*did you"
    )
    with pytest.raises(ConfigError, match=wanted):
        BenchmarkSource.parse({"benchmark": "mine"}, "evaluate")


def test_benchmark_of_a_plugin_when_it_leaves_the_dataset_open_then_the_recipe_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = {"mine": [EntryPoint("mine", f"{__name__}:COLUMNS", "regretless.benchmarks")]}
    monkeypatch.setattr(plugins, "offered", lambda kind: points if kind == "benchmarks" else {})
    monkeypatch.setattr(BENCHMARKS, "_parts", dict(BENCHMARKS._parts))  # where a part stays once it is imported
    source = BenchmarkSource.parse({"benchmark": "mine", "dataset": "my.jsonl"}, "evaluate").source
    assert (source.dataset, source.prompt_column, source.answer_column) == ("my.jsonl", "q", "gold")


def test_benchmark_source_when_local_then_hub_split_and_subset_are_dropped_and_columns_stay() -> None:
    source = BenchmarkSource(benchmark="gsm8k", dataset="copy.jsonl", limit=7, template="math").source
    assert (source.dataset, source.subset, source.limit, source.template) == ("copy.jsonl", None, 7, "math")
    assert (source.prompt_column, source.answer_column) == ("question", "answer")
    hub = BenchmarkSource(benchmark="gsm8k").source
    assert (hub.dataset, hub.subset, hub.split) == ("openai/gsm8k", "main", "test")


def test_benchmark_source_when_unknown_or_empty_then_error_says_what_is_expected() -> None:
    with pytest.raises(ConfigError, match=r"expected one of gsm8k, .*got 'gsm9k'"):
        BenchmarkSource.parse({"benchmark": "gsm9k"}, "evaluate")
    with pytest.raises(ConfigError, match="name in the setting benchmark, or a dataset"):
        BenchmarkSource.parse({"limit": 3}, "evaluate")
