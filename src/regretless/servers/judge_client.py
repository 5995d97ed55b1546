"""Asking a judge: the shared settings, the request, and the cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from regretless.core.errors import BudgetError, DataError
from regretless.core.secrets import revealed
from regretless.core.settings import DECIDED, Section
from regretless.core.terminal import console
from regretless.data.columns import Message
from regretless.servers.ask import Answers, Question, UnreadableError, ask_all, describe
from regretless.servers.reply import Reply
from regretless.servers.server_settings import ServerConfig

T = TypeVar("T")
THOUGHTS_END = "</think>"
OPTIONAL = ("temperature", "reasoning_effort")
"""Settings that are request parameters, unless they are null."""
RESERVED = {
    "model": "the judge's name has its own setting",
    "messages": "they are the question",
    "stream": "a reply is read as a whole",
    **dict.fromkeys(("n", "best_of"), "a request has one reply"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "set max_reply_tokens"),
}
"""Request parameters that nobody else may set, with the reason: the budget and the summary count on them."""


class JudgeAccess(Section):
    """Where a judge runs, how it is asked, and what happens to questions without a readable reply."""

    server: ServerConfig = ServerConfig()
    """Server that runs the judge, with limits on rate and budget."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of the judge; null sends none, which OpenAI's reasoning models require."""
    reasoning_effort: str | None = None
    """Reasoning effort of a judge that reasons: low, medium or high. The paper uses medium."""
    max_reply_tokens: int = Field(default=8192, ge=1)
    """Most tokens in a judge's reply, reasoning included. A reply that is cut cannot be read."""
    parameters: Annotated[dict[str, Any], DECIDED] = Field(default={})
    """Further request parameters, by the names that the server has for them; none that another setting determines."""
    attempts: int = Field(default=3, ge=1)
    """How often the judge is asked in all if its replies cannot be read; then the question counts as failed."""
    when_spent: Literal["stop", "go_on"] = "stop"
    """What happens when the budget is used up: `stop` ends the run, which resumes with a larger budget; `go_on` leaves
    the remaining questions unjudged."""
    replies: str | None = None
    """File in which the judge's replies are cached; several runs may share it. By default it lies next to the output
    folder."""

    @field_validator("parameters")
    @classmethod
    def _have_no_own_setting(cls, values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        with_settings = {name: f"set {name} itself" for name in (*OPTIONAL, "top_logprobs") if name in cls.model_fields}
        if "top_logprobs" in with_settings:
            with_settings["logprobs"] = "the answers are read from them"
        server = info.data.get("server")
        limit = {server.limit_parameter: "set max_reply_tokens"} if server is not None else {}
        reasons = RESERVED | with_settings | limit
        refused = [f"{name} ({reasons[name]})" for name in values if name in reasons]
        secret = [name for name, value in values.items() if revealed(value) != value]
        refused += [f"{name} (server.api_key_env names the variable with the key)" for name in secret]
        if refused:
            raise ValueError(f"expected parameters without a setting of their own; remove {', '.join(refused)}")
        return values

    @property
    @abstractmethod
    def judge_name(self) -> str:
        """Name of the judge on its server."""

    def request(self, messages: Sequence[Message], **more: Any) -> dict[str, Any]:
        """A request with the settings' parameters; unset ones are left to the server."""
        parameters = {name: value for name in OPTIONAL if (value := getattr(self, name)) is not None}
        limit = {self.server.limit_parameter: self.max_reply_tokens}
        return {"model": self.judge_name, "messages": list(messages), **parameters, **limit, **more, **self.parameters}

    def replies_file(self, output: Path) -> Path:
        """The reply cache: the file named in the settings, else one beside the folder `output`."""
        return Path(self.replies).expanduser() if self.replies else output.with_name(f"{output.name}.replies.sqlite")


def answer_of(reply: Reply) -> str:
    """What a judge answered. Raises UnreadableError for a reply that ended early."""
    if reply.finish_reason is not None and not reply.has_ended:
        raise UnreadableError(f"reply ended early: {reply.finish_reason}")
    # Some servers leave a reasoning model's thoughts in front of its answer, drafts of the answer included.
    return reply.content.rpartition(THOUGHTS_END)[2]


def ask_judge(config: JudgeAccess, questions: Sequence[Question[T]], output: Path) -> Answers[T]:
    """Ask a judge all questions; a reply that stays unreadable after all attempts has no value, and a reason.

    Replies are cached beside the folder `output`, or in `config.replies`; a note counts those of another address, where
    another model may have this name. `check_judged` raises what stopped it.
    """
    answers = ask_all(
        questions,
        config=config.server,
        model=config.judge_name,
        most_tokens=config.max_reply_tokens,
        attempts=config.attempts,
        replies=config.replies_file(output),
        description="judge",
    )
    for address, count in sorted(answers.elsewhere.items()):
        console.print(
            f"judge {config.judge_name}: {count} stored replies are of {address}, and this judge is at "
            f"{config.server.named_address}; if another model has this name there, set `replies` to a new file"
        )
    return answers


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
    """Raise what stopped the asking, except for a spent budget if the settings accept that.

    done, total, what: progress and its unit, for the message. failed: number of failures by reason.
    Refused questions are shown by an example of each reason.
    Raises BudgetError or ServerError, after which the next run resumes; DataError if nothing is done, or the server
    refuses everything.
    """
    examples = "".join(f"\n  for example {first}" for first in answers.refusals.values())
    refused = examples + _advice(config) if examples and not done else ""
    if examples and done:
        console.print(f"judge {config.judge_name}: the server refused some questions{examples}")
    stopped, so_far = answers.stopped, f"{done} of {total} {what}"
    if isinstance(stopped, BudgetError) and config.when_spent == "go_on" and done:
        console.print(f"budget spent ({stopped}): {so_far}")
    elif stopped is not None:
        resumes = f"; the replies are cached in {config.replies_file(output)}, and the same command resumes from there"
        raise type(stopped)(
            f"judge {config.judge_name}: {stopped}\n  {so_far} so far ({describe(config.server, answers.spent)})"
            # A DataError: the server refuses everything, so there are no replies.
            + ("" if isinstance(stopped, DataError) else resumes)
            + ("; raise the budget first" if isinstance(stopped, BudgetError) else "")
            + refused
        )
    elif not done:
        reasons = ", ".join(f"{reason} {count}" for reason, count in failed.items())
        raise DataError(f"judge {config.judge_name}: none of {total} {what}: {reasons}{refused}")


def _advice(config: JudgeAccess) -> str:
    """What to set if the server refuses a parameter."""
    settings = [f"another server.limit_parameter ({config.server.limit_parameter})"]
    settings += [f"{name}: null" for name in OPTIONAL if getattr(config, name) is not None]
    settings += [f"parameters without it ({', '.join(config.parameters)})"] * bool(config.parameters)
    return f"\n  for a parameter that the server does not accept, set {' or '.join(settings)}"


def bill(config: JudgeAccess, answers: Answers[Any]) -> dict[str, Any]:
    """Cost of asking a judge, and the failures, as JSON values."""
    spent = answers.spent
    most = spent.most_cost(config.server) if spent.unreported_tokens else None
    return {
        "judge": config.judge_name,
        "requests": spent.requests,
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "dollars": spent.cost(config.server),
        # Only where it differs: some replies were lost, or the server did not say what they used.
        **({} if most is None else {"dollars_at_most": most}),
        "replies_reused": answers.reused,
        "replies_unreadable": dict(sorted(answers.unreadable.items())),
        "requests_repeated": dict(sorted(answers.trouble.items())),
    }
