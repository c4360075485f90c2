"""`svote-helper healthcheck`: readiness check for containers and scripts. Silent when ready."""

from __future__ import annotations

import os
import signal
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import typer

from helper.cli.conventions import ConfigOption, ExitCode, JsonOption, emit, print_message
from helper.config.settings_file import (
    DEFAULT_DATABASE,
    DEFAULT_HOST,
    DEFAULT_PORT,
    SOCKET_NAME,
    find_file,
    variable_name,
)
from helper.core.json_records import fact
from helper.errors import ConfigError
from helper.observability.service_state import Check, parse_checks
from helper.server.control_client import (
    DaemonNotRunningError,
    DaemonUnresponsiveError,
    request_control_socket,
    request_tcp,
)

Status = Literal["ready", "degraded", "unreachable"]

_READY_TARGET = "/readyz?verbose"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - wildcard addresses and their loopback addresses
_STATUS_BY_EXIT_CODE: Final[Mapping[ExitCode, Status]] = {
    ExitCode.OK: "ready",
    ExitCode.DEGRADED: "degraded",
    ExitCode.UNREACHABLE: "unreachable",
}


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Output of `healthcheck --json`."""

    status: Status = fact("State of the helper.")
    asked: str | None = fact("Base URL or socket path that responded; null if none did.")
    checks: Sequence[Check] = fact("Readiness checks.")
    problems: Sequence[str] = fact("Reasons why the helper could not be queried.")


def healthcheck(
    config: ConfigOption = None,
    url: Annotated[str, typer.Option(help="Base URL of the helper (default: the one on this machine).")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, max=60, help="Timeout in seconds.")] = 3.0,
    json: JsonOption = False,
) -> None:
    """Check that shares are accepted and revealed. Exits with 0 if ready, 3 if degraded, 6 if unreachable."""
    asked: str | None = None
    code, checks = ExitCode.UNREACHABLE, list[Check]()
    addresses, problems = tuple[str, ...](), list[str]()
    try:
        addresses = (url,) if url else find_addresses(config, os.environ)
    except ConfigError as error:
        problems.append(str(error))
    for address in addresses:
        try:
            with _limit_time(timeout):
                status, body = _request_readiness(address, timeout)
        except DaemonNotRunningError as error:
            problems.append(str(error))
        except PermissionError:
            problems.append(f"no permission to use {address}")
        except (DaemonUnresponsiveError, ValueError) as error:
            problems.append(f"{address}: {error}")
        else:
            checks = parse_checks(body.decode(errors="replace"))
            if checks:
                asked, code, problems = address, ExitCode.OK if status == 200 else ExitCode.DEGRADED, []
                break
            problems.append(f"{address}: HTTP {status}, not a response of this helper")
    emit(HealthReport(_STATUS_BY_EXIT_CODE[code], asked, checks, problems), _print_report, json=json, code=code)


def _print_report(report: Mapping[str, Any]) -> None:
    failed = [f"{check['name']}: {check['problem']}" for check in report["checks"] if check["problem"] is not None]
    advice = [] if report["status"] == "ready" else ["Run `svote-helper doctor`."]
    for line in (*failed, *report["problems"], *advice):
        print_message(line)


@contextmanager
def _limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this time. A socket's timeout begins again with each byte."""

    def stop(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _request_readiness(address: str, timeout: float) -> tuple[int, bytes]:
    """Send the request to a base URL, or to a socket path, with or without `unix:`."""
    if "://" not in address:
        return request_control_socket(Path(address.removeprefix("unix:")), _READY_TARGET, timeout=timeout)
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError("must be a URL such as http://127.0.0.1:8090")
    return request_tcp(parts.hostname, parts.port or 80, parts.path.rstrip("/") + _READY_TARGET, timeout=timeout)


def find_addresses(config: Path | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the control socket and the wallet API of the helper with these settings.

    Reads only these settings, because this command runs every few seconds and loading all of them takes 0.3 s. Invalid
    ones count as not set, and so does a file that this user may not read.

    Returns:
        The path of the socket, and the base URL of the wallet API or the path of its unix socket.

    Raises:
        ConfigError: the file is missing, refused (see `refuse_planted`) or not valid TOML. The default addresses can be
            those of another helper.
    """
    file = find_file(config, env)
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text("utf-8-sig")) if file is not None else {}
    except PermissionError:
        tables = {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error

    def read_value(setting: str, default: str = "") -> str:
        section, _, key = setting.partition(".")
        table = tables.get(section)
        file_value = table.get(key) if isinstance(table, dict) else None
        return str(env.get(variable_name(setting)) or file_value or default)

    default_socket = Path(read_value("helper.db_path", DEFAULT_DATABASE)).parent / SOCKET_NAME
    host = read_value("helper.host", DEFAULT_HOST)
    host = _LOOPBACK.get(host, host)
    port = read_value("helper.port")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port if port.isdecimal() else DEFAULT_PORT}"
    return read_value("operator.socket", str(default_socket)), read_value("server.unix_socket", url)
