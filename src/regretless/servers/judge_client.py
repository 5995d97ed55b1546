"""Asking a judge: the settings that all who ask one share, the request, and what the asking has cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from regretless.core.errors import BudgetError, DataError
from regretless.core.settings import Section
from regretless.core.terminal import console
from regretless.data.records import Message
from regretless.servers.ask import Answers, Question, UnreadableError, ask_all, describe
from regretless.servers.reply import Reply
from regretless.servers.server_settings import ServerConfig

T = TypeVar("T")
THOUGHTS_END = "</think>"


class JudgeAccess(Section):
    """Where a judge runs, how it is asked, and what becomes of questions that it leaves open."""

    server: ServerConfig = ServerConfig()
    """Where the judge runs, how fast to ask it, and the budget."""
    temperature: float | None = Field(default=None, ge=0)
    """Of the judge; null leaves it to the server, as OpenAI's reasoning models want it."""
    reasoning_effort: str | None = None
    """Of a judge that reasons: low, medium, high. The paper's is medium."""
    max_reply_tokens: int = Field(default=8192, ge=1)
    """Most tokens in a judge's reply, reasoning included; a reply that is cut cannot be read."""
    parameters: dict[str, Any] = Field(default={})
    """More parameters of a request, as the server takes them."""
    attempts: int = Field(default=3, ge=1)
    """How often a reply that cannot be read is asked for in all; then the question is counted as failed."""
    when_spent: Literal["stop", "go_on"] = "stop"
    """A used-up budget ends the run, to be taken up with a larger one, or leaves the rest unjudged."""
    replies: str | None = None
    """File of kept replies, which may be shared between runs; beside the output folder unless given."""

    @property
    @abstractmethod
    def judge_name(self) -> str:
        """Name of the judge on its server."""

    def request(self, messages: Sequence[Message], **more: Any) -> dict[str, Any]:
        """A request with the settings' parameters; those that are not set are left to the server."""
        optional = {"temperature": self.temperature, "reasoning_effort": self.reasoning_effort}
        given = {key: value for key, value in optional.items() if value is not None}
        limit = {self.server.limit_parameter: self.max_reply_tokens}
        return {"model": self.judge_name, "messages": list(messages), **given, **limit, **more, **self.parameters}

    def replies_file(self, output: Path) -> Path:
        """The file of kept replies: the one that the settings name, else one beside the folder `output`."""
        return Path(self.replies).expanduser() if self.replies else output.with_name(f"{output.name}.replies.sqlite")


def answer_of(reply: Reply) -> str:
    """What a judge answered. Raises UnreadableError for a reply that ended early."""
    if reply.finish_reason not in (None, "stop"):
        raise UnreadableError(f"reply ended early: {reply.finish_reason}")
    # Some servers leave a reasoning model's thoughts in front of its answer, drafts of the answer included.
    return reply.content.rpartition(THOUGHTS_END)[2]


def ask_judge(config: JudgeAccess, questions: Sequence[Question[T]], output: Path) -> Answers[T]:
    """Ask a judge all questions; what cannot be read after all attempts has no value, and a reason.

    Replies are kept beside the folder `output`, or in `config.replies`. `check_judged` raises what ended the asking.
    """
    return ask_all(
        questions,
        config=config.server,
        model=config.judge_name,
        most_tokens=config.max_reply_tokens,
        attempts=config.attempts,
        replies=config.replies_file(output),
        description="judge",
    )


def check_judged(
    config: JudgeAccess,
    answers: Answers[Any],
    output: Path,
    *,
    done: int,
    total: int,
    what: str,
    failed: Mapping[str, int],
) -> None:
    """Raise what ended the asking, but for a spent budget where the settings go on without.

    done, total, what: how far it got, and with what, for people. failed: why the others have nothing, counted.
    Raises BudgetError or ServerError, after which a further run goes on; DataError when nothing is done.
    """
    stopped, so_far = answers.stopped, f"{done} of {total} {what}"
    if isinstance(stopped, BudgetError) and config.when_spent == "go_on" and done:
        console.print(f"budget used up ({stopped}): {so_far}")
    elif stopped is not None:
        raise type(stopped)(
            f"judge {config.judge_name}: {stopped}\n  {so_far} so far ({describe(config.server, answers.spent)}); the "
            f"replies are kept in {config.replies_file(output)}, and a further run goes on from there"
            + ("; raise the budget first" if isinstance(stopped, BudgetError) else "")
        )
    elif not done:
        reasons = ", ".join(f"{reason} {count}" for reason, count in failed.items())
        raise DataError(f"judge {config.judge_name}: none of {total} {what}: {reasons}")


def bill(config: JudgeAccess, answers: Answers[Any]) -> dict[str, Any]:
    """What asking a judge has cost and what went wrong on the way, as JSON."""
    spent = answers.spent
    return {
        "judge": config.judge_name,
        "requests": spent.requests,
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "dollars": config.server.cost(spent.prompt_tokens, spent.completion_tokens),
        "replies_reused": answers.reused,
        "replies_unreadable": dict(sorted(answers.unreadable.items())),
        "requests_repeated": dict(sorted(answers.trouble.items())),
    }
