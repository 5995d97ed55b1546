"""What torch's context parallelism gives on two CPU processes: attention over each process's own part, and no error.

    torchrun --nproc-per-node 2 experiments/context_parallel.py

Prints for each process the largest difference between its part of the output and that part of the attention over the
whole sequence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    """Run in every process."""
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 16, 8) for _ in range(3))
    # Each process has one chunk from the front and one from the back, so that causal attention costs all the same.
    chunks = scaled_dot_product_attention(query, key, value, is_causal=True).chunk(2 * count, dim=2)
    expected = torch.cat([chunks[rank], chunks[2 * count - 1 - rank]], dim=2)
    mesh = init_device_mesh("cpu", (count,))
    with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
    print(f"process {rank}: largest difference {float((found - expected).abs().max()):.2g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
