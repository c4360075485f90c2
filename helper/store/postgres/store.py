"""`Store` on PostgreSQL, for hosts that share one queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final

import psycopg
import structlog
from psycopg import sql

from helper.clock import Clock, SystemClock
from helper.core.dispatch_order import rank
from helper.core.log_limits import LoggedProblem
from helper.core.share import ShareKey
from helper.errors import StoreError, StoreUnconfirmed
from helper.store.keyring import Keyring
from helper.store.postgres.connection import create_connection_settings
from helper.store.postgres.reader import PostgresReader
from helper.store.postgres.transaction import ClaimState, PostgresTransaction
from helper.store.postgres.writer import PostgresWriter
from helper.store.row_encryption import RowEncryption
from helper.store.store import Store
from helper.store.transaction import exclusive

log = structlog.get_logger("helper.store")

LEASE_SECONDS: Final = 10.0
"""Seconds after which the claims of a host expire unless it renews them."""
_RENEWALS_PER_LEASE: Final = 3
_STALL_CHECK_SECONDS: Final = 1.0
_RECONNECT_SECONDS: Final = 1.0
"""Pause before the connection that receives notifications is opened again."""
_RESTART_SECONDS: Final = 1.0
"""Pause before a failed background task is started again."""
_STALL_ADVICE: Final = (
    "If a synchronous standby has failed, restart it or set synchronous_standby_names on the primary; see "
    "docs/cluster.md. Otherwise check locks (pg_locks) and the disk of the server."
)
_SKEW_SAMPLES: Final = 3
"""Maximum number of clock queries while responses are slow; the fastest one is the most accurate."""
_FAST_REPLY_SECONDS: Final = 0.5
_IDLE_FRACTION: Final = 0.3
"""Fraction of a lease after which the server ends an idle transaction."""


class PostgresStore(Store):
    """A store in one schema of a PostgreSQL database that hosts may share.

    Args:
        address: `postgresql://user@host/database`; a network connection requires verified TLS.
        keyring: the keys that the hosts share, for witnesses and messages.
        clock: source of the times in history entries.
        lease_seconds: seconds after which the claims of a host expire unless it renews them.
        proves: whether this host proves shares.

    Raises:
        StoreError: the URL, the schema or the host name is invalid.
    """

    def __init__(
        self,
        address: str,
        *,
        keyring: Keyring,
        host: str,
        schema: str = "svote_helper",
        clock: Clock | None = None,
        lease_seconds: float = LEASE_SECONDS,
        proves: bool = False,
    ) -> None:
        settings = create_connection_settings(
            address, schema=schema, host=host, idle_seconds=lease_seconds * _IDLE_FRACTION, proves=proves
        )
        self._settings = settings
        self._claims = ClaimState(host, lease_seconds)
        clock = SystemClock() if clock is None else clock
        self._writer: PostgresWriter = PostgresWriter(settings, keyring, self._claims, clock)
        self._reader: PostgresReader = PostgresReader(settings, RowEncryption(keyring))
        self._operator_reader: PostgresReader = self._reader
        self._clock = clock
        super().__init__(self._writer, self._reader, self._operator_reader)
        self._first_rank = rank(b"first rank of a host", host.encode())
        self._callbacks: list[Callable[[str], None]] = []
        self._can_prove: Callable[[], bool] = lambda: True
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Connect, and create or upgrade the schema.

        Raises:
            StoreForeign: the schema belongs to another program or a newer version.
            StoreCorrupt: the keys of the database are damaged.
            StoreLocked: another process uses this host's name.
            StoreError: the server is unreachable or its settings are unsafe, or this host has different keys.
        """
        await self._writer.start()
        try:
            await self._reader.open()
        except BaseException:
            await self.close()
            raise
        functions = [self._renew_claims, self._report_stalls]
        if self._callbacks:
            functions.append(self._receive_notifications)
        self._tasks = [asyncio.create_task(_run_until_cancelled(function)) for function in functions]

    async def close(self) -> None:
        """Complete submitted operations and disconnect. Other hosts can claim this host's shares when claims expire."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reader.close()
        await self._writer.stop()

    async def _renew_claims(self) -> None:
        """Renew the claims of this host for as long as its event loop makes progress and it can prove."""
        while True:
            await asyncio.sleep(self._claims.lease_seconds / _RENEWALS_PER_LEASE)
            if self._claims.fences and self._can_prove():
                try:
                    await self.run(renew_claims)
                except StoreError as error:
                    log.warning("claim_renewal_failed", error=str(error))

    async def _report_stalls(self) -> None:
        """Log once that a transaction does not complete. The writer cannot, because it waits for the database."""
        problem = LoggedProblem()
        while True:
            await asyncio.sleep(_STALL_CHECK_SECONDS)
            if self._writer.is_stalled:
                if problem.note():
                    log.error("database_writes_stalled", reason=self._writer.write_error, advice=_STALL_ADVICE)
            elif self._writer.write_error is None and problem.clear():
                log.info("database_writes_recovered")

    async def _receive_notifications(self) -> None:
        """Pass notifications of other hosts on (LISTEN). Nothing depends on one: receivers also poll every second."""
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
                    self._dispatch("")
                    async for notice in conn.notifies():
                        self._dispatch(notice.payload)
            except psycopg.Error as error:
                if problem.note():
                    log.warning(
                        "listen_connection_lost",
                        error=type(error).__name__,
                        advice="Polling every second until the connection is restored.",
                    )
            await asyncio.sleep(_RECONNECT_SECONDS)

    def _dispatch(self, payload: str) -> None:
        for callback in self._callbacks:
            callback(payload)

    async def is_known(self, key: ShareKey) -> bool:
        """Return whether a share with this key was accepted in a round that is not purged.

        If the wait for a standby was cancelled, every host sees a share that a promoted standby may lack. Therefore a
        known share is reported only after a later commit is confirmed.
        """
        is_known = await super().is_known(key)
        if is_known and await self._reader.fetch("standby_names") != [("",)]:
            if self.write_error is not None:
                raise StoreUnconfirmed("commits are not confirmed by the standby")
            await self._writer.run(PostgresTransaction.force_sync)
        return is_known

    # ------------------------------------------------------------------ the sender lease

    @property
    def lease_seconds(self) -> float:
        """Seconds after which claims and the sender lease expire unless they are renewed."""
        return self._claims.lease_seconds

    async def acquire_sender_lease(self, outer: int | None = None) -> int | None:
        """Acquire the sender lease, without which `mark_sending` returns False; see the operation."""
        fence = await self.run(acquire_sender_lease, outer)
        self._claims.sender_fence = fence or 0
        return fence

    async def renew_sender_lease(self) -> bool:
        """Renew the sender lease. Returns False if another host has acquired it."""
        fence = self._claims.sender_fence
        params = {"fence": fence, "host": self._claims.host, "lease": self.lease_seconds}
        renewed = fence != 0 and await self._writer.run(lambda tx: tx.execute("renew_sender_lease", params)) == 1
        if not renewed and self._claims.sender_fence == fence:
            self._claims.sender_fence = 0
        return renewed

    async def release_sender_lease(self) -> None:
        """Release the sender lease, so that another host does not have to wait."""
        fence, self._claims.sender_fence = self._claims.sender_fence, 0
        if fence:
            params = {"fence": fence, "host": self._claims.host}
            await self._writer.run(lambda tx: tx.execute("release_sender_lease", params))

    async def get_sender_host(self) -> str:
        """Return the host that holds the sender lease, "" if none does."""
        rows = await self._operator_reader.fetch("get_sender_host")
        return str(rows[0][0]) if rows else ""

    async def has_prover(self) -> bool:
        """Return whether a host that is connected to the database proves shares."""
        return bool(await self._operator_reader.fetch("has_prover"))

    # ------------------------------------------------------------------ maintenance

    async def wait_for_erasure(self) -> None:
        """Vacuum all tables with rows deleted before this call. Secret columns are encrypted in any case."""
        await self._writer.run(lambda _tx: None)
        await self._operator_reader.run(b"VACUUM shares, reveals, history, claims")

    async def verify(self) -> list[str]:
        """Check all live shares and quarantine damaged ones. `pg_amcheck` checks the rest of the database."""
        await self._check_rows()
        return []

    async def measure_clock_skew(self) -> float:
        """Return the seconds that the database's clock is ahead, accurate to half the duration of a query."""
        skew, fastest = 0.0, math.inf
        for _ in range(_SKEW_SAMPLES):
            started, before = self._clock.monotonic(), self._clock.now()
            ((database_time,),) = await self._operator_reader.fetch("database_time")
            duration = self._clock.monotonic() - started
            if duration < fastest:
                skew, fastest = float(database_time) - (before + self._clock.now()) / 2, duration
            if duration < _FAST_REPLY_SECONDS:
                break
        return skew

    @property
    def is_shared(self) -> bool:
        """True: other hosts may use the same queue."""
        return True

    async def count_claiming_hosts(self) -> int:
        """Return the number of hosts with unexpired claims, at least 1."""
        ((number,),) = await self._reader.fetch("claiming_hosts")
        return max(1, int(number))

    def listen(self, callback: Callable[[str], None]) -> None:
        """Register a callback before `open`. It is called with "" if notifications may have been lost."""
        self._callbacks.append(callback)

    def renew_claims_while(self, can_prove: Callable[[], bool]) -> None:
        """See `Store`."""
        self._can_prove = can_prove


async def _run_until_cancelled(function: Callable[[], Awaitable[None]]) -> None:
    """Run a background task, and start it again after an unexpected error: without it, claims expire unnoticed."""
    while True:
        try:
            await function()
        except Exception:
            log.exception("store_task_failed", note=function.__name__)
        await asyncio.sleep(_RESTART_SECONDS)


def renew_claims(tx: PostgresTransaction) -> int:
    """Renew this host's claims, and forget those of shares that no longer exist.

    Returns:
        The number renewed, without claims that another host has acquired.
    """
    claims = tx.claims
    tx.forget_claims_except(row[0] for row in tx.fetch_all("existing_shares", (list(claims.fences),)))
    return tx.execute(
        "renew_host_lease", {"host": claims.host, "lease": claims.lease_seconds, "fences": list(claims.fences.values())}
    )


@exclusive
def acquire_sender_lease(tx: PostgresTransaction, outer: int | None) -> int | None:
    """Acquire the sender lease if it is free or expired, or if this host held it before a restart.

    Args:
        tx: the transaction; without other operations, because sending locks this row and shares in another order.
        outer: fencing token of the lease in the object store, None if this row alone is the lease. A greater token
            replaces any holder, a smaller one never does.

    Returns:
        The new fencing token, greater than all earlier ones; None if another host holds the lease.
    """
    row = tx.fetch_one(
        "acquire_sender_lease", {"host": tx.claims.host, "lease": tx.claims.lease_seconds, "outer": outer}
    )
    return None if row is None else int(row[0])
