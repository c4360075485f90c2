"""The `Store` on PostgreSQL: the same operations as on SQLite, for several hosts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from helper.clock import Clock, SystemClock
from helper.errors import StoreError
from helper.store.postgres.connection import create_connection_settings
from helper.store.postgres.keyring import Keyring
from helper.store.postgres.listener import NotificationListener
from helper.store.postgres.reader import PostgresReader
from helper.store.postgres.row_encryption import RowEncryption
from helper.store.postgres.transaction import ClaimState, ExclusiveLockRequired, PostgresTransaction
from helper.store.postgres.writer import PostgresWriter
from helper.store.rows import DamagedShare
from helper.store.store import Store, report_damaged
from helper.store.writer_thread import WriterStats

log = structlog.get_logger("helper.store")

LEASE_SECONDS: Final = 10.0
"""Seconds after which the claims of a host expire unless it renews them."""
_RENEWALS_PER_LEASE: Final = 3
_SKEW_SAMPLES: Final = 3
"""Maximum number of clock queries while replies are slow; the fastest one is the most accurate."""
_FAST_REPLY_SECONDS: Final = 0.5
_IDLE_FRACTION: Final = 0.3
"""Fraction of a lease after which the server ends an idle transaction."""


class PostgresStore(Store):
    """A store in one schema of a PostgreSQL database, which several hosts may share.

    Args:
        address: `postgresql://user@host/database`; a network connection requires verified TLS.
        seals: the keys that the hosts share, for witnesses and messages.
        host: name of this host, different on every host.
        schema: schema of the tables.
        clock: gives the times of history entries.
        lease: seconds after which the claims of a host expire unless it renews them.
        on_damaged: called on the event loop with each row that failed its check and was set aside.

    Raises:
        StoreError: the address, the schema or the host name is invalid.
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
        link = create_connection_settings(address, schema=schema, host=host, patience=lease * _IDLE_FRACTION)
        self._hands = ClaimState(host, lease)
        self._writer: PostgresWriter = PostgresWriter(link, seals, self._hands, on_damaged)
        self._reader: PostgresReader = PostgresReader(link, RowEncryption(seals))
        self._operators: PostgresReader = self._reader
        super().__init__(SystemClock() if clock is None else clock, self._writer, self._reader, self._operators)
        self._listener = NotificationListener(link)
        self._renewing: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, and create or upgrade the schema.

        Raises:
            StoreForeign: the schema belongs to another program or a newer version.
            StoreCorrupt: the keys of the database are damaged.
            StoreLocked: another process uses this host's name.
            StoreError: the server is unreachable or its settings are unsafe, or this host has other keys.
        """
        await self._writer.start()
        try:
            await self._reader.open()
        except BaseException:
            await self.close()
            raise
        self._renewing = asyncio.create_task(self._renew_claims(), name="store-leases")
        if self._listener.wanted:
            self._listening = asyncio.create_task(self._listener.run(), name="store-listener")

    async def close(self) -> None:
        """Complete submitted operations and disconnect. Other hosts get the claimed shares when the claims expire."""
        tasks = [task for task in (self._renewing, self._listening) if task is not None]
        self._renewing = self._listening = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reader.close()
        await self._writer.stop()

    async def _renew_claims(self) -> None:
        """Renew the claims of this host for as long as its event loop makes progress."""
        while True:
            await asyncio.sleep(self._hands.lease / _RENEWALS_PER_LEASE)
            if self._hands.fences:
                try:
                    await self._writer.run(renew)
                except StoreError as error:
                    log.warning("claim_renewal_failed", error=str(error))

    # ------------------------------------------------------------------ the sender lease

    @property
    def lease_seconds(self) -> float:
        """Seconds after which claims and the sender lease expire unless they are renewed."""
        return self._hands.lease

    async def take_sender(self, outer: int | None = None) -> int | None:
        """Acquire the sender lease. Without it `mark_sending` returns False.

        Args:
            outer: fencing token of a lease in an object store that must be held too, None if there is none.

        Returns:
            The fencing token, greater than all earlier ones; None if another host holds the lease.
        """
        fence = await self._writer.run(partial(acquire_sender_lease, outer=outer))
        self._hands.sender = fence or 0
        return fence

    async def keep_sender(self) -> bool:
        """Renew the sender lease; False if another host has acquired it."""
        fence = self._hands.sender
        renewed = fence != 0 and await self._writer.run(partial(renew_sender_lease, fence=fence))
        if not renewed and self._hands.sender == fence:
            self._hands.sender = 0
        return renewed

    async def leave_sender(self) -> None:
        """Release the sender lease, so that another host need not wait."""
        fence, self._hands.sender = self._hands.sender, 0
        if fence:
            await self._writer.run(partial(release_sender_lease, fence=fence))

    async def sender_host(self) -> str:
        """The host that holds the sender lease, "" if none does."""
        rows = await self._operators.fetch("sender")
        return str(rows[0][0]) if rows else ""

    # ------------------------------------------------------------------ maintenance

    async def erased(self) -> None:
        """Vacuum the tables of everything deleted before this call. Secret columns are encrypted in any case."""
        await self._writer.run(lambda _tx: None)
        await self._operators.run(b"VACUUM shares, reveals, history, claims")

    async def verify(self) -> list[str]:
        """Check all live shares and set damaged ones aside. `pg_amcheck` checks the rest of the database."""
        await self._check_rows()
        return []

    async def skew(self) -> float:
        """Seconds that the database's clock is ahead of this host's, accurate to half the duration of a query."""
        skew, fastest = 0.0, math.inf
        for _ in range(_SKEW_SAMPLES):
            started, before = self._clock.monotonic(), self._clock.now()
            ((database_time,),) = await self._operators.fetch("database_time")
            duration = self._clock.monotonic() - started
            if duration < fastest:
                skew, fastest = float(database_time) - (before + self._clock.now()) / 2, duration
            if duration < _FAST_REPLY_SECONDS:
                break
        return skew

    @property
    def shared(self) -> bool:
        """True: other hosts may work on the same queue."""
        return True

    def listen(self, heard: Callable[[str], None]) -> None:
        """Register a callback before `open`. It gets "" if notifications may have been lost."""
        self._listener.add(heard)

    @property
    def trouble(self) -> str | None:
        """Why the last changes could not be stored, None if they could."""
        return self._writer.trouble

    @property
    def stats(self) -> WriterStats:
        """Counters of the writing thread since the start."""
        return self._writer.stats


def renew(tx: PostgresTransaction) -> int:
    """Renew this host's claims. Returns how many; claims that another host has acquired are not counted."""
    hands = tx.hands
    return tx.run("renew", {"host": hands.host, "lease": hands.lease, "fences": list(hands.fences.values())})


def acquire_sender_lease(tx: PostgresTransaction, outer: int | None) -> int | None:
    """Acquire the sender lease if it is free or expired, or if this host held it before a restart.

    Args:
        tx: a transaction without other operations, because sending locks this row and shares in another order.
        outer: fencing token of the lease in the object store, None if this row alone is the lease. A greater token
            replaces any holder, a smaller one never does.

    Returns:
        The new fencing token, None if another host holds the lease.
    """
    if not tx.alone_here:
        raise ExclusiveLockRequired
    row = tx.one("take_sender", {"host": tx.hands.host, "lease": tx.hands.lease, "outer": outer})
    return None if row is None else int(row[0])


def renew_sender_lease(tx: PostgresTransaction, fence: int) -> bool:
    """Renew the sender lease; False if another host has acquired it."""
    return tx.run("keep_sender", {"fence": fence, "lease": tx.hands.lease}) == 1


def release_sender_lease(tx: PostgresTransaction, fence: int) -> bool:
    """Release the sender lease; False if another host has already acquired it."""
    return tx.run("leave_sender", (fence,)) == 1
