"""Rules of the code base that no type checker knows."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
STAGES = {"sampling", "labeling", "analysis", "training", "reporting", "rounds", "world"}
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"studies"},
    {"runs"},
    {"evaluation", "rollouts"},
    STAGES,
    {"servers"},
    {"data"},
    {"modeling"},
    {"objectives"},
    {"workflow"},
    {"core"},
]
"""Folders of the package from top to bottom. Each imports only from layers below its own."""
RANK = {name: number for number, layer in enumerate(LAYERS) for name in layer}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    files = sorted((SOURCE / "regretless").rglob("*.py"))
    names = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in files]
    return {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in zip(names, files, strict=True)}


def imports(tree: ast.AST, *, of_types: bool = True) -> Iterator[str]:
    """Dotted names that a module imports anywhere; `from a import b` gives a, and a.b where that is a module.

    of_types: also those that only a type checker sees.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in inner if name in modules() or f"{name}.__init__" in modules())
        elif of_types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node, of_types=of_types)


def part(module: str) -> str:
    """The module's place in the table of layers: `regretless.training.batch` belongs to `training`."""
    return module.split(".")[1]


def is_upward(importer: str, imported: str) -> bool:
    """True if a module imports from a layer that is not below its own; the package's top is above all of them."""
    if imported == "regretless":
        return True
    inside = imported.startswith("regretless.") and part(imported) != part(importer)
    return inside and RANK[part(imported)] <= RANK[part(importer)]


def test_modules_when_they_import_each_other_then_only_from_layers_below() -> None:
    assert {part(name) for name in modules()} - {"__init__"} == RANK.keys(), "the table of layers is out of date"
    wrong = [
        f"{importer} imports {imported}"
        for importer, tree in modules().items()
        if part(importer) != "__init__"
        for imported in imports(tree)
        if is_upward(importer, imported)
    ]
    assert not wrong, "\n".join(wrong)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each reaches every other one through imports (strongly connected components)."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return [sorted(group) for group in groups if group]


def test_modules_when_they_import_each_other_then_no_circle_is_hidden_in_a_function() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    graph = {
        name: {
            module
            for imported in imports(tree, of_types=False)
            for module in (imported, f"{imported}.__init__")
            if module in modules() and module != name
        }
        for name, tree in modules().items()
    }
    wrong = circles(graph)
    assert not wrong, "imports in a circle, those in functions included: " + "; ".join(map(" ↔ ".join, wrong))


def test_objectives_when_imported_then_only_torch_and_settings_come_along() -> None:
    waiting = [name for name in modules() if part(name) == "objectives"]
    assert len(waiting) > 8
    seen: set[str] = set()
    foreign: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for imported in imports(modules()[name]):
            if imported.startswith("regretless"):
                waiting.append(imported if imported in modules() else f"{imported}.__init__")
            else:
                foreign.add(imported.split(".")[0])
    assert {part(name) for name in seen} == {"objectives", "core"}
    assert foreign - set(sys.stdlib_module_names) == {"torch", "pydantic", "pydantic_core"}


def test_public_names_when_defined_then_they_have_a_docstring() -> None:
    documented: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    missing: list[tuple[str, str]] = []

    def visit(node: ast.Module | ast.ClassDef, owner: str, module: str) -> None:
        for item in node.body:
            if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or item.name.startswith("_"):
                continue
            if ast.get_docstring(item):
                documented.setdefault(owner, set()).add(item.name)
            else:
                missing.append((module, f"{owner}.{item.name}".removeprefix(".")))
            if isinstance(item, ast.ClassDef):
                bases[item.name] = [base.id for base in item.bases if isinstance(base, ast.Name)]
                visit(item, item.name, module)

    for module, tree in modules().items():
        if not ast.get_docstring(tree):
            missing.append((module, "(module)"))
        visit(tree, "", module)

    def inherits_one(name: str) -> bool:
        owner, _, method = name.rpartition(".")
        return any(
            method in documented.get(base, set()) or inherits_one(f"{base}.{method}") for base in bases.get(owner, [])
        )

    assert sum(len(names) for names in documented.values()) > 100
    assert not [f"{module}: {name}" for module, name in missing if not inherits_one(name)]


def test_settings_when_declared_then_their_defaults_are_named() -> None:
    """A type checker takes a field of `Field(1)` for one that has to be given; `Field(default=1)` is clear to it."""
    wrong = [
        f"{name}: {ast.unparse(node)}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field" and node.args
    ]
    assert not wrong, "\n".join(wrong)


def test_files_when_written_then_under_another_name_first() -> None:
    """`core.files.atomic_path` is the one way to a file that others read."""
    wrong = [
        f"{name}: {ast.unparse(node)}"
        for name, tree in modules().items()
        if name != "regretless.core.files"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _writes(node, node.func)
    ]
    assert not wrong, "\n".join(wrong)


def _writes(call: ast.Call, function: ast.Attribute) -> bool:
    if function.attr in ("write_text", "write_bytes"):
        return True
    modes = [mode.value for mode in call.args[:1] if isinstance(mode, ast.Constant)]
    # The name that `with atomic_path(…) as temporary` gives.
    return function.attr == "open" and modes[:1] in (["w"], ["wb"]) and ast.unparse(function.value) != "temporary"


TESTS = Path(__file__).resolve().parent
OF_NO_MODULE = {
    "experiments/theory/test_objective_meets_theory.py": "an objective of the package against the theory",
    "experiments/theory/test_regret_meets_theory.py": "the package's measure of regret against the theory",
    "experiments/theory/test_theory_page.py": "docs/theory.md and the scripts that print it",
    "experiments/theory/test_worked_examples.py": "grid_world.py and two_decisions.py",
    "labeling/grading/test_unseen_answers.py": "answers of readers who had not seen the verifier",
    "core/test_token_numbers.py": "further numbers per token, from sampling to the loss",
    "objectives/test_objectives_baselines.py": "the published methods together",
    "objectives/test_objectives_trl.py": "all objectives that TRL has, next to TRL",
    "objectives/test_objectives_vectors.py": "all objectives, on published values",
    "test_architecture.py": "all modules",
    "test_benchmark_scripts.py": "the scripts in benchmarks/",
    "test_docs.py": "the documentation",
    "test_examples.py": "examples/slurm, kuberay, skypilot, and the Dockerfile",
    "test_file_faults.py": "every command on a full disk",
    "test_fuzz.py": "every command on bad input",
    "test_github.py": "GitHub's files, and CITATION.cff",
    "test_kill_sweep.py": "the program kill_sweep.py",
    "test_llamafactory_page.py": "docs/from_llamafactory.md",
    "test_notebooks.py": "docs/notebooks",
    "test_objective_pages.py": "docs/methods",
    "test_own_loop_page.py": "docs/own_loop.md",
    "test_package.py": "wheel, sdist, and an installation of them",
    "test_python_page.py": "docs/python.md",
    "test_real_data.py": "the path of docs/real_data.md",
    "test_real_model.py": "training and sampling on pretrained models",
    "test_recipes.py": "the files in recipes/",
    "test_served_tutorial.py": "the path of docs/tutorials/served_model.md",
    "test_site.py": "the documentation's site",
    "test_studies.py": "the files in studies/",
    "test_tutorials.py": "docs/tutorials",
}
"""Test files that concern no single module, and what they concern."""


def test_test_files_when_looked_for_then_they_lie_where_their_module_does() -> None:
    """`tests/<folder>/test_<module>.py`, with the folder's name before the module's or more behind it where wanted."""
    wrong = []
    files = {file.relative_to(TESTS) for file in TESTS.rglob("test_*.py")}
    for file in sorted(files):
        folder = file.parent
        code = TESTS.parent / folder if folder.parts[:1] == ("experiments",) else SOURCE / "regretless" / folder
        modules_there = {path.stem for path in code.glob("*.py")}
        stem = file.stem.removeprefix("test_")
        names = [stem, stem.removeprefix(f"{folder.name}_")]
        tested = any(name == module or name.startswith(f"{module}_") for name in names for module in modules_there)
        if tested == (file.as_posix() in OF_NO_MODULE):
            wrong.append(file.as_posix())
    assert len(files) > 80
    assert not wrong, f"no such module, or listed in OF_NO_MODULE for nothing: {', '.join(wrong)}"
    assert {Path(name) for name in OF_NO_MODULE} <= files
