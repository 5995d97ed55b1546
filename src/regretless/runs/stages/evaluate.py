"""Stage `evaluate`: models on benchmarks, of work that samples, verifies or judges, and summarizes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from regretless.core.errors import DataError
from regretless.core.files import fingerprint, write_json
from regretless.core.settings import dump
from regretless.evaluation.conditions import SAMPLES
from regretless.runs.stages.judge import miniature_judge
from regretless.runs.stages.sample import MINIATURE
from regretless.runs.stages.stage import PAIRS, RESPONSES, Listing, Run, Session, Stage
from regretless.workflow.run_folder import BASE, RUN, Unit, resolve, substitute
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.data.prompts import PromptRow, PromptSource
    from regretless.evaluation.chat.chat_results import ChatBenchmark
    from regretless.evaluation.results import EvaluateConfig
    from regretless.labeling.verify import VerifyConfig
    from regretless.modeling.load import ModelConfig
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import Recipe

MODEL = "model"
"""Label of the model when it is evaluated on its own."""


class Evaluate(Stage["EvaluateConfig"]):
    """Evaluates the base model and the trained ones.

    In its folder, <label>/<benchmark>/ holds the greedy answers with verdicts and result.json, and seed-<n>/ in it the
    same for each sampling run; for a chat benchmark it holds the judgments and chat_result.json. samples/ holds the
    answers before verification; results.json combines all results.
    """

    name = "evaluate"
    writes = (
        *("responses.parquet", "responses.parts", "parts", "refused.jsonl", "result.json"),
        *("chat_result.json", "judgments.jsonl", "scores.json", "raw", "lm_eval.log"),
    )
    about = "Pass@1 of a model on benchmarks: greedy, and over seeds, with intervals; chat benchmarks by a judge."
    reads = "a model"
    makes = "Pass@1, and a judge's verdicts on chat benchmarks, with intervals"
    flags = ("model", "adapter", "benchmark", "policy")
    optional = ("adapter", "benchmark", "policy")
    neighbor = "verify"
    uses = ("model",)
    counted = (("n", "responses"),)

    def units(self, config: EvaluateConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """Groups of each model: its answers to all benchmarks, for which it is loaded once, and what they come to."""
        from regretless.sampling.engines import ENGINES

        # Otherwise models share something: a server and its budget, kept replies, another program's devices.
        apart = not config.chat and not config.harness and ENGINES.find(config.engine).in_process
        for label, model in self._models(config, run).items():
            yield from _OneModel(self, config, run, label, model, group=label if apart else "").units()

    def folder_in(self, run: Run) -> PurePosixPath:
        """Its folder in the run's: for a command, that is the one which the user names."""
        return PurePosixPath(self.place if run.output is None else "")

    def folders_of_command(self, labels: Iterable[str]) -> Sequence[str]:
        """Those of the models, and of all answers."""
        return (BASE, MODEL, SAMPLES, *labels)

    def _models(self, config: EvaluateConfig, run: Run) -> dict[str, ModelConfig]:
        trained = {name: trained.model for name, trained in run.trained().items()}
        trained |= {name: _named_model(run, text) for name, text in config.policies.items()}
        # Compared with others, the model is their base: gains are taken to it.
        return {BASE if run.output is None or trained else MODEL: run.model, **trained}

    def run(self, units: Sequence[Unit], places: Sequence[Path], session: Session) -> list[dict[str, Any]]:
        """Do units of one group; answers are sampled with the model loaded once."""
        if units[0].need != SAMPLING:
            return super().run(units, places, session)
        from regretless.sampling.job import SampleWork
        from regretless.sampling.sample import sample_together

        # The problems of a benchmark are read once, however it is decoded.
        read: dict[str, list[PromptRow]] = {}
        works = []
        for unit, place in zip(units, places, strict=True):
            prompts, setting = unit.task["prompts"], unit.task.get("setting", "")
            if not isinstance(prompts, list):
                prompts = read[setting] = read.get(setting) or _problems(prompts, setting, unit.task)
            works.append(SampleWork([unit.task["model"]], prompts, unit.task["params"], place / RESPONSES))
        return sample_together(works)

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

    def problems(self, config: EvaluateConfig, machine: Machine) -> None:
        """Problems of the engine and its server, of the harness, and of further models."""
        from regretless.evaluation.harness import check_harness
        from regretless.sampling.engines import ENGINES

        super().problems(config, machine)
        machine.under(f"{self.name}.engine", ENGINES.find(config.engine).check)
        if config.engine_server is not None:
            machine.under(f"{self.name}.engine_server", config.engine_server.api_key)
        if config.harness:
            machine.under(f"{self.name}.harness", lambda: check_harness(config.harness_settings))
        for name, text in config.policies.items():
            machine.path_or_hub(f"{self.name}.policies.{name}", text, "model")

    def finished(self, config: EvaluateConfig, listed: Listing) -> Iterator[str]:
        """Those of benchmarks, too, that every model has been evaluated on."""
        yield from super().finished(config, listed)
        labels = {unit.name.split("/")[1] for units in listed.groups for unit in units} - {SAMPLES}
        for kind in ("benchmarks", "chat"):
            for name in getattr(config, kind):
                if labels and all(listed.done(f"{self.place}/{label}/{name}") for label in labels):
                    yield f"{self.name}.{kind}.{name}"

    def folders(
        self, config: EvaluateConfig, run: Run
    ) -> Iterator[tuple[str, Collection[str], Collection[str] | None]]:
        """The models' folders, those of benchmarks in them, and those of sampling runs in these; so in samples/."""
        labels, made = self._labels(config, run)
        samples = f"{self.place}/{SAMPLES}"
        answered = [*config.benchmarks, *(chat.answers for chat in config.chat.values())]
        yield self.place, [*labels, SAMPLES], None
        yield samples, labels, None
        for parent, inner in ((self.place, made), (samples, answered)):
            for label in labels:
                yield f"{parent}/{label}", inner, None
                for benchmark in config.benchmarks:
                    place = f"{parent}/{label}/{benchmark}"
                    seeds = [path.name for path in run.path(place).glob("seed-*")]
                    yield place, [f"seed-{seed}" for seed in config.seeds], seeds

    def _labels(self, config: EvaluateConfig, run: Run) -> tuple[list[str], list[str]]:
        """Labels of the models that a recipe evaluates, and of the benchmarks."""
        from regretless.evaluation.harness import FOLDER

        train = run.recipe.train
        models = [BASE, *(train.objectives if train is not None else ()), *config.policies]
        return models, [*config.benchmarks, *config.chat, *([FOLDER] if config.harness else [])]

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """Two benchmarks with the world's problems. Other models and other programs are not part of it."""
        if section is None:
            return None
        test = {"dataset": f"{RUN}/world/test.jsonl", "answer_column": "answer"}
        labels = list(section.get("benchmarks", {}))[:2] or ([] if section.get("chat") else ["arithmetic"])
        chat = {label: _chat_in_miniature(entry) for label, entry in section.get("chat", {}).items()}
        shrunk = {"benchmarks": dict.fromkeys(labels, test), "chat": chat, "seeds": section.get("seeds", [])[:2]}
        return {**section, **MINIATURE, **shrunk, "server": None, "policies": {}, "harness": []}

    def after(self, config: EvaluateConfig, run: Run) -> None:
        """Write results.json, and the results into the models' cards."""
        from regretless.evaluation import results
        from regretless.evaluation.benchmark_problems import contamination
        from regretless.runs import cards

        folder = run.path(self.folder_in(run))
        # A command adds to what is there. In a run, what a recipe does not ask for may be of an earlier one.
        asked_for = set(itertools.product(*self._labels(config, run))) if run.output is None else None
        collected = results.collect(folder, config.seeds, asked_for)
        pairs = [path for path in run.all_of(PAIRS, self.name) if path.is_file()]
        if run.recipe.train is not None and (notes := contamination(folder, config, pairs)):
            collected["contaminated"] = notes
        write_json(folder / "results.json", collected)
        cards.refresh_cards(run, lambda method, facts: {"results": cards.results_of(run, method)})


SAMPLING, VERIFYING, JUDGING = Need("sample"), Need("verify"), Need("judge")
HARNESS = Need("harness", gpus=1)


CHAT_FILES = "chat-benchmarks"
"""Folder of the chat benchmarks' files in the folder of a run in miniature."""
CHAT: Mapping[str, Mapping[str, Any]] = {
    "alpaca_eval": {"baseline": None, "gamed_baselines": f"{RUN}/{CHAT_FILES}/gamed_baselines.csv"},
    "arena_hard": {"baseline": f"{RUN}/{CHAT_FILES}/arena_hard_baseline.jsonl"},
    "mt_bench": {"references": f"{RUN}/{CHAT_FILES}/mt_bench_references.jsonl"},
}
"""Files of the chat benchmarks besides their questions."""


def _chat_in_miniature(entry: Mapping[str, Any]) -> dict[str, Any]:
    kind, longest = entry["benchmark"], MINIATURE["max_new_tokens"]
    shrunk = {"limit": None, "judge_prompt": None, "max_new_tokens": longest, "bootstrap": 100}
    questions = {"questions": f"{RUN}/{CHAT_FILES}/{kind}.jsonl"}
    return {**entry, **miniature_judge(), **shrunk, **questions, **CHAT[kind]}


class _OneModel:
    """The units of one model."""

    def __init__(
        self, stage: Evaluate, config: EvaluateConfig, run: Run, label: str, model: ModelConfig, group: str
    ) -> None:
        self.stage, self.config, self.run, self.label, self.model, self.group = stage, config, run, label, model, group
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
            yield [self._unit(self.place / benchmark, dump(chat), task, JUDGING, inputs={**inputs, **here.files()})]
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
        section = f"{self.stage.name}." if run.output is None else ""
        answers = []
        for benchmark, name in asked:
            source = config.benchmarks[benchmark].source
            verifier = grading(config, run.recipe.verify, benchmark).verifier
            task = {"prompts": source, "setting": f"{section}benchmarks.{benchmark}.", "verifier": verifier}
            place = self.samples / benchmark / name
            answers.append(self._sampling(place, dump(source), {**common, **decoding[name]}, task))
        yield answers
        for benchmark, name in asked:
            verifying = grading(config, run.recipe.verify, benchmark)
            responses = run.path(self.samples / benchmark / name, RESPONSES)
            task = {"config": verifying, "responses": responses}
            place = self.place / benchmark / ("" if name == "greedy" else name)
            yield [self._unit(place, dump(verifying), task, VERIFYING, inputs={"responses": responses})]

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
                task = {"prompts": prompts, "chat": here}
                yield [self._sampling(place, shown, {**common, "temperature": temperature}, task)]
                responses.append(self.run.path(place, RESPONSES))
        return responses

    def _harness(self) -> Unit:
        from regretless.evaluation import harness

        given = self.config.harness_settings
        # Neither the interpreter nor the batch changes what is asked.
        seen = {key: value for key, value in dump(given).items() if key not in ("python", "batch_size")}
        settings = {"model": dump(self.model), "tasks": self.config.harness, **seen}
        task = {"tasks": self.config.harness, "settings": given, "model": self.model}
        return self._unit(self.place / harness.FOLDER, settings, task, HARNESS)

    def _sampling(
        self, place: PurePosixPath, prompts: Any, decoding: Mapping[str, Any], task: Mapping[str, Any]
    ) -> Unit:
        """A unit that samples. prompts: as a setting; task: besides the model and how it is decoded."""
        from regretless.sampling.engine_settings import SamplingParams
        from regretless.sampling.sample import KEEPS

        config = self.config
        engine: dict[str, Any] = {"engine": config.engine, "server": config.engine_server, "vllm": config.vllm}
        params = SamplingParams(**decoding, **engine, batch_size=config.batch_size)
        settings = {"model": dump(self.model), "prompts": prompts, "sampling": dump(params)}
        return self._unit(place, settings, {"model": self.model, "params": params, **task}, SAMPLING, keeps=KEEPS)

    def _unit(
        self, place: PurePosixPath, settings: Mapping[str, Any], task: Mapping[str, Any], need: Need, **others: Any
    ) -> Unit:
        return self.run.unit(self.stage, str(place), settings, task, need=need, group=self.group, **others)


def grading(config: EvaluateConfig, verify_config: VerifyConfig | None, benchmark: str | None = None) -> VerifyConfig:
    """Settings of verification of a benchmark: those of `verify`, overridden by `config`, then by the benchmark."""
    from regretless.labeling.verify import VerifyConfig

    own = None if benchmark is None else config.benchmarks[benchmark].verifier
    overrides = {"verifier": own or config.verifier, "grade_cut": config.grade_cut}
    set_here = {name: value for name, value in overrides.items() if value is not None}
    return VerifyConfig.parse({**(verify_config or VerifyConfig()).model_dump(), **set_here}, "evaluate")


def _problems(source: PromptSource, setting: str, task: Mapping[str, Any]) -> list[PromptRow]:
    """The problems of a benchmark, as its model is asked. Raises DataError for one whose answers cannot be verified."""
    from regretless.data.prompts import load_prompts
    from regretless.labeling.verifiers import VERIFIERS
    from regretless.sampling.engines import ENGINES
    from regretless.sampling.sample import asked_texts

    params = task["params"]
    tokenizer = ENGINES.find(params.engine).tokenizer(task["model"])
    prompts = load_prompts(source, setting, asked_texts([tokenizer], params.server))
    without = [prompt.line for prompt in prompts if prompt.answer is None]
    if without:
        raise DataError(
            f"{source.dataset}: {len(without)} of {len(prompts)} problems have no gold answer (first: row "
            f"{without[0]}), so their responses cannot be verified; set {setting}answer_column"
        )
    verifier = VERIFIERS.find(task["verifier"])
    for prompt in prompts:
        if prompt.answer is not None and (problem := verifier.gold_problem(prompt.answer)):
            raise DataError(
                f"{source.dataset}:{prompt.line}: {source.answer_column}: verifier {task['verifier']}: {problem}"
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
