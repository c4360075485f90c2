"""Operator requests, answered by the daemon over its control socket, else from the database file.

Both return the same JSON, except for `source` and for values that only a running daemon knows. Queries do not change
the file; actions hold the daemon's lock (`helper.cli.offline`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import anyio
import httpx

from helper.clock import SystemClock
from helper.errors import ActionRefused, DaemonError, DaemonSilent, NothingThere
from helper.runtime.http_client import create_client
from helper.runtime.privileges import acting_as_owner

ASK_SECONDS: Final = 10.0
"""Timeout of a query."""
ACT_SECONDS: Final = 3600.0
"""Timeout of an action; on a large queue it takes minutes, as it runs in small transactions."""


def ask(socket_path: Path, database: Path, path: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Answer a query from the daemon on `socket_path`, or from the file if no daemon listens.

    Args:
        socket_path: the control socket.
        database: the daemon's database.
        path: `/queue`, `/queue/REF`, `/stats`, `/rounds` or `/actions`.
        query: query parameters of the operator API.

    Raises:
        NothingThere: the share or the database does not exist.
        ValueError: the query is invalid.
        PermissionError: this user may not use the socket or the file.
        HelperError: the daemon or the file returned an error.
    """
    if is_daemon_listening(socket_path):
        return _request(socket_path, "GET", path, query)
    need_database(socket_path, database)
    if not os.access(database, os.R_OK):
        raise PermissionError(f"no permission to read {database}")
    return anyio.run(_ask_file, database, path, query)


def tell(
    socket_path: Path, path: str, body: Mapping[str, Any] | Iterable[bytes], query: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Request an action of the daemon.

    Args:
        socket_path: its control socket.
        path: path of the action.
        body: JSON object, or chunks of a stream.
        query: query parameters.

    Raises:
        HelperError, ValueError, PermissionError: as `ask`; `ActionRefused` if the current state does not allow it.
    """
    return _request(socket_path, "POST", path, query or {}, body)


def need_database(socket_path: Path, database: Path) -> None:
    """Raise NothingThere if there is neither a daemon nor a database."""
    if not database.exists():
        raise NothingThere(
            f"no daemon answers on {socket_path}, and database {database} does not exist",
            advice="Start the helper, or give its settings (--config) or its database (--db).",
        )


def is_daemon_listening(path: Path) -> bool:
    """Report whether a daemon accepts connections on this socket; the file may be left from a crash."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except PermissionError:
            raise PermissionError(f"no permission to use {path}") from None
        except OSError:
            return False
    return True


def _request(
    socket_path: Path,
    method: str,
    path: str,
    query: Mapping[str, str],
    body: Mapping[str, Any] | Iterable[bytes] | None = None,
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if body is not None:
        content = {"json": dict(body)} if isinstance(body, Mapping) else {"content": body}
    timeout = ASK_SECONDS if body is None else httpx.Timeout(ACT_SECONDS, connect=ASK_SECONDS)
    transport = httpx.HTTPTransport(uds=str(socket_path))
    try:
        with create_client(transport=transport, base_url="http://daemon", timeout=timeout) as client:
            response = client.request(method, path, params=dict(query), **content)
    except httpx.HTTPError as error:
        raise DaemonSilent(f"the daemon on {socket_path} does not answer: {type(error).__name__}") from error
    return _read(response)


def _read(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise DaemonError("unexpected response on the control socket")
    if response.status_code == 200:
        return answer
    message, advice = str(answer.get("error", "")), answer.get("advice")
    match response.status_code:
        case 400 | 413:
            raise ValueError(message)
        case 403:
            raise PermissionError(message)
        case 404:
            raise NothingThere(message)
        case 409 | 422:
            raise ActionRefused(message, advice=str(advice) if advice else None)
        case 503 if advice:
            raise DaemonError(f"the daemon could not complete the action: {message}", advice=str(advice))
    raise DaemonError(f"the daemon returned an error: {message}")


async def _ask_file(database: Path, path: str, query: Mapping[str, str]) -> dict[str, Any]:
    # imported here, as most queries go to a daemon
    from helper.server.queue_responses import file_answer  # noqa: PLC0415
    from helper.store.sqlite.reader import open_queue_file  # noqa: PLC0415

    with acting_as_owner(database):
        async with open_queue_file(database) as queue:
            answer = await file_answer(queue, path, query, now=SystemClock().now())
    if answer is None:
        raise NothingThere("no share, or more than one, matches this name")
    return answer
