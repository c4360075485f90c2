"""Hears what other hosts say (LISTEN): a connection of its own, made anew when it is lost.

A word is a reason to look at once. Nothing depends on it: who wants to know looks every second as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from helper.store.postgres.connection import ConnectionSettings

log = structlog.get_logger("helper.store")

PAUSE_SECONDS: Final = 1.0
"""Between two tries to connect."""


class NotificationListener:
    """The ears of one host."""

    def __init__(self, link: ConnectionSettings) -> None:
        self._link = link
        self._told: list[Callable[[str], None]] = []

    @property
    def wanted(self) -> bool:
        """Whether anybody is to be told."""
        return bool(self._told)

    def add(self, heard: Callable[[str], None]) -> None:
        """Tell this one too, of every word; of "" when some may have been missed."""
        self._told.append(heard)

    async def run(self) -> None:
        """Listen until cancelled."""
        lost = False
        while True:
            try:
                conn = await psycopg.AsyncConnection.connect(self._link.conninfo, **self._link.options(reading=True))
                async with conn:
                    await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._link.schema)))
                    if lost:
                        log.info("other hosts are heard again")
                    lost = False
                    await self._hear(conn)
            except psycopg.Error as error:
                if not lost:
                    log.warning("other hosts are not heard: it is looked every second", error=type(error).__name__)
                lost = True
            await asyncio.sleep(PAUSE_SECONDS)

    async def _hear(self, conn: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        self._tell("")
        async for notice in conn.notifies():
            self._tell(notice.payload)

    def _tell(self, word: str) -> None:
        for heard in self._told:
            heard(word)
