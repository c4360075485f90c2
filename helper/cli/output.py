"""How commands speak: exit codes, the machine's line, tables for eyes and plain lines for pipes."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, NoReturn

import orjson

from helper.core.text import clean_text

_ENDLESS: Final = 10_000
_RAW_CONTROL: Final = re.compile("[\x7f-\x9f]")
"""Control characters that JSON encoders leave as they are."""


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
    sys.stdout.write(json_line(value))
    sys.stdout.flush()


def json_line(value: Any) -> str:
    """A value as one line of JSON, with the characters escaped that would command a terminal."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # orjson refuses lone surrogates, which arguments and paths may contain
        import json  # noqa: PLC0415 - for this rare case only

        text = json.dumps(value, separators=(",", ":"))
    return _RAW_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def say(text: str) -> None:
    """Tell a person something that is not the answer itself; words of others in it move no cursor."""
    sys.stderr.write("\n".join(map(one_line, text.split("\n"))) + "\n")


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
    """A table on a terminal (plain with NO_COLOR), or a line a value where it is too narrow for one; elsewhere
    tab-separated lines, the names first.
    """
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            sys.stdout.write("\t".join(one_line(value) for value in row) + "\n")
        return
    # not at the top: most commands print no table, and rich takes its time to load
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(*columns, title=title, title_justify="left")
    cells = [[one_line(value) for value in row] for row in rows]
    for row in cells:
        table.add_row(*map(escape, row))
    console = Console()
    # measured in a terminal without end: in its own the longest words would be cut
    if console.measure(table, options=console.options.update_width(_ENDLESS)).minimum <= console.width:
        console.print(table)
        return
    for line in _records(columns, cells):
        console.print(line, markup=False, highlight=False, overflow="fold")


def _records(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Each row as lines of a name and a value; a table of two columns has its names in the first."""
    for number, row in enumerate(rows):
        if len(columns) == 2:
            yield f"{row[0]}: {row[1]}"
            continue
        if number:
            yield ""
        for name, value in zip(columns, row, strict=True):
            yield f"{name}: {value}"


def one_line(value: object) -> str:
    """A value in one line, without control characters (`clean_text`)."""
    return "-" if value is None else clean_text(str(value))
