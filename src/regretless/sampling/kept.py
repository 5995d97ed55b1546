"""Responses of earlier work that new settings still cover: of the same model, drawn in the same way from a prompt.

More prompts, a larger `n` or one more model then cost only what is new. The responses of earlier settings lie in the
cache beside the folder of the unit (`workflow.stage_folder.earlier_results`), each file with the identity of its
models.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from regretless.core.errors import DataError
from regretless.core.files import fingerprint
from regretless.core.settings import dump
from regretless.core.versions import versions_for
from regretless.data.columns import COLUMN_TYPES, TEXT, text_key
from regretless.data.prompts import PromptRow
from regretless.data.schema import stored_gold
from regretless.modeling.load import ModelConfig
from regretless.sampling.engine_settings import SamplingParams
from regretless.workflow.run_folder import content, existing_paths

METADATA = "regretless.drawn"
"""Key of the models' identities in the metadata of a file of responses."""
NOT_DRAWING = {"n", "batch_size", "server", "vllm"}
"""Settings that change how many responses there are, or how the engine is run, and not what each is drawn from."""
SERVER = {"base_url", "base_urls", "endpoint", "logprobs", "logprobs_mode", "extensions"}
VLLM = {"logprobs_mode", "engine_args"}
"""Settings of a server, and of vLLM, that say what a response is, not how fast it comes."""
DRAWING = {"transformers": 2}
"""Version of how an engine draws from its seeds, for those that once drew otherwise."""

Key = tuple[int, int, int]
"""A response of a work: the indices of its model and prompt, and its sample number."""


@dataclass(frozen=True)
class KeptResponse:
    """File and row of a kept response."""

    file: Path
    row: int


def identities(models: Sequence[ModelConfig], params: SamplingParams) -> list[str]:
    """What the responses of each model are drawn from: its content, its engine, and the settings of drawing.

    Models with the same content are told apart by their order. Raises DataError for files that cannot be read.
    """
    drawing = params.model_dump(exclude=NOT_DRAWING)
    drawing["server"] = params.server and params.server.model_dump(include=SERVER)
    drawing["vllm"] = params.vllm and params.vllm.model_dump(include=VLLM)
    if params.engine in DRAWING:
        drawing["version"] = DRAWING[params.engine]
    used = versions_for(drawing)
    hashes: list[str] = []
    for model in models:
        files = {text: content(path) for text, path in existing_paths(dump(model), Path()).items()}
        # Content in place of a path: a run folder may move.
        settings = {name: files.get(str(value), value) for name, value in dump(model).items()}
        number = 0
        while (identity := fingerprint([settings, drawing, used, number])) in hashes:
            number += 1
        hashes.append(identity)
    return hashes


def metadata(models: Sequence[str]) -> dict[str, str]:
    """Metadata of a file of responses: the identities of the models of its work, in order."""
    return {METADATA: json.dumps(models)}


def find(
    places: Iterable[Path], models: Sequence[str], prompts: Sequence[PromptRow], samples: int
) -> dict[Key, KeptResponse]:
    """The responses below `places` (files of responses, or folders of such) that belong to a work.

    models: the identities of the work's models. samples: its responses per prompt and model.
    Raises DataError for a file that cannot be read.
    """
    number_of = {identity: number for number, identity in enumerate(models)}
    prompt_of = {(row.prompt_id, text_key(row.prompt)): number for number, row in enumerate(prompts)}
    rows: dict[Key, KeptResponse] = {}
    for path in places:
        for file in sorted(path.rglob("*.parquet")) if path.is_dir() else [path]:
            numbers = [number_of.get(identity) for identity in _models(file)] if file.is_file() else []
            if not any(number is not None for number in numbers):
                continue
            for row, values in enumerate(_table(file, ["prompt_id", "prompt", "response_id"]).to_pylist()):
                model, sample = map(int, values["response_id"].rsplit("-", 2)[1:])
                prompt = prompt_of.get((values["prompt_id"], text_key(values["prompt"])))
                number = numbers[model]
                if number is not None and prompt is not None and sample < samples:
                    rows.setdefault((number, prompt, sample), KeptResponse(file, row))
    return rows


def read(rows: dict[Key, KeptResponse], prompts: Sequence[PromptRow], ids: dict[Key, str]) -> list[pa.Table]:
    """Kept responses as tables, under the ids and gold answers that they have in the new work."""
    by_file: dict[Path, list[tuple[Key, int]]] = {}
    for key, row in rows.items():
        by_file.setdefault(row.file, []).append((key, row.row))
    tables = []
    for file, taken in by_file.items():
        table = _table(file).take([row for _, row in taken])
        golds = [stored_gold(prompts[prompt].answer) for (_, prompt, _), _ in taken]
        renewed: dict[str, list[Any]] = {"response_id": [ids[key] for key, _ in taken]}
        renewed |= {name: [gold.get(name) for gold in golds] for name in ("answer", "answer_is_json")}
        for name, values in renewed.items():
            column, place = pa.array(values, COLUMN_TYPES.get(name, TEXT).stored), table.schema.get_field_index(name)
            if place >= 0:
                table = table.set_column(place, name, column)
            elif any(values):
                table = table.append_column(name, column)
        tables.append(table)
    return tables


def _models(file: Path) -> list[str]:
    """Identities in a file's metadata; none if it is not one of responses."""
    with _readable(file):
        models = (pq.read_schema(file).metadata or {}).get(METADATA.encode(), b"[]")
    return [str(identity) for identity in json.loads(models)]


def _table(file: Path, columns: list[str] | None = None) -> pa.Table:
    with _readable(file):
        return pq.read_table(file, columns=columns, page_checksum_verification=True)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: damaged ({error}); delete it, and its responses are sampled again") from error
