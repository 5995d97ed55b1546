"""Settings of an OpenAI-compatible server: its address, rate limits and budget."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from regretless.core.errors import ConfigError
from regretless.core.secrets import HIDDEN, Secret
from regretless.core.settings import Section

VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
OPENAI_ADDRESS = "https://api.openai.com/v1"
"""Where the openai package sends requests by default."""


class ServerConfig(Section):
    """An OpenAI-compatible server: OpenAI's own, vLLM, SGLang, llama.cpp and others."""

    base_url: str | None = None
    """Address of the server, its API version included: http://localhost:8000/v1. By default $OPENAI_BASE_URL, else
    OpenAI's own server."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; never the key itself. By default OPENAI_API_KEY if
    `base_url` is not given, and no key if it is, so that a recipe from elsewhere cannot send your OpenAI key to its own
    server."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests that wait for a reply at the same time."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests started per minute, evenly spaced, retries included; no limit by default."""
    timeout_seconds: float = Field(default=300, gt=0)
    """Seconds after which a request without a complete reply is retried."""
    max_tries: int = Field(default=8, ge=1)
    """How often a request is sent at most, until its question counts as failed. Retried are the status codes 429 and
    5xx, time-outs, dropped connections and replies that are not valid."""
    retry_seconds: float = Field(default=0.5, gt=0)
    """Seconds before the first retry. The wait doubles with every further retry, up to a minute, and has a random part.
    A longer wait that the server asks for (Retry-After) is respected."""
    max_requests: int | None = Field(default=None, ge=1)
    """Budget: most requests sent, including retries and earlier runs with the same cached replies; no limit by
    default."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Budget: most tokens read and written, including earlier runs with the same cached replies. A request that might
    exceed it is not sent. No limit by default."""
    prompt_price: float | None = Field(default=None, ge=0)
    """Dollars per million tokens read. If `completion_price` is given too, the cost so far is shown."""
    completion_price: float | None = Field(default=None, ge=0)
    """Dollars per million tokens written, reasoning included."""
    limit_parameter: str = "max_completion_tokens"
    """Name of the request parameter that limits the tokens of a chat reply; older servers use `max_tokens`."""

    @model_validator(mode="before")
    @classmethod
    def _hide_secrets(cls, values: Any) -> Any:
        """Hide keys that were written into the settings by mistake from error messages."""
        if values is None or isinstance(values, ServerConfig):
            return values
        if not isinstance(values, Mapping):
            return HIDDEN
        return {
            name: value if name in cls.model_fields and _may_show(name, value) else HIDDEN
            for name, value in values.items()
        }

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        if not _is_variable_name(value):
            raise ValueError("expected the name of an environment variable in capitals, like OPENAI_API_KEY, not a key")
        return value

    @field_validator("base_url", "base_urls", mode="before", check_fields=False)
    @classmethod
    def _has_no_secret(cls, value: Any) -> Any:
        if not _are_plain_urls(value):
            raise ValueError(
                "expected an http(s) address without user, password, query or fragment, like http://localhost:8000/v1"
            )
        return value

    @property
    def address(self) -> str | None:
        """Address of the server; None for OpenAI's own."""
        return self.base_url or os.environ.get("OPENAI_BASE_URL") or None

    @property
    def named_address(self) -> str:
        """The address as a text, OpenAI's included."""
        return self.address or OPENAI_ADDRESS

    def api_key(self) -> str | None:
        """The key from the environment; None if no key is sent.

        Raises ConfigError if the variable that should hold it is empty or not set.
        """
        name = self.api_key_env
        if name is None:
            if self.base_url is not None:
                return None
            name = DEFAULT_KEY_VARIABLE
        key = os.environ.get(name, "").strip()
        if not key:
            raise ConfigError(
                f"server: the environment variable {name} is not set; put the API key there, or name another variable "
                "in api_key_env (for a local server without a key, set base_url)"
            )
        return Secret(key).get_secret_value()

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Dollars for these tokens; None if the prices are not set."""
        if self.prompt_price is None or self.completion_price is None:
            return None
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6


def _may_show(name: str, value: Any) -> bool:
    if name == "api_key_env":
        return _is_variable_name(value)
    return _are_plain_urls(value) if name.startswith("base_url") else True


def _is_variable_name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and VARIABLE_NAME.fullmatch(value) is not None)


def _are_plain_urls(value: Any) -> bool:
    """True if an address, or each of several by name, contains no secret."""
    return value is None or all(map(_is_plain_url, value.values() if isinstance(value, Mapping) else [value]))


def _is_plain_url(value: Any) -> bool:
    # Searches the whole text: a slash in a password would end what the parser reads as the host.
    if not isinstance(value, str) or any(mark in value for mark in "@?#"):
        return False
    try:
        parts = urlsplit(value)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
