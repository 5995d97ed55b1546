"""What is published: wheel and sdist, built, checked, and used from an environment and a folder of their own."""

from __future__ import annotations

import email.message
import email.parser
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
ON_GITHUB = "https://github.com/regretless/regretless/blob/main/"
FILES_ON_GITHUB = "https://raw.githubusercontent.com/regretless/regretless/main/"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, made from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(PROJECT)], check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def contents(archive: Path) -> dict[str, bytes]:
    """Files of an archive by path; those of an sdist without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        members = [(member.name.partition("/")[2], sdist.extractfile(member)) for member in sdist.getmembers()]
        return {name: file.read() for name, file in members if file is not None}


def metadata(archive: Path) -> email.message.Message:
    (text,) = [
        data for name, data in contents(archive).items() if re.fullmatch(r"[^/]+\.dist-info/METADATA|PKG-INFO", name)
    ]
    return email.parser.BytesParser().parsebytes(text)


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=PROJECT, capture_output=True, check=True)
    return {name for name in os.fsdecode(listed.stdout).split("\0") if name and (PROJECT / name).exists()}


@pytest.mark.everyday
@pytest.mark.slow
def test_wheel_and_sdist_when_built_then_they_hold_every_file_and_their_metadata_is_complete(
    built: tuple[Path, Path],
) -> None:
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)], check=True)
    wheel, sdist = map(contents, built)
    for name in tracked("recipes", "studies", "examples"):
        here = (PROJECT / name).read_bytes()
        assert wheel.get(f"regretless/bundled/{name}") == here and sdist.get(name) == here, name
    for name in tracked("src"):
        assert wheel.get(name.removeprefix("src/")) == sdist.get(name) is not None, name
    tops = {name.partition("/")[0] for name in wheel}
    assert len(tops) == 2 and "regretless" in tops, tops

    for archive in built:
        fields = metadata(archive)
        assert fields["License-Expression"] == "Apache-2.0" and fields["License-File"] == "LICENSE"
        assert {url.partition(",")[0] for url in fields.get_all("Project-URL", [])} == {
            *("Homepage", "Documentation", "Changelog", "Issues")
        }
        assert fields["Author"] and fields["Keywords"] and len(fields.get_all("Classifier", [])) > 8
        assert set(fields.get_all("Provides-Extra", [])) == PYPROJECT["project"]["optional-dependencies"].keys()
    page = str(metadata(built[0]).get_payload())
    links = LINK.findall(page)
    assert sum(link.startswith(ON_GITHUB) for link in links) > 10
    (picture,) = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page)
    assert picture.startswith(FILES_ON_GITHUB) and (PROJECT / picture.removeprefix(FILES_ON_GITHUB)).is_file()
    for link in links:
        assert link.startswith(("https://", "#")), f"{link}: leads nowhere on PyPI"
        if link.startswith(ON_GITHUB):
            assert (PROJECT / link.removeprefix(ON_GITHUB).partition("#")[0]).exists(), link


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_when_installed_with_its_dependencies_then_it_works_in_an_empty_folder(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    venv, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [venv / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", built[0]], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    link_dependencies(packages)
    subprocess.run([*pip, "check"], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def regretless(*words: str) -> str:
        done = subprocess.run(
            [venv / "bin" / "regretless", *words],
            cwd=work,
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    assert metadata(built[0])["Version"] == regretless("--version").strip()
    assert "quickstart" in regretless("--help")
    listed = {(row["kind"], row["name"]): Path(row["path"]) for row in json.loads(regretless("recipes", "--json"))}
    packaged = tracked("recipes", "studies")
    assert {name for kind, name in listed if kind != "examples"} == {
        name.partition("/")[2].removesuffix(".yaml") for name in packaged if "/base/" not in name
    }
    assert all(path.is_relative_to(venv) for path in listed.values())
    # Its base file is in the wheel, too.
    assert json.loads(regretless("plan", "math/qwen3-1.7b", "--json"))["recipe"] == "math-qwen3-1.7b"
    regretless("recipes", "--copy", "studies/table1-chat")
    assert (work / "recipes" / "base" / "ultrafeedback.yaml").is_file()
    regretless("quickstart", "--smoke", "train.objective=repo")
    assert (work / "runs" / "quickstart-smoke" / "report" / "report.html").stat().st_size > 10_000


def link_dependencies(packages: Path) -> None:
    """Link what the package declares that it needs, and nothing else that is installed here: pip takes minutes."""
    left: list[tuple[str, str]] = [("regretless", "")]
    done = set()
    while left:
        name, extra = left.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        distribution = importlib.metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                left += [(requirement.name, more) for more in ("", *requirement.extras)]
        if name != "regretless":
            for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
                here = Path(str(distribution.locate_file(top)))
                if here.exists() and not (packages / top).exists():
                    (packages / top).symlink_to(here)


def test_table_of_extras_when_read_then_it_is_that_of_the_package() -> None:
    page = (PROJECT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.split("<!-- extras -->\n")[1].split("<!-- /extras -->", maxsplit=1)[0]
    listed = re.findall(r"^\| `([\w-]+)` \| \S", table, re.MULTILINE)
    assert sorted(listed) == sorted(PYPROJECT["project"]["optional-dependencies"])
