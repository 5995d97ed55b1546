"""Write a preference file such as one's own: a right solution, and one that reads "gives" as an addition.

    python examples/own_file.py --problems practice/world/prompts.jsonl --output mine.jsonl

docs/tutorials/served_model.md trains on it. The file needs nothing of this package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EVENTS = {"buys": "+", "gives": "-", "doubles": "*", "loses": "/"}


def solution(problem: str, gives: str = "-") -> str:
    """Lines of work and the boxed answer; `gives` is the sign that a gift is computed with."""
    start, *events = problem.removesuffix(". How many?\n").split(". ")
    value = int(start.split()[2])
    lines = []
    for event in events:
        _, verb, *rest = event.split()
        sign = gives if verb == "gives" else EVENTS[verb]
        amount = int(rest[0]) if verb in ("buys", "gives") else 2
        result = {"+": value + amount, "-": value - amount, "*": value * amount, "/": value // amount}[sign]
        lines.append(f"{value}{sign}{amount}={result}")
        value = result
    return "\n".join([*lines, f"\\boxed{{{value}}}"])


def main() -> None:
    """Write one pair for each problem in which something is given away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=Path, required=True, help="JSONL file with the column `prompt`")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write: prompt, chosen, rejected")
    given = parser.parse_args()
    with given.problems.open(encoding="utf-8") as problems, given.output.open("w", encoding="utf-8") as output:
        for line in problems:
            prompt = json.loads(line)["prompt"]
            if " gives " in prompt:
                pair = {"prompt": prompt, "chosen": solution(prompt), "rejected": solution(prompt, gives="+")}
                output.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main()
