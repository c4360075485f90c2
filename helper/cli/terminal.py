"""Tables and progress bars on terminals; plain lines in pipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from helper.cli.conventions import format_one_line

_UNLIMITED_WIDTH: Final = 10_000


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on a terminal, or one line per value if it is too narrow.

    If standard output is not a terminal, print tab-separated lines with a header.
    """
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            sys.stdout.write("\t".join(format_one_line(value) for value in row) + "\n")
        return
    table = Table(*columns)
    cells = [[format_one_line(value) for value in row] for row in rows]
    for row in cells:
        table.add_row(*map(escape, row))
    console = Console()
    # measured with unlimited width, because rich cuts long words to fit the console
    if console.measure(table, options=console.options.update_width(_UNLIMITED_WIDTH)).minimum <= console.width:
        console.print(table)
        return
    for line in _format_records(columns, cells):
        console.print(line, markup=False, highlight=False, overflow="fold")


def _format_records(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Format rows as `name: value` lines; in a table of two columns, the first has the names."""
    for number, row in enumerate(rows):
        if len(columns) == 2:
            yield f"{row[0]}: {row[1]}"
            continue
        if number:
            yield ""
        for name, value in zip(columns, row, strict=True):
            yield f"{name}: {value}"


def emit_fields(fields: Mapping[str, Any]) -> None:
    """Print fields as a table of names and values."""
    emit_table(("field", "value"), [(name.replace("_", " "), value) for name, value in fields.items()])


@contextmanager
def progress_bar(text: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal; print nothing elsewhere. Yields `rich.progress.Progress.update` of its task.

    Args:
        text: format of the text before the bar. Its field `task.fields[shown]` is set by updates.
        total: number of items, None while unknown.
    """
    if not sys.stderr.isatty():
        yield lambda **_: None
        return
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.update, bar.add_task(text, total=total, shown=""))
