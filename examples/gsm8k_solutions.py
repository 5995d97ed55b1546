"""Train on solutions that somebody else sampled: GSM8K's public ones by four models, with a real tokenizer.

    python examples/gsm8k_solutions.py --data example_model_solutions.jsonl --tokenizer Qwen/Qwen2.5-0.5B \
        --output runs/gsm8k-solutions

docs/real_data.md says where the file comes from and walks through what is written. Settings may follow, as in
`regretless run`: train.objective=dpo train.max_steps=100
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regretless.core.errors import RegretlessError
from regretless.core.files import write_jsonl
from regretless.runs.pipeline import run_recipe, show
from regretless.runs.recipe import load_recipe

RECIPE = Path(__file__).with_suffix(".yaml")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def responses(data: Path, questions: int | None = None, every: int = 1) -> Iterator[dict[str, Any]]:
    """Rows {prompt, response, answer, model}, four of each question: of the first so many, or of every n-th one."""
    lines = data.read_text(encoding="utf-8").splitlines()
    for line in itertools.islice(lines[::every], questions):
        row = json.loads(line)
        prompt = [{"role": "user", "content": row["question"]}]
        for model in MODELS:
            yield {
                "prompt": prompt,
                "response": row[model]["solution"],
                "answer": row["ground_truth"],
                "model": model,
            }


def main(arguments: list[str] | None = None) -> None:
    """Write the responses into the run folder, then run the recipe beside this file on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="example_model_solutions.jsonl")
    parser.add_argument("--tokenizer", help="hub id or folder of the tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="run folder")
    parser.add_argument("--questions", type=int, help="only the first so many questions")
    parser.add_argument("--every", type=int, default=1, help="only every n-th question, from the first")
    parser.add_argument("--responses-only", action="store_true", help="write responses.jsonl, and run nothing")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    options = parser.parse_args(arguments)
    if not options.data.is_file():
        parser.error(f"--data {options.data}: no such file; docs/real_data.md says where it comes from")
    if options.tokenizer is None and not options.responses_only:
        parser.error("--tokenizer: required; a hub id, or without a network a folder")

    write_jsonl(options.output / "responses.jsonl", responses(options.data, options.questions, options.every))
    if options.responses_only:
        return
    settings = [f"output_dir={options.output}", f"model.tokenizer={options.tokenizer}", *options.settings]
    try:
        show(run_recipe(load_recipe(RECIPE, settings)))
    except RegretlessError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
