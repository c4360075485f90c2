"""Reads the aggregate state of the queue, for the overview and for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from helper.chain.chain_data import Round
from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.errors import HelperError
from helper.observability.backlog_forecast import Counts
from helper.observability.queue_overview import Overview, build_overview
from helper.observability.service_state import ServiceState, StatusSource
from helper.store.models import DueForecast
from helper.store.store import Store

log = structlog.get_logger("helper.observability")

MAX_FAILURES: Final = 20
STORE_TIMEOUT_SECONDS: Final = 2.0
"""Timeout in seconds for reads of the store, so that a scrape succeeds even if the disk hangs."""


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """The figures of a scrape, apart from `Stats`.

    Attributes:
        now: Unix seconds.
        service_status: state of the running service; None without a queue.
        rounds: all known rounds.
        counts: shares by round and state; None if the store could not be read.
        due_ahead: waiting shares by round and minute.
        oldest_due_ms: earliest due time of all waiting shares, None if none waits.
        damaged: number of quarantined rows.
        wal_bytes: size of the write-ahead log of a database file.
        erasure_pending_seconds: seconds for which deleted rows have not been erased from a database file.
        refusals: responses of the wallet API with status 400 or above, by status.
    """

    now: float
    service_status: ServiceState | None = None
    rounds: Sequence[Round] = ()
    counts: Counts | None = None
    due_ahead: Mapping[bytes, DueForecast] = field(default_factory=dict)
    oldest_due_ms: int | None = None
    damaged: int = 0
    wal_bytes: int = 0
    erasure_pending_seconds: float = 0.0
    refusals: Mapping[int, int] = field(default_factory=dict)


class QueueObserver:
    """Reads overview and figures from the store and the running service.

    Args:
        store: the queue.
        round_registry: the known rounds.
        read_status: returns the state of the running service.
        refusals: responses of the wallet API with status 400 or above, by status.
        clock: the time.
    """

    def __init__(
        self,
        store: Store,
        round_registry: RoundRegistry,
        read_status: StatusSource,
        *,
        refusals: Mapping[int, int],
        clock: Clock,
    ) -> None:
        self._store = store
        self._round_registry = round_registry
        self._read_status = read_status
        self._refusals = refusals
        self._clock = clock

    async def read_overview(self) -> Overview:
        """Return the current state as plain JSON values.

        Raises:
            StoreError: the store cannot be read.
        """
        now = self._clock.now()
        return build_overview(
            now=now,
            status=self._read_status(),
            rounds=self._round_registry.all_rounds(),
            counts=await self._store.count_shares(),
            due_ahead=await self._store.count_due_ahead(now=now),
            failures=await self._store.list_failures(limit=MAX_FAILURES),
        )

    async def read_figures(self) -> QueueFigures:
        """Return the figures of a scrape, without those of the store if it cannot be read."""
        rounds, now = self._round_registry.all_rounds(), self._clock.now()
        counts: Counts | None = None
        due_ahead: Mapping[bytes, DueForecast] = {}
        oldest, damaged = None, 0
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                counts = await self._store.count_shares()
                due_ahead = await self._store.count_due_ahead(now=now)
                oldest = await self._store.next_due_ms([known.round_id for known in rounds])
                damaged = len(await self._store.list_damaged())
        except (HelperError, TimeoutError) as error:
            counts = None
            log.warning("metrics_store_read_failed", error=str(error) or "timed out")
        return QueueFigures(
            now=now,
            service_status=self._read_status(),
            rounds=rounds,
            counts=counts,
            due_ahead=due_ahead,
            oldest_due_ms=oldest,
            damaged=damaged,
            wal_bytes=self._store.wal_bytes,
            erasure_pending_seconds=self._store.erasure_pending_seconds,
            refusals=self._refusals,
        )
