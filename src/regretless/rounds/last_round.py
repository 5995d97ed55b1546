"""The model of a method's last round, in the folder in which every stage looks for a trained model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from regretless.modeling.training_folder import CHECKPOINT
from regretless.workflow.stage_folder import MANIFEST, PENDING
from regretless.workflow.unit_store import link_or_copy


def run(model: Path, number: int, count: int, stopped: str | None, output: Path) -> dict[str, Any]:
    """Link the files of the model that round `number` has trained into the folder `output`; returns what it is.

    Checkpoints and the optimizer's state stay behind. Linked files take no space: finished files are replaced, never
    written to.
    """
    # What an interrupted call has linked: a second link to the same file would be an error.
    for path in output.iterdir():
        if path.name not in (MANIFEST, PENDING):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    left = shutil.ignore_patterns(MANIFEST, PENDING, f"{CHECKPOINT}*", "optimizer.pt")
    shutil.copytree(model, output, copy_function=link_or_copy, ignore=left, dirs_exist_ok=True)
    return {"round": number, "of": count, **({} if stopped is None else {"stopped": stopped})}
