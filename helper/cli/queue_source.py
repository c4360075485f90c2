"""Where an operator's answers come from: the daemon's control socket, else the file, read only.

Both give the same JSON, but for `source` and for what only a running daemon knows.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import anyio
import httpx

from helper.api import views
from helper.errors import HelperError

ASK_SECONDS: Final = 10.0


class NotThereError(HelperError):
    """There is no such share, or no database."""

    advice = "See `svote-helper queue list`."


class DaemonError(HelperError):
    """The daemon is there and could not answer."""

    advice = "Look into the daemon's log."


def ask(socket_path: Path, database: Path, path: str, query: Mapping[str, str]) -> dict[str, Any]:
    """One answer: of the daemon on `socket_path`, or where nobody answers there, of the file.

    Args:
        socket_path: the control socket.
        database: the daemon's database.
        path: `/queue`, `/queue/REF` or `/stats`.
        query: as the daemon's API takes it.

    Raises:
        NotThereError: no such share, or no database.
        ValueError: the query is not one; the text names what.
        PermissionError: the socket or the file is another user's.
        HelperError: the daemon or the file could not answer.
    """
    answer = _ask_daemon(socket_path, path, query)
    if answer is not None:
        return answer
    if not database.exists():
        raise NotThereError(f"no daemon answers on {socket_path}, and there is no database {database}")
    if not os.access(database, os.R_OK):
        raise PermissionError(f"{database} may not be read by this user")
    return anyio.run(_ask_file, database, path, query)


def _ask_daemon(socket_path: Path, path: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """The daemon's answer, None when nobody answers."""
    if not _somebody_listens(socket_path):
        return None
    transport = httpx.HTTPTransport(uds=str(socket_path))
    try:
        with httpx.Client(transport=transport, base_url="http://daemon", timeout=ASK_SECONDS) as client:
            response = client.get(path, params=dict(query))
    except httpx.HTTPError as error:
        raise DaemonError(f"the daemon on {socket_path} does not answer: {type(error).__name__}") from error
    return _read(response)


def _somebody_listens(path: Path) -> bool:
    """Whether a daemon accepts on this socket, which may be one that a crash left behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except PermissionError:
            raise PermissionError(f"{path} may not be used by this user") from None
        except OSError:
            return False
    return True


def _read(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise DaemonError("what answers on the control socket is not this daemon")
    message = str(answer.get("error", ""))
    if response.status_code == 400:
        raise ValueError(message)
    if response.status_code == 404:
        raise NotThereError(message)
    if response.status_code != 200:
        raise DaemonError(f"the daemon could not answer: {message}")
    return answer


async def _ask_file(database: Path, path: str, query: Mapping[str, str]) -> dict[str, Any]:
    # loaded here: most questions are answered by a daemon
    from helper.store import ReadOnlyQueue  # noqa: PLC0415

    queue = ReadOnlyQueue(database)
    if path == "/stats":
        return views.stats_json(await queue.counts(), await queue.damaged(), source="file")
    if path == "/queue":
        wanted = views.parse_filter(query.get("round"), query.get("state"), query.get("due_before"), query.get("stage"))
        limit = views.parse_limit(query.get("limit"))
        return views.list_json(await queue.list_shares(wanted, limit), source="file")
    story = await queue.show(path.rpartition("/")[2])
    if story is None:
        raise NotThereError("no share, or more than one, has this name")
    return views.story_json(story, source="file")
