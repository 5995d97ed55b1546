"""The interface of a verifier: a full check that may use slow libraries, and a quick one without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from regretless.core.text_cleaning import is_clean
from regretless.data.columns import Verdict
from regretless.data.schema import GoldAnswer

FAILED = "verifier failed"
"""How the reason begins if the verifier raised an exception."""
DIED = "verifier died"
"""How the reason begins if the verifier ended its process."""


@dataclass(frozen=True)
class Check:
    """Result of comparing one response with its gold answer."""

    verdict: Verdict
    reason: str
    """A fixed phrase, so that it can be counted; details follow after a colon."""
    extracted: str | None = None
    """Text that was taken as the response's answer."""


def check_problem(outcome: object) -> str | None:
    """What is wrong with the result of a verifier's function, or None."""
    if not isinstance(outcome, Check):
        return f"returned {outcome!r:.100}; return a Check(verdict, reason, extracted)"
    if outcome.verdict not in list(Verdict):
        return f"returned a Check with verdict {outcome.verdict!r:.100}; expected one of {', '.join(Verdict)}"
    if not isinstance(outcome.reason, str):
        return f"returned a Check with reason {outcome.reason!r:.100}; expected a text"
    if not isinstance(outcome.extracted, str | None):
        return f"returned a Check with extracted {outcome.extracted!r:.100}; expected a text or None"
    for name, text in (("reason", outcome.reason), ("extracted", outcome.extracted or "")):
        if not is_clean(text):
            return (
                f"returned a Check with {name} {text!r:.100}; expected whole characters, not halves of surrogate pairs"
            )
    return None


@dataclass(frozen=True)
class Verifier:
    """Two functions of (response, gold answer), or of (response, gold answer, prompt) if `with_prompt` is true.

    The gold answer is a text (a number as text), or the list or object that the user's file has there.
    """

    check: Callable[..., Check]
    """Decides any row. Runs in a worker process, which imports it by module and name, so it is a function at the top of
    a module. It may raise, hang or crash its process: that row's verdict is then unknown. The stage ends with an error
    if it returns something other than a Check, or raises on every row. Slow imports belong in the module's `warm_up()`,
    which a worker calls before its first row, outside the row's time limit."""
    quick: Callable[..., Check | None] = lambda *question: None
    """Decides some rows in bounded time without heavy imports, as `check` would; None leaves the row to `check`."""
    with_prompt: bool = False
    """Whether the functions take the prompt, too: a text, or a list of messages with `role` and `content`."""
    gold_problem: Callable[[GoldAnswer], str | None] = lambda gold: None
    """Why the functions cannot grade for a gold answer, or None: a row with such an answer is rejected."""
