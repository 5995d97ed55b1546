"""A short calibration: a few batches of each stage in a temporary folder, and from them the time of the whole stage.

A model that a stage has yet to make is replaced by one of its shape: what a few steps of its training leave. Responses
and pairs that are not there yet are replaced by ones of the expected length.
"""

from __future__ import annotations

import gc
import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regretless.analysis import analyze, inspect
from regretless.core.errors import RegretlessError
from regretless.core.run_folder import resolve
from regretless.core.stage_folder import CACHE
from regretless.data.prompts import PromptRow
from regretless.data.records import Response, Verdict
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.tokenization import encode_prompt
from regretless.labeling import verify
from regretless.modeling.load import ModelConfig, empty_model, load_model, tokenizer_fingerprint
from regretless.modeling.scoring import score_responses
from regretless.modeling.training_folder import Trained
from regretless.pairing import mask, pair
from regretless.planning.counts import Counting
from regretless.planning.dry_run import PlannedUnit, State
from regretless.planning.estimate import Estimate
from regretless.planning.lengths import Lengths, is_sampling, models_in, params_of
from regretless.planning.trainings import Data, Trainings
from regretless.reporting import report
from regretless.runs.evaluate import grading
from regretless.runs.side_by_side import DIVIDED
from regretless.runs.work import as_trained
from regretless.sampling.base import SamplingParams
from regretless.sampling.engines import ENGINES
from regretless.sampling.sample import sample_prompts
from regretless.training import train
from regretless.training.log import FILE, read
from regretless.training.packing import filled_tokens
from regretless.training.train_config import TrainConfig

BRIEF, LONG = 4.0, 20.0
"""Seconds: what a measurement should take where its unit is short; a first batch that takes longer is not repeated."""
FIRST_STEPS, MOST_STEPS = 2, 120
BATCHES = 3
ROWS = (200, 1000, 4000)
"""Responses that are verified, in two measurements: the first number, and the last one if that was brief."""
SCORED = (32, 128, 512)
"""Pairs that are scored, in two measurements: the first number, and the last one if that was brief."""
STAND_INS = 4000
"""Responses in place of those that are not there yet."""
REFERENCE_PAIRS = 256
"""Pairs that the reference scores, to measure its speed."""
LARGE = 5e8
"""Trained weights above which a measurement writes no checkpoint."""
UNMEASURABLE = (RegretlessError, OSError, RuntimeError, ValueError)
"""What may keep a stage from being measured: a plan goes on without its time."""


@dataclass(frozen=True)
class Line:
    """Seconds of work of some size: `fixed + each * size`."""

    fixed: float
    each: float

    def at(self, size: float) -> float:
        """Seconds for a size."""
        return self.fixed + self.each * size

    @staticmethod
    def through(small: tuple[float, float], large: tuple[float, float]) -> Line:
        """The line through two measurements (size, seconds); noise cannot make either part negative."""
        each = max(0.0, (large[1] - small[1]) / (large[0] - small[0])) if large[0] > small[0] else 0.0
        each = each or large[1] / max(1.0, large[0])
        return Line(max(0.0, large[1] - each * large[0]), each)


@dataclass(frozen=True)
class Sampled:
    """Measured sampling of one model."""

    load: float
    batch: float
    """Seconds for a batch."""
    lengths: NDArray[np.integer[Any]]


@dataclass
class Calibration:
    """Times of the units that are left to do, from measurements."""

    counting: Counting
    gpus: int
    processes: int
    """Those that share the responses of the stage `sample`."""
    say: Callable[[str], None]
    notes: dict[str, None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _sampled: dict[Any, Sampled] = field(default_factory=dict)
    _verified: dict[str, Line] = field(default_factory=dict)
    _rates: dict[str, float] = field(default_factory=dict)
    """Tokens that a model scores in a second, by its label."""
    _has_pairs: bool = False

    def run(self) -> None:
        """Measure every unit that is left to do, and write its time into its estimate."""
        for name in list(self.counting.estimates):
            estimate = self.counting.estimates[name]
            if estimate.unit.state is not State.DONE and estimate.seconds is None:
                self._measure(estimate)
            if name == "sample":
                self.counting.count_all()  # now with the length of measured responses
        self.counting.count_all()
        for name, seconds in self.seconds.items():
            self.counting.estimates[name].seconds = seconds

    def _measure(self, estimate: Estimate) -> None:
        unit, action = estimate.unit, None
        if is_sampling(unit):
            action = self._sampling
        elif unit.stage == "evaluate" and not estimate.is_judge:
            action = self._verifying
        else:
            action = {
                "pretrain": self._training,
                "verify": self._verifying,
                "pair": self._pairing,
                "mask": self._masking,
                "inspect": self._inspecting,
                "train": self._training,
                "analyze": self._analyzing,
                "report": self._reporting,
            }.get(unit.stage)
        if action is None:
            if estimate.is_judge:
                self.notes[f"{unit.stage}: the time of a judge depends on its server"] = None
            return
        self.say(unit.name)
        try:
            seconds = action(estimate)
        except UNMEASURABLE as error:
            self.notes[f"{unit.name}: not measured: {error}"] = None
            seconds = None
        gc.collect()
        if seconds is not None:
            self.seconds[unit.name] = seconds

    @property
    def _run(self) -> Path:
        return self.counting.folder.path

    @property
    def _scratch(self) -> Path:
        """An empty folder for what a measurement writes."""
        folder = self._run.parent / "measured"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    # --- training ----------------------------------------------------------------------------------------------------

    def _training(self, estimate: Estimate) -> float | None:
        unit, steps = estimate.unit, estimate.counts.get("steps")
        trainings = Trainings(self.counting.recipe)  # its data may be stand-ins, which are not to be counted
        pairs = trainings.pairs(unit.name, self.counting.job)
        if unit.stage == "train":
            self._need_pairs()
        data = trainings.data(unit.name, pairs)
        if steps is None or data is None:
            self.notes[f"{unit.name}: not measured: {trainings.problems.get(unit.name, 'no pairs')}"] = None
            return None
        config, objective, model = trainings.config(unit.name)
        here, start = resolve(config, self._run), trainings.shape(model)
        weights = trainings.weights(unit.name)
        without = ["save_strategy"] if weights is None or weights["trained"] > LARGE else []
        done = 0 if estimate.parts is None else estimate.parts[0]

        def trial(count: int) -> tuple[float, float]:
            return self._train_for(count, here, objective, start, pairs, unit.folder, without)

        count = min(FIRST_STEPS, int(steps))
        fixed, a_step = trial(count)
        if a_step < 1 and count < steps:
            count = min(int(steps), max(8, min(MOST_STEPS, int(BRIEF / a_step))))
            fixed, a_step = trial(count)
        # `fixed` includes the reference's part for the measured steps.
        later = self._reference_seconds(data, start, estimate.counts.get("pairs", 0), count)
        return fixed + (a_step * (steps - done) + later) / self.gpus

    def _train_for(
        self,
        count: int,
        config: TrainConfig,
        objective: str,
        model: ModelConfig,
        pairs: Path | str,
        output: Path,
        without: Sequence[str],
    ) -> tuple[float, float]:
        """Seconds besides the steps, and of one step."""
        for folder in (output, output.with_name(output.name + CACHE)):
            shutil.rmtree(folder, ignore_errors=True)
        entry = {**config.methods.get(objective, {}), "max_steps": count, "logging_steps": max(1, count // 4)}
        entry |= dict.fromkeys(without, "no")
        # Here, so that it can be divided by any number of GPUs.
        limited = config.model_copy(update={"methods": {**config.methods, objective: entry}, "processes": 1})
        began = time.monotonic()
        train.run(limited, objective, model, pairs, output)
        total = time.monotonic() - began
        log = read(output / FILE)
        assert log is not None
        (first, *_, last) = [(0, log.start["time"]), *((line["step"], line["time"]) for line in log.lines)]
        middle = (log.lines[0]["step"], log.lines[0]["time"]) if len(log.lines) > 1 else first
        a_step = (last[1] - middle[1]) / (last[0] - middle[0])
        return total - a_step * count, a_step

    def _reference_seconds(self, data: Data, model: ModelConfig, pairs: float, steps: int) -> float:
        """Seconds to score with the reference what steps beyond the first ones read."""
        if not data.needs_reference:
            return 0.0
        known, every = data.reference_tokens(steps), data.reference_tokens(data.steps)
        beyond = every * max(1.0, pairs / len(data.train)) - known
        if beyond <= 0:
            return 0.0
        if model.label not in self._rates:
            some = range(min(len(data.train), REFERENCE_PAIRS))
            items = [item for number in some for item in data.train[number].items(rejected=True)]
            scorer = load_model(model)
            score_responses(scorer, items[:8])
            began = time.monotonic()
            score_responses(scorer, items, max_tokens=filled_tokens(scorer, scorer.device))
            tokens = int(data.train.tokens[: len(some)].sum())
            self._rates[model.label] = tokens / (time.monotonic() - began)
        return beyond / self._rates[model.label]

    # --- sampling ----------------------------------------------------------------------------------------------------

    def _sampling(self, estimate: Estimate) -> float | None:
        unit, params = estimate.unit, params_of(estimate.unit)
        rows = self.counting.prompts.get(unit.name)
        if rows is None:
            self.notes[f"{unit.name}: not measured: its prompts are not at hand"] = None
            return None
        if ENGINES.find(params.engine).takes_server:
            self.notes[f"{unit.name}: the time of a server is not measured"] = None
            return None
        total = 0.0
        for named in models_in(unit):
            model = ModelConfig.parse(named, unit.name)
            shape = self.counting.trainings.shape(model)
            if any(self._stands_in(model, one) for one in self.counting.folder.units.values()):
                # Such a model ends no response: it writes as many tokens as are expected of the longest one of a batch.
                longest = self.counting.lengths.of(unit, named, params).longest(params.batch_size)
                found = self._sample_with(shape, rows, params.model_copy(update={"max_new_tokens": round(longest)}))
            else:
                found = self._sample_with(shape, rows, params)
                key = self.counting.lengths.key_of(named, params)
                mean = float(found.lengths.mean())
                self.counting.lengths.measured[key] = Lengths(mean, "the calibration", found.lengths)
            batches = math.ceil(len(rows) * params.n / params.batch_size)
            at_once = min(self.processes, batches) if unit.name == DIVIDED else 1
            total += found.load / self._loaded_with(unit) + batches * found.batch * estimate.left / self.gpus / at_once
        return total

    def _loaded_with(self, unit: PlannedUnit) -> int:
        """Number of units that are left to do with the model loaded once, this one included."""
        if not isinstance(unit.settings["prompts"], Mapping) or unit.name == "sample":
            return 1
        label = unit.name.rsplit("/", 2)[0]
        others = [one for one in self.counting.folder.units.values() if one.name.startswith(f"{label}/")]
        return sum(one.state is not State.DONE and isinstance(one.settings["prompts"], Mapping) for one in others)

    def _stands_in(self, model: ModelConfig, unit: PlannedUnit) -> bool:
        """True if a model is one that a unit has yet to make."""
        here = resolve(model, self._run)
        folders = [Path(name) for name in (here.name_or_path, here.adapter) if name is not None]
        return not unit.is_known and unit.folder in folders

    def _sample_with(self, model: ModelConfig, rows: Sequence[PromptRow], params: SamplingParams) -> Sampled:
        drawing = params.model_dump(exclude={"seed"})
        key = (empty_model(model).num_parameters(), model.adapter is not None, len(rows), str(drawing))
        if key not in self._sampled:
            self._sampled[key] = self._time_sampling(model, rows, params)
        return self._sampled[key]

    def _time_sampling(self, model: ModelConfig, rows: Sequence[PromptRow], params: SamplingParams) -> Sampled:
        scratch, trials = self._scratch, itertools.count()

        def trial(batches: int) -> float:
            output = scratch / f"{next(trials)}.parquet"  # another each time: what one has is not sampled again
            some = _evenly(rows, max(1, batches * params.batch_size // params.n))
            began = time.monotonic()
            sample_prompts(model, some, params, output)
            lengths.append(_response_lengths(output))
            return time.monotonic() - began

        lengths: list[NDArray[np.integer[Any]]] = []
        seconds, batches = trial(1), 1  # the first call of a process also loads libraries
        load = 0.0 if ENGINES.find(params.engine).takes_vllm else _load_seconds(model, params)
        if seconds < LONG:
            first = seconds
            batches = min(BATCHES, math.ceil(len(rows) * params.n / params.batch_size))
            seconds = trial(batches)
            # vLLM takes the GPU's memory and frees it late: it is loaded by trials only.
            load = load or (Line.through((1, first), (batches, seconds)).fixed if batches > 1 else 0.0)
        return Sampled(load, max(0.0, seconds - load) / batches, lengths[-1])

    # --- labels and pairs --------------------------------------------------------------------------------------------

    def _verifying(self, estimate: Estimate) -> float | None:
        count = estimate.counts.get("responses")
        return None if count is None else self._verify_line(estimate.unit.stage).at(count * estimate.left)

    def _verify_line(self, stage: str) -> Line:
        recipe = self.counting.recipe
        config = recipe.verify or verify.VerifyConfig()
        if stage == "evaluate" and recipe.evaluate is not None:
            config = grading(recipe.evaluate, config)
        key = str(config.model_dump())
        if key not in self._verified:
            with_answer = [row for row in self._responses if row.answer is not None]

            def trial(count: int) -> tuple[float, float]:
                folder = self._scratch
                write_records(folder / "in.parquet", with_answer[:count])
                began = time.monotonic()
                verify.run(config, folder / "in.parquet", folder)
                return min(count, len(with_answer)), time.monotonic() - began

            self._verified[key] = _growing(trial, ROWS)
        return self._verified[key]

    @cached_property
    def _responses(self) -> list[Response]:
        """Responses: real ones where they are at hand, else stand-ins of the expected length for the same prompts.

        Raises RegretlessError if neither is possible.
        """
        sampled = self.counting.folder.units.get("sample")
        if sampled is not None and sampled.is_known:
            return _evenly(read_responses(sampled.folder / "responses.parquet")[0], STAND_INS)
        recipe = self.counting.recipe
        if sampled is None or recipe.sample is None or "sample" not in self.counting.prompts:
            raise RegretlessError("the responses are not at hand")
        rows, params = self.counting.prompts["sample"], params_of(sampled)
        model = recipe.sample.models[0]
        tokenizer = self.counting.trainings.tokenizer(model)
        name = self.counting.lengths.pretrained(model)
        data = None if name is None else self.counting.trainings.data(f"pretrain/{name}")
        written: list[tuple[str, list[int]]]
        if data is not None:
            pairs = [data.train[number].pair for number in range(min(len(data.train), STAND_INS))]
            ids = [list(pair.chosen.own) for pair in pairs]
            written = [(tokenizer.decode(each, skip_special_tokens=True), each) for each in ids]
        else:
            sample_prompts(
                self.counting.trainings.shape(model), _evenly(rows, 8), params, self._scratch / "responses.parquet"
            )
            found = read_responses(self._run.parent / "measured" / "responses.parquet")[0]
            written = [(row.response, row.token_ids or []) for row in found]
        distinct = list(dict(written).items())
        a_prompt = params.n * len(recipe.sample.models)
        prompts = _evenly(rows, math.ceil(STAND_INS / a_prompt))
        vocabulary = tokenizer_fingerprint(tokenizer)
        return list(
            _stand_ins(prompts, a_prompt, distinct, lambda row: encode_prompt(tokenizer, row.prompt), vocabulary)
        )

    def _pairing(self, estimate: Estimate) -> float | None:
        sample = self.counting.answers
        rows = self._labeled()
        write_records((folder := self._scratch) / "in.parquet", rows)
        began = time.monotonic()
        assert self.counting.recipe.pair is not None
        pair.run(self.counting.recipe.pair, folder / "in.parquet", folder)
        seconds = time.monotonic() - began
        return None if sample is None else seconds * sample.counts["requests"] / len(rows)

    def _masking(self, estimate: Estimate) -> float | None:
        self._need_pairs()
        section, source, count = self.counting.recipe.mask, self.counting.job.pairs(), estimate.counts.get("pairs")
        if section is None or not isinstance(source, Path) or count is None:
            return None
        config = resolve(section, self._run).model_copy(update={"count": "all"})
        began = time.monotonic()
        summary = mask.run(config, source, self._scratch)
        return (time.monotonic() - began) * count / int(summary["pairs"])

    def _labeled(self) -> list[Response]:
        """Responses with a label that any rule can pair."""
        labels = (Verdict.CORRECT, Verdict.WRONG)
        return [
            Response(
                **{**vars(row), "verdict": labels[number % 2], "score": float(number % 2), "finish_reason": "stop"}
            )
            for number, row in enumerate(self._responses)
        ]

    def _need_pairs(self) -> None:
        """Put stand-ins where stages look for pairs that are not there yet."""
        source = self.counting.job.pairs()
        estimate = self.counting.estimates.get("pair")
        config = self.counting.recipe.pair
        if not isinstance(source, Path) or estimate is None or config is None or self._has_pairs:
            return
        maker = self.counting.estimates.get(source.parent.name)
        if maker is not None and maker.unit.is_known and source.is_file():
            return
        folder = self._scratch
        wanted = int(estimate.counts.get("pairs", STAND_INS))
        write_records(folder / "in.parquet", self._labeled())
        pair.run(config, folder / "in.parquet", folder)
        shutil.rmtree(source.parent, ignore_errors=True)
        source.parent.mkdir(parents=True)
        table = pq.read_table(folder / "pairs.parquet")
        pq.write_table(table.slice(0, wanted), source)
        self._has_pairs = True

    # --- analysis ----------------------------------------------------------------------------------------------------

    def _inspecting(self, estimate: Estimate) -> float | None:
        self._need_pairs()
        section, model = self.counting.recipe.inspect, self.counting.recipe.model
        source, count = self.counting.job.pairs(), estimate.counts.get("pairs")
        if section is None or model is None or count is None or not isinstance(source, Path):
            return None
        config = resolve(as_trained(section, self.counting.recipe.train), self._run)
        start, objectives = self.counting.trainings.shape(model), estimate.unit.settings["objectives"]

        def trial(sample: int) -> tuple[float, float, float]:
            began = time.monotonic()
            limited = config.model_copy(update={"sample": sample, "rescore": False})
            summary = inspect.run(limited, source, start, self._scratch, objectives)
            return summary["scored_pairs"], time.monotonic() - began, summary["pairs"]

        _, reading, read_pairs = trial(0)
        if reading < BRIEF:
            _, reading, _ = trial(0)  # the first call of a process also loads libraries
        reading *= count / read_pairs
        if config.rescore:
            self.notes["inspect: the time of rescore is not in the prediction"] = None
        if config.sample == 0:
            return reading
        scoring = _growing(lambda sample: trial(sample)[:2], SCORED)
        wanted = count if config.sample is None else min(config.sample, count)
        return max(0.0, scoring.fixed - reading * read_pairs / count) + reading + scoring.each * wanted / self.gpus

    def _analyzing(self, estimate: Estimate) -> float | None:
        self._need_pairs()
        counting = self.counting
        section, model, source = counting.recipe.analyze, counting.recipe.model, counting.job.pairs()
        if section is None or model is None or not isinstance(source, Path):
            return None
        if section.policies:
            self.notes["analyze: not measured: its models are named in analyze.policies"] = None
            return None
        start = counting.trainings.shape(model)
        policies = {
            name: Trained(resolve(one.model, self._run), one.folder, one.objective, one.hyperparameters)
            for name, one in counting.job.trained().items()
        }

        def trial(sample: int) -> tuple[float, float]:
            limited = section.model_copy(update={"sample": sample})
            began = time.monotonic()
            analyze.run(limited, source, start, policies, self._scratch, {})
            return sample, time.monotonic() - began

        line = _growing(trial, SCORED)
        return line.fixed + line.each * estimate.counts.get("pairs", section.sample) / self.gpus

    def _reporting(self, estimate: Estimate) -> float | None:
        section = self.counting.recipe.report
        if section is None:
            return None
        began = time.monotonic()
        report.run(section, self._run, self._scratch)
        return time.monotonic() - began


def _growing(trial: Callable[[int], tuple[float, float]], sizes: tuple[int, int, int]) -> Line:
    """Seconds by size, from two trials; `trial` does work of about a size, and returns the true one and the time."""
    small = trial(sizes[0])
    return Line.through(small, trial(sizes[2] if small[1] < BRIEF else sizes[1]))


def _evenly(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` rows, spread over all."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int)
    return [rows[place] for place in dict.fromkeys(places.tolist())]


def _stand_ins(
    prompts: Sequence[PromptRow],
    n: int,
    written: Sequence[tuple[str, list[int]]],
    encode: Callable[[PromptRow], list[int]],
    tokenizer: str,
) -> Iterator[Response]:
    """Responses to prompts that others wrote to other prompts."""
    for number, row in enumerate(prompts):
        ids = encode(row)
        for sample in range(n):
            text, tokens = written[(number * n + sample) % len(written)]
            yield Response(
                prompt_id=row.prompt_id,
                response_id=f"{row.prompt_id}-0-{sample}",
                prompt=row.prompt,
                prompt_token_ids=ids,
                response=text,
                token_ids=tokens,
                logps=[-1.0] * len(tokens),
                logps_kind="raw",
                sampled_logps=[-1.0] * len(tokens),
                tokenizer=tokenizer,
                finish_reason="stop",
                answer=row.answer,
            )


def _load_seconds(model: ModelConfig, params: SamplingParams) -> float:
    began = time.monotonic()
    ENGINES.find(params.engine).load(model, params)
    return time.monotonic() - began


def _response_lengths(file: Path) -> NDArray[np.integer[Any]]:
    return np.array([len(row) for row in pq.read_table(file, columns=["token_ids"])["token_ids"].to_pylist()])
