"""`regretless doctor`: what is installed, what this machine has, and what will be used because of that."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from rich.text import Text
from transformers.utils import is_torch_bf16_gpu_available

from regretless.core.errors import ConfigError
from regretless.core.plugins import Registry
from regretless.core.terminal import terminal
from regretless.core.versions import versions
from regretless.core.workers import cpus
from regretless.data.prompts import TEMPLATES
from regretless.evaluation.benchmarks import BENCHMARKS
from regretless.labeling.verifiers import VERIFIERS
from regretless.modeling.forward import in_one_row
from regretless.modeling.load import best_device
from regretless.objectives import OBJECTIVES
from regretless.pairing.rules import RULES
from regretless.sampling.engines import ENGINES

OPTIONAL = ("vllm", "ray", "matplotlib", "s3fs", "gcsfs", "triton", "liger-kernel", "flash-attn", "bitsandbytes", "trl")
"""Packages that are used if they are installed."""
GIB = 1 << 30
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Limit of a container's memory, where there is one."""


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
    """Print the diagnosis: a table, or JSON for programs."""
    found = diagnosis()
    output = terminal()
    if as_json:
        values = {**found, "problems": list(found["problems"].values())}
        output.print(json.dumps(values, indent=2, ensure_ascii=False), soft_wrap=True)
        return
    table = Table("section", "name", Column("value", overflow="fold"), show_header=False)
    for section, values in found.items():
        for row, (name, value) in enumerate(values.items()):
            shown = "none" if value is None else str(value)
            table.add_row(Text(section if row == 0 else "", style="bold"), str(name), shown)
        table.add_section()
    output.print(table)


def _optional() -> dict[str, str | None]:
    return {name: _version(name) for name in OPTIONAL}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "system": platform.platform(),
        "python": sys.executable,
        "cores": cpus(),
        "threads of torch": torch.get_num_threads(),
        "memory (GiB)": round(_memory() / GIB, 1),
    }
    if not torch.accelerator.is_available():
        return {**found, "accelerator": None}
    for number in range(torch.accelerator.device_count()):
        found[f"accelerator {number}"] = _accelerator(number)
    return found


def _memory() -> int:
    """Bytes of memory that this process may use: the machine's, or the container's limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(MEMORY_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or "max"
        return machine


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
    half = "works" if is_torch_bf16_gpu_available() else "needs a GPU that has it"
    liger = "possible: use_liger_kernel=True" if _version("liger-kernel") else "no: liger-kernel is not installed"
    return {
        "device": f"{device.type}, {devices} of them" if devices else device.type,
        "dtype": f"float32 for trained weights; computing in bfloat16 (bf16=True) {half}",
        "attention in training": _attention(device),
        "attention in sampling": "the model's own, which is SDPA by default; vLLM chooses its own",
        "Liger kernels": liger,
        "FlashAttention": "not in training: it has no masks, which responses that share their prompt need",
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
    return "yes, with a server in sample.server" if kind.takes_server else "yes"


def _problems() -> list[str]:
    """Parts of installed plug-ins that cannot be used."""
    tables: Mapping[str, Registry[Any]] = {
        table.kind: table for table in (OBJECTIVES, ENGINES, VERIFIERS, RULES, BENCHMARKS, TEMPLATES)
    }
    return [problem for table in tables.values() for problem in table.usable()[1]]
