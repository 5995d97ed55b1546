"""On a GPU: shared-prefix training against plain computation, against TRL, and against the device's peak.

    python benchmarks/gpu.py --peak-tflops 989      # Qwen3-1.7B's shape, LoRA r = 32, bfloat16; H100, H200: 989
    python benchmarks/gpu.py --tiny --skip-trl      # the same path in miniature, on a CPU too

Weights are random: speed and memory do not depend on them. Model FLOPs are those of the necessary matrix products
(benchmarks/limit.py). The comparison with TRL needs `pip install .[bench]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from limit import products
from pairs import Pair, conversation_pairs, synthetic_pairs
from sides import LORA, PAIRS_PER_STEP, QWEN3_1_7B, SMALL_QWEN3, Case, measure
from train_vs_trl import TRL_GRID, against_trl, markdown, share_of_limit

from regretless.core.terminal import never_fail_to_print

MICROBATCHES = (2, 4, 8, 16)


def check(
    shape: dict[str, Any], vocabulary: int, pairs: list[Pair], device: str, dtype: torch.dtype
) -> dict[str, float]:
    """Log-probabilities (nats) and LoRA gradient (relative L2) against one sequence at a time in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from regretless.modeling.forward import grouped, response_scores
    from regretless.modeling.layout import lay_out

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=vocabulary, **shape)
    model = get_peft_model(AutoModelForCausalLM.from_config(config).float(), LoraConfig(**LORA))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.to(device)
    items = list(
        dict.fromkeys(
            (tuple(p["prompt_ids"]), tuple(p[side])) for p in pairs for side in ("chosen_ids", "rejected_ids")
        )
    )
    layout, places = lay_out(items)
    weights = [torch.randn(len(response), device=device) / len(response) for _, response in items]

    def gradient() -> torch.Tensor:
        found = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return found

    wanted = []
    for (prompt, response), weight in zip(items, weights, strict=True):
        row = torch.tensor([prompt + response], device=device)
        logits = model(input_ids=row).logits[0, len(prompt) - 1 : -1].float()
        logps = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
        (logps * weight).sum().backward()
        wanted.append(logps.detach())
    wanted_gradient = gradient()

    model.to(dtype)
    with grouped(model):
        logps = response_scores(model, layout.to(torch.device(device))).logps
        parts = [logps[place] for place in places]
        sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
    gap = gradient() - wanted_gradient
    differences = torch.cat([part.detach() - plain for part, plain in zip(parts, wanted, strict=True)])
    return {
        "logp_mean_abs": float(differences.abs().mean()),
        "logp_max_abs": float(differences.abs().max()),
        "gradient_relative": float(gap.norm() / wanted_gradient.norm()),
    }


def main() -> None:
    """Print what was checked and measured."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model and short responses")
    parser.add_argument("--skip-trl", action="store_true", help="measure this package only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peak-tflops", type=float, help="the device's dense bfloat16 peak, for utilization")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, vocabulary = (SMALL_QWEN3, 512) if args.tiny else (QWEN3_1_7B, 151_936)
    prompt, response = (20, 30) if args.tiny else (104, 306)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, P≈{prompt}, R≈{response}\n")

    few = synthetic_pairs(2, 2, 2, prompt, response, vocabulary)
    few += conversation_pairs(1, 2, 2, prompt, turns=4, part_at=3, turn=max(8, response // 4), vocabulary=vocabulary)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        found[str(dtype)] = check(shape, vocabulary, few, device, dtype)
        print(f"{dtype} against plain float32: " + ", ".join(f"{k} {v:.2e}" for k, v in found[str(dtype)].items()))

    pairs = synthetic_pairs(PAIRS_PER_STEP * args.steps // 4, 2, 2, prompt, response, vocabulary)
    # bfloat16 throughout on a GPU; on a CPU it would only be slow.
    case = Case("2×2", vocabulary, pairs, args.steps, False, PAIRS_PER_STEP, shape, device, device == "cuda")
    if args.skip_trl:
        runs = {"ours": [measure("ours", case, {}) for _ in range(args.repeats)]}
    else:
        grid = [TRL_GRID[0] | {"per_device_train_batch_size": size} for size in MICROBATCHES]
        compared = against_trl(case, args.repeats, grid)
        runs = compared["runs"]
        print("\n" + markdown({case.name: compared}, [case]))
    speeds = [run["pairs_per_second"] for run in runs["ours"]]
    flops = sum(product.flops for product in products(shape, vocabulary, LORA["r"], pairs))
    rate = statistics.median(speeds) * flops / len(pairs)
    memory = statistics.median(run["peak_over_base_mib"] for run in runs["ours"])
    share = f", {rate / 1e12 / args.peak_tflops:.1%} of the peak" if args.peak_tflops else ""
    print(f"\nours: {statistics.median(speeds):.2f} pairs/s, {memory:.0f} MiB over the weights", end="")
    print(f", {rate / 1e12:.3f} TFLOP/s{share}, {share_of_limit(runs['ours'])} of the limit", end="")
    print(f", {max(run['compilations_after_first_step'] for run in runs['ours'])} compilations after the first step")
    if args.json:
        args.json.write_text(json.dumps(found | {"runs": runs}, indent=1))


if __name__ == "__main__":
    main()
