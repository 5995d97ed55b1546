"""Rate limit for starting requests, and a budget for all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from regretless.core.errors import BudgetError
from regretless.servers.server_settings import ServerConfig


@dataclass
class Spending:
    """Usage of a server."""

    requests: int = 0
    """Requests sent, retries included."""
    prompt_tokens: int = 0
    """Prompt tokens, as the server reported them."""
    completion_tokens: int = 0
    """Completion tokens, as the server reported them, reasoning included."""
    charged_tokens: int = 0
    """Tokens counted against the budget: reported ones, and the upper bound where a reply was lost in transit."""

    @property
    def unreported_tokens(self) -> int:
        """Upper bound on the tokens of replies that were lost, or came without a plausible `usage`."""
        return self.charged_tokens - self.prompt_tokens - self.completion_tokens

    def cost(self, config: ServerConfig) -> float | None:
        """Dollars for the reported tokens; None if the prices are not set, or if the server reported none."""
        if self.unreported_tokens and not self.prompt_tokens + self.completion_tokens:
            return None
        return config.cost(self.prompt_tokens, self.completion_tokens)

    def most_cost(self, config: ServerConfig) -> float | None:
        """Dollars that it can have cost at most, unreported tokens included; None if the prices are not set."""
        reported = config.cost(self.prompt_tokens, self.completion_tokens)
        # Nobody knows which of them were read and which were written.
        more = [config.cost(self.unreported_tokens, 0), config.cost(0, self.unreported_tokens)]
        return None if reported is None else reported + max(dollars or 0.0 for dollars in more)

    def add(self, other: Spending, sign: int = 1) -> None:
        """Add another spending, or subtract it with the sign -1."""
        self.requests += sign * other.requests
        self.prompt_tokens += sign * other.prompt_tokens
        self.completion_tokens += sign * other.completion_tokens
        self.charged_tokens += sign * other.charged_tokens


class Pace:
    """Spreads request starts evenly, and delays all of them when the server asks for a pause."""

    def __init__(self, requests_per_minute: float | None) -> None:
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next = 0.0
        self._turn = asyncio.Lock()

    async def turn(self) -> None:
        """Wait until the next request may start; first come, first served."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            # Checked again after each sleep: a pause may have been requested in the meantime.
            while (wait := self._next - clock()) > 0:
                await asyncio.sleep(wait)
            self._next = clock() + self._interval

    def pause(self, seconds: float) -> None:
        """Start no request for `seconds`. Rate limits apply to the account, so the pause holds for all requests."""
        self._next = max(self._next, asyncio.get_running_loop().time() + seconds)


Ledger = Callable[[Spending, Callable[[Spending], None]], None]
"""Adds usage to the total of all processes that share a budget. The second argument is first called with the total so
far; if it raises, nothing is added. No other process can add anything in between."""


def _unshared() -> Ledger:
    """A ledger of one process."""
    total = Spending()

    def spend(spending: Spending, check: Callable[[Spending], None]) -> None:
        check(total)
        total.add(spending)

    return spend


class Budget:
    """Admits requests as long as they cannot exceed `max_requests` and `max_tokens`.

    Each request reserves its upper bound of tokens before it is sent, and releases what it did not use afterwards, so
    the budget holds whatever is in flight. The ledger has the reservation as usage, so it holds for all processes
    together. The reservations of a killed process remain there: its requests were sent, and may have been billed.
    """

    def __init__(
        self, config: ServerConfig, spent: Spending, ledger: Ledger | None = None, counted: Spending | None = None
    ) -> None:
        """`spent`: usage so far, updated as this process and others make requests, without this process's reservations.
        `ledger`: where usage is stored. `counted`: its total as far as `spent` includes it, updated as well."""
        self.config, self.spent = config, spent
        self._ledger = _unshared() if ledger is None else ledger
        self._counted = Spending() if ledger is None or counted is None else counted
        self._reserved = 0
        self._settled = asyncio.Condition()

    async def reserve(self, tokens: int) -> None:
        """Count a request that is about to be sent and uses at most `tokens`.

        Waits for this process's requests in flight if it might not fit beside them.
        Raises BudgetError if it exceeds the remaining budget.
        """
        async with self._settled:
            while True:
                try:
                    self._spend(Spending(requests=1, charged_tokens=tokens), lambda: self._check(tokens))
                except _NotNowError:
                    await self._settled.wait()
                else:
                    break
            self._reserved += tokens
            # The ledger keeps the reservation; here it is no usage yet.
            self.spent.charged_tokens -= tokens

    async def settle(self, tokens: int, used: Spending) -> None:
        """Release a reservation of `tokens` and count the actual usage instead."""
        async with self._settled:
            self._reserved -= tokens
            self.spent.charged_tokens += tokens
            self._spend(replace(used, charged_tokens=used.charged_tokens - tokens), lambda: None)
            self._settled.notify_all()

    def _check(self, tokens: int) -> None:
        limits, used = self.config, self.spent.charged_tokens
        if limits.max_tokens is not None and used + self._reserved + tokens > limits.max_tokens:
            if self._reserved:
                raise _NotNowError
            raise BudgetError(
                f"max_tokens={limits.max_tokens}: {used} are used, and the next request may need up to {tokens}"
            )
        if limits.max_requests is not None and self.spent.requests >= limits.max_requests:
            raise BudgetError(f"max_requests={limits.max_requests}: all are used")

    def _spend(self, spending: Spending, check: Callable[[], None]) -> None:
        def catch_up(total: Spending) -> None:
            others = replace(total)
            others.add(self._counted, -1)
            self._add(others)
            check()

        self._ledger(spending, catch_up)
        self._add(spending)

    def _add(self, spending: Spending) -> None:
        self.spent.add(spending)
        self._counted.add(spending)


class _NotNowError(Exception):
    """A request that may fit once requests in flight are settled."""
