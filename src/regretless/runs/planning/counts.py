"""Counts of each unit of work: exact where the data are at hand, else from assumptions that are written down."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import Field

from regretless.core.continuations import continued_tokens
from regretless.core.errors import ConfigError, RegretlessError
from regretless.core.settings import Section
from regretless.data.columns import CONTINUATIONS, Pair, text_key
from regretless.data.preferences import pair_chunks
from regretless.data.prompts import PromptRow, PromptSource, load_prompts
from regretless.data.responses import read_responses
from regretless.data.rows import row_count
from regretless.evaluation.chat import chat_results
from regretless.labeling.judge import JudgeConfig, PromptGroup, group_responses, make_questions
from regretless.labeling.verify import PART_ROWS
from regretless.modeling.load import ModelConfig
from regretless.modeling.training_folder import STATE, last_complete_checkpoint
from regretless.objectives import build
from regretless.rollouts.rollout import contexts_to_continue, subjects_of
from regretless.runs.planning.chat_turns import ChatTurns
from regretless.runs.planning.dry_run import PlannedFolder, PlannedUnit, State
from regretless.runs.planning.lengths import CHARACTERS_PER_TOKEN, ResponseLengths, is_sampling, models_in, params_of
from regretless.runs.recipe import Recipe
from regretless.runs.stages import STAGES
from regretless.sampling.engines import ENGINES
from regretless.sampling.job import SampleWork
from regretless.sampling.sample import asked_texts, usable_prompts
from regretless.servers.ask import Question, key_of
from regretless.servers.judge_client import JudgeAccess
from regretless.servers.reply_store import ReplyStore
from regretless.training.arguments import PreferenceConfig
from regretless.workflow.run_folder import RUN, resolve, substitute

COUNTS = (
    *("prompts", "requests", "responses", "tokens_in", "tokens_out"),
    *("pairs", "lists", "steps", "continued", "dollars"),
)
"""Counts in the order in which they are shown."""
PROMPT_TOKENS = 200
"""Of a prompt that is not at hand."""
SHOWN_PROMPTS = 20
"""Prompts whose requests to a judge are written out to estimate the tokens of all."""


class Assumed(Section):
    """What the user said, in place of what a plan would assume."""

    response_tokens: float | None = Field(default=None, gt=0)
    """Mean tokens of a response."""
    reply_tokens: float | None = Field(default=None, gt=0)
    """Mean tokens of a judge's reply."""


@dataclass
class Estimate:
    """What a unit of work has made, or would make."""

    unit: PlannedUnit
    counts: dict[str, float] = field(default_factory=dict)
    guessed: set[str] = field(default_factory=set)
    """Counts that rest on an assumption."""
    parts: tuple[int, int] | None = None
    """Finished parts and all parts, of an interrupted unit."""
    is_judge: bool = False
    """True if its requests go to a judge."""

    def put(self, guessed: bool, /, **counts: float | None) -> None:
        """Add counts; those that are None are unknown."""
        for name, value in counts.items():
            if value is not None:
                self.counts[name] = value
                if guessed:
                    self.guessed.add(name)


class _PairCounts(NamedTuple):
    """What is counted of a pair: its list, and the tokens of each side's continuations."""

    of_list: str
    chosen: int
    rejected: int

    @classmethod
    def of(cls, pair: Pair) -> _PairCounts:
        """Pairs are of one list if training cannot tell their prompts and chosen responses from each other."""
        key = text_key(
            f"{text_key(pair.prompt)} {pair.chat_template_kwargs} {text_key(pair.chosen.text)} {pair.chosen.logps}"
        )
        sides = [continued_tokens(side.continuations) for side in pair.sides.values()]
        return cls(key, sides[0], sum(sides[1:]))


@dataclass
class Counting:
    """Counts of all units of a recipe, in their order."""

    recipe: Recipe
    folder: PlannedFolder
    assumed: Assumed
    run_dir: Path
    """The run folder itself, of which `folder` is a copy."""
    estimates: dict[str, Estimate] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    """Assumptions, each once, in the order in which they were made."""
    prompts: dict[str, list[PromptRow]] = field(default_factory=dict)
    """Prompts of the units of sampling, where they are at hand."""
    _pairs: dict[tuple[Path, bool], list[_PairCounts]] = field(default_factory=dict)
    """What is counted of the pairs of a file, read with or without their rejected sides."""

    def __post_init__(self) -> None:
        self.lengths = ResponseLengths(self.folder, self.assumed.response_tokens)
        self.turns = ChatTurns(self.folder, self.lengths)

    def count_all(self) -> None:
        """Count every unit."""
        self.turns.add_later()
        for unit in list(self.folder.units.values()):
            self.estimates[unit.name] = self._count(unit)

    def assume(self, text: str) -> None:
        """Write down an assumption."""
        self.notes[text] = None

    def _count(self, unit: PlannedUnit) -> Estimate:
        estimate = Estimate(unit, is_judge=unit.kind == "judge")
        if unit.is_known or unit.state is State.UNKNOWN:
            known = {name: unit.summary.get(other) for other, name in _summary_names(unit).items()}
            estimate.put(unit.state is State.UNKNOWN, **known)
        elif (kind := KINDS.get(unit.kind)) is not None:
            try:
                kind(self, estimate)
            except (RegretlessError, OSError) as error:
                unit.problem = unit.problem or str(error)
        return estimate

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sampling(self, estimate: Estimate) -> None:
        """Requests of a unit of sampling."""
        unit, params, models = estimate.unit, params_of(estimate.unit), models_in(estimate.unit)
        rows = self._prompts_of(unit)
        if rows is None:
            named = unit.unit.settings["prompts"]
            prompts = named.get("limit") if isinstance(named, Mapping) else None
            if prompts is None:
                return
            self.assume(f"{unit.name}: {prompts} prompts, the limit, of {PROMPT_TOKENS} tokens (they are not at hand)")
        else:
            prompts = len(rows)
            self.prompts[unit.name] = rows
        estimate.put(rows is None, prompts=prompts, requests=prompts * params.n * len(models))
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

    def _prompts_of(self, unit: PlannedUnit) -> list[PromptRow] | None:
        """The prompts that a unit would answer; None if they are not at hand."""
        try:
            if "prompts" not in unit.unit.task:
                models = [self._with_tokenizer(ModelConfig.parse(model, unit.name)) for model in models_in(unit)]
                return usable_prompts(unit.unit.task["config"].model_copy(update={"models": models}))[0]
            prompts = unit.unit.task["prompts"]
            if not isinstance(prompts, PromptSource):
                return list(prompts)
            params, (model,) = params_of(unit), models_in(unit)
            tokenizers: list[Any] = []
            with contextlib.suppress(
                ConfigError
            ):  # of a model that is to come; the numbers of prompts do not depend on it
                asked = self._with_tokenizer(ModelConfig.parse(model, unit.name))
                tokenizers = [ENGINES.find(params.engine).tokenizer(asked)]
            return load_prompts(prompts, texts=asked_texts(tokenizers, params.server))
        except (RegretlessError, OSError) as error:
            if not unit.waits_for and not self._is_to_come(unit.unit.settings["prompts"]):
                unit.problem = str(error)
            return None

    def _with_tokenizer(self, model: ModelConfig) -> ModelConfig:
        """The model, resolved; one that `pretrain` has yet to make names the tokenizer of the model it starts from."""
        here, named = resolve(model, self.folder.path), model.name_or_path or ""
        start = self.recipe.pretrain.get(named.removeprefix(f"{RUN}/pretrain/"))
        if start is None or here.tokenizer is not None or Path(here.name_or_path or "").exists():
            return here
        first = self._with_tokenizer(start.model)
        kept = {"tokenizer": first.tokenizer or first.name_or_path}
        names = ("chat_template", "chat_template_kwargs")
        return here.model_copy(update=kept | {name: getattr(here, name) or getattr(first, name) for name in names})

    def _is_to_come(self, source: Any) -> bool:
        """True if a source of prompts is a file that a stage would make."""
        named = source.get("dataset", "") if isinstance(source, Mapping) else ""
        return self.folder.has(Path(substitute(named, self.folder.path)))

    # --- labels ------------------------------------------------------------------------------------------------------

    def verifying(self, estimate: Estimate) -> None:
        """Responses to verify."""
        unit = estimate.unit
        count, guessed = self._rows_of(unit.unit.inputs["responses"])
        estimate.put(guessed, responses=count)
        parts = unit.folder / "parts"
        if unit.state is State.INTERRUPTED and count is not None:
            estimate.parts = len(list(parts.glob("*.json"))), math.ceil(count / PART_ROWS)

    def judging(self, estimate: Estimate) -> None:
        """Requests to a judge, their tokens and their cost."""
        unit = estimate.unit
        here = unit.unit.task["config"]
        if not isinstance(here, JudgeConfig):
            self._chat_judging(estimate, here)
            return
        responses = unit.unit.inputs["responses"]
        if responses.is_file() and not unit.waits_for:
            groups = group_responses(read_responses(responses)[0])
            self._ask(estimate, here, make_questions(here, groups.values()), 1.0)
            return
        source = self._made_by(responses)
        while source is not None and not is_sampling(source.unit):
            earlier = source.unit.unit.inputs.get("responses")
            source = None if earlier is None else self._made_by(earlier)
        if source is None or not source.counts.get("requests"):
            return
        prompts, rows = source.counts["prompts"], self.prompts.get(source.unit.name)
        texts = self._stand_in_texts(source)
        absent = [PromptRow("", "x" * round(PROMPT_TOKENS * CHARACTERS_PER_TOKEN))]
        shown = [PromptGroup(row.prompt_id, row.prompt, texts) for row in (rows or absent)[:SHOWN_PROMPTS]]
        self.assume("every prompt has usable responses that all differ, and the judge is asked once for each aspect")
        self._ask(estimate, here, make_questions(here, shown), prompts / len(shown))

    def _chat_judging(self, estimate: Estimate, here: Any) -> None:
        """Requests of a judge about the answers to a chat benchmark."""
        unit = estimate.unit
        paths = unit.unit.task["responses"]
        if not unit.waits_for and all(path.is_file() for path in paths):
            self._ask(estimate, here, chat_results.judge_questions(here, paths), 1.0)
            return
        answered = next(one for one in self.folder.units.values() if one.folder == paths[0].parent)
        with tempfile.TemporaryDirectory() as folder:
            tokens = self._expected_tokens(answered, answered.unit.settings["model"])
            files, _ = self.turns.stand_ins(here, Path(folder), tokens)
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

    # --- regret ------------------------------------------------------------------------------------------------------

    def rolling_out(self, estimate: Estimate) -> None:
        """Continuations, and the most tokens that they can have."""
        unit = estimate.unit
        config, responses = unit.unit.task["config"], unit.unit.inputs["responses"]
        most = config.most or config.k
        is_here = responses.is_file() and not unit.waits_for
        if is_here:
            _, subjects, _ = subjects_of(config, responses, unit.unit.task["model"])
            contexts: float | None = contexts_to_continue(subjects)
            estimate.put(False, responses=len(subjects))
        else:
            count, _ = self._rows_of(responses)
            contexts = None if count is None else 2 * count * (1 + len(config.positions))
            self.assume(
                f"{unit.name}: every response is measured, in {1 + len(config.positions)} units, by two policies"
            )
        if contexts is None:
            return
        self.assume(f"{unit.name}: tokens are the most that they can be, {config.max_tokens} for each continuation")
        if most > config.k:
            self.assume(f"{unit.name}: {most} continuations of every context, where {config.k} may suffice")
        estimate.put(not is_here or most > config.k, requests=contexts * most)
        estimate.put(True, tokens_out=contexts * most * config.max_tokens)

    # --- training ----------------------------------------------------------------------------------------------------

    def training(self, estimate: Estimate) -> None:
        """What is trained on, where it is at hand; of an interrupted training, steps that it does not repeat."""
        unit, task = estimate.unit, estimate.unit.unit.task
        if unit.state is State.INTERRUPTED:
            checkpoint, _ = last_complete_checkpoint(unit.folder)
            if checkpoint is not None:
                state = json.loads((Path(checkpoint) / STATE).read_text(encoding="utf-8"))
                estimate.parts = state["global_step"], state["max_steps"]
        config, name, source = task["config"], task["objective"], task["pairs"]
        objective = build(name, **config.split_for(name)[0])
        reads = CONTINUATIONS in objective.required
        maker = self._made_by(source) if isinstance(source, Path) else None
        if not isinstance(source, Path) or not source.is_file() or (maker is not None and not maker.unit.is_known):
            if reads:
                self._assume_continuations(unit.name)
            return
        pairs = self._counts_of(source, "rejected" in objective.required)
        if not pairs:
            return

        # A list is an item of a step, as a pair is elsewhere.
        lists = Counter(one.of_list for one in pairs)
        held_out = min(config.eval_pairs / len(pairs), 0.5)
        items = max(1, round((len(lists) if objective.lists else len(pairs)) * (1 - held_out)))
        workers = task["ray_workers"]
        size = config.step_pairs(name, config.process_count(name) if workers is None else workers.count)
        values = config.values_for(name)
        most = int(values.get("max_steps", -1))
        epochs = float(values.get("num_train_epochs", PreferenceConfig.num_train_epochs))
        steps = most if most > 0 else math.ceil(epochs * math.ceil(items / size))
        estimate.put(True, pairs=round(len(pairs) * (1 - held_out)), steps=steps)
        self.assume(
            f"{unit.name}: training uses every row of its pairs"
            f"{f' but {config.eval_pairs}, which are held out' if held_out else ''}, those too long included"
        )
        if objective.lists:
            sizes = [1 + number for number in lists.values()]
            estimate.put(True, lists=items)
            self.assume(
                f"{unit.name}: a list is a chosen response with all that are worse: {min(sizes)} to {max(sizes)} "
                f"responses, {fmean(sizes):.1f} on average; a step has {size} lists"
            )
        if reads:
            # A list has its chosen response once.
            chosen = {one.of_list if objective.lists else number: one.chosen for number, one in enumerate(pairs)}
            continued = (sum(chosen.values()) + sum(one.rejected for one in pairs)) * (1 - held_out)
            passes = steps / math.ceil(items / size)
            estimate.put(True, continued=round(continued * passes))
            self.assume(
                f"{unit.name}: tokens of continuations are the most that {passes:.3g} passes over the pairs compute: "
                "beginnings that continuations share count for each"
            )

    def _assume_continuations(self, name: str) -> None:
        """Say how many tokens the continuations of a response have at most, of a rollout that is still to come."""
        rollout = self.recipe.rollout
        if rollout is not None and rollout.column is None and rollout.at != "steps":
            tokens = len(rollout.positions) * (rollout.most or rollout.k) * rollout.max_tokens
            self.assume(
                f"{name}: with each response it computes the continuations that rollout keeps, at most {tokens:,} "
                "tokens for each pass over a response"
            )

    def _counts_of(self, source: Path, need_rejected: bool) -> list[_PairCounts]:
        """The counts of all usable pairs of a file."""
        if (source, need_rejected) not in self._pairs:
            chunks = pair_chunks(source, source=source.name, need_rejected=need_rejected)
            self._pairs[source, need_rejected] = [_PairCounts.of(pair) for chunk, _ in chunks for pair in chunk]
        return self._pairs[source, need_rejected]

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

    def _expected_tokens(self, unit: PlannedUnit, model: Mapping[str, Any]) -> float:
        """Mean tokens of a model's responses in a unit of sampling."""
        tokens, source = self.lengths.of(unit, model)
        self.assume(f"{unit.stage}: responses have {tokens:.0f} tokens: {source}")
        return tokens

    def _stand_in_texts(self, source: Estimate) -> list[str]:
        """The responses to one prompt, as long as their models' are expected to be."""
        tokens = fmean(self._expected_tokens(source.unit, model) for model in models_in(source.unit))
        texts = round(source.counts["requests"] / source.counts["prompts"])
        return [f"{number} ".ljust(round(tokens * CHARACTERS_PER_TOKEN), "x") for number in range(texts)]


KINDS: Mapping[str, Callable[[Counting, Estimate], None]] = {
    "sample": Counting.sampling,
    "verify": Counting.verifying,
    "judge": Counting.judging,
    "rollout": Counting.rolling_out,
    "train": Counting.training,
}
"""What counts a unit that would run, by the kind of its work (`Need.kind`)."""


def _summary_names(unit: PlannedUnit) -> Mapping[str, str]:
    """Counts in the summary of a finished unit, and what they are called here."""
    if is_sampling(unit):
        return {"prompts": "prompts", "responses": "requests", "tokens": "tokens_out"}
    if unit.kind == "judge":
        tokens = {"prompt_tokens": "tokens_in", "completion_tokens": "tokens_out"}
        return {"requests": "requests", "dollars": "dollars", **tokens}
    return dict(STAGES[unit.unit.stage].counted)


def _characters(text: Any) -> int:
    return len(text) if isinstance(text, str) else sum(len(str(message.get("content") or "")) for message in text)


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
