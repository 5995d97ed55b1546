"""Steps of reasoning in a response: where they end, their labels, and rows of public data sets that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

from regretless.data.schema import Unusable, quoted

Row = Mapping[str, Any]
Labeled = tuple[str, int | None]
"""A step and its label: 1 good, 0 neutral, -1 bad, None unknown."""
WORDS = {"positive": 1, "neutral": 0, "negative": -1}
SIGNS = {"+": 1, "-": -1}
TAG, FIRST = "ки", "Step 1:"
"""Math-Shepherd's mark behind each step, and how its first step begins."""


def joined(steps: Sequence[str]) -> tuple[str, list[int]]:
    """Steps as one text, and the characters at the end of each.

    A line break is put between two that no white space separates; it belongs to the first of them.
    """
    text, ends = "", []
    for step, behind in pairwise([*steps, ""]):
        text += step if not behind or step[-1:].isspace() or behind[:1].isspace() else step + "\n"
        ends.append(len(text))
    return text, ends


def first_steps(ends: Sequence[int], labels: Sequence[int | None] | None, length: int) -> dict[str, Any]:
    """`step_ends` and `step_labels` of the first `length` characters; a step that is cut loses its label."""
    whole = [end for end in ends if end <= length]
    cut = [length] if length and length not in whole else []
    return {
        "step_ends": [*whole, *cut],
        "step_labels": None if labels is None else [*labels[: len(whole)], *([None] * len(cut))],
    }


def check_steps(columns: Row, text: str | None, side: str = "") -> str | None:
    """The problem with `step_ends` and `step_labels` of a response or a side, or None.

    text: None for a response of several messages. Steps may lie behind a text that is cut (`cut_at`).
    """
    ends, labels = columns["step_ends"], columns["step_labels"]
    if ends is None:
        return None if labels is None else f"{side}step_labels: present without {side}step_ends"
    if text is None:
        return f"{side}step_ends: expected a response of one message, got several; leave the column out"
    last = ends[-1] if ends else 0
    fits = last >= len(text) if columns.get("cut_at") is not None else last == len(text)
    if not fits or any(end <= start for start, end in pairwise([0, *ends])):
        return (
            f"{side}step_ends: expected rising numbers of characters above 0, of which the last is the text's "
            f"{len(text)}, got {quoted(ends)}"
        )
    if labels is not None and len(labels) != len(ends):
        return f"{side}step_labels: expected one for each of {len(ends)} steps, got {len(labels)}"
    return None


def is_stepwise(row: Row) -> bool:
    """Whether a row has steps with labels, in a form that `from_steps` knows."""
    return _reader(row) is not None


def from_steps(row: Row) -> list[Row]:
    """The responses of a row with steps and labels, each with its `step_ends` and `step_labels`; others as they are.

    TRL's (`prompt`, `completions`, `labels`), the same with `problem`, `steps` and labels in words, Math-Shepherd's
    (`input`, `label`), and PRM800K's (`question`, `label`), which has many. Raises Unusable.
    """
    read = _reader(row)
    if read is None:
        return [row]
    given = {name: value for name, value in row.items() if name not in READ}
    responses: list[Row] = []
    for columns, steps in read(row):
        if not all(step.strip() for step, _ in steps):
            raise Unusable(f"step {next(n for n, (step, _) in enumerate(steps, 1) if not step.strip())}: empty")
        text, ends = joined([step for step, _ in steps])
        labels = [label for _, label in steps]
        responses.append({**given, **columns, "response": text, "step_ends": ends, "step_labels": labels})
    if not responses:
        raise Unusable("label.steps: expected a step with a completion that was chosen or rated, got none")
    return responses


READ = ("completions", "steps", "labels", "label", "input", "problem", "question")
"""Columns that become others."""
Responses = Iterator[tuple[Row, Sequence[Labeled]]]


def _reader(row: Row) -> Callable[[Row], Responses] | None:
    return (
        None if row.get("response") is not None else next((read for fits, read in LAYOUTS.items() if fits(row)), None)
    )


def _is_list_of_steps(row: Row) -> bool:
    steps = next((row[name] for name in ("completions", "steps") if row.get(name) is not None), None)
    return row.get("labels") is not None and _is_list(steps) and not any(isinstance(step, Mapping) for step in steps)


def _is_math_shepherd(row: Row) -> bool:
    return isinstance(row.get("label"), str) and isinstance(text := row.get("input"), str) and TAG in text


def _is_prm800k(row: Row) -> bool:
    return isinstance(row.get("question"), Mapping) and isinstance(row.get("label"), Mapping)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _of_list(row: Row) -> Responses:
    name = "steps" if row.get("completions") is None else "completions"
    steps, labels = row[name], row["labels"]
    for place, step in enumerate(steps):
        if not isinstance(step, str):
            raise Unusable(f"{name}: value {place} is {quoted(step)}; expected the text of a step")
    if not _is_list(labels) or len(labels) != len(steps):
        raise Unusable(f"labels: expected one for each of {len(steps)} steps, got {quoted(labels)}")
    prompt = {} if row.get("prompt") is not None else {"prompt": row.get("problem")}
    yield prompt, [(step, _label(labels[place], place)) for place, step in enumerate(steps)]


def _label(label: Any, place: int) -> int | None:
    # No numbers: 0 is bad in some data, and neutral in others.
    if label is None or isinstance(label, bool):
        return None if label is None else 1 if label else -1
    if not isinstance(label, str) or label not in WORDS:
        raise Unusable(f"labels: value {place} is {quoted(label)}; expected true, false, {', '.join(WORDS)} or null")
    return WORDS[label]


def _of_math_shepherd(row: Row) -> Responses:
    text, labels = row["input"], row["label"]
    *pieces, rest = text.split(TAG)
    prompt, first, begins = pieces[0].rpartition(FIRST)
    if rest.strip() or not prompt.strip():
        raise Unusable(
            f"input: expected a problem, {FIRST!r} and further steps, each with {TAG} behind it, got {quoted(text)}"
        )
    signs, place = [], 0
    for piece in pieces:
        sign = labels[place + len(piece) : place + len(piece) + 1]
        if labels[place : place + len(piece)] != piece or sign not in SIGNS:
            raise Unusable(
                f"label: expected the text of input with + or - for each {TAG}, got {quoted(labels[place:])}"
            )
        signs.append(SIGNS[sign])
        place += len(piece) + 1
    steps = [first + begins, *pieces[1:]]
    yield {"prompt": prompt.strip()}, [(step.strip(), sign) for step, sign in zip(steps, signs, strict=True)]


def _of_prm800k(row: Row) -> Responses:
    """A response that ends with each rated completion of a step that was not chosen, and the one of chosen steps."""
    question, steps = row["question"], row["label"].get("steps")
    columns = {"prompt": question.get("problem"), "answer": question.get("ground_truth_answer")}
    if not _is_list(steps):
        raise Unusable(f"label.steps: expected a list of steps, got {quoted(steps)}")
    path: list[Labeled] = []
    for place, step in enumerate(steps):
        where = f"label.steps: step {place + 1}"
        if not isinstance(step, Mapping):
            raise Unusable(f"{where}: expected an object with completions, got {quoted(step)}")
        rated = [_rated(completion, where) for completion in step.get("completions") or ()]
        chosen = step.get("chosen_completion")
        if chosen is not None and (type(chosen) is not int or not 0 <= chosen < len(rated)):
            raise Unusable(
                f"{where}: chosen_completion: expected one of {len(rated)} completions, got {quoted(chosen)}"
            )
        yield from (
            (columns, [*path, one]) for number, one in enumerate(rated) if number != chosen and one[1] is not None
        )
        human = step.get("human_completion")
        if chosen is None and human is None:
            break
        path.append(_rated(human, where) if chosen is None else rated[chosen])
    if path:
        yield columns, path


def _rated(completion: Any, where: str) -> Labeled:
    text, rating = map(completion.get, ("text", "rating")) if isinstance(completion, Mapping) else (None, None)
    if not isinstance(text, str) or (rating is not None and (type(rating) is not int or rating not in (-1, 0, 1))):
        raise Unusable(f"{where}: expected a text and a rating of -1, 0, 1 or null, got {quoted(completion)}")
    return text, rating


LAYOUTS = {_is_list_of_steps: _of_list, _is_math_shepherd: _of_math_shepherd, _is_prm800k: _of_prm800k}
"""How a row with steps is recognized, and how it is read."""
