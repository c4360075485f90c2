"""Reads what operators are told of the whole queue: the overview for eyes, the figures for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog

from helper.clock import Clock
from helper.errors import HelperError
from helper.observability.queue_overview import Counts, KnownRound, overview
from helper.store.store import Store

log = structlog.get_logger("helper.telemetry")

FAILURES_SHOWN: Final = 20
PATIENCE: Final = 2.0
"""Seconds that the store has for the figures: a scrape must tell of a disk that hangs, not hang with it."""

Facts = Callable[[], Mapping[str, Any]]


class ObservedRounds(Protocol):
    """The part of the round book that is looked at."""

    def all(self) -> Sequence[KnownRound]:
        """Every round known."""
        ...


@dataclass(frozen=True, slots=True)
class Figures:
    """What a scrape reads beside the counters.

    Attributes:
        now: unix seconds.
        facts: what the running service tells of itself ; empty without a queue.
        rounds: the rounds known.
        counts: shares by round and state; None where the store could not be asked.
        oldest_due_ms: when the first of all waiting shares is due, None where none waits.
        damaged: rows that were set aside.
        refusals: answers of the wallets' port from 400 on, by status.
    """

    now: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    rounds: Sequence[KnownRound] = ()
    counts: Counts | None = None
    oldest_due_ms: int | None = None
    damaged: int = 0
    refusals: Mapping[int, int] = field(default_factory=dict)


class QueueObserver:
    """One look at a time.

    Args:
        store: the queue.
        rounds: the rounds known.
        facts: what only the running service knows.
        refusals: answers of the wallets' port from 400 on, by status.
        clock: the time.
    """

    def __init__(
        self,
        store: Store,
        rounds: ObservedRounds,
        facts: Facts,
        *,
        refusals: Mapping[int, int],
        clock: Clock,
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._facts = facts
        self._refusals = refusals
        self._clock = clock

    async def overview(self) -> dict[str, Any]:
        """The state of this moment as plain JSON values; raises StoreError."""
        now = self._clock.now()
        return overview(
            now=now,
            facts=self._facts(),
            rounds=self._rounds.all(),
            counts=await self._store.counts(),
            ahead=await self._store.due_ahead(now=now),
            failures=await self._store.failures(limit=FAILURES_SHOWN),
        )

    async def figures(self) -> Figures:
        """What a scrape reads; without the store's part where that cannot be had."""
        rounds = self._rounds.all()
        counts: Counts | None = None
        oldest, damaged = None, 0
        try:
            async with asyncio.timeout(PATIENCE):
                counts = await self._store.counts()
                oldest = await self._store.next_due_ms([known.round_id for known in rounds])
                damaged = len(await self._store.damaged())
        except (HelperError, TimeoutError) as error:
            counts = None
            log.warning("the store could not be asked for figures", error=str(error) or "no answer in time")
        return Figures(
            now=self._clock.now(),
            facts=self._facts(),
            rounds=rounds,
            counts=counts,
            oldest_due_ms=oldest,
            damaged=damaged,
            refusals=self._refusals,
        )
