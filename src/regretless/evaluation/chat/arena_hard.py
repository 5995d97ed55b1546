"""Arena-Hard v0.1: a judge's five-way verdicts between a model's answers and a baseline's, in both orders.

Li et al., From Crowdsourced Data to High-Quality Benchmarks (arXiv:2406.11939).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from regretless.core.errors import DataError
from regretless.core.intervals import NOTHING, PERCENT, Array, Estimate, Sums, from_samples, ratio, resamples
from regretless.data.columns import Response
from regretless.data.prompts import TEMPLATES, PromptRow
from regretless.evaluation.chat.chat_settings import ChatBenchmarkConfig
from regretless.evaluation.chat.files import check_answers, local_path, read_answers, read_table
from regretless.evaluation.chat.judge_prompts import JudgeTemplate, load_templates
from regretless.evaluation.chat.judging import ask_all_judgments, ask_for_verdict, bounded, counted, failures, means
from regretless.evaluation.chat.style_control import style_controlled, style_difference
from regretless.evaluation.chat.verdicts import FIVE_WAY, parse_label
from regretless.servers.ask import Question
from regretless.servers.judge_client import bill

STRONG_WEIGHT = 3.0
"""Weight of a verdict "much better"."""
MEANINGS = {2: "much_better", 1: "better", 0: "tie", -1: "worse", -2: "much_worse"}
SLOTS = {
    "question": ("question", "question_1", "QUESTION"),
    "answer_a": ("answer_a", "answer_1", "ANSWER_A"),
    "answer_b": ("answer_b", "answer_2", "ANSWER_B"),
}
VERDICTS = ("[[", "A>>B", "A>B", "A=B", "B>A", "B>>A")
ADVICE = (
    "; Arena-Hard's newer settings leave system_prompt to its code (utils/judge_utils.py): add it to the file, use "
    "the older config/judge_config.yaml, which has both, or leave judge_prompt out"
)


class ArenaHardConfig(ChatBenchmarkConfig):
    """Arena-Hard v0.1. `questions` needs the columns uid and prompt."""

    file_settings: ClassVar[tuple[str, ...]] = ("questions", "judge_prompt", "baseline")

    benchmark: Literal["arena_hard"] = "arena_hard"
    """Name of the chat benchmark."""
    baseline: str
    """File of answers to compare with: Arena-Hard's file of a model (gpt-4-0314.jsonl), or responses to the same
    prompts."""
    style_control: bool = True
    """Whether to also compute the win rate at equal length and markup."""

    def templates(self) -> dict[str, JudgeTemplate]:
        """Judge templates, as `pair`. Raises ConfigError for a file that cannot be used."""
        return load_templates("arena_hard", self.judge_prompt, {"pair": SLOTS}, VERDICTS, ADVICE)


@dataclass(frozen=True)
class Duel:
    """The two games of one question: verdicts from -2 to 2, positive for the model; None if a judgment failed."""

    prompt_id: str
    baseline_first: int | None
    """Verdict with the baseline's answer first."""
    model_first: int | None
    """Verdict with the model's answer first."""

    @property
    def verdicts(self) -> list[int]:
        """Both verdicts, or none: a single order would include the judge's position bias."""
        games = (self.baseline_first, self.model_first)
        return [game for game in games if game is not None] if None not in games else []


def next_prompts(config: ArenaHardConfig, responses: Sequence[Path]) -> dict[float, list[PromptRow]]:
    """Prompts to answer, keyed by temperature: all of them greedily, once."""
    if responses:
        return {}
    asked = _asked(config)
    return {0.0: [PromptRow(key, TEMPLATES[config.template](text)) for key, text in asked.items()]}


def _asked(config: ArenaHardConfig) -> dict[str, str]:
    rows = read_table(config.questions, ["uid", "prompt"], config.limit)
    return {f"arena_hard-{row['uid']}": row["prompt"] for row in rows}


def evaluate(
    config: ArenaHardConfig, responses: Sequence[Path], output: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Judge the responses; returns the result and the judgments, both as JSON values.

    Raises DataError if responses, baseline and questions do not match or no judgment can be read, ConfigError for
    files that cannot be used, and the errors of `ask_all_judgments`.
    """
    asked, answers, references = _read(config, responses)
    judge_answers = ask_all_judgments(config, _questions(config, asked, answers, references), output)
    games = list(zip(judge_answers.answers[::2], judge_answers.answers[1::2], strict=True))
    duels = [
        Duel(key, None if first.value is None else -first.value, second.value)
        for key, (first, second) in zip(asked, games, strict=True)
    ]
    result = win_rate(duels, rounds=config.bootstrap, seed=config.seed)
    if config.style_control:
        texts = {key: (answers[key].response, references[key]) for key in asked}
        controlled = at_equal_style(result["values"], texts, rounds=config.bootstrap, seed=config.seed)
        result["metrics"]["style_controlled_win_rate"] = controlled.shown()
    result["failed"] = failures(judge_answers)
    result["cut"] = sum(answer.finish_reason == "length" for answer in answers.values())
    judgments = [
        {**vars(duel), "problems": [game.problem for game in pair], "replies": [game.key for game in pair]}
        for duel, pair in zip(duels, games, strict=True)
    ]
    return result | bill(config, judge_answers), judgments


def judge_questions(config: ArenaHardConfig, responses: Sequence[Path]) -> list[Question[int]]:
    """What the judge is asked about the responses. Raises DataError and ConfigError as `evaluate` does."""
    return _questions(config, *_read(config, responses))


def _read(
    config: ArenaHardConfig, responses: Sequence[Path]
) -> tuple[dict[str, str], dict[str, Response], dict[str, str]]:
    """Questions, responses and the baseline's answers by prompt id."""
    asked = _asked(config)
    answers = read_answers(responses)
    check_answers(answers, asked, "arena_hard")
    return asked, answers, _references(config, asked)


def _questions(
    config: ArenaHardConfig, asked: Mapping[str, str], answers: Mapping[str, Response], references: Mapping[str, str]
) -> list[Question[int]]:
    template = config.templates()["pair"]
    questions = []
    for key, text in asked.items():
        response, reference = answers[key].response, references[key]
        questions.append(_question(config, template, f"{key} baseline first", text, reference, response))
        questions.append(_question(config, template, f"{key} model first", text, response, reference))
    return questions


def _references(config: ArenaHardConfig, asked: Mapping[str, str]) -> dict[str, str]:
    """The baseline's answers by prompt id, from this package's format or Arena-Hard's (by uid: the orders differ)."""
    path = local_path(config.baseline)
    rows = read_table(str(path), [])
    if "messages" not in rows[0]:
        answers = read_answers([path])
        check_answers(answers, asked, config.baseline)
        return {key: answer.response for key, answer in answers.items()}
    texts: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        try:
            question, answer = row["messages"][0]["content"], row["messages"][-1]["content"]["answer"]
            key = f"arena_hard-{row['uid']}"
        except (LookupError, TypeError) as error:
            raise DataError(f"{path}:{number}: expected uid, and messages that end with an answer") from error
        if key in asked and question != asked[key]:
            raise DataError(
                f"{path}:{number}: {row['uid']} answers a question that differs from the one in {config.questions}"
            )
        texts[key] = str(answer)
    missing = [key for key in asked if key not in texts]
    if missing:
        raise DataError(f"{path}: no answer to {len(missing)} question(s), such as {missing[0]}")
    return texts


def _question(
    config: ArenaHardConfig, template: JudgeTemplate, label: str, question: str, answer_a: str, answer_b: str
) -> Question[int]:
    values = {"question": question, "answer_a": answer_a, "answer_b": answer_b}
    return ask_for_verdict(config, label, template, values, lambda text, code: parse_label(text, FIVE_WAY, code))


def win_rate(duels: Sequence[Duel], *, rounds: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Win rate against the baseline in percent: the Bradley–Terry probability of winning a game.

    For two players this is the weighted share of games won: ties count half, "much better" three times. The interval
    resamples questions, because the two verdicts on a question are correlated; `published_low` and `published_high`
    resample single verdicts, as the leaderboard does.
    Questions without two verdicts are excluded and counted.
    """
    judged = {duel.prompt_id: duel.verdicts for duel in duels if duel.verdicts}
    sums: Sums = {key: _points(verdicts) for key, verdicts in judged.items()}
    return {
        "benchmark": "arena_hard",
        "questions": len(duels),
        "questions_left_out": len(duels) - len(judged),
        "metrics": {
            "win_rate": _bootstrapped(sums, [game for games in judged.values() for game in games], rounds, seed)
        },
        "verdicts": _named(judged),
        "values": sums,
    }


def _weight(verdict: int) -> float:
    return STRONG_WEIGHT if abs(verdict) == 2 else 1.0


def _points(verdicts: Sequence[int]) -> tuple[float, float]:
    won = sum(_weight(verdict) * (1 + np.sign(verdict)) / 2 for verdict in verdicts)
    return float(won), sum(map(_weight, verdicts))


def _bootstrapped(sums: Sums, verdicts: Sequence[int], rounds: int, seed: int) -> dict[str, Any]:
    if not sums:
        return NOTHING.shown(published_low=None, published_high=None)
    won, weights = _columns(sums)
    resampled = resamples(len(sums), rounds, seed)
    samples = PERCENT * (resampled @ won) / (resampled @ weights)
    estimate = from_samples(ratio(sums, PERCENT).value, len(sums), samples)
    estimate = bounded(estimate, means(sums), 0, PERCENT)
    # The leaderboard repeats a strong verdict three times and resamples all rows as if they were separate games.
    rows = np.array([sum(_weight(each) for each in verdicts if np.sign(each) == sign) for sign in (1, 0, -1)])
    resampled = np.random.default_rng(seed).multinomial(int(rows.sum()), rows / rows.sum(), size=rounds).astype(float)
    low, high = np.percentile(PERCENT * (resampled @ [1, 0.5, 0]) / rows.sum(), [2.5, 97.5])
    return estimate.shown(published_low=float(low), published_high=float(high))


def _columns(sums: Sums) -> tuple[Array, Array]:
    won, weights = np.array(list(sums.values()), dtype=float).T
    return won, weights


def _named(judged: Mapping[str, Sequence[int]]) -> dict[str, int]:
    counts = counted(MEANINGS[verdict] for verdicts in judged.values() for verdict in verdicts)
    return {name: counts.get(name, 0) for name in MEANINGS.values()}


def at_equal_style(sums: Sums, texts: Mapping[str, tuple[str, str]], *, rounds: int = 1000, seed: int = 0) -> Estimate:
    """Win rate in percent if the model's answers had the same length and markup as the baseline's.

    sums: `values` of `win_rate`. texts: answer of the model and of the baseline by prompt id.
    """
    if not sums:
        return NOTHING
    won, weights = _columns(sums)
    differences = style_difference([texts[key][0] for key in sums], [texts[key][1] for key in sums])
    estimate = style_controlled(won, weights, differences, rounds=rounds, seed=seed)
    return bounded(estimate, means(sums), 0, PERCENT)
