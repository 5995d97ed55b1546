"""The files in examples/ for clusters, and the Dockerfile: they parse, say what they should, and their command runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from forked import regretless

PROJECT = Path(__file__).resolve().parents[1]
EXAMPLES = PROJECT / "examples"
SLURM = EXAMPLES / "slurm" / "regretless.sbatch"
KUBERAY = EXAMPLES / "kuberay" / "rayjob.yaml"
SKYPILOT = EXAMPLES / "skypilot" / "regretless.yaml"
CLUSTER = "--cluster"
"""What the commands for several nodes have, and those for one have not. A command is run without it here: whether a
cluster gives the same results is tested in tests/workflow/test_cluster.py."""
TOOLS = {
    "regretless": 'printf "%s\\n" "$*" >> "$CALLS"',
    "srun": '[ "$SRUN_CPUS_PER_TASK" = 64 ] && exec "$@"',
    "scontrol": "for number in 1 2; do echo node-$number; sleep 0.1; done",
    "ray": 'echo "ray $*" >> "$CALLS"; while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "start_cluster": 'echo start_cluster >> "$CALLS"',
}
"""In the place of what is not on this machine: they note how they were called, and run what they should run."""


def run_script(script: str, folder: Path, environment: dict[str, str], *arguments: str) -> list[str]:
    """Run a shell script with stand-ins for the cluster's tools; their calls, in order."""
    home = folder / "home"
    for name, code in TOOLS.items():
        place = home / "sky_templates" / "ray" if name == "start_cluster" else folder / "bin"
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"#!/bin/bash\n{code}\n")
        (place / name).chmod(0o755)
    calls = folder / "calls"
    calls.write_text("")
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    subprocess.run(
        ["bash", "-c", script, "script", *arguments],
        env={**environment, "PATH": path, "HOME": str(home), "CALLS": str(calls)},
        cwd=folder,
        check=True,
    )
    return calls.read_text().splitlines()


def slurm(folder: Path, nodes: int) -> list[str]:
    text = SLURM.read_text(encoding="utf-8")
    environment = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_CPUS_PER_TASK": "64"}
    return run_script(text, folder, environment, "train.objective=dpo")


def skypilot(folder: Path, nodes: int, rank: int) -> list[str]:
    task = yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))
    environment = {**task["envs"], "SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_RANK": str(rank)}
    return run_script(task["run"], folder, environment)


def inner_commands(folder: Path) -> dict[str, list[str]]:
    """The arguments of `regretless` in each example, for one node and for four."""
    job = yaml.safe_load(KUBERAY.read_text(encoding="utf-8"))
    name, *kuberay = shlex.split(job["spec"]["entrypoint"])
    assert name == "regretless"
    return {
        "slurm, 1 node": shlex.split(slurm(folder / "a", 1)[-1]),
        "slurm, 4 nodes": shlex.split(slurm(folder / "b", 4)[-1]),
        "kuberay": kuberay,
        "skypilot, 1 node": shlex.split(skypilot(folder / "c", 1, 0)[-1]),
        "skypilot, 4 nodes": shlex.split(skypilot(folder / "d", 4, 0)[-1]),
    }


def without(words: list[str], *flags: str) -> list[str]:
    """A command without flags and their values."""
    places = [place for flag in flags if flag in words for place in (words.index(flag), words.index(flag) + 1)]
    return [word for place, word in enumerate(words) if place not in places]


def test_slurm_example_when_submitted_for_one_node_and_for_four_then_each_node_has_eight_gpus(tmp_path: Path) -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SLURM.read_text(encoding="utf-8"), re.MULTILINE))
    assert options["gpus-per-node"] == "8" and options["ntasks-per-node"] == "1" and "requeue" in options
    (one,) = slurm(tmp_path / "1", 1)
    assert "--cluster" not in one and one.endswith("train.objective=dpo")
    ray, several = slurm(tmp_path / "4", 4)
    assert ray.startswith("ray symmetric-run --address node-1:6379 --min-nodes 4 --num-gpus 8 -- regretless run ")
    assert several.endswith("--cluster auto train.objective=dpo")


def test_kuberay_example_when_parsed_then_four_workers_have_eight_gpus_and_all_pods_share_the_run_folder() -> None:
    job: Any = yaml.safe_load(KUBERAY.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["maxReplicas"] == 4
    (folder,) = re.findall(r"--output-dir (\S+)", job["spec"]["entrypoint"])
    images = set()
    for group, gpus in ((cluster["headGroupSpec"], None), (workers, "8")):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        images.add(container["image"])
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
        assert mounts["/shared"] in claims and folder.startswith("/shared/")
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts.values())
    assert len(images) == 1


def test_skypilot_example_when_launched_then_one_node_needs_no_cluster_and_of_several_the_first_starts_the_run(
    tmp_path: Path,
) -> None:
    task = yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))
    assert task["num_nodes"] == 4 and task["resources"]["accelerators"] == "H100:8"
    assert any(task["envs"]["RUN_DIR"].startswith(f"{place}/") for place in task["volumes"])
    assert "--cluster" not in " ".join(skypilot(tmp_path / "1", 1, 0))
    head, other = (skypilot(tmp_path / f"4-{rank}", 4, rank) for rank in (0, 1))
    assert head[0] == "start_cluster" and head[1].endswith("--cluster auto")
    assert other == ["start_cluster"]


@pytest.mark.slow
def test_inner_commands_when_run_small_then_they_go_from_prompts_to_a_report(tmp_path: Path) -> None:
    commands = inner_commands(tmp_path)
    for name, words in commands.items():
        assert (CLUSTER in words) == ("4 nodes" in name or name == "kuberay"), name
        assert words[:2] == ["run", "recipes/math/qwen3-1.7b.yaml"] and "--output-dir" in words, name
    # Several files have the same command.
    distinct = {tuple(without(words, "--output-dir", CLUSTER)) for words in commands.values()}
    for number, words in enumerate(sorted(distinct)):
        folder = tmp_path / f"run-{number}"
        log = tmp_path / f"log-{number}"
        done = regretless(*words, "--smoke", "--output-dir", folder, log=log, folder=PROJECT)
        assert done.returncode == 0, done.stderr
        assert (folder / "report" / "report.html").is_file()
    assert len(distinct) == 2


def test_dockerfile_when_read_then_it_copies_what_exists_and_takes_the_versions_of_the_project() -> None:
    text = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE) == ["cpu", "cuda"]
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()]
    assert {"src", "recipes", "examples", "constraints"} <= set(copied)
    ignored = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in copied:
        assert (PROJECT / name).exists() and f"!{name}" in ignored, name
    # The rule that `make quickstart` uses, which pins by constraints/cpu.txt.
    (rule,) = re.findall(r"make (\S+) VENV=(\S+)", text)
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    assert rule[0] == f"{rule[1]}/.runtime" and "quickstart: $(VENV)/.runtime" in makefile
    assert "$(VENV)/.runtime: pyproject.toml $(CONSTRAINTS)" in makefile
    (image,) = re.findall(r"^FROM vllm/vllm-openai:v(\d+\.\d+)\.\d+ ", text, re.MULTILINE)
    assert f'vllm = ["vllm>={image},<' in (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
