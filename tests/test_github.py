"""GitHub's files: workflows, forms of issues, updates, citation. They are valid, and workflows can be trusted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[1]
TOOLS = Path(sys.executable).parent
SCHEMA = (TOOLS / "check-jsonschema", "--builtin-schema")
ZIZMOR = (TOOLS / "zizmor", "--offline", "--persona", "auditor", "--no-progress")
LINTERS: list[tuple[str, tuple[Path | str, ...]]] = [
    (".github/workflows/*.yml", (*SCHEMA, "vendor.github-workflows")),
    (".github/workflows/*.yml", ZIZMOR),
    (".github/dependabot.yml", (*SCHEMA, "vendor.dependabot")),
    (".github/dependabot.yml", ZIZMOR),
    (".github/ISSUE_TEMPLATE/[!c]*.yml", (*SCHEMA, "vendor.github-issue-forms")),
    (".github/ISSUE_TEMPLATE/config.yml", (*SCHEMA, "vendor.github-issue-config")),
    ("CITATION.cff", (*SCHEMA, "vendor.citation-file-format")),
]
"""Which files each command checks."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files, to plant faults in."""
    shutil.copytree(PROJECT / ".github", tmp_path / ".github")
    shutil.copy(PROJECT / "CITATION.cff", tmp_path)
    return tmp_path


def problems(folder: Path, only: str | None = None) -> str:
    """What the linters find in the files of a folder, or in one of them; empty if nothing."""
    found = ""
    for pattern, command in LINTERS:
        files = [file for file in sorted(folder.glob(pattern)) if only is None or file == folder / only]
        assert files or only is not None, pattern
        if files:
            done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
            found += "" if done.returncode == 0 else done.stdout + done.stderr
    return found


def test_files_when_linted_then_nothing_is_found() -> None:
    assert problems(PROJECT) == ""


@pytest.mark.parametrize(
    ("file", "right", "wrong", "said"),
    [
        (".github/workflows/ci.yml", "runs-on:", "run-on:", "run-on"),
        (".github/workflows/publish.yml", "@dc37677b2e1c63e2034f94d8a5b11f265b73ba33", "@v1.14.2", "unpinned-uses"),
        (".github/workflows/docs.yml", "persist-credentials: false", "clean: true", "artipacked"),
        (".github/workflows/publish.yml", "permissions:\n  contents: read", "permissions: write-all", "permissions"),
        (".github/ISSUE_TEMPLATE/bug.yml", "type: textarea", "type: text", "'textarea'"),
        ("CITATION.cff", "license: Apache-2.0", "license: Apache", "license"),
    ],
)
def test_fault_when_planted_then_it_is_found(copy: Path, file: str, right: str, wrong: str, said: str) -> None:
    text = (copy / file).read_text(encoding="utf-8")
    assert right in text
    (copy / file).write_text(text.replace(right, wrong, 1), encoding="utf-8")
    assert said in problems(copy, file)


def test_publishing_when_read_then_only_a_tag_reaches_pypi_and_without_a_token() -> None:
    text = (PROJECT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text and "password" not in text
    for name in ("pypi", "testpypi"):
        assert jobs[name]["permissions"] == {"id-token": "write"} and jobs[name]["needs"] == "build"
        assert jobs[name]["environment"]["name"] == name
        (publish,) = (step for step in jobs[name]["steps"] if "gh-action-pypi-publish" in step["uses"])
        assert publish["with"]["attestations"] is True
        assert ("repository-url" in publish["with"]) == (name == "testpypi")
    assert jobs["pypi"]["if"] == "github.event_name == 'push'"
    assert yaml.safe_load(text)[True]["push"] == {"tags": ["v*"]}, "YAML reads `on` as true"
