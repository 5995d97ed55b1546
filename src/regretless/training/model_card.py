"""The card of a trained model (README.md): what it was trained on, how, and what was measured.

A card is made from facts: names, counts, settings and numbers. No text of a prompt or a response is among them, so a
card can be published where the data cannot. The facts are kept beside the card, in `card.json`, so that results and a
report that come later can be added.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load, try_to_load_from_cache
from pydantic import TypeAdapter, ValidationError

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import read_json, write_json, write_text
from regretless.core.hub import may_be_repository

CARD, FACTS = "README.md", "card.json"
PLACEHOLDER = "[More Information Needed]"
"""What peft's own card has in place of facts."""
CARD_TAGS = ("regretless", "preference-optimization")
UNKNOWN_LICENSE = "unknown"
"""The hub's identifier where no license is stated."""
MARKDOWN_SPECIAL = re.compile(r"[\\`*_\[\]<>#!|~&]|:(?=//)")
ADDRESS = re.compile(r"https?://[\w./~%?=&:-]+")
ARXIV = re.compile(r"arXiv:[\w./-]+")
CODE_SPECIAL = re.compile(r"[`\r\n|]+")


@dataclass(frozen=True)
class Result:
    """One measured number of the model, as the card shows it; shares are in %."""

    benchmark: str
    metric: str
    n: int | None
    value: float
    interval: tuple[float, float] | None = None
    """95 % interval."""
    gain: float | None = None
    """Paired difference to the model before training."""
    gain_interval: tuple[float, float] | None = None
    dataset: str | None = None
    """Hub id of the benchmark's data, if it has one."""


@dataclass(frozen=True)
class Facts:
    """All that a card says. Names of files and folders are without the folders that they are in."""

    name: str
    objective: str
    title: str
    paper: str
    formula: str
    hyperparameters: Mapping[str, Any]
    arguments: Mapping[str, Any]
    """Training arguments that the result depends on, with their values."""
    adapter: Mapping[str, Any] | None
    """Settings of the adapter; None for a whole model."""
    base: str
    """Hub id of the base model, or the name of its folder."""
    base_on_hub: bool
    architecture: str
    data: Mapping[str, Any]
    """Names and counts of the training data, by what they are."""
    datasets: Sequence[str]
    """Hub ids of the training data."""
    measured: Mapping[str, float]
    """Numbers that training itself logged last, by their names in the log."""
    versions: Mapping[str, str]
    command: str
    """What trains this model again."""
    language: str
    """Language of `command`: bash or python."""
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    tags: Sequence[str] = ()
    languages: Sequence[str] = ()
    results: Sequence[Result] = ()
    report: str | None = None
    """Path or address of the run's report, as seen from the card."""
    start: str | None = None
    """The adapter on the base that training went on with, by hub id or the name of its folder."""
    merged: str | None = None
    """For an adapter that was merged into its base: how that was checked."""

    @property
    def is_adapter(self) -> bool:
        """True if the folder holds an adapter, false if it holds a whole model."""
        return self.adapter is not None and self.merged is None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Facts:
        """The facts of a `card.json`. Raises DataError for one of another form."""
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise DataError(f"{FACTS}: not the facts of a card: {error}") from error


def write_card(folder: str | Path, facts: Facts) -> bool:
    """Write the card and its facts into a model's folder; False if a card that was edited by hand stays."""
    folder = Path(folder)
    card = folder / CARD
    if card.is_file() and not _is_ours(card.read_text(encoding="utf-8", errors="replace")):
        return False
    text = render(facts)
    if not card.is_file() or card.read_text(encoding="utf-8") != text:
        write_text(card, text)
    values = json.loads(json.dumps(dataclasses.asdict(facts), default=str))
    if not (folder / FACTS).is_file() or read_json(folder / FACTS) != values:
        write_json(folder / FACTS, values)
    return True


def read_facts(folder: Path) -> Facts | None:
    """The facts of the card in a model's folder, or None if it has none."""
    file = folder / FACTS
    if not file.is_file():
        return None
    return Facts.from_json(read_json(file))


def update_card(folder: Path, **changes: Any) -> bool:
    """Write the card again with some facts changed; False if there is none of ours, or one that was edited by hand."""
    facts = read_facts(folder)
    return facts is not None and write_card(folder, dataclasses.replace(facts, **changes))


def _signed(text: str) -> str:
    """A card with its digest in a comment at the end.

    In the card and not in `card.json`: the two files are not written at once, and between them an interruption would
    leave a card that looks edited.
    """
    return f"{text}\n<!-- written by regretless, sha256 {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _is_ours(text: str) -> bool:
    """True for a card as this module wrote it, or peft's with its placeholders."""
    return PLACEHOLDER in text or text == _signed(text.rpartition("\n<!-- written by")[0])


def render(facts: Facts) -> str:
    """The card as Markdown, with its metadata and its digest."""
    return _signed(f"---\n{metadata(facts).to_yaml()}\n---\n\n{_template().render(facts=facts)}")


@functools.cache
def _template() -> jinja2.Template:
    """The card's template, which takes longer to read than to fill in."""
    template = resources.files("regretless.training") / "templates" / "model_card.md.jinja"
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"code": code, "number": _number, "bounds": _bounds, "paper": _paper, "plain": plain}
    return environment.from_string(template.read_text(encoding="utf-8"))


def metadata(facts: Facts) -> ModelCardData:
    """The card's metadata, as the hub reads it."""
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=result.dataset or result.benchmark,
            dataset_name=result.benchmark,
            metric_type=result.metric.partition(" (")[0].lower(),
            metric_name=result.metric,
            metric_value=round(result.value, 4),
        )
        for result in facts.results
    ]
    tags = dict.fromkeys([*CARD_TAGS, facts.objective, *(["lora"] if facts.is_adapter else []), *facts.tags])
    optional: dict[str, Any] = {
        "base_model": facts.base if facts.base_on_hub else None,
        "base_model_relation": ("adapter" if facts.is_adapter else "finetune") if facts.base_on_hub else None,
        "datasets": list(facts.datasets) or None,
        "language": list(facts.languages) or None,
        "license_name": facts.license_name,
        "license_link": facts.license_link,
        "eval_results": results or None,
    }
    return ModelCardData(
        license=facts.license or UNKNOWN_LICENSE,
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag="text-generation",
        model_name=facts.name,
        tags=list(tags),
        **{name: value for name, value in optional.items() if value is not None},
    )


def base_license(base: str) -> dict[str, str]:
    """License fields of a base model's own card, from its folder or the hub's cache; empty where no card is at hand."""
    folder = Path(base)
    card: Any = folder / CARD if folder.is_dir() else None
    if card is None and may_be_repository(base):
        card = try_to_load_from_cache(base, CARD)
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return {}
    try:
        values = metadata_load(Path(card)) or {}
    except (ValueError, OSError, yaml.YAMLError):
        return {}
    fields = {name: values.get(name) for name in ("license", "license_name", "license_link")}
    stated = fields["license"] not in (None, UNKNOWN_LICENSE)
    return {name: value for name, value in fields.items() if isinstance(value, str) and stated}


def named(source: str) -> tuple[str, bool]:
    """How a card names a model or data: (hub id, True), or (the last part of a path, False)."""
    if not Path(source).exists() and may_be_repository(source):
        return source, True
    return Path(source).name or source, False


def check_card(folder: Path) -> None:
    """Raise ConfigError for a folder without a card, or whose card says nothing where it should."""
    card = folder / CARD
    if not card.is_file():
        raise ConfigError(f"{folder}: has no {CARD}; a model that this package trained has one, so train it again")
    text = card.read_text(encoding="utf-8")
    if PLACEHOLDER in text:
        raise ConfigError(f"{card}: says {PLACEHOLDER!r}; replace it by what is true of the model")
    try:
        ModelCard(text)
    except ValueError as error:
        raise ConfigError(f"{card}: its metadata cannot be read: {error}") from error


def code(value: Any) -> str:
    """A value as inline code that stays in its table cell."""
    text = "null" if value is None else str(value)
    return f"`{CODE_SPECIAL.sub(' ', text) or ' '}`"


def plain(value: Any) -> str:
    """A text as one line of Markdown that shows its characters: no markup, no link, no other cell."""
    return MARKDOWN_SPECIAL.sub(r"\\\g<0>", " ".join(str(value).split()))


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}"


def _paper(source: str) -> str:
    if ARXIV.fullmatch(source):
        return f"[{source}](https://arxiv.org/abs/{source[6:]})"
    # A method of somebody's own may have appeared anywhere.
    return source if ADDRESS.fullmatch(source) else plain(source)


def _bounds(interval: Sequence[float] | None, sign: bool = False) -> str:
    if interval is None:
        return ""
    return " [" + ", ".join(f"{bound:+.2f}" if sign else f"{bound:.2f}" for bound in interval) + "]"
