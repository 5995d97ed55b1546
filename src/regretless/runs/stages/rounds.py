"""Stage `rounds`: sampling, verdicts, pairs and training again and again, with the model of the round before.

In its folder, 1/ has the stages of the first round, whose responses and pairs all methods share, and <k>/<method>/
those of a later one; <k>/prompts/ has the prompts. Each is a complete run: what wrote its responses, which pairs were
trained on, what was measured. rounds.jsonl has a line for each round and method. The model of a method's last round is
in train/<method>, where every stage and command looks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.errors import ConfigError, problems_of
from regretless.core.files import read_json, write_jsonl
from regretless.core.settings import dump
from regretless.data.rounds_table import ROUNDS, TABLE, folder_of
from regretless.runs.stages.stage import PAIRS, RESPONSES, STAGES, Listing, Run, Session, Stage, stages_of
from regretless.runs.stages.train import Training
from regretless.workflow.run_folder import RUN, Unit
from regretless.workflow.stage_folder import MANIFEST, read_mark
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.modeling.load import ModelConfig
    from regretless.rounds.round_settings import RoundsConfig
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import Recipe
    from regretless.training.train_config import TrainConfig

PROMPTS, WRITER, REPLAY, MEASURE, SAMPLE, TRAIN = "prompts", "writer", "replay", "measure", "sample", "train"
"""Folders of a round: its own, and those of two stages."""
OPTIMIZER = "optimizer.pt"
"""The file of a training that keeps the state of its optimizer."""
MINIATURE_ROUNDS = 2


class Rounds(Stage["RoundsConfig"]):
    """Repeats the stages from `sample` to `train`."""

    name = ROUNDS
    repeats = (SAMPLE, "verify", "judge", "rollout", "pair", "mask", "inspect", TRAIN)
    writes = ("prompts.jsonl", "refused.jsonl", "pairs.parquet", "measures.json", *Training.writes)
    uses = ("pairs", "model")
    result = PAIRS

    def units(self, config: RoundsConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """The prompts of all rounds, the first round's responses and pairs, and the chain of each method."""
        if not _can_repeat(run.recipe):
            raise ConfigError(f"{self.name}: expected the sections sample, train and model")
        stay = _models_stay(run)
        shared = [_Round(config, run.recipe, number, "") for number in range(1, config.count + 1)]
        if asked := [self._prompts(config, run, now) for now in shared if now.prompts and not now.rests]:
            yield asked
        for units in self._until_pairs(config, run, shared[0]):
            yield [replace(unit, models_stay=stay) for unit in units]
        for method in _methods(run.recipe):
            for units in self._chain(config, run, method):
                yield [replace(unit, group=method, models_stay=stay) for unit in units]

    def _chain(self, config: RoundsConfig, run: Run, method: str) -> Iterator[Sequence[Unit]]:
        """The rounds of one method, and its result: from the first round's training on."""
        from regretless.rounds.measure import measures, reason_to_stop

        measured: list[Mapping[str, Any]] = []
        for number in range(1, config.count + 1):
            now = _Round(config, run.recipe, number, method)
            if now.rests:
                yield [self._prompts(config, run, now)]
            if number > 1:
                yield from self._until_pairs(config, run, now)
            pairs = Path(now.run(run).latest(PAIRS, TRAIN))
            if config.replay is not None and number > 1:
                unit = self._replay(config, run, now, pairs)
                yield [unit]
                pairs = run.path(unit.name, PAIRS)
            inner = run.sub(now.folder, now.recipe(training=True), {PAIRS: pairs}, training=now.arguments(run))
            trained: Unit | None = None
            for units in inner.units([TRAIN]):
                (trained,) = units
                yield units
            assert trained is not None
            yield [self._measure(config, run, now, MEASURE)]
            stopped = None
            if config.stop.is_set:
                if run.awaits(now.measured):
                    return
                measured.append(measures(run.path(now.written), run.path(now.measured)))
                stopped = reason_to_stop(config.stop, measured)
            if stopped is not None or number == config.count:
                yield [self._result(config, run, now, trained, stopped)]
                return

    def _until_pairs(self, config: RoundsConfig, run: Run, now: _Round) -> Iterator[Sequence[Unit]]:
        """The stages of a round before training; what another model has sampled goes no further."""
        inner = now.run(run)
        yield from inner.units([SAMPLE])
        yield [self._measure(config, run, now, WRITER)]
        if rest := [name for name in stages_of(inner.recipe) if name not in (SAMPLE, TRAIN)]:
            yield from inner.units(rest)

    def _prompts(self, config: RoundsConfig, run: Run, now: _Round) -> Unit:
        assert run.recipe.sample is not None and now.prompts is not None
        size = config.prompts if isinstance(config.prompts, int) else None
        parts = 1 if config.prompts == "all" else config.parts
        drawn = {"number": now.number, "parts": parts, "size": size, "seed": config.seed}
        source = run.recipe.sample.prompts
        task: dict[str, Any] = {"work": "regretless.rounds.round_prompts", "source": source, **drawn}
        inputs: dict[str, Path] = {}
        if now.rests:
            task["earlier"] = [Path(one.run(run).latest(RESPONSES, "pair")) for one in now.before(config.rest)]
            inputs = {f"earlier-{age}": path for age, path in enumerate(task["earlier"], 1)}
        return run.unit(self, now.prompts, {"source": dump(source), **drawn}, task, inputs=inputs)

    def _replay(self, config: RoundsConfig, run: Run, now: _Round, pairs: Path) -> Unit:
        assert config.replay is not None
        earlier = [Path(one.run(run).latest(PAIRS, TRAIN)) for one in now.before(config.replay.most_age)]
        drawn = {"share": config.replay.share, "seed": now.seed(config.seed)}
        task = {"work": "regretless.rounds.replay", "pairs": pairs, "earlier": earlier, **drawn}
        inputs = {"pairs": pairs, **{f"earlier-{age}": path for age, path in enumerate(earlier, 1)}}
        return run.unit(self, f"{now.folder}/{REPLAY}", drawn, task, inputs=inputs)

    def _measure(self, config: RoundsConfig, run: Run, now: _Round, work: str) -> Unit:
        """A unit in which models score responses of a round: WRITER, before its training, or MEASURE, after it."""
        models: dict[str, ModelConfig | None] = {"trained": now.trained()}
        name, responses = now.measured, Path(now.run(run).latest(RESPONSES, "pair"))
        if work == WRITER:
            models = {"writer": now.writer(), "start": None if now.number == 1 else run.model}
            name, responses = now.written, Path(now.run(run).latest(RESPONSES, "verify"))
        drawn = {"most": config.measured, "seed": now.seed(config.seed)}
        task = {"work": f"regretless.rounds.{work}", "responses": responses, **models, **drawn}
        settings = {**drawn, **{key: model and dump(model) for key, model in models.items()}}
        return run.unit(self, name, settings, task, inputs={"responses": responses}, need=Need(work, gpus=1))

    def _result(self, config: RoundsConfig, run: Run, now: _Round, trained: Unit, stopped: str | None) -> Unit:
        """The model of the last round as the method's, with the settings of its training."""
        folder = run.path(now.training)
        about = {"number": now.number, "count": config.count, "stopped": stopped}
        task = {"work": "regretless.rounds.last_round", "model": folder, **about}
        return run.unit(self, f"{TRAIN}/{now.method}", {**trained.settings, **about}, task, inputs={"model": folder})

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Do what lies between the stages: the module that the task names."""
        task = dict(unit.task)
        summary: dict[str, Any] = import_module(task.pop("work")).run(**task, output=place)
        return summary

    def after(self, config: RoundsConfig, run: Run) -> None:
        """Write the table of rounds, and the last rounds' data into the models' cards."""
        from regretless.rounds.measure import row
        from regretless.runs import cards

        rows, data = [], {}
        for method in _methods(run.recipe):
            last = read_json(run.path(TRAIN, method, MANIFEST))["summary"]["round"]
            for number in range(1, last + 1):
                now = _Round(config, run.recipe, number, method)
                folders = (now.written, now.measured, now.training, f"{now.folder}/{REPLAY}")
                rows.append(row(number, method, *map(run.path, folders)))
            data[method] = cards.data_of(now.run(run))
        write_jsonl(run.path(self.place, TABLE), rows)
        cards.refresh_cards(run, lambda method, facts: {"data": {**facts.data, **data[method]}})

    def problems(self, config: RoundsConfig, machine: Machine) -> None:
        """Why its rounds cannot be made, or would make finished ones again."""
        super().problems(config, machine)
        recipe = machine.recipe
        if not _can_repeat(recipe):
            return  # the recipe says so
        assert recipe.train is not None
        for method in _methods(recipe) if config.reference == "behavior" else ():
            for problem in _behavior_problems(recipe.train, method):
                machine.add(f"{self.name}.reference", problem.removeprefix("reference: "))
        if config.optimizer == "carried" and recipe.train.strategy == "fsdp2":
            machine.add(
                f"{self.name}.optimizer", "each process of train.strategy=fsdp2 has only a part of its state; set fresh"
            )
        if config.schedule == "all":
            for method in _methods(recipe):
                train = _Round(config, recipe, 1, method).recipe(training=True).train
                assert train is not None
                for problem in train.problems_here(method):
                    key, _, reason = problem.partition(": ")
                    if key.endswith("schedule_part"):
                        machine.add(f"{self.name}.schedule", reason)
        self._check_extended(config, recipe, machine)

    def _check_extended(self, config: RoundsConfig, recipe: Recipe, machine: Machine) -> None:
        """Add the problem of a run with another number of rounds, of which nothing could be kept."""

        def settings_of(name: str) -> Mapping[str, Any]:
            mark = read_mark(recipe.run_dir / self.place / "1" / name / MANIFEST)
            return {} if mark is None else mark["settings"]

        parts = settings_of(PROMPTS).get("parts") if config.prompts == "disjoint" else None
        if parts not in (None, config.count):
            machine.add(
                f"{self.name}.count",
                f"the rounds in {recipe.run_dir} have one of {parts} disjoint parts of the prompts each: with "
                f"{config.count} rounds every part is another one, and nothing that is done could be kept; set it to "
                f"{parts}, choose another output_dir, or set rounds.prompts to a number, with which a run can be "
                "extended",
            )
        trained = [settings_of(f"{TRAIN}/{method}") for method in _methods(recipe) if config.schedule == "all"]
        counts = {part[1] for settings in trained if (part := settings.get("values", {}).get("schedule_part"))}
        for count in sorted(counts - {config.count}):
            machine.add(
                f"{self.name}.count",
                f"the rounds in {recipe.run_dir} have one schedule of the learning rate over {count} rounds: with "
                f"{config.count} every step has another rate, and no training that is done could be kept; set it to "
                f"{count}, or choose another output_dir; a run that begins with rounds.schedule=each can be extended",
            )

    def finished(self, config: RoundsConfig, listed: Listing) -> Iterator[str]:
        """Itself, and the sections whose work it does."""
        for key in super().finished(config, listed):
            yield from (key, *self.repeats)

    def result_in(self, run: Run) -> Path:
        """The first round's pairs, which are the same for all methods."""
        assert run.recipe.rounds is not None
        return Path(_Round(run.recipe.rounds, run.recipe, 1, "").run(run).latest(PAIRS, TRAIN))

    def results_in(self, run: Run) -> Sequence[Path]:
        """The pairs of every round of every method."""
        config = run.recipe.rounds
        assert config is not None
        later = [
            _Round(config, run.recipe, number, method)
            for number in range(2, config.count + 1)
            for method in _methods(run.recipe)
        ]
        return [self.result_in(run), *(Path(now.run(run).latest(PAIRS, TRAIN)) for now in later)]

    def top_folders(self) -> Collection[str]:
        """Its own, and that of the last rounds' models."""
        return {self.place, TRAIN}

    def folders(self, config: RoundsConfig, run: Run) -> Iterator[tuple[str, Collection[str], Collection[str] | None]]:
        """The rounds, in each the methods, and in each of these the stages."""
        if not _can_repeat(run.recipe):
            return
        methods, numbers = _methods(run.recipe), range(1, config.count + 1)
        between = [PROMPTS, WRITER, MEASURE, *([] if config.replay is None else [REPLAY])]
        yield TRAIN, methods, None
        yield self.place, [str(number) for number in numbers], None
        for folder in (TRAIN, MEASURE):
            yield f"{self.place}/1/{folder}", methods, None
        for number in numbers[1:]:
            yield f"{self.place}/{number}", [PROMPTS, *methods], None
        for number, method in [(1, ""), *((number, method) for number in numbers[1:] for method in methods)]:
            now = _Round(config, run.recipe, number, method)
            made = [*between, *(stage.place for stage in now.run(run).stages())]
            yield now.folder, made, {*(stage.place for stage in STAGES.values()), REPLAY}

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """Two rounds with all of the few prompts."""
        if section is None:
            return None
        few = {"count": min(section["count"], MINIATURE_ROUNDS), "prompts": "all", "stop": {}, "measured": 16}
        return {**section, **few, "rest": None, **({"replay": None} if few["count"] == 1 else {})}


class _Round:
    """One round of one method, or of all where they share it: its folder, its recipe and its models."""

    def __init__(self, config: RoundsConfig, recipe: Recipe, number: int, method: str) -> None:
        """method: empty in the first round, for what all methods share."""
        self.config, self.outer, self.number, self.method = config, recipe, number, method
        self.folder = folder_of(number, method)
        self.written = f"{self.folder}/{WRITER}"
        self.training, self.measured = f"{self.folder}/{TRAIN}/{method}", f"{self.folder}/{MEASURE}/{method}"
        self.rests = config.rest is not None and number > 1
        """True if earlier responses decide which prompts it asks."""
        asks_all = config.prompts == "all" and not self.rests
        self.prompts = None if asks_all else f"{self.folder if self.rests else f'{ROUNDS}/{number}'}/{PROMPTS}"
        """The folder of its prompts; None if it asks all that the recipe names."""
        self._recipes: dict[bool, Recipe] = {}

    def before(self, most: int | None) -> list[_Round]:
        """Earlier rounds of its method, the last first; at most so many."""
        oldest = max(1, self.number - (most or self.number))
        return [
            _Round(self.config, self.outer, number, self.method) for number in range(self.number - 1, oldest - 1, -1)
        ]

    def run(self, outer: Run) -> Run:
        """The round as a run in another one."""
        return outer.sub(self.folder, self.recipe())

    def seed(self, seed: int) -> int:
        """The seed of this round."""
        from regretless.rounds.round_settings import seed_of

        return seed_of(seed, self.number)

    def recipe(self, *, training: bool = False) -> Recipe:
        """The recipe of the round; with `training`, of its training alone."""
        if training not in self._recipes:
            self._recipes[training] = self._made(training)
        return self._recipes[training]

    def _made(self, training: bool) -> Recipe:
        outer, config = self.outer, self.config
        assert outer.sample is not None and outer.train is not None and outer.model is not None
        sections: dict[str, Any] = {
            name: self._seeded(section)
            for name in ([TRAIN] if training else Rounds.repeats)
            if (section := getattr(outer, name)) is not None
        }
        sections[TRAIN] = self._training(sections[TRAIN])
        if not training:
            sampled: dict[str, Any] = {"models": [dump(self.writer())]}
            if self.prompts is not None:
                answers = {} if outer.sample.prompts.answer_column is None else {"answer_column": "answer"}
                sampled["prompts"] = {"dataset": f"{RUN}/{self.prompts}/prompts.jsonl", **answers}
            sample = sections["sample"]
            sections["sample"] = sample.parse({**dump(sample), **sampled}, "rounds")
        start = self.writer() if config.start == "previous" else outer.model
        emptied = {name: None for name in type(outer).model_fields if name in {*STAGES, "responses", "pairs"}}
        return outer.model_copy(update={**emptied, "pretrain": {}, "prompts": {}, **sections, "model": start})

    def _seeded(self, section: Any) -> Any:
        seed = getattr(section, "seed", None)
        return section if seed is None else section.parse({**dump(section), "seed": self.seed(seed)}, "rounds")

    def _training(self, train: TrainConfig) -> TrainConfig:
        """The settings of a round's training."""
        values = dump(train)
        if self.method:
            values["objective"] = self.method
        if self.number > 1 and self.config.start == "previous":
            values["lora"] = None  # the adapter of the round before is trained further
        if self.config.schedule == "all":
            values["schedule_part"] = [self.number, self.config.count]
        if self.config.reference == "behavior":
            reading = [name for name in train.objectives if _reads_reference(train, name)]
            reading = [name for name in reading if not _behavior_problems(train, name)]  # of others, `problems` tells
            behavior = {name: {**train.methods.get(name, {}), "reference": "behavior"} for name in reading}
            values["methods"] = {**train.methods, **behavior}
        return train.parse(values, "rounds")

    def writer(self) -> ModelConfig:
        """The model that writes this round's responses."""
        assert self.outer.model is not None
        if self.number == 1:
            return self.outer.model
        return _Round(self.config, self.outer, self.number - 1, self.method).trained()

    def trained(self) -> ModelConfig:
        """The model that this round trains."""
        from regretless.modeling.training_folder import as_trained

        assert self.outer.model is not None and self.outer.train is not None
        model = self.outer.model
        is_adapter = self.outer.train.lora is not None or model.adapter is not None
        return as_trained(model, f"{RUN}/{self.training}", is_adapter=is_adapter)

    def arguments(self, run: Run) -> dict[str, Any]:
        """Arguments of this round's training besides its settings."""
        arguments: dict[str, Any] = {}
        if (reference := self.reference()) is not None:
            arguments["reference"] = reference
        if self.config.optimizer == "carried":
            arguments["keep_optimizer"] = True
            if self.number > 1:
                before = _Round(self.config, self.outer, self.number - 1, self.method)
                arguments["optimizer"] = run.path(before.training, OPTIMIZER)
        return arguments

    def reference(self) -> ModelConfig | None:
        """The reference of this round's training; None where that is the model as training finds it."""
        config, train = self.config, self.outer.train
        assert train is not None
        wanted = {"start": self.outer.model, "previous": self.writer(), "behavior": None}[config.reference]
        if self.number == 1 or wanted == self.recipe().model or not _reads_reference(train, self.method):
            return None
        return wanted


def _can_repeat(recipe: Recipe) -> bool:
    """True if a recipe has what rounds are made of; one that is only checked further may lack it."""
    return None not in (recipe.sample, recipe.train, recipe.model)


def _models_stay(run: Run) -> bool:
    """True if the units of a round run in one process, and no engine needs the whole device beside its models."""
    sections = [section for section in (run.recipe.sample, run.recipe.rollout) if section is not None]
    engines = {section.engine for section in sections}
    train = run.recipe.train
    assert train is not None
    alone = run.cluster is None and all(train.process_count(name) == 1 for name in train.objectives)
    return alone and engines <= {"transformers"}


def _methods(recipe: Recipe) -> list[str]:
    assert recipe.train is not None
    return recipe.train.objectives


def _behavior_problems(train: TrainConfig, method: str) -> Sequence[str]:
    """Why a method that reads a reference cannot have the behavior policy as such."""
    from regretless.objectives import build

    if not _reads_reference(train, method):
        return ()
    return problems_of(lambda: build(method, **{**train.split_for(method)[0], "reference": "behavior"}))


def _reads_reference(train: TrainConfig, method: str) -> bool:
    """True if a method, as it is set, reads the reference model."""
    from regretless.objectives import build

    objective = build(method, **train.split_for(method)[0])
    return objective.zero_point is not None or bool({"reference", "reference_kl"} & objective.required)


STAGE = Rounds()
