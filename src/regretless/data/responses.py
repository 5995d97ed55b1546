"""Readers of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regretless.data.columns import Response, Text, Verdict, text_key
from regretless.data.messages import check_is_text, read_message, read_template_arguments
from regretless.data.rejected_rows import Refusal, of_one_kind, other_kind
from regretless.data.rows import read_rows
from regretless.data.schema import (
    RESPONSE,
    Unusable,
    check_continuations,
    check_lengths,
    check_numbers,
    check_top,
    given_numbers,
    name_or,
    quoted,
    read_gold,
    stored_gold,
)
from regretless.data.steps import check_steps, from_steps


def read_responses(path: str | Path) -> tuple[list[Response], list[Refusal]]:
    """Responses of a file, and the rejected rows; at least `prompt` and `response` are required.

    Rows of steps with labels (`from_steps`) are read, too, those of PRM800K as several responses.
    """
    path = Path(path)
    kept: list[Response] = []
    refused: list[Refusal] = []
    for number, row in read_rows(path):
        if isinstance(row, Refusal):
            refused.append(row)
            continue
        try:
            several = from_steps(row)
            names = [f"{number}.{place}" for place in range(1, len(several) + 1)] if len(several) > 1 else [str(number)]
            kept += [_response(one, path, number, name) for one, name in zip(several, names, strict=True)]
        except Unusable as reason:
            refused.append(Refusal(str(path), number, str(reason), row))
    kept, others = of_one_kind(kept, lambda row: (isinstance(row.prompt, str),))
    refused += [Refusal.at(row.origin, other_kind(row.prompt), _texts(row)) for row in others]
    return kept, sorted(refused, key=lambda refusal: refusal.line)


def _response(row: Mapping[str, Any], path: Path, number: int, name: str) -> Response:
    """Response of a row; `name`: its own in the file. Raises Unusable."""
    columns = check_response(row)
    if read_template_arguments(row) is not None:
        raise Unusable(
            "tools, chat_template_kwargs: a response is judged and paired without them, so that it would answer "
            "another prompt; remove the columns, or write pairs (chosen, rejected), which may have them; "
            "model.chat_template_kwargs holds for all prompts"
        )
    prompt_id = name_or(columns["prompt_id"], text_key(row["prompt"]))
    prompt = row["prompt"]
    values = {name: value for name, value in columns.items() if value is not None}
    values |= {
        "prompt_id": prompt_id,
        "response_id": name_or(columns["response_id"], f"{prompt_id}-{name}"),
        "prompt": check_is_text(prompt) if isinstance(prompt, str) else [read_message(item) for item in prompt],
        "token_numbers": given_numbers(columns["token_numbers"]),
        **stored_gold(read_gold(row)),
        "verdict": None if columns["verdict"] is None else Verdict(columns["verdict"]),
        "origin": f"{path}:{number}",
    }
    return Response(**values)


def check_present(row: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise Unusable if a row lacks one of these columns, or has no value there."""
    missing = [name for name in names if name not in row]
    if missing:
        raise Unusable(f"missing column(s) {', '.join(missing)}; found {', '.join(sorted(row))}")
    empty = [name for name in names if row[name] is None]
    if empty:
        raise Unusable(f"{', '.join(empty)}: expected a value, got null; fill it in, or remove the row")


def check_response(row: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a response row. Raises Unusable with the missing or unexpected column."""
    check_present(row, ("prompt", "response"))
    columns = RESPONSE.check(row)
    pieces = columns["tokens"] if columns["token_ids"] is None else columns["token_ids"]
    problem = (
        check_lengths("logps", pieces, columns["logps"])
        or check_lengths("token_bytes", pieces, columns["token_bytes"])
        or check_numbers("token_numbers", pieces, columns["token_numbers"])
        or check_top("top_logps", pieces, columns["top_logps"])
        or check_continuations("continuations", columns["token_ids"], columns["continuations"])
        or check_steps(columns, row["response"])
    )
    if problem is not None:
        raise Unusable(problem)
    return columns


def split_ambiguous(rows: Sequence[Response]) -> tuple[list[Response], list[Refusal]]:
    """Responses whose prompt id stands for one prompt, and the others, whose prompt is ambiguous."""
    first: dict[str, Response] = {}
    other: dict[str, Response] = {}
    for row in rows:
        if first.setdefault(row.prompt_id, row).prompt != row.prompt:
            other.setdefault(row.prompt_id, row)
    reasons = {
        name: f"prompt_id: {quoted(name)} stands for two prompts ({first[name].origin} and {row.origin}); "
        "every prompt needs its own id"
        for name, row in other.items()
    }
    refused = [Refusal.at(row.origin, reasons[row.prompt_id], _texts(row)) for row in rows if row.prompt_id in reasons]
    return [row for row in rows if row.prompt_id not in reasons], refused


def _texts(row: Response) -> dict[str, Text]:
    return {"prompt": row.prompt, "response": row.response}
