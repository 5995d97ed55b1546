"""`regretless doctor`: what is installed, what this machine has, and what will be used because of that."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME, HF_HUB_OFFLINE
from transformers.utils import is_torch_bf16_gpu_available

from regretless.core.errors import ConfigError, error_line
from regretless.core.plugins import Registry
from regretless.core.terminal import FoldingTable, print_json, terminal
from regretless.core.versions import versions
from regretless.data.prompt_templates import TEMPLATES
from regretless.evaluation.benchmarks import BENCHMARKS
from regretless.labeling.pairing_rules import RULES
from regretless.labeling.verifiers import VERIFIERS
from regretless.modeling.forward import in_one_row
from regretless.modeling.load import best_device, is_slow_here
from regretless.objectives import OBJECTIVES
from regretless.sampling.engines import ENGINES
from regretless.workflow.workers import cpus

OPTIONAL_PACKAGES = ("vllm", "ray", "matplotlib", "triton", "liger-kernel", "flash-attn", "bitsandbytes", "trl")
"""Packages that are used if they are installed."""
GIB = 1 << 30
CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Limit of a container's memory, where there is one."""
MEMORY_STATE = Path("/proc/meminfo")


def diagnosis() -> dict[str, dict[str, Any]]:
    """Versions, machine, what will be used, and problems; by section and name, with values for JSON."""
    device = best_device()
    return {
        "versions": {**versions(), **_optional()},
        "machine": _machine(),
        "used": _used(device),
        "sampling engines": {name: _engine(name) for name in ENGINES},
        "problems": {str(number): problem for number, problem in enumerate(_problems(), 1)},
    }


def show_diagnosis(*, as_json: bool = False) -> None:
    """Print the diagnosis: a table for each section, or JSON for programs."""
    report = diagnosis()
    if as_json:
        print_json({**report, "problems": list(report["problems"].values())})
        return
    output = terminal()
    for section, values in report.items():
        if not values:
            continue
        table = FoldingTable(title=section, title_justify="left", show_header=False)
        table.add_column("name", min_width=min(24, max(map(len, values))))
        table.add_column("value")
        for name, value in values.items():
            table.add_row(str(name), "none" if value is None else str(value))
        output.print(table)


def _optional() -> dict[str, str | None]:
    return {name: _version(name) for name in OPTIONAL_PACKAGES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "python": sys.executable,
        "cores": cpus(),
        "threads of torch": torch.get_num_threads(),
        "memory (GiB)": round(_memory() / GIB, 1),
        "memory free (GiB)": None if (free := _free_memory()) is None else round(free / GIB, 1),
        "disk free here (GiB)": round(shutil.disk_usage(Path.cwd()).free / GIB, 1),
        "driver and CUDA": _cuda(),
    }
    if not torch.accelerator.is_available():
        return {**machine, "accelerator": None}
    for number in range(torch.accelerator.device_count()):
        machine[f"accelerator {number}"] = _accelerator(number)
    return machine


def _memory() -> int:
    """Bytes of memory that this process may use: the machine's, or the container's limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(CGROUP_MEMORY_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or "max"
        return machine


def _free_memory() -> int | None:
    """Bytes that a new process can use without swapping; None where the system does not say (macOS)."""
    try:
        lines = MEMORY_STATE.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min(1024 * kilobytes[0], _memory()) if kilobytes else None


def _cuda() -> str | None:
    """The CUDA that torch was built with, and whether a GPU is visible to it; None for a build without CUDA."""
    if torch.version.cuda is None:
        return None
    return f"torch is built with CUDA {torch.version.cuda}" + ("" if torch.cuda.is_available() else "; no GPU is found")


def _accelerator(number: int) -> str:
    if not torch.cuda.is_available():
        return str(torch.accelerator.current_accelerator())
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, compute capability {capability}"


def _used(device: torch.device) -> dict[str, str]:
    """What training and sampling do on this machine with default settings."""
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    half = "works" if is_torch_bf16_gpu_available() or device.type == "cpu" else "needs a GPU that has it"
    if is_slow_here(torch.bfloat16):
        half = "is slow: this CPU has no instructions for it"
    liger = "possible: use_liger_kernel=True" if _version("liger-kernel") else "no: liger-kernel is not installed"
    return {
        "device": f"{device.type}, {devices} of them" if devices else device.type,
        "dtype": f"float32 for trained weights; computing in bfloat16 (bf16=True) {half}",
        "attention in training": _attention(device),
        "attention in sampling": "the model's own, which is SDPA by default; vLLM chooses its own",
        "Liger kernels": liger,
        "FlashAttention": "not in training: it has no masks, which responses that share their prompt need",
        "processes of a recipe's training": f"{devices}, one for each GPU" if devices else "1",
        "hub": "offline (HF_HUB_OFFLINE): models and data come from the cache" if HF_HUB_OFFLINE else "online",
        "cache of models and data": HF_HOME,
    }


def _attention(device: torch.device) -> str:
    if not in_one_row(device):
        return "SDPA, one call for each response of a row"
    if importlib.util.find_spec("triton") is None:
        return "none: FlexAttention needs triton, which is not installed"
    return "FlexAttention over whole rows, compiled with triton"


def _engine(name: str) -> str:
    try:
        kind = ENGINES.find(name)
        kind.check()
    except ConfigError as error:
        return f"no: {error}"
    # A plug-in's check may raise anything.
    except Exception as error:
        return f"no: {error_line(error)}"
    return "yes, with a server in sample.server" if kind.takes_server else "yes"


def _problems() -> list[str]:
    """Parts of installed plug-ins that cannot be used."""
    tables: Mapping[str, Registry[Any]] = {
        table.kind: table for table in (OBJECTIVES, ENGINES, VERIFIERS, RULES, BENCHMARKS, TEMPLATES)
    }
    return [problem for table in tables.values() for problem in table.usable()[1]]
