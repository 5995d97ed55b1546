"""Work on a Ray cluster of two simulated nodes: the same bytes as one process's, also when a node dies.

`make test-cluster` runs these in a network namespace with only loopback up.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kill_sweep import RECIPE, Sweep, units
from regretless.core import cluster, workers
from regretless.core.cluster import ClusterConfig, connected
from regretless.core.errors import ConfigError, DataError, RegretlessError
from regretless.core.workers import Advance, Need
from regretless.data.prompts import PromptRow
from regretless.labeling import verify
from regretless.modeling.load import ModelConfig
from regretless.sampling.base import SamplingParams
from regretless.sampling.job import SampleWork
from regretless.sampling.sample import sample_together
from regretless.smoke import local_judge
from run_contents import contents, differences

pytestmark = pytest.mark.skipif(
    os.environ.get("REGRETLESS_CLUSTER") != "1", reason="needs Ray in a network namespace: make test-cluster"
)
PARAMS = SamplingParams(n=4, max_new_tokens=12, batch_size=4, temperature=1.0, top_p=1.0, top_k=0)


class TwoNodes:
    """A cluster of two nodes with one CPU each, of which the second can be killed and replaced."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "resources": {"head": 1}}
        )
        self.second = self.cluster.add_node(num_cpus=1)
        self.address = str(self.cluster.address)

    @contextlib.contextmanager
    def one_dies(self, is_time: Callable[[], bool] | None) -> Iterator[None]:
        """Within the block, end the second node and all its processes, hard, as soon as it is time (None: never)."""
        if is_time is None:
            yield
            return
        ended = threading.Event()

        def wait() -> None:
            while not is_time() and not ended.is_set():
                time.sleep(0.005)
            if not ended.is_set():
                self.cluster.remove_node(self.second, allow_graceful=False)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            was_alive = thread.is_alive()
            ended.set()
            thread.join()
        assert not was_alive, "the work ended before the node was killed"
        self.second = self.cluster.add_node(num_cpus=1)

    @property
    def config(self) -> ClusterConfig:
        """Settings of a run on this cluster."""
        return ClusterConfig(address=self.address)


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    # Workers find the classes of this file.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = TwoNodes()
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


@pytest.mark.parametrize("dies", [False, True], ids=["all live", "a node dies"])
def test_sampling_on_two_nodes_writes_the_bytes_of_one_process(
    nodes: TwoNodes, model: Path, tmp_path: Path, dies: bool
) -> None:
    sample_together(works(model, tmp_path / "alone"))
    output = tmp_path / "together"
    parts = output / "sampled.parts"
    with connected(nodes.config, output):
        assert workers.executor().workers(Need("sample")) == 2
        with nodes.one_dies((lambda: len(list(parts.glob("*.parquet"))) >= 8) if dies else None):
            summaries = sample_together(works(model, output))
    assert [summary["responses"] for summary in summaries] == [160, 32]
    for name in ("sampled.parquet", "greedy.parquet"):
        assert (output / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert not parts.exists()


@pytest.mark.parametrize("dies", [False, True], ids=["all live", "a node dies"])
def test_verification_on_two_nodes_writes_the_bytes_of_one_process(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setattr(verify, "PART_ROWS", 25)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in responses(600)), encoding="utf-8")
    config = verify.VerifyConfig(workers=1)
    (tmp_path / "alone").mkdir()
    alone = verify.run(config, rows, tmp_path / "alone")
    output = tmp_path / "together"
    is_time = (lambda: len(list(output.glob("parts/*.json"))) >= 4) if dies else None
    with connected(nodes.config, output), nodes.one_dies(is_time):
        found = verify.run(config, rows, output)
    assert found == alone
    assert alone["correct"] > 400
    name = "responses.parquet"
    assert (output / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_recipe_on_two_nodes_ends_as_in_one_process_and_is_then_done(nodes: TwoNodes, tmp_path: Path) -> None:
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
    nodes: TwoNodes, tmp_path: Path, fails: str, kind: type[RegretlessError], said: str
) -> None:
    with connected(nodes.config, tmp_path), pytest.raises(kind, match=said) as caught:
        workers.executor().run(Need("sample"), partial(Counting, tmp_path, fails), range(6), lambda _: None)
    assert type(caught.value) is kind
    assert (tmp_path / "3").read_text() == "x" * (cluster.TRIES if fails == "dies" else 1)


def test_folder_that_a_node_does_not_see_is_refused(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both nodes of this machine see every file, so the fault is planted in what they are asked to do.
    monkeypatch.setattr(cluster, "_echo", lambda place, node: "")
    with (
        pytest.raises(ConfigError, match=r"is not seen by the node\(s\) .*finds no file there.*use an output_dir on a"),
        connected(nodes.config, tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cluster.address=127.0.0.1:1: .*start one with `ray start --head`"),
        connected(ClusterConfig(address="127.0.0.1:1"), tmp_path),
    ):
        pass
