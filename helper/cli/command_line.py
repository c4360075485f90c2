"""Creates the command line from the modules of the commands.

Only the module of the requested command is imported: start-up is faster, and a command works even if another cannot be
imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Final

import typer

COMMANDS: Final = {
    "serve": "helper.cli.serve",
    "devnet": "helper.cli.devnet",
    "demo": "helper.cli.demo",
    "wallet": "helper.cli.wallet",
    "queue": "helper.cli.queue",
    "rounds": "helper.cli.rounds",
    "chain": "helper.cli.chain",
    "tx": "helper.cli.tx",
    "proof": "helper.cli.proof",
    "plan": "helper.cli.plan",
    "audit": "helper.cli.audit",
    "conformance": "helper.cli.conformance",
    "doctor": "helper.cli.doctor",
    "healthcheck": "helper.cli.healthcheck",
    "db": "helper.cli.db",
    "admin": "helper.cli.admin",
    "config": "helper.cli.config",
    "completion": "helper.cli.completion",
    "version": "helper.cli.version",
}
"""Commands and the modules that define their `app` (a Typer), in help order.

An `app` with a single command and no callback becomes that command, otherwise a group.
"""
COMPLETION_VARIABLE: Final = "_SVOTE_HELPER_COMPLETE"
"""Environment variable that shells set for completion (`helper.cli.completion`)."""

_HELP: Final = "Stores encrypted vote shares, and proves and reveals each at the time its wallet chose."


def create_cli(arguments: Sequence[str]) -> typer.Typer:
    """Create the command line with the command that the arguments name, or with all commands."""
    cli = typer.Typer(
        name="svote-helper",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        # with markup, "[helper] host" would lose "[helper]"
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    # without a callback, typer drops the name of a single command
    cli.callback()(_root_callback)
    requested = next((argument for argument in arguments if not argument.startswith("-")), "")
    for name in [requested] if requested in COMMANDS else COMMANDS:
        if importlib.util.find_spec(COMMANDS[name]) is not None:
            _add_command(cli, name)
    return cli


def create_completing_cli(env: Mapping[str, str]) -> typer.Typer:
    """Create the part of the command line that is needed to complete the typed arguments."""
    # typer registers its shells only when it builds a command line with its completion options
    with_options = typer.Typer(add_completion=True)
    with_options.command()(_root_callback)
    typer.main.get_command(with_options)
    typed = _typed_words(env)
    if any(argument in COMMANDS for argument in typed):
        return create_cli(typed)
    cli = create_cli(["completion"])
    for name in COMMANDS:  # only their names are completed
        if name != "completion":
            cli.command(name)(lambda: None)  # no docstring, so no help text is shown
    return cli


def _root_callback() -> None:
    """Root callback without effect."""


def _add_command(cli: typer.Typer, name: str) -> None:
    """Import a command's module and add its app."""
    app: typer.Typer = importlib.import_module(COMMANDS[name]).app
    if len(app.registered_commands) == 1 and not app.registered_groups and app.registered_callback is None:
        command = app.registered_commands[0]
        command.name = name
        cli.registered_commands.append(command)
    else:
        cli.add_typer(app, name=name, no_args_is_help=True)


def _typed_words(env: Mapping[str, str]) -> list[str]:
    """Return the arguments before the one being completed."""
    if "COMP_WORDS" in env:
        words, cursor = env["COMP_WORDS"].split(), env.get("COMP_CWORD", "")
        return words[1 : int(cursor)] if cursor.isdecimal() else words[1:]
    line = env.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()[1:]
    return words if line.endswith(" ") else words[:-1]
