"""`svote-helper config`: write a settings file, show what is in force, check it."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from helper.cli.output import Exit, emit_json, fail, say
from helper.cli.settings import ConfigOption, JsonOption, read_settings
from helper.config import Config, Loaded, Problem, SettingsError, load
from helper.config.example import example
from helper.config.value_text import SECTIONS, shown, to_toml
from helper.doctor.result import CheckResult, as_json, healthy
from helper.runtime.privileges import acting_as_owner

app = typer.Typer(help="The settings.")

TOKEN_BYTES: Final = 32
"""Of chance in a new token."""


@app.command()
def init(
    *,
    output: Annotated[Path, typer.Option("--output", help="Where to write it.")] = Path("helper.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="REST address of a node, best first; may be given more than once.", show_default=False),
    ] = None,
    rpc: Annotated[
        list[str] | None,
        typer.Option(help="RPC address of the node of the same place.", show_default=False),
    ] = None,
    db: Annotated[
        Path | None, typer.Option("--db", help="Where the queue's database will be.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a settings file with every key, its explanation and its default, and a token for operators that is new."""
    values: dict[tuple[str, str], Any] = {
        ("operator", "token"): secrets.token_urlsafe(TOKEN_BYTES),
        ("chain", "endpoints"): tuple(endpoint) if endpoint else None,
        ("chain", "rpc"): tuple(rpc) if rpc else None,
        ("helper", "db_path"): str(db) if db else None,
    }
    given = {f"{section}.{key}": value for (section, key), value in values.items() if value is not None}
    try:
        load(None, {}, given)
    except SettingsError as error:
        fail(str(error), Exit.USAGE)
    mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | (0 if force else os.O_EXCL)
    try:
        with acting_as_owner(output) as real, open(os.open(real, mode, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123
            os.fchmod(file.fileno(), 0o600)  # it holds a token
            file.write(example(values))
    except FileExistsError:
        fail(f"{output} is there already; --force replaces it")
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror or error}")
    if json:
        emit_json({"path": str(output), "set": sorted(given)})
    else:
        say(f"wrote {output}")


@app.command()
def show(
    config: ConfigOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Tell where each value comes from.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the settings that are in force; secrets are not shown."""
    loaded = read_settings(config)
    if json:
        emit_json(_as_json(loaded, origin=origin))
        return
    for section, keys in _values(loaded).items():
        typer.echo(f"[{section}]")
        for key, value in keys.items():
            where = f"  # {loaded.origins[f'{section}.{key}']}" if origin else ""
            typer.echo(f"{key} = {to_toml(value)}{where}")
        typer.echo("")


@app.command()
def validate(
    file: Annotated[Path | None, typer.Argument(readable=False, help="The file to check.", show_default=False)] = None,
    config: ConfigOption = None,
    online: Annotated[bool, typer.Option("--online", help="Ask the nodes that it names, too.")] = False,
    json: JsonOption = False,
) -> None:
    """Check the settings and tell every problem at once.

    Exit code 1 if there is any. With --online: 6 where no node is of use, 3 where something wants a look.
    """
    problems: tuple[Problem, ...] = ()
    findings: list[CheckResult] = []
    path, code = None, Exit.OK
    try:
        loaded = read_settings(file or config)
    except SettingsError as error:
        problems, code = error.problems, Exit.FAILURE
    else:
        path = loaded.path
        if online:
            findings, code = asyncio.run(_ask_nodes(loaded.config))
    for problem in problems:
        say(str(problem))
    for finding in findings:
        say(f"{finding.level.value.ljust(5)} {finding.subject}: {finding.message}")
        if finding.advice:
            say(f"      -> {finding.advice}")
    if json:
        told: dict[str, Any] = {"ok": code is Exit.OK, "problems": [_problem_json(problem) for problem in problems]}
        emit_json({**told, **({"online": [as_json(finding) for finding in findings]} if online else {})})
    elif not problems:
        say(f"{path or 'the defaults'}: ok")
    if code is not Exit.OK:
        raise typer.Exit(code)


async def _ask_nodes(config: Config) -> tuple[list[CheckResult], Exit]:
    """What the nodes say of themselves, and what a command ends with that has heard it."""
    # loaded here, so that the other commands need no HTTP
    from helper.clock import SystemClock  # noqa: PLC0415
    from helper.doctor import chain  # noqa: PLC0415

    clock, limits = SystemClock(), config.chain
    looks = await chain.query_nodes(config.chain_nodes, clock)
    now = clock.now()
    expected = chain.Expected(limits.chain_id or None, now, limits.stale_seconds, limits.clock_skew_seconds)
    judged = chain.judge_nodes(looks, expected)
    findings = [*judged.findings, chain.judge_clock(judged.same_chain, now, limit=limits.clock_skew_seconds)]
    if not judged.good:
        return findings, Exit.UNREACHABLE
    return findings, Exit.OK if healthy(findings) else Exit.DEGRADED


def _values(loaded: Loaded) -> dict[str, dict[str, Any]]:
    """All settings as they may be shown."""
    return {
        section: {key: shown(section, key, getattr(getattr(loaded.config, section), key)) for key in keys}
        for section, keys in SECTIONS.items()
    }


def _as_json(loaded: Loaded, *, origin: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"path": str(loaded.path) if loaded.path else None, "settings": _values(loaded)}
    if origin:
        answer["origins"] = {name: str(where) for name, where in loaded.origins.items()}
    return answer


def _problem_json(problem: Problem) -> dict[str, Any]:
    return {
        "source": problem.source,
        "line": problem.line,
        "key": problem.key,
        "message": problem.message,
        "nearest": problem.nearest,
    }
