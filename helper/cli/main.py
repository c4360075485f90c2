"""`svote-helper`: joins the commands, and turns errors into a line and an exit code.

Only the module of the command that was asked for is loaded, so that the others' libraries cost nothing and a
command works while another cannot be loaded. The parser too is loaded late, after the look at the database's lock.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from helper.cli.output import Exit, say
from helper.cli.single_instance import require_single_instance
from helper.errors import HelperError

if TYPE_CHECKING:
    import typer

COMMANDS: Final = {
    "serve": "helper.cli.serve",
    "devnet": "helper.cli.devnet",
    "demo": "helper.cli.demo",
    "wallet": "helper.cli.wallet",
    "queue": "helper.cli.queue",
    "rounds": "helper.cli.rounds",
    "tx": "helper.cli.tx",
    "proof": "helper.cli.proof",
    "doctor": "helper.cli.doctor",
    "healthcheck": "helper.cli.healthcheck",
    "db": "helper.cli.db",
    "admin": "helper.cli.admin",
    "config": "helper.cli.config",
    "completion": "helper.cli.completion",
    "version": "helper.cli.version",
}
"""Each command and the module whose `app` (a Typer) it is, in the order of the help.

An `app` with a single command and no callback is that command itself, else it is a group.
"""
INTERRUPTED: Final = 130
COMPLETING: Final = "_SVOTE_HELPER_COMPLETE"
"""What a shell sets that completes a command line (`helper.cli.completion`)."""

_HELP: Final = "Keeps encrypted vote shares, and proves and reveals each at the second its wallet chose."


def create_cli(arguments: Sequence[str]) -> typer.Typer:
    """The command line for these arguments: with the command that they name, or with all (for the help)."""
    import typer  # noqa: PLC0415 - with what it loads, most of the time that a second daemon took to be refused

    cli = typer.Typer(
        name="svote-helper",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        # as markup, "[helper] host" would lose its section
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    # without a callback a single command would lose its name
    cli.callback()(_root)
    asked = next((word for word in arguments if not word.startswith("-")), "")
    for name in [asked] if asked in COMMANDS else COMMANDS:
        if importlib.util.find_spec(COMMANDS[name]) is not None:
            _add(cli, name)
    return cli


def create_completing_cli(env: Mapping[str, str]) -> typer.Typer:
    """The command line as far as it is needed to complete what is being typed."""
    import typer  # noqa: PLC0415

    from helper.cli.completion import typed_words  # noqa: PLC0415

    # typer knows its shells only once it has built a command line that has its own options for them
    with_options = typer.Typer(add_completion=True)
    with_options.command()(_root)
    typer.main.get_command(with_options)
    typed = typed_words(env) or []
    if any(word in COMMANDS for word in typed):
        return create_cli(typed)
    cli = create_cli(["completion"])
    for name in COMMANDS:  # only their names are asked for
        if name != "completion":
            cli.command(name)(lambda: None)  # without a text that would be shown beside each
    return cli


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        require_single_instance(given, os.environ)
        cli = create_completing_cli(os.environ) if COMPLETING in os.environ else create_cli(given)
        cli(args=given, prog_name="svote-helper")
    except HelperError as error:
        say(f"{error}\n{error.advice}")
        sys.exit(Exit.FAILURE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(Exit.OK)


def _root() -> None:
    """Nothing of its own; the commands do the work."""


def _add(cli: typer.Typer, name: str) -> None:
    """Load a command's module and join its app."""
    app: typer.Typer = importlib.import_module(COMMANDS[name]).app
    if len(app.registered_commands) == 1 and not app.registered_groups and app.registered_callback is None:
        command = app.registered_commands[0]
        command.name = name
        cli.registered_commands.append(command)
    else:
        cli.add_typer(app, name=name, no_args_is_help=True)
