"""Where rows come from: a file, a folder of a data set, or a data set on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regretless.core.errors import DataError
from regretless.core.hub import one_attempt, why

FILE_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json")
"""Files that `rows.read_rows` reads."""
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files by which `datasets` recognizes a folder that `save_to_disk` wrote: of one data set, of several splits."""


def open_source(source: str | Path, split: str = "train", subset: str | None = None) -> Path | Any:
    """The file that a source names, else the data set (`datasets`) in a folder or on the hub.

    Raises DataError if there is neither.
    """
    path = Path(source)
    if path.is_file() or path.suffix in FILE_SUFFIXES:
        return path
    if not path.is_dir() and str(source).startswith(("/", ".", "~")):
        raise DataError(f"{source}: no such file or folder")
    return _load_dataset(path, str(source), split, subset)


def _load_dataset(path: Path, source: str, split: str, subset: str | None) -> Any:
    # Imported here: the import takes a second, and files do not need it.
    import datasets

    place = f"{source} ({'' if subset is None else f'subset {subset}, '}split {split})"
    offline: str | None = None
    try:
        if (path / SAVED_DATASET).is_file() or (path / SAVED_SPLITS).is_file():
            saved = datasets.load_from_disk(source)
            if isinstance(saved, datasets.DatasetDict) and split not in saved:
                raise DataError(f"{place}: no such split; found {', '.join(map(str, saved))}")
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        with one_attempt(path) as offline:
            return datasets.load_dataset(source, subset, split=split)
    except DataError:
        raise
    except Exception as error:  # hub, network and format may raise anything: the user needs one line
        raise DataError(
            f"{place}: expected a file ({', '.join(FILE_SUFFIXES)}), a data set folder or a hub id; it could not be "
            f"loaded: {type(error).__name__}: {why(error, offline)}\n"
            "  without a network, download it elsewhere and give the path"
        ) from error
