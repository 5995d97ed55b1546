"""What the experiment "Does a score know regret?" of docs/real_models.md measures: its problems and its responses.

    python experiments/real_regret.py problems train.jsonl --trained runs/gsm8k-small/prompts/prompts.jsonl
    python experiments/real_regret.py responses runs/measured/verify/responses.parquet

The first writes problems.jsonl: GSM8K training problems of at most three steps that no model was trained on. The second
writes selected.parquet: of each problem the first right and the first wrong response that ended by itself, where there
are both.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SEED, MOST_STEPS = 20_261_129, 3


def problems(train: Path, trained: Path, count: int) -> list[dict[str, str]]:
    """`count` random problems of at most three steps that are not in `trained`.

    A step is a line of the solution with the calculator's mark <<…>>.
    """
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()]
    seen = trained.read_text(encoding="utf-8")
    fits = [
        row
        for row in rows
        if row["answer"].count("<<") <= MOST_STEPS and json.dumps(row["question"], ensure_ascii=False)[1:-1] not in seen
    ]
    return random.Random(SEED).sample(fits, count)


def selected(verified: Path) -> pa.Table:
    """The first right and the first wrong response that ended, of problems that have both, in the file's order."""
    table = pq.read_table(verified)
    first: dict[str, dict[str, int]] = {}
    columns = zip(*(table[name].to_pylist() for name in ("prompt_id", "verdict", "finish_reason")), strict=True)
    for number, (prompt, verdict, reason) in enumerate(columns):
        if reason == "stop" and verdict in ("correct", "wrong"):
            first.setdefault(prompt, {}).setdefault(verdict, number)
    return table.take(sorted(number for both in first.values() if len(both) == 2 for number in both.values()))


def main() -> None:
    """Write what the command asks for, and say how many rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("problems")
    command.add_argument("file", type=Path, help="GSM8K's training problems")
    command.add_argument("--trained", type=Path, required=True, help="prompts of the run that trained models")
    command.add_argument("--count", type=int, default=120)
    commands.add_parser("responses").add_argument("file", type=Path, help="verified responses")
    args = parser.parse_args()
    if args.command == "problems":
        rows = problems(args.file, args.trained, args.count)
        Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"problems.jsonl: {len(rows)} problems")
    else:
        table = selected(args.file)
        pq.write_table(table, "selected.parquet")
        print(f"selected.parquet: {table.num_rows} responses of {table.num_rows // 2} problems")


if __name__ == "__main__":
    main()
