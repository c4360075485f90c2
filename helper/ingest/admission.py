"""Admission of shares: validate, store, wake the dispatcher.

The protocol defines the order of the checks: encodings and hashes, round, vote commitment, duplicate, round active and
time within it, nullifier spent. A 200 means that all checks passed and that the row is on disk.

A share can arrive before this helper's copy of the chain contains its round or leaf, because wallets post seconds after
their vote was included. The request then waits for the next *scheduled* syncs. It never triggers one, because an extra
request would reveal the share's arrival time to the node. A wallet never retries a 400, and nothing proves that a node
that lags, or is false, has reported all: a round or leaf that is missing, or not agreed (`helper.chain.agreement`),
is refused temporarily. A 400 is only for what is agreed and can never become right.

A share that is already known is a duplicate, whatever is known of its round: its key is looked up in the database
before any refusal. The exception is a share whose leaf is known and differs, since only the voter may ask.

While the helper is paused, known shares and shares that are invalid regardless of the chain's newest state get the
usual response; all others are refused temporarily. While it starts they wait, because the first sync ends that pause.
`helper.core.refusals` has the responses.

Nothing about an accepted share is logged; metrics record only the number of each outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import anyio
import structlog

from helper.chain.chain_data import Round, RoundStatus
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.core.log_limits import RecentKeys
from helper.core.refusals import PauseReason, Situation, TemporaryRefusal, attempt_token
from helper.core.share import Share
from helper.errors import ShareRefused, StoreError
from helper.ingest.validator import CheckedShare, ShareValidator
from helper.store import shares
from helper.store.models import EnqueueResult
from helper.store.store import Store

log = structlog.get_logger("helper.ingest")

MAX_WAIT_SECONDS: Final = 3.5
"""Maximum seconds that a request waits for the next scheduled syncs.

Three wallets give a request up 5 s after they began to connect, which takes up to 1.5 s on a mobile network.
"""
BROWSER_WAIT_SECONDS: Final = 8.0
"""The same for a browser's first request for a share. The only such wallet ends it after 10 s, and asks no other helper
then."""
LONGEST_WAIT_SECONDS: Final = 15.0
"""The same for wallets that end a request after 30 s: custody-voter, and those that name their attempt.

custody-voter stops at a share that too few helpers accept. A wallet that names its attempt repeats a refused share
twice at the same helper before it takes another one. A repeat waits `MAX_WAIT_SECONDS`, so that 37 of the 60 s that the
wallet has for a share's first helpers are left for others.
"""
REPEAT_SECONDS: Final = 60.0
"""Seconds for which a share that waited is recognized, in memory only."""
MAX_REPEATS: Final = 16_384
"""Maximum number of such shares: more than can begin to wait between a request and its repeats."""
MAX_IN_FLIGHT: Final = 6_000
"""Maximum number of concurrent requests. More than there are connections: a lower limit would refuse most shares while
a few thousand clients repeat theirs. Requests whose clients have left count too."""
MAX_WAITING: Final = 1_500
"""Maximum number of requests that wait for a sync."""

_GROWING_STATUSES: Final = frozenset({RoundStatus.PENDING, RoundStatus.ACTIVE})
"""Statuses of rounds whose tree may get new leaves."""


def longest_wait(headers: Sequence[tuple[bytes, bytes]]) -> float:
    """Maximum seconds that the first request for a share waits, by what its headers say of its client.

    Args:
        headers: names in lower case, and values.
    """
    values = dict(headers)
    is_custody = values.get(b"user-agent", b"").startswith(b"valar-custody-voter/")
    if is_custody or attempt_token(headers) is not None:
        return LONGEST_WAIT_SECONDS
    return BROWSER_WAIT_SECONDS if b"origin" in values else MAX_WAIT_SECONDS


class WaitingShares:
    """Slots of shares that wait for the chain. When no slot is free, the share that has waited longest is given up.

    A flood of shares thus shortens the waits. If it were refused instead, so would be almost all others.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._scopes: dict[anyio.CancelScope, None] = {}  # in order
        self._refusal = Situation.TOO_MANY_WAITING

    def stop(self) -> None:
        """Give all shares up, also those that would wait from now on: no sync follows."""
        self._capacity, self._refusal = 0, Situation.STOPPING
        for scope in list(self._scopes):
            scope.cancel()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a slot.

        Raises:
            TemporaryRefusal: the slot was given to another share, or the service stops.
        """
        scope = anyio.CancelScope()
        self._scopes[scope] = None
        if len(self._scopes) > self._capacity:
            longest = next(iter(self._scopes))
            del self._scopes[longest]
            longest.cancel()
        try:
            with scope:
                yield
        finally:
            self._scopes.pop(scope, None)
        if scope.cancelled_caught:
            raise TemporaryRefusal(self._refusal)


@dataclass(eq=False, repr=False, kw_only=True)
class AdmissionController:
    """Validates and enqueues shares.

    Args:
        wake: called with the due time (Unix seconds) of each new share, after it is on disk.
        get_pause_reason: why no share can be accepted now, or None.
        get_round_pause_reason: why no share of this round can be accepted now, or None.
    """

    store: Store
    rounds: RoundRegistry
    trees: CommitmentTreeSync
    validator: ShareValidator
    clock: Clock
    wake: Callable[[float], None]
    get_pause_reason: Callable[[], str | None]
    get_round_pause_reason: Callable[[bytes], str | None]

    def __post_init__(self) -> None:
        self._is_pause_current = False
        self._pause_reason: str | None = None
        self._in_flight = 0
        self._waiting = WaitingShares(MAX_WAITING)
        self._waited = RecentKeys(REPEAT_SECONDS, max_keys=MAX_REPEATS)

    async def admit(
        self,
        body: bytes,
        *,
        wait_seconds: float = MAX_WAIT_SECONDS,
        has_left: Callable[[], bool] = lambda: False,
    ) -> EnqueueResult:
        """Parse, validate and enqueue a posted share.

        Args:
            wait_seconds: for how long the first request for the share may wait (`longest_wait`).
            has_left: whether the client has disconnected; its body is then not validated.

        Returns:
            QUEUED if the share is now on disk, DUPLICATE if it was already known.

        Raises:
            ShareRefused: 400, the body is not a valid share, or it is invalid on the chain.
            TemporaryRefusal: the share may be accepted later.
            ClientLeft: the client disconnected.
        """
        if self._in_flight >= MAX_IN_FLIGHT:
            raise TemporaryRefusal(Situation.TOO_MANY_REQUESTS)
        self._in_flight += 1
        try:
            arrived_at = self.clock.now()
            checked = await self.validator.validate_body(body, has_left)
            return await self._admit(checked, arrived_at, wait_seconds)
        finally:
            self._in_flight -= 1

    def stop_waits(self) -> None:
        """End the waits for the chain, which is not read any more. Other shares are still accepted."""
        self._waiting.stop()

    async def _admit(self, checked: CheckedShare, arrived_at: float, wait_seconds: float) -> EnqueueResult:
        try:
            refusal = self._find_refusal(checked, arrived_at)
            if refusal is not None and await self._is_duplicate(checked):
                return EnqueueResult.DUPLICATE
            if isinstance(refusal, TemporaryRefusal):
                refusal = await self._wait_for_chain(checked, arrived_at, refusal, wait_seconds)
            if refusal is not None:
                raise refusal
            return await self._enqueue(checked, arrived_at)
        except StoreError as error:
            log.error("enqueue_failed", error=str(error), advice=error.advice)
            raise TemporaryRefusal(Situation.QUEUE_UNWRITABLE) from error

    def _find_refusal(self, checked: CheckedShare, arrived_at: float) -> ShareRefused | TemporaryRefusal | None:
        """Why a share cannot be accepted now, unless it is a duplicate."""
        share, view = checked.share, self.rounds.view(checked.share.round_id)
        pause = self._find_pause(share.round_id)
        paused = None if pause is None else TemporaryRefusal(Situation.PAUSED, pause)
        if view.known is None:
            return paused or TemporaryRefusal(Situation.VOTE_NOT_SYNCED)
        return (
            _find_choice_refusal(share, view.known, are_agreed=view.are_proposals_agreed)
            or self._find_leaf_refusal(checked, view.known.status, paused)
            or _find_status_refusal(view.known.status, is_agreed=view.is_status_agreed)
            or _find_end_refusal(share.submit_at, arrived_at, view.known.vote_end_time, is_agreed=view.is_end_agreed)
        )

    def _find_leaf_refusal(
        self, checked: CheckedShare, status: RoundStatus, paused: TemporaryRefusal | None
    ) -> ShareRefused | TemporaryRefusal | None:
        share = checked.share
        if self.trees.leaf(share.round_id, share.tree_position) not in {None, checked.vote_commitment}:
            return ShareRefused(400, "has a different vote commitment", field="tree_position")
        # A leaf that only one node serves is sufficient to accept its share, but never to refuse another.
        if self.trees.find_anchor(share.round_id, share.tree_position, lambda: checked.vote_commitment) is not None:
            return paused
        return (paused or TemporaryRefusal(Situation.VOTE_NOT_SYNCED)) if status in _GROWING_STATUSES else None

    def _find_pause(self, round_id: bytes) -> str | None:
        """Why no share of a round is accepted now; that of all rounds is found once per iteration of the event loop."""
        if not self._is_pause_current:
            self._is_pause_current = True
            self._pause_reason = self.get_pause_reason()
            asyncio.get_running_loop().call_soon(self._expire_pause)
        return self._pause_reason or self.get_round_pause_reason(round_id)

    def _expire_pause(self) -> None:
        self._is_pause_current = False

    async def _enqueue(self, checked: CheckedShare, arrived_at: float) -> EnqueueResult:
        """Store a share; the store detects duplicates and spent nullifiers."""
        share = checked.share
        # The clock may have been corrected since the arrival, or set to a wrong time. The earlier time is used, so that
        # a share without a delay is never due years later.
        now = min(arrived_at, self.clock.now())
        try:
            outcome = await self.store.run(shares.EnqueueOperation(share, checked.nullifier, now=now))
        except StoreError:
            # A database that cannot be written can still be read for duplicates.
            if await self.store.is_known(share.key):
                return EnqueueResult.DUPLICATE
            raise
        if outcome is EnqueueResult.CLOSED:
            raise _round_not_active()  # closed since it was checked, or by a host that has read more blocks
        if outcome is EnqueueResult.MOVED_UP:
            self.wake(max(share.submit_at, now))
            return EnqueueResult.DUPLICATE
        if outcome is EnqueueResult.QUEUED:
            self.wake(max(share.submit_at, now))
        return outcome

    async def _is_duplicate(self, checked: CheckedShare) -> bool:
        """Return whether a share is known, unless another leaf is known at its position."""
        share = checked.share
        leaf = self.trees.leaf(share.round_id, share.tree_position)
        leaf = leaf or self.trees.stored_leaf(share.round_id, share.tree_position)
        return leaf in {None, checked.vote_commitment} and await self.store.is_known(share.key)

    async def _wait_for_chain(
        self, checked: CheckedShare, arrived_at: float, refusal: TemporaryRefusal, wait_seconds: float
    ) -> ShareRefused | TemporaryRefusal | None:
        """Wait while the next scheduled syncs may change a refusal. Return the last one."""
        share = checked.share
        if self._is_paused(share):
            return refusal
        with self._waiting.hold():
            now = self.clock.monotonic()
            is_repeat = wait_seconds > MAX_WAIT_SECONDS and not self._waited.remember(share.key, now)
            deadline = now + (MAX_WAIT_SECONDS if is_repeat else wait_seconds)
            while True:
                # Something may have changed since the refusal, and a wait sees only what changes later.
                latest = self._find_refusal(checked, arrived_at)
                seconds_left = deadline - self.clock.monotonic()
                if not isinstance(latest, TemporaryRefusal) or seconds_left <= 0 or self._is_paused(share):
                    return latest
                await self.trees.wait_for_news(share.round_id, share.tree_position, seconds_left)

    def _is_paused(self, share: Share) -> bool:
        """Whether there is a pause that the next scheduled sync does not end, as it ends the start."""
        pause = self._find_pause(share.round_id)
        return pause not in {None, PauseReason.CHAIN_NOT_READ}


def _find_choice_refusal(
    share: Share, chain_round: Round, *, are_agreed: bool
) -> ShareRefused | TemporaryRefusal | None:
    options = next((proposal.options for proposal in chain_round.proposals if proposal.id == share.proposal_id), None)
    if options is None:
        error: ShareRefused | None = ShareRefused(400, "is not a proposal of the round", field="proposal_id")
    else:
        error = share.find_choice_error(options)
    if error is not None and (not chain_round.proposals or not are_agreed):
        return TemporaryRefusal(Situation.PROPOSALS_UNCONFIRMED)
    return error


def _find_status_refusal(status: RoundStatus, *, is_agreed: bool) -> ShareRefused | TemporaryRefusal | None:
    if status is RoundStatus.PENDING:
        return TemporaryRefusal(Situation.VOTE_NOT_SYNCED)  # an agreed status is a lower bound
    if not is_agreed:
        return TemporaryRefusal(Situation.PAUSED, PauseReason.ROUND_STATUS_UNCONFIRMED)
    return None if status is RoundStatus.ACTIVE else _round_not_active()


def _find_end_refusal(
    submit_at: int, arrived_at: float, end: int, *, is_agreed: bool
) -> ShareRefused | TemporaryRefusal | None:
    """Refuse a share that is due after the end: the agreed one, or the latest that any node reports.

    An earlier end that a node reports refuses nothing: a lie about it would cost the votes until the round's end.
    """
    if is_agreed:
        return ShareRefused(400, "is after the round's end", field="submit_at") if submit_at > end else None
    is_late = max(submit_at, arrived_at) > end
    return TemporaryRefusal(Situation.PAUSED, PauseReason.ROUND_END_UNCONFIRMED) if is_late else None


def _round_not_active() -> ShareRefused:
    return ShareRefused(400, "the round is not active", field="vote_round_id")
