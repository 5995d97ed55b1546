"""Rows of two responses and a preference label, as in public data sets, converted to chosen and rejected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regretless.data.schema import Unusable, quoted
from regretless.data.steps import is_stepwise

SIGNED = {-3: 0, -2: 0, -1: 0, 0: None, 1: 1, 2: 1, 3: 1}
PLACE = {0: 0, 1: 1}
NAMED = {"model_a": 0, "model_b": 1, "tie": None, "tie (bothbad)": None, "both_bad": None}


@dataclass(frozen=True)
class LabeledRow:
    """Columns of two responses, and of what decides between them."""

    sides: tuple[str, str]
    labels: tuple[str, ...]
    """Columns that say which response is better; if there are several, they have to agree."""
    meaning: Mapping[Any, int | None] | None
    """The place of the better response by a label's value, None for a tie. No meaning: a score of each side."""
    prompt: str | None = None
    """The prompt's column, and the entry in it, if the reader of pairs would not find it."""


LAYOUTS = (
    LabeledRow(("response1", "response2"), ("overall_preference",), SIGNED, "context"),  # HelpSteer3
    LabeledRow(("response_1", "response_2"), ("preference_strength",), SIGNED),  # HelpSteer2
    LabeledRow(("response_0", "response_1"), ("better_response_id", "safer_response_id"), PLACE),  # PKU-SafeRLHF
    LabeledRow(("conversation_a", "conversation_b"), ("winner",), NAMED),  # Chatbot Arena, MT-Bench's human judgments
    LabeledRow(("response_1", "response_2"), ("winner",), NAMED),  # PPE
    LabeledRow(("response_a", "response_b"), ("winner",), NAMED),
    LabeledRow(("human_ref_A", "human_ref_B"), ("labels",), {1: 0, 0: 1}, "history"),  # SHP
    LabeledRow(("output_1", "output_2"), ("preference",), {1: 0, 2: 1, 1.5: None, 0: None}),  # AlpacaFarm
    LabeledRow(("answer_0", "answer_1"), ("score_0", "score_1"), None, "question.full_text"),  # WebGPT
)
LABELS = (
    *dict.fromkeys(label for layout in LAYOUTS for label in layout.labels),
    *("label", "preferred", "orig_preference", "better", "choice", "winner_model_a", "winner_model_b", "ranking"),
)
"""Columns that may say which of two responses is better."""
COUNTED = (("0", "1"), ("1", "2"), ("a", "b"), ("A", "B"))
"""Ends of the names of two responses whose order says nothing about their quality."""
BETTER_FIRST = (
    *(("y_w", "y_l"), ("response_j", "response_k"), ("win", "lose"), ("winning", "losing"), ("better", "worse")),
    *(("good", "bad"), ("preferred", "dispreferred"), ("positive", "negative"), ("pos", "neg")),
)
"""Names of columns of which the first one holds the better response."""
SEVERAL = {
    "completions": "of several responses, each with its overall_score",
    "answers": "of several responses, of which rank 1 is the best (score: -rank)",
    "summaries": "of which choice is the place of the better one, from 0",
    "responses": "of several responses",
}
"""Columns with lists of responses, and what they are."""


def from_labeled(row: Mapping[str, Any], chosen_key: str, prompt_key: str | None) -> Mapping[str, Any]:
    """A row of a known layout with the columns chosen and rejected, and prompt if it is not named; others as they are.

    Raises Unusable for a tie, for a label of an unknown value, and if the keys name what a label decides.
    """
    if row.get(chosen_key) is not None and not _is_counted(row, chosen_key):
        return row
    layout = next(filter(lambda layout: {*layout.sides, layout.labels[0]} <= row.keys(), LAYOUTS), None)
    label = layout.labels[0] if layout else next((name for name in LABELS if row.get(name) is not None), None)
    if row.get(chosen_key) is not None and label is not None:
        raise Unusable(
            f"{label}: it says which response is better, so {chosen_key} is not the better one in every row; "
            + ("leave out chosen_key and rejected_key" if layout else f"write chosen and rejected, or remove {label}")
        )
    if layout is None:
        return row
    sides = [_judged_part(row.get(name), row.get("turn")) for name in layout.sides]
    better = _better(row, layout)
    others = {name: value for name, value in row.items() if name not in (*layout.sides, *layout.labels)}
    if layout.prompt is not None and prompt_key is None:
        column, _, entry = layout.prompt.partition(".")
        prompt = others.pop(column, None)
        others["prompt"] = prompt.get(entry) if entry and isinstance(prompt, Mapping) else prompt
    return {**others, "chosen": sides[better], "rejected": sides[1 - better]}


def _better(row: Mapping[str, Any], layout: LabeledRow) -> int:
    """Place of the better response. Raises Unusable."""
    names = [name for name in layout.labels if name in row]
    shown = ", ".join(f"{name} {quoted(row[name])}" for name in names)
    if layout.meaning is None:
        scores = [row[name] for name in names]
        if len(scores) < 2 or not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
            raise Unusable(f"{', '.join(layout.labels)}: expected two numbers, got {shown}")
        places = {None if scores[0] == scores[1] else int(scores[1] > scores[0])}
    else:
        for name in names:
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, str | int | float) or value not in layout.meaning:
                expected = ", ".join(map(str, layout.meaning))
                raise Unusable(f"{name}: expected one of {expected}, got {quoted(value)}")
        places = {layout.meaning[row[name]] for name in names}
    if len(places) > 1:
        raise Unusable(f"{shown}: they name different responses; remove the column that should not decide")
    (better,) = places
    if better is None:
        raise Unusable(f"{shown}: a tie, which expresses no preference")
    return better


def _judged_part(side: Any, turn: Any) -> Any:
    """A conversation up to the turn that was judged: MT-Bench's have two, and a judgment of each."""
    if not isinstance(side, Sequence) or isinstance(side, str) or not isinstance(turn, int):
        return side
    questions = [
        index for index, message in enumerate(side) if isinstance(message, Mapping) and message.get("role") == "user"
    ]
    return side[: questions[turn]] if 0 < turn < len(questions) else side


def _is_counted(row: Mapping[str, Any], name: str) -> bool:
    """True if a column's name, and that of another column, end in a number or letter that only counts them."""
    others = [(end, other_end) for pair in COUNTED for end, other_end in (pair, pair[::-1]) if name.endswith(end)]
    return any(name.removesuffix(end) + other_end in row for end, other_end in others)


def hint(row: Mapping[str, Any]) -> str | None:
    """What to do about a row without chosen and rejected, by the columns that it has."""
    if is_stepwise(row):
        return "its steps have labels: `regretless pair rule=step_labels` makes pairs of good and bad steps"
    for better, worse in BETTER_FIRST:
        if row.get(better) is not None and row.get(worse) is not None:
            return f"{better} is the better response: chosen_key={better} rejected_key={worse}"
    for name, what in SEVERAL.items():
        if isinstance(row.get(name), Sequence) and not isinstance(row[name], str):
            return (
                f"{name} is a list {what}: write the better one as chosen and the other as rejected, or each in a row "
                "with prompt, response and score, of which `regretless pair rule=best_vs_random` makes pairs"
            )
    label = next((name for name in LABELS if row.get(name) is not None), None)
    if label is not None and any(_is_counted(row, name) for name in row):
        return f"if {label} says which response is better, write that one as chosen and the other as rejected"
    return None
