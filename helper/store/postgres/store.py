"""All of the Store protocol on PostgreSQL: the same operations as on SQLite, for several hosts at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from helper.clock import Clock, SystemClock
from helper.errors import StoreError
from helper.store.postgres import sender_lease
from helper.store.postgres.connection import create_connection_settings
from helper.store.postgres.keyring import Keyring
from helper.store.postgres.listener import NotificationListener
from helper.store.postgres.reader import PostgresReader
from helper.store.postgres.row_encryption import RowEncryption
from helper.store.postgres.transaction import ClaimState, PostgresTransaction
from helper.store.postgres.writer import PostgresWriter
from helper.store.rows import DamagedShare
from helper.store.store import Store, report_damaged
from helper.store.writer_thread import WriterStats

log = structlog.get_logger("helper.store")

LEASE_SECONDS: Final = 10.0
"""After how long without a word a host loses the shares that it has in hand."""
_WORDS_A_LEASE: Final = 3
_QUESTIONS: Final = 3
"""How often the database is asked for its time where answers are slow: the quickest tells it best."""
_QUICK_SECONDS: Final = 0.5
_PATIENCE: Final = 0.3
"""The part of a lease after which the server ends a transaction that nothing is heard of."""


class PostgresStore(Store):
    """A store in one schema of a PostgreSQL database, which several hosts may share.

    Args:
        address: `postgresql://user@host/database`; over a network with TLS that is verified, or it is refused.
        seals: the keys that the hosts share; witnesses and messages are sealed with them.
        host: this host's name, another one on every host.
        schema: the namespace of the tables.
        clock: gives the times of history.
        lease: seconds after which a host that is not heard of loses the shares that it has in hand.
        on_damaged: called on the event loop with each row that failed its check and was set aside.

    Raises:
        StoreError: the address, the schema or the host's name will not do.
    """

    def __init__(
        self,
        address: str,
        *,
        seals: Keyring,
        host: str,
        schema: str = "svote_helper",
        clock: Clock | None = None,
        lease: float = LEASE_SECONDS,
        on_damaged: Callable[[DamagedShare], None] = report_damaged,
    ) -> None:
        link = create_connection_settings(address, schema=schema, host=host, patience=lease * _PATIENCE)
        self._hands = ClaimState(host, lease)
        self._writer: PostgresWriter = PostgresWriter(link, seals, self._hands, on_damaged)
        self._reader: PostgresReader = PostgresReader(link, RowEncryption(seals))
        self._operators: PostgresReader = self._reader
        super().__init__(SystemClock() if clock is None else clock, self._writer, self._reader, self._operators)
        self._hearing = NotificationListener(link)
        self._heard: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, and make the schema or bring it up to date.

        Raises:
            StoreForeign: the schema is another program's, or a newer version's.
            StoreCorrupt: its own keys are damaged.
            StoreLocked: another process uses this host's name.
            StoreError: it can not be reached, forgets what it has answered for, or has other keys than this host.
        """
        await self._writer.start()
        try:
            await self._reader.open()
        except BaseException:
            await self.close()
            raise
        self._heard = asyncio.create_task(self._be_heard(), name="store-leases")
        if self._hearing.wanted:
            self._listening = asyncio.create_task(self._hearing.run(), name="store-hearing")

    async def close(self) -> None:
        """Finish what was handed in, and disconnect. Shares in hand are another host's when their lease is over."""
        tasks = [task for task in (self._heard, self._listening) if task is not None]
        self._heard = self._listening = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reader.close()
        await self._writer.stop()

    async def _be_heard(self) -> None:
        """Renew the leases of what this host has in hand, for as long as its event loop turns."""
        while True:
            await asyncio.sleep(self._hands.lease / _WORDS_A_LEASE)
            if self._hands.fences:
                try:
                    await self._writer.run(renew)
                except StoreError as error:
                    log.warning("leases could not be renewed", error=str(error))

    # ------------------------------------------------------------------ who sends

    @property
    def lease_seconds(self) -> float:
        """After how long without a word a host loses what it has in hand, and the right to send."""
        return self._hands.lease

    async def take_sender(self, outer: int | None = None) -> int | None:
        """Become the one host that sends; before, `mark_sending` answers False.

        Args:
            outer: the fence of a lease kept elsewhere that gives the right; None where the database itself gives it.

        Returns:
            The fence, greater than all before; None where another host sends.
        """
        fence = await self._writer.run(partial(sender_lease.take, outer=outer))
        self._hands.sender = fence or 0
        return fence

    async def keep_sender(self) -> bool:
        """Stay it for another lease; False when another host has taken over."""
        fence = self._hands.sender
        kept = fence != 0 and await self._writer.run(partial(sender_lease.keep, fence=fence))
        if not kept and self._hands.sender == fence:
            self._hands.sender = 0
        return kept

    async def leave_sender(self) -> None:
        """Stop being it, so that another host need not wait."""
        fence, self._hands.sender = self._hands.sender, 0
        if fence:
            await self._writer.run(partial(sender_lease.leave, fence=fence))

    async def sender_host(self) -> str:
        """Which host sends, "" for none."""
        found = await self._operators.fetch("sender")
        return str(found[0][0]) if found else ""

    # ------------------------------------------------------------------ looking after it

    async def erased(self) -> None:
        """Have the space of everything deleted before this call taken back. What was secret in it is sealed."""
        await self._writer.run(lambda _tx: None)
        await self._operators.run(b"VACUUM shares, reveals, history, claims")

    async def verify(self) -> list[str]:
        """Look through all live shares: damaged ones are set aside. PostgreSQL's own `pg_amcheck` does the rest."""
        await self._check_rows()
        return []

    async def skew(self) -> float:
        """How many seconds the database's clock is ahead of this host's, to within half the time of one question."""
        found, least = 0.0, math.inf
        for _ in range(_QUESTIONS):
            asked, before = self._clock.monotonic(), self._clock.now()
            ((told,),) = await self._operators.fetch("database_time")
            took = self._clock.monotonic() - asked
            if took < least:
                found, least = float(told) - (before + self._clock.now()) / 2, took
            if took < _QUICK_SECONDS:
                break
        return found

    @property
    def shared(self) -> bool:
        """Other hosts may work on the same queue."""
        return True

    def listen(self, heard: Callable[[str], None]) -> None:
        """Have words of other hosts told, from `open` on; "" when some may have been missed."""
        self._hearing.add(heard)

    @property
    def trouble(self) -> str | None:
        """Why the last operations could not be kept, None while they can."""
        return self._writer.trouble

    @property
    def stats(self) -> WriterStats:
        """What the writer has done since the start."""
        return self._writer.stats


def renew(tx: PostgresTransaction) -> int:
    """Have this host's claims hold for another lease; how many do. One that another host has is none of them."""
    hands = tx.hands
    return tx.run("renew", {"host": hands.host, "lease": hands.lease, "fences": list(hands.fences.values())})
