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
from regretless.core.estimates import NOTHING, Array, Estimate, Sums, from_samples, ratio, resamples
from regretless.data.prompts import TEMPLATES, PromptRow
from regretless.evaluation.chat.chat_settings import ChatBenchmarkConfig
from regretless.evaluation.chat.files import check_answers, local_path, read_answers, read_table
from regretless.evaluation.chat.judge_prompts import JudgeTemplate, load_templates
from regretless.evaluation.chat.judging import ask_all_judgments, ask_for_verdict, counted, failures
from regretless.evaluation.chat.style_control import style_controlled, style_difference
from regretless.evaluation.chat.verdicts import FIVE_WAY, parse_label
from regretless.servers.ask import Question
from regretless.servers.judge_client import bill

STRONG_WEIGHT = 3.0
"""A verdict "much better" counts as so many."""
MEANINGS = {2: "much_better", 1: "better", 0: "tie", -1: "worse", -2: "much_worse"}
SLOTS = {
    "question": ("question", "question_1", "QUESTION"),
    "answer_a": ("answer_a", "answer_1", "ANSWER_A"),
    "answer_b": ("answer_b", "answer_2", "ANSWER_B"),
}
VERDICTS = ("[[", "A>>B", "A>B", "A=B", "B>A", "B>>A")
ADVICE = (
    "; Arena-Hard's newer settings leave system_prompt to its code (utils/judge_utils.py): add it to the file, take "
    "the older config/judge_config.yaml, which has both, or leave judge_prompt out"
)
PERCENT = 100.0


class ArenaHardConfig(ChatBenchmarkConfig):
    """Arena-Hard v0.1. `questions` has uid and prompt."""

    file_settings: ClassVar[tuple[str, ...]] = ("questions", "judge_prompt", "baseline")

    benchmark: Literal["arena_hard"] = "arena_hard"
    """Name of the chat benchmark."""
    baseline: str
    """File of answers to compare with: Arena-Hard's file of a model (gpt-4-0314.jsonl), or responses to the same
    prompts."""
    style_control: bool = True
    """Whether to also compute the win rate at equal length and markup."""

    def templates(self) -> dict[str, JudgeTemplate]:
        """What the judge is shown, as `pair`. Raises ConfigError for a file that cannot be used."""
        return load_templates("arena_hard", self.judge_prompt, {"pair": SLOTS}, VERDICTS, ADVICE)


@dataclass(frozen=True)
class Duel:
    """The two games of one question: verdicts from -2 to 2, above 0 for the model; None where a judgment failed."""

    prompt_id: str
    baseline_first: int | None
    """The verdict when the baseline's answer was shown first."""
    model_first: int | None
    """The verdict when the model's answer was shown first."""

    @property
    def verdicts(self) -> list[int]:
        """Both verdicts, or none: one order alone would carry the judge's liking for a place."""
        games = (self.baseline_first, self.model_first)
        return [game for game in games if game is not None] if None not in games else []


def next_prompts(config: ArenaHardConfig, responses: Sequence[Path]) -> dict[float, list[PromptRow]]:
    """Prompts to be answered, by temperature: all of them greedily, once."""
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
    """Judge the responses; returns the result and the judgments, both JSON-able.

    Raises DataError when responses, baseline and questions do not belong together or no judgment can be read,
    ConfigError for files that cannot be used, and what asking the judge raises.
    """
    template = config.templates()["pair"]
    asked = _asked(config)
    answers = read_answers(responses)
    check_answers(answers, asked, "arena_hard")
    references = _references(config, asked)
    questions = []
    for key, text in asked.items():
        own, reference = answers[key].response, references[key]
        questions.append(_question(config, template, f"{key} baseline first", text, reference, own))
        questions.append(_question(config, template, f"{key} model first", text, own, reference))
    found = ask_all_judgments(config, questions, output)
    games = list(zip(found.answers[::2], found.answers[1::2], strict=True))
    duels = [
        Duel(key, None if first.value is None else -first.value, second.value)
        for key, (first, second) in zip(asked, games, strict=True)
    ]
    result = win_rate(duels, rounds=config.bootstrap, seed=config.seed)
    if config.style_control:
        texts = {key: (answers[key].response, references[key]) for key in asked}
        controlled = at_equal_style(result["values"], texts, rounds=config.bootstrap, seed=config.seed)
        result["metrics"]["style_controlled_win_rate"] = controlled.shown()
    result["failed"] = failures(found)
    result["cut"] = sum(answer.finish_reason == "length" for answer in answers.values())
    judgments = [
        {**vars(duel), "problems": [game.problem for game in pair], "replies": [game.key for game in pair]}
        for duel, pair in zip(duels, games, strict=True)
    ]
    return result | bill(config, found), judgments


def _references(config: ArenaHardConfig, asked: Mapping[str, str]) -> dict[str, str]:
    """Answers of the baseline by prompt id, from Arena-Hard's form (by uid: the files' orders differ) or ours."""
    path = local_path(config.baseline)
    rows = read_table(str(path), [])
    if "messages" not in rows[0]:
        answers = read_answers([path])
        check_answers(answers, asked, config.baseline)
        return {key: answer.response for key, answer in answers.items()}
    found: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        try:
            question, answer = row["messages"][0]["content"], row["messages"][-1]["content"]["answer"]
            key = f"arena_hard-{row['uid']}"
        except (LookupError, TypeError) as error:
            raise DataError(f"{path}:{number}: expected uid, and messages that end with an answer") from error
        if key in asked and question != asked[key]:
            raise DataError(f"{path}:{number}: {row['uid']} answers another question than that of {config.questions}")
        found[key] = str(answer)
    missing = [key for key in asked if key not in found]
    if missing:
        raise DataError(f"{path}: no answer to {len(missing)} question(s), such as {missing[0]}")
    return found


def _question(
    config: ArenaHardConfig, template: JudgeTemplate, label: str, question: str, answer_a: str, answer_b: str
) -> Question[int]:
    values = {"question": question, "answer_a": answer_a, "answer_b": answer_b}
    return ask_for_verdict(config, label, template, values, lambda text, code: parse_label(text, FIVE_WAY, code))


def win_rate(duels: Sequence[Duel], *, rounds: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Win rate against the baseline in percent: the Bradley–Terry probability of winning a game.

    With two players that is the weighted share of games won: ties count half, "much better" three times. The interval
    is from questions drawn anew, since a question's verdicts depend on each other; `published_low` and `published_high`
    are from verdicts drawn anew one by one, as the leaderboard has it.
    Questions without two verdicts are left out and counted.
    """
    judged = {duel.prompt_id: duel.verdicts for duel in duels if duel.verdicts}
    sums: Sums = {key: _points(verdicts) for key, verdicts in judged.items()}
    return {
        "benchmark": "arena_hard",
        "questions": len(duels),
        "questions_left_out": len(duels) - len(judged),
        "metrics": {"win_rate": _bootstrapped(sums, [each for one in judged.values() for each in one], rounds, seed)},
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
    drawn = resamples(len(sums), rounds, seed)
    samples = PERCENT * (drawn @ won) / (drawn @ weights)
    estimate = from_samples(ratio(sums, PERCENT).value, len(sums), samples)
    # The leaderboard repeats a strong verdict three times and draws from all rows as if they were games of their own.
    rows = np.array([sum(_weight(each) for each in verdicts if np.sign(each) == sign) for sign in (1, 0, -1)])
    drawn = np.random.default_rng(seed).multinomial(int(rows.sum()), rows / rows.sum(), size=rounds).astype(float)
    low, high = np.percentile(PERCENT * (drawn @ [1, 0.5, 0]) / rows.sum(), [2.5, 97.5])
    return estimate.shown(published_low=float(low), published_high=float(high))


def _columns(sums: Sums) -> tuple[Array, Array]:
    won, weights = np.array(list(sums.values()), dtype=float).T
    return won, weights


def _named(judged: Mapping[str, Sequence[int]]) -> dict[str, int]:
    counts = counted(MEANINGS[verdict] for verdicts in judged.values() for verdict in verdicts)
    return {name: counts.get(name, 0) for name in MEANINGS.values()}


def at_equal_style(sums: Sums, texts: Mapping[str, tuple[str, str]], *, rounds: int = 1000, seed: int = 0) -> Estimate:
    """Win rate in percent if the model's answers were as long and as marked up as the baseline's.

    sums: `values` of `win_rate`. texts: answer of the model and of the baseline by prompt id.
    """
    if not sums:
        return NOTHING
    won, weights = _columns(sums)
    differences = style_difference([texts[key][0] for key in sums], [texts[key][1] for key in sums])
    return style_controlled(won, weights, differences, rounds=rounds, seed=seed)
