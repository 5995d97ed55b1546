"""Change of the length of a model's own responses through training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from regretless.core.intervals import mean_by_prompt
from regretless.workflow.run_folder import BASE


def response_lengths(files: Mapping[str, Path]) -> dict[str, Any]:
    """Mean length of each model's responses to the same problems, and the difference to the base model's.

    files: responses (parquet) by the model's label. Lengths are in tokens if all responses have token ids (with the
    end-of-sequence token), else in characters (`unit`). Both numbers have a standard error and a 95 % interval over
    problems; the difference is paired, over the problems that both models answered, and None for the base model.
    """
    tables = {
        label: pq.read_table(path, columns=["prompt_id", "response", "token_ids"]) for label, path in files.items()
    }
    in_tokens = all(table["token_ids"].null_count == 0 for table in tables.values())
    column = "token_ids" if in_tokens else "response"
    lengths: dict[str, dict[str, int]] = {
        label: dict(zip(table["prompt_id"].to_pylist(), map(len, table[column].to_pylist()), strict=True))
        for label, table in tables.items()
    }
    base = lengths.get(BASE)
    models: dict[str, dict[str, Any]] = {}
    for label, of_model in lengths.items():
        change = None
        if base is not None and label != BASE:
            change = _mean({problem: of_model[problem] - base[problem] for problem in of_model if problem in base})
        models[label] = {"length": _mean(of_model), "change": change}
    return {"unit": "tokens" if in_tokens else "characters", "models": models}


def _mean(values: Mapping[str, int]) -> dict[str, Any]:
    return dict(mean_by_prompt([*values.values()], [1] * len(values), [*values]))
