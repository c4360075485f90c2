"""Receives notifications of other hosts (LISTEN) on a dedicated connection.

The listener reconnects when the connection is lost. A notification is only a wake-up signal. Nothing depends on it,
because receivers also poll every second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import psycopg
import structlog
from psycopg import sql

from helper.core.log_limits import LoggedProblem
from helper.store.postgres.connection import ConnectionSettings
from helper.store.table_rows import Row

log = structlog.get_logger("helper.store")

RECONNECT_SECONDS: Final = 1.0
"""Pause between two attempts to connect."""


class NotificationListener:
    """Forwards notifications to callbacks.

    Attributes:
        callbacks: called with each payload, and with "" if notifications may have been lost.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self.callbacks: list[Callable[[str], None]] = []

    async def run(self) -> None:
        """Listen until cancelled."""
        problem = LoggedProblem()
        while True:
            try:
                conn = await psycopg.AsyncConnection.connect(
                    self._settings.conninfo, **self._settings.options(reading=True)
                )
                async with conn:
                    await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._settings.schema)))
                    if problem.clear():
                        log.info("listen_connection_recovered")
                    await self._receive(conn)
            except psycopg.Error as error:
                if problem.note():
                    log.warning(
                        "listen_connection_lost",
                        error=type(error).__name__,
                        advice="Polling every second until the connection is restored.",
                    )
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _receive(self, conn: psycopg.AsyncConnection[Row]) -> None:
        self._dispatch("")
        async for notice in conn.notifies():
            self._dispatch(notice.payload)

    def _dispatch(self, payload: str) -> None:
        for callback in self.callbacks:
            callback(payload)
