"""Fixtures that several test folders use."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forked import PRELOAD
from regretless.runs.pipeline import run_recipe
from regretless.workflow.children import Children
from small_runs import small
from tiny_model import save_tiny_model

PROJECT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_name("golden.txt")
"""Every message that tests check by key and code, to be read as a whole."""
TOGETHER = {
    *("test_side_by_side", "test_stages_rounds", "test_token_numbers", "test_study", "test_package", "test_real_data"),
    *("test_report_accessibility", "test_explorer_browser"),
}
"""Files whose tests share what takes long to make: one process of pytest-xdist makes it once for all of them."""


MANY = 1000


def pytest_configure() -> None:
    """Let tests press Ctrl-C: a suite that a shell starts in the background would pass on that it is ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of some files together (`--dist loadgroup`), and begin with slow ones.

    At the end no process then waits for another that is in the middle of a long test.
    """
    for item in items:
        if item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what was imported from garbage collection, which would go through all of it again and again.

    Before many tests, also let the process that others are forked from import what all of them need: the first test
    that forks decides otherwise, and it may need little.
    """
    gc.collect()
    gc.freeze()
    if os.environ.get("PYTEST_XDIST_WORKER") and len(session.items) > MANY:
        Children(PRELOAD).import_ahead()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real data that is not part of the project: $REGRETLESS_SHARED, else `shared` beside the project.

    Without it, the tests that read it are skipped; with CI set they fail, so that they cannot be lost unnoticed.
    """
    folder = Path(os.environ.get("REGRETLESS_SHARED") or PROJECT.parent / "shared")
    if not folder.is_dir():
        message = f"no shared data at {folder}; set REGRETLESS_SHARED to the folder that holds it"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def real_models() -> Path:
    """Folder of pretrained models, which `make test-real` makes; treated as `shared` where it is missing."""
    folder = Path(os.environ.get("REGRETLESS_MODELS") or "models")
    if not (folder / "smollm2-135m" / "config.json").is_file():
        message = f"no pretrained models at {folder}; make test-real makes them"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all processes of this test session share; pytest-xdist gives each one within it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def golden() -> Iterator[Callable[[str, str], None]]:
    """(name, text): asserts that `golden.txt` has this text under the name. `make golden` writes the file anew."""
    blocks = (block.partition("\n") for block in GOLDEN.read_text(encoding="utf-8").rstrip().split("\n\n"))
    kept, found = {name: text for name, _, text in blocks}, dict[str, str]()
    is_new = bool(os.environ.get("REGRETLESS_GOLDEN"))

    def check(name: str, text: str) -> None:
        found[name] = text
        assert is_new or text == kept.get(name), f"not the text in {GOLDEN.name}; `make golden` writes it, to be read"

    yield check
    if is_new:
        GOLDEN.write_text("\n\n".join(f"{name}\n{text}" for name, text in found.items()) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model, to be read only; some test files have a `model` of their own."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def finished(session_folder: Path) -> Path:
    """Folder of a finished run of `small`, to be read only. The process that needs it first makes it for all."""
    folder = session_folder / "small" / "run"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # A second run would do no unit, but write the recipe again, while others copy the folder.
        if not os.fstat(file.fileno()).st_size:
            units = run_recipe(small(folder)).outcomes.keys()
            wanted = {"world", "pretrain/base", "sample", "train/dpo", "evaluate/repo/arithmetic/seed-41", "report"}
            assert wanted <= units
            file.write("done")
    return folder


def global_state() -> dict[str, Any]:
    """What tests of one process share, and a later test may depend on."""
    # pytest's own name of the test, and what scikit-learn sets once, when it is first imported.
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KMP_"))}
    state = {
        "os.environ": own,
        "working directory": str(Path.cwd()),
        "SIGINT handler": signal.getsignal(signal.SIGINT),
        "level of logging": logging.getLogger().level,
    }
    if (torch := sys.modules.get("torch")) is not None:
        state |= {"threads of torch": torch.get_num_threads(), "default dtype of torch": torch.get_default_dtype()}
    if (terminal := sys.modules.get("regretless.core.terminal")) is not None:
        state["file of the console"] = terminal.console._file
    return state


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Fail a test that leaves the process changed: the suite gives the same in any order."""
    before = global_state()
    yield
    after = global_state()
    changed = {name: (value, after[name]) for name, value in before.items() if after[name] != value}
    if "os.environ" in changed:
        old, new = changed["os.environ"]
        changed["os.environ"] = {
            key: (old.get(key), new.get(key)) for key in old.keys() | new.keys() if old.get(key) != new.get(key)
        }
    assert not changed, f"left changed: {changed}"
