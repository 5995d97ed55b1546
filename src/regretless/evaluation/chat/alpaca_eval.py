"""AlpacaEval 2: a judge's weighted preference between a model's answers and a reference's, raw and length-controlled.

Li et al. 2023 (tatsu-lab/alpaca_eval) and arXiv:2404.04475. The two answers are named by one token each; the judge's
preference is the probability of one of these tokens relative to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from regretless.core.errors import ConfigError
from regretless.core.intervals import PERCENT, Sums, ratio
from regretless.data.columns import Response, text_key
from regretless.data.prompts import TEMPLATES, PromptRow
from regretless.evaluation.chat.chat_settings import ChatBenchmarkConfig
from regretless.evaluation.chat.files import check_answers, local_path, read_answers, read_table
from regretless.evaluation.chat.judge_prompts import JudgeTemplate, load_templates
from regretless.evaluation.chat.judging import ask_all_judgments, bounded, counted, means
from regretless.evaluation.chat.length_control import (
    GamedBaselines,
    length_controlled,
    read_gamed_baselines,
    standardized,
)
from regretless.evaluation.chat.verdicts import two_token_preference
from regretless.servers.ask import Question
from regretless.servers.judge_client import bill
from regretless.servers.reply import Reply

FIRST, SECOND = "m", "M"
"""Tokens that name the answer in first and in second position."""
SLOTS = {"instruction": ("instruction",), "output_1": ("output_1",), "output_2": ("output_2",)}


class AlpacaEvalConfig(ChatBenchmarkConfig):
    """AlpacaEval 2. `questions` is the reference's file (alpaca_eval_gpt4_baseline.json): instruction and output."""

    file_settings: ClassVar[tuple[str, ...]] = ("questions", "judge_prompt", "baseline", "gamed_baselines")

    benchmark: Literal["alpaca_eval"] = "alpaca_eval"
    """Name of the chat benchmark."""
    baseline: str | None = None
    """File of responses to the same prompts to compare with; by default the outputs in `questions`."""
    gamed_baselines: str | None = None
    """CSV file of the gamed baselines (df_gamed.csv). Without it there is no length-controlled win rate. With other
    `questions` than the published file, it needs the column `len_1`: characters of the reference's answer."""
    temperature: float | None = Field(default=1, ge=0)
    """Sampling temperature sent to the judge. Nothing is sampled, but some servers apply it to the probabilities that
    they report."""
    max_reply_tokens: int = Field(default=1, ge=1)
    """Most tokens in a judge's reply; the first one states its preference."""
    top_logprobs: int = Field(default=5, ge=2, le=20)
    """Number of most likely tokens whose log-probabilities the server is asked for."""

    def templates(self) -> dict[str, JudgeTemplate]:
        """Judge templates, as `pair`. Raises ConfigError for a file that cannot be used."""
        return load_templates("alpaca_eval", self.judge_prompt, {"pair": SLOTS}, (FIRST, SECOND))


@dataclass(frozen=True)
class JudgedAnswer:
    """The judge's result for one instruction."""

    index: int
    """Index of the instruction in the reference's file."""
    preference: float | None
    """Probability that the model's answer is the better one; None if the judgment failed."""
    length_1: int
    """Characters of the reference's answer."""
    length_2: int
    """Characters of the model's answer."""
    problem: str | None = None
    """Why the judgment failed."""

    @property
    def prompt_id(self) -> str:
        """Prompt id of the instruction."""
        return f"alpaca_eval-{self.index}"


def next_prompts(config: AlpacaEvalConfig, responses: Sequence[Path]) -> dict[float, list[PromptRow]]:
    """Prompts to answer, keyed by temperature: all of them greedily, once."""
    if responses:
        return {}
    return {
        0.0: [
            PromptRow(f"alpaca_eval-{index}", TEMPLATES[config.template](row["instruction"]))
            for index, row in enumerate(read_table(config.questions, ["instruction"], config.limit))
        ]
    }


def evaluate(
    config: AlpacaEvalConfig, responses: Sequence[Path], output: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Judge the responses; returns the result and the judgments, both as JSON values.

    Raises DataError if the responses or the gamed baselines do not match the instructions, before anything is asked,
    or if no judgment can be read; ConfigError for files that cannot be used; and the errors of `ask_all_judgments`.
    """
    asked, answers, references = _read(config, responses)
    gamed = None
    if config.gamed_baselines:
        gamed = read_gamed_baselines(local_path(config.gamed_baselines), config.questions)
        # Before the judge is paid for judgments that could not be used.
        gamed.check_belong({index: len(references[key]) for index, key in enumerate(asked)})
    judge_answers = ask_all_judgments(config, _questions(config, asked, answers, references), output)
    comparisons = [
        JudgedAnswer(index, answer.value, len(references[key]), len(answers[key].response), answer.problem)
        for index, (key, answer) in enumerate(zip(asked, judge_answers.answers, strict=True))
    ]
    result = win_rates(comparisons, gamed, rounds=config.bootstrap, seed=config.seed)
    result["cut"] = sum(answer.finish_reason == "length" for answer in answers.values())
    judgments = [
        {"prompt_id": each.prompt_id, **vars(each), "attempts": answer.attempts, "reply": answer.key}
        for each, answer in zip(comparisons, judge_answers.answers, strict=True)
    ]
    return result | bill(config, judge_answers), judgments


def judge_questions(config: AlpacaEvalConfig, responses: Sequence[Path]) -> list[Question[float]]:
    """What the judge is asked about the responses. Raises DataError and ConfigError as `evaluate` does."""
    return _questions(config, *_read(config, responses))


def _read(
    config: AlpacaEvalConfig, responses: Sequence[Path]
) -> tuple[dict[str, str], dict[str, Response], dict[str, str]]:
    """Instructions, responses and references by prompt id."""
    rows = read_table(config.questions, ["instruction"], config.limit)
    asked = {f"alpaca_eval-{index}": row["instruction"] for index, row in enumerate(rows)}
    answers = read_answers(responses)
    check_answers(answers, asked, "alpaca_eval")
    return asked, answers, _references(config, rows, asked)


def _questions(
    config: AlpacaEvalConfig, asked: Mapping[str, str], answers: Mapping[str, Response], references: Mapping[str, str]
) -> list[Question[float]]:
    template = config.templates()["pair"]
    return [_question(config, template, key, asked[key], references[key], answers[key].response) for key in asked]


def _references(
    config: AlpacaEvalConfig, rows: Sequence[Mapping[str, Any]], asked: Mapping[str, str]
) -> dict[str, str]:
    if config.baseline is None:
        if any(row.get("output") is None for row in rows):
            raise ConfigError(
                f"alpaca_eval: {config.questions} has no column output; set `baseline` to a file of answers"
            )
        return {key: str(row["output"]) for key, row in zip(asked, rows, strict=True)}
    answers = read_answers([local_path(config.baseline)])
    check_answers(answers, asked, config.baseline)
    return {key: answer.response for key, answer in answers.items()}


def _question(
    config: AlpacaEvalConfig, template: JudgeTemplate, prompt_id: str, instruction: str, reference: str, answer: str
) -> Question[float]:
    def is_swapped(attempt: int) -> bool:
        # Seeded by content, not by position: the order of rows in a file must not matter.
        return Random(f"{config.seed}:{prompt_id}:{text_key(answer)}:{attempt}").random() < 0.5

    def body(attempt: int, code: str) -> dict[str, Any]:
        first, second = (answer, reference) if is_swapped(attempt) else (reference, answer)
        values = {"instruction": instruction, "output_1": first, "output_2": second}
        more = {"logprobs": True, "top_logprobs": config.top_logprobs}
        return config.request(template.messages(values, code), **more)

    def read(reply: Reply, attempt: int, _code: str) -> float:
        ours, theirs = (FIRST, SECOND) if is_swapped(attempt) else (SECOND, FIRST)
        likeliest = [(top.token, top.logprob) for top in reply.choice.likeliest]
        return two_token_preference(likeliest, ours, theirs, config.top_logprobs)

    return Question(prompt_id, body, read)


def win_rates(
    comparisons: Sequence[JudgedAnswer], gamed: GamedBaselines | None, *, rounds: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Raw and length-controlled win rate of a model in percent, with uncertainty.

    Failed comparisons are excluded from both and counted. `values` holds each instruction's preference and weight, for
    paired comparisons of models. Raises DataError if `gamed` does not match these instructions.
    """
    judged = [each for each in comparisons if each.preference is not None]
    preferences = np.array([each.preference for each in judged], dtype=float)
    sums: Sums = {each.prompt_id: (float(each.preference or 0.0), 1.0) for each in judged}
    wins, losses = int(np.sum(preferences > 0.5)), int(np.sum(preferences < 0.5))
    return {
        "benchmark": "alpaca_eval",
        "questions": len(comparisons),
        "failed": counted(each.problem for each in comparisons if each.preference is None),
        "metrics": {
            "win_rate": bounded(ratio(sums, PERCENT), means(sums), 0, PERCENT).shown(
                wins=wins, losses=losses, draws=len(judged) - wins - losses
            ),
            "length_controlled_win_rate": _length_controlled(judged, preferences, gamed, rounds, seed),
        },
        "mean_length": float(np.mean([each.length_2 for each in comparisons])),
        "values": sums,
    }


def _length_controlled(
    judged: Sequence[JudgedAnswer], preferences: Any, gamed: GamedBaselines | None, rounds: int, seed: int
) -> dict[str, Any]:
    unknown = {"value": None, "standard_error": None, "low": None, "high": None, "n": len(judged)}
    if gamed is None:
        return unknown | {"problem": "needs `gamed_baselines`"}
    gamed.check_belong({each.index: each.length_1 for each in judged})
    lengths = np.array([(each.length_1, each.length_2) for each in judged], dtype=float).reshape(-1, 2)
    std_delta = standardized(lengths[:, 0], lengths[:, 1])
    if std_delta is None:
        return unknown | {"problem": "all answers differ from the reference's by the same length"}
    difficulty = np.array([gamed.difficulty[each.index] for each in judged])
    controlled = length_controlled(preferences, std_delta, difficulty, gamed, rounds=rounds, seed=seed)
    if controlled.coefficients.difficulty == 0 == controlled.coefficients.constant:
        # The prediction is then 50 %, whatever the judge preferred.
        problem = "undetermined: the penalty that cross-validation chose removed both difficulty and constant"
        return unknown | {"problem": problem}
    return replace(controlled, estimate=bounded(controlled.estimate, preferences, 0, PERCENT)).shown()
