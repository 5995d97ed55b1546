"""Stage `evaluate`: models on benchmarks, of work that samples, verifies or judges, and summarizes."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from regretless.core.errors import DataError
from regretless.core.files import fingerprint, write_json
from regretless.core.settings import dump
from regretless.runs.stages.stage import RESPONSES, Run, Session, Stage
from regretless.workflow.run_folder import BASE, RUN, Unit, resolve, substitute
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.data.prompts import PromptRow, PromptSource
    from regretless.evaluation.chat.chat_results import ChatBenchmark
    from regretless.evaluation.results import EvaluateConfig
    from regretless.labeling.verify import VerifyConfig
    from regretless.modeling.load import ModelConfig

MODEL = "model"
"""Label of the model when it is evaluated on its own."""


class Evaluate(Stage["EvaluateConfig"]):
    """Evaluates the base model and the trained ones.

    In its folder, <label>/<benchmark>/ holds the greedy answers with verdicts and result.json, and seed-<n>/ in it the
    same for each sampling run; for a chat benchmark it holds the judgments and chat_result.json. samples/ holds the
    answers before verification; results.json combines all results.
    """

    name = "evaluate"
    about = "Pass@1 of a model on benchmarks: greedy, and over seeds, with intervals; chat benchmarks by a judge."
    reads = "a model"
    makes = "Pass@1, and a judge's verdicts on chat benchmarks, with intervals"
    flags = ("model", "adapter", "benchmark", "policy")

    def units(self, config: EvaluateConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """Groups of each model: its answers to all benchmarks, for which it is loaded once, and what they come to."""
        from regretless.sampling.engines import ENGINES

        # Otherwise models share something: a server and its budget, kept replies, another program's devices.
        apart = not config.chat and not config.harness and ENGINES.find(config.engine).in_process
        for label, model in self._models(config, run).items():
            yield from _OneModel(self, config, run, label, model, group=label if apart else "").units()

    def folder_in(self, run: Run) -> PurePosixPath:
        """Its folder in the run's: for a command, that is the one which the user names."""
        return PurePosixPath("" if run.command else self.place)

    def _models(self, config: EvaluateConfig, run: Run) -> dict[str, ModelConfig]:
        trained = {name: trained.model for name, trained in run.trained().items()}
        trained |= {name: _named_model(run, text) for name, text in config.policies.items()}
        # Compared with others, the model is their base: gains are taken to it.
        return {MODEL if run.command and not trained else BASE: run.model, **trained}

    def run(self, units: Sequence[Unit], places: Sequence[Path], session: Session) -> list[dict[str, Any]]:
        """Do units of one group; answers are sampled with the model loaded once."""
        if units[0].need != SAMPLING:
            return super().run(units, places, session)
        from regretless.sampling.job import SampleWork
        from regretless.sampling.sample import sample_together

        prompts = {unit.task["setting"]: unit.task["prompts"] for unit in units}
        read = {
            setting: source if isinstance(source, list) else _problems(source, setting)
            for setting, source in prompts.items()
        }
        return sample_together(
            [
                SampleWork([unit.task["model"]], read[unit.task["setting"]], unit.task["params"], place / RESPONSES)
                for unit, place in zip(units, places, strict=True)
            ]
        )

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Verify or judge answers, or run the harness."""
        from regretless.evaluation import harness, results
        from regretless.evaluation.chat import chat_results
        from regretless.labeling import verify

        if unit.need == JUDGING:
            return chat_results.run(**unit.task, output=place)
        if unit.need == HARNESS:
            return harness.run(**unit.task, output=place)
        verify.run(**unit.task, output=place)
        result = results.summarize(place / RESPONSES)
        write_json(place / "result.json", result)
        return {key: result[key] for key in ("n", "correct", "cut")}

    def after(self, config: EvaluateConfig, run: Run) -> None:
        """Write results.json, and the results into the models' cards."""
        from regretless.evaluation import results
        from regretless.runs import cards

        folder = run.path(self.folder_in(run))
        write_json(folder / "results.json", results.collect(folder, config.seeds))
        cards.refresh_cards(run, lambda method, facts: {"results": cards.results_of(run, method)})


SAMPLING, VERIFYING, JUDGING = Need("sample"), Need("verify"), Need("judge")
HARNESS = Need("harness", gpus=1)


class _OneModel:
    """The units of one model."""

    def __init__(
        self, stage: Evaluate, config: EvaluateConfig, run: Run, label: str, model: ModelConfig, group: str
    ) -> None:
        self.stage, self.config, self.run, self.label, self.model, self.group = stage, config, run, label, model, group
        from regretless.evaluation.conditions import SAMPLES

        self.here = resolve(model, run.root)
        self.place = stage.folder_in(run) / label
        self.samples = stage.folder_in(run) / SAMPLES / label

    def units(self) -> Iterator[Sequence[Unit]]:
        """Its units, in groups."""
        yield from self._answers_and_verdicts()
        # Keyed by what the answers depend on, so that benchmarks that differ only in the judge share their answers.
        answers: dict[str, list[Path]] = {}
        for benchmark, chat in self.config.chat.items():
            if chat.answers not in answers:
                answers[chat.answers] = yield from self._converse(chat)
            here = resolve(chat, self.run.root)
            inputs = {f"responses-{number}": path for number, path in enumerate(answers[chat.answers])}
            task = {"config": here, "responses": list(inputs.values())}
            yield [self._unit(self.place / benchmark, dump(chat), task, JUDGING, {**inputs, **here.files()})]
        if self.config.harness:
            yield [self._harness()]

    def _answers_and_verdicts(self) -> Iterator[Sequence[Unit]]:
        config, run = self.config, self.run
        decoding: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}}
        drawn = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
        decoding |= {f"seed-{seed}": {**drawn, "seed": seed} for seed in config.seeds}
        common: dict[str, Any] = {"n": 1, "repetition_penalty": config.repetition_penalty}
        common |= {"max_new_tokens": config.max_new_tokens, "stop": config.stop}
        asked = [(benchmark, name) for benchmark in config.benchmarks for name in decoding]
        if not asked:
            return
        # In a recipe, settings begin with the section's name; in the command's own arguments they do not.
        section = "" if run.command else f"{self.stage.name}."
        yield [
            self._sampling(
                self.samples / benchmark / name,
                dump(config.benchmarks[benchmark].source),
                resolve(config.benchmarks[benchmark].source, run.root),
                {**common, **decoding[name]},
                f"{section}benchmarks.{benchmark}.",
            )
            for benchmark, name in asked
        ]
        for benchmark, name in asked:
            verifying = grading(config, run.recipe.verify, benchmark)
            responses = run.path(self.samples / benchmark / name, RESPONSES)
            task = {"config": verifying, "responses": responses}
            place = self.place / benchmark / ("" if name == "greedy" else name)
            yield [self._unit(place, dump(verifying), task, VERIFYING, {"responses": responses})]

    def _converse(self, chat: ChatBenchmark) -> Generator[Sequence[Unit], None, list[Path]]:
        """The answers to a chat benchmark, turn by turn and temperature by temperature; returns their files."""
        from regretless.evaluation.chat import chat_results

        here, folder = resolve(chat, self.run.root), self.samples / chat.answers
        common: dict[str, Any] = {"n": 1, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": here.seed}
        common |= {"max_new_tokens": here.max_new_tokens, "stop": here.stop}
        responses: list[Path] = []
        for turn in itertools.count(1):
            if self.run.awaits(folder.as_posix()):
                break  # a later turn's prompts contain the answers to the earlier one
            groups = chat_results.next_prompts(here, responses)
            if not groups:
                break
            for temperature, prompts in groups.items():
                place = folder / f"turn-{turn}-temperature-{temperature:g}"
                # The prompts themselves are the input, because those of a second turn contain the first answers.
                shown = fingerprint([[row.prompt_id, row.prompt] for row in prompts])
                yield [self._sampling(place, shown, prompts, {**common, "temperature": temperature}, place.as_posix())]
                responses.append(self.run.path(place, RESPONSES))
        return responses

    def _harness(self) -> Unit:
        from regretless.evaluation import harness

        given = self.config.harness_settings
        # Neither the interpreter nor the batch changes what is asked.
        seen = {key: value for key, value in dump(given).items() if key not in ("python", "batch_size")}
        settings = {"model": dump(self.model), "tasks": self.config.harness, **seen}
        task = {"tasks": self.config.harness, "settings": resolve(given, self.run.root), "model": self.here}
        return self._unit(self.place / harness.FOLDER, settings, task, HARNESS)

    def _sampling(
        self,
        place: PurePosixPath,
        shown: Any,
        prompts: PromptSource | list[PromptRow],
        decoding: Mapping[str, Any],
        setting: str,
    ) -> Unit:
        """A unit that samples. shown: the prompts as a setting; setting: how messages about them begin."""
        from regretless.sampling.base import SamplingParams
        from regretless.sampling.sample import KEEPS

        config = self.config
        engine: dict[str, Any] = {"engine": config.engine, "server": config.engine_server, "vllm": config.vllm}
        params = SamplingParams(**decoding, **engine, batch_size=config.batch_size)
        settings = {"model": dump(self.model), "prompts": shown, "sampling": dump(params)}
        task = {"model": self.here, "prompts": prompts, "params": params, "setting": setting}
        return self._unit(place, settings, task, SAMPLING, keeps=KEEPS)

    def _unit(
        self,
        place: PurePosixPath,
        settings: Mapping[str, Any],
        task: Mapping[str, Any],
        need: Need,
        inputs: Mapping[str, Path] | None = None,
        keeps: Sequence[str] = (),
    ) -> Unit:
        name, run = place.as_posix(), self.run
        return run.unit(self.stage, name, settings, task, inputs, need=need, keeps=keeps, group=self.group)


def grading(config: EvaluateConfig, verify_config: VerifyConfig | None, benchmark: str | None = None) -> VerifyConfig:
    """Settings of verification of a benchmark: those of `verify`, overridden by `config`, then by the benchmark."""
    from regretless.labeling.verify import VerifyConfig

    own = None if benchmark is None else config.benchmarks[benchmark].verifier
    overrides = {"verifier": own or config.verifier, "grade_cut": config.grade_cut}
    set_here = {name: value for name, value in overrides.items() if value is not None}
    return VerifyConfig.parse({**(verify_config or VerifyConfig()).model_dump(), **set_here}, "evaluate")


def _problems(source: PromptSource, setting: str) -> list[PromptRow]:
    """The problems of a benchmark. Raises DataError for one without a gold answer."""
    from regretless.data.prompts import load_prompts

    prompts = load_prompts(source, setting)
    without = [prompt.line for prompt in prompts if prompt.answer is None]
    if without:
        raise DataError(
            f"{source.dataset}: {len(without)} of {len(prompts)} problems have no gold answer (first: row "
            f"{without[0]}), so their responses cannot be verified; set {setting}answer_column"
        )
    return prompts


def _named_model(run: Run, text: str) -> ModelConfig:
    """A model that settings name: the folder of a model, or of an adapter for the run's model; or a hub id."""
    from regretless.modeling.load import ModelConfig
    from regretless.modeling.training_folder import trained_model

    if Path(substitute(text, run.root)).is_dir() or text.startswith(RUN):
        return trained_model(run.model, text, run.root)
    return ModelConfig(name_or_path=text)


STAGE = Evaluate()
