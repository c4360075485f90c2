"""Reads the state of the whole queue, for the overview and for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from helper.chain.models import Round
from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.errors import HelperError
from helper.observability.queue_overview import Counts, Overview, overview
from helper.observability.service_state import ServiceState
from helper.store.store import Store

log = structlog.get_logger("helper.observability")

FAILURES_SHOWN: Final = 20
PATIENCE: Final = 2.0
"""Timeout in seconds for reads of the store, so that a scrape succeeds even if the disk hangs."""

Facts = Callable[[], ServiceState]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a scrape, apart from `Stats`.

    Attributes:
        now: Unix seconds.
        facts: state of the running service; None without a queue.
        rounds: all known rounds.
        counts: shares by round and state; None if the store could not be read.
        oldest_due_ms: earliest due time of all waiting shares, None if none waits.
        damaged: number of rows that were set aside.
        refusals: responses of the wallet API with status 400 or above, by status.
    """

    now: float
    facts: ServiceState | None = None
    rounds: Sequence[Round] = ()
    counts: Counts | None = None
    oldest_due_ms: int | None = None
    damaged: int = 0
    refusals: Mapping[int, int] = field(default_factory=dict)


class QueueObserver:
    """Reads overview and figures from the store and the running service.

    Args:
        store: the queue.
        rounds: the known rounds.
        facts: returns the state of the running service.
        refusals: responses of the wallet API with status 400 or above, by status.
        clock: the time.
    """

    def __init__(
        self,
        store: Store,
        rounds: RoundRegistry,
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

    async def overview(self) -> Overview:
        """Return the current state as plain JSON values.

        Raises:
            StoreError: the store cannot be read.
        """
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
        """Return the figures of a scrape, without those of the store if it cannot be read."""
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
            log.warning("metrics_store_read_failed", error=str(error) or "timed out")
        return Figures(
            now=self._clock.now(),
            facts=self._facts(),
            rounds=rounds,
            counts=counts,
            oldest_due_ms=oldest,
            damaged=damaged,
            refusals=self._refusals,
        )
