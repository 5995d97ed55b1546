"""Memory and time of a long pair's training step, by the number of processes that compute its row together.

    python benchmarks/sequence_parallel.py                            # 1, 2 and 4 processes, one thread each
    python benchmarks/sequence_parallel.py --sizes 1,2 --prompt 6000

One pair of random tokens, LoRA on a small Qwen3 architecture, float32 on CPUs over gloo. Printed for each number of
processes: what a process needs at most in addition to the loaded model, the median seconds of a forward and backward
pass, and the row's loss, which has to be the same.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

from regretless.modeling.forward import causal_model, grouped, response_scores
from regretless.modeling.layout import lay_out
from regretless.modeling.sequence_parallel import SequenceGroup

PASSES = 3


def resident() -> float:
    """MiB of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def work(prompt: int, response: int, layers: int, report: Path) -> None:
    """In each process: passes over one row; the first writes memory (MiB, the most of any), seconds, and the loss."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": layers, "vocab_size": 8192}
    model = get_peft_model(
        AutoModelForCausalLM.from_config(Qwen3Config(**size, **heads, max_position_embeddings=1 << 17)),
        LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    start, *sides = torch.randint(4, 8192, (prompt + 2 * response,)).split([prompt, response, response])
    layout, places = lay_out([(tuple(start.tolist()), tuple(side.tolist())) for side in sides])
    sequence = SequenceGroup.of_neighbors(dist.get_world_size())
    before, seconds = resident(), []
    for _ in range(PASSES):
        started = time.perf_counter()
        with grouped(causal_model(model), sequence=sequence if sequence.size > 1 else None):
            logps = response_scores(model, layout).logps
            loss = -torch.nn.functional.logsigmoid(logps[places[0]].mean() - logps[places[1]].mean())
            loss.backward()
        seconds.append(time.perf_counter() - started)
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        report.write_text(f"{float(peak)} {statistics.median(seconds)} {float(loss.detach())}")
    os._exit(0)  # taking gloo's groups apart can hang


def main() -> None:
    """Start the processes for each number of them, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4", help="numbers of processes")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the prompt")
    parser.add_argument("--response", type=int, default=1000, help="tokens of each response")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.prompt, given.response, given.layers, given.worker)
    print(f"a row of {given.prompt + 2 * (given.response - 1)} tokens, {given.layers} layers")
    print(
        "| processes | MiB over the model, a process | ÷ one process | seconds a pass | loss |\n|---|---|---|---|---|"
    )
    alone = None
    for size in map(int, given.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            command = [*("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"), *sys.argv]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            subprocess.run([sys.executable, *command, "--worker", str(report)], check=True, env=environment)
            memory, seconds, loss = map(float, report.read_text().split())
        alone = alone or memory
        print(f"| {size} | {memory:.0f} | {memory / alone:.2f} | {seconds:.1f} | {loss:.6f} |", flush=True)


if __name__ == "__main__":
    main()
