"""`svote-helper healthcheck`: ready or not? For containers and scripts: quick, and silent when all is well."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer

from helper.cli.options import ConfigOption, JsonOption
from helper.cli.output import Exit, emit_json, fail, say
from helper.config import find_file, peek_listen_addresses
from helper.observability.health_checks import Check, from_text
from helper.server.control_client import DaemonNotRunningError, DaemonUnresponsiveError, ask_control, ask_web

app = typer.Typer()

_READY = "/readyz?verbose"
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - what to ask instead of these
_STATUS = {Exit.OK: "ready", Exit.DEGRADED: "degraded", Exit.UNREACHABLE: "unreachable"}


@app.command()
def healthcheck(
    config: ConfigOption = None,
    url: Annotated[str, typer.Option(help="Ask the helper at this base URL, not the one of this machine.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds to wait for its answer.")] = 3.0,
    json: JsonOption = False,
) -> None:
    """Ask whether shares are taken and revealed. Exit code 0: ready, 3: degraded, 6: nobody answers."""
    # only a look at the settings, not all that checks them: this command is run every few seconds
    doors = peek_listen_addresses(find_file(config, os.environ), os.environ)
    problems = []
    for where in [url] if url else [str(doors.socket), f"http://{_host(doors.host)}:{doors.port}"]:
        try:
            status, body = _ask(where, timeout)
        except DaemonNotRunningError as error:
            problems.append(str(error))
            continue
        except PermissionError:
            problems.append(f"{where} may not be used by this user")
            continue
        except (DaemonUnresponsiveError, ValueError) as error:
            problems.append(f"{where}: {error}")
            continue
        checks = from_text(body.decode(errors="replace"))
        if checks:
            _end(where, Exit.OK if status == 200 else Exit.DEGRADED, checks, json=json)
        problems.append(f"{where}: HTTP {status}, and not what a helper answers")
    if json:
        emit_json({"status": _STATUS[Exit.UNREACHABLE], "asked": None, "checks": [], "problems": problems})
        raise typer.Exit(Exit.UNREACHABLE)
    fail("\n".join(problems), Exit.UNREACHABLE)


def _ask(where: str, timeout: float) -> tuple[int, bytes]:
    """Ask at an address, or at a socket's path."""
    if "://" not in where:
        return ask_control(Path(where), _READY, timeout=timeout)
    parts = urlsplit(where)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError("must be an address like http://127.0.0.1:8090")
    return ask_web(parts.hostname, parts.port or 80, parts.path.rstrip("/") + _READY, timeout=timeout)


def _end(where: str, code: Exit, checks: Sequence[Check], *, json: bool) -> NoReturn:
    if json:
        emit_json(
            {"status": _STATUS[code], "asked": where, "checks": [asdict(check) for check in checks], "problems": []}
        )
    for check in checks:
        if check.problem is not None and not json:
            say(f"{check.name}: {check.problem}")
    raise typer.Exit(code)


def _host(host: str) -> str:
    """Where to ask one that listens there."""
    found = _ANYWHERE.get(host, host)
    return f"[{found}]" if ":" in found else found
