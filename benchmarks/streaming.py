"""Memory and time of training data that does not fit: an epoch of steps over 10,000 and over 1,000,000 pairs.

    python benchmarks/streaming.py                      # a table as in docs/streaming.md; half an hour; Linux
    python benchmarks/streaming.py --pairs 2000 4000    # smaller ones

Each size runs in processes of its own, without a model: the pairs are synthetic (as `regretless pair` writes them, with
token ids and log-probabilities, two of each prompt), and their reference log-probabilities are made up. Measured are
reading and tokenizing (once), the reference pass (once, less the model), an epoch of steps with their values, and going
on in the middle of an epoch in a new process. Peak memory is the process's resident set, Python packages included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from regretless.core.text_cleaning import never_fail_to_print
from regretless.data.columns import FLOATS, IDS
from regretless.modeling.layout import Item
from regretless.modeling.load import tokenizer_fingerprint
from regretless.modeling.scoring import fill_rows
from regretless.objectives import build
from regretless.training.arguments import PreferenceConfig
from regretless.training.batch import build_batch
from regretless.training.data import PairDataset, StepLoader, StepSampler
from regretless.training.packing import pack_rows
from regretless.training.pair_reading import pair_table
from regretless.training.reference import ReferenceLogps

WORDS = 1000
PAIRS_PER_STEP, TOKENS_PER_ROW, PACKED_STEPS = 128, 1024, 50


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; the last one ends a response."""
    backend = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"w{WORDS - 1}", unk_token="w0")


def write_pairs(path: Path, count: int) -> None:
    """`count` pairs, two of each prompt; prompts of 5 to 30 tokens, responses of 5 to 40, with log-probabilities."""
    numbers, fingerprint = np.random.default_rng(0), tokenizer_fingerprint(make_tokenizer())
    kinds = [pa.string()] * 3 + [IDS] * 2 + [FLOATS] * 2
    names = ["prompt", "chosen", "rejected", "chosen_token_ids", "rejected_token_ids", "chosen_logps", "rejected_logps"]
    schema = pa.schema([*zip(names, kinds, strict=True), ("tokenizer", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, 2048):
            columns: dict[str, list[Any]] = {name: [] for name in schema.names}
            for number in range(start, min(start + 2048, count)):
                if number % 2 == 0:
                    prompt = numbers.integers(WORDS - 1, size=numbers.integers(5, 31)).tolist()
                    columns["prompt"] += [_text(prompt)] * 2
                for side in ("chosen", "rejected"):
                    ids = numbers.integers(WORDS - 1, size=numbers.integers(4, 40)).tolist()
                    columns[side].append(_text(ids))
                    columns[f"{side}_token_ids"].append([*ids, WORDS - 1])
                    columns[f"{side}_logps"].append((-numbers.random(len(ids) + 1)).tolist())
                columns["tokenizer"].append(fingerprint)
            columns["prompt"] = columns["prompt"][: len(columns["chosen"])]
            writer.write_table(pa.table(columns, schema))


def _size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


def _text(ids: list[int]) -> str:
    return " ".join(f"w{number}" for number in ids)


class Run:
    """One process: data and loader as the trainer makes them."""

    def __init__(self, pairs: Path, work: Path) -> None:
        self.objective = build("repo")
        self.seconds: dict[str, float] = {}
        started = time.perf_counter()
        args = PreferenceConfig(output_dir=str(work), use_cpu=True, report_to="none")
        table = pair_table(pairs, make_tokenizer(), args, self.objective, "pairs")
        self.data = PairDataset(table, mismatched=False)
        self.seconds["open"] = time.perf_counter() - started
        self.loader = StepLoader(StepSampler(self.data, PAIRS_PER_STEP, seed=0, grouped=True))
        started = time.perf_counter()
        self.reference = ReferenceLogps(work / "reference")
        if not self.reference.covers(str(self.data.key)):
            self.reference.compute(self._items(), lambda items: [np.zeros(len(ids), np.float32) for _, ids in items])
            self.reference.mark(str(self.data.key))
        self.seconds["reference"] = time.perf_counter() - started

    def _items(self) -> Iterator[Item]:
        for index in self.data.groups.members.tolist():
            yield from self.data[index].items(rejected=True)

    def epoch(self) -> dict[str, float]:
        """Every step of an epoch, with its reference values; the first ones as tensors too."""
        started = time.perf_counter()
        for step in self.loader:
            for item in dict.fromkeys(item for pair in step for item in pair.items(rejected=True)):
                self.reference[item]
        seconds, rows, in_order = time.perf_counter() - started, 0, 0
        for step in islice(self.loader, PACKED_STEPS):
            units = [pair.items(rejected=True) for pair in step]
            packed = pack_rows(units, TOKENS_PER_ROW)
            rows, in_order = rows + len(packed), in_order + len(fill_rows(units, TOKENS_PER_ROW))
            for row in packed:
                build_batch([step[index] for index in row], self.objective, reference=self.reference.__getitem__)
        return {"epoch": seconds, "rows": rows, "rows_in_order": in_order}

    def middle(self) -> dict[str, float]:
        """The first step after half an epoch, found as the Trainer finds it."""
        from accelerate import skip_first_batches

        started = time.perf_counter()
        next(iter(skip_first_batches(self.loader, len(self.loader) // 2)))
        return {"middle": time.perf_counter() - started}


def measure(task: str, pairs: Path, work: Path) -> dict[str, float]:
    """What one fresh process measures; printed as JSON."""
    run = Run(pairs, work)
    found = run.seconds | {"build": dict, "epoch": run.epoch, "middle": run.middle}[task]()
    # Not getrusage: its peak is inherited from the process that started this one.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return found | {"peak_mib": int(peak.split()[1]) / 1024}


def main() -> None:
    """Make the data, measure each size in fresh processes, print the table and where the JSON lies."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--measure", nargs=3, metavar=("TASK", "PAIRS", "WORK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        task, pairs, work = arguments.measure
        print(json.dumps(measure(task, Path(pairs), Path(work))))
        return
    results: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in arguments.pairs:
            pairs, work = Path(folder) / f"{count}.parquet", Path(folder) / f"work-{count}"
            write_pairs(pairs, count)

            def fresh(task: str, pairs: Path = pairs, work: Path = work) -> dict[str, float]:
                command = [sys.executable, __file__, "--measure", task, str(pairs), str(work)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                return dict(json.loads(done.stdout))

            first, again, middle = fresh("build"), fresh("epoch"), fresh("middle")
            results[count] = {
                "parquet file, MiB": pairs.stat().st_size / 2**20,
                "table and reference values on disk, MiB": _size(work),
                "reading and tokenizing, once, s": first["open"],
                "reference values written, once, s": first["reference"],
                "opening both again, s": again["open"] + again["reference"],
                "an epoch of steps, s": again["epoch"],
                "going on in the middle, s": middle["open"] + middle["reference"] + middle["middle"],
                "… of it passing over half an epoch, s": middle["middle"],
                "peak memory, reading and reference, MiB": first["peak_mib"],
                "peak memory, an epoch, MiB": again["peak_mib"],
                "peak memory, going on in the middle, MiB": middle["peak_mib"],
                "rows of 1,024 tokens for 50 steps, by length": again["rows"],
                "rows of 1,024 tokens for 50 steps, in order": again["rows_in_order"],
            }
    print(f"| | {' | '.join(f'{count:,} pairs' for count in results)} |")
    print(f"|---|{'---|' * len(results)}")
    for name in next(iter(results.values())):
        print(f"| {name} | {' | '.join(f'{values[name]:,.4g}' for values in results.values())} |")


if __name__ == "__main__":
    main()
