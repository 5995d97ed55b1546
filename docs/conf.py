"""Settings of Sphinx for the documentation site (`make docs`).

The pages are plain Markdown that GitHub shows as well. README.md is the index of both: navigation and llms.txt are read
from its tables, so a page is listed in one place.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/regretless/regretless"
SITE = "https://regretless.github.io/regretless"

project = "regretless"
author = "The regretless developers"
project_copyright = author
extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "README"
exclude_patterns = ["make_*.py"]
html_theme = "furo"
html_title = "regretless"
html_baseurl = SITE + "/"
html_sourcelink_suffix = ""
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
    "navigation_with_keys": True,
}
myst_heading_anchors = 4
# A line that begins with a percent sign would be a comment, and be left out; on GitHub it is text.
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]
# Notebooks show the outputs that they were committed with; tests/test_notebooks.py executes them.
nb_execution_mode = "off"
# A page whose code blocks stand for a terminal has no language; words like `regretless run` are no Python.
highlight_language = "none"

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
"""A Markdown link: opening, target without anchor, anchor, closing."""


class Entry(NamedTuple):
    """A page in the index: its path in docs/, the text of its link, and what the index says of it."""

    path: str
    title: str
    about: str


def entries(index: str) -> Iterator[tuple[str, list[Entry]]]:
    """The sections of the index with the pages in the first column of their tables, in order."""
    for section in index.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        rows = re.findall(r"^\| \[([^\]]+)\]\(([^)#\s]+)\) \| (.*) \|$", body, re.MULTILINE)
        found = [Entry(path, title, about) for title, path, about in rows if not path.startswith("..")]
        if found:
            yield heading, found


def navigation(index: str) -> str:
    """Toctrees for Sphinx: one for each section of the index."""
    blocks = []
    for heading, pages in entries(index):
        names = [f"{page.title} <{page.path.rsplit('.', 1)[0]}>" for page in pages]
        blocks.append("\n".join(["```{toctree}", ":hidden:", f":caption: {heading}", "", *names, "```"]))
    return "\n\n".join(blocks)


def llms_text(index: str, summary: str) -> str:
    """The text of llms.txt (llmstxt.org): the index, with links to the sources of the pages."""
    lines = [f"# {project}", "", f"> {summary}", ""]
    for heading, pages in entries(index):
        lines += [f"## {heading}", ""]
        for page in pages:
            # Links inside a description lead from docs/; here the words are enough.
            about = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page.about)
            lines.append(f"- [{page.title}]({SITE}/_sources/{page.path}): {about}")
        lines.append("")
    return "\n".join(lines)


def on_github(folder: Path, text: str) -> str:
    """The text with links to files outside of docs/, and to files that are no pages, as addresses on GitHub."""

    def replace(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups(default="")
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = (folder / target).resolve()
        if file.is_relative_to(DOCS) and file.suffix in (".md", ".ipynb", ".svg", ".png"):
            return match[0]
        kind = "tree" if file.is_dir() else "blob"
        return f"{start}{REPOSITORY}/{kind}/main/{file.relative_to(DOCS.parent).as_posix()}{anchor}{end}"

    return LINK.sub(replace, text)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(name))
    if path.suffix == ".md":
        source[0] = on_github(path.parent, source[0])
        if name == app.config.root_doc:
            source[0] += "\n\n" + navigation(source[0]) + "\n"


def _finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        out = Path(app.outdir)
        shutil.copy(out / f"{app.config.root_doc}.html", out / "index.html")
        index = (DOCS / "README.md").read_text(encoding="utf-8")
        summary = " ".join(index.split("\n\n")[1].split())
        (out / "llms.txt").write_text(llms_text(index, summary), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("build-finished", _finish)
