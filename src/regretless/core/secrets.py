"""Secrets in settings, messages and files: which they are, and texts and values without them.

A secret is known by its key (`hub_token`, `api-key`), by its form (`user:password@` in an address, `hf_…`), or by its
value, once this process has seen it under such a key or in such a variable of the environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import SecretStr

HIDDEN = "(hidden)"
SHORTEST = 8
"""Minimum length of a value that is hidden wherever it occurs: shorter ones (EMPTY, none) are words of other texts."""
TOKEN_LENGTH = 16
"""Minimum length of a value that is certainly a token, and no word of a text that somebody publishes."""
_KEY = re.compile(
    r"(api|access|private|secret|signing|encryption)_?key|secret|passw(or)?d|passphrase|credential|bearer|cookie"
    r"|(^|_)(auth|authorization|pat)$|(^|_)token$|authtoken$|accesstoken$|hubtoken$"
)
_NO_KEY = re.compile(
    r"(^|_)(pad|bos|eos|unk|sep|cls|mask|image|video|audio|boi|eoi|bot|eot|start|end|stop|special|prefix|middle|suffix"
    r"|begin|last|first|per|each|next|new|text|user|assistant|system|tool|think|extra|fill|decoder|vocab)_token$"
    r"|(_env|_id|_ids|_dir|_file|_path|_column)$"
)
_MORE_IN_ADDRESSES = ("key", "sig", "signature", "x_amz_signature", "x_goog_signature")
_TOKENS = (
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-[\w-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\bxox[abeoprs]-[\w-]{10,}|\bAIza[\w-]{35}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"
)
_FORMS = re.compile(rf"{_TOKENS}|(?<=\bBearer )[\w.~+/-]{{8,}}=*")
_USER = re.compile(r"(?<=://)(?:[^\s/?#@'\"]+|[^\s/?#@:'\"]+:[^\s@'\"]+)@")
"""User and password of an address; an unescaped slash in the password would end the host for a parser."""
_IN_ADDRESS = re.compile(r"(?<=[?&#;])([\w.-]+)=([^\s&#;'\"]+)")
_PAIR = re.compile(r"""([\w.-]*[A-Za-z][\w-]*)(["']?\s*=\s*|["']\s*:\s*)("[^"]*"|'[^']*'|[^\s"',;&#(){}\[\]]+)""")
_seen: set[str] = set()


class Secret(SecretStr):
    """A setting's value that files and messages must not show; JSON of settings leaves it out (`core.settings`)."""

    def __init__(self, value: str) -> None:
        super().__init__(value)
        if len(value) >= SHORTEST:
            _seen.add(value)

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        # In the process that it is sent to, it is known too.
        return Secret, (self.get_secret_value(),)


MASK = str(Secret("-"))
"""What pydantic writes for it."""


@lru_cache(maxsize=4096)  # every piece of a message asks about every variable of the environment
def is_secret(key: str) -> bool:
    """True if a setting, an argument or a variable of this name holds a secret."""
    # camelCase, kebab-case and snake_case are one name.
    last = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.rpartition(".")[2].lstrip("-")).replace("-", "_").lower()
    return _KEY.search(last) is not None and _NO_KEY.search(last) is None


def kept_secret(key: str, value: Any, above: tuple[int, ...] = ()) -> Any:
    """A setting's value with each text under the key of a secret as a `Secret`, inside mappings and lists too.

    above: ids of the mappings and lists around it; one that contains itself is refused later, as it is.
    """
    if id(value) in above:
        return value
    if isinstance(value, Mapping):
        return {name: kept_secret(str(name), item, (*above, id(value))) for name, item in value.items()}
    if isinstance(value, list):
        return [kept_secret(key, item, (*above, id(value))) for item in value]
    return Secret(value) if isinstance(value, str) and is_secret(key) else value


def revealed(value: Any) -> Any:
    """The value with its secrets as texts, for the code that uses them."""
    if isinstance(value, Mapping):
        return {key: revealed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revealed(item) for item in value]
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def storable(value: Any) -> Any:
    """JSON of settings as it may be stored: without entries that are secrets, and with those in addresses hidden."""
    if isinstance(value, Mapping):
        return {key: storable(item) for key, item in value.items() if not (item == MASK and is_secret(str(key)))}
    if isinstance(value, list):
        return list(map(storable, value))
    return _without_forms(value) if isinstance(value, str) else value


def without_secrets(values: Any) -> Any:
    """Arguments of a library with None in place of each secret text, inside mappings too; others stay as they are."""
    if not isinstance(values, dict):
        return values
    return {
        key: None if isinstance(item, str) and is_secret(str(key)) else without_secrets(item)
        for key, item in values.items()
    }


def has_secret(text: str) -> bool:
    """True for a text with a token by its form, or one that this process knows: no such text may be published.

    More certain than what `hide` hides: a word of other texts is none.
    """
    known = any(len(value) >= TOKEN_LENGTH and value in text for value in _known())
    return known or re.search(_TOKENS, text) is not None


def hide(text: str) -> str:
    """A message without secrets, whatever part of it was a setting, an address or the output of another program."""
    return _PAIR.sub(_pair, _without_forms(hide_known(text)))


def names_secret(text: str) -> bool:
    """True for a text with a value behind the name of a secret (`hub_token=…`), or a password in an address."""
    addressed = _IN_ADDRESS.sub(_parameter, _USER.sub(f"{HIDDEN}@", text))
    return _PAIR.sub(_pair, addressed) != text


def hide_known(text: str) -> str:
    """A text without the secrets that this process has seen, and those of its environment; nothing else changes."""
    if len(text) < SHORTEST or text.isspace():
        return text  # most pieces of a table are padding
    for value in _known():
        for form in {value, json.dumps(value)[1:-1]}:
            text = text.replace(form, HIDDEN)
    return text


def _known() -> set[str]:
    return _seen | {value for name, value in os.environ.items() if len(value) >= SHORTEST and is_secret(name)}


def _without_forms(text: str) -> str:
    return _FORMS.sub(HIDDEN, _IN_ADDRESS.sub(_parameter, _USER.sub(f"{HIDDEN}@", text) if "://" in text else text))


def _parameter(match: re.Match[str]) -> str:
    name = match[1].replace("-", "_").lower()
    return f"{match[1]}={HIDDEN}" if is_secret(name) or name in _MORE_IN_ADDRESSES else match[0]


def _pair(match: re.Match[str]) -> str:
    plain = match[3].lower() in ("none", "null", "true", "false")
    return f"{match[1]}{match[2]}{HIDDEN}" if is_secret(match[1]) and not plain else match[0]
