"""What the environment says about the processes of a launcher."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest

from regretless.core.errors import ConfigError
from regretless.core.ranks import is_first_process, lost_process_error, processes


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    def set_all(values: Mapping[str, str]) -> None:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_processes_when_a_launcher_started_them_or_none_did_then_they_are_counted(
    set_environment: Callable[[Mapping[str, str]], None],
) -> None:
    for values, count, is_first in (
        ({}, 1, True),
        ({"WORLD_SIZE": "1"}, 1, True),
        ({"RANK": ""}, 1, True),
        ({"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}, 4, True),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, 4, False),
    ):
        set_environment(values)
        assert (processes(), is_first_process()) == (count, is_first), values


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE '', RANK unset, LOCAL_RANK unset"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE '2', RANK unset, LOCAL_RANK unset"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE '2', RANK '1', LOCAL_RANK unset"),
        ({"WORLD_SIZE": "2", "RANK": "one", "LOCAL_RANK": "0"}, "WORLD_SIZE '2', RANK 'one', LOCAL_RANK '0'"),
    ],
)
def test_processes_when_the_environment_says_half_then_one_line_says_what_is_missing_and_what_to_do(
    values: Mapping[str, str], found: str, set_environment: Callable[[Mapping[str, str]], None]
) -> None:
    set_environment(values)
    with pytest.raises(ConfigError, match=f"^environment: expected whole .* got {re.escape(found)}; start .* unset"):
        processes()


@pytest.mark.parametrize(
    ("count", "error", "is_lost"),
    [
        (
            "2",
            RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. GLH"),
            True,
        ),
        ("2", RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        ("1", RuntimeError("Connection reset by peer"), False),
        ("2", ConnectionResetError(104, "Connection reset by peer"), False),
        ("2", RuntimeError("shape mismatch"), False),
    ],
)
def test_error_when_another_process_has_ended_then_one_line_says_so(
    count: str, error: Exception, is_lost: bool, set_environment: Callable[[Mapping[str, str]], None]
) -> None:
    set_environment({"WORLD_SIZE": count, "RANK": "1", "LOCAL_RANK": "1"})
    found = lost_process_error(error)
    said = "process 1: another of the 2 processes has ended, killed or with an error of its own; the same command"
    assert str(found).startswith(said) if is_lost else found is None
