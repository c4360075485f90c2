"""Closes rounds: reports their unconfirmed shares, then purges them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace

import structlog

from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.lease import Lease
from helper.observability.log_config import RecurringErrorLog
from helper.observability.stats import Stats
from helper.store.models import StoredRound
from helper.store.rounds import fail_unconfirmed, mark_alerted, mark_closed, purge
from helper.store.store import Store

log = structlog.get_logger("helper.reveal")


@dataclass(eq=False, repr=False, kw_only=True)
class RoundClosing:
    """Reports and purges closed rounds.

    Only the chain closes a round (`RoundRegistry.is_closed`). Its unconfirmed shares then fail and are logged. Their
    witnesses remain for `purge_after` seconds of the chain's time, so that an operator can inspect them, and are purged
    with the round. Frozen rounds are not changed. The rounds are read only after a change on the chain or when a purge
    is due. In a cluster, only the lease holder does this. A slow node or a large purge delays no reveal.
    """

    store: Store
    rounds: RoundRegistry
    clock: Clock
    stats: Stats
    purge_after: float
    lease: Lease = field(default_factory=Lease)

    def __post_init__(self) -> None:
        self._checked_revision: int | None = None  # at the last successful check
        self._next_purge = math.inf  # Unix seconds
        self._wake = asyncio.Event()

    def wake_if_due(self) -> None:
        """Let `run` check the rounds if one may have to be closed or purged. Call it after each probe of a node."""
        if self._is_due():
            self._wake.set()

    async def run(self) -> None:
        """Check the rounds when it is woken, until cancelled."""
        errors = RecurringErrorLog(log, failed="round_closing_failed", recovered="round_closing_recovered")
        while True:
            await self._wake.wait()
            self._wake.clear()
            error: Exception | None = None
            try:
                await self.run_once()
            except Exception as failure:  # the next check may succeed
                error = failure
            errors.note(error)
            self.stats.note_attempt("closing rounds", error, self.clock.monotonic())

    async def run_once(self) -> None:
        """Close, report and purge the rounds that the chain has closed."""
        if not self._is_due():
            return
        revision = self.rounds.revision
        self._checked_revision = None
        purges, errors = list[float](), list[Exception]()
        for stored in await self.store.list_rounds():
            if self.rounds.frozen_reason(stored.round_id) is None:
                try:
                    purges.append(await self._process_round(stored))
                except Exception as error:  # of one round, it must not keep others from being closed
                    errors.append(error)
        if errors:
            raise errors[0]
        self._checked_revision, self._next_purge = revision, min(purges, default=math.inf)

    def _is_due(self) -> bool:
        now = self.rounds.chain_now()
        is_purge_due = now is not None and now >= self._next_purge
        return self.lease.is_held and (self.rounds.revision != self._checked_revision or is_purge_due)

    async def _process_round(self, stored: StoredRound) -> float:
        """Run the due steps of a round.

        Returns the Unix time of its purge, infinity if none is due.
        """
        if stored.closed_at is None and not await self.rounds.is_closed(stored.round_id):
            return math.inf
        if stored.closed_at is None or stored.alerted_at is None:
            stored = await self._report(stored)
        assert stored.closed_at is not None
        purge_at, now = stored.closed_at + self.purge_after, self.rounds.chain_now()
        if now is None or now < purge_at:
            return purge_at
        await self._purge(stored)
        return math.inf

    async def _report(self, stored: StoredRound) -> StoredRound:
        """Fail the unconfirmed shares of a closed round and log their number.

        Returns the round with its new marks.
        """
        now = self.rounds.chain_now() or self.clock.now()
        if stored.closed_at is None:  # its row was damaged, or a standby without the mark was promoted
            await self.store.run(mark_closed, stored.round_id, now)
        left = await self.store.count_unconfirmed(stored.round_id)
        failed = await self.store.run_batches(
            fail_unconfirmed, stored.round_id, note="the round closed before the share was confirmed"
        )
        # Counts are stored separately from shares; a damaged count must not hide a lost share.
        number = max(failed, sum(left.values()))
        if number:
            self.stats.count("expired", failed)
            advice = "Until the purge, the reasons are in `svote-helper queue list --state failed`."
            log.error("round_closed_with_unconfirmed_shares", shares=number, round=stored.round_id.hex(), advice=advice)
        else:
            log.info("round_closed", round=stored.round_id.hex())
        await self.store.run(mark_alerted, stored.round_id, now)
        return replace(stored, closed_at=now if stored.closed_at is None else stored.closed_at, alerted_at=now)

    async def _purge(self, stored: StoredRound) -> None:
        rows = await self.store.run_batches(purge, stored.round_id)
        self.rounds.forget(stored.round_id)
        log.info("round_purged", round=stored.round_id.hex(), rows=rows)
