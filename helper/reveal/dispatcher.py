"""The loop that works the queue: alert, purge, dispatch all that is due, sleep to the earliest deadline.

The loop outlives every error: a step that fails is told once and tried again a second later. No share is lost to one
either: work that ends in an error of ours leaves its share taken up, and the loop puts it back after a wait.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from helper.clock import SLICE, Clock
from helper.core.schedule import retry_delay
from helper.errors import HelperError
from helper.observability.stats import Stats
from helper.reveal.broadcaster import Broadcaster
from helper.reveal.retention import BackgroundRetention, Retention
from helper.reveal.revealer import Revealer
from helper.store.rows import QueuedShare
from helper.store.store import Store

log = structlog.get_logger("helper.processor")

LONGEST_SLEEP = 30.0
"""Seconds after which the loop goes round even when nothing is due."""
TICK = 0.001
"""Seconds in which the store tells two due times apart."""
TRIAL_SECONDS = 10.0
"""Seconds after which another share tries the circuit although the one before has no answer."""
AHEAD = 2
"""Shares claimed for each prover: the one it proves and the one it proves next."""


@dataclass(frozen=True, slots=True)
class DispatchGate:
    """What may be dispatched now.

    Attributes:
        rounds: ids of the rounds whose shares may be proven: active, with a verified root.
        chain_limit: no share due after this unix time may be dispatched, whatever our clock says.
        paused: why nothing is dispatched at all, or None.
        one_at_a_time: whether each share waits for the node's answer to the one before, for `TRIAL_SECONDS` at most. It
            is not known yet whether the chain accepts the circuit, and all proofs might be wasted.
    """

    rounds: frozenset[bytes]
    chain_limit: float
    paused: str | None = None
    one_at_a_time: bool = False


class Dispatcher:
    """Dispatches due shares to the provers, never more at once than there are, and goes on as they free up.

    Args:
        broadcaster: is handed each share whose message is kept; None where another host sends.
        retention: looks after closed rounds before each dispatch; None where that is done elsewhere.
        longest_sleep: seconds after which the loop goes round in any case. Where other hosts take shares in and put
            them back, nobody here may have been told.
    """

    def __init__(
        self,
        *,
        store: Store,
        revealer: Revealer,
        broadcaster: Broadcaster | None,
        retention: Retention | None,
        gate: Callable[[], DispatchGate],
        slots: int,
        clock: Clock,
        stats: Stats,
        longest_sleep: float = LONGEST_SLEEP,
    ) -> None:
        self._store = store
        self._revealer = revealer
        self._broadcaster = broadcaster
        self._tending = None if retention is None else BackgroundRetention(retention)
        self._longest_sleep = longest_sleep
        self._gate = gate
        self._slots = slots
        self._clock = clock
        self._stats = stats
        self._changed = asyncio.Event()
        self._in_hand = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stranded: dict[int, float] = {}  # when each is put back, monotonic
        self._faults: dict[int, int] = {}  # errors of ours in a row, by share
        self._told: str | None = None
        self._next_trial = -math.inf  # when another share may try the circuit without an answer, monotonic
        self._next_turn = math.inf  # while it sleeps: until when; in a turn, any new share calls for another
        self.paused: str | None = "starting"
        if broadcaster is not None:
            broadcaster.subscribe(self.wake)

    def wake(self) -> None:
        """Something about the schedule changed: a retry, a round, an endpoint."""
        self._changed.set()

    def wake_by(self, due: float) -> None:
        """There is a new share, due at a wall time: one that is due after the next turn changes nothing.

        A round's first minutes bring thousands of shares for the days to come; a turn for each would take the time
        that taking them in needs.
        """
        if due < self._next_turn:
            self._changed.set()

    @property
    def proving(self) -> int:
        """How many shares are claimed for the provers now."""
        return self._in_hand

    async def run(self) -> None:
        """Work the queue until cancelled; shares in hand are put back by the next start."""
        try:
            while True:
                self._changed.clear()
                self._next_turn = await self._turn()
                await self._clock.wait(self._changed, self._next_turn)
                self._next_turn = math.inf
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tending is not None:
                await self._tending.stop()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _turn(self) -> float:
        """One round of the loop; the wall time of the next one."""
        deadline, problem = math.inf, None
        for step in (self._put_back_stranded, self._tend, self._dispatch):
            try:
                following = await step()
            except Exception as error:  # whatever it is, the other steps and the next turn may go well
                problem = error
                following = self._clock.now() + SLICE
            deadline = min(deadline, following)
        self._tell(problem)
        return min(deadline, self._clock.now() + self._longest_sleep)

    def _tell(self, problem: Exception | None) -> None:
        """One line when the queue can not be worked, not one a second."""
        told = None if problem is None else repr(problem)
        if told is not None and told != self._told:
            if isinstance(problem, HelperError):
                log.error("the queue could not be worked", error=str(problem), advice=problem.advice)
            else:
                log.error("the queue could not be worked", exc_info=problem)
        elif told is None and self._told is not None:
            log.info("the queue is worked again")
        self._told = told

    # ---------------------------------------------------------------- alerts and purges

    async def _tend(self) -> float:
        """Alert and purge first."""
        if self._tending is not None:
            await self._tending.turn()
        return math.inf

    # ---------------------------------------------------------------- dispatch

    async def _dispatch(self) -> float:
        """Claim what is due and hand it to the provers; the wall time of the next thing to do."""
        while True:
            gate = self._gate()
            self._note_pause(gate.paused)
            free = self._slots * AHEAD - self._in_hand
            if gate.paused is not None or not gate.rounds or free <= 0:
                return self._clock.now() + LONGEST_SLEEP
            if gate.one_at_a_time:
                wait = self._next_trial - self._clock.monotonic()
                if wait > 0 and (self._tasks or self._broadcaster is None):
                    return self._clock.now() + max(wait, TICK)
                free = 1
            due_ms = await self._store.next_due_ms(gate.rounds)
            now = min(self._clock.now(), gate.chain_limit)
            if due_ms is None or due_ms > int(now * 1000):
                return self._deadline(gate, due_ms, claimed_ms=0)
            claimed = await self._store.claim_due(now=now, limit=free, rounds=gate.rounds)
            if claimed:
                self._stats.queue_age.add(max(0.0, self._clock.now() - claimed[0].due_ms / 1000))
            if claimed and gate.one_at_a_time:
                self._next_trial = self._clock.monotonic() + TRIAL_SECONDS
            for queued in claimed:
                self._start(queued)
            if len(claimed) < free:
                due_ms = await self._store.next_due_ms(gate.rounds)
                return self._deadline(gate, due_ms, claimed_ms=int(now * 1000))

    def _deadline(self, gate: DispatchGate, due_ms: int | None, claimed_ms: int) -> float:
        """When to look again for the share that is due next, all that were due at `claimed_ms` being in hand."""
        now = self._clock.now()
        if due_ms is None:
            return now + LONGEST_SLEEP
        due = due_ms / 1000
        if due_ms <= claimed_ms:
            due = now + SLICE  # it came in after the claim, and who brought it has woken us
        elif due > gate.chain_limit:
            due = max(due, now + SLICE)  # held back by the chain's time, which moves on with its blocks
        elif due <= now:
            due = now + TICK  # it fell due since the claim
        return min(due, now + LONGEST_SLEEP)

    def _note_pause(self, reason: str | None) -> None:
        if reason != self.paused:
            if reason is None:
                log.info("dispatch resumes")
            else:
                log.warning("dispatch is paused", reason=reason)
            self.paused = reason

    def _start(self, queued: QueuedShare) -> None:
        self._in_hand += 1
        task = asyncio.create_task(self._reveal(queued))
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._clock.monotonic() < self._next_trial:
            self.wake()  # the next share may have waited for this one's answer

    async def _reveal(self, queued: QueuedShare) -> None:
        """One share's way; whatever goes wrong, the share stays in the queue."""
        try:
            try:
                prepared = await self._revealer.prove(queued)
            finally:
                self._in_hand -= 1
                self.wake()
            if prepared and self._broadcaster is not None:
                await self._broadcaster.send(queued.id)
            self._faults.pop(queued.id, None)
        except HelperError as error:
            log.error("a share could not be worked on", error=str(error), advice=error.advice)
            self._strand(queued.id)
        except Exception:
            log.exception("a share could not be worked on")
            self._strand(queued.id)
        except asyncio.CancelledError:
            self._strand(queued.id)  # at the end nobody puts it back but the next start
            raise

    # ---------------------------------------------------------------- errors of ours

    def _strand(self, share_id: int) -> None:
        """Keep a share out of the way for 2, 4, 8 … 64 s: what failed once by a fault of ours may fail each time."""
        faults = self._faults[share_id] = self._faults.get(share_id, 0) + 1
        self._stranded[share_id] = self._clock.monotonic() + retry_delay(faults)
        self.wake()

    async def _put_back_stranded(self) -> float:
        """Shares whose way ended in an error of ours go back to the queue, or stay to be sent again."""
        now = self._clock.monotonic()
        for share_id in [share_id for share_id, at in self._stranded.items() if at <= now]:
            if not await self._store.release_claim(share_id):
                self._faults.pop(share_id, None)
            del self._stranded[share_id]
        wait = min(self._stranded.values(), default=math.inf) - now
        return self._clock.now() + max(wait, TICK)  # less is nothing to a wall clock: the loop would spin
