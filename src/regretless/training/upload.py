"""The files of a model's folder that go to the hub: those on a list of what a model is made of, and no other.

A folder that training wrote also holds logs, scores of single pairs, checkpoints with optimizer states, and the
Trainer's pickled arguments, which may contain an access token. A list of what may go is safe for files that nobody
thought of; a list of what must not go is not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from regretless.core.errors import ConfigError, problems_of, reject
from regretless.core.files import read_json
from regretless.core.hub import out_of_reach
from regretless.core.paths import MADE_BY
from regretless.core.secrets import has_secret, names_secret
from regretless.core.versions import version
from regretless.modeling.quantization import FILE as QUANTIZATION
from regretless.training.model_card import CARD, Facts, check_card, named, read_facts, render
from regretless.workflow.run_folder import MORE_TEMPLATES

WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
MODEL_FILES = frozenset({"config.json", "generation_config.json", "adapter_config.json", QUANTIZATION})
TOKENIZER_FILES = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
        *("chat_template.jinja", "chat_template.json"),
    }
)
REPORT = "report.html"
LEAK = "has a token or key in it, which everybody could read; remove it, or write the file again with this version"


@dataclass(frozen=True)
class Upload:
    """One file that goes up."""

    path: str
    """Its path in the repository."""
    content: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @property
    def text(self) -> str:
        """The content; bytes that are no text are replaced."""
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return content.decode("utf-8", errors="replace")


def is_public(name: str) -> bool:
    """True for the name of a file that belongs to a model, its tokenizer or its card."""
    return name in MODEL_FILES | {CARD} or _is_of_tokenizer(name) or WEIGHTS.fullmatch(name) is not None


def _is_of_tokenizer(name: str) -> bool:
    return name in TOKENIZER_FILES or PurePath(name).match(MORE_TEMPLATES)


def public_files(folder: Path) -> list[str]:
    """Paths, within a model's folder, of the files that may be published, in order."""
    files = [path for path in (*folder.iterdir(), *folder.glob(MORE_TEMPLATES)) if path.is_file()]
    return sorted(name for path in files if is_public(name := path.relative_to(folder).as_posix()))


def tokenizer_files(folder: Path) -> list[str]:
    """Those of them that are the tokenizer's."""
    return [name for name in public_files(folder) if _is_of_tokenizer(name)]


def uploads(
    folder: Path, repository: str, *, report: Path | None = None, license: str | None = None
) -> tuple[list[Upload], list[str]]:
    """What goes to `repository` from a model's folder, and notes on it.

    report: the run's HTML report, which shows prompts and responses. license: identifier for the card's metadata.
    A card as this package wrote it goes with the repository's name and a link to the report, if that goes too.
    Raises ConfigError for a folder that is no model, or has no card or one with placeholders or secrets, and for a
    report that another version of this package made: it may show secrets that this one hides.
    """
    check_repository(repository)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; expected a model or adapter, such as runs/NAME/train/repo")
    files = public_files(folder)
    problems = []
    if not any(WEIGHTS.fullmatch(name) and name.endswith(".safetensors") for name in files):
        problems.append(f"{folder}: holds no weights (*.safetensors); expected the folder of a model or an adapter")
    if not {"config.json", "adapter_config.json"} & set(files):
        problems.append(f"{folder}: has neither config.json nor adapter_config.json")
    problems += problems_of(lambda: check_card(folder))
    if report is not None and not report.is_file():
        problems.append(f"{report}: no such file; the stage `report` writes it")
    elif report is not None and f"{MADE_BY} {version()} " not in report.read_text(encoding="utf-8", errors="replace"):
        problems.append(
            f"{report}: expected a page of this version, {version()}: those of others may show access tokens; "
            f"`regretless report {report.parents[1]}` writes it anew"
        )
    reject("upload", problems)
    files_to_send = [Upload(name, folder / name) for name in files if name != CARD]
    card, notes = _card(folder, repository, report, license)
    files_to_send.append(Upload(CARD, card))
    if report is not None:
        files_to_send.append(Upload(REPORT, report))
    notes += _notes(folder)
    texts = [file for file in files_to_send if not file.path.endswith(".safetensors")]
    leaking = [file for file in texts if has_secret(file.text) or (file.path == CARD and names_secret(file.text))]
    reject("upload", [f"{file.path}: {LEAK}" for file in leaking])
    return sorted(files_to_send, key=lambda file: file.path), notes


def _card(folder: Path, repository: str, report: Path | None, license: str | None) -> tuple[bytes, list[str]]:
    facts, text = read_facts(folder), (folder / CARD).read_text(encoding="utf-8")
    if facts is None or render(facts) != text:
        if license is not None:
            raise ConfigError(f"{folder / CARD}: was edited by hand; set its `license` there, and leave --license out")
        return text.encode(), [f"{CARD} was edited by hand and goes as it is"]
    changes: dict[str, Any] = {"name": repository, "report": None if report is None else REPORT}
    if license is not None:
        changes |= {"license": license, "license_name": None, "license_link": None}
    changed: Facts = dataclasses.replace(facts, **changes)
    notes = [] if changed.license else [f"{CARD} states no license; --license NAME sets one"]
    return render(changed).encode(), notes


def _notes(folder: Path) -> list[str]:
    """What somebody who loads the model from the hub would stumble over."""
    notes = []
    config = folder / "adapter_config.json"
    if config.is_file():
        base = str(read_json(config).get("base_model_name_or_path") or "")
        if not named(base)[1]:
            notes.append(
                f"adapter_config.json names {base or 'no base model'}, which others do not have: upload the base as "
                "well and name its repository there, or merge the adapter (`regretless merge`)"
            )
    return notes


def check_repository(repository: str) -> None:
    """Raise ConfigError for a name that no repository can have."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{repository}: expected a repository's name, OWNER/NAME: {error}") from error


def upload(
    files: list[Upload],
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    message: str = "Upload model",
) -> str:
    """Put the files into one commit of a repository, which is created if it does not exist; returns its address.

    Raises ConfigError if the hub cannot be reached, or refuses.
    """
    if (problem := out_of_reach()) is not None:
        raise ConfigError(f"upload to {repository}: {problem}")
    api = HfApi(token=token)
    operations = [
        CommitOperationAdd(file.path, file.content if isinstance(file.content, bytes) else str(file.content))
        for file in files
    ]
    try:
        address = api.create_repo(repository, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.create_commit(repository, operations, commit_message=message, revision=revision)
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise ConfigError(
            f"upload to {repository}: {error}\n  log in with `hf auth login` (a token that may write), and check the "
            "repository's name"
        ) from error
    return str(address)


def listing(files: list[Upload]) -> Mapping[str, int]:
    """Path in the repository and bytes of each file."""
    return {file.path: file.size for file in files}
