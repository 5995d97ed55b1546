"""An optimizer step over all processes: what each micro-batch counts, and which passes are made besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator

from regretless.training.batch import PairBatch
from regretless.training.passes import DummyPasses


def weighed(
    batches: Sequence[PairBatch], pairs: int, accelerator: Accelerator, *, sharded: bool
) -> tuple[list[tuple[PairBatch, float]], DummyPasses]:
    """This process's micro-batches, each with the weight of its mean loss, and passes to make besides them.

    Gradients are averaged over processes: the weights make that average the mean over all the step's pairs, of which
    this process has `pairs`, and that of the load-balancing loss the mean over all its counted tokens. Collective
    operations must match. So a process without pairs (an epoch's last step) computes a micro-batch with weight 0, and
    under sharding one with fewer passes than another makes as many.
    """
    processes = accelerator.num_processes
    trained = sum(len(batch.layouts) for batch in batches)
    total, tokens = pairs, sum(batch.counted_tokens for batch in batches)
    dummy = DummyPasses()
    if processes > 1:
        first = trained - len(batches)
        counts = torch.tensor([[total, first, trained, tokens if pairs else 0]], device=accelerator.device)
        everyone = accelerator.gather(counts)
        total, tokens = int(everyone[:, 0].sum()), int(everyone[:, 3].sum())
        if sharded:
            most = everyone.max(dim=0).values.tolist()
            dummy = DummyPasses(most[1] - first, most[2] - trained)
    if not pairs:
        return [(batch, 0.0) for batch in batches], dummy
    if tokens:
        batches = [
            replace(batch, aux_weight=batch.counted_tokens / tokens * total / len(batch.pairs)) for batch in batches
        ]
    return [(batch, len(batch.pairs) * processes / total) for batch in batches], dummy
