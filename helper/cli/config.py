"""`svote-helper config`: create, show and validate settings."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from helper.cli.command_inputs import read_settings
from helper.cli.conventions import ConfigOption, ExitCode, JsonOption, emit, fail, print_message
from helper.clock import SystemClock
from helper.config.loader import Problem, SettingsError, load
from helper.config.sections import Config
from helper.config.settings_file import DEFAULT_DATABASE
from helper.config.settings_text import SECTIONS, render_example, to_display_value, to_toml
from helper.core.json_records import fact
from helper.doctor import CheckResult, all_ok, chain
from helper.errors import ConfigError
from helper.observability import log_config
from helper.runtime.process_security import acting_as_owner

TOKEN_BYTES: Final = 32
"""Random bytes in a new token."""
_MAX_SETTINGS_BYTES: Final = 1 << 20
_SECTION_LINE: Final = re.compile(rf"^\s*\[({'|'.join(SECTIONS)})\b".encode(), re.MULTILINE)
"""Also in a settings file with errors, but in no database, key file or export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedSettings:
    """`config init`."""

    path: str = fact("Path of the written file.")
    set: Sequence[str] = fact("`section.key` of the settings that differ from the defaults.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSettings:
    """`config show`."""

    path: str | None = fact("Path of the settings file; null if there is none.")
    settings: Mapping[str, Mapping[str, Any]] = fact("Effective settings by section and key, without secrets.")
    origins: Mapping[str, str] | None = fact("With --origin: source of each `section.key`.", optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSettings:
    """`config validate`."""

    ok: bool = fact("Whether there are no problems.")
    problems: Sequence[Problem] = fact("Problems in the settings.")
    online: Sequence[CheckResult] | None = fact("With --online: results of the queries to the nodes.", optional=True)


def init(
    *,
    output: Annotated[Path, typer.Option("--output", help="File to write.")] = Path("helper.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="REST URL of a node; may be repeated, in order of preference.", show_default=False),
    ] = None,
    rpc: Annotated[
        list[str] | None,
        typer.Option(help="RPC URL of the node at the same position.", show_default=False),
    ] = None,
    db: Annotated[Path | None, typer.Option("--db", help="Path of the queue database.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Create a settings file with all keys, their explanations and defaults, and a new operator token."""
    values: dict[tuple[str, str], Any] = {
        ("operator", "token"): secrets.token_urlsafe(TOKEN_BYTES),
        ("chain", "endpoints"): tuple(endpoint) if endpoint else None,
        ("chain", "rpc"): tuple(rpc) if rpc else None,
        # absolute, so that a start in another directory does not create a second queue
        ("helper", "db_path"): str((db or Path(DEFAULT_DATABASE)).absolute()),
    }
    options = {f"{section}.{key}": value for (section, key), value in values.items() if value is not None}
    try:
        load(None, {}, options)
    except SettingsError as error:
        fail(str(error), ExitCode.USAGE)
    try:
        with acting_as_owner(output) as real:
            _write_settings(real, render_example(values).encode(), replace=force)
    except FileExistsError:
        fail(f"{output} already exists; --force replaces it")
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror or error}")
    created = CreatedSettings(path=str(output), set=sorted(options))
    emit(created, lambda _: print_message(f"wrote {output}"), json=json)


def _write_settings(path: Path, content: bytes, *, replace: bool) -> None:
    """Write a settings file with mode 0600. If the disk is full, an existing file is unchanged."""
    mode = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if replace else os.O_EXCL)
    with open(os.open(path, mode, 0o600), "r+b") as file:  # noqa: PTH123
        before = file.read(_MAX_SETTINGS_BYTES)
        if before and not _SECTION_LINE.search(before):
            fail(f"{path} is not a settings file, so it is not replaced")
        try:
            os.fchmod(file.fileno(), 0o600)  # it contains a token
            os.posix_fallocate(file.fileno(), 0, len(content))
        except OSError:
            if not before:
                path.unlink()
            raise
        file.seek(0)
        file.write(content)
        file.truncate()


def show(
    config: ConfigOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show the source of each value.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the effective settings; secrets are hidden."""
    loaded = read_settings(config)
    shown = ShownSettings(
        path=str(loaded.path) if loaded.path else None,
        settings={
            section: {
                key: to_display_value(section, key, getattr(getattr(loaded.config, section), key)) for key in keys
            }
            for section, keys in SECTIONS.items()
        },
        origins={name: str(where) for name, where in loaded.origins.items()} if origin else None,
    )
    emit(shown, _print_settings, json=json)


def _print_settings(shown: Mapping[str, Any]) -> None:
    origins = shown.get("origins", {})
    for section, keys in shown["settings"].items():
        typer.echo(f"[{section}]")
        for key, value in keys.items():
            where = f"  # {origins[f'{section}.{key}']}" if origins else ""
            typer.echo(f"{key} = {to_toml(value)}{where}")
        typer.echo("")


def validate(
    file: Annotated[Path | None, typer.Argument(readable=False, help="File to check.", show_default=False)] = None,
    config: ConfigOption = None,
    online: Annotated[bool, typer.Option("--online", help="Also check the configured nodes.")] = False,
    json: JsonOption = False,
) -> None:
    """Validate the settings and list all problems.

    Exits with 1 if there are problems. With --online, exits with 6 if no node is usable and with 3 if there are
    warnings.
    """
    problems: tuple[Problem, ...] = ()
    findings: list[CheckResult] = []
    path, code = None, ExitCode.OK
    try:
        loaded = read_settings(file or config)
    except SettingsError as error:
        problems, code = error.problems, ExitCode.FAILURE
    else:
        path = loaded.path
        try:
            loaded.config.require_nodes()
        except ConfigError as error:
            source, code = str(path or "default settings"), ExitCode.FAILURE
            problems = (Problem(source, None, "chain.endpoints", f"{error}. {error.advice}"),)
        if online and not problems:
            log_config.configure("error", "auto")
            findings, code = asyncio.run(_query_nodes(loaded.config))
    for problem in problems:
        print_message(str(problem))
    for finding in findings:
        print_message(f"{finding.level.value.ljust(5)} {finding.subject}: {finding.message}")
        if finding.advice:
            print_message(f"      -> {finding.advice}")
    if code is ExitCode.OK and not json:
        print_message(f"{path or 'default settings'}: ok")
    checked = CheckedSettings(ok=code is ExitCode.OK, problems=problems, online=findings if online else None)
    emit(checked, lambda _: None, json=json, code=code)


async def _query_nodes(config: Config) -> tuple[list[CheckResult], ExitCode]:
    """Query the nodes; returns the results and the exit code."""
    node_results = await chain.check_nodes(config, SystemClock())
    findings = node_results.findings
    if not node_results.usable:
        return findings, ExitCode.UNREACHABLE
    return findings, ExitCode.OK if all_ok(findings) else ExitCode.DEGRADED
