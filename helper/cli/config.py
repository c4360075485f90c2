"""`svote-helper config`: create, show and validate settings."""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import re
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Annotated, Any, Final
from urllib.parse import urlsplit, urlunsplit

import typer

from helper.chain.node_pool import create_nodes
from helper.cli.command_inputs import read_settings
from helper.cli.conventions import ConfigOption, ExitCode, JsonOption, emit, fail, print_message
from helper.clock import SystemClock
from helper.config.loader import Problem, SettingsError, load
from helper.config.sections import SECTIONS, Config
from helper.config.settings_file import DEFAULT_DATABASE, SECRET_SETTINGS
from helper.core.json_records import fact
from helper.doctor import CheckResult, all_ok, chain
from helper.errors import ConfigError
from helper.observability import log_config
from helper.runtime.process_security import acting_as_owner

TOKEN_BYTES: Final = 32
"""Random bytes in a new token."""
REDACTED: Final = "(set, not shown)"
_MAX_SETTINGS_BYTES: Final = 1 << 20
_SECTION_LINE: Final = re.compile(rf"^\s*\[({'|'.join(SECTIONS)})\b".encode(), re.MULTILINE)
"""Also in a settings file with errors, but in no database, key file or export."""

_WIDTH: Final = 100
_HEADER: Final = """\
# svote-helper settings. Every key is listed with its default. Uncomment a line to change it.
# Each setting can also be set by the environment variable SVOTE_HELPER_<SECTION>_<KEY> (lists are comma-separated).
# `svote-helper config validate` checks this file; `svote-helper config show --origin` shows the values in effect.
"""


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
        list[str] | None, typer.Option(help="REST URL of a node; may be repeated, in order of preference.")
    ] = None,
    rpc: Annotated[list[str] | None, typer.Option(help="RPC URL of the node at the same position.")] = None,
    db: Annotated[Path | None, typer.Option("--db", help="Path of the queue database.")] = None,
    json: JsonOption = False,
) -> None:
    """Create a settings file with all keys, their explanations and defaults, and a new operator token."""
    settings: dict[str, Any] = {
        "operator.token": secrets.token_urlsafe(TOKEN_BYTES),
        # absolute, so that a start in another directory does not create a second queue
        "helper.db_path": str((db or Path(DEFAULT_DATABASE)).absolute()),
        **({"chain.endpoints": tuple(endpoint)} if endpoint else {}),
        **({"chain.rpc": tuple(rpc)} if rpc else {}),
    }
    try:
        load(None, {}, settings)
    except SettingsError as error:
        fail(str(error), ExitCode.USAGE)
    try:
        with acting_as_owner(output) as real:
            _write_settings(real, render_example(settings).encode(), replace=force)
    except FileExistsError:
        fail(f"{output} already exists; --force replaces it")
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror or error}")
    created = CreatedSettings(path=str(output), set=sorted(settings))
    setting = "" if endpoint else "set [chain] endpoints in it, then "
    text = f"wrote {output}\nNext: {setting}run `svote-helper config validate {quote(str(output))}`."
    emit(created, lambda _: print_message(text), json=json)


def render_example(settings: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a settings file with all keys, of which only the given ones (`section.key`) have an effect.

    `# ` begins an explanation, `#` without a space a setting at its default.
    """
    parts = [_HEADER]
    for section, model in Config():
        block = [f"# {(model.__doc__ or '').strip()}", f"[{section}]", ""]
        for key, field in SECTIONS[section].items():
            block += [f"# {line}" for line in textwrap.wrap(field.description or "", _WIDTH, break_on_hyphens=False)]
            value = settings.get(f"{section}.{key}")
            block += [f"#{key} = {to_toml(field.default)}" if value is None else f"{key} = {to_toml(value)}", ""]
        parts.append("\n".join(block))
    return "\n".join(parts).rstrip("\n") + "\n"


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
            section: {key: to_display_value(f"{section}.{key}", value) for key, value in values}
            for section, values in loaded.config
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


def to_display_value(setting: str, value: Any) -> Any:
    """Return the value of a setting, `section.key`, for display: without secrets and credentials, tuples as lists.

    The path of a node's URL can be a key of its provider. Other output names a node by host and port.
    """
    if setting in SECRET_SETTINGS:
        return REDACTED if value else value
    if isinstance(value, tuple):
        return [to_display_value(setting, part) for part in value]
    if isinstance(value, str) and "://" in value:
        return _redact_credentials(value, hides_path=setting.startswith("chain."))
    return value


def _redact_credentials(url: str, *, hides_path: bool) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    netloc = f"***@{host}" if "@" in parts.netloc else host
    path = "/***" if parts.path and hides_path else parts.path
    return urlunsplit((parts.scheme, netloc, path, "***" if parts.query else "", ""))


def to_toml(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, str):
        return jsonlib.dumps(value, ensure_ascii=False)
    return "[" + ", ".join(to_toml(part) for part in value) + "]"


def validate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", readable=False, help="File to check.")] = None,
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
            create_nodes(loaded.config.chain_nodes)
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
    findings, usable = await chain.check_nodes(config, SystemClock())
    if not usable:
        return findings, ExitCode.UNREACHABLE
    return findings, ExitCode.OK if all_ok(findings) else ExitCode.DEGRADED
