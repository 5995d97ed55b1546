"""A Ray cluster on this machine, with nodes that can be killed."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from regretless.workflow.cluster import ClusterConfig

TRIES = 4
"""To start a node."""


class Nodes:
    """A head node for the first process, and two nodes with one CPU each, for one worker each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # At Ray's own nice value of 15, workers hardly run while other tests do.
        os.environ |= {"RAY_worker_niceness": "0"}
        # Ray's own end at exit is a signal handler for each node, which only the main thread may set.
        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        atexit.register(self.cluster.shutdown)
        self.address = str(self.cluster.address)
        self.nodes = [self.add(), self.add()]

    @property
    def config(self) -> ClusterConfig:
        """Settings of a run on this cluster."""
        return ClusterConfig(address=self.address)

    def add(self) -> Any:
        """Start another node. Ray waits half a minute for it, which on a busy machine is too short: then once more."""
        for _ in range(TRIES - 1):
            nodes, raylets = set(self.cluster.worker_nodes), _raylets()
            try:
                return self.cluster.add_node(num_cpus=1)
            # What Ray raises is a TimeoutError, or a plain Exception.
            except Exception:
                for node in set(self.cluster.worker_nodes) - nodes:
                    self.cluster.remove_node(node, allow_graceful=False)
                for process in _raylets() - raylets:
                    process.kill()
        return self.cluster.add_node(num_cpus=1)

    def replace(self) -> None:
        """Kill a node hard, with all that runs on it; another one takes its place, as on an autoscaling cluster."""
        node = self.nodes.pop()
        raylet = next(info[0].process for kind, info in node.all_processes.items() if kind == "raylet")
        below = psutil.Process(raylet.pid).children(recursive=True)
        self.cluster.remove_node(node, allow_graceful=False)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes.insert(0, self.add())

    @contextlib.contextmanager
    def dying(self, moments: Mapping[str, Callable[[], bool]]) -> Iterator[None]:
        """Within the block, replace a node as soon as each moment has come, one moment after the other."""
        ended, left = threading.Event(), dict(moments)

        def wait() -> None:
            for name, has_come in moments.items():
                while not has_come():
                    if ended.wait(0.002):
                        return
                self.replace()
                del left[name]

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        assert not left, f"the work ended before a node was killed in {', '.join(left)}"


def _raylets() -> set[psutil.Process]:
    """The processes of nodes that this one has started."""
    return {process for process in psutil.Process().children() if process.name() == "raylet"}
