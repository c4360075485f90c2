"""Entry point of `svote-helper`: the table of commands, and errors that become messages and exit codes.

Only the module of the requested command is imported: start-up is faster, and a command works even if another cannot be
imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from itertools import takewhile
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn

import typer

from helper.cli.conventions import (
    UNWRITABLE,
    ExitCode,
    discard_output,
    expand_options,
    is_output_error,
    map_errors_to_exit_codes,
    print_message,
)
from helper.errors import HelperError

PROGRAM: Final = "svote-helper"
COMPLETION_VARIABLE: Final = "_SVOTE_HELPER_COMPLETE"
"""Environment variable that shells set for completion (`completion`)."""
INTERRUPTED_EXIT_CODE: Final = 130
_HELP_OPTIONS: Final = ["--help", "-h"]
_STREAMS: Final = ("stdin", "stdout", "stderr")
_HELP: Final = "Stores encrypted vote shares, and proves and reveals each at the time its wallet chose."


class Command(NamedTuple):
    """A command: its function, whose parameters are the options, and the first words of its help, for its group's."""

    module: str
    function: str
    summary: str


COMMANDS: Final = {
    "serve": Command("helper.cli.serve", "serve", "Accept shares from wallets and reveal each at its due time"),
    "devnet": Command("devnet.cli", "devnet", "Run an embedded vote chain: blocks, trees, rounds"),
    "demo": Command("helper.cli.demo", "demo", "Run a demo: cast votes and follow their shares"),
    "rounds": Command("helper.cli.queue", "rounds", "List known rounds: status, end, time left, shares by state"),
    "plan": Command("helper.cli.plan", "plan", "Compute what a round will take: proofs, time, cores, disk"),
    "audit": Command("helper.cli.audit", "audit", "Check the result of a finished round from public data"),
    "conformance": Command("helper.cli.conformance", "conformance", "Check a share-reveal helper"),
    "doctor": Command("helper.cli.doctor", "doctor", "Check configuration, database, nodes and provers"),
    "healthcheck": Command("helper.cli.healthcheck", "healthcheck", "Check that shares are accepted and revealed"),
    "completion": Command("helper.cli.main", "completion", "Print the completion script of a shell"),
    "version": Command("helper.cli.version", "version", "Show the versions of the helper, its circuits"),
    "wallet vote": Command("helper.cli.demo", "vote", "Encrypt a vote, submit its commitment to the chain"),
    "queue list": Command("helper.cli.queue", "list_shares", "List shares in order of due time"),
    "queue show": Command("helper.cli.queue", "show", "Show the state and history of a share"),
    "queue stats": Command("helper.cli.queue", "stats", "Show shares by round and state, failures"),
    "queue watch": Command("helper.cli.queue_watch", "watch", "Watch the queue until Ctrl-C: rounds, due shares"),
    "queue retry": Command("helper.cli.queue", "retry", "Retry failed shares, all or selected"),
    "queue export": Command("helper.cli.queue_transfer", "export", "Export live shares to a passphrase-encrypted file"),
    "queue import": Command("helper.cli.queue_transfer", "import_", "Import shares from another machine's export"),
    "queue purge": Command("helper.cli.queue", "purge", "Delete all data of a closed round"),
    "queue audit": Command("helper.cli.queue", "audit", "Show the audit log of operator actions"),
    "chain rescan": Command("helper.cli.chain", "rescan", "Read blocks again, from HEIGHT to the newest one read"),
    "tx lookup": Command("helper.cli.chain", "lookup", "Show a transaction: block, result code"),
    "proof export": Command("helper.cli.proof", "export", "Write a bundle for a confirmed reveal"),
    "proof verify": Command("helper.cli.proof", "verify", "Verify a bundle offline with the chain's verifier"),
    "db backup": Command("helper.cli.db", "backup", "Write an encrypted backup"),
    "db restore": Command("helper.cli.db", "restore", "Restore a backup"),
    "db check": Command("helper.cli.db", "check", "Check the complete database, or a backup without restoring it"),
    "db migrate": Command("helper.cli.db", "migrate", "Upgrade the schema of an older database"),
    "db encrypt": Command("helper.cli.db", "encrypt", "Encrypt witnesses and messages in the database"),
    "db decrypt": Command("helper.cli.db", "decrypt", "Decrypt the database"),
    "db copy": Command("helper.cli.db", "copy", "Move the queue to a shared database, or back to a file"),
    "admin register": Command("helper.cli.admin", "register", "Sign a registration on this machine and send it"),
    "admin pending": Command("helper.cli.admin", "pending", "List pending registrations"),
    "config init": Command("helper.cli.config", "init", "Create a settings file with all keys"),
    "config show": Command("helper.cli.config", "show", "Show the effective settings"),
    "config validate": Command("helper.cli.config", "validate", "Validate the settings and list all problems"),
}
"""All commands, in the order of the help. The first of two words is a group."""
SERVICES: Final = frozenset({"serve", "devnet", "demo"})
"""Functions of commands that run services. Their unexpected errors of files keep their tracebacks."""
GROUPS: Final = {
    "wallet": "Act as a wallet on a dev chain.",
    "queue": "Inspect and manage queued shares.\n\nTo pause, stop the helper: shares keep their due times. To stop one "
    "round here, move its shares out with `queue export --move --round ROUND` (new ones are still accepted); "
    "`queue retry --stage moved` reactivates them.",
    "chain": "Control what the helper reads from the chain.",
    "tx": "Show public transactions of the chain.",
    "proof": "Export and verify proof bundles of confirmed reveals.",
    "db": "Back up, restore, check, upgrade, encrypt and copy the queue database.",
    "admin": "Register as a validator without a browser, and list pending registrations.",
    "config": "Create, show and validate settings.",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    try:
        cli = create_completing_cli(os.environ) if COMPLETION_VARIABLE in os.environ else create_cli(argv)
        try:
            cli(args=argv, prog_name=PROGRAM)
        finally:
            sys.stdout.flush()
    except HelperError as error:
        _print_error(error)
        sys.exit(ExitCode.FAILURE)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        is_of_output = is_output_error(error)
        discard_output()
        if not is_of_output:
            print_message(f"cannot use file: {error}")
        elif not isinstance(error, BrokenPipeError):
            print_message(f"the output cannot be written: {error.strerror}")
        sys.exit(ExitCode.FAILURE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
    sys.exit(ExitCode.OK)


def create_cli(arguments: Sequence[str]) -> typer.Typer:
    """Create the command line with only the command that the arguments name; if none, with the help of all commands."""
    before_help = takewhile(
        lambda argument: argument not in _HELP_OPTIONS, arguments
    )  # of the group in `queue --help list`
    words = [argument for argument in before_help if not argument.startswith("-")]
    requested = [path for path in COMMANDS if words[: len(path.split())] == path.split()]
    cli, groups = _create_group(_HELP), dict[str, typer.Typer]()
    for path in requested or COMMANDS:
        command = COMMANDS[path]
        group, _, name = path.rpartition(" ")
        if group and group not in groups:
            groups[group] = _create_group(GROUPS[group])
            cli.add_typer(groups[group], name=group, no_args_is_help=True)
        parent = groups.get(group, cli)
        if requested:
            parent.command(name)(load_function(command))
        else:
            parent.command(name, help=command.summary)(_do_nothing)
    return cli


def load_function(command: Command) -> Callable[..., Any]:
    """Import the function of a command, whose errors become exit codes."""
    function: Callable[..., Any] = getattr(importlib.import_module(command.module), command.function)
    return expand_options(function if command.function in SERVICES else map_errors_to_exit_codes()(function))


def create_completing_cli(env: Mapping[str, str]) -> typer.Typer:
    """Create the command line that completes the typed arguments."""
    # typer registers its shells only when it builds a command line with its completion options
    with_options = typer.Typer(add_completion=True)
    with_options.command()(_do_nothing)
    typer.main.get_command(with_options)
    return create_cli(_typed_words(env))


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="Shell to generate the script for.")
    ],
) -> None:
    """Print the completion script of a shell, for example: source <(svote-helper completion bash)."""
    # at each TAB the script runs the command with the typed text in environment variables, as typer defines it
    os.environ[COMPLETION_VARIABLE] = f"source_{shell}"
    create_completing_cli(os.environ)(args=[], prog_name=PROGRAM)


def _create_group(text: str) -> typer.Typer:
    group = typer.Typer(
        help=text,
        no_args_is_help=True,
        add_completion=False,
        suggest_commands=False,  # it would suggest "purge" for "pause"
        # with markup, "[helper] host" would lose "[helper]"
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": _HELP_OPTIONS},
    )
    # without a callback, typer drops the name of a single command
    group.callback()(_do_nothing)
    return group


def _do_nothing() -> None:
    pass


def _typed_words(env: Mapping[str, str]) -> list[str]:
    """Return the arguments before the one being completed."""
    if "COMP_WORDS" in env:
        words, cursor = env["COMP_WORDS"].split(), env.get("COMP_CWORD", "")
        return words[1 : int(cursor)] if cursor.isdecimal() else words[1:]
    line = env.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()[1:]
    return words if line.endswith(" ") else words[:-1]


def _prepare_streams() -> None:
    """Connect closed standard streams to the null device: the next opened file, a database, would get their number.

    Text that standard output cannot encode is escaped, as on standard error.
    """
    for number, name in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _print_error(error: HelperError) -> None:
    """Print an error and its advice, in the journal with the priority of an error."""
    # Imported here: few commands fail, and this takes 0.1 s, which `healthcheck` would need every few seconds.
    from helper.runtime.systemd import is_journal, priority_prefix  # noqa: PLC0415

    prefix = priority_prefix("error") if is_journal(os.environ, sys.stderr) else ""
    print_message("\n".join(f"{prefix}{line}" for line in f"{error}\n{error.advice}".split("\n")))
