"""Admission of shares: validate, store, wake the dispatcher.

The protocol defines the order of the checks: encodings and hashes, round, vote commitment, duplicate, round active and
time within it, nullifier spent. A 200 means that all checks passed and that the row is on disk.

A share can arrive before this helper's copy of the chain contains its round or leaf, because wallets post seconds after
their vote was included. The request then waits for the next *scheduled* syncs. It never triggers one, because an extra
request would reveal the share's arrival time to the node. A wallet never retries a 400, so a missing round or leaf is
rejected with 400 only if the chain provably did not have it when the share was first posted
(`helper.chain.absence_proof`); until then the refusal is temporary.

A duplicate must be recognized even if its leaf cannot be checked: after the end of its round, and after a restart until
a node has confirmed the stored tree. In these cases its key is looked up in the database.

While the helper is paused, known shares and shares that are invalid regardless of the chain's newest state get the
usual response; all others are refused temporarily. `helper.core.refusals` has the responses.

Nothing about an accepted share is logged; metrics record only the number of each outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import structlog

from helper.chain.absence_proof import ArrivalKey, FirstArrivals
from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.models import Round, RoundStatus
from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.core.pause import PauseCause, PauseReason
from helper.core.refusals import Situation, TemporaryRefusal
from helper.core.share import InvalidChoice, Share
from helper.errors import ShareRefused, StoreError
from helper.ingest.validator import CheckedShare, ShareValidator
from helper.store.models import EnqueueResult
from helper.store.store import Store

log = structlog.get_logger("helper.ingest")

MAX_WAIT_SECONDS: Final = 3.5
"""Maximum seconds that a request waits for the next scheduled syncs.

Three wallets give a request up 5 s after they began to connect, which takes up to 1.5 s on a mobile network.
"""
MAX_ATTEMPT_WAIT_SECONDS: Final = 15.0
"""The same for a request that names its attempt: its wallet waits 30 s, and needs time for other helpers."""
MAX_IN_FLIGHT: Final = 2_000
"""Maximum number of concurrent requests."""
MAX_WAITING: Final = 1_500
"""Maximum number of requests that wait for a sync; the rest is reserved for requests that need none."""

_GROWING_STATUSES: Final = frozenset({RoundStatus.PENDING, RoundStatus.ACTIVE})
"""Statuses of rounds whose tree may get new leaves."""


class WaitingShares:
    """Slots of shares that wait for the chain.

    When no slot is free, the share that has waited longest of those that name their attempt is given up for a share
    that does not: its wallet posts it again within a second, and others do not.
    """

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._attempts: dict[anyio.CancelScope, None] = {}  # those that can be given up, in order

    @contextmanager
    def hold(self, *, names_attempt: bool) -> Iterator[None]:
        """Hold a slot.

        Raises:
            TemporaryRefusal: no slot is free, or the slot was given to another share.
        """
        if not self._free and not names_attempt:
            self._give_up_attempt()
        if not self._free:
            raise TemporaryRefusal(Situation.TOO_MANY_WAITING)
        self._free -= 1
        scope = anyio.CancelScope()
        if names_attempt:
            self._attempts[scope] = None
        try:
            with scope:
                yield
        finally:
            if not names_attempt or scope in self._attempts:
                self._attempts.pop(scope, None)
                self._free += 1
        if scope.cancelled_caught:
            raise TemporaryRefusal(Situation.TOO_MANY_WAITING)

    def _give_up_attempt(self) -> None:
        """End the wait of the attempt that has waited longest, and release its slot."""
        scope = next(iter(self._attempts), None)
        if scope is not None:
            del self._attempts[scope]
            self._free += 1
            scope.cancel()


class AdmissionController:
    """Validates and enqueues shares.

    Args:
        store: stores accepted shares.
        rounds: the round registry.
        trees: the rounds' commitment trees and their scheduled syncs.
        validator: parses bodies and validates encodings and hashes.
        clock: source of arrival times.
        wake: called with the due time (Unix seconds) of each new share, after it is on disk.
        get_pause_reason: why no share can be accepted now, or None.
        get_round_pause_reason: why no share of this round can be accepted now, or None.
    """

    def __init__(
        self,
        *,
        store: Store,
        rounds: RoundRegistry,
        trees: CommitmentTreeSync,
        validator: ShareValidator,
        clock: Clock,
        wake: Callable[[float], None],
        get_pause_reason: Callable[[], PauseReason | None],
        get_round_pause_reason: Callable[[bytes], PauseReason | None],
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._trees = trees
        self._validator = validator
        self._clock = clock
        self._wake = wake
        self._get_pause_reason = get_pause_reason
        self._get_round_pause_reason = get_round_pause_reason
        self._is_pause_current = False
        self._pause_reason: PauseReason | None = None
        self._in_flight = 0
        self._waiting = WaitingShares(MAX_WAITING)
        self._first_arrivals = FirstArrivals()

    async def admit(
        self,
        body: bytes,
        *,
        names_attempt: bool = False,
        has_left: Callable[[], bool] = lambda: False,
    ) -> EnqueueResult:
        """Parse, validate and enqueue a posted share.

        Args:
            body: the request's JSON body.
            names_attempt: whether the request has an attempt token (`helper.core.refusals`): it may wait longer.
            has_left: whether the client has disconnected; its body is then not validated.

        Returns:
            QUEUED if the share is now on disk, DUPLICATE if it was already known.

        Raises:
            PayloadError: the body is not a valid share.
            ShareRefused: 400, invalid on the chain (`field` names the invalid field).
            TemporaryRefusal: the share may be accepted later.
            ClientLeft: the client disconnected.
        """
        if self._in_flight >= MAX_IN_FLIGHT:
            raise TemporaryRefusal(Situation.TOO_MANY_REQUESTS)
        self._in_flight += 1
        try:
            arrived_at = self._clock.now()
            checked = await self._validator.validate_body(body, has_left)
            return await self._admit(checked, arrived_at, names_attempt=names_attempt)
        finally:
            self._in_flight -= 1

    async def _admit(self, checked: CheckedShare, arrived_at: float, *, names_attempt: bool) -> EnqueueResult:
        share, vote_commitment = checked.share, checked.vote_commitment
        try:
            chain_round, leaf = self._find_round_and_leaf(share)
            if chain_round is not None and leaf is None:
                if await self._is_duplicate_without_leaf(share, chain_round, vote_commitment):
                    return EnqueueResult.DUPLICATE
                chain_round, leaf = self._find_round_and_leaf(share)
            if chain_round is None or _can_change(chain_round, leaf):
                chain_round, leaf = await self._wait_for_chain(share, vote_commitment, names_attempt=names_attempt)
            self._validate_leaf(share, chain_round, leaf, vote_commitment)
            refusal = self._find_refusal(share, chain_round, arrived_at)
            if refusal is not None:
                if await self._store.is_known(share.key):
                    return EnqueueResult.DUPLICATE
                raise refusal
            return await self._enqueue(checked, arrived_at)
        except StoreError as error:
            log.error("enqueue_failed", error=str(error), advice=error.advice)
            raise TemporaryRefusal(Situation.QUEUE_UNWRITABLE) from error

    def _find_refusal(
        self, share: Share, chain_round: Round, arrived_at: float
    ) -> ShareRefused | TemporaryRefusal | None:
        """Why a share cannot be accepted now, unless it is a duplicate."""
        reason = self._current_pause() or self._get_round_pause_reason(share.round_id)
        if reason is not None:
            return TemporaryRefusal(Situation.PAUSED, reason)
        if chain_round.status is not RoundStatus.ACTIVE or self._rounds.has_unconfirmed_status(share.round_id):
            return self._inactive_refusal(share)
        other_end = self._rounds.unconfirmed_end(share.round_id)
        if other_end is not None and max(share.submit_at, arrived_at) > min(other_end, chain_round.vote_end_time):
            return TemporaryRefusal(Situation.PAUSED, PauseCause.ROUND_END_UNCONFIRMED.reason())
        if share.submit_at > chain_round.vote_end_time:
            return ShareRefused(400, "is after the round's end", field="submit_at")
        return None

    def _current_pause(self) -> PauseReason | None:
        """Why no share is accepted now; evaluated once per iteration of the event loop."""
        if not self._is_pause_current:
            self._is_pause_current = True
            self._pause_reason = self._get_pause_reason()
            asyncio.get_running_loop().call_soon(self._expire_pause)
        return self._pause_reason

    def _expire_pause(self) -> None:
        self._is_pause_current = False

    async def _enqueue(self, checked: CheckedShare, arrived_at: float) -> EnqueueResult:
        """Store a share; the store detects duplicates and spent nullifiers."""
        share = checked.share
        # The clock may have been corrected since the arrival, or set to a wrong time. The earlier time is used, so that
        # a share without a delay is never due years later.
        now = min(arrived_at, self._clock.now())
        try:
            outcome = await self._store.enqueue(share, checked.nullifier, now=now)
        except StoreError:
            # A database that cannot be written can still be read for duplicates.
            if await self._store.is_known(share.key):
                return EnqueueResult.DUPLICATE
            raise
        if outcome is EnqueueResult.CLOSED:
            raise _round_not_active()  # closed by another host, which has processed more blocks
        if outcome is EnqueueResult.MOVED_UP:
            self._wake(max(share.submit_at, now))
            return EnqueueResult.DUPLICATE
        if outcome is EnqueueResult.QUEUED:
            self._wake(max(share.submit_at, now))
        return outcome

    def _find_round_and_leaf(self, share: Share) -> tuple[Round | None, bytes | None]:
        """Return the share's round and leaf as far as they are known; validate its proposal and decision."""
        chain_round = self._rounds.get(share.round_id)
        if chain_round is None:
            return None, None
        self._validate_choice(share, chain_round)
        return chain_round, self._trees.leaf(share.round_id, share.tree_position)

    async def _is_duplicate_without_leaf(self, share: Share, chain_round: Round, vote_commitment: bytes) -> bool:
        """Return whether a share is known although its leaf cannot be checked now.

        False if the leaf is not stored and the round may still get new leaves.
        """
        stored_leaf = self._trees.unverified_leaf(share.round_id, share.tree_position)
        if stored_leaf is None and chain_round.status in _GROWING_STATUSES:
            return False
        return stored_leaf in {None, vote_commitment} and await self._store.is_known(share.key)

    def _validate_leaf(self, share: Share, chain_round: Round, leaf: bytes | None, vote_commitment: bytes) -> None:
        """Raise ShareRefused unless the leaf is the share's vote commitment."""
        if leaf is None and chain_round.status is not RoundStatus.ACTIVE:
            raise self._inactive_refusal(share)
        if leaf is None:
            raise ShareRefused(400, "is beyond the round's tree", field="tree_position")
        if leaf != vote_commitment:
            raise ShareRefused(400, "has a different vote commitment", field="tree_position")

    async def _wait_for_chain(
        self, share: Share, vote_commitment: bytes, *, names_attempt: bool
    ) -> tuple[Round, bytes | None]:
        """Wait until the share's round and leaf are known or proven missing; return them."""
        self._refuse_when_paused(share)
        deadline = self._clock.monotonic() + (MAX_ATTEMPT_WAIT_SECONDS if names_attempt else MAX_WAIT_SECONDS)
        with self._waiting.hold(names_attempt=names_attempt):
            key = ArrivalKey(share.round_id, share.tree_position, vote_commitment)
            arrival = self._first_arrivals.get_or_add(key, self._trees.create_arrival(), self._clock.monotonic())
            while not self._trees.was_absent(share.round_id, arrival):
                seconds_left = deadline - self._clock.monotonic()
                has_synced = seconds_left > 0 and await self._trees.wait_next_sync(seconds_left)
                chain_round, leaf = self._find_round_and_leaf(share)
                if chain_round is not None and not _can_change(chain_round, leaf):
                    self._first_arrivals.forget(key)
                    return chain_round, leaf
                self._refuse_when_paused(share)
                if not has_synced:
                    raise TemporaryRefusal(Situation.VOTE_NOT_SYNCED)
        chain_round, leaf = self._find_round_and_leaf(share)
        if chain_round is None:
            raise ShareRefused(400, "no such round", field="vote_round_id")
        return chain_round, leaf

    def _refuse_when_paused(self, share: Share) -> None:
        reason = self._get_pause_reason() or self._get_round_pause_reason(share.round_id)
        if reason is not None:
            raise TemporaryRefusal(Situation.PAUSED, reason)

    def _inactive_refusal(self, share: Share) -> ShareRefused | TemporaryRefusal:
        """The refusal of a share of an inactive round.

        It is final (400) only if the round's status is confirmed.
        """
        if self._rounds.has_unconfirmed_status(share.round_id):
            return TemporaryRefusal(Situation.PAUSED, PauseCause.ROUND_STATUS_UNCONFIRMED.reason())
        return _round_not_active()

    def _validate_choice(self, share: Share, chain_round: Round) -> None:
        """Raise ShareRefused unless the proposal exists in the round and the share fits it."""
        for proposal in chain_round.proposals:
            if proposal.id == share.proposal_id:
                error = share.find_choice_error(proposal.options)
                break
        else:
            error = InvalidChoice("proposal_id", "is not a proposal of the round")
        if error is None:
            return
        if not chain_round.proposals or self._rounds.has_unconfirmed_proposals(share.round_id):
            raise TemporaryRefusal(Situation.PROPOSALS_UNCONFIRMED)
        raise ShareRefused(400, error.message, field=error.field)


def _can_change(chain_round: Round, leaf: bytes | None) -> bool:
    """Whether the next sync may add this leaf to the round's tree."""
    return leaf is None and chain_round.status in _GROWING_STATUSES


def _round_not_active() -> ShareRefused:
    return ShareRefused(400, "the round is not active", field="vote_round_id")
