"""Counts of each unit of work: exact where the data are at hand, else from assumptions that are written down."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from regretless.core.errors import RegretlessError
from regretless.core.run_folder import resolve, substitute
from regretless.data.prompts import PromptRow, PromptSource, load_prompts
from regretless.data.responses import read_responses
from regretless.data.rows import row_count
from regretless.data.tokenization import encode_prompt
from regretless.evaluation.chat import chat_results
from regretless.labeling.judge import PromptGroup, group_responses, make_questions
from regretless.labeling.verify import PART_ROWS
from regretless.modeling.load import ModelConfig
from regretless.modeling.training_folder import last_complete_checkpoint
from regretless.planning.chat_turns import ChatTurns
from regretless.planning.dry_run import PlannedFolder, PlannedUnit, State
from regretless.planning.estimate import CHARACTERS_PER_TOKEN, Assumed, Estimate
from regretless.planning.lengths import ResponseLengths, is_sampling, models_in, params_of
from regretless.planning.trainings import Trainings
from regretless.runs.recipe import Recipe
from regretless.runs.work import Job
from regretless.sampling.base import SamplingParams
from regretless.sampling.engines import ENGINES
from regretless.sampling.job import SampleWork
from regretless.sampling.sample import usable_prompts
from regretless.servers.ask import Question, key_of
from regretless.servers.judge_client import JudgeAccess
from regretless.servers.reply_store import ReplyStore

PROMPT_TOKENS = 200
"""Of a prompt that is not at hand."""
PAIRED = 0.5
"""Share of prompts with a correct and a wrong response, where nothing is known."""
SHOWN_PROMPTS = 20
"""Prompts whose requests to a judge are written out to estimate the tokens of all."""
BYTES_PER_TOKEN, BYTES_PER_ROW = 12, 200
"""Of a response in a file: an id and two log-probabilities a token; its texts and names. A float compresses little."""


@dataclass
class Counting:
    """Counts of all units of a recipe, in their order."""

    recipe: Recipe
    folder: PlannedFolder
    trainings: Trainings
    lengths: ResponseLengths
    assumed: Assumed
    run_dir: Path
    """The run folder itself, of which `folder` is a copy."""
    estimates: dict[str, Estimate] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    """Assumptions, each once, in the order in which they were made."""
    prompts: dict[str, list[PromptRow]] = field(default_factory=dict)
    """Prompts of the units of sampling, where they are at hand."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of each of these prompts, as the last of its models reads it."""
    turns: ChatTurns = field(init=False)
    _parts: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Finished parts when they were first counted: a calibration may replace them."""

    def __post_init__(self) -> None:
        self.turns = ChatTurns(self.recipe, self.folder, self.lengths)

    @property
    def job(self) -> Job:
        """The recipe's work in the plan's folder."""
        return Job(self.recipe, self.folder)

    def count_all(self) -> None:
        """Count every unit, anew if they were counted before."""
        self.turns.add_later()
        self.estimates, self.notes = {}, {}
        for unit in list(self.folder.units.values()):
            found = self.estimates[unit.name] = self._count(unit)
            found.parts = self._parts.setdefault(unit.name, found.parts)

    def assume(self, text: str) -> None:
        """Write down an assumption."""
        self.notes[text] = None

    def _count(self, unit: PlannedUnit) -> Estimate:
        # What may have to run again took so long the last time.
        before = unit.seconds if unit.made or unit.state is State.UNKNOWN else None
        estimate = Estimate(unit, seconds=before, is_judge=_is_judge(unit))
        if unit.is_known or unit.state is State.UNKNOWN:
            self._of_summary(estimate)
        else:
            kind = _kind(unit)
            try:
                if kind is not None:
                    kind(self, estimate)
            except (RegretlessError, OSError) as error:
                unit.problem = unit.problem or str(error)
        return estimate

    def _of_summary(self, estimate: Estimate) -> None:
        unit = estimate.unit
        known = {name: unit.summary.get(other) for other, name in _summary_names(unit).items()}
        estimate.put(unit.state is State.UNKNOWN, **known)
        if is_sampling(unit):
            estimate.put(False, tokens_in=_stored_prompt_tokens(unit.folder / "responses.parquet"))
        files = [path for path in unit.folder.rglob("*") if path.is_file()]
        estimate.put(False, files=len(files), bytes=sum(path.stat().st_size for path in files))

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sampling(self, estimate: Estimate) -> None:
        """Requests of a unit of sampling, with their tokens."""
        unit, params = estimate.unit, params_of(estimate.unit)
        rows, refused = self._prompts_of(unit)
        models = models_in(unit)
        if rows is None:
            given = unit.settings["prompts"]
            limit = given.get("limit") if isinstance(given, Mapping) else None
            if limit is None:
                return
            self.assume(f"{unit.name}: {limit} prompts, the limit, of {PROMPT_TOKENS} tokens (they are not at hand)")
            prompts = limit
            self.tokens[unit.name] = [PROMPT_TOKENS]
        else:
            prompts = len(rows)
            self.prompts[unit.name] = rows
        requests = prompts * params.n * len(models)
        estimate.put(rows is None, prompts=prompts, requests=requests)
        tokens_in, tokens_out = 0.0, 0.0
        read, guessed_in = rows is not None, False
        for model in models:
            if rows is not None:
                lengths, exact = self._tokens_of(rows, ModelConfig.parse(model, unit.name), params)
                self.tokens[unit.name] = lengths
                guessed_in |= not exact
                tokens_in += params.n * sum(lengths)
            expected = self.lengths.of(unit, model, params)
            self.assume(f"{unit.stage}: responses have {expected.mean:.0f} tokens: {expected.source}")
            tokens_out += prompts * params.n * expected.mean
        if not read:
            tokens_in, guessed_in = prompts * params.n * len(models) * PROMPT_TOKENS, True
        estimate.put(guessed_in, tokens_in=tokens_in)
        estimate.put(True, tokens_out=tokens_out)
        estimate.put(True, files=1 + bool(refused), bytes=tokens_out * BYTES_PER_TOKEN + requests * BYTES_PER_ROW)
        if rows is None or unit.waits_for:
            return
        # The names of parts depend on the place of the models; caches are in the run folder only.
        here = [resolve(ModelConfig.parse(model, unit.name), self.run_dir) for model in models]
        work = SampleWork(here, rows, params, self.run_dir / unit.name / "responses.parquet")
        if unit.state is State.INTERRUPTED:
            files = [part.file for number in range(len(here)) for part in work.parts_of(number)]
            estimate.parts = sum(file.is_file() for file in files), len(files)
        elif work.kept:
            estimate.parts = len(work.kept), work.total
            self.assume(f"{unit.name}: {len(work.kept)} of {work.total} responses are there from earlier settings")

    def _prompts_of(self, unit: PlannedUnit) -> tuple[list[PromptRow] | None, int]:
        """The prompts that a unit would answer, and how many rows it would reject; None if they are not at hand."""
        try:
            if unit.name == "sample" and self.recipe.sample is not None:
                section = resolve(self.recipe.sample, self.folder.path)
                models = [self.trainings.with_tokenizer(model) for model in self.recipe.sample.models]
                rows, refused = usable_prompts(section.model_copy(update={"models": models}))
                return rows, len(refused)
            if isinstance(unit.settings["prompts"], Mapping):
                source = resolve(PromptSource.parse(unit.settings["prompts"], unit.name), self.folder.path)
                return load_prompts(source), 0
            return self.turns.prompts_of(unit), 0
        except (RegretlessError, OSError) as error:
            if not unit.waits_for and not self._is_to_come(unit.settings["prompts"]):
                unit.problem = str(error)
            return None, 0

    def _is_to_come(self, source: Any) -> bool:
        """True if a source of prompts is a file that a stage would make."""
        named = source.get("dataset", "") if isinstance(source, Mapping) else ""
        return self.folder.has(Path(substitute(named, self.folder.path)))

    def _tokens_of(
        self, rows: Sequence[PromptRow], model: ModelConfig, params: SamplingParams
    ) -> tuple[list[int], bool]:
        """Tokens of each prompt, and whether they were counted with the model's own tokenizer."""
        here, tokenizer = self.trainings.with_tokenizer(model), None
        with contextlib.suppress(RegretlessError):
            tokenizer = ENGINES.find(params.engine).tokenizer(here)
        if tokenizer is None:
            self.assume(f"{CHARACTERS_PER_TOKEN:g} characters are a token (the tokenizer of {here.label} is not here)")
            return [math.ceil(_characters(row.prompt) / CHARACTERS_PER_TOKEN) for row in rows], False
        return [len(encode_prompt(tokenizer, row.prompt)) for row in rows], True

    @property
    def answers(self) -> Estimate | None:
        """The responses that pairs are made of: prompts, requests and tokens out; None if nothing is known."""
        source = self.estimates.get("sample")
        if source is None and self.recipe.responses is not None:
            file = Path(substitute(self.recipe.responses, self.folder.path))
            source = Estimate(PlannedUnit("responses", State.DONE, file))
            if file.is_file():
                rows, _ = read_responses(file)
                tokens = sum(len(row.pieces or ()) or len(row.response) / CHARACTERS_PER_TOKEN for row in rows)
                prompts = len({row.prompt_id for row in rows})
                source.put(False, prompts=prompts, requests=len(rows), tokens_out=tokens)
            self.estimates["responses"] = source
        return source if source is not None and source.counts.get("requests") else None

    # --- labels and pairs --------------------------------------------------------------------------------------------

    def verifying(self, estimate: Estimate) -> None:
        """Responses to verify."""
        unit = estimate.unit
        count, guessed = self._rows_of(unit.inputs["responses"])
        estimate.put(guessed, responses=count)
        if count is not None:
            source = self._made_by(unit.inputs["responses"])
            estimate.put(True, files=2, bytes=source.counts.get("bytes") if source else None)
        parts = unit.folder / "parts"
        if unit.state is State.INTERRUPTED and count is not None:
            estimate.parts = len(list(parts.glob("*.json"))), math.ceil(count / PART_ROWS)

    def judging(self, estimate: Estimate) -> None:
        """Requests of the stage `judge`, their tokens and their cost."""
        section = self.recipe.judge
        assert section is not None
        here, unit = resolve(section, self.folder.path), estimate.unit
        responses = unit.inputs["responses"]
        if responses.is_file() and not unit.waits_for:
            groups = group_responses(read_responses(responses)[0])
            self._ask(estimate, here, make_questions(here, groups.values()), 1.0)
            return
        source, rows = self.answers, self.prompts.get("sample")
        if source is None:
            return
        prompts = source.counts["prompts"]
        texts = self._stand_in_texts(source)
        absent = [PromptRow("", "x" * round(PROMPT_TOKENS * CHARACTERS_PER_TOKEN))]
        shown = [PromptGroup(row.prompt_id, row.prompt, texts) for row in (rows or absent)[:SHOWN_PROMPTS]]
        self.assume("every prompt has usable responses that all differ, and the judge is asked once for each aspect")
        self._ask(estimate, here, make_questions(here, shown), prompts / len(shown))

    def chat_judging(self, estimate: Estimate) -> None:
        """Requests of a judge about the answers to a chat benchmark."""
        assert self.recipe.evaluate is not None
        unit = estimate.unit
        label, benchmark = unit.name.split("/")[1:3]
        here = resolve(self.recipe.evaluate.chat[benchmark], self.folder.path)
        paths = list(_answers_of(unit).values())
        if not unit.waits_for and all(path.is_file() for path in paths):
            self._ask(estimate, here, chat_results.judge_questions(here, paths), 1.0)
            return
        with tempfile.TemporaryDirectory() as folder:
            files, _ = self.turns.stand_ins(here, Path(folder), self._answer_tokens(label))
            self._ask(estimate, here, chat_results.judge_questions(here, files), 1.0, guessed=True)

    def _ask(
        self,
        estimate: Estimate,
        config: JudgeAccess,
        questions: Sequence[Question[Any]],
        times: float,
        guessed: bool = False,
    ) -> None:
        """Count questions, `times` over: those that no kept reply answers are what is left."""
        with tempfile.TemporaryDirectory() as folder, _store(config, estimate.unit, Path(folder)) as store:
            kept = sum(store is not None and store.get(key_of(question, 1)) is not None for question in questions)
            spent = None if store is None else store.spent(config.judge_name)
        bodies = [question.body(1, "0" * 12) for question in questions]
        characters = sum(_characters(body["messages"]) for body in bodies)
        requests = round(len(questions) * times)
        estimate.parts = (kept, len(questions)) if kept else estimate.parts
        if spent is not None and spent.requests and spent.completion_tokens:
            tokens_in, reply = spent.prompt_tokens / spent.requests, spent.completion_tokens / spent.requests
            self.assume(
                f"a request to {config.judge_name} has {tokens_in:.0f} tokens and a reply {reply:.0f}, as those so far"
            )
        else:
            tokens_in = characters / CHARACTERS_PER_TOKEN / max(1, len(questions))
            self.assume(f"{CHARACTERS_PER_TOKEN:g} characters of a request to a judge are a token")
            reply = float(config.max_reply_tokens)
            if self.assumed.reply_tokens is not None:
                reply = min(reply, self.assumed.reply_tokens)
            else:
                self.assume(
                    f"a reply of {config.judge_name} has {reply:.0f} tokens: the limit, max_reply_tokens, so its "
                    "tokens and cost are the most that they can be (--assume reply_tokens=… sets another length)"
                )
        left = 1 - (kept / len(questions) if questions else 0)
        estimate.put(guessed or times != 1, requests=requests)
        estimate.put(True, tokens_in=requests * tokens_in, tokens_out=requests * reply)
        cost = config.server.cost(round(requests * tokens_in * left), round(requests * reply * left))
        if cost is None:
            self.assume(f"no cost of {config.judge_name}: server.prompt_price and completion_price are not set")
        estimate.put(True, dollars=cost)
        rate = config.server.requests_per_minute
        if rate is not None:
            self.assume(f"{config.judge_name} takes the {rate:g} requests a minute that are allowed")
            estimate.seconds = 60 * requests * left / rate

    def pairing(self, estimate: Estimate) -> None:
        """Pairs, where the responses are not there yet."""
        section = self.recipe.pair
        source = self.answers
        if section is None or source is None:
            return
        prompts = source.counts["prompts"]
        a_prompt = source.counts["requests"] / prompts
        if self.recipe.judge is not None or section.rule == "best_vs_random":
            self.assume("every prompt has responses of two different scores, and so a pair")
            pairs = prompts
        else:
            share = self._paired_share()
            most = min(section.max_correct, a_prompt - 1), min(section.max_wrong, a_prompt - 1)
            pairs = prompts * share * max(1.0, math.floor(most[0]) * math.floor(most[1]))
        tokens = 2 * source.counts["tokens_out"] / source.counts["requests"] * pairs
        estimate.put(True, pairs=round(pairs), files=2, bytes=tokens * BYTES_PER_TOKEN + pairs * BYTES_PER_ROW)

    def _paired_share(self) -> float:
        if self.assumed.paired is not None:
            return self.assumed.paired
        finished = self.folder.units.get("pair")
        if finished is not None and finished.summary.get("prompts"):
            share = float(finished.summary["prompts_paired"] / finished.summary["prompts"])
            self.assume(f"{100 * share:.0f} % of the prompts give pairs, as in the finished stage pair")
            return share
        self.assume(
            f"{100 * PAIRED:.0f} % of the prompts have a correct and a wrong response, and as many as the rule takes "
            "(nothing is known about it before the responses are verified; --assume paired=… sets it)"
        )
        return PAIRED

    def masking(self, estimate: Estimate) -> None:
        """Pairs with masked ones, where the pairs are not there yet."""
        section, source = self.recipe.mask, self.estimates.get("pair")
        if section is None or source is None or "pairs" not in source.counts:
            return
        pairs = source.counts["pairs"]
        chosen = pairs / (self.recipe.pair.max_wrong if self.recipe.pair is not None else 1)
        if section.count == "all":
            self.assume("every chosen response can be masked")
            masked = chosen
        else:
            masked = section.count if isinstance(section.count, int) else section.count * pairs
        estimate.put(True, pairs=round(pairs + masked), files=2, bytes=source.counts["bytes"] * (1 + masked / pairs))

    def pairs_of(self) -> tuple[float | None, bool]:
        """Number of pairs that a stage reads, and whether it is an estimate."""
        source = self.job.pairs()
        if isinstance(source, Path):
            found = self._made_by(source)
            if found is not None and "pairs" in found.counts:
                return found.counts["pairs"], "pairs" in found.guessed
        return None, True

    def inspecting(self, estimate: Estimate) -> None:
        """Pairs to inspect."""
        pairs, guessed = self.pairs_of()
        estimate.put(guessed, pairs=pairs)
        estimate.put(True, files=1)

    def analyzing(self, estimate: Estimate) -> None:
        """Pairs that the models are compared on."""
        section, (pairs, guessed) = self.recipe.analyze, self.pairs_of()
        if section is not None and pairs is not None:
            estimate.put(guessed, pairs=min(section.sample, pairs))
        estimate.put(True, files=6)

    # --- training ----------------------------------------------------------------------------------------------------

    def training(self, estimate: Estimate) -> None:
        """Pairs, steps and distinct tokens of a training."""
        unit = estimate.unit
        source = self.trainings.pairs(unit.name, self.job)
        made = self._made_by(source) if isinstance(source, Path) else None
        data = self.trainings.data(unit.name, source) if made is None or made.unit.is_known else None
        if data is not None:
            tokens, exact = data.trained_tokens
            estimate.put(False, pairs=len(data.train), steps=data.steps)
            estimate.put(not exact, trained_tokens=tokens)
        elif made is not None and "pairs" in made.counts:
            self._estimated_training(estimate, made)
        elif unit.name in self.trainings.problems and not unit.waits_for:
            unit.problem = unit.problem or self.trainings.problems[unit.name]
        steps = estimate.counts.get("steps")
        if steps is not None:
            self._training_files(estimate, steps)
            checkpoint, _ = last_complete_checkpoint(unit.folder) if unit.state is State.INTERRUPTED else (None, [])
            if checkpoint is not None:
                estimate.parts = int(Path(checkpoint).name.removeprefix("checkpoint-")), int(steps)

    def _estimated_training(self, estimate: Estimate, pairs: Estimate) -> None:
        config, objective, _ = self.trainings.config(estimate.unit.name)
        values = config.values_for(objective)
        count = pairs.counts["pairs"] - min(config.eval_pairs, pairs.counts["pairs"] // 2)
        a_step = config.step_pairs(objective, config.process_count(objective))
        epoch = math.ceil(count / a_step)
        steps = values.get("max_steps", -1)
        steps = steps if steps > 0 else math.ceil(values.get("num_train_epochs", 3) * epoch)
        estimate.put(True, pairs=count, steps=steps)
        source, section, lengths = self.answers, self.recipe.pair, self.tokens.get("sample")
        if source is None or section is None or not lengths:
            return
        response = source.counts["tokens_out"] / source.counts["requests"]
        one, other = (1, 1) if section.rule == "best_vs_random" else (section.max_correct, section.max_wrong)
        sides = one + (0 if objective == "sft" else other)
        trained = min(steps * a_step, count * steps / epoch)
        estimate.put(True, trained_tokens=trained * (fmean(lengths) + sides * response) / (one * other))

    def _training_files(self, estimate: Estimate, steps: float) -> None:
        weights = self.trainings.weights(estimate.unit.name)
        if weights is None:
            return
        config, objective, _ = self.trainings.config(estimate.unit.name)
        values = config.values_for(objective)
        strategy = values.get("save_strategy", "steps")
        checkpoints = 0
        if strategy == "steps":
            every = values.get("save_steps", 500)
            checkpoints = math.ceil(steps / (every if every >= 1 else max(1, every * steps)))
        elif strategy == "epoch":
            checkpoints = math.ceil(values.get("num_train_epochs", 3))
        checkpoints = min(checkpoints, values.get("save_total_limit") or checkpoints)
        model = 4 * weights["stored"]
        self.assume("a checkpoint holds weights and Adam's two moments in float32")
        estimate.put(True, files=8 + 12 * checkpoints, bytes=model + checkpoints * (model + 8 * weights["trained"]))

    # --- what units make ---------------------------------------------------------------------------------------------

    def _made_by(self, path: Path) -> Estimate | None:
        """Estimate of the unit whose folder a file is in."""
        found = [one for one in self.estimates.values() if path.is_relative_to(one.unit.folder)]
        return max(found, key=lambda one: len(one.unit.folder.parts), default=None)

    def _rows_of(self, path: Path) -> tuple[float | None, bool]:
        """Rows of a file of responses, and whether their number is an estimate."""
        source = self._made_by(path)
        if source is not None and not source.unit.is_known:
            name = "responses" if "responses" in source.counts else "requests"
            return source.counts.get(name), name in source.guessed
        return (row_count(path), False) if path.is_file() else (None, True)

    def _answer_tokens(self, label: str) -> float:
        """Mean tokens of a model's answers to chat benchmarks."""
        found = [
            (one.counts["tokens_out"], one.counts["requests"])
            for one in self.estimates.values()
            if one.unit.name.startswith(f"evaluate/samples/{label}/") and one.counts.get("requests")
            if "tokens_out" in one.counts
        ]
        return sum(out for out, _ in found) / sum(count for _, count in found) if found else 0.0

    def _stand_in_texts(self, source: Estimate) -> list[str]:
        counts = source.counts
        tokens = counts["tokens_out"] / counts["requests"]
        texts = round(counts["requests"] / counts["prompts"])
        return [f"{number} ".ljust(round(tokens * CHARACTERS_PER_TOKEN), "x") for number in range(texts)]


Kind = Callable[[Counting, Estimate], None]


def _kind(unit: PlannedUnit) -> Kind | None:
    """What counts a unit that would run."""
    if unit.stands_for_others:
        return None
    if is_sampling(unit):
        return Counting.sampling
    if unit.stage == "evaluate":
        return Counting.verifying if "responses" in unit.inputs else Counting.chat_judging
    kinds: Mapping[str, Kind] = {
        "verify": Counting.verifying,
        "judge": Counting.judging,
        "pair": Counting.pairing,
        "mask": Counting.masking,
        "inspect": Counting.inspecting,
        "pretrain": Counting.training,
        "train": Counting.training,
        "analyze": Counting.analyzing,
    }
    return kinds.get(unit.stage)


def _is_judge(unit: PlannedUnit) -> bool:
    of_chat = unit.stage == "evaluate" and any(name.startswith("responses-") for name in unit.inputs)
    return unit.stage == "judge" or of_chat


def _summary_names(unit: PlannedUnit) -> Mapping[str, str]:
    """Counts in the summary of a finished unit, and what they are called here."""
    if is_sampling(unit):
        return {"prompts": "prompts", "responses": "requests", "tokens": "tokens_out"}
    if _is_judge(unit):
        tokens = {"prompt_tokens": "tokens_in", "completion_tokens": "tokens_out"}
        return {"requests": "requests", "dollars": "dollars", **tokens}
    if unit.stage == "evaluate":
        return {"n": "responses"}
    names = {"verify": ("responses",), "world": ("prompts",), "prompts": ("prompts",)}
    return {name: name for name in names.get(unit.stage, ("pairs", "steps"))}


def _answers_of(unit: PlannedUnit) -> dict[str, Path]:
    return {key: path for key, path in unit.inputs.items() if key.startswith("responses-")}


def _characters(text: Any) -> int:
    return len(text) if isinstance(text, str) else sum(len(str(message.get("content") or "")) for message in text)


def _stored_prompt_tokens(file: Path) -> float | None:
    """Tokens of the prompts of all responses in a file; None where it does not have them."""
    if not file.is_file() or "prompt_token_ids" not in pq.read_schema(file).names:
        return None
    lengths = pc.list_value_length(pq.read_table(file, columns=["prompt_token_ids"])["prompt_token_ids"])
    return None if lengths.null_count else float(np.sum(lengths.to_numpy()))


@contextlib.contextmanager
def _store(config: JudgeAccess, unit: PlannedUnit, folder: Path) -> Any:
    """A copy of the file of kept replies, or None if there is none: SQLite writes beside a file that it only reads."""
    file = config.replies_file(unit.folder)
    if not file.is_file():
        yield None
        return
    for suffix in ("", "-wal"):
        source = Path(f"{file.resolve()}{suffix}")
        if source.is_file():
            shutil.copyfile(source, folder / f"replies{suffix}")
    with ReplyStore(folder / "replies") as store:
        yield store
