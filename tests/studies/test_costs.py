"""What models of a comparison took, of runs with planned numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_runs import BENCHMARK, made_run
from regretless.core.files import read_json
from regretless.studies.compare import compare
from regretless.studies.compared_runs import Run
from regretless.studies.costs import Cost, cost_of
from regretless.studies.page import write_page
from regretless.workflow.stage_folder import StageFolder

PLAIN = {
    "pretrain/base": (500.0, {"tokens": 10**9, "steps": 10**9}),
    "sample": (20.0, {"tokens": 1000}),
    "rollout": (30.0, {"tokens": 500}),
    "pair": (1.0, {"pairs": 7}),
    "train/dpo": (4.0, {"steps": 3, "tokens": 70}),
    "train/repo": (8.0, {"steps": 5, "tokens": 90}),
    "train/dpo.cache/replaced": (900.0, {"steps": 900, "tokens": 900}),
    "evaluate/samples/dpo/sums/greedy": (700.0, {"tokens": 10**6}),
}
ROUNDS = {
    "train/dpo": (0.1, {"steps": 100, "tokens": 10**6}),
    "rounds/1/prompts": (0.5, {"prompts": 9}),
    "rounds/1/sample": (20.0, {"tokens": 1000}),
    "rounds/1/train/dpo": (4.0, {"steps": 3, "tokens": 70}),
    "rounds/1/train/repo": (8.0, {"steps": 5, "tokens": 90}),
    "rounds/1/measure/dpo": (300.0, {}),
    "rounds/2/prompts": (0.5, {"prompts": 9}),
    "rounds/2/dpo/sample": (10.0, {"tokens": 800}),
    "rounds/2/dpo/replay": (0.25, {"replayed": 2}),
    "rounds/2/dpo/train/dpo": (6.0, {"steps": 2, "tokens": 60}),
    "rounds/2/repo/sample": (40.0, {"tokens": 10**6}),
    "rounds/2/repo/train/repo": (60.0, {"steps": 10**6, "tokens": 10**6}),
}


def spent(folder: Path, units: dict[str, tuple[float, dict[str, Any]]]) -> Path:
    """A run folder with these finished units: seconds and summary of each."""
    for name, (seconds, summary) in units.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        StageFolder(folder / name, "0" * 32).finish(name, {}, summary, seconds)
    return folder


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (PLAIN, Cost(tokens_sampled=1500, tokens_trained=70, steps=3, seconds=55.0)),
        (ROUNDS, Cost(tokens_sampled=1800, tokens_trained=130, steps=5, seconds=41.25)),
        (
            {**PLAIN, "train/dpo": (4.0, {"steps": 3})},
            Cost(tokens_sampled=1500, tokens_trained=None, steps=3, seconds=55.0),
        ),
        ({"sample": (20.0, {"tokens": 1000})}, None),
    ],
    ids=["plain", "rounds", "of an earlier version", "not trained"],
)
def test_cost_when_a_run_is_finished_then_it_has_all_that_its_model_took_and_nothing_else(
    units: dict[str, tuple[float, dict[str, Any]]], expected: Cost | None, tmp_path: Path
) -> None:
    assert cost_of(spent(tmp_path, units), "dpo") == expected


def test_page_when_runs_say_what_they_took_then_it_has_the_means_over_seeds(tmp_path: Path) -> None:
    runs = []
    for seed, sampled in ((0, 1000), (1, 3000)):
        greedy = {"base": {BENCHMARK: [1, 0]}, "dpo": {BENCHMARK: [1, seed]}}
        run = made_run(tmp_path / f"seed-{seed}", greedy, seed=seed)
        runs.append(Run(spent(run, {**PLAIN, "sample": (20.0 + seed, {"tokens": sampled})})))
    write_page(compare(runs), tmp_path / "page")
    (cost,) = read_json(tmp_path / "page" / "comparison.json")["costs"]
    assert cost == {
        **{"model": "Tiny-1B", "method": "dpo", "variant": "", "tokens_sampled": 2500, "tokens_trained": 70},
        **{"steps": 3, "seconds": 55.5},
    }
    text = (tmp_path / "page" / "comparison.html").read_text(encoding="utf-8")
    assert "What it took" in text and '<td class="number">2,500</td>' in text
