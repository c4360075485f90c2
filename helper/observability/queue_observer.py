"""Reads queue and service of a running helper, for the page, Prometheus and `doctor`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

import structlog

from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.errors import HelperError
from helper.observability.queue_snapshot import (
    HelperSnapshot,
    Overview,
    QueueSnapshot,
    build_overview,
    read_snapshot,
)
from helper.observability.service_state import StatusSource
from helper.store.store import Store

log = structlog.get_logger("helper.observability")

MAX_SHOWN_FAILURES: Final = 20
"""Maximum number of failure groups on the page."""
STORE_TIMEOUT_SECONDS: Final = 2.0
"""Timeout in seconds for reads of the store, so that a scrape succeeds even if the disk hangs."""


class QueueObserver:
    """Reads queue and service of a running helper.

    Args:
        store: the queue.
        round_registry: the known rounds.
        read_status: returns the state of the running service.
        clock: the time.
    """

    def __init__(self, store: Store, round_registry: RoundRegistry, read_status: StatusSource, *, clock: Clock) -> None:
        self._store = store
        self._round_registry = round_registry
        self._read_status = read_status
        self._clock = clock

    async def read_overview(self) -> Overview:
        """Return what page and `queue watch` show.

        Raises:
            StoreError: the store cannot be read.
        """
        queue = await read_snapshot(
            self._store,
            self._round_registry.all_rounds(),
            now=self._clock.now(),
            max_failures=MAX_SHOWN_FAILURES,
            for_overview=True,
        )
        return build_overview(queue, self._read_status())

    async def read_helper(self) -> HelperSnapshot:
        """Return what `doctor` checks.

        Raises:
            StoreError: the store cannot be read.
        """
        return HelperSnapshot(service=self._read_status(), queue=await self._read_queue(with_retries=True))

    async def read_for_scrape(self) -> HelperSnapshot:
        """Return what the metrics show, without the queue if the store cannot be read."""
        queue = None
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                queue = await self._read_queue()
        except (HelperError, TimeoutError) as error:
            log.warning("metrics_store_read_failed", error=str(error) or "timed out")
        return HelperSnapshot(service=self._read_status(), queue=queue)

    async def _read_queue(self, *, with_retries: bool = False) -> QueueSnapshot:
        rounds, now = self._round_registry.all_rounds(), self._clock.now()
        snapshot = await read_snapshot(self._store, rounds, now=now, with_retries=with_retries)
        due_ms = await self._store.next_due_ms([known.round_id for known in rounds])
        return replace(
            snapshot,
            oldest_due_seconds=0.0 if due_ms is None else max(0.0, now - due_ms / 1000),
            wal_bytes=self._store.wal_bytes,
            erasure_pending_seconds=self._store.erasure_pending_seconds,
        )
