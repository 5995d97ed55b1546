"""Sampling in numbered parts, so that an interrupted and resumed run has the same result as an uninterrupted one."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import shutil
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import fingerprint
from regretless.core.progress import Advance, bar
from regretless.core.text_cleaning import is_clean
from regretless.data.columns import Response
from regretless.data.prompts import PromptRow
from regretless.data.responses import check_response
from regretless.data.rows import write_parquet, write_records
from regretless.data.schema import Unusable, check_lengths, quoted, stored_gold
from regretless.modeling.load import ModelConfig
from regretless.sampling import kept
from regretless.sampling.base import (
    Completion,
    Engine,
    PartEngine,
    PromptsUnansweredError,
    StoringEngine,
    StreamingEngine,
    TextEngine,
)
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.engines import ENGINES
from regretless.sampling.stop_strings import first_of
from regretless.workflow.stage_folder import CACHE, earlier_results
from regretless.workflow.workers import InThisProcess, Need, executor

MAX_PARTS = 200
"""Parts of one model's work. An interruption loses one of each worker, or those that a streaming engine has begun."""
PART_BATCHES = 4
"""Fewest batches of a part: where rows are replaced as they end, the last ones of each part are computed alone."""
UNITS_PER_WORKER = 4
"""Units that each of several workers does, one after another."""


@dataclass(frozen=True)
class Task:
    """One response to write: its prompt (by index) and its sample number."""

    prompt: int
    sample: int


@dataclass(frozen=True)
class SampledPart:
    """A numbered part of a model's responses: a file of its own."""

    model: int
    """Index of the model within the work."""
    tasks: range
    """Indices of its tasks among those of the model that are left to do."""
    file: Path

    def __str__(self) -> str:
        return self.file.name


@dataclass
class SampleWork:
    """Responses of models to prompts, to be written to the parquet file `output`.

    Each model's tasks are sorted by prompt length. Responses of an engine that takes a seed for each response depend on
    the configured seed, the model's index, prompt_id and sample number. For other engines tasks are split into batches,
    and the responses of a batch depend on its tasks and on a seed derived from the configured one, the model's index
    and the batch's. In both cases they do not depend on which worker wrote them, nor on anything that ran before, with
    one exception: responses of earlier settings are kept where the new ones cover them (`sampling.kept`).

    Whether the work is already done is the run folder's question (`RunFolder.do_together`), and so is whether a model's
    files have changed since the work was interrupted. Its key does not cover one thing: the rows of a data set on the
    hub. So the names of parts say which question they answer.
    """

    models: Sequence[ModelConfig]
    prompts: Sequence[PromptRow]
    params: SamplingParams
    output: Path

    @cached_property
    def identities(self) -> list[str]:
        """What the responses of each model are drawn from."""
        return kept.identities(self.models, self.params)

    @cached_property
    def kept(self) -> dict[kept.Key, kept.KeptResponse]:
        """Responses that exist already: of earlier settings, or of this work if it was merged before."""
        places = [self.output, *earlier_results(self.output.parent)]
        return kept.find(places, self.identities, self.prompts, self.params.n)

    @cached_property
    def question(self) -> str:
        """Hash of prompts, settings and kept responses; part of the name of every part.

        So no part answers another question.
        """
        return fingerprint(
            {
                "models": [model.model_dump() for model in self.models],
                "drawn": self.identities,
                "prompts": [[row.prompt_id, row.prompt, row.answer] for row in self.prompts],
                "params": self.params.model_dump(),
                "kept": sorted(self.kept),
            }
        )

    @property
    def total(self) -> int:
        """Number of its responses, kept ones included."""
        return len(self.models) * len(self.prompts) * self.params.n

    @property
    def parts(self) -> Path:
        """Folder of the finished parts."""
        return self.output.with_suffix(".parts")

    @property
    def replies(self) -> Path:
        """File of a server's replies for parts that are not finished, and of what all its replies have cost.

        Beside the folder, so that it outlives a change of settings: a larger budget is one.
        """
        folder = self.output.parent
        return folder.with_name(folder.name + CACHE) / f"{self.output.stem}.replies.sqlite"

    def check(self) -> None:
        """Raise DataError for prompts that cannot be sampled from together."""
        if not self.prompts:
            raise DataError("sampling: expected at least one prompt, got none")
        if len({row.prompt_id for row in self.prompts}) < len(self.prompts):
            raise DataError("sampling: several prompts have the same prompt_id; every prompt needs its own")
        if len({isinstance(row.prompt, str) for row in self.prompts}) > 1:
            raise DataError(
                "sampling: some prompts are strings and some are message lists; make them all one or the other"
            )

    def parts_of(self, number: int) -> list[SampledPart]:
        """Parts of a model, by its index: whole batches, except for the last."""
        kept_responses = sum(model == number for model, _, _ in self.kept)
        total, batch = len(self.prompts) * self.params.n - kept_responses, self.params.batch_of_parts
        size = batch * max(PART_BATCHES, math.ceil(total / batch / MAX_PARTS))
        return [
            SampledPart(
                number,
                range(start, min(start + size, total)),
                self.parts / f"{number:03d}-{start // size:03d}-{self.question[:16]}.parquet",
            )
            for start in range(0, total, size)
        ]

    def seed_of_batch(self, model: int, first: int) -> int:
        """Seed of a batch, by the index of its first task: never that of a batch of kept responses."""
        return _seed(self.params.seed, model, first, *([self.question] if self.kept else []))

    def merge(self) -> None:
        """Write all parts and kept responses as one table, in the order of prompt, model, sample; delete the parts."""
        models, samples = range(len(self.models)), range(self.params.n)
        wanted = {
            (model, prompt, sample): _response_id(self.prompts[prompt], model, sample)
            for prompt, model, sample in itertools.product(range(len(self.prompts)), models, samples)
        }
        files = [part.file for number in models for part in self.parts_of(number)]
        tables = [*map(pq.read_table, files), *kept.read(self.kept, self.prompts, wanted)]
        table = pa.concat_tables(tables, promote_options="default")
        row_of = {name: row for row, name in enumerate(table["response_id"].to_pylist())}
        write_parquet(self.output, table.take([row_of[name] for name in wanted.values()]), self.metadata)
        shutil.rmtree(self.parts, ignore_errors=True)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of its files, by which later work finds the responses that it covers."""
        return kept.metadata(self.identities)


Assignment = tuple[int, SampledPart]
"""The index of a work among those that are done together, and one of its parts."""


def finish(works: Sequence[SampleWork]) -> None:
    """Write the outputs of all works: from their finished parts, and from those that are still missing.

    A model that several works name is loaded once. Raises DataError for prompts that cannot be sampled from together,
    ConfigError for models that cannot be used.
    """
    for work in works:
        work.check()
    groups = _by_engine(works)
    total, left = sum(work.total for work in works), sum(len(part.tasks) for missing in groups for _, part in missing)
    with bar("sample", total, done=total - left, unit="responses") as advance:
        for missing in groups:
            work, part = works[missing[0][0]], missing[0][1]
            kind = ENGINES.find(work.params.engine)
            # Requests to a server need no workers of their own.
            workers = InThisProcess() if kind.takes_server else executor()
            need = Need("sample", kind.gpus(work.params))
            make = partial(PartSampler, work.models[part.model], works)
            workers.run(need, make, _units(missing, workers.workers(need)), advance)
            # The next model needs the memory of this one.
            gc.collect()
            torch.cuda.empty_cache()
    for work in works:
        work.merge()


def _by_engine(works: Sequence[SampleWork]) -> list[list[Assignment]]:
    """The missing parts, those together that one loaded model can write."""
    missing: dict[str, list[Assignment]] = {}
    for index, work in enumerate(works):
        loaded = work.params.model_dump(include={"engine", "server", "vllm"})
        for number, model in enumerate(work.models):
            for part in work.parts_of(number):
                if not part.file.is_file():
                    missing.setdefault(fingerprint([model.model_dump(), loaded]), []).append((index, part))
    return [*missing.values()]


def _units(missing: Sequence[Assignment], workers: int) -> list[list[Assignment]]:
    """Parts in units: all for a single worker, else several units for each, so that they end at about the same time."""
    size = len(missing) if workers == 1 else max(1, len(missing) // (UNITS_PER_WORKER * workers))
    return [list(missing[start : start + size]) for start in range(0, len(missing), size)]


@dataclass(frozen=True)
class _Asked:
    """A work as one model sees it."""

    engine: Engine[Any]
    prompts: list[Any]
    """In the engine's form."""
    tasks: list[Task]


class PartSampler:
    """Writes parts of works with one model, which is loaded for the first of them. Each worker makes one."""

    def __init__(self, model: ModelConfig, works: Sequence[SampleWork]) -> None:
        self.model, self.works = model, works
        self._engine: Engine[Any] | None = None
        self._asked: dict[tuple[int, int], _Asked] = {}

    def __call__(self, unit: Sequence[Assignment], advance: Advance) -> None:
        """Write the parts that have no file yet."""
        for (index, number), assigned in itertools.groupby(unit, key=lambda pair: (pair[0], pair[1].model)):
            parts = [part for _, part in assigned if not part.file.is_file()]
            work, asked = self.works[index], self._asked.get((index, number)) or self._ask(index, number)
            if isinstance(asked.engine, StreamingEngine):
                for together in [[part] for part in parts] if isinstance(asked.engine, PartEngine) else [parts]:
                    self._stream(asked.engine, asked, work, together, advance)
                continue
            for part in parts:
                write_records(part.file, _in_batches(asked, work, part, advance), work.metadata)

    def _ask(self, index: int, number: int) -> _Asked:
        work = self.works[index]
        if self._engine is None:
            self._engine = ENGINES.find(work.params.engine).load(self.model, work.params)
        engine = self._engine.with_params(work.params)
        if isinstance(engine, StoringEngine):
            engine = engine.with_replies(work.replies)
        prompts = [_in_form_of(engine, row) for row in work.prompts]
        _check_context(self.model, engine, prompts, work.params)
        # Longest first: a batch that exceeds the memory fails at once, and the rows of a batch need little padding.
        longest_first = sorted(range(len(prompts)), key=lambda prompt: -len(prompts[prompt]))
        tasks = [
            Task(prompt, sample)
            for prompt, sample in itertools.product(longest_first, range(work.params.n))
            if (number, prompt, sample) not in work.kept
        ]
        self._asked[index, number] = _Asked(engine, prompts, tasks)
        return self._asked[index, number]

    @staticmethod
    def _stream(
        engine: StreamingEngine[Any], asked: _Asked, work: SampleWork, parts: Sequence[SampledPart], advance: Advance
    ) -> None:
        """Write each part as soon as all its responses are there; the engine is never left without requests."""
        # One request for each response, in the order of the parts, with a seed of its own.
        rows = [(part, index) for part in parts for index in part.tasks]
        tasks = [asked.tasks[index] for _, index in rows]
        seeds = [
            _seed(work.params.seed, part.model, work.prompts[task.prompt].prompt_id, task.sample)
            for (part, _), task in zip(rows, tasks, strict=True)
        ]
        prompts = [asked.prompts[task.prompt] for task in tasks]
        # Collect completions in any order; a part is written when its last one arrives.
        responses: dict[SampledPart, dict[int, Response]] = {part: {} for part in parts}
        waiting = set(range(len(rows)))
        try:
            for row, completion in engine.stream(prompts, seeds):
                if row not in waiting:
                    raise _misused(work, f"expected the position of a prompt without a completion, got {row!r:.100}")
                waiting.remove(row)
                part, index = rows[row]
                responses[part][index] = _response(engine, work, part.model, tasks[row], completion)
                advance(1, len(responses[part][index].pieces or ()))
                if len(responses[part]) == len(part.tasks):
                    records = responses.pop(part)
                    write_records(part.file, [records[index] for index in part.tasks], work.metadata)
                    if isinstance(engine, StoringEngine):
                        first = row - (index - part.tasks.start)
                        written = slice(first, first + len(part.tasks))
                        engine.forget(prompts[written], seeds[written])
        except torch.OutOfMemoryError as error:
            raise _too_large(prompts, work.params) from error
        except PromptsUnansweredError as error:
            raise error.naming(
                lambda row: _name(work.prompts[tasks[row].prompt]), lambda row: tasks[row].prompt
            ) from None
        if waiting:
            prompt = _name(work.prompts[tasks[min(waiting)].prompt])
            raise _misused(
                work, f"expected a completion of each prompt, got none of {len(waiting)} (the first: {prompt})"
            )


def _in_batches(asked: _Asked, work: SampleWork, part: SampledPart, advance: Advance) -> list[Response]:
    records: list[Response] = []
    for first in range(part.tasks.start, part.tasks.stop, work.params.batch_of_parts):
        batch = asked.tasks[first : min(first + work.params.batch_of_parts, part.tasks.stop)]
        seed = work.seed_of_batch(part.model, first)
        given = [asked.prompts[task.prompt] for task in batch]
        try:
            completions = asked.engine.generate(given, seed)
        except torch.OutOfMemoryError as error:
            raise _too_large(given, work.params) from error
        if not isinstance(completions, list) or len(completions) != len(batch):
            got = len(completions) if isinstance(completions, list) else quoted(completions)
            prompt = _name(work.prompts[batch[0].prompt])
            raise _misused(work, f"expected a list of {len(batch)} completions (the first of {prompt}), got {got}")
        records += [
            _response(asked.engine, work, part.model, task, completion)
            for task, completion in zip(batch, completions, strict=True)
        ]
        advance(len(batch), sum(len(record.pieces or ()) for record in records[-len(batch) :]))
    return records


def _seed(*of: Any) -> int:
    return int(fingerprint(list(of))[:15], 16)


def _check_context(model: ModelConfig, engine: Engine[Any], prompts: Sequence[Sized], params: SamplingParams) -> None:
    room = math.inf if engine.context is None else engine.context - params.max_new_tokens
    long = [len(prompt) for prompt in prompts if len(prompt) > room]
    if long:
        raise ConfigError(
            f"model {model.label}: {len(long)} of {len(prompts)} prompts (the longest has {max(long)} tokens) and "
            f"max_new_tokens={params.max_new_tokens} exceed its {engine.context} positions; lower "
            "max_new_tokens, or exclude long prompts with max_prompt_tokens"
        )


def _too_large(prompts: Sequence[Sized], params: SamplingParams) -> ConfigError:
    """What a lack of memory means to the user."""
    return ConfigError(
        f"batch_size={params.batch_size} with prompts of {max(map(len, prompts))} tokens and max_new_tokens="
        f"{params.max_new_tokens} does not fit into the device's memory; lower batch_size"
    )


def _response(engine: Engine[Any], work: SampleWork, number: int, task: Task, completion: Completion) -> Response:
    """The record of a completion. Raises ConfigError for one that readers of records would refuse."""
    row = work.prompts[task.prompt]
    if not isinstance(completion, Completion):
        raise _misused(work, f"{_name(row)}: expected a Completion, got {quoted(completion)}")
    response = Response(
        prompt_id=row.prompt_id,
        response_id=_response_id(row, number, task.sample),
        prompt=row.prompt,
        response=completion.text,
        sampling=json.dumps(work.params.model_dump(exclude={"engine", "seed"}, exclude_none=True)),
        seed=work.params.seed,
        **stored_gold(row.answer),
        **{item.name: getattr(completion, item.name) for item in dataclasses.fields(Completion) if item.name != "text"},
        **dataclasses.asdict(engine.provenance),
    )
    # An engine may be of another package: refuse what a reader of the file would refuse.
    if completion.finish_reason != "stop_string" and first_of(completion.text, work.params.stop) is not None:
        raise _misused(
            work,
            f"{_name(row)}: a text that goes on behind a string of `stop`, which StopStrings.applied of "
            "regretless.sampling.stop_strings would cut",
        )
    try:
        check_response(vars(response))
    except Unusable as reason:
        raise _misused(work, f"{_name(row)}: {reason}") from None
    if work.params.top_logps and response.logps is not None and response.top_logps is None:
        raise ConfigError(f"engine {work.params.engine}: records no top_logps; set sample.top_logps to 0")
    for name, texts in (("response", [response.response]), ("tokens", response.tokens or [])):
        if broken := [text for text in texts if not is_clean(text)]:
            expected = "whole characters, not halves of surrogate pairs"
            raise _misused(work, f"{_name(row)}: {name}: expected {expected}, got {broken[0]!r:.100}")
    if problem := check_lengths("sampled_logps", response.pieces, response.sampled_logps):
        raise _misused(work, f"{_name(row)}: {problem}")
    return response


def _in_form_of(engine: Engine[Any], row: PromptRow) -> Any:
    """A prompt in the engine's form. Raises ConfigError for token ids where the engine takes none."""
    if row.token_ids is None:
        return engine.encode(row.prompt)
    if isinstance(engine, TextEngine):
        return engine.encode_ids(row.token_ids)
    return list(row.token_ids)


def _misused(work: SampleWork, problem: str) -> ConfigError:
    return ConfigError(
        f"engine {work.params.engine}: returned what cannot be stored: {problem}; the engine has to return what "
        "regretless.sampling.base.Engine says"
    )


def _name(prompt: PromptRow) -> str:
    return f"row {prompt.line} of the prompts" if prompt.line else f"prompt_id {prompt.prompt_id}"


def _response_id(prompt: PromptRow, model: int, sample: int) -> str:
    return f"{prompt.prompt_id}-{model}-{sample}"
