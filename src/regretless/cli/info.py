"""Tables that the command line prints about the package itself."""

from __future__ import annotations

import torch
from rich.table import Table

from regretless.core.files import versions
from regretless.core.terminal import terminal
from regretless.objectives import OBJECTIVES


def show_objectives() -> None:
    """Print every objective with its hyperparameters."""
    table = Table("objective", "hyperparameter", "type", "default", "meaning")
    objectives, problems = OBJECTIVES.usable()
    for name, kind in objectives.items():
        for row, (key, parameter) in enumerate(kind.hyperparameters().items()):
            meaning = parameter.description.replace("\n", " ")
            table.add_row(name if row == 0 else "", key, parameter.type, str(parameter.default), meaning)
        table.add_section()
    output = terminal()
    output.print(table)
    for problem in problems:
        output.print(problem, style="yellow", markup=False, soft_wrap=True)


def show_environment() -> None:
    """Print versions and hardware."""
    table = Table("what", "value", show_header=False)
    for name, version in versions().items():
        table.add_row(name, version)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    table.add_row(
        "accelerator", "none" if accelerator is None else f"{accelerator} × {torch.accelerator.device_count()}"
    )
    table.add_row("CPU threads", str(torch.get_num_threads()))
    terminal().print(table)
