"""On a GPU: shared-prefix training against plain computation, against TRL, and against the device's peak.

    python benchmarks/gpu.py --peak-tflops 989      # Qwen3-1.7B's shape, LoRA r = 32, bfloat16; H100, H200: 989
    python benchmarks/gpu.py --tiny --skip-trl      # the same path in miniature, on a CPU too

It prints tables for docs/performance.md. Measurements stop after `--minutes`; those without a result, because they
failed or the time was over, are named at the end. Weights are random: speed and memory do not depend on them. Model
FLOPs are those of the necessary matrix products (benchmarks/limit.py), so utilization counts each distinct token once;
"pairwise" counts the products that a pairwise trainer would need for the same pairs. The comparison with TRL needs
`pip install .[bench]`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from limit import products
from pairs import Pair, conversation_pairs, synthetic_pairs, whole_queries
from sides import LORA, PAIRS_PER_STEP, QWEN3_1_7B, SMALL_QWEN3, Case, measure
from train_vs_trl import TRL_GRID, agree, ratio, share_of_limit

from regretless.core.text_cleaning import never_fail_to_print

Result = TypeVar("Result")
MICROBATCHES = (4, 8, 16)
"""Of TRL; the fastest is compared with."""
LENGTHS_STEPS = 200
"""Steps of one query each, with ever new lengths, in which compilations are counted."""
VARIANTS: dict[str, dict[str, Any]] = {
    "layers compiled": {"compile_layers": True},
    "Liger": {"use_liger_kernel": True},
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing, offloaded": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
}


def check(
    shape: dict[str, Any],
    vocabulary: int,
    pairs: list[Pair],
    device: str,
    dtype: torch.dtype,
    compiled: bool = False,
) -> dict[str, float]:
    """Log-probabilities (nats) and LoRA gradient (relative L2) against one sequence at a time in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from regretless.modeling.compiled_layers import compile_layers
    from regretless.modeling.forward import causal_model, grouped, response_scores
    from regretless.modeling.layout import lay_out

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=vocabulary, **shape)
    with torch.device(device):
        model = get_peft_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), LoraConfig(**LORA))
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
    if compiled:
        compile_layers(causal_model(model))
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


class Utilization:
    """Share of a device's peak that a speed in pairs is worth."""

    def __init__(self, case: Case, peak_tflops: float | None) -> None:
        self._peak = peak_tflops

        def flops(pairs: Sequence[Pair]) -> float:
            needed = products(case.model, case.vocabulary, LORA["r"], pairs)
            return sum(product.flops for product in needed)

        # A pairwise trainer computes the prompt and the response of each side by themselves.
        alone = [pair | {"chosen_ids": pair[side], "rejected_ids": pair[side]} for pair in case.pairs for side in SIDES]
        self._distinct, self._pairwise = (
            each / len(case.pairs) / 1e12 for each in (flops(case.pairs), sum(flops([pair]) for pair in alone))
        )

    def cells(self, pairs_per_second: float) -> list[str]:
        """TFLOP/s and share of the peak, of the distinct tokens' products and of a pairwise trainer's."""
        rates = (pairs_per_second * self._distinct, pairs_per_second * self._pairwise)
        return [f"{rate:.3g}" + (f" ({rate / self._peak:.1%})" if self._peak else "") for rate in rates]


def median(runs: list[dict[str, Any]], key: str) -> float:
    """Median of a measured quantity."""
    return statistics.median(run[key] for run in runs)


class Measured:
    """Measurements until a deadline, as rows of the tables."""

    def __init__(self, end: float, peak_tflops: float | None) -> None:
        self.runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self.missing: dict[str, str] = {}
        """What has no result, and why."""
        self.end, self._peak = end, peak_tflops

    def attempt(self, name: str, work: Callable[[], Result]) -> Result | None:
        """What `work` returns; None, and noted as missing, if the time is over or it failed."""
        try:
            return work()
        except TimeoutError:
            self.missing[name] = "no time left"
        # A worker that failed, or torch in this process.
        except (SystemExit, RuntimeError) as failed:
            self.missing[name] = "failed"
            print(f"{name}: {failed}", file=sys.stderr, flush=True)
        return None

    def add(self, name: str, case: Case, sides: dict[str, tuple[str, dict[str, Any]]]) -> bool:
        """Measure each of the sides once more; False if not all of them have a result."""
        number = 1 + len(self.runs.get(name, {}).get("ours", []))

        def once() -> dict[str, dict[str, Any]]:
            return {side: measure(kind, case, options, until=self.end) for side, (kind, options) in sides.items()}

        found = self.attempt(name if number == 1 else f"repeat {number} of {name}", once)
        for side, run in (found or {}).items():
            self.runs.setdefault(name, {}).setdefault(side, []).append(run)
        return found is not None

    def row(self, name: str, case: Case, label: str) -> str:
        """Row of the table for what was added by this name."""
        runs = self.runs[name]
        ours, trl = runs["ours"], runs.get("TRL")
        cells = [label, f"{median(ours, 'pairs_per_second'):.2f}"]
        if trl:
            memory = ratio(runs, "peak_over_base_mib", "ours", "TRL")
            cells += [f"{median(trl, 'pairs_per_second'):.2f}", ratio(runs, "pairs_per_second", "ours", "TRL"), memory]
        else:
            cells += ["–", "–", "–"]
        cells += [f"{median(ours, 'peak_over_base_mib'):.0f}", share_of_limit(ours)]
        cells += Utilization(case, self._peak).cells(median(ours, "pairs_per_second"))
        return "| " + " | ".join([*cells, str(max(run["compilations"] for run in ours))]) + " |"


SIDES = ("chosen_ids", "rejected_ids")
HEADER = (
    "pairs/s", "TRL best, pairs/s", "÷ TRL best", "memory ÷ TRL best", "MiB over the weights", "share of the limit",
    "TFLOP/s, distinct", "TFLOP/s, pairwise", "compilations",
)  # fmt: skip


def head(first: str, columns: Sequence[str]) -> str:
    """First two lines of a table."""
    return "| " + " | ".join([first, *columns]) + " |\n" + "|---" * (1 + len(columns)) + "|"


def checks(
    measured: Measured, shape: dict[str, Any], vocabulary: int, prompt: int, response: int, device: str
) -> dict[str, Any]:
    """Print and return what `check` finds by precision; conversations have beginnings that responses share."""
    pairs = synthetic_pairs(2, 2, 2, prompt, response, vocabulary)
    turn = max(8, response // 4)
    pairs += conversation_pairs(1, 2, 2, prompt, turns=4, part_at=3, turn=turn, vocabulary=vocabulary)
    found: dict[str, Any] = {}
    for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        key = str(dtype).removeprefix("torch.") + (", layers compiled" if compiled else "")
        work = partial(check, shape, vocabulary, pairs, device, dtype, compiled)
        if gaps := measured.attempt(f"check in {key}", work):
            found[key] = gaps
            numbers = ", ".join(f"{what} {value:.2e}" for what, value in gaps.items())
            print(f"{key}, against plain float32: {numbers}", flush=True)
    # The workers that follow need the device's memory.
    gc.collect()
    torch.cuda.empty_cache()
    return found


def trl_best(measured: Measured, case: Case) -> dict[str, Any] | None:
    """TRL's configuration with the fastest micro-batch, after loss and gradient of one batch have been compared.

    A micro-batch that fails (a large one may not fit) is left out; None if all do, or the comparison does.
    """
    compared = measured.attempt("TRL", lambda: agree(case, measured.end))
    if compared is None:
        return None
    print(f"both sides on one batch: {compared}", flush=True)
    short = replace(case, pairs=whole_queries(case.pairs, 2 * case.pairs_per_step))
    speeds: list[tuple[float, dict[str, Any]]] = []
    for size in MICROBATCHES:
        options = TRL_GRID[0] | {"per_device_train_batch_size": size}
        work = partial(measure, "trl", short, options, until=measured.end)
        if run := measured.attempt(f"TRL, micro-batch {size}", work):
            speeds.append((run["pairs_per_second"], options))
    if not speeds:
        return None
    best = max(speeds, key=lambda speed: speed[0])[1]
    print(f"TRL best: micro-batch {best['per_device_train_batch_size']}\n", flush=True)
    return best


def rows(
    measured: Measured, case: Case, many: Case, sides: dict[str, tuple[str, dict[str, Any]]], repeats: int
) -> Iterator[tuple[str, str, Case]]:
    """Measure everything once, then `case` again. Yields label, name and case of each row of the table."""
    for each in (case, many):
        if measured.add(each.name, each, sides):
            yield each.name, each.name, each
    for variant, options in VARIANTS.items():
        if "use_liger_kernel" in options and importlib.util.find_spec("liger_kernel") is None:
            measured.missing[variant] = "not installed"
        elif case.device == "cpu" and variant not in ("layers compiled", "checkpointing"):
            measured.missing[variant] = "needs a GPU"
        elif measured.add(variant, case, {"ours": ("ours", options)}):
            yield f"{case.name}, {variant}", variant, case
    if case.name not in measured.runs:
        return
    done = measured.runs[case.name]["ours"]
    while len(done) < repeats and measured.add(case.name, case, sides):
        pass
    if len(done) > 1:
        yield f"{case.name}, {len(done)} repeats", case.name, case


def main() -> None:
    """Print what was checked and measured."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model and short responses")
    parser.add_argument("--skip-trl", action="store_true", help="measure this package only")
    parser.add_argument("--repeats", type=int, default=3, help="of 2×2, as far as there is time")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything")
    parser.add_argument("--peak-tflops", type=float, help="the device's dense bfloat16 peak, for utilization")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    args = parser.parse_args()
    measured = Measured(time.monotonic() + 60 * args.minutes, args.peak_tflops)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, vocabulary = ({**SMALL_QWEN3, "num_hidden_layers": 2}, 512) if args.tiny else (QWEN3_1_7B, 151_936)
    prompt, response = (20, 30) if args.tiny else (104, 306)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, P≈{prompt}, R≈{response}\n")
    found = checks(measured, shape, vocabulary, prompt, response, device)

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(found | {"runs": measured.runs}, indent=1))

    # bfloat16 throughout on a GPU; on a CPU it would only be slow.
    common: dict[str, Any] = {"device": device, "bf16": device == "cuda"}
    steps, half = (6, 2) if args.tiny else (LENGTHS_STEPS, 8)
    small = synthetic_pairs(steps, 2, 2, 50, 100, 512)
    measured.add("lengths", Case("lengths", 512, small, pairs_per_step=4, **common), {"ours": ("ours", {})})
    for run in measured.runs.get("lengths", {}).get("ours", []):
        print(f"{run['compilations']} compilations in {steps} steps of new lengths after the first\n", flush=True)
    keep()

    pairs = synthetic_pairs(PAIRS_PER_STEP * args.steps // 4, 2, 2, prompt, response, vocabulary)
    case = Case("2×2", vocabulary, pairs, model=shape, **common)
    pairs = synthetic_pairs(max(2, args.steps // 4), half, half, prompt, response // 2, vocabulary)
    many = Case(f"{2 * half} responses", vocabulary, pairs, pairs_per_step=half * half, model=shape, **common)
    sides: dict[str, tuple[str, dict[str, Any]]] = {"ours": ("ours", {})}
    best = None if args.skip_trl else trl_best(measured, case)
    if best is not None:
        sides["TRL"] = ("trl", best)

    print(head("responses a query", HEADER))
    for label, name, each in rows(measured, case, many, sides, args.repeats):
        print(measured.row(name, each, label), flush=True)
        keep()
    if measured.missing:
        print("\nnot measured: " + ", ".join(f"{name} ({why})" for name, why in measured.missing.items()))


if __name__ == "__main__":
    main()
