"""What happens to a round once the chain has closed it: what is left is reported, and later everything is erased."""

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

log = structlog.get_logger("helper.retention")

UNSUBMITTED = (ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST, ShareState.FAILED)
INTERVAL = 1.0
"""Seconds between two looks at the rounds."""
TENDING_PATIENCE = 0.05
"""Seconds that due shares wait for alerts and purges; what takes longer goes on beside them."""


class Rounds(Protocol):
    """The judge of what is closed, as `helper.chain.round_registry.RoundRegistry` is.

    Attributes:
        revision: goes up with all that may close a round or let it be purged.
    """

    revision: int

    def chain_now(self) -> float | None:
        """The chain's time in unix seconds, None where it is not known: our own clock may be years off."""
        ...

    def frozen(self, round_id: bytes) -> str | None:
        """Why nothing may be done about the round now, or None."""
        ...

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether the chain's own word has closed the round for good."""
        ...

    def forget(self, round_id: bytes) -> None:
        """The round was purged."""
        ...


class Retention:
    """Alerts and purges closed rounds.

    A round is closed by the chain's word only (`RoundRegistry.is_closed`). Its shares that were not counted then fail
    and are reported; their witnesses stay for `purge_after` seconds by the chain's time, so that an operator can
    look, and go with the round. The rounds are read only after the chain moved or when a purge has become due, at
    most once a second. Of several hosts the one that sends does it.
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
        self._next_look = -INTERVAL
        self._seen: int | None = None  # the revision at the last look that went well
        self._next_purge = math.inf  # unix seconds

    @property
    def wanted(self) -> bool:
        """Whether there may be anything to do."""
        if not self._lease.held or self._clock.monotonic() < self._next_look:
            return False
        now = self._rounds.chain_now()
        return self._rounds.revision != self._seen or (now is not None and now >= self._next_purge)

    async def run_once(self) -> None:
        """Close, alert and purge whatever the chain has closed."""
        if not self.wanted:
            return
        revision = self._rounds.revision
        self._next_look = self._clock.monotonic() + INTERVAL
        self._seen = None
        purges = []
        for stored in await self._store.rounds():
            if self._rounds.frozen(stored.round_id) is not None:
                continue
            if stored.closed_at is not None or await self._rounds.is_closed(stored.round_id):
                purges.append(await self._tend(stored))
        self._seen, self._next_purge = revision, min(purges, default=math.inf)

    async def _tend(self, stored: StoredRound) -> float:
        """Alert, or purge, one closed round; the unix time at which it is purged, infinity when it was."""
        if stored.alerted_at is None:
            await self._alert(stored)
        closed_at, now = stored.closed_at, self._rounds.chain_now()
        if closed_at is None:
            return math.inf if now is None else now + self._purge_after
        if now is None or now < closed_at + self._purge_after:
            return closed_at + self._purge_after
        rows = await self._store.purge(stored.round_id)
        self._rounds.forget(stored.round_id)
        log.info("round purged", rows=rows)
        return math.inf

    async def _alert(self, stored: StoredRound) -> None:
        """Report what was not counted, in the log and in the queue's counts."""
        now = self._rounds.chain_now() or self._clock.now()
        if stored.closed_at is None:
            await self._store.mark_closed(stored.round_id, now)
        left = await self._store.unsubmitted(stored.round_id)
        failed = await self._store.fail_unspent(stored.round_id, note="the round closed before it was counted")
        # The counts are kept apart from the shares; damaged ones must not keep a lost share from being told.
        number = max(failed, sum(left.get(state, 0) for state in UNSUBMITTED))
        if number:
            self._stats.count("expired", failed)
            log.error("a round closed with shares that were not counted", shares=number, round=stored.round_id.hex())
        else:
            log.info("a round closed with every share counted", round=stored.round_id.hex())
        await self._store.mark_alerted(stored.round_id, now)


class BackgroundRetention:
    """Retention beside other work: a slow node that is asked, or a great round that is erased, holds up no share."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._task: asyncio.Task[None] | None = None

    async def turn(self) -> None:
        """Begin what there is to do, and wait for it a moment; what it ended in is raised here, now or in a later turn.

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
        """End what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
