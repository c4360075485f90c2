"""Output of commands: exit codes, JSON lines, tables on terminals, plain lines in pipes."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Final, NoReturn

import orjson

from helper.core.text_forms import clean_text
from helper.errors import (
    BucketError,
    BucketRefused,
    ChainUnavailable,
    DaemonUnreachableError,
    NotFound,
    StoreUnreachable,
)

_UNLIMITED_WIDTH: Final = 10_000
_UNESCAPED_CONTROL: Final = re.compile("[\x7f-\x9f]")
"""Control characters that JSON encoders do not escape."""


class ExitCode(IntEnum):
    """Exit codes of commands."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    DEGRADED = 3
    NOT_AUTHORISED = 4
    NOT_FOUND = 5
    UNREACHABLE = 6


def emit(result: dict[str, Any], print_text: Callable[[dict[str, Any]], None], *, json: bool) -> None:
    """Write the result of a command, as JSON or as text."""
    if json:
        emit_json(result)
    else:
        print_text(result)


def emit_json(value: Any) -> None:
    """Write a value as one line of JSON. Must be the last output."""
    sys.stderr.flush()
    sys.stdout.write(encode_json_line(value))
    sys.stdout.flush()


def encode_json_line(value: Any) -> str:
    """Encode a value as one line of JSON, with terminal control characters escaped."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # orjson refuses lone surrogates, which arguments and paths may contain
        import json  # noqa: PLC0415 - for this rare case only

        text = json.dumps(value, separators=(",", ":"))
    return _UNESCAPED_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def print_message(text: str) -> None:
    """Write a message to standard error, without terminal control characters."""
    sys.stderr.write("\n".join(map(format_one_line, text.split("\n"))) + "\n")


def fail(text: str, code: ExitCode = ExitCode.FAILURE) -> NoReturn:
    """Write an error message and end the command."""
    import typer  # noqa: PLC0415 - see helper.cli.command_line

    print_message(text)
    raise typer.Exit(code)


def discard_output() -> None:
    """Connect standard output to the null device, so that the exit does not fail to write what is buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def supports_colours() -> bool:
    """Report whether standard output is a terminal that allows colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Return the terminal's width in columns; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table on a terminal, or one line per value if it is too narrow.

    If standard output is not a terminal, print tab-separated lines with a header.
    """
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            sys.stdout.write("\t".join(format_one_line(value) for value in row) + "\n")
        return
    # imported here: rich is slow to import, and most commands print no table
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(*columns, title=title, title_justify="left")
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


def format_one_line(value: object) -> str:
    """Format a value on one line, without control characters (`clean_text`)."""
    return "-" if value is None else clean_text(str(value))


@contextmanager
def map_errors_to_exit_codes() -> Iterator[None]:
    """End the command with 2 (invalid argument), 4 (no permission), 5 (not found) or 6 (unreachable).

    All other `HelperError`s end the command with 1 (`helper.cli.main`).
    """
    try:
        yield
    except NotFound as error:
        fail(f"{error}\n{error.advice}", ExitCode.NOT_FOUND)
    except BucketRefused as error:
        fail(f"{error}\n{error.advice}", ExitCode.NOT_AUTHORISED)
    except (DaemonUnreachableError, ChainUnavailable, BucketError, StoreUnreachable) as error:
        fail(f"{error}\n{error.advice}", ExitCode.UNREACHABLE)
    except PermissionError as error:
        fail(f"no permission to use {error.filename}" if error.filename else str(error), ExitCode.NOT_AUTHORISED)
    except ValueError as error:
        fail(str(error), ExitCode.USAGE)
