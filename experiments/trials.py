"""What the experiments on the embedded world share: seeded worlds, trials of training in them, equal tuning, tables."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regretless.core.files import fingerprint, read_json, write_jsonl, write_text
from regretless.core.intervals import over_seeds
from regretless.core.run_folder import BASE, RunFolder
from regretless.core.stage_folder import MANIFEST
from regretless.core.terminal import never_fail_to_print
from regretless.core.yaml_settings import read_yaml
from regretless.data.preferences import read_pairs
from regretless.data.rows import read_rows, write_records
from regretless.data.tokenization import tokenize_pairs
from regretless.evaluation.results import EvaluateConfig
from regretless.labeling.verify import VerifyConfig
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.modeling.scoring import score_responses
from regretless.runs.evaluate import evaluate_models
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import apply_overrides, parse_recipe
from regretless.training import train as training

HERE = Path(__file__).parent
BEHAVIOR = "behavior"
PAIRS_STAGES = ("world", "pretrain", "sample", "verify", "pair")
VALIDATION, TEST, LONGER = "validation", "test", "longer"
PAIRED_STEPS = 4
"""Most steps of a problem in the pairs that trials train on. The base model was pretrained on longer ones as well."""
VALIDATION_SHARE = 0.4
"""Part of the held-out problems of so many steps that settings are chosen on; the others are the test."""
TITLES = {
    TEST: f"In-domain: greedy Pass@1, %, held-out problems of 2 to {PAIRED_STEPS} steps, as in the pairs",
    LONGER: "Out-of-domain: greedy Pass@1, %, held-out problems of 5 and 6 steps, in pretraining but not in the pairs",
}
SCORED_PAIRS = 400
"""Pairs whose tokens are scored for the distance between two models."""


_known: dict[Path, float] = {}
"""Accuracies that this process has found already: checking a finished trial reads all that it depends on."""


class Unfinished(Exception):
    """A result is not there yet, and only finished ones were asked for."""


@dataclass(frozen=True)
class PairData:
    """Pairs that are made from a world's own ones."""

    name: str
    settings: Mapping[str, Any]
    """What they depend on, beside the world."""
    make: Callable[[World, Path], dict[str, Any]] = field(compare=False)
    """Writes pairs.parquet into a folder; returns counts."""


@dataclass(frozen=True)
class Trial:
    """One way to train, the same in every world."""

    objective: str
    settings: Mapping[str, Any]
    """Hyperparameters and training arguments, over those of the recipe."""
    pairs: PairData | None = None
    """The world's own pairs unless given."""

    @property
    def name(self) -> str:
        """Name of its folder: equal for equal trials."""
        pairs = self.pairs and [self.pairs.name, self.pairs.settings]
        return f"{self.objective}-{fingerprint([self.objective, self.settings, pairs])[:12]}"

    def but(self, pairs: PairData | None = None, **settings: Any) -> Trial:
        """The same with other settings or pairs."""
        return Trial(self.objective, {**self.settings, **settings}, pairs or self.pairs)


@dataclass(frozen=True)
class World:
    """A seed's problems, models and pairs, and the trials in it. Everything is kept in its folder and made once."""

    recipe: Path
    seed: int
    folder: Path
    overrides: Sequence[str] = ()
    """Changes of the recipe, the same for every seed."""
    show: bool = False
    """Make nothing: raise Unfinished for what is not there."""

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe with the overrides and this seed: other problems, initial weights and order of the data.

        Seed 0 is the recipe as it is.
        """
        weights = [
            f"pretrain.{name}.model.init_seed={2 * self.seed + number}" for number, name in enumerate((BASE, BEHAVIOR))
        ]
        return apply_overrides(read_yaml(self.recipe), [*self.overrides, f"seed={self.seed}", *weights])

    @property
    def path(self) -> Path:
        """Run folder of the recipe with this seed."""
        return self.folder / f"seed-{self.seed}"

    @property
    def pairs(self) -> Path:
        """The pairs on problems of at most `PAIRED_STEPS` steps."""
        return self.path / "problems" / "pairs.parquet"

    def model(self, name: str) -> ModelConfig:
        """A model that the recipe pretrained."""
        return ModelConfig(name_or_path=str(self.path / "pretrain" / name))

    def make(self, only: Sequence[str] = PAIRS_STAGES) -> None:
        """Run the recipe's stages (none named: all of them); what is done already is skipped."""
        run_recipe(parse_recipe(self.settings | {"output_dir": str(self.path)}, str(self.recipe)), only)

    def prepare(self) -> None:
        """Make models, pairs and problem sets.

        validation, test: held-out problems as short as those of the pairs; longer: the others, whose length the base
        model has met and the pairs have not.
        """
        if self.show:
            return
        self.make()
        folder = RunFolder(self.path)
        world, pair = self.path / "world", self.path / "pair"
        inputs = {name: world / f"{name}.jsonl" for name in ("prompts", "test")}
        inputs["pairs"] = pair / "pairs.parquet"

        def split(output: Path) -> dict[str, Any]:
            prompts, held_out = ([row for _, row in read_rows(inputs[name])] for name in ("prompts", "test"))
            short = [row for row in held_out if row["steps"] <= PAIRED_STEPS]
            cut = round(VALIDATION_SHARE * len(short))
            longer = [row for row in held_out if row["steps"] > PAIRED_STEPS]
            sets = {VALIDATION: short[:cut], TEST: short[cut:], LONGER: longer}
            for name, problems in sets.items():
                write_jsonl(output / f"{name}.jsonl", problems)
            known = {row["prompt_id"] for row in prompts if row["steps"] <= PAIRED_STEPS}
            pairs, _ = read_pairs(inputs["pairs"])
            kept = [pair for pair in pairs if pair.prompt_id in known]
            write_records(output / "pairs.parquet", kept)
            return {name: len(problems) for name, problems in sets.items()} | {"pairs": len(kept)}

        with folder.locked():
            folder.do("problems", {"steps": PAIRED_STEPS, "validation": VALIDATION_SHARE}, split, inputs)

    def accuracy(self, trial: Trial | None, problems: str, epoch: int | None = None) -> float:
        """Greedy Pass@1, 0 to 1, of a trial's model (None: the base model) on one of the problem sets.

        epoch: the checkpoint after that many epochs, for trials that save one each epoch; the end unless given.
        Raises Unfinished.
        """
        label = "end" if epoch is None else f"epoch-{epoch}"
        folder = RunFolder(self.path / "trials" / (trial.name if trial else BASE))
        result = folder.path / "evaluate" / label / problems / "result.json"
        if result in _known:
            return _known[result]
        if not self.show:
            model = self._checkpoint(self._train(trial), epoch) if trial else self.model(BASE)
            settings = {key: value for key, value in self.settings["evaluate"].items() if key != "benchmarks"}
            source = {"dataset": str(self.path / "problems" / f"{problems}.jsonl"), "answer_column": "answer"}
            config = EvaluateConfig.parse({**settings, "benchmarks": {problems: source}}, "evaluate")
            with folder.locked():
                evaluate_models(folder, "evaluate", {label: model}, config, VerifyConfig())
        if not result.is_file():
            raise Unfinished(str(result))
        _known[result] = float(read_json(result)["pass_at_1"])
        return _known[result]

    def pair_count(self, trial: Trial) -> int:
        """How many pairs a finished trial trained on."""
        return int(read_json(self.path / "trials" / trial.name / "train" / MANIFEST)["summary"]["pairs"])

    def token_logps(self, trial: Trial | None) -> NDArray[np.float64]:
        """Log-probabilities (nats) of all tokens of both responses of the first pairs, under a model (None: the base).

        One long vector, the same tokens for every model of this world. Raises Unfinished.
        """
        folder = RunFolder(self.path / "trials" / (trial.name if trial else BASE))
        if not self.show:
            model = ModelConfig(name_or_path=str(self._train(trial))) if trial else self.model(BASE)

            def work(output: Path) -> dict[str, Any]:
                logps = np.concatenate(pair_logps(model, self.pairs, SCORED_PAIRS))
                write_text(output / "logps.txt", "\n".join(map(str, logps.tolist())))
                return {"tokens": len(logps)}

            with folder.locked():
                settings = {"name_or_path": model.name_or_path, "pairs": SCORED_PAIRS}
                folder.do("scores", settings, work, {"pairs": self.pairs})
        if not (folder.path / "scores" / MANIFEST).is_file():
            raise Unfinished(str(folder.path / "scores"))
        return np.loadtxt(folder.path / "scores" / "logps.txt")

    def _train(self, trial: Trial) -> Path:
        """The trial's model, trained unless it is there."""
        common = {key: value for key, value in self.settings["train"].items() if key not in ("methods", "objective")}
        method = self.settings["train"]["methods"].get(trial.objective, {})
        values = {**common, "objective": trial.objective, "methods": {trial.objective: {**method, **trial.settings}}}
        # Trials on the same pairs share the reference's log-probabilities.
        cache = {"reference_cache_dir": str(self.path / "reference")}
        config = training.TrainConfig.parse({"seed": self.seed, **values}, trial.name)
        start, pairs = self.model(BASE), self._pairs_of(trial)
        folder = RunFolder(self.path / "trials" / trial.name)
        data = f" on {trial.pairs.name}" if trial.pairs else ""
        with folder.locked():
            settings = {"train": config.model_dump(mode="json"), "name_or_path": start.name_or_path}
            done = folder.do(
                "train",
                settings,
                lambda output: training.run(config.model_copy(update=cache), trial.objective, start, pairs, output),
                {"pairs": pairs},
                label=f"seed {self.seed}, {trial.objective} {dict(trial.settings)}{data}",
            )
        return done.folder

    def _pairs_of(self, trial: Trial) -> Path:
        if (data := trial.pairs) is None:
            return self.pairs
        folder = RunFolder(self.path / "pairs")
        with folder.locked():
            done = folder.do(
                data.name, dict(data.settings), lambda output: data.make(self, output), {"pairs": self.pairs}
            )
        return done.folder / "pairs.parquet"

    @staticmethod
    def _checkpoint(trained: Path, epoch: int | None) -> ModelConfig:
        """The model at the end of a training, or the checkpoint after an epoch of it."""
        if epoch is None:
            return ModelConfig(name_or_path=str(trained))
        steps = sorted(int(path.name.partition("-")[2]) for path in trained.glob("checkpoint-*"))
        return ModelConfig(name_or_path=str(trained / f"checkpoint-{steps[epoch - 1]}"))


def pair_logps(model: ModelConfig, pairs: Path, count: int | None = None) -> list[NDArray[np.float32]]:
    """Token log-probabilities (nats) of the chosen, then the rejected response of each of the first `count` pairs."""
    rows, _ = read_pairs(pairs)
    tokenized, refused = tokenize_pairs(
        rows[:count], load_tokenizer(model), max_length=None, max_prompt_length=None, need_logps=False
    )
    assert not refused, refused[0]
    items = [(pair.prompt_ids, side.ids) for pair in tokenized for side in pair.sides]
    return score_responses(load_model(model), items)


def score_distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Mean squared difference of two models' log-probabilities of the same tokens, nats² (paper, §7 and Table 4)."""
    return float(np.mean((one - other) ** 2))


# --- tuning ----------------------------------------------------------------------------------------------------------

BETAS, RATES = (0.1, 1.0), (1e-4, 3e-4)
MEAN_BETAS = (3.0, 30.0)
"""β of scores that are averaged over tokens: a response has about 30 of them."""
SFT_RATES = (1e-4, 3e-4, 6e-4, 1e-3)


@dataclass(frozen=True)
class Method:
    """A method with the settings to choose from, of which every method has the same number."""

    objective: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    grid: Sequence[Mapping[str, Any]] = tuple({"beta": beta, "learning_rate": rate} for rate in RATES for beta in BETAS)
    pairs: PairData | None = None

    @property
    def cells(self) -> list[Trial]:
        """The trials to choose from."""
        return [Trial(self.objective, {**self.fixed, **cell}, self.pairs) for cell in self.grid]


METHODS = {
    **{name: Method(name) for name in ("dpo", "rpo", "ipo", "kto", "tdpo", "repo", "repo_det")},
    "sft": Method("sft", grid=tuple({"learning_rate": rate} for rate in SFT_RATES)),
}
"""The paper's methods and supervised training on the chosen responses; each has as many settings to choose from."""


@dataclass(frozen=True)
class Experiment:
    """The worlds of a command: all of them, and those in which settings are chosen."""

    worlds: Sequence[World]
    tuning: Sequence[World]

    def validation(self, cell: Trial) -> float:
        """Mean accuracy of a cell on the validation problems of the tuning seeds. Raises Unfinished."""
        return float(np.mean([world.accuracy(cell, VALIDATION) for world in self.tuning]))

    def choose(self, method: Method) -> Trial:
        """The method's cell that is best on the validation problems (ties: the first). Raises Unfinished."""
        return max(method.cells, key=self.validation)

    def accuracies(self, trial: Trial | None, problems: str, epoch: int | None = None) -> list[float]:
        """Accuracy in each world. Raises Unfinished."""
        return [world.accuracy(trial, problems, epoch) for world in self.worlds]

    def chosen(self, methods: Mapping[str, Method]) -> dict[str, Trial]:
        """The chosen cells of the methods that are finished."""
        found = {}
        for label, method in methods.items():
            try:
                found[label] = self.choose(method)
            except Unfinished:
                print(f"(not finished: {label})")
        return found


def experiment(options: argparse.Namespace) -> Experiment:
    """The worlds of the seeds asked for, made where they are not there yet."""
    made = {
        seed: World(options.recipe, seed, options.folder, options.overrides, options.show)
        for seed in dict.fromkeys([*options.seeds, *options.tuning_seeds])
    }
    for world in made.values():
        world.prepare()
    gc.freeze()  # the Trainer collects garbage after every training: what is here by now is none
    return Experiment([made[seed] for seed in options.seeds], [made[seed] for seed in options.tuning_seeds])


def arguments(description: str, recipe: Path, folder: Path, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """Options that every experiment has: recipe, seeds and the folder that keeps finished work."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=recipe, help="recipe of the world")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="one world and two models each")
    parser.add_argument("--folder", type=Path, default=folder, help="finished work is taken from here")
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="changes of the recipe, in every run",
    )
    return parser


def claim_options(description: str) -> argparse.Namespace:
    """Options of a command that tests a claim."""
    parser = arguments(description, HERE / "claims.yaml", Path("runs/claims"), range(5))
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=[0], help="seeds whose validation decides")
    parser.add_argument("--show", action="store_true", help="run nothing, print what is finished")
    return parser.parse_args()


# --- tables ----------------------------------------------------------------------------------------------------------


def mean_and_interval(values: Sequence[float], *, sign: bool = False, scale: float = 100, digits: int = 1) -> str:
    """Mean over seeds with its 95 % t-interval, in percent unless scaled otherwise; just the value for one seed."""
    found = over_seeds([scale * value for value in values])
    form = f"{'+' if sign else ''}.{digits}f"
    if found.n == 1:
        return f"{found.mean:{form}}"
    return f"{found.mean:{form}} [{found.interval.low:{form}}, {found.interval.high:{form}}]"


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """Mean of the differences seed by seed, with its 95 % t-interval, in points; * where the interval leaves out 0.

    Raises ValueError for unequal lengths.
    """
    differences = [value - other for value, other in zip(values, others, strict=True)]
    low, high = over_seeds(differences).interval
    return mean_and_interval(differences, sign=True) + (" *" if low > 0 or high < 0 else "")


def spread(values: Sequence[float]) -> list[str]:
    """Cells of one row: each seed, the mean with its interval, and the standard deviation, in percent."""
    each = " / ".join(f"{100 * value:.1f}" for value in values)
    return [each, mean_and_interval(values), f"{100 * over_seeds(values).sd:.1f}"]


def comparison(found: Experiment, trials: Mapping[str, Trial | None], problems: str, against: Mapping[str, str]) -> str:
    """Table of trials (None: the base model) by label: accuracy in each world, mean, sd, and paired differences.

    against: labels of the trials that the others are compared with, and what a column's head calls them. An asterisk
    marks a difference whose interval leaves out 0. Unfinished trials are left out.
    """
    accuracies: dict[str, list[float]] = {}
    for label, trial in trials.items():
        with contextlib.suppress(Unfinished):
            accuracies[label] = found.accuracies(trial, problems)
    others = {label: name for label, name in against.items() if label in accuracies}
    seeds = " / ".join(str(world.seed) for world in found.worlds)
    header = ["", "settings", f"seeds {seeds}", "mean [95 % t-interval]", "sd"]
    rows = []
    for label, values in accuracies.items():
        trial = trials[label]
        differences = ["" if label == other else difference(values, accuracies[other]) for other in others]
        rows.append([label, cell_text(trial) if trial else "", *spread(values), *differences])
    return markdown([*header, *(f"paired − {name}" for name in others.values())], rows)


def cell_text(trial: Trial) -> str:
    """Settings of a chosen cell."""
    rate = f"lr {trial.settings['learning_rate']:g}"
    return f"β {trial.settings['beta']:g}, {rate}" if "beta" in trial.settings else rate


def tuning_table(found: Experiment, methods: Mapping[str, Method]) -> str:
    """What the choice of settings was made on: validation accuracy of every cell."""
    rows = []
    for label, method in methods.items():
        try:
            values = {cell_text(cell): found.validation(cell) for cell in method.cells}
        except Unfinished:
            continue
        best = max(values.values())
        texts = [
            f"{text}: {'**' if value == best else ''}{100 * value:.1f}{'**' if value == best else ''}"
            for text, value in values.items()
        ]
        rows.append([label, "; ".join(texts)])
    return markdown(["method", "validation Pass@1, %"], rows)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers are aligned by whoever renders it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
