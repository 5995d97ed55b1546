"""Sampling in numbered parts, so that an interrupted and resumed run has the same result as an uninterrupted one."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import fingerprint
from regretless.core.terminal import bar
from regretless.data.prompts import PromptRow
from regretless.data.records import Response
from regretless.data.rows import write_parquet, write_records
from regretless.modeling.load import ModelConfig
from regretless.sampling.base import Completion, Engine, SamplingParams
from regretless.sampling.engines import ENGINES

MAX_PARTS = 200
"""Parts of one model's work; an interruption loses at most one."""


@dataclass(frozen=True)
class Task:
    """One response to write: its prompt (by index) and its sample number."""

    prompt: int
    sample: int


@dataclass
class SampleWork:
    """Responses of models to prompts, to be written to the parquet file `output`.

    Each model's tasks are sorted by prompt length and split into batches. The samples of a batch depend on its tasks
    and on a seed derived from the configured one, the model's index and the batch's, and on nothing that ran before it.

    Whether the work is already done is the run folder's question (`RunFolder.do`), and so is whether a model's files
    have changed since the work was interrupted. Its key does not cover one thing: the rows of a data set on the hub.
    So the names of parts say which question they answer.
    """

    models: Sequence[ModelConfig]
    prompts: Sequence[PromptRow]
    params: SamplingParams
    output: Path

    @cached_property
    def question(self) -> str:
        """Hash of prompts and settings; part of the name of every part, so that no part answers another question."""
        return fingerprint(
            {
                "models": [model.model_dump() for model in self.models],
                "prompts": [[row.prompt_id, row.prompt, row.answer] for row in self.prompts],
                "params": self.params.model_dump(),
            }
        )

    @property
    def parts(self) -> Path:
        """Folder of the finished parts."""
        return self.output.with_suffix(".parts")

    def finish(self) -> None:
        """Write the output: from the finished parts of this question, and from those that are still missing."""
        self._check()
        with bar("sample", total=len(self.models) * len(self.prompts) * self.params.n) as advance:
            for number, model in enumerate(self.models):
                self._run_model(number, model, advance)
        self._merge()
        shutil.rmtree(self.parts, ignore_errors=True)

    def _check(self) -> None:
        if not self.prompts:
            raise DataError("sampling: expected at least one prompt, got none")
        if len({row.prompt_id for row in self.prompts}) < len(self.prompts):
            raise DataError("sampling: several prompts have the same prompt_id; every prompt needs its own")
        if len({isinstance(row.prompt, str) for row in self.prompts}) > 1:
            raise DataError(
                "sampling: some prompts are strings and some are message lists; make them all one or the other"
            )

    def _run_model(self, number: int, model: ModelConfig, advance: Callable[[int], None]) -> None:
        """Write the missing parts of one model."""
        parts = self._parts_of(number)
        missing = {span: file for span, file in parts.items() if not file.is_file()}
        advance(sum(len(span) for span in parts if span not in missing))
        if not missing:
            return
        engine = ENGINES.find(self.params.engine).load(model, self.params)
        encoded = [engine.encode(row.prompt) for row in self.prompts]
        self._check_context(model, engine, encoded)
        # Longest first: a batch that exceeds the memory fails at once, and the rows of a batch need little padding.
        longest_first = sorted(range(len(encoded)), key=lambda prompt: -len(encoded[prompt]))
        tasks = [Task(prompt, sample) for prompt in longest_first for sample in range(self.params.n)]
        for span, file in missing.items():
            records: list[Response] = []
            for first in range(span.start, span.stop, self.params.batch_size):
                batch = tasks[first : min(first + self.params.batch_size, span.stop)]
                seed = int(fingerprint([self.params.seed, number, first])[:15], 16)
                completions = self._generate(engine, [encoded[task.prompt] for task in batch], seed)
                records += [
                    self._response(engine, number, task, completion)
                    for task, completion in zip(batch, completions, strict=True)
                ]
                advance(len(batch))
            write_records(file, records)
        # The next model needs the memory of this one.
        del engine
        gc.collect()
        torch.cuda.empty_cache()

    def _parts_of(self, number: int) -> dict[range, Path]:
        """Part files of a model, by the indices of their tasks: whole batches, except for the last."""
        total, batch = len(self.prompts) * self.params.n, self.params.batch_size
        size = batch * math.ceil(total / batch / MAX_PARTS)
        return {
            range(start, min(start + size, total)): self.parts
            / f"{number:03d}-{start // size:03d}-{self.question[:16]}.parquet"
            for start in range(0, total, size)
        }

    def _check_context(self, model: ModelConfig, engine: Engine[Any], encoded: Sequence[Sized]) -> None:
        room = math.inf if engine.context is None else engine.context - self.params.max_new_tokens
        long = [len(prompt) for prompt in encoded if len(prompt) > room]
        if long:
            raise ConfigError(
                f"model {model.label}: {len(long)} of {len(encoded)} prompts (the longest has {max(long)} tokens) and "
                f"max_new_tokens={self.params.max_new_tokens} exceed its {engine.context} positions; lower "
                "max_new_tokens, or exclude long prompts with max_prompt_tokens"
            )

    def _generate(self, engine: Engine[Any], batch: Sequence[Sized], seed: int) -> list[Completion]:
        try:
            return engine.generate(batch, seed)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"batch_size={self.params.batch_size} with prompts of {max(map(len, batch))} tokens and max_new_tokens="
                f"{self.params.max_new_tokens} does not fit into the device's memory; lower batch_size"
            ) from error

    def _response(self, engine: Engine[Any], number: int, task: Task, completion: Completion) -> Response:
        row = self.prompts[task.prompt]
        return Response(
            prompt_id=row.prompt_id,
            response_id=_response_id(row, number, task.sample),
            prompt=row.prompt,
            prompt_token_ids=completion.prompt_token_ids,
            response=completion.text,
            token_ids=completion.token_ids,
            tokens=completion.tokens,
            logps=completion.logps,
            logps_kind=completion.logps_kind,
            sampled_logps=completion.sampled_logps,
            token_numbers=completion.token_numbers,
            sampling=json.dumps(self.params.model_dump(exclude={"engine", "seed"}, exclude_none=True)),
            seed=self.params.seed,
            finish_reason=completion.finish_reason,
            answer=row.answer,
            **dataclasses.asdict(engine.provenance),
        )

    def _merge(self) -> None:
        """Write all parts as one table, in the order of prompt, model, sample."""
        files = [file for number in range(len(self.models)) for file in self._parts_of(number).values()]
        table = pa.concat_tables([pq.read_table(file) for file in files], promote_options="default")
        place = {name: row for row, name in enumerate(table["response_id"].to_pylist())}
        models, samples = range(len(self.models)), range(self.params.n)
        wanted = (_response_id(*key) for key in itertools.product(self.prompts, models, samples))
        write_parquet(self.output, table.take([place[name] for name in wanted]))


def _response_id(prompt: PromptRow, model: int, sample: int) -> str:
    return f"{prompt.prompt_id}-{model}-{sample}"
