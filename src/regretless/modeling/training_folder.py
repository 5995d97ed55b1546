"""What training leaves in a folder: the model, its checkpoints, its log, and how it was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer_utils import rotate_checkpoints

from regretless.core.errors import ConfigError
from regretless.core.files import read_json
from regretless.core.run_folder import RUN, resolve
from regretless.core.stage_folder import MANIFEST
from regretless.modeling.load import ADAPTER, ModelConfig
from regretless.objectives import hyperparameter_names

STATE, PAIR_SCORES = "trainer_state.json", "pair_scores.jsonl"


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
    here, folder = resolve(start, run), Path(trained.replace(RUN, str(run)))
    on_adapter = here.name_or_path is not None and (Path(here.name_or_path) / ADAPTER).is_file()
    if (folder / ADAPTER).is_file() and not on_adapter:
        return start.model_copy(update={"adapter": trained})
    # A whole model, or an adapter that went on from one and names its base itself.
    kept = start.model_dump(
        include={"dtype", "chat_template", "chat_template_kwargs", "trust_remote_code"}, exclude_unset=True
    )
    return ModelConfig(name_or_path=trained, **kept)


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder that were written to their end, by step, in order.

    trainer_state.json is the last file of a checkpoint: one that is missing or broken marks a save that was cut off.
    """
    found: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        if number.isdigit() and state.get("global_step") == int(number):
            found[int(number)] = path
    return dict(sorted(found.items()))


def clear_checkpoints(last: Path, limit: int | None) -> None:
    """Delete remains of interrupted checkpoints beside the `last` one, so that at most `limit` stay.

    These are half-written ones, and old ones whose deletion was interrupted. The Trainer deletes by a folder's
    modification time, and an interrupted deletion has made that of an old checkpoint later than that of newer ones: it
    would be kept in their place.
    """
    complete = complete_checkpoints(last.parent).values()
    for path in last.parent.glob("checkpoint-*"):
        if path.name.removeprefix("checkpoint-").isdigit() and path not in complete:
            shutil.rmtree(path)
    best = read_json(last / STATE).get("best_model_checkpoint")
    rotate_checkpoints(str(last.parent), limit, best)


def last_complete_checkpoint(folder: Path) -> str | None:
    """The checkpoint-N with the largest N that training can go on from, or None.

    One without the optimizer's state (`save_only_model`) holds a model and nothing to go on with; the random state is
    saved with the optimizer's, in whatever files that lies.
    """
    found = [path for path in complete_checkpoints(folder).values() if any(path.glob("rng_state*.pth"))]
    return str(found[-1]) if found else None
