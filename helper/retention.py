"""What happens to a round once the chain has closed it: what is left is reported, and later everything is erased."""

from __future__ import annotations

from typing import Protocol

import structlog

from helper.clock import Clock
from helper.share import ShareState
from helper.store.base import Store, StoredRound
from helper.telemetry.stats import Stats

log = structlog.get_logger("helper.retention")

UNSUBMITTED = (ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST, ShareState.FAILED)
INTERVAL = 1.0
"""Seconds between two looks at the rounds."""


class Rounds(Protocol):
    """The judge of what is closed, as `helper.rounds.RoundBook` is."""

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether the chain's own word has closed the round for good."""
        ...

    def forget(self, round_id: bytes) -> None:
        """The round was purged."""
        ...


class Retention:
    """Alerts and purges closed rounds.

    A round is closed by the chain's word only (`RoundBook.is_closed`). Its shares that were not counted then fail and
    are reported; their witnesses stay for `purge_after` seconds, so that an operator can look, and go with the round.
    """

    def __init__(self, *, store: Store, rounds: Rounds, clock: Clock, stats: Stats, purge_after: float) -> None:
        self._store = store
        self._rounds = rounds
        self._clock = clock
        self._stats = stats
        self._purge_after = purge_after
        self._next_look = -INTERVAL

    async def run_once(self) -> None:
        """Close, alert and purge whatever the chain has closed."""
        if self._clock.monotonic() < self._next_look:
            return
        self._next_look = self._clock.monotonic() + INTERVAL
        for stored in await self._store.rounds():
            if stored.closed_at is not None or await self._rounds.is_closed(stored.round_id):
                await self._tend(stored)

    async def _tend(self, stored: StoredRound) -> None:
        if stored.alerted_at is None:
            await self._alert(stored)
        closed_at = stored.closed_at
        if closed_at is not None and self._clock.now() >= closed_at + self._purge_after:
            rows = await self._store.purge(stored.round_id)
            self._rounds.forget(stored.round_id)
            log.info("round purged", rows=rows)

    async def _alert(self, stored: StoredRound) -> None:
        """Report what was not counted, in the log and in the queue's counts."""
        now = self._clock.now()
        if stored.closed_at is None:
            await self._store.mark_closed(stored.round_id, now)
        left = await self._store.unsubmitted(stored.round_id)
        failed = await self._store.close_unspent(stored.round_id, note="the round closed before it was counted")
        number = sum(left.get(state, 0) for state in UNSUBMITTED)
        if number:
            self._stats.count("expired", failed)
            log.error("a round closed with shares that were not counted", shares=number, round=stored.round_id.hex())
        else:
            log.info("a round closed with every share counted", round=stored.round_id.hex())
        await self._store.mark_alerted(stored.round_id, now)
