"""Writes the tables of docs/verification.md again: marks, notations, doubts and units, from the verifier's own.

python docs/make_grading_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from regretless.labeling.grading.doubts import DOUBTS
from regretless.labeling.grading.marks import MARKS
from regretless.labeling.grading.notations import NOTATIONS
from regretless.labeling.grading.units import UNITS

PAGE = Path(__file__).parent / "verification.md"


def tables() -> dict[str, str]:
    """Markdown of each table, by its name."""
    units = [
        f"| {kind} | {', '.join(f'`{name}`' for names in sizes for name in names.split())} |"
        for kind, sizes in UNITS.items()
    ]
    doubts = [f"| {reason} | `{doubt.example}` | `{doubt.gold}` |" for reason, doubt in DOUBTS.items()]
    notations = [
        f"| `{one.written}` | `{one.read}` | {one.reason} | {where} |"
        for where, table in NOTATIONS.items()
        for one in table
    ]
    return {
        "marks": "\n".join(
            ["| | mark | why |", "|---|---|---|"]
            + [f"| {number} | {mark.example} | {mark.reason} |" for number, mark in enumerate(MARKS, 1)]
        ),
        "notations": "\n".join(["| written | read as | why | in |", "|---|---|---|---|", *notations]),
        "doubts": "\n".join(["| reason | such as | gold answer |", "|---|---|---|", *doubts]),
        "units": "\n".join(["| kind | units |", "|---|---|", *units]),
    }


def page() -> str:
    """The page with its tables as they are now."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        text = block.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
