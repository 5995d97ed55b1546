"""Tables of a comparison, laid out once and written as Markdown, LaTeX, HTML, CSV or for the terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.table import Table as Screen
from rich.text import Text

from regretless.core.text_cleaning import one_line
from regretless.studies.compared_runs import Run
from regretless.studies.comparison import DIGITS, Column, Comparison, Difference, Over, Table, TableCell, records
from regretless.studies.evaluations import PASS_AT_1_KEY

MISSING = "–"


@dataclass(frozen=True)
class TableEntry:
    """One cell of a table."""

    value: str
    spread: str = ""
    """Behind the value: ± standard deviation."""
    details: tuple[str, ...] = ()
    """Below it: interval, p-values, number of seeds where it is not the table's."""
    rank: int | None = None
    """1 is shown in bold, 2 underlined."""
    runs: tuple[tuple[str, str, Run], ...] = ()
    """Seed (empty for one run), value and run of all that the value is the mean of."""


@dataclass(frozen=True)
class Block:
    """The rows of one model: labels and entries."""

    model: str
    rows: tuple[tuple[str, tuple[TableEntry, ...]], ...]


@dataclass(frozen=True)
class TableLayout:
    """One table, whatever format it is written in."""

    name: str
    """For labels and file names."""
    caption: str
    heads: tuple[tuple[str, ...], ...]
    """Lines of each column's head; the first column, that of the methods, has none."""
    blocks: tuple[Block, ...]


def layouts(comparison: Comparison) -> list[TableLayout]:
    """All tables: results, then differences to the baseline. Models with equal columns and captions share one."""
    groups: dict[tuple[str, tuple[Column, ...]], list[Table]] = {}
    for table in comparison.tables:
        groups.setdefault((table.caption, table.columns), []).append(table)
    laid_out = []
    for number, ((caption, columns), tables) in enumerate(groups.items(), 1):
        heads = tuple(_head(column) for column in columns)
        blocks = tuple(Block(table.model, tuple(_results(table))) for table in tables)
        laid_out.append(TableLayout(f"results-{number}", caption, heads, blocks))
        if any(cell.difference for table in tables for cell in table.cells.values()):
            blocks = tuple(Block(table.model, tuple(_differences(table))) for table in tables)
            text = _difference_caption(comparison, tables)
            laid_out.append(TableLayout(f"differences-{number}", text, heads, blocks))
    return laid_out


def title_of(column: Column) -> str:
    """The column in one line: the benchmark, and its metric if that is not Pass@1."""
    return column.benchmark if column.metric == PASS_AT_1_KEY else f"{column.benchmark} {metric_of(column)}"


def metric_of(column: Column) -> str:
    """Name of the column's metric."""
    return "Pass@1" if column.metric == PASS_AT_1_KEY else column.metric.replace("_", " ")


def _head(column: Column) -> tuple[str, ...]:
    judge = [f"judge: {column.judge}"] if column.judge else []
    return (column.benchmark, f"{metric_of(column)} ({column.unit})", *judge)


def _results(table: Table) -> Iterable[tuple[str, tuple[TableEntry, ...]]]:
    for row in table.rows:
        yield row.label, tuple(_result(table, table.cells.get((row, column))) for column in table.columns)


def _result(table: Table, cell: TableCell | None) -> TableEntry:
    if cell is None or cell.value is None:
        return TableEntry(MISSING)
    is_short = table.over is not Over.PROBLEMS and 1 < table.n != cell.n and cell.n > 1
    return TableEntry(
        value=_number(cell.value),
        spread="" if cell.sd is None else _number(cell.sd),
        details=(*_interval(cell.low, cell.high), *([f"n = {cell.n}"] if is_short else [])),
        rank=cell.rank,
        runs=tuple((seed, _number(value), run) for seed, value, run in cell.parts),
    )


def _differences(table: Table) -> Iterable[tuple[str, tuple[TableEntry, ...]]]:
    for row in table.rows:
        cells = [table.cells.get((row, column)) for column in table.columns]
        if any(cell is not None and cell.difference is not None for cell in cells):
            yield row.label, tuple(_difference(cell.difference if cell else None) for cell in cells)


def _difference(difference: Difference | None) -> TableEntry:
    if difference is None:
        return TableEntry(MISSING)
    p = (
        ()
        if difference.p is None or difference.p_holm is None
        else (f"p {_p(difference.p)}, Holm {_p(difference.p_holm)}",)
    )
    return TableEntry(_number(difference.value, "+"), details=(*_interval(difference.low, difference.high, "+"), *p))


def _difference_caption(comparison: Comparison, tables: Sequence[Table]) -> str:
    differences = [cell.difference for table in tables for cell in table.cells.values() if cell.difference]
    paired = dict.fromkeys(
        f"over {difference.over} ({difference.test} test)" for difference in differences if difference.test
    )
    variants = {row.variant for table in tables for row in table.rows} - {""}
    same = f" of the same {'method' if comparison.baseline in variants else 'variant'}" if variants else ""
    untested = any(difference.p is None for difference in differences)
    return (
        f"Differences to {comparison.baseline}{same}"
        + (f", paired {'; '.join(paired)}, with 95 % intervals" if paired else "")
        + f". Holm's correction counts all comparisons made: {comparison.comparisons}."
        + (" Differences without a p-value could not be tested." if untested else "")
    )


def _number(value: float, sign: str = "") -> str:
    return f"{round(value, DIGITS) + 0.0:{sign}.{DIGITS}f}".replace("-", "−")  # + 0.0: no minus before a zero


def _interval(low: float | None, high: float | None, sign: str = "") -> tuple[str, ...]:
    return () if low is None or high is None else (f"[{_number(low, sign)}, {_number(high, sign)}]",)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


# --- formats ---------------------------------------------------------------------------------------------------------


def as_markdown(comparison: Comparison) -> str:
    """All tables as Markdown."""
    parts = []
    for layout in layouts(comparison):
        lines = ["", *(" ".join(map(_markdown_text, head)) for head in layout.heads)]
        text = [_markdown_text(layout.caption), "", _bars(lines), _bars(["---", *["---:"] * len(layout.heads)])]
        for block in layout.blocks:
            if len(_models(comparison)) > 1:
                text.append(_bars([f"*{_markdown_text(block.model)}*", *[""] * len(layout.heads)]))
            text += [_bars([_markdown_text(label), *map(_markdown_entry, row)]) for label, row in block.rows]
        parts.append("\n".join(text))
    if comparison.notes:
        parts.append("\n".join(f"- {_markdown_text(note)}" for note in comparison.notes))
    return "\n\n".join(parts) + "\n"


def _models(comparison: Comparison) -> set[str]:
    return {table.model for table in comparison.tables}


def _bars(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_text(text: str) -> str:
    """A text that Markdown shows as it is. An underscore inside a word means nothing to it."""
    return re.sub(r"([\\`*<>|\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", one_line(text))


def _markdown_entry(entry: TableEntry) -> str:
    value = {1: "**{}**", 2: "<ins>{}</ins>"}.get(entry.rank or 0, "{}").format(entry.value)
    return _joined(value, " ± ", entry.spread, entry.details)


def _joined(value: str, sign: str, spread: str, details: Iterable[str]) -> str:
    return " ".join([f"{value}{sign}{spread}" if spread else value, *details])


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": "$-$",
    "–": "--",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
"""Characters that LaTeX does not print as they are."""


def as_latex(comparison: Comparison) -> str:
    """All tables as LaTeX, for the package booktabs."""
    parts = ["% needs \\usepackage{booktabs}"]
    for layout in layouts(comparison):
        width = 1 + len(layout.heads)
        depth = max(map(len, layout.heads))
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex_text(layout.caption)}}}",
            rf"\label{{tab:{layout.name}}}",
            rf"\begin{{tabular}}{{l{'c' * len(layout.heads)}}}",
            r"\toprule",
        ]
        for number in range(depth):
            texts = [_latex_text(head[number]) if number < len(head) else "" for head in layout.heads]
            lines.append(_ampersands(["Method" if number == 0 else "", *texts]))
        for block in layout.blocks:
            lines.append(r"\midrule")
            if len(_models(comparison)) > 1:
                lines += [rf"\multicolumn{{{width}}}{{c}}{{{_latex_text(block.model)}}} \\", r"\midrule"]
            for label, row in block.rows:
                lines.append(_ampersands([_latex_text(label), *map(_latex_value, row)]))
                if any(entry.details for entry in row):
                    details = [
                        rf"{{\tiny {_latex_text(', '.join(entry.details))}}}" if entry.details else "" for entry in row
                    ]
                    lines.append(_ampersands(["", *details]))
        lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
        parts.append("\n".join(lines))
    parts += [f"% {one_line(note)}" for note in comparison.notes]
    return "\n\n".join(parts) + "\n"


def _ampersands(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in one_line(text))


def _latex_value(entry: TableEntry) -> str:
    value = {1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}.get(entry.rank or 0, "{}").format(_latex_text(entry.value))
    return _joined(value, r" $\pm$ ", entry.spread, [])


def as_csv(comparison: Comparison) -> str:
    """One line for each cell, with all digits; empty for what is not known.

    A text that a spreadsheet would compute has an apostrophe in front, which spreadsheets do not show.
    """
    rows = list(records(comparison))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {
                key: f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULAS) else cell
                for key, cell in row.items()
            }
        )
    return text.getvalue()


FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of what spreadsheets compute."""


def as_html(comparison: Comparison, link: Callable[[Run], str | None] = lambda run: None) -> Markup:
    """All tables as an HTML fragment.

    link: address of a run's own report, if it has one. A value of one run leads there, and the seeds of a mean to
    their runs' reports.
    """
    parts = []
    for layout in layouts(comparison):
        heads = [Markup("<br>").join(head) for head in layout.heads]
        lines = [
            Markup('<div class="wide"><table id="{}">').format(layout.name),
            Markup("<caption>{}</caption>").format(layout.caption),
            Markup('<thead><tr><th scope="col">method</th>{}</tr></thead>').format(
                Markup("").join(Markup('<th scope="col" class="number">{}</th>').format(head) for head in heads)
            ),
        ]
        for block in layout.blocks:
            lines.append(Markup("<tbody>"))
            if len(_models(comparison)) > 1:
                lines.append(
                    Markup('<tr class="model"><th scope="rowgroup" colspan="{}">{}</th></tr>').format(
                        1 + len(heads), block.model
                    )
                )
            for label, row in block.rows:
                cells = Markup("").join(
                    Markup('<td class="number">{}</td>').format(_html(entry, link)) for entry in row
                )
                lines.append(Markup('<tr><th scope="row">{}</th>{}</tr>').format(label, cells))
            lines.append(Markup("</tbody>"))
        lines.append(Markup("</table></div>"))
        parts.append(Markup("\n").join(lines))
    return Markup("\n").join(parts)


def plain_html(caption: str, columns: Sequence[str], rows: Iterable[tuple[str, Iterable[str]]]) -> Markup:
    """A table of texts, each row with its name: `columns` are the heads, that of the names first."""
    first, *others = columns
    heads = Markup("").join(Markup('<th scope="col" class="number">{}</th>').format(head) for head in others)
    lines = [
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            name, Markup("").join(Markup('<td class="number">{}</td>').format(cell) for cell in cells)
        )
        for name, cells in rows
    ]
    return Markup(
        '<div class="wide"><table><caption>{}</caption><thead><tr><th scope="col">{}</th>{}</tr></thead>'
        "<tbody>{}</tbody></table></div>"
    ).format(caption, first, heads, Markup("").join(lines))


def _html(entry: TableEntry, link: Callable[[Run], str | None]) -> Markup:
    value = Markup({1: "<strong>{}</strong>", 2: "<ins>{}</ins>"}.get(entry.rank or 0, "{}")).format(entry.value)
    reports = [(seed, text, address) for seed, text, run in entry.runs if (address := link(run)) is not None]
    if reports and not any(seed for seed, _, _ in reports):
        value = Markup('<a href="{}">{}</a>').format(reports[0][2], value)
        reports = []
    if entry.spread:
        value = Markup("{} ± {}").format(value, entry.spread)
    lines = [value, *(Markup("<small>{}</small>").format(detail) for detail in entry.details)]
    if reports:
        links = [
            Markup('<a href="{}" title="{}">{}</a>').format(address, text, seed) for seed, text, address in reports
        ]
        lines.append(Markup("<small>seeds {}</small>").format(Markup(" ").join(links)))
    return Markup("<br>").join(lines)


def for_terminal(comparison: Comparison, width: int) -> RenderableType:
    """All tables, for a terminal with so many columns.

    Names are never cut: columns that do not fit beside the others come in a further table below, and the head of one
    that does not fit beside the methods' names stands above its table. Only a name wider than the terminal is broken.
    """
    parts: list[RenderableType] = []
    for layout in layouts(comparison):
        parts.append(Text(layout.caption))
        for columns in _columns_that_fit(layout, width):
            heads = [layout.heads[number] for number in columns]
            if _width(layout, columns, heads) > width:
                parts.append(Text("\n".join(heads[0])))
                heads = [()]
            parts.append(_screen(layout, columns, heads, len(_models(comparison)) > 1))
    parts += [Text(f"- {note}") for note in comparison.notes]
    return Group(*parts)


FRAME = 3
"""Characters that a column of a terminal's table needs beside its text."""


def _columns_that_fit(layout: TableLayout, width: int) -> list[list[int]]:
    """The columns of each table on the terminal, by their numbers; at least one each."""
    groups: list[list[int]] = []
    for number in range(len(layout.heads)):
        wider = [*(groups[-1] if groups else []), number]
        if groups and _width(layout, wider, [layout.heads[column] for column in wider]) <= width:
            groups[-1] = wider
        else:
            groups.append([number])
    return groups


def _width(layout: TableLayout, columns: Sequence[int], heads: Sequence[Sequence[str]]) -> int:
    """Characters that a table of these columns takes."""
    names = [
        "method",
        *(text for block in layout.blocks for text in (block.model, *(label for label, _ in block.rows))),
    ]
    widths = [max(map(len, names))]
    for number, head in zip(columns, heads, strict=True):
        lines = [line for block in layout.blocks for _, row in block.rows for line in _lines(row[number])]
        widths.append(max(map(len, [*head, *lines])))
    return sum(FRAME + width for width in widths) + 1


def _lines(entry: TableEntry) -> list[str]:
    return [_joined(entry.value, " ± ", entry.spread, []), *entry.details]


def _screen(layout: TableLayout, columns: Sequence[int], heads: Sequence[Sequence[str]], has_models: bool) -> Screen:
    table = Screen()
    table.add_column("method", overflow="fold")
    for head in heads:
        table.add_column("\n".join(head), justify="right", overflow="fold", no_wrap=True)
    for block in layout.blocks:
        if has_models:
            table.add_row(Text(block.model, style="italic"))
        for position, (label, row) in enumerate(block.rows, 1):
            cells = []
            for number in columns:
                text = Text("\n".join(_lines(row[number])))
                text.stylize({1: "bold", 2: "underline"}.get(row[number].rank or 0, ""), 0, len(row[number].value))
                cells.append(text)
            table.add_row(Text(label), *cells, end_section=position == len(block.rows))
    return table


FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "markdown": as_markdown,
    "latex": as_latex,
    "csv": as_csv,
    "html": as_html,
}
"""Formats of text by name; the terminal's depends on its width."""
