"""What must hold before a share is taken; then it is put on disk and the processor is woken.

The order of the checks is the protocol's: encodings and hashes, round, vote commitment, known already, round
open and time within it, spent already. A 200 means that all of them passed and that the row is on disk.

A share can arrive before our copy of the chain holds its round or leaf: wallets post seconds after their vote was
included. The request then waits for the next *scheduled* syncs. It never triggers one, because an extra request would
reveal the share's arrival time to the node. A wallet never retries a 400, so a missing round or leaf is rejected with
400 only if the chain certainly lacked it when the share was first posted (`helper.chain.block_cadence`); until then
the answer is 429, which wallets retry.

A share that comes again must be told from a new one also when its leaf cannot be checked: after its round, and
after a restart until a node has confirmed the tree from the disk. Its key, which is on disk, then decides.

While the helper is paused a share that is known, or that breaks a rule which needs no newer chain, is
answered as ever; any other gets 503.

Nothing here logs anything of a share that is taken: what the answers were is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from helper.chain.block_cadence import ArrivalKey, FirstArrivals, ShareArrival
from helper.chain.models import Round, RoundStatus
from helper.clock import Clock
from helper.core.share import Share
from helper.errors import ShareRefused, StoreError
from helper.ingest.validator import CheckedShare, ShareValidator
from helper.store.rows import Enqueued
from helper.store.store import Store

log = structlog.get_logger("helper.intake")

HOLD_SECONDS: Final = 2.0
"""The longest that a share is held for the next regular sync."""
MAX_IN_FLIGHT: Final = 2_000
"""Shares under check at once; beyond it, or beyond its part of it (`SharedPlaces`), a client gets 429."""
MAX_HELD: Final = 1_500
"""Of these, shares held for a sync: the rest is kept free for those that can be answered at once."""

_MAY_GROW: Final = frozenset({RoundStatus.PENDING, RoundStatus.ACTIVE})
"""A round that is over gets no leaf any more."""


class Rounds(Protocol):
    """The part of the round book that intake reads."""

    def get(self, round_id: bytes) -> Round | None:
        """The round as the chain last told it."""
        ...

    def unconfirmed_end(self, round_id: bytes) -> int | None:
        """Another `vote_end_time` of the round that is reported and not confirmed, None without one."""
        ...

    def has_unconfirmed_status(self, round_id: bytes) -> bool:
        """Whether another status of the round is reported and not confirmed, or its only known one is not."""
        ...

    def has_unconfirmed_proposals(self, round_id: bytes) -> bool:
        """Whether other proposals of the round are reported and not confirmed."""
        ...


class Trees(Protocol):
    """The part of the tree keeper that intake reads; nothing here asks the chain."""

    def leaf(self, round_id: bytes, position: int) -> bytes | None:
        """The leaf (32 bytes), None beyond the known tree or for an unknown round."""
        ...

    def unchecked_leaf(self, round_id: bytes, position: int) -> bytes | None:
        """The leaf as it came from the disk while its tree is not checked, else None."""
        ...

    def arrival(self) -> ShareArrival:
        """The present moment as the arrival of a share whose round or leaf is missing."""
        ...

    def lacks(self, round_id: bytes, arrival: ShareArrival) -> bool:
        """Whether a round or leaf that is missing here certainly was not on the chain at the arrival."""
        ...

    async def wait_next_sync(self, timeout: float) -> bool:
        """Wait until the next regular sync of rounds and trees has gone through; False: none did in time."""
        ...


class SharedPlaces:
    """A limited number of places, of which no client can take so many that others find none.

    A client may take a place while it holds fewer than are free: one client gets at most half of the places, two a
    third each. So some are always free for a client that holds none.

    Args:
        places: their number.
        message: of the refusal.
    """

    def __init__(self, places: int, message: str) -> None:
        self._places = places
        self._message = message
        self._taken = 0
        self._taken_by_client: dict[bytes, int] = {}

    def take(self, client: bytes | None) -> None:
        """Take a place; a client of None is limited by the number of places only. `release` gives it back.

        Raises:
            ShareRefused: 429, no place is free for this client.
        """
        free = self._places - self._taken
        if free <= 0 or (client is not None and self._taken_by_client.get(client, 0) >= free):
            raise ShareRefused(429, self._message)
        self._taken += 1
        if client is not None:
            self._taken_by_client[client] = self._taken_by_client.get(client, 0) + 1

    def release(self, client: bytes | None) -> None:
        """Give a place of this client back."""
        self._taken -= 1
        if client is not None:
            left = self._taken_by_client[client] - 1
            if left:
                self._taken_by_client[client] = left
            else:
                del self._taken_by_client[client]


class AdmissionController:
    """Takes shares.

    Args:
        store: keeps them.
        rounds: the chain's rounds.
        trees: the rounds' trees, and the moment of their next regular sync.
        checker: reads bodies, and checks encodings and hashes.
        clock: for the time of arrival.
        wake: called after a new share is on disk, with the time at which it is due (unix seconds).
        paused: why no share can be taken now, or None.
        round_paused: why no share of this round can be taken now, or None.
    """

    def __init__(
        self,
        *,
        store: Store,
        rounds: Rounds,
        trees: Trees,
        checker: ShareValidator,
        clock: Clock,
        wake: Callable[[float], None],
        paused: Callable[[], str | None],
        round_paused: Callable[[bytes], str | None],
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._trees = trees
        self._checker = checker
        self._clock = clock
        self._wake = wake
        self._paused = paused
        self._round_paused = round_paused
        self._judged = False
        self._pause: str | None = None
        self._in_flight = SharedPlaces(MAX_IN_FLIGHT, "too many shares at once, come again")
        self._held = SharedPlaces(MAX_HELD, "too many shares wait for the chain, come again")
        self._first_arrivals = FirstArrivals()

    async def take(self, body: bytes, client: bytes | None = None) -> Enqueued:
        """Read what a wallet posted, check it and keep it.

        Args:
            body: the request's, JSON.
            client: who posted it, for its part of the places; None for no such limit.

        Returns:
            QUEUED when it is on disk now, DUPLICATE when there was nothing to do.

        Raises:
            WireError: the body is not what a wallet sends.
            ShareRefused: 400 a rule is broken (`field` says where), 429 come again in a moment, 503 nothing
                can be taken now.
        """
        self._in_flight.take(client)
        try:
            arrived = self._clock.now()
            return await self._accept(await self._checker.read(body), arrived, client)
        finally:
            self._in_flight.release(client)

    async def accept(self, share: Share) -> Enqueued:
        """Check a share that was read already and keep it; see `take`."""
        self._in_flight.take(None)
        try:
            arrived = self._clock.now()
            return await self._accept(await self._checker.check(share), arrived, None)
        finally:
            self._in_flight.release(None)

    async def _accept(self, checked: CheckedShare, arrived: float, client: bytes | None) -> Enqueued:
        share = checked.share
        try:
            if await self._came_before(share, checked.vote_commitment):
                return Enqueued.DUPLICATE
            chain_round = await self._round_and_leaf(share, checked.vote_commitment, client)
            refusal = self._refusal(share, chain_round, arrived)
            if refusal is not None:
                if await self._store.is_known(share.key):
                    return Enqueued.DUPLICATE
                raise refusal
            return await self._keep(checked, chain_round, arrived)
        except StoreError as error:
            log.error("a share could not be kept", error=str(error), advice=error.advice)
            raise ShareRefused(503, "the queue cannot be written now") from error

    def _refusal(self, share: Share, chain_round: Round, arrived: float) -> ShareRefused | None:
        """Why a share cannot be taken now unless it is known already."""
        reason = self._paused_now() or self._round_paused(share.round_id)
        if reason is not None:
            return ShareRefused(503, f"shares cannot be taken now: {reason}")
        if chain_round.status is not RoundStatus.ACTIVE or self._rounds.has_unconfirmed_status(share.round_id):
            return self._not_active(share)
        other_end = self._rounds.unconfirmed_end(share.round_id)
        if other_end is not None and max(share.submit_at, arrived) > min(other_end, chain_round.vote_end_time):
            return ShareRefused(503, "shares cannot be taken now: a change of the round's end is not confirmed yet")
        if share.submit_at > chain_round.vote_end_time:
            return ShareRefused(400, "is after the round's end", field="submit_at")
        return None

    def _paused_now(self) -> str | None:
        """Why no share is taken now, judged once for all shares that come out of the checks in one turn of the loop."""
        if not self._judged:
            self._judged = True
            self._pause = self._paused()
            asyncio.get_running_loop().call_soon(self._judge_anew)
        return self._pause

    def _judge_anew(self) -> None:
        self._judged = False

    async def _keep(self, checked: CheckedShare, chain_round: Round, arrived: float) -> Enqueued:
        """Put a share on disk; the store knows whether it is there already, or its nullifier is spent."""
        share = checked.share
        # The clock may have been wrong on arrival and set right before we looked whether it is, or set wrong since: a
        # share that is due at once must not be due in years.
        now = min(arrived, self._clock.now())
        try:
            outcome = await self._store.enqueue(share, checked.nullifier, now=now)
        except StoreError:
            # what is on disk already can be told from a disk that takes nothing any more
            if await self._store.is_known(share.key):
                return Enqueued.DUPLICATE
            raise
        if outcome is Enqueued.CLOSED:
            raise _not_active()  # a host that sees more of the chain has the chain's word for it
        if outcome is Enqueued.QUEUED:
            self._wake(max(share.submit_at, now))
            if share.submit_at == chain_round.vote_end_time:
                log.warning("a share was taken that cannot count: its time is the round's end", outcome="queued")
        return outcome

    async def _came_before(self, share: Share, vote_commitment: bytes) -> bool:
        """Whether a share whose leaf cannot be checked now, and need not come any more, is known."""
        chain_round = self._rounds.get(share.round_id)
        if chain_round is None or self._trees.leaf(share.round_id, share.tree_position) is not None:
            return False
        self._refuse_foreign_choice(share, chain_round)
        kept = self._trees.unchecked_leaf(share.round_id, share.tree_position)
        if kept is None and chain_round.status in _MAY_GROW:
            return False
        return kept in {None, vote_commitment} and await self._store.is_known(share.key)

    async def _round_and_leaf(self, share: Share, vote_commitment: bytes, client: bytes | None) -> Round:
        """The share's round, once proposal, decision and vote commitment are found to be the chain's."""
        chain_round = self._known(share)
        if chain_round is None:
            chain_round = await self._hold(share, vote_commitment, client)
        self._refuse_foreign_choice(share, chain_round)
        leaf = self._trees.leaf(share.round_id, share.tree_position)
        if leaf is None and chain_round.status is not RoundStatus.ACTIVE:
            raise self._not_active(share)
        if leaf is None:
            raise ShareRefused(400, "is beyond the round's tree", field="tree_position")
        if leaf != vote_commitment:
            raise ShareRefused(400, "holds another vote commitment", field="tree_position")
        return chain_round

    def _known(self, share: Share) -> Round | None:
        """The share's round when it can be judged from what we have: no sync could change the answer."""
        chain_round = self._rounds.get(share.round_id)
        if chain_round is None:
            return None
        self._refuse_foreign_choice(share, chain_round)
        if chain_round.status in _MAY_GROW and self._trees.leaf(share.round_id, share.tree_position) is None:
            return None
        return chain_round

    async def _hold(self, share: Share, vote_commitment: bytes, client: bytes | None) -> Round:
        """Wait until the share's round and leaf are known or proven to be missing, at most HOLD_SECONDS."""
        self._refuse_when_paused(share)
        deadline = self._clock.monotonic() + HOLD_SECONDS
        self._held.take(client)
        try:
            key = ArrivalKey(share.round_id, share.tree_position, vote_commitment)
            arrival = self._first_arrivals.note(key, self._trees.arrival(), self._clock.monotonic())
            while not self._trees.lacks(share.round_id, arrival):
                left = deadline - self._clock.monotonic()
                if left <= 0 or not await self._trees.wait_next_sync(left):
                    self._refuse_when_paused(share)
                    raise ShareRefused(429, "the vote is not in a known block yet; retry later")
                chain_round = self._known(share)
                if chain_round is not None:
                    self._first_arrivals.forget(key)
                    return chain_round
                self._refuse_when_paused(share)
        finally:
            self._held.release(client)
        return self._lacking(share)

    def _lacking(self, share: Share) -> Round:
        """The round of a share whose round or leaf the chain certainly lacks.

        Raises:
            ShareRefused: 400, the chain lacks the round.
        """
        chain_round = self._rounds.get(share.round_id)
        if chain_round is None:
            raise ShareRefused(400, "no such round", field="vote_round_id")
        return chain_round

    def _refuse_when_paused(self, share: Share) -> None:
        reason = self._paused() or self._round_paused(share.round_id)
        if reason is not None:
            raise ShareRefused(503, f"shares cannot be taken now: {reason}")

    def _not_active(self, share: Share) -> ShareRefused:
        """The refusal of a share whose round is not active: final only once the round's status is confirmed."""
        if self._rounds.has_unconfirmed_status(share.round_id):
            return ShareRefused(503, "shares cannot be taken now: a change of the round's status is not confirmed yet")
        return _not_active()

    def _refuse_foreign_choice(self, share: Share, chain_round: Round) -> None:
        proposal = next((one for one in chain_round.proposals if one.id == share.proposal_id), None)
        if proposal is not None and share.vote_decision in proposal.options:
            return
        if not chain_round.proposals or self._rounds.has_unconfirmed_proposals(share.round_id):
            raise ShareRefused(429, "the round's proposals are not confirmed yet; retry later")
        if proposal is None:
            raise ShareRefused(400, "is not a proposal of the round", field="proposal_id")
        raise ShareRefused(400, "is not an option of the proposal", field="vote_decision")


def _not_active() -> ShareRefused:
    return ShareRefused(400, "the round is not active", field="vote_round_id")
