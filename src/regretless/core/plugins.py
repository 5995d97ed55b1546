"""Tables of exchangeable parts: those of this package, and those that installed packages add as entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from regretless.core.errors import ConfigError

T = TypeVar("T")
KINDS = ("objectives", "engines", "verifiers", "rules", "benchmarks", "templates")
"""Kinds of parts that can be added: the entry point group of each is `regretless.<kind>`."""


@cache
def offered(kind: str) -> Mapping[str, Sequence[EntryPoint]]:
    """Entry points of one kind in the installed packages, by name; more than one is a conflict."""
    points: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=f"regretless.{kind}"), key=_source):
        points.setdefault(point.name, []).append(point)
    return points


def plugin_parts() -> set[str]:
    """Names of all parts that installed packages add."""
    return {name for kind in KINDS for name in offered(kind)}


def plugin_versions() -> dict[str, str]:
    """Versions of the installed packages that add parts, by name, with a hash of their code: results depend on it."""
    points = [point for kind in KINDS for same in offered(kind).values() for point in same]
    codes: dict[str, set[str]] = {}
    versions = {}
    for point in points:
        if point.dist is not None:
            versions[point.dist.name] = point.dist.version
            codes.setdefault(point.dist.name, set()).add(_code_of(point.module.partition(".")[0]))
    return {name: f"{version} (code {' '.join(sorted(codes[name]))})" for name, version in versions.items()}


@cache
def _code_of(module: str) -> str:
    """Hash of a top-level module's or package's Python files: while a part is written, its version stays the same."""
    spec = find_spec(module)
    if spec is None:
        return "missing"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = {path.relative_to(folder).as_posix(): path for folder in folders for path in folder.rglob("*.py")}
    if not folders and spec.has_location and spec.origin is not None:
        files[module] = Path(spec.origin)
    codes = "".join(f"{name} {sha256(files[name].read_bytes()).hexdigest()}\n" for name in sorted(files))
    return sha256(codes.encode()).hexdigest()[:8]


class Registry(MutableMapping[str, T], Generic[T]):
    """Parts of one kind by name. A part of another package is imported at its first use.

    problem: the problem of a part from another package, or None; called with its name and the part.
    former: for names that parts of this package had, why each is gone and what to use instead.
    """

    def __init__(
        self,
        kind: str,
        own: Mapping[str, T],
        problem: Callable[[str, T], str | None] = lambda name, part: None,
        former: Mapping[str, str] | None = None,
    ) -> None:
        assert kind in KINDS
        self.kind, self._problem, self._former = kind, problem, former or {}
        self.own: frozenset[str] = frozenset()
        """The names of this package's parts, which no other package can take."""
        self._parts: dict[str, T] = {}
        self.enter(own)

    def enter(self, own: Mapping[str, T]) -> None:
        """Add parts of this package, for a table that one of its parts reads."""
        self.own |= own.keys()
        self._parts |= own

    def __getitem__(self, name: str) -> T:
        """The part with that name. Raises KeyError if there is none, ConfigError if it cannot be used."""
        points = offered(self.kind).get(name, ())
        sources = [*(["regretless itself"] if name in self.own else []), *map(_source, points)]
        if len(sources) > 1:
            raise ConfigError(
                f"{self.kind}: {name!r} is defined by {' and by '.join(sources)}; rename it in one, or uninstall one"
            )
        if name not in self._parts and points:
            self._parts[name] = self._load(name, points[0])
        return self._parts[name]

    def __setitem__(self, name: str, part: T) -> None:
        self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._parts, *offered(self.kind)]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in offered(self.kind)  # without importing it

    def find(self, name: str) -> T:
        """The part with that name. Raises ConfigError that lists the names, or explains why the part cannot be used."""
        if name not in self:
            raise ConfigError(f"{self.kind.removesuffix('s')}: {self._unknown(name)}; got {name!r}")
        return self[name]

    def usable(self) -> tuple[dict[str, T], list[str]]:
        """Every usable part by name, and why each of the others cannot be used."""
        parts, problems = {}, []
        for name in self:
            try:
                parts[name] = self[name]
            except ConfigError as error:
                problems.append(str(error))
        return parts, problems

    def check(self, name: str) -> str:
        """The name, for validators of settings. Raises ValueError if there is no such part, or it is unusable."""
        if name not in self:
            raise ValueError(self._unknown(name))
        try:
            self.find(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return name

    def _unknown(self, name: str) -> str:
        return self._former.get(name) or f"expected one of {', '.join(self)}"

    def _load(self, name: str, point: EntryPoint) -> T:
        where = f"{self.kind}: {name!r} of {_source(point)} ({point.value})"
        try:
            part: T = point.load()
        # A plug-in's import may raise anything.
        except Exception as error:
            # Pydantic ends its messages with an address, which would come between the reason and what to do.
            reason = str(error).partition("\n\nFor further information")[0]
            raise ConfigError(
                f"{where}: cannot be imported: {type(error).__name__}: {reason}; fix or uninstall that package"
            ) from error
        if (problem := self._problem(name, part)) is not None:
            raise ConfigError(f"{where}: {problem}")
        return part


def _source(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an installed package"
