"""`svote-helper healthcheck`: readiness check for containers and scripts. Silent when ready."""

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
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - wildcard addresses and their loopback addresses
_STATUS = {Exit.OK: "ready", Exit.DEGRADED: "degraded", Exit.UNREACHABLE: "unreachable"}


@app.command()
def healthcheck(
    config: ConfigOption = None,
    url: Annotated[str, typer.Option(help="Base URL of the helper, instead of the one on this machine.")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, max=60, help="Timeout in seconds.")] = 3.0,
    json: JsonOption = False,
) -> None:
    """Check that shares are accepted and revealed. Exit code 0: ready, 3: degraded, 6: unreachable."""
    # reads only the addresses, without full validation: this command runs every few seconds
    addresses = peek_listen_addresses(find_file(config, os.environ), os.environ)
    problems = []
    for where in [url] if url else [str(addresses.socket), f"http://{_host(addresses.host)}:{addresses.port}"]:
        try:
            status, body = _ask(where, timeout)
        except DaemonNotRunningError as error:
            problems.append(str(error))
            continue
        except PermissionError:
            problems.append(f"no permission to use {where}")
            continue
        except (DaemonUnresponsiveError, ValueError) as error:
            problems.append(f"{where}: {error}")
            continue
        checks = from_text(body.decode(errors="replace"))
        if checks:
            _end(where, Exit.OK if status == 200 else Exit.DEGRADED, checks, json=json)
        problems.append(f"{where}: HTTP {status}, not a response of this helper")
    if json:
        emit_json({"status": _STATUS[Exit.UNREACHABLE], "asked": None, "checks": [], "problems": problems})
        raise typer.Exit(Exit.UNREACHABLE)
    fail("\n".join(problems), Exit.UNREACHABLE)


def _ask(where: str, timeout: float) -> tuple[int, bytes]:
    """Send the request to a base URL, or to a socket path."""
    if "://" not in where:
        return ask_control(Path(where), _READY, timeout=timeout)
    parts = urlsplit(where)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError("must be a URL such as http://127.0.0.1:8090")
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
    """Return the address to connect to for a listen address."""
    address = _LOOPBACK.get(host, host)
    return f"[{address}]" if ":" in address else address
