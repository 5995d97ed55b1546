"""What a stage is: its units of work, how they are done, what they make together. Light to import.

A stage is a file of this folder, with everything that is this stage's. The work itself is in a module of another
folder, which a stage imports when it is called: it may take seconds.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from regretless.core.errors import ConfigError, RegretlessError
from regretless.core.settings import Section
from regretless.workflow.run_folder import RUN, RunFolder, Unit, resolve, substitute

if TYPE_CHECKING:
    from regretless.modeling.load import ModelConfig
    from regretless.modeling.training_folder import Trained
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import Recipe
    from regretless.workflow.cluster import ClusterConfig

C = TypeVar("C")
T = TypeVar("T")
RESPONSES, PAIRS = "responses.parquet", "pairs.parquet"
"""Results that several stages make, each from that of the one before."""


class Session:
    """What stays loaded from one group of units to the next, such as a model. At the end of the block, it is closed."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under the key; `make` is called for it once. A context manager is entered, and left at the
        end."""
        if key not in self._kept:
            made = make()
            is_block = isinstance(made, contextlib.AbstractContextManager)
            self._kept[key] = self._closing.enter_context(made) if is_block else made  # type: ignore[arg-type]
        kept: T = self._kept[key]
        return kept

    def close(self) -> None:
        """Let go of everything, the last first."""
        self._kept.clear()
        self._closing.close()


class Stage(Generic[C]):
    """One section of a recipe that does something: its settings have the type of the recipe's field of its name."""

    name: ClassVar[str]
    work: ClassVar[str] = ""
    """The module whose function `run` does a unit, called with the unit's `task`, and with its folder as `output`."""
    about: ClassVar[str] = ""
    """Its help on the command line; empty for a section without a command."""
    reads: ClassVar[str] = ""
    makes: ClassVar[str] = ""
    flags: ClassVar[tuple[str, ...]] = ()
    """Options of its command besides settings, configuration file and output."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Those that are not required, because settings can replace them."""
    neighbor: ClassVar[str] = ""
    """Another section that its command reads, too, if the configuration file is a recipe."""
    prints_tables: ClassVar[bool] = False
    """True if its work prints tables of numbers."""
    result: ClassVar[str] = ""
    """The file in its folder that is its result; empty if the whole folder is."""
    folder: ClassVar[str] = ""
    """Its folder in a run folder, if that is not its name."""
    writes: ClassVar[tuple[str, ...]] = ("*",)
    """Patterns of the names of files and folders that a unit writes into its folder; others are somebody else's."""
    uses: ClassVar[tuple[str, ...]] = ()
    """What else of a recipe it reads: `model`, `responses`, `pairs`."""
    counted: ClassVar[tuple[tuple[str, str], ...]] = (("pairs", "pairs"), ("steps", "steps"))
    """Numbers in its units' summaries that a plan shows, and what they are called there."""
    repeats: ClassVar[tuple[str, ...]] = ()
    """Stages that it does itself, as often as its settings say: in a recipe with it they are no stages of the run."""
    is_read: ClassVar[bool] = True
    """False if no other stage depends on it."""
    independent: ClassVar[bool] = False
    """True if a group of units that fails does not stop the others: its error is raised when those are done."""
    makes_numbers: ClassVar[bool] = True
    """False if it only shows those of other stages."""

    @property
    def place(self) -> str:
        """Its folder in a run folder."""
        return self.folder or self.name

    def result_in(self, run: Run) -> Path:
        """The path of its result in a run."""
        return run.path(self.place, self.result)

    def results_in(self, run: Run) -> Sequence[Path]:
        """The paths of all its results in a run: of a stage that repeats others, those of each time."""
        return [self.result_in(run)]

    def units(self, config: C, run: Run) -> Iterator[Sequence[Unit]]:
        """The units of work, in groups that are done together.

        When the next group is asked for, those before are done, so that it may depend on their results. In a plan they
        are only recorded: `run.awaits` and `run.has` say what is there.
        """
        raise NotImplementedError

    def run(self, units: Sequence[Unit], places: Sequence[Path], session: Session) -> list[dict[str, Any]]:
        """Do units of one group, each in its folder of `places`; returns their summaries."""
        return [self.do(unit, place, session) for unit, place in zip(units, places, strict=True)]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Do one unit in the folder `place`; returns its summary."""
        summary: dict[str, Any] = import_module(self.work).run(**unit.task, output=place)
        return summary

    def after(self, config: C, run: Run) -> None:
        """Write what concerns all units. It is called again whenever the stage is, with nothing to do or not."""

    def problems(self, config: C, machine: Machine) -> None:
        """Add to `machine.problems` what would stop the stage on this machine."""
        machine.sections(config, self.name)

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """The section, as settings, of a recipe in miniature (`runs.miniature`); None for none."""
        return section

    def finished(self, config: C, listed: Listing) -> Iterator[str]:
        """Keys of the settings whose work is finished; `listed` has the units."""
        if listed.is_whole and listed.done(self.place):
            yield self.name

    def folders(self, config: C, run: Run) -> Iterator[tuple[str, Collection[str], Collection[str] | None]]:
        """Folders below its own that a run makes, by the folder above them. Others (of some) are moved aside."""
        if (names := self.contents(config)) is not None:
            yield self.place, names, None

    def top_folders(self) -> Collection[str]:
        """Its folders in a run folder."""
        return {self.place}

    def folders_of_command(self, labels: Iterable[str]) -> Sequence[str]:
        """Folders of its command's units in the one that the user names, which by default is that of the only unit.

        labels: those of further models.
        """
        return ()

    def contents(self, config: C) -> Collection[str] | None:
        """Names in its folder that settings may refer to; None for any."""
        return None


STAGES: dict[str, Stage[Any]] = {}
"""Every stage by the name of its section, in the order in which they run. `runs.stages` fills it."""


@dataclass(frozen=True)
class Run:
    """A run as its stages see it: its recipe, its folder, and results from elsewhere."""

    recipe: Recipe
    folder: RunFolder
    inputs: Mapping[str, Path | str] = field(default_factory=dict)
    """Results that no stage of this run makes, by the name of their file: a path, or the id of a hub data set."""
    template: str | None = "plain"
    """What text prompts of pairs are put into; None for what suits the model. Those of sampled pairs stay."""
    below: str = ""
    """Its folder in that of the run which contains it."""
    training: Mapping[str, Section | Path | bool] = field(default_factory=dict)
    """Further arguments of its trainings, by their names in `training.train.run`."""
    cluster: ClusterConfig | None = None
    """The cluster that trains, if the recipe has one; by default, training runs on this machine."""
    session: Session = field(default_factory=Session)
    only_listed: bool = False
    """True if nothing is written."""
    output: Path | None = None
    """The file or folder that a stage's command makes of files that the user names; None in a recipe's run."""
    is_unit: bool = False
    """True if `output` is the folder of the command's only unit; by default, units have folders in the run folder."""

    @classmethod
    def of(cls, recipe: Recipe, folder: RunFolder, **others: Any) -> Self:
        """A run of a recipe. others: further fields."""
        given = {} if recipe.responses is None else {RESPONSES: Path(substitute(recipe.responses, folder.path))}
        template = "plain" if recipe.pairs is None else recipe.pairs.template
        return cls(recipe, folder, given, **{"template": template, **others})

    @property
    def root(self) -> Path:
        """The run folder, which `{run}` stands for: of a run in another one, that of the outermost."""
        return self.folder.path

    def path(self, *parts: str | PurePosixPath) -> Path:
        """A path in this run's folder."""
        return self.root.joinpath(self.below, *parts)

    def unit(
        self, stage: Stage[Any], name: str, settings: Mapping[str, Any], task: Mapping[str, Any], **others: Any
    ) -> Unit:
        """A unit of work of a stage, in the folder `name` of this run. others: further fields of the unit.

        settings keep `{run}`, so that a run folder can be moved; in the sections of the task it is resolved, once.
        """
        task = {key: resolve(value, self.root) if isinstance(value, Section) else value for key, value in task.items()}
        label = ""
        if self.is_unit and self.output is not None:
            name, label = self.output.name, stage.place
        name = str(PurePosixPath(self.below, name))
        return Unit(name, settings, label=label, stage=stage.name, writes=stage.writes, task=task, **others)

    def latest(self, result: str, before: str) -> Path | str:
        """The file of that name as the last of the run's stages before `before` makes it, or that from elsewhere."""
        stage = self._maker(result, before)
        if stage is None and result not in self.inputs:
            raise ConfigError(f"{before}: no stage makes {result}")
        return self.inputs[result] if stage is None else stage.result_in(self)

    def all_of(self, result: str, before: str) -> Sequence[Path]:
        """The files of which `latest` names one, those of every round; empty if they come from elsewhere."""
        stage = self._maker(result, before)
        return [] if stage is None else stage.results_in(self)

    def _maker(self, result: str, before: str) -> Stage[Any] | None:
        names = list(STAGES)
        made = (name for name in reversed(names[: names.index(before)]) if STAGES[name].result == result)
        return next((STAGES[name] for name in made if name in stages_of(self.recipe)), None)

    def stages(self) -> list[Stage[Any]]:
        """The stages that the recipe has a section for, in the order in which they run."""
        return [STAGES[name] for name in stages_of(self.recipe)]

    def asked_for(self) -> Iterator[tuple[str, Collection[str], Collection[str] | None]]:
        """Folders that a run of the whole recipe makes, by the folder above them; others (of some) are moved aside."""
        wanted = {folder for stage in self.stages() for folder in stage.top_folders()}
        yield "", wanted, {stage.place for stage in STAGES.values()}
        for stage in self.stages():
            yield from stage.folders(getattr(self.recipe, stage.name), self)

    def units(self, only: Iterable[str] = ()) -> Iterator[Sequence[Unit]]:
        """The units of all stages (or of those in `only`); what concerns a stage as a whole is written behind them."""
        wanted = set(only)
        for stage in self.stages():
            if not wanted or stage.name in wanted:
                config = getattr(self.recipe, stage.name)
                yield from stage.units(config, self)
                if not self.only_listed and not self.awaits(stage.place):
                    stage.after(config, self)

    def sub(self, name: str, recipe: Recipe, inputs: Mapping[str, Path | str] | None = None, **others: Any) -> Run:
        """A run of its own in the folder `name` of this one, for a stage that is made of stages.

        Its units (`units`) are units of that stage, too: they share this run's lock and session. others: further
        fields.
        """
        below = str(PurePosixPath(self.below, name))
        return replace(self, recipe=recipe, inputs=inputs or {}, below=below, output=None, is_unit=False, **others)

    def has(self, path: Path) -> bool:
        """True if a file exists by now, or in a plan: will exist when a run arrives here."""
        return self.folder.has(path)

    def manifests(self) -> list[Path]:
        """Manifests of all units of this run that are finished, or in a plan: that would be."""
        return [path for path in self.folder.manifests() if path.is_relative_to(self.path())]

    def awaits(self, name: str) -> bool:
        """True if results below the folder `name` of this run are missing: never in a run, which makes them first."""
        return self.folder.awaits(str(PurePosixPath(self.below, name)))

    @property
    def model(self) -> ModelConfig:
        """The policy before preference training."""
        if self.recipe.model is None:
            raise ConfigError("model: required, not given")
        return self.recipe.model

    def trained(self) -> dict[str, Trained]:
        """The models that the recipe trains, by method; their paths still contain `{run}`."""
        from regretless.modeling.training_folder import Trained, trained_model

        if (train := self.recipe.train) is None:
            return {}
        return {
            name: Trained(
                trained_model(self.model, str(PurePosixPath(RUN, self.below, "train", name)), self.root),
                self.path("train", name),
                name,
                train.split_for(name)[0],
            )
            for name in train.objectives
        }


def stages_of(recipe: Recipe) -> list[str]:
    """The stages that a recipe has a section for, in the order in which they run."""
    present = [name for name in STAGES if getattr(recipe, name, None) not in (None, {})]
    repeated = {other for name in present for other in STAGES[name].repeats}
    return [name for name in present if name not in repeated]


def do_units(folder: RunFolder, units: Sequence[Unit], session: Session) -> None:
    """Do a group of units, but for those that are done (`RunFolder.do_together`)."""
    named = {unit.name: unit for unit in units}

    def work(todo: Mapping[str, Path]) -> list[dict[str, Any]]:
        if any(unit.models_stay for unit in units):
            session.get(_models_and_modules_stay, _models_and_modules_stay)
        return STAGES[units[0].stage].run([named[name] for name in todo], list(todo.values()), session)

    folder.do_together(units, work)


@contextlib.contextmanager
def _models_and_modules_stay() -> Iterator[None]:
    """Within the block, models stay loaded, and the garbage collector passes over what was there before it.

    Sampling and training collect garbage each time they end, which takes as long as there are objects: those of
    imported modules are nearly all, and never garbage.
    """
    import regretless.sampling.transformers_engine
    import regretless.training.trainer  # noqa: F401 so that its modules are passed over, too
    from regretless.modeling.kept_models import models_stay_loaded

    gc.collect()
    gc.freeze()
    try:
        with models_stay_loaded():
            yield
    finally:
        gc.unfreeze()


class Listing(RunFolder):
    """The units of a stage, as far as they are known before it runs; nothing is done or written."""

    def __init__(self, recipe: Recipe, path: Path, name: str) -> None:
        """name: the stage, of which the recipe has a section."""
        super().__init__(path)
        self.groups: list[Sequence[Unit]] = []
        self.is_whole = False
        """False if the stage could not name all of its units."""
        run = Run.of(recipe, self, only_listed=True)
        with contextlib.suppress(RegretlessError, OSError):  # whoever does the work says what is wrong
            for units in STAGES[name].units(getattr(recipe, name), run):
                self.groups.append(units)
            self.is_whole = True

    def done(self, name: str) -> bool:
        """True if there are units in the folder `name` or below, and all of them are finished."""
        below = self._below(name)
        return bool(below) and all(map(self.has_done, below))

    def awaits(self, name: str) -> bool:
        """True if a unit in the folder `name` or below is not finished."""
        return not all(map(self.has_done, self._below(name)))

    def _below(self, name: str) -> list[Unit]:
        return [unit for unit in chain(*self.groups) if PurePosixPath(unit.name).is_relative_to(name)]


def file_input(name: str, source: Path | str) -> dict[str, Path]:
    """A file as an input of a unit of work; hub data has no content to compare."""
    return {name: source} if isinstance(source, Path) else {}


def hub_setting(name: str, source: Path | str) -> dict[str, str]:
    """The id of a hub data set as a setting of a unit of work."""
    return {name: source} if isinstance(source, str) else {}
