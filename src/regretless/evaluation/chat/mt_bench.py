"""MT-Bench: two-turn questions in eight categories, each answer rated from 1 to 10 by a judge.

Zheng et al., Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena (arXiv:2306.05685).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from regretless.core.errors import ConfigError, DataError
from regretless.core.intervals import Sums, ratio
from regretless.data.columns import Response
from regretless.data.prompts import TEMPLATES, PromptRow
from regretless.evaluation.chat.chat_settings import ChatBenchmarkConfig
from regretless.evaluation.chat.files import check_answers, read_answers, read_table
from regretless.evaluation.chat.judge_prompts import JudgeTemplate, Slots, load_templates
from regretless.evaluation.chat.judging import ask_all_judgments, ask_for_verdict, bounded, counted, means
from regretless.evaluation.chat.verdicts import HIGHEST, LOWEST, parse_rating
from regretless.servers.ask import Question
from regretless.servers.judge_client import bill

TEMPERATURES: Mapping[str, float] = {
    **dict.fromkeys(("writing", "roleplay"), 0.7),
    **dict.fromkeys(("extraction", "math", "coding", "reasoning"), 0.0),
    **dict.fromkeys(("stem", "humanities"), 0.1),
}
"""Temperature of the answers, by category."""
WITH_REFERENCE = ("math", "reasoning", "coding")
"""Categories in which the judge receives a reference answer."""
TURNS = (1, 2)
_ONE = {"question": ("question",), "answer": ("answer",)}
_BOTH = {name: (name,) for name in ("question_1", "answer_1", "question_2", "answer_2")}
TEMPLATE_SLOTS: Mapping[str, Slots] = {
    "single-v1": _ONE,
    "single-math-v1": _ONE | {"reference_1": ("ref_answer_1",)},
    "single-v1-multi-turn": _BOTH,
    "single-math-v1-multi-turn": _BOTH | {"reference_1": ("ref_answer_1",), "reference_2": ("ref_answer_2",)},
}
"""The judge's templates: name in the published file → content that it must include."""


class MtBenchConfig(ChatBenchmarkConfig):
    """MT-Bench. `questions` needs question_id, category and turns; the published judge_prompts.jsonl can be read."""

    file_settings: ClassVar[tuple[str, ...]] = ("questions", "judge_prompt", "references")

    benchmark: Literal["mt_bench"] = "mt_bench"
    """Name of the chat benchmark."""
    references: str | None = None
    """File with reference answers to the questions in math, reasoning and coding."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Most tokens in an answer. An answer that is cut is judged as it is, and counted."""
    max_reply_tokens: int = Field(default=2048, ge=1)
    """Most tokens in a judge's reply, reasoning included. A reply that is cut cannot be read."""

    def templates(self) -> dict[str, JudgeTemplate]:
        """Judge templates, by their names in the published file. Raises ConfigError for a file that cannot be used."""
        return load_templates("mt_bench", self.judge_prompt, TEMPLATE_SLOTS, ("[[", "]]"))


@dataclass(frozen=True)
class MtQuestion:
    """A question with two turns."""

    question_id: str
    category: str
    turns: tuple[str, str]
    references: tuple[str, str] | None
    """Reference answers, for categories that have them."""

    def prompt_id(self, turn: int) -> str:
        """Prompt id of a turn."""
        return f"mt_bench-{self.question_id}-turn-{turn}"

    @property
    def temperature(self) -> float:
        """Temperature for its answers."""
        return TEMPERATURES[self.category]


@dataclass(frozen=True)
class Grade:
    """The judge's rating of the answer to one turn."""

    question_id: str
    category: str
    turn: int
    rating: float | None
    """1 to 10; None if the judgment failed."""
    problem: str | None = None
    """Why the judgment failed."""


def read_questions(config: MtBenchConfig) -> list[MtQuestion]:
    """The questions with their references.

    Raises DataError for rows that cannot be used, ConfigError if a reference is missing.
    """
    rows = read_table(config.questions, ["question_id", "category", "turns"], config.limit)
    for row in rows:
        if row["category"] not in TEMPERATURES or len(row["turns"]) != len(TURNS):
            raise DataError(
                f"{config.questions}: question {row['question_id']}: expected two turns and a category out of "
                f"{', '.join(TEMPERATURES)}; got {len(row['turns'])} and {row['category']}"
            )
    references = _references(config.references) if config.references else {}
    needed = [str(row["question_id"]) for row in rows if row["category"] in WITH_REFERENCE]
    missing = [key for key in needed if key not in references]
    if missing:
        where = config.references or "`references` is not set"
        raise ConfigError(f"mt_bench: {len(missing)} question(s) without a reference, such as {missing[0]}: {where}")
    return [
        MtQuestion(key, row["category"], tuple(row["turns"]), references[key] if key in needed else None)
        for row in rows
        for key in [str(row["question_id"])]
    ]


def _references(where: str) -> dict[str, tuple[str, str]]:
    references = {}
    for row in read_table(where, ["question_id", "choices"]):
        try:
            first, second = row["choices"][0]["turns"]
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(f"{where}: question {row['question_id']}: expected choices with two turns") from error
        references[str(row["question_id"])] = (str(first), str(second))
    return references


def next_prompts(config: MtBenchConfig, responses: Sequence[Path]) -> dict[float, list[PromptRow]]:
    """Prompts to answer next, keyed by temperature: the first turns, then the second turns, then none.

    responses: all files of responses so far. A second prompt is the conversation so far, including the first answer.
    Raises DataError if the responses do not match the questions.
    """
    questions = read_questions(config)
    answers = read_answers(responses)
    if any(question.prompt_id(2) in answers for question in questions):
        return {}
    if answers:
        check_answers(answers, {question.prompt_id(1): question.turns[0] for question in questions}, "mt_bench")
    rows: dict[float, list[PromptRow]] = {}
    for question in questions:
        first = answers.get(question.prompt_id(1))
        turn = 1 if first is None else 2
        prompt = TEMPLATES[config.template](question.turns[0]) if first is None else _second_prompt(question, first)
        rows.setdefault(question.temperature, []).append(PromptRow(question.prompt_id(turn), prompt))
    return rows


def _second_prompt(question: MtQuestion, first: Response) -> list[dict[str, str]]:
    if isinstance(first.prompt, str):
        raise DataError(f"{first.origin}: the prompt is plain text; a second turn needs a conversation (messages)")
    first_answer = {"role": "assistant", "content": first.response}
    return [*first.prompt, first_answer, {"role": "user", "content": question.turns[1]}]


def evaluate(
    config: MtBenchConfig, responses: Sequence[Path], output: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Judge the responses to both turns; returns the result and the judgments, both as JSON values.

    Raises DataError if the responses do not match the questions (also if a second turn continues another first answer)
    or no judgment can be read, ConfigError for files that cannot be used, and the errors of `ask_all_judgments`.
    """
    questions, answers = _read(config, responses)
    turns = [(question, turn) for question in questions for turn in TURNS]
    judge_answers = ask_all_judgments(config, _questions(config, questions, answers), output)
    grades = [
        Grade(question.question_id, question.category, turn, answer.value, answer.problem)
        for (question, turn), answer in zip(turns, judge_answers.answers, strict=True)
    ]
    result = scores(grades)
    result["cut"] = sum(answer.finish_reason == "length" for answer in answers.values())
    judgments = [
        {**vars(grade), "attempts": answer.attempts, "reply": answer.key}
        for grade, answer in zip(grades, judge_answers.answers, strict=True)
    ]
    return result | bill(config, judge_answers), judgments


def judge_questions(config: MtBenchConfig, responses: Sequence[Path]) -> list[Question[float]]:
    """What the judge is asked about the responses. Raises DataError and ConfigError as `evaluate` does."""
    return _questions(config, *_read(config, responses))


def _read(config: MtBenchConfig, responses: Sequence[Path]) -> tuple[list[MtQuestion], dict[str, Response]]:
    """The questions, and the responses to both turns by prompt id."""
    questions = read_questions(config)
    answers = read_answers(responses)
    asked = {question.prompt_id(turn): question.turns[turn - 1] for question in questions for turn in TURNS}
    check_answers(answers, asked, "mt_bench")
    _check_turns(questions, answers)
    return questions, answers


def _questions(
    config: MtBenchConfig, questions: Sequence[MtQuestion], answers: Mapping[str, Response]
) -> list[Question[float]]:
    templates = config.templates()
    return [_question(config, templates, question, turn, answers) for question in questions for turn in TURNS]


def _check_turns(questions: Sequence[MtQuestion], answers: Mapping[str, Response]) -> None:
    for question in questions:
        first, second = (answers[question.prompt_id(turn)] for turn in TURNS)
        if second.prompt != _second_prompt(question, first):
            raise DataError(
                f"{second.origin}: this second turn does not continue the first answer in {first.origin}; "
                "sample both turns again"
            )


def _question(
    config: MtBenchConfig,
    templates: Mapping[str, JudgeTemplate],
    question: MtQuestion,
    turn: int,
    answers: Mapping[str, Response],
) -> Question[float]:
    first, second = (answers[question.prompt_id(each)].response for each in TURNS)
    values = {"question_1": question.turns[0], "answer_1": first, "question_2": question.turns[1], "answer_2": second}
    if turn == 1:
        values = {"question": question.turns[0], "answer": first}
    name = "single-math-v1" if question.references else "single-v1"
    if question.references:
        values |= {"reference_1": question.references[0], "reference_2": question.references[1]}
    template = templates[name if turn == 1 else f"{name}-multi-turn"]
    return ask_for_verdict(config, question.prompt_id(turn), template, values, parse_rating)


def scores(grades: Sequence[Grade]) -> dict[str, Any]:
    """Mean rating, by turn and by category, each with its uncertainty.

    The mean is over all judgments, as published; its error treats each question as one cluster, because the second
    answer builds on the first. Failed judgments are excluded and counted. `values` holds each question's sum and number
    of ratings.
    """
    parts = {"score": list(grades)}
    parts |= {f"turn_{turn}": [grade for grade in grades if grade.turn == turn] for turn in TURNS}
    for category in dict.fromkeys(grade.category for grade in grades):
        parts[f"category_{category}"] = [grade for grade in grades if grade.category == category]
    return {
        "benchmark": "mt_bench",
        "questions": len({grade.question_id for grade in grades}),
        "failed": counted(grade.problem for grade in grades if grade.rating is None),
        "metrics": {name: _mean(part) for name, part in parts.items()},
        "values": _sums(grades),
    }


def _mean(grades: Sequence[Grade]) -> dict[str, Any]:
    sums = _sums(grades)
    judgments = sum(grade.rating is not None for grade in grades)
    return bounded(ratio(sums), means(sums), LOWEST, HIGHEST).shown(judgments=judgments)


def _sums(grades: Sequence[Grade]) -> Sums:
    sums: dict[str, tuple[float, float]] = {}
    for grade in grades:
        if grade.rating is not None:
            total, count = sums.get(grade.question_id, (0.0, 0.0))
            sums[grade.question_id] = (total + grade.rating, count + 1)
    return sums
