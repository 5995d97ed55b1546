"""One training run of one side, this package or TRL, in a fresh process: speed, reference pass, peak memory.

python benchmarks/sides.py TASK.json RESULT.pickle      # what `measure` starts
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pairs import Pair

PAIRS_PER_STEP = 16
"""Pairs of one optimizer step: four whole 2 × 2 queries."""
LISTED = 20
"""Most likely tokens that `estimator=topk` reads at each token."""
What = Literal["speed", "batch", "profile"]
KINDS = {
    "attention": ("scaled_dot_product",),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "softmax over the vocabulary": ("softmax", "aten::exp", "logsumexp"),
}
"""What is told apart in a profile, by parts of the names of torch's operations."""
LORA: dict[str, Any] = {
    "r": 32,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}
SMALL_QWEN3: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN3_1_7B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


@dataclass
class Case:
    """Pairs as token ids, the vocabulary they live in, and what is compared on them."""

    name: str
    vocabulary: int
    pairs: list[Pair]
    """All are trained on once and timed, after a step that is not."""
    with_default: bool = False
    """TRL at its defaults too."""
    pairs_per_step: int = PAIRS_PER_STEP
    model: dict[str, Any] = field(default_factory=lambda: SMALL_QWEN3)
    device: str = "cpu"
    bf16: bool = False
    """Weights in bfloat16, and autocast."""
    exact: bool = False
    """Weights rounded to bfloat16, everything computed in float32: what `bf16` is an approximation of."""
    threads: int = 1
    once: bool = False
    """One repeat, TRL at micro-batch 1 only, half the pairs compared: all else would take hours, or too much memory."""


def run(side: str, case: Case, options: dict[str, Any], what: What) -> dict[str, Any]:
    """Train one epoch with one side; pairs per second, and peak memory (MiB).

    `what`: "batch" instead gives the loss and LoRA gradient of the pairs, with adapters that do something, and
    "profile" the seconds a pair by kind of operation.
    """
    import limit
    import torch
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from torch._dynamo.utils import counters
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=case.vocabulary, **case.model)
    dtype = torch.bfloat16 if case.bf16 or case.exact else torch.float32
    # Made in its own type and place: a float32 copy would count in the process's peak memory.
    with torch.device(case.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if case.exact:
        model = model.float()
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(16)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w2", unk_token="w1")
    before = _peak_mib(case.device, reset=True)
    marks: list[tuple[float, float, int]] = []
    recorded = torch.profiler.profile()

    def mark() -> None:
        busy = limit.clock(case.device, case.threads)  # synchronizes first
        marks.append((time.perf_counter(), busy, counters["stats"]["unique_graphs"]))

    class Clock(TrainerCallback):
        """Marks the beginning and the end of the epoch."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The first step takes memory and chooses kernels, so it is not timed.
            _warm_up(trainer, case.pairs_per_step)
            if what == "profile":
                recorded.start()
            mark()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mark()
            if what == "profile":
                recorded.stop()

    with TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "num_train_epochs": 1,
            "learning_rate": 1e-5,
            "logging_steps": 1 if what == "batch" else 1000,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": case.device == "cpu",
            "bf16": case.bf16,
            "seed": 0,
            "max_length": None,
            "max_grad_norm": 1e9,
            "beta": 0.1,
        }
        torch.manual_seed(1)
        make = _ours if side == "ours" else _trl
        trainer = make(model, tokenizer, case, common, options, LoraConfig(**LORA))
        if what == "batch":
            numbers = torch.Generator().manual_seed(2)
            for _, parameter in sorted(trainer.model.named_parameters()):
                if parameter.requires_grad:
                    parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=numbers))
            return _one_batch(trainer)
        if side == "ours":
            start = time.perf_counter()
            trainer.prepare_reference()
            trainer.reference_seconds = time.perf_counter() - start
        trainer.add_callback(Clock())
        trainer.train()
    if what == "profile":
        return _by_kind(recorded, len(case.pairs))
    peak = _peak_mib(case.device) - before
    pairs = len(case.pairs)
    seconds, busy, compilations = (end - start for start, end in zip(*marks, strict=True))
    return {
        "pairs_per_second": pairs / seconds,
        "busy_seconds_per_pair": busy / pairs,
        "limit_seconds_per_pair": _limit(case, dtype) if side == "ours" else None,
        "reference_pairs_per_second": pairs / trainer.reference_seconds if trainer.reference_seconds else None,
        "peak_over_base_mib": peak,
        "compilations": compilations,
    }


def _warm_up(trainer: Any, pairs: int) -> None:
    """Gradients of one step on the first pairs, in micro-batches of the trainer's size; they are thrown away."""
    import torch

    size = trainer.args.per_device_train_batch_size
    trainer.current_gradient_accumulation_steps = 1
    for start in range(0, pairs, size):
        rows = [trainer.train_dataset[number] for number in range(start, min(start + size, pairs))]
        trainer.training_step(trainer.model_wrapped, trainer.data_collator(rows))
    trainer.model.zero_grad()
    if trainer.args.device.type == "cuda":
        torch.cuda.synchronize()


def _limit(case: Case, dtype: Any) -> float:
    """Seconds a pair that the matrix products alone would take, measured now."""
    import limit

    needed = limit.products(case.model, case.vocabulary, LORA["r"], case.pairs)
    steps = max(1.0, len(case.pairs) / case.pairs_per_step)
    return sum(limit.seconds(needed, dtype, case.device, case.threads, steps).values()) / len(case.pairs)


def _peak_mib(device: str, reset: bool = False) -> float:
    """Peak memory so far: of the process on a CPU, of the device's tensors on a GPU."""
    import resource

    import torch

    if device == "cpu":
        # Linux counts kibibytes, macOS bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.max_memory_allocated()) / 2**20


def _ours(model: Any, tokenizer: Any, case: Case, common: dict[str, Any], options: dict[str, Any], lora: Any) -> Any:
    from regretless import PreferenceConfig, PreferenceTrainer
    from regretless.data.tokenization import TokenizedPair, TokenizedSide

    objective = {"objective": "dpo", **options}

    def written(ids: Sequence[int]) -> TokenizedSide:
        top = _listed(len(ids), case.vocabulary) if "topk" in options.get("objective_kwargs", {}).values() else None
        return TokenizedSide(tuple(ids), {"behavior": (-0.5,) * len(ids)}, top)

    pairs = [
        TokenizedPair(
            pair_id=str(number),
            prompt_ids=tuple(pair["prompt_ids"]),
            chosen=written(pair["chosen_ids"]),
            rejected=written(pair["rejected_ids"]),
            source=f"pairs:{number + 1}",
            kind="original",
        )
        for number, pair in enumerate(case.pairs)
    ]
    args = PreferenceConfig(per_device_train_batch_size=case.pairs_per_step, **(common | objective))
    return PreferenceTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer, peft_config=lora)


def _listed(tokens: int, vocabulary: int) -> bytes:
    """`LISTED` likely tokens at each of so many, spread over the vocabulary, with nine tenths of the probability.

    They depend on the position alone: equal beginnings of responses list the same tokens, as those of one writer do.
    """
    import numpy as np

    from regretless.core.top_logps import packed

    ids = np.random.default_rng(0).integers(vocabulary // LISTED, size=(tokens, LISTED))
    ids += np.arange(LISTED) * (vocabulary // LISTED)
    return packed(ids, np.full(ids.shape, np.log(0.9 / LISTED))).tobytes()


def _trl(model: Any, tokenizer: Any, case: Case, common: dict[str, Any], options: dict[str, Any], lora: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):  # type: ignore[misc]
        """TRL's trainer on ids, so that both sides read the very same tokens; it times its reference pass."""

        reference_seconds = 0.0

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return super()._precompute_ref_logps(*args, **kwargs)
            finally:
                self.reference_seconds = time.perf_counter() - start

    batch = options.get("per_device_train_batch_size", 8)
    rows = [{"prompt": "", "chosen": "", "rejected": "", **pair, "length": _tokens(pair)} for pair in case.pairs]
    # group_by_length sorts by the column `length`, which must not be removed before it is read.
    fixed = {"remove_unused_columns": False}
    steps = {"gradient_accumulation_steps": case.pairs_per_step // batch}
    args = DPOConfig(**(common | fixed | steps | options))
    return Tokenized(
        model, None, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora
    )


def _tokens(pair: Pair) -> int:
    return len(pair["prompt_ids"]) + max(len(pair["chosen_ids"]), len(pair["rejected_ids"]))


def _one_batch(trainer: Any) -> dict[str, Any]:
    """Loss and LoRA gradient of all the pairs at once, the same pairs on both sides."""
    import torch

    model = trainer.model
    pairs = [trainer.train_dataset[number] for number in range(len(trainer.train_dataset))]
    if hasattr(trainer, "prepare_reference"):
        trainer.prepare_reference()
        loss = trainer.training_step(model, pairs)
    else:
        model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = trainer._prepare_inputs(trainer.data_collator(pairs))
        with trainer.accelerator.autocast():  # `train` wraps the model in it, which has not run
            loss = trainer.compute_loss(model, batch)
        loss.backward()
    gradient = torch.cat([p.grad.float().flatten() for _, p in sorted(model.named_parameters()) if p.requires_grad])
    return {"loss": float(loss.detach()), "gradient": gradient.cpu().numpy()}


def _by_kind(recorded: Any, pairs: int) -> dict[str, Any]:
    """Seconds a pair of the operations of each kind, without those that they call."""
    seconds = dict.fromkeys([*KINDS, "all else"], 0.0)
    for event in recorded.key_averages():
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), "all else")
        seconds[kind] += event.self_cpu_time_total / 1e6 / pairs
    return seconds


def measure(
    side: str, case: Case, options: dict[str, Any], what: What = "speed", until: float | None = None
) -> dict[str, Any]:
    """Run one worker in a fresh process and return what it measured.

    until: moment of `time.monotonic()`. Raises TimeoutError at that moment, and SystemExit if the worker fails.
    """
    seconds = None if until is None else until - time.monotonic()
    if seconds is not None and seconds <= 0:
        raise TimeoutError
    with TemporaryDirectory() as folder:
        task, result = Path(folder) / "task.json", Path(folder) / "result.pickle"
        task.write_text(json.dumps({"side": side, "case": asdict(case), "options": options, "what": what}))
        environment = os.environ | {
            "OMP_NUM_THREADS": str(case.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        command = [sys.executable, __file__, str(task), str(result)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
        if done.returncode:
            how = "was killed, perhaps for want of memory," if done.returncode == -9 else "failed"
            raise SystemExit(f"{side} {options} {how} on {case.name}:\n{done.stderr[-3000:]}")
        return dict(pickle.loads(result.read_bytes()))


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    found = run(task["side"], Case(**task["case"]), task["options"], task["what"])
    Path(sys.argv[2]).write_bytes(pickle.dumps(found))
