"""docs/tutorials/served_model.md up to its end: the commands of the page, and vLLM serves what they merged."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from regretless.world.problems import Generator

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program that runs the page's commands."""
    monkeypatch.syspath_prepend(str(PROJECT / "experiments"))
    import tutorial_minutes

    return tutorial_minutes


def test_sections_of_the_page_when_read_then_every_command_is_in_one_that_is_run(page: Any) -> None:
    found = page.sections()
    first, *_, last = found
    assert (first, last) == (page.INSTALL, page.SERVE)
    assert [len(blocks) for blocks in found.values()] == [1, 1, 1, 1, 1, 1, 2]
    assert f"--port {page.PORT}" in found[page.SERVE][0] and f":{page.PORT}/v1" in found[page.SERVE][1]
    assert "pip install regretless\n" in found[page.INSTALL][0]


def test_block_when_a_command_of_it_fails_then_the_rest_is_not_run_and_it_says_so(page: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 3 of[\s\S]*said before"):
        page.run_block("echo said before\n(exit 3)\ntouch after\n", tmp_path, os.environ)
    assert not (tmp_path / "after").exists()


def test_preference_file_of_the_example_when_written_then_right_answers_are_the_gold_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(PROJECT / "examples"))
    import own_file

    problems = [Generator((1, 4), 9).draw(random.Random(seed), set()) for seed in range(50)]
    for problem in problems:
        assert own_file.solution(problem.prompt).endswith(f"\\boxed{{{problem.answer}}}"), problem.prompt
    given = [problem.prompt for problem in problems if " gives " in problem.prompt]
    assert len(given) > 10
    wrong = [own_file.solution(prompt, gives="+") != own_file.solution(prompt) for prompt in given]
    assert all(wrong)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_model_of_the_tutorial_when_served_by_vllm_then_it_scores_as_the_adapter_did(page: Any, tmp_path: Path) -> None:
    vllm = os.environ.get("REGRETLESS_VLLM")
    if not vllm:
        pytest.skip("needs vLLM: `make test-engines`, or the Python of an environment that has it in REGRETLESS_VLLM")
    # In the place of a fresh environment, as tests/test_package.py makes one.
    (tmp_path / ".venv").symlink_to(sys.prefix)
    blocks = page.sections()
    said = {
        heading: "".join(page.run_block(block, tmp_path, os.environ) for block in blocks[heading])
        for heading in list(blocks)[1:-1]
    }
    assert [heading[:2] for heading in said] == ["2.", "3.", "4.", "5.", "6."]
    assert "Pass@1" in said["4. Evaluate"] and "merge: wrote merged" in said["5. Merge"]
    listed = said["6. Card and upload list"]
    assert "adapter_model.safetensors" in listed and "mine.jsonl" not in listed.partition("my-name/my-model")[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    first, second = (block.replace(page.PORT, port) for block in blocks[page.SERVE])
    with page.server(first, vllm, tmp_path, os.environ, port):
        page.run_block(second, tmp_path, os.environ)
    rows = {row["label"]: row for row in rows_of(tmp_path / "evaluated")}
    assert rows["dpo"]["gain_low"] > 0, rows
    trained = {label: row["value"] for label, row in rows.items()}
    (served,) = rows_of(tmp_path / "served")
    assert served["n"] == 200 and served["value"] == pytest.approx(trained["dpo"], abs=0.02)  # 4 of 200 answers
    assert trained["dpo"] > trained["base"] + 0.1


def rows_of(folder: Path) -> list[dict[str, Any]]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    rows: list[dict[str, Any]] = results["rows"]
    return rows
