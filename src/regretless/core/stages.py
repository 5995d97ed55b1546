"""The table of stages: recipes, the command line, reports and docs/command_line.md read it. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One section of a recipe that does something.

    Its settings have the type of the recipe's field of that name (`runs.recipe.Recipe`), and its work is the
    function `do_<name>` in `runs.work`.
    """

    name: str
    about: str = ""
    """Its help on the command line; empty for a section without a command."""
    reads: str = ""
    makes: str = ""
    flags: tuple[str, ...] = ()
    """Options of its command besides settings, configuration file and output."""
    result: str = ""
    """The file in its folder that is its result; empty if the whole folder is."""
    folder: str = ""
    """Its folder in a run folder, if that is not its name."""
    files: str = ""
    """Names of the files and folders that a unit of it writes into its folder, as patterns between spaces."""

    @property
    def place(self) -> str:
        """Its folder in a run folder."""
        return self.folder or self.name


_TRAINED = (
    "README.md card.json training.log trainer_state.json training_args.bin pair_scores.jsonl checkpoint-* runs _final "
    "*config.json quantization.json *model*.safetensors* *token*.json vocab.* merges.txt *.model *.jinja "
    "additional_chat_templates configuration_*.py modeling_*.py tokenization_*.py"
)
STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "world",
            "Make the embedded world: problems, held-out test, demonstrations, tokenizer.",
            reads="",
            makes="the quickstart's problems, demonstrations and tokenizer",
            files="prompts.jsonl test.jsonl validation.jsonl longer-test.jsonl demonstrations-*.jsonl tokenizer",
        ),
        Stage("pretrain", files=_TRAINED),
        Stage("prompts", files="prompts.jsonl refused.jsonl"),
        Stage(
            "sample",
            "Answer prompts with a behavior model, with the log-probability of every token.",
            reads="prompts, a behavior model",
            makes="responses with token log-probabilities",
            flags=("prompts", "model"),
            result="responses.parquet",
            files="responses.parquet responses.parts refused.jsonl",
        ),
        Stage(
            "verify",
            "Compare responses with gold answers: correct, wrong or unknown.",
            reads="responses with gold answers",
            makes="verdicts: correct, wrong or unknown",
            flags=("responses",),
            result="responses.parquet",
            files="responses.parquet responses.jsonl parts refused.jsonl",
        ),
        Stage(
            "judge",
            "Score responses with a language model on an OpenAI-compatible server.",
            reads="responses, a language model on a server",
            makes="scores",
            flags=("responses",),
            result="responses.parquet",
            files="responses.parquet judgments.jsonl refused.jsonl",
        ),
        Stage(
            "pair",
            "Make preference pairs of verified or scored responses.",
            reads="verdicts or scores",
            makes="preference pairs",
            flags=("responses",),
            result="pairs.parquet",
            files="pairs.parquet refused.jsonl",
        ),
        Stage("pairs", folder="pair"),
        Stage(
            "mask",
            "Add pairs of a chosen response and its own beginning.",
            reads="pairs",
            makes="the pairs, with masked ones added",
            flags=("pairs",),
            result="pairs.parquet",
            files="pairs.parquet refused.jsonl",
        ),
        Stage(
            "inspect",
            "Report before training what the objectives will see in the pairs.",
            reads="pairs, a model",
            makes="what the objectives will see: lengths, margins, saturation, rejected rows",
            flags=("pairs", "model", "objective"),
            files="inspect.json refused.jsonl",
        ),
        Stage(
            "train",
            "Train a model on preference pairs, for example with objective=dpo beta=0.1 learning_rate=1e-5.",
            reads="pairs, a model",
            makes="a trained model or adapter",
            flags=("pairs", "model", "adapter"),
            files=_TRAINED,
        ),
        Stage(
            "evaluate",
            "Pass@1 of a model on benchmarks: greedy, and over seeds, with intervals; chat benchmarks by a judge.",
            reads="a model",
            makes="Pass@1, and a judge's verdicts on chat benchmarks, with intervals",
            flags=("model", "adapter", "benchmark", "policy"),
            files="responses.parquet responses.parts parts refused.jsonl result.json chat_result.json judgments.jsonl "
            "scores.json raw lm_eval.log",
        ),
        Stage(
            "analyze",
            "What training changed: token rewards, score distances, drift, gradients, calibration.",
            reads="pairs, trained models",
            makes="what training changed: token rewards, score distances, drift, gradients, calibration",
            flags=("pairs", "model", "policy"),
            files="token_rewards.json score_distance.json drift.json gradients.json calibration.json lengths.json",
        ),
        Stage(
            "report",
            "One HTML page about a run, with a regret explorer; figures.formats=[png,pdf] also draws files.",
            reads="a run folder",
            makes="one HTML page, the [regret explorer](report.md) in it; figures as PNG and PDF",
            flags=("run_dir",),
            files="report.html figures",
        ),
    )
}
"""Every stage by the name of its section, in the order in which they run."""
