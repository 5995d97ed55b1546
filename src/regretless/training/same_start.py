"""Processes of a training start with equal weights: those of rank 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def share_weights(accelerator: Any, *models: nn.Module | None) -> None:
    """Give the models' parameters and buffers, in place, the values of rank 0; all processes have to call it.

    They may differ: an adapter or new embeddings that a script made without a seed have other numbers in each process.
    DDP makes them equal too, but after the reference is computed, and FSDP would join parts of different weights.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    # With efficient loading the other processes have no weights yet: accelerate hands those of rank 0 out.
    if accelerator.num_processes == 1 or (plugin is not None and plugin.cpu_ram_efficient_loading):
        return
    for model in models:
        if model is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                # One at a time on the device: nccl knows no other, and sharded models are not there yet.
                value = tensor.detach().to(accelerator.device).contiguous()
                dist.broadcast(value.flatten().view(torch.uint8), 0)
                tensor.copy_(value)
