"""What the documentation says, held against the code: links, commands, tables and the Python example of training."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from regretless.cli import verbs
from regretless.cli.app import app
from regretless.core import errors, interrupt
from regretless.core.errors import RegretlessError
from regretless.modeling.load import ModelConfig, load_model
from regretless.objectives import OBJECTIVES
from regretless.runs.recipe import Recipe, load_recipe, section_type
from regretless.runs.stages import STAGES
from regretless.studies.study import load_study
from regretless.world.tokenizer import build_tokenizer

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")])
RECIPES = sorted(PROJECT.glob("recipes/**/*.yaml"))
STUDIES = sorted(PROJECT.glob("studies/*.yaml"))
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
"""Target of a Markdown link."""
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def name(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def page(name: str) -> str:
    return (PROJECT / "docs" / f"{name}.md").read_text(encoding="utf-8")


# --- links -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_a_page_when_followed_then_they_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(target)
    assert not broken, f"{name(page)}: {broken}"


def test_index_of_the_docs_when_read_then_it_lists_every_page() -> None:
    index = PROJECT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    missing = [name(page) for page in PAGES if page.parent != PROJECT and page != index and page not in listed]
    assert not missing, f"docs/README.md: no link to {', '.join(missing)}"


# --- commands --------------------------------------------------------------------------------------------------------


def test_messages_when_they_name_a_page_then_by_an_address_that_exists() -> None:
    """A wheel has no docs/: a message that names a file there leads nowhere."""
    files, named = [], set[str]()
    for file in sorted((PROJECT / "src").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        descriptions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in descriptions and "docs/" in str(node.value):
                files.append(f"{file.name}:{node.lineno}: {node.value!r:.80}")
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "page"
                and isinstance(node.args[0], ast.Constant)
            ):
                named.add(str(node.args[0].value))
    assert not [line for line in files if ".md" in line]
    assert len(named) > 4 and not [name for name in named if not (PROJECT / "docs" / f"{name}.md").is_file()]


TOOLS = ("make", "python", "torchrun", "regretless", ".venv/bin/regretless")
"""First words of the commands that are checked."""


def commands(path: Path) -> Iterator[list[str]]:
    """Shell commands of a page (indented or fenced blocks) or of a recipe's comments, as words, in order."""
    prefix = r"# +" if path.suffix == ".yaml" else r"(?: {4})?"
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(rf"^{prefix}(\S.*)$", text, re.MULTILINE):
        first = line.split(maxsplit=1)[0]
        if first in TOOLS:
            # A remark behind a command stands apart from it.
            command = re.split(r"\s{2,}", line)[0]
            yield from (shlex.split(part, comments=True) for part in command.split("&&"))


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str | None]:
    """Says what is wrong with a command, or None. The command line parses it, and then nothing is run."""

    def check_run(recipe: Path, overrides: Sequence[str], **_: object) -> None:
        load_recipe(recipe, overrides)

    def check_study(study: Path, overrides: Sequence[str], **_: object) -> None:
        load_study(study, overrides)

    def check_stage(request: verbs.Request) -> None:
        kind = section_type(Recipe.model_fields[request.verb].annotation)
        # What these need beside their settings comes from flags.
        if kind is not None and request.verb not in ("sample", "evaluate"):
            request.section(kind)

    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(verbs, "run", check_run)
    monkeypatch.setattr(verbs, "plan", check_run)
    monkeypatch.setattr(verbs, "study", check_study)
    monkeypatch.setattr(verbs, "compare", lambda *_, **__: None)
    monkeypatch.setattr(verbs, "stage", check_stage)
    for command_of in ("watch.watch_training", "publish.push", "publish.merge"):
        monkeypatch.setattr(f"regretless.cli.{command_of}", lambda *_, **__: None)

    def check(command: list[str]) -> str | None:
        tool, *rest = command
        if tool == "make":
            targets = re.findall(r"^([\w-]+):", Path("Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            return None if rest[0] in targets else "no such target"
        if tool == "python":
            return None if rest[0] == "-m" or Path(rest[0]).is_file() else "no such script"
        if tool == "torchrun" and "regretless" in rest:
            tool, rest = "regretless", rest[rest.index("regretless") + 1 :]
        if rest and rest[0].endswith("-completion"):
            return None  # depends on the shell that runs the tests
        if tool.endswith("regretless"):
            result = CliRunner().invoke(app, rest)
            return None if result.exit_code == 0 else f"{result.output} {result.exception}"
        return None

    return check


@pytest.mark.parametrize("page", [*PAGES, *RECIPES, *STUDIES], ids=name)
def test_commands_of_a_page_when_parsed_then_they_can_be_run(
    page: Path, problem: Callable[[list[str]], str | None]
) -> None:
    found = [(shlex.join(command), problem(command)) for command in commands(page)]
    assert not [f"{command}: {what}" for command, what in found if what]


def test_commands_when_collected_then_none_is_overlooked(problem: Callable[[list[str]], str | None]) -> None:
    """A page without a command passes the test above: so these have to be found."""
    found = [command for page in [*PAGES, *RECIPES] for command in commands(page)]
    assert {command[1] for command in found if command[0].endswith("regretless")} >= {
        "run",
        "verify",
        "pair",
        "inspect",
        "train",
    }
    assert {command[0] for command in found} >= set(TOOLS)
    assert problem(["regretless", "verify", "--respones", "in.jsonl"]) is not None
    assert problem(["regretless", "pair", "max_corect=3"]) is not None
    assert problem(["regretless", "run", "recipes/quickstart.yaml", "train.lerning_rate=1"]) is not None
    assert problem(["regretless", "run", "recipes/quickstart.yaml", "train.learning_rate=1"]) is None


def test_step_of_every_recipe_when_divided_by_the_gpus_of_a_usual_node_then_each_gets_whole_pairs() -> None:
    recipes = [path for path in RECIPES if path.parent.name != "base" and path.name != "quickstart.yaml"]
    assert len(recipes) > 10
    for path in recipes:
        train = load_recipe(path).train
        assert train is not None
        for method, gpus in itertools.product({*train.objectives, *train.methods}, (1, 2, 4, 8, 16, 32)):
            arguments = train.batch_arguments(method, gpus)
            pairs = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * gpus
            assert pairs == train.step_pairs(method, gpus) >= 32, (path, method, gpus)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_released_settings_when_listed_then_they_are_those_in_which_the_recipes_differ() -> None:
    def flat(value: Any, key: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {key: value}
        return {name: leaf for part in value for name, leaf in flat(value[part], f"{key}.{part}".strip(".")).items()}

    section = (PROJECT / "docs/paper.md").read_text().split("\n## What the `-released`")[1].split("\n## ")[0]
    compared: set[str] = set()
    for table in section.split("\n\n| setting ")[1:]:
        header, _, *lines = table.splitlines()
        family, *others = re.findall(r"`([\w-]+)`", header)
        compared |= set(others)
        differ: set[str] = set()
        for path in (path for folder in others for path in (PROJECT / "recipes" / folder).glob("*.yaml")):
            released, paper = (
                flat(load_recipe(file).model_dump(mode="json", exclude_unset=True))
                for file in (path, PROJECT / "recipes" / family / path.name)
            )
            differ |= {key for key in released.keys() | paper.keys() if released.get(key) != paper.get(key)}
        listed = {name for line in lines for name in re.findall(r"`([\w.]+)`", line.split("|")[1])}
        assert listed == differ - {"name"}
    papers = {"base", "math", "ultrafeedback"}
    assert compared == {path.name for path in (PROJECT / "recipes").iterdir() if path.is_dir()} - papers


def test_table_of_methods_when_read_then_it_has_a_page_for_every_objective_in_the_order_of_the_code() -> None:
    section = page("README").split("\n## Methods\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| \[[^\]]+\]\(methods/(\w+)\.md\) \|", section, re.MULTILINE)
    assert listed == list(OBJECTIVES), f"docs/README.md, Methods: expected rows for {', '.join(OBJECTIVES)}"


def test_table_of_verbs_when_read_then_it_is_that_of_the_command_line() -> None:
    section = page("command_line").split("\n## ")[0]
    mentioned = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    mentioned |= set(re.findall(r"`regretless (\w+)`", section))
    shown = [command.callback for command in app.registered_commands if not command.hidden]
    assert mentioned == {callback.__name__ for callback in shown if callback}
    for stage in STAGES.values():
        row = f"| `{stage.name}` | {stage.reads} | {stage.makes} |"
        assert not stage.about or row in section, f"docs/command_line.md: the table should have\n{row}"


def test_exit_codes_when_read_then_they_are_those_of_the_code() -> None:
    section = page("command_line").split("## Exit codes")[1].split("\n## ")[0]
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RegretlessError)]
    assert len(kinds) >= 7
    codes = {0, interrupt.EXIT_CODE} | {kind.exit_code for kind in kinds}
    assert listed == sorted(codes), f"docs/command_line.md, Exit codes: expected rows for {sorted(codes)}, got {listed}"


def test_layout_when_read_then_every_part_of_the_package_is_in_it() -> None:
    text = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inside = set(re.findall(r"^  ([\w.]+/?) ", tree, re.MULTILINE))
    package = PROJECT / "src" / "regretless"
    parts = {path.name + "/" for path in package.iterdir() if (path / "__init__.py").is_file()}
    parts |= {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert inside == parts
    for top in re.findall(r"^([\w/]+)/ ", tree, re.MULTILINE):
        assert (PROJECT / top).is_dir(), top


# --- width of the prose ----------------------------------------------------------------------------------------------

WIDTH = 100
"""Columns of a line of prose."""
EXEMPT = re.compile(r"\||#|    |<|(\d+\. |[-*] )?(\S+|!?\[[^\]]*\]\([^)]*\)[.,;:]?)$")
"""Begins, or is, a line that cannot be broken: of a table, a heading, a code block, HTML, or one link or word alone."""


def too_wide(text: str) -> list[str]:
    """Lines of prose that are wider than `WIDTH`, with their numbers."""
    fenced = False
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and len(line) > WIDTH and not EXEMPT.match(line):
            found.append(f"line {number}, {len(line)} columns: {line[:40]}…")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_prose_of_a_page_when_measured_then_it_is_wrapped(page: Path) -> None:
    wide = too_wide(page.read_text(encoding="utf-8"))
    assert not wide, f"{name(page)}: wrap at {WIDTH} columns:\n" + "\n".join(wide)


def test_wide_lines_when_measured_then_only_prose_counts() -> None:
    long = "word " * 21
    link = f"[{long}](docs/page.md)"
    exempt = [f"| {long} |", f"## {long}", f"    {long}", f"```\n{long}\n```", link, f"- {link}.", "x" * 120]
    assert not [text for text in exempt if too_wide(text)]
    assert len(too_wide(f"{long}\n- {long}\n```\n{long}\n```\n{long}{link}")) == 3


# --- the Python example ----------------------------------------------------------------------------------------------


def test_python_example_of_training_when_run_then_it_leaves_a_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = EXAMPLE.findall(page("training"))
    # Local folders with the names of the example: it runs as it is printed, and nothing is downloaded.
    monkeypatch.chdir(tmp_path)
    (model,) = re.findall(r'PreferenceTrainer\("([^"]+)"', example)
    (data,) = re.findall(r'train_dataset="([^"]+)"', example)
    build_tokenizer().save_pretrained(model)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    start = load_model(ModelConfig(architecture={"model_type": "qwen3", **sizes, **heads}, tokenizer=model))
    start.save_pretrained(model)
    Path(data).mkdir(parents=True)
    rows = [
        {"prompt": f"Tom has {count} apples.", "chosen": f"{count}+1={count + 1}", "rejected": f"{count}-1={count - 1}"}
        for count in range(1, 9)
    ]
    (Path(data) / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    exec(compile(example, "training.md", "exec"), {})
    trained = AutoModelForCausalLM.from_pretrained("trained")
    moved = [
        weight
        for (key, weight), before in zip(trained.named_parameters(), start.parameters(), strict=True)
        if not weight.equal(before)
    ]
    assert moved
