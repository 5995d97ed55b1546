"""Questions to a judge, and the outcome of asking them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from regretless.core.intervals import Estimate, Sums, within
from regretless.evaluation.chat.chat_settings import ChatBenchmarkConfig
from regretless.evaluation.chat.judge_prompts import JudgeTemplate
from regretless.servers.ask import Answers, Question
from regretless.servers.judge_client import answer_of, ask_judge, check_judged
from regretless.servers.reply import Reply

T = TypeVar("T")
REMINDER = "\n\nYour answer must end with the verdict in the form that was asked for, in double square brackets."
"""Added after a reply without a verdict: a deterministic judge would otherwise repeat its reply."""


def ask_for_verdict(
    config: ChatBenchmarkConfig,
    label: str,
    template: JudgeTemplate,
    values: Mapping[str, str],
    parse: Callable[[str, str | None], T],
) -> Question[T]:
    """A question whose reply contains a verdict. parse: reads it from the reply's text and the code, if any."""

    def body(attempt: int, code: str) -> dict[str, Any]:
        messages = template.messages(values, code)
        if attempt > 1:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + REMINDER}
        return config.request(messages)

    def read(reply: Reply, _attempt: int, code: str) -> T:
        return parse(answer_of(reply), code if template.uses_code else None)

    return Question(label, body, read)


def ask_all_judgments(config: ChatBenchmarkConfig, questions: Sequence[Question[T]], output: Path) -> Answers[T]:
    """Ask the judge all questions; a reply that stays unreadable after all attempts has no value, and a reason.

    Replies are cached beside the folder `output`, or in `config.replies`. Raises BudgetError or ServerError if asking
    ended early (the next run resumes), DataError if no reply could be read.
    """
    answers = ask_judge(config, questions, output)
    done = sum(answer.value is not None for answer in answers.answers)
    what = "judgments could be read"
    check_judged(config, answers, output, done=done, total=len(questions), what=what, failed=failures(answers))
    return answers


def bounded(estimate: Estimate, outcomes: Iterable[float], low: float, high: float) -> Estimate:
    """An estimate on a scale from `low` to `high`: its interval ends there, and is unknown if nothing determines it.

    A t-interval of few questions can reach beyond the scale. outcomes: one for each question; if all are equal, nothing
    is known of how they vary, and the interval would have no width. The standard error stays as it is.
    """
    return estimate._replace(interval=within(estimate.interval, list(outcomes), low, high))


def means(sums: Sums) -> list[float]:
    """The mean outcome of each question."""
    return [total / weight for total, weight in sums.values()]


def failures(answers: Answers[Any]) -> dict[str, int]:
    """Number of failed judgments by reason."""
    return counted(answer.problem for answer in answers.answers if answer.value is None)


def counted(reasons: Iterable[str | None]) -> dict[str, int]:
    """Number of occurrences of each reason, sorted by reason."""
    return dict(sorted(Counter(reason or "unknown" for reason in reasons).items()))
