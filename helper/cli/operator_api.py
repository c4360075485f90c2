"""Client of the operator API: of the running helper, or of its database file while none is running.

Both serve the same routes. The helper serves them on its control socket. Without a helper, `helper.cli.offline` serves
them in this process; `source` in a response identifies the server. Queries do not change the file, and actions hold the
helper's lock.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer

from helper.cli.command_inputs import read_queue_settings
from helper.cli.conventions import QueueOptions
from helper.clock import SystemClock
from helper.config.sections import Config
from helper.config.settings_file import is_missing
from helper.core.share import ShareState
from helper.errors import ActionRefused, DaemonUnreachableError, HelperError, NotFound, UsageError
from helper.server.control_client import DaemonNotRunningError, DaemonUnresponsiveError, request_control_socket
from helper.store.models import MIN_REF_CHARS
from helper.store.sqlite.file_lock import is_locked

QUERY_SECONDS: Final = 10.0
"""Timeout of a query in seconds."""
ACTION_SECONDS: Final = 3600.0
"""Timeout of an action in seconds. An action runs in small transactions, which takes minutes on a large queue."""
_LOG_ADVICE: Final = "Check the helper's log."
DATABASE_ADVICE: Final = "Start the helper, or specify its settings (--config) or its database (--db)."


@dataclass(frozen=True, slots=True)
class OperatorApi:
    """Operator API of one queue.

    Attributes:
        is_named: `--db` names the database. The helper on the socket may then use another one in the same directory.
    """

    settings: Config
    is_named: bool = False

    @classmethod
    def of(cls, options: QueueOptions) -> OperatorApi:
        """Create a client from the settings and the `--db` flag."""
        return cls(read_queue_settings(options), options.db is not None)

    @property
    def is_shared(self) -> bool:
        """Whether the queue is in a shared database instead of a file, so that only a running helper can query it."""
        return bool(self.settings.store.url) and not self.is_named

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the response to a query. Empty parameters are left out.

        Raises:
            NotFound: the share or the database does not exist.
            UsageError: the query is invalid.
            PermissionError: no permission to access the socket or the database file.
            HelperError: the helper or the file returned an error.
        """
        return self._request(path, query or {}, None)

    def post(
        self, path: str, body: Mapping[str, Any] | Iterable[bytes], query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Perform an action and return its result. The body is a JSON object, or chunks of a stream.

        Raises:
            ActionRefused: the current state does not allow it.
            HelperError, UsageError, PermissionError: as `get`.
        """
        return self._request(path, query or {}, json.dumps(dict(body)).encode() if isinstance(body, Mapping) else body)

    def require_database(self) -> None:
        """Raise NotFound if this host has no database file."""
        no_helper = f"no helper is listening on {self.settings.socket_path}"
        if self.is_shared:
            raise NotFound(
                f"{no_helper}, and the queue is in a shared database",
                advice="Run this on a host with a running helper; each can query the complete queue.",
            )
        if is_missing(self.settings.db_path):
            raise NotFound(f"{no_helper}, and database {self.settings.db_path} does not exist", advice=DATABASE_ADVICE)

    @property
    def may_use_socket(self) -> bool:
        """Whether the helper on the socket, if one runs, uses the database."""
        return not self.is_named or is_locked(self.settings.db_path)

    def _request(self, path: str, query: Mapping[str, str], body: bytes | Iterable[bytes] | None) -> dict[str, Any]:
        parameters = urlencode({name: value for name, value in query.items() if value})
        target = f"{path}?{parameters}" if parameters else path
        timeout, socket = QUERY_SECONDS if body is None else ACTION_SECONDS, self.settings.socket_path
        if not self.may_use_socket:
            return self._request_file(target, body)
        try:
            if body is not None:  # the timeout of an action is too long to notice that the helper hangs
                request_control_socket(socket, "/readyz", timeout=QUERY_SECONDS)
            status, content = request_control_socket(socket, target, body, timeout=timeout)
        except DaemonNotRunningError:
            return self._request_file(target, body)
        except DaemonUnresponsiveError as error:
            raise DaemonUnreachableError(f"the helper on {socket} does not respond: {error}") from error
        return _result(status, content, by_daemon=True)

    def _request_file(self, target: str, body: bytes | Iterable[bytes] | None) -> dict[str, Any]:
        self.require_database()
        database = self.settings.db_path
        if not os.access(database, os.R_OK if body is None else os.R_OK | os.W_OK):
            raise PermissionError(f"no permission to {'read' if body is None else 'change'} {database}")
        if database.is_file() and not database.stat().st_size:
            raise NotFound(f"{database} is an empty file, not a queue", advice=DATABASE_ADVICE)
        # Imported here: requests to a daemon do not need the routes and the store, which are slow to import.
        from helper.cli.offline import request_file  # noqa: PLC0415

        return _result(*request_file(database, target, body, key_file=self.settings.store.key_file), by_daemon=False)


class _DaemonObject(dict[str, Any]):
    """A JSON object of a running helper, which may have another version than this command."""

    def __missing__(self, name: str) -> Any:
        raise other_version(f"its response has no `{name}`")


def other_version(reason: str) -> HelperError:
    """Return the error of a response that this command cannot read."""
    return HelperError(
        f"the running helper has another version than this command: {reason}",
        advice="Restart the helper. `svote-helper version` shows the version of the command.",
    )


def _result(status: int, content: bytes, *, by_daemon: bool) -> dict[str, Any]:
    """Return the content of a successful response. Raise the error of any other."""
    try:
        response = json.loads(content, object_hook=_DaemonObject if by_daemon else None)
    except ValueError:
        response = None
    if not isinstance(response, dict):
        raise HelperError("unexpected response on the control socket", advice=_LOG_ADVICE)
    if status == 200:
        return response
    message, advice = str(response.get("error", "")), response.get("advice") or None
    match status:
        case 400 | 413:
            raise UsageError(message)
        case 403:
            raise PermissionError(message)
        case 404:
            raise NotFound(message, advice=advice)
        case 409 | 422:
            raise ActionRefused(message, advice=advice)
    if by_daemon:
        raise HelperError(f"the helper returned an error: {message}", advice=advice or _LOG_ADVICE)
    raise HelperError(message, advice=advice)


RefsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SHARE",
        help=f"Share references as shown by `queue list`, or prefixes of at least {MIN_REF_CHARS} characters.",
    ),
]

_OFFSET: Final = re.compile(r"\+([0-9]{1,9})(s|min|m|h|d)")
UNIT_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


_LISTED_STATES: Final = [state.label for state in ShareState if state is not ShareState.CONFIRMED]
"""The states of shares that have a row. A confirmed one has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Options that select shares."""

    round_id: Annotated[
        str,
        typer.Option("--round", help=f"Only this round (hex, or a prefix of at least {MIN_REF_CHARS} characters)."),
    ] = ""
    state: Annotated[
        str,
        typer.Option(
            "--state",
            help=f"Only this state: {', '.join(_LISTED_STATES)}.",
            autocompletion=lambda: _LISTED_STATES,
        ),
    ] = ""
    due_before: Annotated[
        str,
        typer.Option(
            "--due-before",
            help="Only shares due before this time: Unix seconds, a UTC time (2026-01-31 18:30:00), or an offset such "
            "as +10min.",
        ),
    ] = ""
    stage: Annotated[
        str, typer.Option("--stage", help="Only shares whose last event was in this stage (see `queue list`).")
    ] = ""

    def to_query(self, api: OperatorApi) -> dict[str, str]:
        """Return the options as query parameters of the operator API, which checks state and stage.

        Raises:
            UsageError: an option is invalid.
            NotFound: no known round has this prefix, or there is no queue.
        """
        return {
            "round": resolve_round(api, self.round_id),
            "state": self.state,
            "due_before": parse_due_before(self.due_before, SystemClock().now()),
            "stage": self.stage,
        }


def resolve_round(api: OperatorApi, text: str) -> str:
    """Return the full id of the known round with this prefix. A full id and "" are returned unchanged."""
    prefix = text.lower()
    if not prefix or len(prefix) >= 64:
        return prefix
    if len(prefix) < MIN_REF_CHARS or not re.fullmatch("[0-9a-f]+", prefix):
        raise UsageError(f"round must be 64 hex characters, or a prefix of at least {MIN_REF_CHARS} of a known round")
    matches = [str(row["round"]) for row in api.get("/rounds")["rounds"] if row["round"].startswith(prefix)]
    if not matches:
        raise NotFound(f"no known round begins with {prefix}")
    if len(matches) > 1:
        raise UsageError(f"{len(matches)} rounds begin with {prefix}: use a longer prefix")
    return matches[0]


def parse_due_before(text: str, now: float) -> str:
    """Parse a time: Unix seconds, `+10min` from now (s, min, h, d), or UTC as in tables.

    Returns:
        Unix seconds. A fraction is rounded up, so that "before" includes the given time.

    Raises:
        UsageError: the format is none of these.
    """
    if not text or text.isdecimal():
        return text
    if offset := _OFFSET.fullmatch(text):
        return str(int(now) + int(offset[1]) * UNIT_SECONDS[offset[2]])
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            "due_before must be Unix seconds, a UTC time (2026-01-31 18:30:00), or an offset such as +10min"
        ) from None
    return str(-int(-(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() // 1))
