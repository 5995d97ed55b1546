"""Work on a Ray cluster of two simulated nodes: the same bytes as one process's, also when a node dies.

`make test-cluster` runs these in a network namespace with only loopback up.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kill_sweep import RECIPE, Sweep, units
from ray_nodes import Nodes
from regretless.core.errors import ConfigError, DataError, RegretlessError
from regretless.core.progress import Advance, Tally
from regretless.data.prompts import PromptRow
from regretless.labeling import verify
from regretless.modeling.load import ModelConfig
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.job import SampleWork
from regretless.sampling.sample import sample_together
from regretless.workflow import cluster, workers
from regretless.workflow.cluster import ClusterConfig, check_shared, connected
from regretless.workflow.workers import Need
from regretless.world import local_judge
from run_contents import contents, differences

pytestmark = pytest.mark.skipif(
    os.environ.get("REGRETLESS_CLUSTER") != "1", reason="needs Ray in a network namespace: make test-cluster"
)
PARAMS = SamplingParams(n=4, max_new_tokens=12, batch_size=4, temperature=1.0, top_p=1.0, top_k=0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # Workers find the classes of this file. A node that died a moment ago still counts when training starts again.
    set_here = {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", **set_here}
    found = Nodes()
    yield found
    found.cluster.shutdown()


@pytest.fixture(autouse=True)
def _no_trace() -> None:
    """Ray leaves settings in the process; these tests run in one of their own."""


def works(model: Path, output: Path) -> list[SampleWork]:
    """Two questions to one model, greedy and sampled, of 48 parts."""
    prompts = [PromptRow(line=row, prompt_id=f"p{row}", prompt=f"What is {row} + 1?", answer="1") for row in range(40)]
    config = ModelConfig(name_or_path=str(model))
    greedy = PARAMS.model_copy(update={"n": 1, "temperature": 0.0})
    return [
        SampleWork([config], prompts, PARAMS, output / "sampled.parquet"),
        SampleWork([config], prompts[:32], greedy, output / "greedy.parquet"),
    ]


def responses(count: int) -> list[dict[str, Any]]:
    """Rows to verify, every second one of which needs algebra."""
    return [
        {
            "prompt": f"Question {row}",
            "response": f"It is $\\boxed{{{row} \\cdot x + x^{row % 3}}}$." if row % 2 else f"It is \\boxed{{{row}}}.",
            "answer": f"x({row} + x^{{{row % 3 - 1}}})" if row % 2 else str(row),
        }
        for row in range(count)
    ]


def run_recipe(recipe: Path, output: Path, *extra: str) -> str:
    """What the command said, run in the folder of the recipe with a relative path of the run folder."""
    command = [sys.executable, "-m", "regretless", "run", recipe.name, "--output-dir", output.name, *extra]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=recipe.parent)
    assert done.returncode == 0, done.stderr
    return done.stderr


LIVES = [pytest.param(False, id="all live", marks=pytest.mark.extended), pytest.param(True, id="a node dies")]


@pytest.mark.parametrize("dies", LIVES)
def test_sampling_on_two_nodes_writes_the_bytes_of_one_process(
    nodes: Nodes, model: Path, tmp_path: Path, dies: bool
) -> None:
    sample_together(works(model, tmp_path / "alone"))
    output = tmp_path / "together"
    parts = output / "sampled.parts"
    with connected(nodes.config, output):
        assert workers.executor().workers(Need("sample")) == 2
        with nodes.dying({"sample": lambda: len(list(parts.glob("*.parquet"))) >= 8} if dies else {}):
            summaries = sample_together(works(model, output))
    assert [summary["responses"] for summary in summaries] == [160, 32]
    for name in ("sampled.parquet", "greedy.parquet"):
        assert (output / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert not parts.exists()


@pytest.mark.parametrize("dies", LIVES)
def test_verification_on_two_nodes_writes_the_bytes_of_one_process(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setattr(verify, "PART_ROWS", 25)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in responses(600)), encoding="utf-8")
    config = verify.VerifyConfig(workers=1)
    (tmp_path / "alone").mkdir()
    alone = verify.run(config, rows, tmp_path / "alone")
    output = tmp_path / "together"
    moments = {"verify": lambda: len(list(output.glob("parts/*.json"))) >= 4} if dies else {}
    with connected(nodes.config, output), nodes.dying(moments):
        found = verify.run(config, rows, output)
    assert found == alone
    assert alone["correct"] > 400
    name = "responses.parquet"
    assert (output / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


@pytest.mark.extended
def test_recipe_on_two_nodes_ends_as_in_one_process_and_is_then_done(nodes: Nodes, tmp_path: Path) -> None:
    with local_judge.serving():
        sweep = Sweep(RECIPE, tmp_path)
        run_recipe(sweep.recipe, sweep.run)
        expected = contents(sweep.run)
        shutil.rmtree(sweep.run)
        on_cluster = ("--cluster", nodes.address)
        run_recipe(sweep.recipe, sweep.run, *on_cluster)
        assert differences(expected, contents(sweep.run)) == []
        again = run_recipe(sweep.recipe, sweep.run, *on_cluster)
        assert again.count(": unchanged, skipped") == len(units(sweep.run))


def test_recipe_when_a_node_dies_in_each_stage_ends_as_without_that(nodes: Nodes, tmp_path: Path) -> None:
    with local_judge.serving():
        sweep = Sweep(RECIPE, tmp_path)
        settings = yaml.safe_load(sweep.recipe.read_text())
        # Enough responses for several parts of verification, and training by two workers.
        settings["world"]["prompts"] = 280
        settings["train"] |= {"max_steps": 40, "eval_strategy": "no"}
        settings["cluster"] = {"address": nodes.address, "train": {"workers": 2}}
        sweep.recipe.write_text(yaml.safe_dump(settings))
        run_recipe(sweep.recipe, sweep.run)
        expected = contents(sweep.run)
        shutil.rmtree(sweep.run)

        def some(pattern: str) -> Callable[[], bool]:
            return lambda: any(sweep.run.glob(pattern))

        moments = {
            "sample": some("sample/responses.parts/*.parquet"),
            "verify": some("verify/pending.json"),
            "judge": some("judge/pending.json"),
            "train": some("train/*/checkpoint-*/trainer_state.json"),
            "evaluate": some("evaluate/samples/*/*/*/pending.json"),
        }
        with nodes.dying(moments):
            said = run_recipe(sweep.recipe, sweep.run)
        assert "a training worker or its node was lost" in " ".join(said.split())
        assert differences(expected, contents(sweep.run)) == []
        again = run_recipe(sweep.recipe, sweep.run, "--cluster", nodes.address)
        assert again.count(": unchanged, skipped") == len(units(sweep.run))


class Counting:
    """A worker that notes its units in files, and fails on one of them in the way that is asked for."""

    def __init__(self, folder: Path, fails: str) -> None:
        self.folder, self.fails = folder, fails

    def __call__(self, unit: int, advance: Advance) -> None:
        with (self.folder / f"{unit}").open("a") as handle:
            handle.write("x")
        if unit == 3 and self.fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if unit == 3 and self.fails == "refuses":
            raise DataError("row 7: no answer")
        if unit == 3 and self.fails == "breaks":
            {}["missing"]
        advance(1)


@pytest.mark.parametrize(
    ("fails", "kind", "said"),
    [
        ("refuses", DataError, r"row 7: no answer \(worker on node .*, unit 3\)"),
        ("breaks", RegretlessError, r"worker on node .*, unit 3: KeyError: 'missing'"),
        ("dies", RegretlessError, r"4 workers died on the same unit of work.*unit 3\)"),
    ],
)
def test_unit_that_fails_ends_the_run_with_its_reason(
    nodes: Nodes, tmp_path: Path, fails: str, kind: type[RegretlessError], said: str
) -> None:
    with connected(nodes.config, tmp_path), pytest.raises(kind, match=said) as caught:
        workers.executor().run(Need("sample"), partial(Counting, tmp_path, fails), range(6), Tally())
    assert type(caught.value) is kind
    assert (tmp_path / "3").read_text() == "x" * (cluster.TRIES if fails == "dies" else 1)


def test_folder_that_a_node_does_not_see_is_refused(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both nodes of this machine see every file, so the fault is planted in what they are asked to do.
    monkeypatch.setattr(cluster, "_echo", lambda place, node: "")
    with (
        pytest.raises(ConfigError, match=r"is not seen by the node\(s\) .*finds no file there.*use an output_dir on a"),
        connected(nodes.config, tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_node_that_died_a_moment_ago_keeps_nobody_from_running(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(nodes.config, tmp_path):
        import ray

        listed = [*ray.nodes(), {"NodeID": "ab" * 28, "NodeManagerAddress": "127.0.0.2", "Alive": True}]
        monkeypatch.setattr(ray, "nodes", lambda: listed)
        check_shared(ray, tmp_path / "run")


def test_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cluster.address=127.0.0.1:1: .*start one with `ray start --head`"),
        connected(ClusterConfig(address="127.0.0.1:1"), tmp_path),
    ):
        pass


@pytest.mark.parametrize("here", [False, True])
def test_workers_search_the_working_directory_only_if_this_process_does(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    import ray

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, *[""][: int(here)]])
    with connected(nodes.config, tmp_path):
        searched = ray.get(ray.remote(lambda: sys.path).remote())
    assert (str(tmp_path) in searched) is here
