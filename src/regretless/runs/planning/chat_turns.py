"""The turns of chat benchmarks in a plan: a later turn's prompts contain answers, which are not there yet."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regretless.core.errors import RegretlessError
from regretless.data.prompts import PromptRow
from regretless.data.records import Response
from regretless.data.rows import write_records
from regretless.evaluation.chat import chat_results
from regretless.runs.planning.dry_run import PlannedFolder, PlannedUnit, State
from regretless.runs.planning.lengths import CHARACTERS_PER_TOKEN, ResponseLengths, params_of
from regretless.runs.recipe import Recipe
from regretless.workflow.run_folder import resolve


@dataclass
class ChatTurns:
    """Prompts of the units that answer chat benchmarks, with stand-ins for answers that are not there yet."""

    recipe: Recipe
    folder: PlannedFolder
    lengths: ResponseLengths
    _prompts: dict[str, list[PromptRow]] = field(default_factory=dict)

    def prompts_of(self, unit: PlannedUnit) -> list[PromptRow]:
        """Prompts of a unit that answers a chat benchmark. Raises DataError or ConfigError if they are not at hand."""
        if unit.name not in self._prompts:
            turn = int(unit.name.rpartition("/")[2].split("-")[1])
            earlier = [
                one.folder / "responses.parquet"
                for one in self.folder.units.values()
                if one.folder.parent == unit.folder.parent and int(one.folder.name.split("-")[1]) < turn
            ]
            groups = chat_results.next_prompts(self._chat_of(unit), earlier)
            self._prompts[unit.name] = groups[params_of(unit).temperature]
        return self._prompts[unit.name]

    def add_later(self) -> None:
        """Add the units of later turns: their prompts contain answers, so the stage itself cannot name them yet."""
        talks: dict[Path, list[PlannedUnit]] = {}
        for unit in self.folder.units.values():
            if isinstance(unit.settings.get("prompts"), str):
                talks.setdefault(unit.folder.parent, []).append(unit)
        for folder, units in talks.items():
            if all(unit.is_known for unit in units):
                continue
            with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(RegretlessError, OSError):
                tokens, _ = self.lengths.of(units[0], units[0].settings["model"])
                turns = self.stand_ins(self._chat_of(units[0]), Path(scratch), tokens)[1]
                for turn, temperature, rows in turns:
                    name = f"{units[0].name.rpartition('/')[0]}/turn-{turn}-temperature-{temperature:g}"
                    if name not in self.folder.units:
                        sampling = {**units[0].settings["sampling"], "temperature": temperature}
                        settings = {**units[0].settings, "sampling": sampling}
                        before = tuple(unit.name for unit in units)
                        unit = PlannedUnit(name, State.RUN, folder / Path(name).name, settings, waits_for=before)
                        self.folder.units[name], self._prompts[name] = unit, rows

    def _chat_of(self, unit: PlannedUnit) -> Any:
        """Settings of the chat benchmark that a unit answers, whichever of those that share the answers."""
        assert self.recipe.evaluate is not None
        kind = unit.folder.parent.name
        every = self.recipe.evaluate.chat.values()
        one = next(one for one in every if kind == one.answers)
        return resolve(one, self.folder.path)

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
