"""Entry point of `svote-helper`: runs a command, maps errors to messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from helper.cli.command_line import COMPLETION_VARIABLE, create_cli, create_completing_cli
from helper.cli.output import ExitCode, discard_output, print_message
from helper.errors import HelperError

INTERRUPTED_EXIT_CODE: Final = 130
_STREAMS: Final = ("stdin", "stdout", "stderr")
_UNWRITABLE: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of an output whose reader has closed it, or whose disk is full."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    _replace_closed_streams()
    try:
        cli = create_completing_cli(os.environ) if COMPLETION_VARIABLE in os.environ else create_cli(argv)
        try:
            cli(args=argv, prog_name="svote-helper")
        finally:
            sys.stdout.flush()
    except HelperError as error:
        _print_error(error)
        sys.exit(ExitCode.FAILURE)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        discard_output()
        if error.errno != errno.EPIPE:
            print_message(f"the output cannot be written: {error.strerror}")
        sys.exit(ExitCode.FAILURE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
    sys.exit(ExitCode.OK)


def _replace_closed_streams() -> None:
    """Connect closed standard streams to the null device: the next opened file, a database, would get their number."""
    for number, name in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _print_error(error: HelperError) -> None:
    """Print an error and its advice, in the journal with the priority of an error."""
    import logging  # noqa: PLC0415 - few commands fail

    from helper.runtime.systemd import is_journal, priority_prefix  # noqa: PLC0415

    prefix = priority_prefix(logging.ERROR) if is_journal(os.environ, sys.stderr) else ""
    print_message("\n".join(f"{prefix}{line}" for line in f"{error}\n{error.advice}".split("\n")))
