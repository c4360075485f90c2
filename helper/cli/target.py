"""Queue that a command operates on: a running daemon's, or a database file."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from helper.cli.operator_api import ask, is_daemon_listening, need_database, tell
from helper.cli.settings import read_settings
from helper.errors import NothingThere
from helper.runtime.privileges import acting_as_owner

if TYPE_CHECKING:
    from helper.operations.actions import Operations
    from helper.store.action_rows import Actor

OnFile = Callable[["Operations", "Actor"], Awaitable[Mapping[str, Any]]]
"""Runs the action in this process, for use while no daemon runs."""


@dataclass(frozen=True, slots=True)
class Target:
    """Location of the queue.

    Attributes:
        socket: the daemon's control socket.
        database: its database.
        shared: the queue is in a shared database instead, which only a running helper can query.
    """

    socket: Path
    database: Path
    shared: bool = False

    @classmethod
    def of(cls, config: Path | None, db: Path | None) -> Target:
        """Create a target from the settings and the `--db` flag."""
        settings = read_settings(config, {"helper.db_path": str(db) if db else None}).config
        return cls(settings.socket_path, settings.db_path, bool(settings.store.url) and db is None)

    def ask(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Answer a query; see `operator_api.ask`."""
        self.need_somewhere()
        return ask(self.socket, self.database, path, {name: value for name, value in (query or {}).items() if value})

    def need_somewhere(self) -> None:
        """Raise NothingThere if the queue is shared and no helper runs on this host."""
        if self.shared and not is_daemon_listening(self.socket):
            raise NothingThere(
                f"no daemon answers on {self.socket}, and the queue is in a shared database",
                advice="Run this on a host with a running helper; each answers for the whole queue.",
            )

    def act(
        self,
        path: str,
        body: Mapping[str, Any] | Iterable[bytes],
        on_file: OnFile,
        *,
        dry: bool = False,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Perform an action.

        Args:
            path: path of the action in the operator API.
            body: request body.
            on_file: performs the action while no daemon runs.
            dry: change nothing.
            query: query parameters.
        """
        if is_daemon_listening(self.socket):
            return tell(self.socket, path, body, query)
        self.need_somewhere()
        need_database(self.socket, self.database)
        if not os.access(self.database, os.R_OK | os.W_OK):
            raise PermissionError(f"no permission to change {self.database}")
        return anyio.run(_on_file, self.database, on_file, dry)


async def _on_file(database: Path, on_file: OnFile, dry: bool) -> dict[str, Any]:
    # imported here: these load the store and native code, which requests to the daemon do not need
    from helper.cli.offline import operations_on, this_user  # noqa: PLC0415
    from helper.observability.log_config import configure  # noqa: PLC0415
    from helper.server.action_views import act_json  # noqa: PLC0415

    configure("warning")
    with acting_as_owner(database):
        async with operations_on(database) as operations:
            return act_json(await on_file(operations, this_user()), dry=dry, source="file")
