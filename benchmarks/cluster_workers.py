"""Sampling with one process and with workers of a Ray cluster on this machine: time, and whether the bytes are equal.

    python benchmarks/cluster_workers.py                  # this process, 1 worker, 2 workers
    python benchmarks/cluster_workers.py --workers 1 2 4 --prompts 512

The model has random weights, and nearly every response has `--tokens` tokens. Each worker computes with one thread. The
time of a cluster's run includes the start of its workers, which load torch and the model; the cluster itself is started
before. Needs `pip install .[cluster]`.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from regretless.core.text_cleaning import never_fail_to_print
from regretless.data.prompts import PromptRow
from regretless.modeling.load import ModelConfig
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.job import SampleWork
from regretless.sampling.sample import sample_together
from regretless.workflow.cluster import ClusterConfig, WorkersConfig, connected


def save_model(folder: Path) -> None:
    """A Qwen3 model of 8 layers with random weights, and a tokenizer of numbered words."""
    words = {"<pad>": 0, "<end>": 1} | {f"w{number}": number for number in range(2, 1024)}
    backend = Tokenizer(WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.lm_head.weight.data[1] = 0  # as likely as any other of the tokens: the end is rare
    model.save_pretrained(folder)


def sample(model: Path, output: Path, prompts: int, tokens: int) -> tuple[float, str]:
    """Seconds of one run of the stage, and a hash of what it wrote."""
    rows = [
        PromptRow(line=row, prompt_id=f"p{row}", prompt=f"w{2 + row} w{500 + row % 500}", answer=None)
        for row in range(prompts)
    ]
    params = SamplingParams(n=4, max_new_tokens=tokens, batch_size=32, temperature=1.0)
    start = time.perf_counter()
    sample_together([SampleWork([ModelConfig(name_or_path=str(model))], rows, params, output / "responses.parquet")])
    seconds = time.perf_counter() - start
    return seconds, hashlib.sha256((output / "responses.parquet").read_bytes()).hexdigest()


def main() -> None:
    """Measure and print the table of docs/scale.md."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        alone, expected = sample(folder / "model", folder / "alone", arguments.prompts, arguments.tokens)
        print(f"{platform.machine()}, one thread a worker, {date.today()}\n")
        print("| where | seconds | time ÷ one process | bytes equal |\n|---|---|---|---|")
        print(f"| one process | {alone:.0f} | 1 | – |")
        for count in arguments.workers:
            output = folder / f"workers-{count}"
            with connected(ClusterConfig(address="local", sample=WorkersConfig(workers=count)), output):
                seconds, found = sample(folder / "model", output, arguments.prompts, arguments.tokens)
            equal = "yes" if found == expected else "NO"
            print(f"| {count} worker(s) | {seconds:.0f} | {seconds / alone:.2f} | {equal} |")


if __name__ == "__main__":
    main()
