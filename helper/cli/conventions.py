"""What commands share: options, exit codes, errors, output and confirmation."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from helper.core.json_records import to_json
from helper.core.text_forms import clean_text
from helper.errors import (
    BackupKeyError,
    BucketError,
    BucketRefused,
    ChainUnavailable,
    DaemonUnreachableError,
    NotFound,
    StoreUnreachable,
    UsageError,
)
from helper.runtime.process_security import acting_as_owner

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

UNWRITABLE: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of an output whose reader has closed it, or whose disk is full or failed; see `is_output_error`."""

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        readable=False,  # `read_settings` checks the file and maps errors to exit codes
        help="Settings file (default: $SVOTE_HELPER_CONFIG, ./helper.toml, /etc/svote-helper/helper.toml).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")]
DbOption = Annotated[
    Path | None, typer.Option("--db", readable=False, help="Database file (default: [helper] db_path).")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation; required without a terminal.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of commands about one queue."""

    config: ConfigOption = None
    db: DbOption = None
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions(QueueOptions):
    """Options of commands that change one queue."""

    dry_run: DryRunOption = False
    yes: YesOption = False


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of each class of options, such as `QueueOptions`, that is the type of a parameter.

    Refuses NaN and infinity, which JSON does not have.
    """
    parameters = signature(command, eval_str=True).parameters.values()
    classes: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
    options: list[Parameter] = []
    for each in parameters:
        own = signature(classes[each.name], eval_str=True).parameters.values() if each.name in classes else [each]
        options += [option.replace(kind=Parameter.KEYWORD_ONLY) for option in own]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter("must be a finite number", param_hint=[f"--{name.replace('_', '-')}"])
        for name, kind in classes.items():
            values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
        command(**values)

    # typer reads both
    vars(run)["__signature__"] = Signature(options)
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


class ExitCode(IntEnum):
    """Exit codes of commands."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    DEGRADED = 3
    NOT_AUTHORIZED = 4
    NOT_FOUND = 5
    UNREACHABLE = 6


def emit(
    result: DataclassInstance | dict[str, Any],
    text: str | Callable[[dict[str, Any]], None],
    *,
    json: bool,
    code: ExitCode = ExitCode.OK,
) -> None:
    """Write the result of a command, as JSON or as text, and end the command if its exit code is not 0.

    `text` may be a function that prints the result's plain values.
    """
    values = result if isinstance(result, dict) else to_json(result)
    if json:
        emit_json(values)
    elif callable(text):
        text(values)
    else:
        typer.echo(text)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


def emit_json(value: Any) -> None:
    """Write a plain value as one line of JSON. Must be the last output."""
    sys.stderr.flush()
    sys.stdout.write(encode_json_line(value))
    sys.stdout.flush()


def encode_json_line(value: Any) -> str:
    """Encode a value as one line of JSON in printable ASCII."""
    # the encoder escapes all other control characters
    return json.dumps(value, separators=(",", ":")).replace("\x7f", r"\u007f") + "\n"


def print_message(text: str) -> None:
    """Write a message to standard error, without terminal control characters."""
    sys.stderr.write("\n".join(map(format_one_line, text.split("\n"))) + "\n")


def fail(text: str, code: ExitCode = ExitCode.FAILURE) -> NoReturn:
    """Write an error message and end the command."""
    print_message(text)
    raise typer.Exit(code)


def is_output_error(error: OSError) -> bool:
    """Return whether an error is that of the output, and not that of a file.

    Errors of files have the name of the file, except if an open file cannot be read. An output that failed fails again,
    because the data is still in its buffer.
    """
    if error.errno != errno.EIO or error.filename is not None:
        return error.errno in UNWRITABLE and error.filename is None
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def discard_output() -> None:
    """Connect standard output to the null device, so that the exit does not fail to write what is buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a file, and remove it again if the body raises. Ends the command if it exists."""
    with acting_as_owner(path) as real:
        try:
            file = real.open("xb")
        except FileExistsError:
            fail(f"{path} already exists")
        try:
            with file:
                yield file
        except BaseException:
            real.unlink(missing_ok=True)
            raise


def format_one_line(value: object) -> str:
    """Format a value on one line, without control characters (`clean_text`)."""
    return "-" if value is None else clean_text(str(value))


@contextmanager
def map_errors_to_exit_codes() -> Iterator[None]:
    """End a command, as a decorator, with 2 (invalid argument), 4 (no permission), 5 (not found) or 6 (unreachable).

    All other `HelperError`s end the command with 1 (`helper.cli.main`), as do other errors of files. Any other
    ValueError is a defect, and keeps its traceback.
    """
    try:
        yield
    except NotFound as error:
        fail(f"{error}\n{error.advice}", ExitCode.NOT_FOUND)
    except (BucketRefused, BackupKeyError) as error:
        fail(f"{error}\n{error.advice}", ExitCode.NOT_AUTHORIZED)
    except (DaemonUnreachableError, ChainUnavailable, BucketError, StoreUnreachable) as error:
        fail(f"{error}\n{error.advice}", ExitCode.UNREACHABLE)
    except FileNotFoundError as error:
        fail(f"{error.filename or 'the working directory'} does not exist", ExitCode.NOT_FOUND)
    except PermissionError as error:
        fail(f"no permission to use {error.filename}" if error.filename else str(error), ExitCode.NOT_AUTHORIZED)
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and is_output_error(error):
            raise
        fail(f"cannot read file: {error}")
    except (UsageError, UnicodeEncodeError) as error:  # the latter: an argument that is not UTF-8
        fail(str(error), ExitCode.USAGE)


def require_confirmation(*, yes: bool, dry_run: bool | None = None) -> None:
    """End the command if it changes something and cannot be confirmed. `dry_run` is None if it has no preview."""
    if not yes and not dry_run and not sys.stdin.isatty():
        preview = "" if dry_run is None else ", or --dry-run for a preview"
        fail(f"not a terminal, cannot ask for confirmation: use --yes{preview}", ExitCode.USAGE)


def confirm_or_exit(question: str, *, yes: bool) -> None:
    """Ask for confirmation unless `--yes` was given. "No" ends the command."""
    if not yes and not typer.confirm(question, err=True):
        fail("nothing was changed")
