"""What training leaves in a folder: the model, its checkpoints, its log, and how it was trained."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel
from transformers.trainer_utils import rotate_checkpoints

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import LEFTOVER, read_json, write_json
from regretless.modeling.load import ADAPTER, ModelConfig
from regretless.objectives import hyperparameter_names
from regretless.workflow.run_folder import RUN, resolve
from regretless.workflow.stage_folder import MANIFEST

STATE, PAIR_SCORES = "trainer_state.json", "pair_scores.jsonl"
CHECKPOINT = "checkpoint-"
FILES = "files.json"
"""The file of a checkpoint that lists the others."""
LOG_STATE = "log_state.json"
"""A file that checkpoints of this package have, and those of another Trainer do not (`training/log_state.py`)."""
STATES = ("optimizer*", "scheduler.pt", "rng_state*.pth")
"""Files, or folders, that a Trainer's checkpoint has besides the model."""
BLOCK = 1 << 20


@dataclass(frozen=True)
class Trained:
    """A trained model, and the folder that training left it in."""

    model: ModelConfig
    folder: Path
    objective: str | None = None
    """The method; None where nothing says it."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Those that were set; the others are the method's defaults."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The Trainer's state at the end, with its log in `log_history`; empty where there is none."""
        file = self.folder / STATE
        return dict(read_json(file)) if file.is_file() else {}


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights that `save_pretrained` wrote in a folder into a model of the same architecture, in place.

    They may have other names there than in the model: those of a mixture's experts, which the model keeps together.
    Raises ConfigError if a weight is missing, left over or of another shape.
    """
    types = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    loaded, about = type(model).from_pretrained(
        folder, dtype=reduce(torch.promote_types, types), output_loading_info=True
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in about.items() if names}
    if wrong:
        texts = (f"{kind}: {', '.join(names[:3])}" for kind, names in wrong.items())
        raise ConfigError(f"{folder}: its weights are not those of {type(model).__name__}: {'; '.join(texts)}")
    model.load_state_dict(loaded.state_dict())


def read_trained(start: ModelConfig, folder: Path) -> Trained:
    """What training from `start` left in a folder; its manifest, where it has one, says with which method."""
    manifest = folder / MANIFEST
    settings = read_json(manifest)["settings"] if manifest.is_file() else {}
    objective, values = settings.get("objective"), settings.get("values", {})
    names = hyperparameter_names(objective) if objective is not None else ()
    hyperparameters = {name: value for name, value in values.items() if name in names}
    return Trained(trained_model(start, str(folder), Path()), folder, objective, hyperparameters)


def trained_model(start: ModelConfig, trained: str, run: Path) -> ModelConfig:
    """The model that training from `start` left in the folder `trained`; both may name `run` as `{run}`."""
    resolved, folder = resolve(start, run), Path(trained.replace(RUN, str(run)))
    on_adapter = resolved.name_or_path is not None and (Path(resolved.name_or_path) / ADAPTER).is_file()
    return as_trained(start, trained, is_adapter=(folder / ADAPTER).is_file() and not on_adapter)


def as_trained(start: ModelConfig, trained: str, *, is_adapter: bool) -> ModelConfig:
    """The model that training from `start` leaves in the folder `trained`. is_adapter: as an adapter for the start's
    base."""
    if is_adapter:
        return start.model_copy(update={"adapter": trained})
    # A whole model, or an adapter that went on from one and names its base itself.
    kept = start.model_dump(
        include={"dtype", "chat_template", "chat_template_kwargs", "trust_remote_code"}, exclude_unset=True
    )
    return ModelConfig(name_or_path=trained, **kept)


def saved_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder whose model was written to its end, by step, in order.

    trainer_state.json is the last file of a checkpoint: one that is missing or broken marks a save that was cut off.
    """
    return {step: path for step, path in _checkpoints(folder).items() if _state_problem(path) is None}


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Everything that is named like a checkpoint, by step, in order."""
    numbers = {path.name.removeprefix(CHECKPOINT): path for path in folder.glob(f"{CHECKPOINT}*")}
    return dict(sorted((int(number), path) for number, path in numbers.items() if number.isdecimal()))


def list_files(checkpoint: Path) -> None:
    """Write down the size and content of every file of a checkpoint, before its last one, trainer_state.json."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and not LEFTOVER.match(path.name))
    names = {path.relative_to(checkpoint).as_posix(): path for path in files}
    write_json(checkpoint / FILES, {name: _content(path) for name, path in names.items() if name not in (STATE, FILES)})


def checkpoint_problem(checkpoint: Path) -> str | None:
    """Why training cannot go on from a checkpoint: a file that is missing or not as it was written; None if it can.

    The files are those that `list_files` wrote down. A checkpoint of another Trainer has no such list: of the states
    that it holds besides the model, none may be missing.
    """
    if (problem := _state_problem(checkpoint)) is not None:
        return problem
    if (checkpoint / FILES).exists():
        return _changed_file(checkpoint)
    missing = [name for name in STATES if not any(checkpoint.glob(name))]
    if missing:
        return f"there is no {' and no '.join(missing)}" + (" (save_only_model)" if missing == [*STATES] else "")
    return f"{FILES} is missing" if (checkpoint / LOG_STATE).exists() else None


def _changed_file(checkpoint: Path) -> str | None:
    try:
        listed = read_json(checkpoint / FILES)
    except DataError:
        return f"{FILES} is broken"
    for name, content in listed.items():
        try:
            if _content(checkpoint / name) != content:
                return f"{name} is not as it was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _state_problem(checkpoint: Path) -> str | None:
    try:
        state = json.loads((checkpoint / STATE).read_bytes())
    except (OSError, ValueError) as error:
        return f"{STATE} is {'broken' if isinstance(error, ValueError) else 'missing'}"
    step, number = state.get("global_step") if isinstance(state, dict) else None, checkpoint.name
    is_another = number.startswith(CHECKPOINT) and number != f"{CHECKPOINT}{step}"
    return f"{STATE} is of step {step}" if step is None or is_another else None


def _content(file: Path) -> list[Any]:
    """Size in bytes, and a hash of at most 64 MiB of them: evenly spread blocks, the first and the last among them."""
    size, digest = file.stat().st_size, xxhash.xxh3_128()
    count = math.ceil(size / BLOCK)
    with file.open("rb") as handle:
        for number in sorted({*range(0, count, max(1, math.ceil(count / 63))), max(0, count - 1)}):
            handle.seek(number * BLOCK)
            digest.update(handle.read(BLOCK))
    return [size, digest.hexdigest()]


def clear_checkpoints(last: Path, limit: int | None) -> None:
    """Delete what was cut off behind the `last` complete checkpoint, and old ones, so that at most `limit` stay.

    The Trainer deletes old ones by their folders' modification time. A deletion that was interrupted has made that of
    an old checkpoint later than that of newer ones, and it would be kept in their place: it goes first.
    """
    step = int(last.name.removeprefix(CHECKPOINT))
    for number, path in _checkpoints(last.parent).items():
        problem = _state_problem if limit is None or number > step else checkpoint_problem
        if number != step and problem(path) is not None:
            shutil.rmtree(path)
    best = read_json(last / STATE).get("best_model_checkpoint")
    rotate_checkpoints(str(last.parent), limit, best)


def last_complete_checkpoint(folder: Path) -> tuple[str | None, list[str]]:
    """The checkpoint-N with the largest N that training can go on from, or None; and why not from each later one."""
    problems: list[str] = []
    for path in reversed(_checkpoints(folder).values()):
        problem = checkpoint_problem(path)
        if problem is None:
            return str(path), problems
        problems.append(f"{path.name}: {problem}")
    return None, problems
