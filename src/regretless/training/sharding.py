"""Strategy `fsdp2`: accelerate shards weights, gradients and optimizer state over the processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
"""What `accelerate launch --config_file examples/accelerate/fsdp2.yaml` sets in the environment of its processes."""
SHARDS = "pytorch_model_fsdp_*"
"""Folders of a sharded model in a checkpoint."""


def shard_model() -> None:
    """Make trainers that this process creates from now on shard the model over all processes."""
    os.environ.update(FSDP2)
    if not torch.accelerator.is_available():
        let_cpus_shard()


def let_cpus_shard() -> None:
    """Take CPU processes for GPUs where accelerate asks which may shard: it knows FSDP for accelerators only.

    Everything after that question works on CPU tensors over gloo. So a recipe can be tried without GPUs.
    """
    original = PartialState.__init__

    def init(self: PartialState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def is_sharded(checkpoint: Path) -> bool:
    """True for a checkpoint to which each process wrote its part."""
    return any(path.is_dir() for path in checkpoint.glob(SHARDS))


def writes_shards(accelerator: Any) -> bool:
    """True for an accelerator whose processes each write their part of a checkpoint."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin is not None and "SHARDED_STATE_DICT" in str(plugin.state_dict_type)


@contextlib.contextmanager
def whole_weights(accelerator: Any) -> Iterator[None]:
    """Within the block, a model that is sharded is saved as one that is not, whatever its checkpoints are."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        yield
        return
    kind = plugin.state_dict_type
    plugin.set_state_dict_type("FULL_STATE_DICT")
    try:
        yield
    finally:
        plugin.set_state_dict_type(kind)
