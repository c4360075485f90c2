"""Entry point of `svote-helper`: runs a command, maps errors to messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from helper.cli.command_line import COMPLETION_VARIABLE, create_cli, create_completing_cli
from helper.cli.output import ExitCode, print_message
from helper.errors import HelperError

INTERRUPTED_EXIT_CODE: Final = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        cli = create_completing_cli(os.environ) if COMPLETION_VARIABLE in os.environ else create_cli(argv)
        cli(args=argv, prog_name="svote-helper")
    except HelperError as error:
        _print_error(error)
        sys.exit(ExitCode.FAILURE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
    sys.exit(ExitCode.OK)


def _print_error(error: HelperError) -> None:
    """Print an error and its advice, in the journal with the priority of an error."""
    import logging  # noqa: PLC0415 - few commands fail

    from helper.runtime.systemd import is_journal, priority_prefix  # noqa: PLC0415

    prefix = priority_prefix(logging.ERROR) if is_journal(os.environ, sys.stderr) else ""
    print_message("\n".join(f"{prefix}{line}" for line in f"{error}\n{error.advice}".split("\n")))
