"""What the settings of grading do to a score: sampled solutions, complete and cut at several limits of tokens.

    python benchmarks/verifier_settings.py --data ../shared/data     # the tables of docs/verification.md; a minute

The folder holds sampled_outputs/qwen2.5_math_cot.jsonl (eight solutions by a Qwen2.5-Math model for each of 50 problems
of MATH), tokenizers/qwen2, by which they are cut, and gsm8k/example_model_solutions.jsonl (solutions of four GPT-3
models; those without an `A:` line are cut).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from regretless.data.columns import Verdict
from regretless.labeling.base import Verifier
from regretless.labeling.verifiers import VERIFIERS

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
LIMITS = (None, 1024, 768, 512, 384)
COLUMNS = [("math", False), ("math_any", False), ("math", True), ("math_any", True)]
"""Verifier, and whether cut responses are graded."""


def is_correct(verifier: Verifier, response: str, answer: str) -> bool:
    """Whether a response meets the gold answer."""
    quick = verifier.quick(response, answer)
    return (quick or verifier.check(response, answer)).verdict == Verdict.CORRECT


def table_row(name: str, samples: list[tuple[str, str, bool]]) -> str:
    """A row of the table: samples are (response, gold answer, whether it is cut)."""
    right = {
        verifier: [is_correct(VERIFIERS[verifier], response, gold) for response, gold, _ in samples]
        for verifier in ("math", "math_any")
    }
    cells = []
    for verifier, graded in COLUMNS:
        score = sum(
            correct and (graded or not cut) for correct, (_, _, cut) in zip(right[verifier], samples, strict=True)
        )
        cells.append(f"{100 * score / len(samples):.2f} %")
    return f"| {name} | {len(samples)} | {sum(cut for _, _, cut in samples)} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print Pass@1 by data and setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the samples and the tokenizer")
    args = parser.parse_args()
    print("| solutions | n | cut | " + " | ".join(f"{name}{', cut graded' * cut}" for name, cut in COLUMNS) + " |")
    print("|---" + "|---:" * (2 + len(COLUMNS)) + "|")
    tokenizer = AutoTokenizer.from_pretrained(args.data / "tokenizers" / "qwen2")
    rows = [
        json.loads(line) for line in (args.data / "sampled_outputs" / "qwen2.5_math_cot.jsonl").open(encoding="utf-8")
    ]
    solutions = [(tokenizer(text)["input_ids"], text, row["solution"]) for row in rows for text in row["response"]]
    for limit in LIMITS:
        at_most = limit or 10**6
        samples = [
            (tokenizer.decode(ids[:at_most]) if len(ids) > at_most else text, gold, len(ids) > at_most)
            for ids, text, gold in solutions
        ]
        print(table_row("MATH, Qwen2.5-Math, " + (f"{limit} tokens" if limit else "as published"), samples))
    rows = [json.loads(line) for line in (args.data / "gsm8k" / "example_model_solutions.jsonl").open(encoding="utf-8")]
    for model in MODELS:
        texts = [(row[model]["solution"], row["ground_truth"]) for row in rows]
        print(table_row(f"GSM8K, GPT-3 {model}", [(text, gold, "\nA:" not in text) for text, gold in texts]))


if __name__ == "__main__":
    main()
