"""How the verifier grades the answers of readers who had not seen it; the column "now" of docs/verification.md.

python benchmarks/verifier_unseen.py            # seconds
python benchmarks/verifier_unseen.py --show     # and every answer that is graded in another way
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from regretless.data.columns import Verdict
from regretless.labeling.grading import grade

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "labeling" / "grading"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the rows that are graded in another way")
    shows = parser.parse_args().show
    for file in sorted(FOLDER.glob("*_answers.jsonl")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        graded = [(row, grade(row["response"], row["gold"])) for row in rows]
        right = [check for row, check in graded if row["verdict"] == "correct"]
        other = [check for row, check in graded if row["verdict"] != "correct"]
        counts = [sum(check.verdict == Verdict.CORRECT for check in checks) for checks in (right, other)]
        print(f"{file.stem}: {counts[0]} of {len(right)} right ones accepted, {counts[1]} of {len(other)} others")
        for row, check in graded if shows else []:
            if check.verdict != row["verdict"]:
                print(
                    f"  {row['verdict']} -> {check.verdict} ({check.reason}): {row['response']!r}, gold {row['gold']!r}"
                )


if __name__ == "__main__":
    main()
