"""Dispatch loop: dispatches due shares, sleeps until the next deadline.

No error ends the loop. A failed step is logged once and retried after a second. If revealing a share raises an
unexpected error, the share stays claimed until the loop releases the claim after a delay.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from helper.clock import RECHECK_SECONDS, Clock
from helper.core.dispatch_order import BacklogLimits, DueShare, RoundQueue, RoundTurns, retry_delay
from helper.core.refusals import PauseReason
from helper.observability.log_config import RecurringErrorLog, log_error
from helper.observability.stats import Stats
from helper.reveal.circuit_choice import TRIAL_WAIT_SECONDS
from helper.reveal.revealer import ProofTimes, Revealer
from helper.reveal.sender import Sender
from helper.store.shares import claim_due, claim_listed, release_claim
from helper.store.store import Store
from helper.store.table_rows import ShareRow

log = structlog.get_logger("helper.reveal")

LISTED_SHARES: Final = 512
"""Shares of a round that are listed at once in the helper's own order. Listing reads all due shares of the round."""
LIST_SECONDS: Final = 10.0
"""Seconds after which a round is listed again, so that shares that have become due since take their place."""
COUNT_SECONDS: Final = 5.0
"""Seconds after which waiting shares and hosts are counted again."""
MAX_SELECTIONS: Final = 8
"""Selections per claim, if other hosts claimed the selected shares first."""
MAX_SLEEP_SECONDS = 30.0
"""Maximum sleep in seconds, even if nothing is due."""
DUE_TIME_RESOLUTION_SECONDS = 0.001
"""Resolution of stored due times, in seconds."""
CLAIMS_PER_PROVER = 2
"""Shares claimed per prover: the one it is proving and the next one."""
FIRST_CLAIMS_PER_PROVER = 1
"""Additional shares claimed per prover that go before claimed shares of a backlog."""
FIRST_CHECK_SECONDS = 0.1
"""Minimum seconds between two checks for shares that have priority while all claims are taken."""
_REVEALING = "revealing claimed shares"
_EXPECTED_REASONS = frozenset({PauseReason.BLOCKS_UNREAD, PauseReason.NO_NODE_IN_SYNC})
"""Causes of pauses that are not warnings: each start has the first, and the node pool warns of each failing node."""


@dataclass(frozen=True, slots=True)
class BacklogClaim:
    """Claimed shares, each with whether it has priority, and the rounds that are not overdue."""

    shares: list[tuple[ShareRow, bool]]
    on_time: list[bytes]


@dataclass(eq=False, repr=False, kw_only=True)
class Backlog:
    """Claims shares of all rounds in a backlog; `limits` say from which due shares there is one."""

    store: Store
    proof_times: ProofTimes
    limits: BacklogLimits
    clock: Clock
    stats: Stats

    def __post_init__(self) -> None:
        self._turns = RoundTurns()
        self._lists: dict[bytes, tuple[float, deque[DueShare]]] = {}  # by round: monotonic time of reading, shares
        self._waiting: dict[bytes, int] = {}
        self._counted_at = -math.inf

    async def claim(
        self, ends: Mapping[bytes, float], *, now: float, chain_time: float, limit: int, first_limit: int
    ) -> BacklogClaim | None:
        """Claim shares in the order of a backlog. Returns None if there is no backlog, or nothing could be claimed.

        Args:
            ends: the ends of the rounds, in Unix seconds.
            now: Unix seconds; shares due later are not claimed.
            limit: maximum number of shares, may be 0 or negative.
            first_limit: maximum number if those above `limit` have priority.
        """
        heads = await self._list_heads(ends, now, limit=max(self.limits.due_shares, first_limit) + 1)
        oldest_ms = min((shares[0].due_ms for shares in heads.values()), default=None)
        number = sum(map(len, heads.values()))
        if oldest_ms is None or not self.limits.is_backlog(oldest_ms, number, now):
            self._lists.clear()
            return None
        await self._count()
        on_time = [
            round_id
            for round_id in ends
            if round_id not in heads or not self.limits.is_overdue(heads[round_id][0].due_ms, now)
        ]
        for _ in range(MAX_SELECTIONS):
            queues = [
                await self._create_queue(round_id, ends[round_id], heads[round_id], now) for round_id in sorted(heads)
            ]
            selected = self._turns.select(
                queues,
                limit=limit,
                first_limit=first_limit,
                now=now,
                chain_time=chain_time,
                pace=self.proof_times.pace(),
                limits=self.limits,
            )
            has_priority = {share.id: is_first for share, is_first in selected}
            claimed = await self.store.run(claim_listed, list(has_priority), now=now) if selected else []
            if claimed or limit <= 0:
                return BacklogClaim([(queued, has_priority[queued.id]) for queued in claimed], on_time)
            # Other hosts were first, or an index is damaged: `claim_due` handles the latter.
            heads = await self._list_heads(heads, now, limit=first_limit + 1)
        return None

    async def _list_heads(self, round_ids: Collection[bytes], now: float, *, limit: int) -> dict[bytes, list[DueShare]]:
        """Return the first due shares by due time, of the rounds that have any."""
        heads = {
            round_id: await self.store.list_due(round_id, now=now, limit=limit, by_rank=False)
            for round_id in sorted(round_ids)
        }
        return {round_id: shares for round_id, shares in heads.items() if shares}

    async def _create_queue(self, round_id: bytes, end: float, heads: list[DueShare], now: float) -> RoundQueue:
        """Return a round's queue: by rank if the round itself is in a backlog, else by due time."""
        oldest_ms = heads[0].due_ms
        shares = deque(heads)
        if self.limits.is_backlog(oldest_ms, len(heads), now):
            shares = await self._own_order(round_id, now)
        waiting = max(self._waiting.get(round_id, 0), len(heads))
        return RoundQueue(round_id, end, waiting, oldest_ms, shares)

    async def _own_order(self, round_id: bytes, now: float) -> deque[DueShare]:
        """Return the first shares in this helper's own order over all due shares of the round.

        Selected shares are removed from the list by their selection.
        """
        listed_at, shares = self._lists.get(round_id, (-math.inf, deque[DueShare]()))
        if not shares or self.clock.monotonic() - listed_at > LIST_SECONDS:
            listed = await self.store.list_due(round_id, now=now, limit=LISTED_SHARES, by_rank=True)
            shares = deque(listed)
            self._lists[round_id] = (self.clock.monotonic(), shares)
        return shares

    async def _count(self) -> None:
        """Count waiting shares, hosts and confirmed shares, if the last count is too old."""
        now = self.clock.monotonic()
        if now - self._counted_at < COUNT_SECONDS:
            return
        self._counted_at = now
        self._waiting = await self.store.count_waiting()
        self.proof_times.hosts = await self.store.count_claiming_hosts()
        self.proof_times.record_confirmed(self.stats.counts["confirmed"], now)


@dataclass(frozen=True, slots=True)
class DispatchGate:
    """Conditions under which shares may be dispatched.

    Attributes:
        ends: the rounds whose shares may be proven, active and with a verified root, with their ends in Unix seconds;
            infinity for one that a false node may have invented.
        max_due_time: Unix time; shares due later are not dispatched, even if the local clock has passed their due time.
        is_one_at_a_time: whether each share waits up to `TRIAL_WAIT_SECONDS` for the node's response to the previous
            one. True until the chain has accepted the circuit, because otherwise all proofs could be wasted.
        chain_time: time of the newest block, in Unix seconds.
    """

    ends: Mapping[bytes, float]
    max_due_time: float
    pause_reason: str | None = None
    is_one_at_a_time: bool = False
    chain_time: float = 0.0


@dataclass(eq=False, repr=False, kw_only=True)
class Dispatcher:
    """Dispatches due shares to provers, limited to the number of free provers.

    Args:
        sender: sends each prepared share; None if another host sends.
        max_sleep: maximum sleep in seconds. Other hosts may enqueue or release shares without waking this one.
    """

    store: Store
    revealer: Revealer
    sender: Sender | None
    get_gate: Callable[[], DispatchGate]
    backlog: Backlog
    slots: int
    clock: Clock
    stats: Stats
    max_sleep: float = MAX_SLEEP_SECONDS

    def __post_init__(self) -> None:
        self._wake_event = asyncio.Event()
        self.claimed_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._claims_to_release: dict[int, float] = {}  # by share: monotonic time at which its claim is released
        self._error_counts: dict[int, int] = {}  # by share: consecutive internal errors
        self._errors = RecurringErrorLog(log, failed="dispatch_failed", recovered="dispatch_recovered")
        self._backlog_claims = 0  # claimed shares before which others may go
        self._next_first_check = -math.inf  # monotonic
        self._next_trial = -math.inf  # monotonic time from which another share may try the circuit
        self._sleep_until = math.inf  # wall time; infinite during an iteration, so that a new share wakes it
        self.pause_reason: str | None = PauseReason.STARTING
        if self.sender is not None:
            self.sender.subscribe(self.wake)

    def wake(self) -> None:
        """Run the loop now, because the schedule changed (a retry, a round, a node)."""
        self._wake_event.set()

    def wake_if_due(self, due_time: float) -> None:
        """Wake the loop for a new share, unless it is due after the next iteration.

        In the first minutes of a round, thousands of shares arrive that are due days later. An iteration for each would
        slow down their admission.
        """
        if due_time < self._sleep_until:
            self._wake_event.set()

    async def run(self) -> None:
        """Process the queue until cancelled. Shares that are still claimed are released at the next start."""
        try:
            while True:
                self._wake_event.clear()
                self._sleep_until = await self._run_steps()
                await self.clock.wait(self._wake_event, self._sleep_until)
                self._sleep_until = math.inf
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_steps(self) -> float:
        """Run one iteration; return the wall time of the next one."""
        deadline, last_error = math.inf, None
        for step in (self._release_delayed, self._dispatch):
            error: Exception | None = None
            try:
                next_run = await step()
            except Exception as failure:  # the other steps and the next iteration may still succeed
                error = last_error = failure
                next_run = self.clock.now() + RECHECK_SECONDS
            if step == self._dispatch:
                self.stats.note_attempt("claiming due shares", error, self.clock.monotonic())
            deadline = min(deadline, next_run)
        self._errors.note(last_error)
        return min(deadline, self.clock.now() + self.max_sleep)

    # ---------------------------------------------------------------- dispatch

    async def _dispatch(self) -> float:
        """Claim due shares and start proving them.

        Returns the wall time of the next dispatch, infinity if unknown.
        """
        deadline: float | None = None
        while deadline is None:
            gate = self.get_gate()
            self._note_pause(gate.pause_reason)
            free = self.slots * CLAIMS_PER_PROVER - self.claimed_count
            can_overtake = self._backlog_claims and len(gate.ends) > 1 and not gate.is_one_at_a_time
            first_free = free + self.slots * FIRST_CLAIMS_PER_PROVER if can_overtake else free
            if gate.pause_reason is not None or not gate.ends or first_free <= 0:
                return math.inf
            wait = self._seconds_to_wait(gate, free)
            if wait > 0:
                return self.clock.now() + max(wait, DUE_TIME_RESOLUTION_SECONDS)
            if gate.is_one_at_a_time:
                free = first_free = 1
            deadline = await self._claim(gate, free, first_free)
        return deadline

    def _seconds_to_wait(self, gate: DispatchGate, free: int) -> float:
        """Seconds until shares may be claimed, not positive if they may be claimed now."""
        if gate.is_one_at_a_time:
            return self._next_trial - self.clock.monotonic() if self._tasks or self.sender is None else 0.0
        return self._next_first_check - self.clock.monotonic() if free <= 0 else 0.0

    async def _claim(self, gate: DispatchGate, free: int, first_free: int) -> float | None:
        """Claim due shares, at most `free`, and up to `first_free` if those above `free` have priority.

        Returns the wall time of the next dispatch, infinity if unknown, None if there may be more to claim now.
        """
        if free <= 0:
            self._next_first_check = self.clock.monotonic() + FIRST_CHECK_SECONDS
        due_ms = await self.store.next_due_ms(gate.ends)
        now = min(self.clock.now(), gate.max_due_time)
        if due_ms is None or due_ms > int(now * 1000):
            return self._deadline(gate, due_ms, claimed_ms=0)
        if self.backlog.limits.is_overdue(due_ms, now):
            claim = await self.backlog.claim(
                gate.ends, now=now, chain_time=gate.chain_time, limit=free, first_limit=first_free
            )
            if claim is not None:
                # First: no other task knows these claims, so an error before it would keep them until a restart.
                self._start_claimed(claim.shares, due_ms, gate)
                if len(claim.shares) < free:
                    return None
                next_ms = await self.store.next_due_ms(claim.on_time)
                return self._deadline(gate, next_ms, claimed_ms=int(now * 1000))
        if free <= 0:
            return math.inf
        claimed = await self.store.run(claim_due, now=now, limit=free, rounds=gate.ends)
        self._start_claimed([(queued, True) for queued in claimed], due_ms, gate)
        if len(claimed) == free:
            return None
        return self._deadline(gate, await self.store.next_due_ms(gate.ends), claimed_ms=int(now * 1000))

    def _start_claimed(self, claimed: Sequence[tuple[ShareRow, bool]], oldest_ms: int, gate: DispatchGate) -> None:
        """Start proving claimed shares, each with whether it has priority."""
        if not claimed:
            return
        self.stats.queue_age.add_sample(max(0.0, self.clock.now() - oldest_ms / 1000))
        if gate.is_one_at_a_time:
            self._next_trial = self.clock.monotonic() + TRIAL_WAIT_SECONDS
        for queued, has_priority in claimed:
            self._start_reveal(queued, has_priority=has_priority)

    def _deadline(self, gate: DispatchGate, due_ms: int | None, claimed_ms: int) -> float:
        """Wall time of the next dispatch, after all shares due by `claimed_ms` were claimed."""
        if due_ms is None:
            return math.inf
        now, due = self.clock.now(), due_ms / 1000
        if due_ms <= claimed_ms:
            return now + RECHECK_SECONDS  # enqueued after the claim; enqueue has already set the wake event
        if due > gate.max_due_time:
            return max(due, now + RECHECK_SECONDS)  # limited by the block time, which advances with each block
        return due if due > now else now + DUE_TIME_RESOLUTION_SECONDS  # it became due after the claim

    def _note_pause(self, reason: str | None) -> None:
        if reason != self.pause_reason:
            if reason is None:
                log.info("dispatch_resumed")
            else:
                note = log.info if reason in _EXPECTED_REASONS else log.warning
                note("dispatch_paused", reason=reason)
            self.pause_reason = reason

    def _start_reveal(self, queued: ShareRow, *, has_priority: bool) -> None:
        self.claimed_count += 1
        self._backlog_claims += not has_priority
        task = asyncio.create_task(self._reveal(queued, has_priority=has_priority))
        self._tasks.add(task)
        task.add_done_callback(self._on_reveal_end)

    def _on_reveal_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self.clock.monotonic() < self._next_trial:
            self.wake()  # the next share may be waiting for this result

    async def _reveal(self, queued: ShareRow, *, has_priority: bool) -> None:
        """Prove and send one share. On any error the share stays in the queue."""
        try:
            try:
                prepared = await self.revealer.prove(queued, has_priority=has_priority)
            finally:
                self.claimed_count -= 1
                self._backlog_claims -= not has_priority
                self.wake()
            if prepared and self.sender is not None:
                await self.sender.send(queued.id)
            self._error_counts.pop(queued.id, None)
            self.stats.note_attempt(_REVEALING, None, self.clock.monotonic())
        except Exception as error:
            log_error(log, "reveal_failed", error)
            self._delay_release(queued.id)
            if len(self._error_counts) > 1:  # not the fault of a single share
                self.stats.note_attempt(_REVEALING, error, self.clock.monotonic())
        except asyncio.CancelledError:
            self._delay_release(queued.id)  # if the loop has ended too, the claim is released at the next start
            raise

    # ---------------------------------------------------------------- internal errors

    def _delay_release(self, share_id: int) -> None:
        """Schedule the release of a share's claim after 2, 4, 8 … 64 s.

        The delay prevents a busy loop if the internal error recurs.
        """
        error_count = self._error_counts[share_id] = self._error_counts.get(share_id, 0) + 1
        self._claims_to_release[share_id] = self.clock.monotonic() + retry_delay(error_count)
        self.wake()

    async def _release_delayed(self) -> float:
        """Release claims whose delay after an internal error has ended.

        Returns the wall time at which the next delay ends.
        """
        now = self.clock.monotonic()
        for share_id in [share_id for share_id, at in self._claims_to_release.items() if at <= now]:
            if not await self.store.run(release_claim, share_id):
                self._error_counts.pop(share_id, None)
            del self._claims_to_release[share_id]
        wait = min(self._claims_to_release.values(), default=math.inf) - now
        # The wall clock has this resolution; a shorter sleep would be a busy loop.
        return self.clock.now() + max(wait, DUE_TIME_RESOLUTION_SECONDS)
