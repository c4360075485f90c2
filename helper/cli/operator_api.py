"""Where an operator's answers come from, and who does what is asked for: the daemon over its socket, else the file.

Both give the same JSON, but for `source` and for what only a running daemon knows. The file is read without being
changed; what changes something takes the lock that a daemon would hold (`helper.cli.offline`).
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
ACT_SECONDS: Final = 3600.0
"""An act on a great queue takes minutes: it is done in small pieces."""


def ask(socket_path: Path, database: Path, path: str, query: Mapping[str, str]) -> dict[str, Any]:
    """One answer: of the daemon on `socket_path`, or where nobody answers there, of the file.

    Args:
        socket_path: the control socket.
        database: the daemon's database.
        path: `/queue`, `/queue/REF`, `/stats`, `/rounds` or `/actions`.
        query: as the daemon's API takes it.

    Raises:
        NothingThere: no such share, or no database.
        ValueError: the query is not one; the text names what.
        PermissionError: the socket or the file is another user's.
        HelperError: the daemon or the file could not answer.
    """
    if is_daemon_listening(socket_path):
        return _request(socket_path, "GET", path, query)
    need_database(socket_path, database)
    if not os.access(database, os.R_OK):
        raise PermissionError(f"{database} may not be read by this user")
    return anyio.run(_ask_file, database, path, query)


def tell(
    socket_path: Path, path: str, body: Mapping[str, Any] | Iterable[bytes], query: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Have the daemon do something.

    Args:
        socket_path: its control socket, on which somebody listens.
        path: what is to be done.
        body: JSON, or the pieces of a stream.
        query: conditions in the address.

    Raises:
        HelperError, ValueError, PermissionError: as `ask`; ActRefused when it is not done as things stand.
    """
    return _request(socket_path, "POST", path, query or {}, body)


def need_database(socket_path: Path, database: Path) -> None:
    """Raise NothingThere where there is neither a daemon nor a database."""
    if not database.exists():
        raise NothingThere(
            f"no daemon answers on {socket_path}, and there is no database {database}",
            advice="Start the helper, or name its settings (--config) or its database (--db).",
        )


def is_daemon_listening(path: Path) -> bool:
    """Whether a daemon accepts on this socket, which may be one that a crash left behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except PermissionError:
            raise PermissionError(f"{path} may not be used by this user") from None
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
        raise DaemonError("what answers on the control socket is not this daemon")
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
            raise DaemonError(f"the daemon could not do it: {message}", advice=str(advice))
    raise DaemonError(f"the daemon could not answer: {message}")


async def _ask_file(database: Path, path: str, query: Mapping[str, str]) -> dict[str, Any]:
    # loaded here: most questions are answered by a daemon
    from helper.server.queue_responses import file_answer  # noqa: PLC0415
    from helper.store.sqlite.reader import open_queue_file  # noqa: PLC0415

    with acting_as_owner(database):
        async with open_queue_file(database) as queue:
            answer = await file_answer(queue, path, query, now=SystemClock().now())
    if answer is None:
        raise NothingThere("no share, or more than one, has this name")
    return answer
