"""The queue that a command is about: a running daemon's, or a database's while none runs."""

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
"""What the daemon would do, done here."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the queue is.

    Attributes:
        socket: the daemon's control socket.
        database: its database.
        shared: the queue is not in that file but in a database that hosts share: only a running helper can be asked.
    """

    socket: Path
    database: Path
    shared: bool = False

    @classmethod
    def of(cls, config: Path | None, db: Path | None) -> Target:
        """As the settings say, or a flag."""
        settings = read_settings(config, {"helper.db_path": str(db) if db else None}).config
        return cls(settings.socket_path, settings.db_path, bool(settings.store.url) and db is None)

    def ask(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """An answer of the daemon, or of the file; see `queue_source.ask`."""
        self.need_somewhere()
        return ask(self.socket, self.database, path, {name: value for name, value in (query or {}).items() if value})

    def need_somewhere(self) -> None:
        """Raise NothingThere where the queue is shared and no helper of this host answers."""
        if self.shared and not is_daemon_listening(self.socket):
            raise NothingThere(
                f"no daemon answers on {self.socket}, and the queue is in a database that hosts share",
                advice="Run this on a host whose helper runs: each of them answers for the whole queue.",
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
        """Have something done.

        Args:
            path: where the daemon takes it.
            body: what it is told.
            on_file: the same for where no daemon runs.
            dry: only rehearsed.
            query: conditions in the address.
        """
        if is_daemon_listening(self.socket):
            return tell(self.socket, path, body, query)
        self.need_somewhere()
        need_database(self.socket, self.database)
        if not os.access(self.database, os.R_OK | os.W_OK):
            raise PermissionError(f"{self.database} may not be changed by this user")
        return anyio.run(_on_file, self.database, on_file, dry)


async def _on_file(database: Path, on_file: OnFile, dry: bool) -> dict[str, Any]:
    # loaded here: they bring the store and native code, which a question to the daemon does not need
    from helper.cli.offline import operations_on, this_user  # noqa: PLC0415
    from helper.observability.log_config import configure  # noqa: PLC0415
    from helper.server.action_views import act_json  # noqa: PLC0415

    configure("warning")
    with acting_as_owner(database):
        async with operations_on(database) as operations:
            return act_json(await on_file(operations, this_user()), dry=dry, source="file")
