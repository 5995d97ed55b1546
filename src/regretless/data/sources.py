"""Opens a source of rows: a file, the folder of a data set, or a data set on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regretless.core.errors import DataError
from regretless.core.files import read_json
from regretless.core.hub import one_attempt, why
from regretless.data.rows import FILE_SUFFIXES

SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files by which `datasets` recognizes a folder that `save_to_disk` wrote: of one data set, of several splits."""
FORMATS = {".parquet": "parquet", ".jsonl": "JSON", ".ndjson": "JSON", ".json": "JSON", ".csv": "CSV", ".tsv": "TSV"}
"""Formats of the files in a folder, by suffix (before `.gz`); `datasets` reads only the most common one of a folder."""
ONE_BY_ONE = (
    "\n  a folder is loaded as a whole; give its .jsonl or .parquet files one at a time to see which rows are broken"
)


def open_source(source: str | Path, split: str = "train", subset: str | None = None) -> Path | Any:
    """The file that a source names, else the data set (`datasets`) in a folder or on the hub.

    Raises DataError if there is neither.
    """
    path = Path(source)
    if not path.exists() and set("*?") & set(path.name):
        raise DataError(f"{source}: patterns are not read; give the folder, whose files are read as one data set")
    if path.is_file() or path.suffix in FILE_SUFFIXES:
        return path
    if not path.is_dir() and str(source).startswith(("/", ".", "~")):
        raise DataError(f"{source}: no such file or folder")
    return _load_dataset(path, str(source), split, subset)


def held_out_split(source: str | Path) -> str:
    """The split of a source to evaluate on: its only one, or its only one besides `train`.

    Raises DataError for a data set with several of them, or whose splits cannot be told.
    """
    path = Path(source)
    if path.is_file() or path.suffix in FILE_SUFFIXES or (path / SAVED_DATASET).is_file():
        return "train"
    if (path / SAVED_SPLITS).is_file():
        splits = list(map(str, read_json(path / SAVED_SPLITS)["splits"]))
    else:
        import datasets

        try:
            with one_attempt(path):
                splits = list(map(str, datasets.get_dataset_split_names(str(source))))
        except Exception as error:  # hub, network and format may raise anything
            open_source(source)  # says what is wrong, if it cannot be read at all
            raise DataError(
                f"{source}: its splits could not be listed ({why(error, None)}); give the rows themselves, such as "
                f'datasets.load_dataset("{source}", split="test")'
            ) from error
    others = [split for split in splits if split != "train"] if len(splits) > 1 else splits
    if len(others) != 1:
        raise DataError(
            f"{source}: expected one split to evaluate on, found {', '.join(splits)}; give the rows themselves, such "
            f'as datasets.load_dataset("{source}", split="{others[0]}")'
        )
    return others[0]


def _load_dataset(path: Path, source: str, split: str, subset: str | None) -> Any:
    # Imported here: the import takes a second, and files do not need it.
    import datasets

    where = f"{source} ({'' if subset is None else f'subset {subset}, '}split {split})"
    offline: str | None = None
    try:
        if (path / SAVED_DATASET).is_file() or (path / SAVED_SPLITS).is_file():
            saved = datasets.load_from_disk(source)
            if isinstance(saved, datasets.DatasetDict) and split not in saved:
                splits = ", ".join(map(str, saved))
                raise DataError(f"{where}: no such split; found {splits}; `split` names another")
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        _check_one_format(path)
        with one_attempt(path) as offline:
            return datasets.load_dataset(source, subset, split=split)
    except DataError:
        raise
    except Exception as error:  # hub, network and format may raise anything: the user needs one line
        if path.is_dir():
            cause, remedy = error, ""
            if isinstance(error.__cause__, Exception):  # a file of the folder is broken
                cause, remedy = error.__cause__, ONE_BY_ONE
            raise DataError(
                f"{where}: the folder could not be loaded: {type(cause).__name__}: {why(cause, None)}{remedy}"
            ) from error
        raise DataError(
            f"{where}: expected a file ({', '.join(FILE_SUFFIXES)}), a data set folder or a hub id; it could not be "
            f"loaded: {type(error).__name__}: {why(error, offline)}\n"
            "  without a network, download it elsewhere and give the path"
        ) from error


def _check_one_format(path: Path) -> None:
    """Raise DataError for a folder with files of several formats, of which all but one would be left out in silence.

    A folder with a data card (README.md) says itself which files belong to it.
    """
    if not path.is_dir() or (path / "README.md").exists():
        return
    files: dict[str, str] = {}
    for file in sorted(path.iterdir()):
        kind = FORMATS.get(Path(file.name.removesuffix(".gz")).suffix)
        if kind is not None and not file.name.startswith((".", "_", "dataset_info")):
            files.setdefault(kind, file.name)
    if len(files) > 1:
        formats = ", ".join(f"{kind} ({name})" for kind, name in files.items())
        raise DataError(
            f"{path}: expected files of one format, found {formats}; only those of one would be read: put the "
            "others into a folder of their own"
        )
