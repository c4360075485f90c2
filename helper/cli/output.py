"""How commands speak: exit codes, the machine's line, tables for eyes and plain lines for pipes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NoReturn

import orjson


class Exit(IntEnum):
    """What a command's exit code says."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    DEGRADED = 3
    NOT_AUTHORISED = 4
    NOT_FOUND = 5
    UNREACHABLE = 6


def emit_json(value: Any) -> None:
    """Write the machine's line; call it last."""
    sys.stderr.flush()
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Tell a person something that is not the answer itself."""
    sys.stderr.write(text + "\n")


def fail(text: str, code: Exit = Exit.FAILURE) -> NoReturn:
    """Say what went wrong and end."""
    import typer  # noqa: PLC0415 - see helper.cli.main

    say(text)
    raise typer.Exit(code)


def colours() -> bool:
    """Whether standard output is a terminal that may be coloured (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """How many columns the terminal has; None where standard output is none, and lines are as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table on a terminal (plain with NO_COLOR); elsewhere tab-separated lines, the names first."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            sys.stdout.write("\t".join(one_line(value) for value in row) + "\n")
        return
    # not at the top: most commands print no table, and rich takes its time to load
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(escape(one_line(value)) for value in row))
    Console().print(table)


def one_line(value: object) -> str:
    """A value in one line without control characters, which could move a terminal's cursor."""
    text = "-" if value is None else str(value)
    return "".join(char if char.isprintable() else " " for char in text)
