"""The commands that publish a trained model: `push` and `merge`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from regretless.cli.output import only_results
from regretless.core.errors import ConfigError
from regretless.core.paths import refuse_urls
from regretless.core.terminal import FoldingTable, console, print_json, print_note, terminal
from regretless.training.upload import listing, upload, uploads


def push(
    folder: Path,
    repository: str,
    *,
    dry_run: bool,
    with_report: bool,
    license: str | None,
    private: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Print what goes up, and upload it unless `dry_run`. Raises ConfigError for what cannot be uploaded."""
    refuse_urls({"MODEL_FOLDER": folder})
    report = report_of(folder) if with_report else None
    files, notes = uploads(folder, repository, report=report, license=license)
    sizes = listing(files)
    if not as_json:
        table = FoldingTable("file", title=f"{folder} → {repository}")
        table.add_column("bytes", justify="right")
        for file, size in sizes.items():
            table.add_row(file, f"{size:,}")
        terminal().print(table)
    goes = {Path(file).parts[0] for file in sizes}
    stays = sorted(path.name for path in folder.iterdir() if path.name not in goes)
    if stays:
        console.print(f"stays here: {', '.join(stays)}", soft_wrap=True)
    if report is not None:
        notes = [*notes, f"{report.name} shows prompts and responses"]
    for note in notes:
        print_note(f"note: {note}")
    if dry_run:
        console.print("nothing was uploaded (--dry-run)")
        address = None
    else:
        with only_results():
            address = upload(files, repository, private=private, revision=revision)
    if as_json:
        print_json({"repository": repository, "files": sizes, "stays": stays, "notes": notes, "address": address})
    elif address is not None:
        terminal().print(f"push: {address}", soft_wrap=True)


def report_of(folder: Path) -> Path:
    """The report of the run that a trained model's folder belongs to. Raises ConfigError if there is none."""
    for run in folder.resolve().parents:
        if (report := run / "report" / "report.html").is_file():
            return report
        if (run / "recipe.yaml").is_file():
            break
    raise ConfigError(f"--with-report: no report/report.html in the run of {folder}; `regretless report` writes it")


def merge(adapter: Path, out: Path, *, base: str | None, dtype: str, as_json: bool) -> None:
    """Merge an adapter and print how the merged model compares. Raises what `merge_adapter` raises."""
    # Imported here, because `push` needs no model and so no torch.
    from regretless.modeling.load import quiet_libraries
    from regretless.training.merge import merge_adapter

    refuse_urls({"ADAPTER": adapter, "OUT": out})
    quiet_libraries()
    with only_results():
        result = merge_adapter(adapter, out, base=base, dtype=dtype)
    if as_json:
        print_json({"output": str(out), **dataclasses.asdict(result)})
    else:
        terminal().print(f"merge: wrote {out}: {result}", soft_wrap=True)
