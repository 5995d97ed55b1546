"""The last round's model in the folder of its method."""

from __future__ import annotations

from pathlib import Path

from regretless.core.files import write_text
from regretless.rounds.last_round import run


def test_last_round_when_linked_again_after_a_kill_then_all_files_are_those_of_training_and_none_is_written_to(
    tmp_path: Path,
) -> None:
    model, output = tmp_path / "model", tmp_path / "train"
    for name in ("model.safetensors", "card.json", "manifest.json", "checkpoint-3/state", "templates/a.jinja"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    output.mkdir()
    (output / "pending.json").write_text("mark")
    # A kill left one file linked, and one of the round before.
    (output / "card.json").hardlink_to(model / "card.json")
    (output / "model.safetensors").write_text("old")
    assert run(model, 2, 3, "why", output) == {"round": 2, "of": 3, "stopped": "why"}
    files = {path.relative_to(output).as_posix(): path.read_text() for path in output.rglob("*") if path.is_file()}
    kept = ("model.safetensors", "card.json", "templates/a.jinja")
    assert files == {"pending.json": "mark", **{name: name for name in kept}}
    write_text(output / "card.json", "with results")
    assert (model / "card.json").read_text() == "card.json"
