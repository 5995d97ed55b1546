"""Work of a run on a Ray cluster: its settings, its connection, and the actors that do independent units."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import platform
import re
import secrets
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from regretless.core.errors import ConfigError, RegretlessError
from regretless.core.files import write_text
from regretless.core.progress import Advance, Tally
from regretless.core.secrets import revealed
from regretless.core.settings import DECIDED, Section
from regretless.core.terminal import console
from regretless.workflow import workers
from regretless.workflow.children import portable
from regretless.workflow.workers import Need, Worker

TRIES = 4
"""Workers that may die on the same unit before the run gives it up: a unit that ends its process does so again."""
OUT_OF_MEMORY = re.compile(r"low on memory|memory monitor|OutOfMemory|\bOOM\b", re.IGNORECASE)
"""What Ray says of a worker that it ended because its node's memory was nearly full."""
Positive = Annotated[int, Field(ge=1)]


class WorkersConfig(Section):
    """Workers for one kind of work."""

    workers: Positive | tuple[Positive, Positive] | None = None
    """Number of workers, or the least and the most of a pool that grows and shrinks with the work; by default as many
    as fit into the cluster."""
    cpus: float = Field(default=1, gt=0)
    """CPU cores that each worker reserves."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs that each worker reserves; by default what its work uses where the cluster has GPUs, and 0 elsewhere."""


class ClusterConfig(Section):
    """The Ray cluster that does a run's work. It changes where work is done and nothing in its results."""

    address: str = "local"
    """Address of the cluster: `local` starts one on this machine, `auto` finds the one that this machine belongs to,
    `ray://host:port` or `host:port` names one."""
    runtime_env: Annotated[dict[str, Any], DECIDED] = Field(default={})
    """Ray's runtime environment of the workers, such as `pip`, `env_vars` or `working_dir`."""
    sample: WorkersConfig = WorkersConfig()
    """Workers that sample responses, those of `evaluate` included."""
    verify: WorkersConfig = WorkersConfig()
    """Workers that verify responses, those of `evaluate` included."""
    train: WorkersConfig = WorkersConfig()
    """Processes that train one model together: `workers` is one number, by default that of `train.processes`, where
    `auto` means one for each GPU of the cluster."""


@contextlib.contextmanager
def connected(config: ClusterConfig | None, folder: Path) -> Iterator[None]:
    """Do the units of work within the block on the cluster; on None, in this process.

    folder: the run folder, which every node must see. Raises ConfigError if Ray is missing, the cluster cannot be
    reached, or one of its nodes does not see the folder.
    """
    if config is None:
        yield
        return
    ray = _import_ray()
    # This run's own connection, unless the caller has one already.
    opened = not ray.is_initialized()
    if opened:
        _connect(ray, config)
    try:
        check_shared(ray, folder)
        with workers.done_by(RayActors(ray, config)):
            yield
    finally:
        if opened:
            ray.shutdown()


def check_ray() -> None:
    """Raise ConfigError if Ray is missing."""
    if any(find_spec(name) is None for name in ("ray", "pandas")):
        raise ConfigError("cluster: ray is not installed; install regretless[cluster]")


def _import_ray() -> Any:
    check_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise workers that Ray starts under a GPU-less kind of work lose CUDA_VISIBLE_DEVICES; later releases do this.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    import ray.data

    return ray


class _SearchedHere(list[str]):
    """Folders that Ray puts in front of what workers import from, without a working directory that is not searched
    in this process either."""

    def extend(self, folders: Iterable[str]) -> None:
        searched = {path or str(Path.cwd()) for path in sys.path}
        super().extend(folder for folder in folders if folder in searched)


def _connect(ray: Any, config: ClusterConfig) -> None:
    try:
        if found := re.fullmatch(r"(?:ray://)?(.+):(\d+)", config.address):
            # Ray itself would try for minutes, and then end the process.
            socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=10).close()
        job = ray.job_config.JobConfig()
        job._py_driver_sys_path = _SearchedHere()
        ray.init(
            address=config.address,
            job_config=None if config.address.startswith("ray://") else job,  # Ray's client adds no folders
            runtime_env=revealed(config.runtime_env) or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if config.address == "local" else None,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise ConfigError(
            f"cluster.address={config.address}: {(str(error).strip() or type(error).__name__).splitlines()[0]}; start "
            "one with `ray start --head`, or use cluster.address=local"
        ) from error


def check_shared(ray: Any, folder: Path) -> None:
    """Check that every node reads what this process writes into the folder, and the reverse.

    Raises ConfigError that names the nodes that do not.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    folder.mkdir(parents=True, exist_ok=True)
    place = folder.resolve() / f".nodes.{secrets.randbits(48)}.tmp"
    place.mkdir()
    try:
        token = os.urandom(8).hex()
        write_text(place / "driver", token)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        echo = ray.remote(num_cpus=0, max_retries=3)(_echo)
        asked = {
            node: echo.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                str(place), node
            )
            for node in nodes
        }
        blind = []
        for node, answer in asked.items():
            try:
                seen = ray.get(answer, timeout=300)
            except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
                continue  # it died: the cluster lists such a node for a while
            except ray.exceptions.RayError as error:
                seen = f"{type(error).__name__}: {error}".splitlines()[0]
            mine = place / node
            if seen != token or not mine.is_file() or mine.read_text(encoding="utf-8") != token:
                blind.append(f"{nodes[node]} ({seen or 'finds no file there'})" if seen != token else nodes[node])
    finally:
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
    if blind:
        raise ConfigError(
            f"cluster: the run folder {folder.resolve()} of {platform.node()} is not seen by the node(s) "
            f"{', '.join(sorted(blind))}; use an output_dir on a file system that all nodes share under the same path"
        )


def _echo(place: str, node: str) -> str:
    """What the driver wrote, written again under the node's name; empty if it is not there."""
    file = Path(place) / "driver"
    if not file.is_file():
        return ""
    token = file.read_text(encoding="utf-8")
    write_text(Path(place) / node, token)
    return token


class RayActors:
    """Does units with Ray Data, over a pool of actors that each make their worker once.

    The result of a unit is its files, so that units may be done again when a node dies: what is written is the same.
    """

    def __init__(self, ray: Any, config: ClusterConfig) -> None:
        self.ray, self.config = ray, config

    def workers(self, need: Need) -> int:
        """Number of workers for such work: the setting, or how many fit into the cluster now."""
        return self._pool(need)[1]

    def gpus(self, need: Need) -> float:
        """GPUs that one worker reserves."""
        setting = self._of(need).gpus
        return setting if setting is not None else need.gpus if self.ray.cluster_resources().get("GPU", 0) else 0

    def _of(self, need: Need) -> WorkersConfig:
        workers: WorkersConfig = getattr(self.config, need.kind)
        return workers

    def _pool(self, need: Need) -> tuple[int, int]:
        """Least and greatest number of workers."""
        own = self._of(need).workers
        if isinstance(own, int):
            return own, own
        if own is not None:
            return own
        there = self.ray.cluster_resources()
        gpus = self.gpus(need)
        fitting = there.get("GPU", 0) / gpus if gpus else there.get("CPU", 1) / self._of(need).cpus
        return 1, max(1, int(fitting))

    def run(self, need: Need, make: Callable[[], Worker[Any]], units: Sequence[Any], advance: Advance) -> None:
        """Do all units, in any order.

        Raises the RegretlessError that a worker raised, with its node and unit, and RegretlessError for a unit on which
        worker after worker died.
        """
        if not units:
            return
        config, gpus = self._of(need), self.gpus(need)
        if len(units) == 1 and not gpus:
            # A single unit gains nothing from the seconds that an actor takes to start.
            workers.InThisProcess().run(need, make, units, advance)
            return
        data = self.ray.data
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = data.DataContext.get_current().copy()
        context.enable_progress_bars = context.print_on_execution_start = False
        least, most = (min(count, len(units)) for count in self._pool(need))
        rows = [{"unit": pickle.dumps(unit), "number": number} for number, unit in enumerate(units)]
        tries, threads = _on_this_node(self.ray, _Tries), None if gpus else _threads()
        with data.DataContext.current(context):
            outcomes = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                _Actor,
                fn_constructor_args=(pickle.dumps(make), tries, Path.cwd(), max(1, int(config.cpus)), threads),
                batch_size=1,
                batch_format="numpy",
                compute=data.ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=2),
                num_cpus=config.cpus,
                num_gpus=gpus or None,
            )
            try:
                for row in outcomes.iter_rows():
                    self._accept(row, advance)
            except self.ray.exceptions.RayError as error:
                raise RegretlessError(
                    f"{need.kind}: Ray gave up: {why_ray(error)}; finished parts are kept, the same command resumes"
                ) from error

    def _accept(self, row: dict[str, Any], advance: Advance) -> None:
        outcome: _Outcome = pickle.loads(row["outcome"])
        if outcome[0] == "done":
            advance(*outcome[1:])
            return
        _, error, trace, where = outcome
        if isinstance(error, RegretlessError):
            raise type(error)(f"{error} ({where})") from error
        console.print(trace, soft_wrap=True)
        raise RegretlessError(f"{where}: {type(error).__name__}: {error}") from error


def why_ray(error: Exception) -> str:
    """Why Ray gave up, in one line: the first of its message, but the one about memory if there is one.

    A worker that Ray's memory monitor ended is otherwise said to have died unexpectedly, or to be restarted.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    memory = next((line for line in lines if OUT_OF_MEMORY.search(line)), None)
    if memory is None:
        return lines[0]
    return (
        f"{memory} (Ray's memory monitor ends workers when a node's memory is nearly full: use fewer workers at a "
        "time, smaller batches, or a node with more memory)"
    )


_Outcome = tuple[Literal["done"], int, int] | tuple[Literal["failed"], Exception, str, str]


class _Actor:
    """One worker, made at its first unit; its errors come back as values, with node and unit."""

    def __init__(self, make: bytes, tries: Any, directory: Path, cpus: int, threads: int | None) -> None:
        workers.limit_cpus(cpus)
        self.make, self.tries, self.directory, self.threads = make, tries, directory, threads
        self.worker: Worker[Any] | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        asked = zip(batch["number"], batch["unit"], strict=True)
        return {"outcome": [pickle.dumps(self._outcome(int(number), unit)) for number, unit in asked]}

    def _outcome(self, number: int, pickled: bytes) -> _Outcome:
        import ray

        tally = Tally()
        unit = pickle.loads(pickled)
        where = f"worker on node {socket.gethostname()}, process {os.getpid()}, unit {_shown(unit)}"
        try:
            if ray.get(self.tries.begin.remote(number)) > TRIES:
                raise RegretlessError(
                    f"{TRIES} workers died on the same unit of work, which is not tried again; look for the reason in "
                    "Ray's logs (memory is the most frequent one); finished parts are kept"
                )
            if self.worker is None:
                self.worker = self._made()
            self.worker(unit, tally)
        except Exception as error:
            return "failed", portable(error), traceback.format_exc(), where
        return "done", tally.done, tally.tokens

    def _made(self) -> Worker[Any]:
        if not self.directory.is_dir():
            raise ConfigError(
                f"cluster: the working directory {self.directory} of the first process is not on this node; start the "
                "run in a folder that all nodes share"
            )
        # Where relative paths of a recipe start; Ray gives each worker a directory of its own.
        os.chdir(self.directory)
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
        worker: Worker[Any] = pickle.loads(self.make)()
        if isinstance(worker, contextlib.AbstractContextManager):
            worker.__enter__()
        return worker


class _Tries:
    """Counts how often each unit was begun: Ray retries a unit whose worker died without end."""

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()

    def begin(self, number: int) -> int:
        """One more try of the unit; returns which one it is."""
        self.begun[number] += 1
        return self.begun[number]


def _on_this_node(ray: Any, kind: type) -> Any:
    """An actor of a class, where possible on the node of this process, whose end is the run's end anyway."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=strategy)(kind).remote()


def _shown(unit: Any) -> str:
    first = unit[0] if isinstance(unit, list) and unit else unit
    return str(first[-1] if isinstance(first, tuple) else first)[:200]


def _threads() -> int:
    """Threads of this process's arithmetic: sums over another number of threads may round in another way."""
    import torch

    return torch.get_num_threads()
