"""The turns of chat benchmarks in a plan: a later turn's prompts contain answers, which are not there yet."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regretless.core.errors import RegretlessError
from regretless.data.columns import Response
from regretless.data.prompts import PromptRow
from regretless.data.rows import write_records
from regretless.evaluation.chat import chat_results
from regretless.runs.planning.dry_run import PlannedFolder, PlannedUnit, State
from regretless.runs.planning.lengths import CHARACTERS_PER_TOKEN, ResponseLengths


@dataclass
class ChatTurns:
    """Later turns of chat benchmarks, with stand-ins for answers that are not there yet."""

    folder: PlannedFolder
    lengths: ResponseLengths

    def add_later(self) -> None:
        """Add the units of later turns: their prompts contain answers, so the stage itself cannot name them yet."""
        talks: dict[Path, list[PlannedUnit]] = {}
        for unit in self.folder.units.values():
            if "chat" in unit.unit.task:
                talks.setdefault(unit.folder.parent, []).append(unit)
        for folder, units in talks.items():
            if all(unit.is_known for unit in units):
                continue
            with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(RegretlessError, OSError):
                first = units[0].unit
                tokens, _ = self.lengths.of(units[0], first.settings["model"])
                turns = self.stand_ins(first.task["chat"], Path(scratch), tokens)[1]
                for turn, temperature, rows in turns:
                    name = f"{first.name.rpartition('/')[0]}/turn-{turn}-temperature-{temperature:g}"
                    if name not in self.folder.units:
                        sampling = {**first.settings["sampling"], "temperature": temperature}
                        settings, task = {**first.settings, "sampling": sampling}, {**first.task, "prompts": rows}
                        later = replace(first, name=name, settings=settings, task=task)
                        before = tuple(unit.name for unit in units)
                        place = folder / Path(name).name
                        self.folder.units[name] = PlannedUnit(later, State.RUN, place, waits_for=before)

    def stand_ins(
        self, config: Any, folder: Path, tokens: float
    ) -> tuple[list[Path], list[tuple[int, float, list[PromptRow]]]]:
        """Stand-ins for the responses to all turns of a chat benchmark, of about so many tokens; and its prompts.

        The prompts come with their turn and temperature.
        """
        files: list[Path] = []
        asked: list[tuple[int, float, list[PromptRow]]] = []
        for turn in itertools.count(1):
            groups = chat_results.next_prompts(config, files)
            if not groups:
                break
            for temperature, rows in groups.items():
                files.append(folder / f"{len(files)}.parquet")
                write_records(files[-1], [_stand_in(row, tokens) for row in rows])
                asked.append((turn, temperature, rows))
        return files, asked


def _stand_in(row: PromptRow, tokens: float) -> Response:
    text = "x" * max(1, round(tokens * CHARACTERS_PER_TOKEN))
    return Response(prompt_id=row.prompt_id, response_id=row.prompt_id, prompt=row.prompt, response=text)
