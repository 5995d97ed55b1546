"""Memory of the loop of `modeling.decoding` beside that of `generate`, and how often its neighbors change a draw.

    python benchmarks/decoding.py memory --model FOLDER --questions gsm8k.jsonl
    python benchmarks/decoding.py neighbors --model FOLDER --questions gsm8k.jsonl --tokens 200

memory: `rows` responses of `tokens` tokens each, with the paper's settings, by either side in a process of its own: the
greatest resident memory above that of the loaded model. neighbors: responses to as many prompts, once all side by side
and once `other` at a time, in another order, from the same random numbers. A response is compared up to the first
token that differs, because what follows has another context: the share of these draws that differ is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from regretless.modeling.load import ModelConfig
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.transformers_engine import TransformersEngine

NO_TOKEN = -1


def resident(peak: bool) -> int:
    """Memory of this process in bytes: its greatest so far, or that of now."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith(name)]
    return 1024 * int(kib)


def loaded(args: argparse.Namespace) -> tuple[TransformersEngine, list[list[int]]]:
    """The engine with the paper's settings, and a prompt for each row."""
    params = SamplingParams(n=1, max_new_tokens=args.tokens, batch_size=args.rows)
    engine = TransformersEngine(ModelConfig(name_or_path=args.model, dtype=args.dtype), params)
    lines = args.questions.read_text(encoding="utf-8").splitlines()[: args.rows]
    return engine, [engine.encode([{"role": "user", "content": json.loads(line)["question"]}]) for line in lines]


def by_generate(engine: TransformersEngine, prompts: Sequence[Sequence[int]]) -> None:
    """Responses of full length by the model's own `generate`."""
    params = engine.params
    names = ("repetition_penalty", "temperature", "top_k", "top_p")
    settings = transformers.GenerationConfig(
        **{name: getattr(params, name) for name in names},
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.max_new_tokens,
        do_sample=True,
        eos_token_id=engine.ends,
        pad_token_id=engine.tokenizer.pad_token_id,
    )
    batch = engine.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    engine.model.generate(**batch, generation_config=settings)


def memory_of(args: argparse.Namespace) -> int:
    """Bytes that one side takes above the loaded model, in this process."""
    engine, prompts = loaded(args)
    before = resident(peak=False)
    if args.side == "generate":
        by_generate(engine, prompts)
    else:
        engine.ends = [NO_TOKEN]
        engine.generate(prompts, 0)
    return resident(peak=True) - before


def memory(args: argparse.Namespace) -> None:
    """Print the memory of both sides."""
    print("| side | GiB above the loaded model |\n|---|---|")
    for side in ("loop", "generate"):
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        print(f"| {side} | {int(done.stdout) / 2**30:.2f} |", flush=True)


def neighbors(args: argparse.Namespace) -> None:
    """Print the share of draws that other neighbors change."""
    engine, prompts = loaded(args)
    first = {number: found.token_ids for number, found in engine.stream(prompts, range(args.rows))}
    fewer: Any = engine.with_params(engine.params.model_copy(update={"batch_size": args.other}))
    last = args.rows - 1
    second = {last - at: found.token_ids for at, found in fewer.stream(prompts[::-1], range(args.rows)[::-1])}
    draws = changed = 0
    for number, ids in first.items():
        same = [one == other for one, other in zip(ids or [], second[number] or [], strict=False)]
        is_changed = False in same
        draws += same.index(False) + 1 if is_changed else len(same)
        changed += is_changed
    print(f"{args.dtype}: {changed} of {draws:,} draws differ ({changed / draws:.3%}), in {args.rows} responses")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "neighbors"])
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with `question`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of a response")
    parser.add_argument("--other", type=int, default=24, help="rows side by side the second time")
    parser.add_argument("--side", choices=["loop", "generate"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(memory_of(args))
        return
    print(
        f"{Path(args.model).name}, {args.rows} rows of at most {args.tokens} tokens, torch {torch.__version__}, ",
        end="",
    )
    print(f"transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}\n", flush=True)
    {"memory": memory, "neighbors": neighbors}[args.what](args)


if __name__ == "__main__":
    main()
