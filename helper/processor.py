"""The loop that works the queue: alert, purge, dispatch all that is due, sleep to the earliest deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from helper.broadcast import Broadcaster
from helper.clock import Clock
from helper.errors import HelperError
from helper.retention import Retention
from helper.reveal import Revealer
from helper.schedule import next_wake
from helper.store.base import QueuedShare, Store

log = structlog.get_logger("helper.processor")

LONGEST_SLEEP = 30.0
"""Seconds after which the loop goes round even when nothing is due."""
SLICE = 1.0
"""Seconds after which a sleep looks at the wall clock again: it can jump."""
AHEAD = 2
"""Shares claimed for each prover: the one it proves and the one it proves next."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What may be dispatched now.

    Attributes:
        rounds: ids of the rounds whose shares may be proven: active, with a verified root.
        chain_limit: no share due after this unix time may be dispatched, whatever our clock says.
        paused: why nothing is dispatched at all, or None.
    """

    rounds: frozenset[bytes]
    chain_limit: float
    paused: str | None = None


class Processor:
    """Dispatches due shares to the provers, never more at once than there are, and goes on as they free up."""

    def __init__(
        self,
        *,
        store: Store,
        revealer: Revealer,
        broadcaster: Broadcaster,
        retention: Retention,
        gate: Callable[[], Gate],
        slots: int,
        clock: Clock,
    ) -> None:
        self._store = store
        self._revealer = revealer
        self._broadcaster = broadcaster
        self._retention = retention
        self._gate = gate
        self._slots = slots
        self._clock = clock
        self._changed = asyncio.Event()
        self._proving: set[int] = set()
        self._stranded: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.paused: str | None = "starting"

    def wake(self) -> None:
        """Something about the schedule changed: a new share, a retry, a round, an endpoint."""
        self._changed.set()

    @property
    def proving(self) -> int:
        """How many shares are claimed for the provers now."""
        return len(self._proving)

    async def run(self) -> None:
        """Work the queue until cancelled; shares in hand are put back by the next start."""
        try:
            while True:
                self._changed.clear()
                deadline = await self._turn()
                await self._sleep_until(deadline)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _turn(self) -> float:
        """One round of the loop; the wall time of the next one."""
        try:
            await self._put_back_stranded()
            await self._retention.run_once()
            return await self._dispatch()
        except HelperError as error:
            log.error("the queue could not be worked", error=str(error), advice=error.advice)
            return self._clock.now() + SLICE

    async def _dispatch(self) -> float:
        """Claim what is due and hand it to the provers; the wall time of the next thing to do."""
        while True:
            gate = self._gate()
            self._note_pause(gate.paused)
            if gate.paused is not None or not gate.rounds:
                return self._clock.now() + LONGEST_SLEEP
            free = self._slots * AHEAD - len(self._proving)
            if free <= 0:
                return self._clock.now() + LONGEST_SLEEP
            now = min(self._clock.now(), gate.chain_limit)
            claimed = await self._store.claim_due(now=now, limit=free, rounds=gate.rounds)
            for queued in claimed:
                self._start(queued)
            if len(claimed) < free:
                return await self._next_deadline(gate)

    async def _next_deadline(self, gate: Gate) -> float:
        due_ms = await self._store.next_due_ms(gate.rounds)
        now = self._clock.now()
        due = None if due_ms is None else due_ms / 1000
        if due is not None and due <= now:
            due = now + SLICE  # held back by the chain's time alone, which moves on with its blocks
        return next_wake(now, [due], LONGEST_SLEEP)

    def _note_pause(self, reason: str | None) -> None:
        if reason != self.paused:
            if reason is None:
                log.info("dispatch resumes")
            else:
                log.warning("dispatch is paused", reason=reason)
            self.paused = reason

    def _start(self, queued: QueuedShare) -> None:
        self._proving.add(queued.id)
        task = asyncio.create_task(self._reveal(queued))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reveal(self, queued: QueuedShare) -> None:
        """One share's way; whatever goes wrong, the share stays in the queue."""
        try:
            try:
                prepared = await self._revealer.prove(queued)
            finally:
                self._proving.discard(queued.id)
                self.wake()
            if prepared:
                await self._broadcaster.send(queued.id)
        except HelperError as error:
            log.error("a share could not be worked on", error=str(error), advice=error.advice)
            self._strand(queued.id)
        except Exception:
            log.exception("a share could not be worked on")
            self._strand(queued.id)

    def _strand(self, share_id: int) -> None:
        self._stranded.add(share_id)
        self.wake()

    async def _put_back_stranded(self) -> None:
        """Shares whose way ended in an error of ours go back to the queue, or stay to be sent again."""
        for share_id in list(self._stranded):
            await self._store.release(share_id)
            self._stranded.discard(share_id)

    async def _sleep_until(self, deadline: float) -> None:
        while not self._changed.is_set():
            remaining = deadline - self._clock.now()
            if remaining <= 0 or math.isnan(remaining):
                return
            try:
                async with asyncio.timeout(min(remaining, SLICE)):
                    await self._changed.wait()
            except TimeoutError:
                continue
