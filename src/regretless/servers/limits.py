"""How fast requests may start, and how much they may cost together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from regretless.core.errors import BudgetError
from regretless.servers.server_settings import ServerConfig


@dataclass
class Spending:
    """What was used of a server."""

    requests: int = 0
    """Requests sent, retries included."""
    prompt_tokens: int = 0
    """Tokens read, as the server reported them."""
    completion_tokens: int = 0
    """Tokens written, as the server reported them, reasoning included."""
    charged_tokens: int = 0
    """Tokens counted against the budget: those reported, and the most possible where an answer was lost on its way."""

    def add(self, other: Spending) -> None:
        """Count another spending in."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.charged_tokens += other.charged_tokens


class Pace:
    """Spreads the starts of requests evenly, and holds all of them back when the server asks for a pause."""

    def __init__(self, requests_per_minute: float | None) -> None:
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next = 0.0
        self._turn = asyncio.Lock()

    async def turn(self) -> None:
        """Wait until the next request may start; first come, first served."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            # Asked again after each sleep: a pause may have come in meanwhile.
            while (wait := self._next - clock()) > 0:
                await asyncio.sleep(wait)
            self._next = clock() + self._interval

    def pause(self, seconds: float) -> None:
        """Start no request for so many seconds. A limit is the account's, so it holds for all requests."""
        self._next = max(self._next, asyncio.get_running_loop().time() + seconds)


class Budget:
    """Lets requests through as long as they cannot exceed `max_requests` and `max_tokens`.

    Each request reserves the most tokens that it can use before it is sent, and gives back what it did not use, so the
    budget holds whatever is under way.
    """

    def __init__(
        self, config: ServerConfig, spent: Spending, record: Callable[[Spending], None] = lambda spending: None
    ) -> None:
        """`spent`: what was used before, updated as requests are made. `record`: takes every change, to be kept."""
        self.config, self.spent = config, spent
        self._record = record
        self._reserved = 0
        self._settled = asyncio.Condition()

    async def reserve(self, tokens: int) -> None:
        """Count a request that is about to be sent and uses at most `tokens`.

        Waits for requests under way where it might not fit beside them.
        Raises BudgetError when it does not fit into what is left.
        """
        limits = self.config
        async with self._settled:
            while limits.max_tokens is not None and (
                self.spent.charged_tokens + self._reserved + tokens > limits.max_tokens
            ):
                if not self._reserved:
                    raise BudgetError(
                        f"max_tokens={limits.max_tokens}: {self.spent.charged_tokens} are used, and the next request "
                        f"may need up to {tokens}"
                    )
                await self._settled.wait()
            if limits.max_requests is not None and self.spent.requests >= limits.max_requests:
                raise BudgetError(f"max_requests={limits.max_requests}: all are used")
            self._reserved += tokens
            self._spend(Spending(requests=1))

    async def settle(self, tokens: int, used: Spending) -> None:
        """Give back a reservation of `tokens` and count what the request used instead."""
        async with self._settled:
            self._reserved -= tokens
            self._spend(used)
            self._settled.notify_all()

    def _spend(self, spending: Spending) -> None:
        self.spent.add(spending)
        self._record(spending)
