"""Executes the notebooks of docs/notebooks, each in an empty folder, and keeps what their cells print.

python docs/make_notebooks.py [NOTEBOOK…]        needs the extra `docs`
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent / "notebooks"
SECONDS = 1800
"""Longest wait for a cell."""


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new execution, without progress and times, which differ every time.

    Raises nbclient's CellExecutionError where a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    # Each cell's own times would be in the file otherwise.
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False)
    # The models are too small to share; and no kernel asks the hub.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as folder:
        client.execute(cwd=folder)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if is_result(output)]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def is_result(output: nbformat.NotebookNode) -> bool:
    """Whether an output is what a cell prints or returns; messages and progress are on standard error or displays."""
    return output.output_type == "execute_result" or output.get("name") == "stdout"


def main() -> None:
    """Execute and write the notebooks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
