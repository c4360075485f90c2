"""Retention of closed rounds: reports unconfirmed shares, then purges the round."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

import structlog

from helper.clock import Clock
from helper.core.share import ShareState
from helper.lease import Lease
from helper.lease.local import LocalLease
from helper.observability.stats import Stats
from helper.store.rows import StoredRound
from helper.store.store import Store

log = structlog.get_logger("helper.reveal")

UNSUBMITTED = (ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST, ShareState.FAILED)
INTERVAL = 1.0
"""Shortest interval between two checks of the rounds, in seconds."""
TENDING_PATIENCE = 0.05
"""Seconds that dispatch waits for alerts and purges; longer ones continue in the background."""


class Rounds(Protocol):
    """Decides which rounds are closed (`helper.chain.round_registry.RoundRegistry`).

    Attributes:
        revision: increases with every change that may close a round or permit its purge.
    """

    revision: int

    def chain_now(self) -> float | None:
        """Return the chain's time in unix seconds, None if unknown. The local clock may be wrong by years."""
        ...

    def frozen(self, round_id: bytes) -> str | None:
        """Return why the round must not be changed now, or None."""
        ...

    async def is_closed(self, round_id: bytes) -> bool:
        """Return whether the chain has closed the round for good."""
        ...

    def forget(self, round_id: bytes) -> None:
        """Drop a purged round."""
        ...


class Retention:
    """Reports and purges closed rounds.

    Only the chain closes a round (`RoundRegistry.is_closed`). Its unconfirmed shares then fail and are logged. Their
    witnesses remain for `purge_after` seconds of the chain's time, so that an operator can inspect them, and are
    purged with the round. The rounds are read only after a change on the chain or when a purge is due, at most once a
    second. Of several hosts, the lease holder does this.
    """

    def __init__(
        self,
        *,
        store: Store,
        rounds: Rounds,
        clock: Clock,
        stats: Stats,
        purge_after: float,
        lease: Lease | None = None,
    ) -> None:
        self._store = store
        self._lease: Lease = LocalLease() if lease is None else lease
        self._rounds = rounds
        self._clock = clock
        self._stats = stats
        self._purge_after = purge_after
        self._next_check = -INTERVAL
        self._checked_revision: int | None = None  # at the last successful check
        self._next_purge = math.inf  # unix seconds

    @property
    def wanted(self) -> bool:
        """Whether there may be anything to do."""
        if not self._lease.held or self._clock.monotonic() < self._next_check:
            return False
        now = self._rounds.chain_now()
        return self._rounds.revision != self._checked_revision or (now is not None and now >= self._next_purge)

    async def run_once(self) -> None:
        """Close, report and purge the rounds that the chain has closed."""
        if not self.wanted:
            return
        revision = self._rounds.revision
        self._next_check = self._clock.monotonic() + INTERVAL
        self._checked_revision = None
        purges = []
        for stored in await self._store.rounds():
            if self._rounds.frozen(stored.round_id) is not None:
                continue
            if stored.closed_at is not None or await self._rounds.is_closed(stored.round_id):
                purges.append(await self._process(stored))
        self._checked_revision, self._next_purge = revision, min(purges, default=math.inf)

    async def _process(self, stored: StoredRound) -> float:
        """Report or purge one closed round; return the unix time of its purge, infinity after it."""
        if stored.alerted_at is None:
            await self._alert(stored)
        closed_at, now = stored.closed_at, self._rounds.chain_now()
        if closed_at is None:
            return math.inf if now is None else now + self._purge_after
        if now is None or now < closed_at + self._purge_after:
            return closed_at + self._purge_after
        rows = await self._store.purge(stored.round_id)
        self._rounds.forget(stored.round_id)
        log.info("round_purged", rows=rows)
        return math.inf

    async def _alert(self, stored: StoredRound) -> None:
        """Fail the unconfirmed shares of a closed round and log their number."""
        now = self._rounds.chain_now() or self._clock.now()
        if stored.closed_at is None:
            await self._store.mark_closed(stored.round_id, now)
        left = await self._store.unsubmitted(stored.round_id)
        failed = await self._store.fail_unspent(stored.round_id, note="the round closed before it was counted")
        # Counts are stored separately from shares; a damaged count must not hide a lost share.
        number = max(failed, sum(left.get(state, 0) for state in UNSUBMITTED))
        if number:
            self._stats.count("expired", failed)
            log.error("round_closed_with_unconfirmed_shares", shares=number, round=stored.round_id.hex())
        else:
            log.info("round_closed", round=stored.round_id.hex())
        await self._store.mark_alerted(stored.round_id, now)


class BackgroundRetention:
    """Runs retention in the background, so that a slow node or a large purge does not delay dispatch."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._task: asyncio.Task[None] | None = None

    async def turn(self) -> None:
        """Start a run if one is needed, and wait for it briefly.

        An error of the run is raised here, or by a later call.

        Raises:
            StoreError: the rounds cannot be read or changed.
        """
        if self._task is None and self._retention.wanted:
            self._task = asyncio.create_task(self._retention.run_once())
            await asyncio.wait({self._task}, timeout=TENDING_PATIENCE)
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def stop(self) -> None:
        """Cancel the current run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
