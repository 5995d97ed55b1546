"""The documentation's site: built without a warning, navigation in the order of the index, search, llms.txt."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"
GITHUB = "https://github.com/regretless/regretless/blob/main/"


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """`make docs`, into another folder."""
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "--doctree-dir", str(out / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(out / "site")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_site_when_built_then_there_is_no_warning_and_every_page_is_in_its_place(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    start = (site / "index.html").read_text(encoding="utf-8")
    captions = re.findall(r'class="caption-text">([^<]*)<', start)
    order = ["Tutorials", "How-to guides", "Reference", "Methods", "Settings", "Explanation", "The paper"]
    assert captions == order
    sidebar = re.findall(r'class="toctree-l1"><a class="reference internal" href="([^"#]+)"', start)
    pages = {file.relative_to(DOCS).with_suffix(".html").as_posix() for file in DOCS.rglob("*.md")}
    notebooks = {file.relative_to(DOCS).with_suffix(".html").as_posix() for file in DOCS.rglob("*.ipynb")}
    assert set(sidebar) == (pages | notebooks) - {"README.html"} and len(sidebar) == len(set(sidebar))
    # Files outside of docs/ are no pages of the site.
    assert f'href="{GITHUB}CONTRIBUTING.md"' in start
    assert "sigmoid" in (site / "searchindex.js").read_text(encoding="utf-8")


def test_llms_text_when_built_then_it_lists_the_source_of_every_page(tmp_path: Path) -> None:
    site = runpy.run_path(str(DOCS / "conf.py"))
    text = site["llms_text"]((DOCS / "README.md").read_text(encoding="utf-8"), "Summary.")
    assert text.startswith("# regretless\n\n> Summary.\n\n## Tutorials\n\n- [First run](https://")
    listed = re.findall(rf"^- \[[^\]]+\]\({site['SITE']}/_sources/([^)]+)\): \S", text, re.MULTILINE)
    here = {file.relative_to(DOCS).as_posix() for kind in ("*.md", "*.ipynb") for file in DOCS.rglob(kind)}
    assert set(listed) == here - {"README.md"}


def small_site(folder: Path, page: str) -> Path:
    """The sources of a site with one page beside the index."""
    folder.mkdir()
    shutil.copy(DOCS / "conf.py", folder)
    index = "# Index\n\nSummary.\n\n## Pages\n\n| page | content |\n|---|---|\n| [Page](page.md) | a page |\n"
    (folder / "README.md").write_text(index, encoding="utf-8")
    (folder / "page.md").write_text(page, encoding="utf-8")
    return folder


def test_plain_markdown_when_built_then_no_line_is_lost(tmp_path: Path) -> None:
    source = small_site(tmp_path / "docs", "# Page\n\nright in 20\n% of its responses\n\n+++ more\n\n(name)=\n{a}`b`\n")
    done = build(source, tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "site" / "page.html").read_text(encoding="utf-8")
    assert all(part in text for part in ("% of its responses", "+++ more", "(name)=", "{a}<code"))


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("# Page\n\n[gone](missing.md)\n", "missing.md"),
        ("# Page\n\n[gone](README.md#missing)\n", "missing"),
        ("# Page\n\n### Too deep\n", "H1 to H3"),
    ],
)
def test_fault_of_a_page_when_planted_then_the_build_fails(tmp_path: Path, page: str, said: str) -> None:
    done = build(small_site(tmp_path / "docs", page), tmp_path)
    assert done.returncode != 0 and said in done.stderr


def test_page_of_the_python_api_when_written_again_then_it_is_the_same() -> None:
    assert runpy.run_path(str(DOCS / "make_api.py"))["page"]() == (DOCS / "api.md").read_text(encoding="utf-8"), (
        "python docs/make_api.py writes it again"
    )
