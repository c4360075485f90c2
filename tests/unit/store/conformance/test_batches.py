"""Shares enqueued in one batch have the same results as one by one, with few statements."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helper.errors import StoreCorrupt, StoreError
from helper.store import blocks, shares
from helper.store.models import DamagedShare, EnqueueResult
from helper.store.rounds import mark_closed, save_rounds
from helper.store.store import Store
from helper.store.transaction import Transaction
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import StoreBackend
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.fixtures import NOW, ROUND, PostedShare, enqueue, make_posted_share

ROUNDS = 3
"""Rounds of one batch; the chain has reported only the first."""
Outcome = EnqueueResult | type[BaseException]


@dataclass(frozen=True)
class IncomingShare:
    """A share to enqueue, of one of the rounds of its batch.

    Attributes:
        round: index of the round in the batch.
        key: number that its key is made from.
        nullifier: number that its nullifier is made from.
        submit_at: due time.
        defect: none, a nullifier that the schema refuses, or an invalid position.
    """

    round: int
    key: int
    nullifier: int
    submit_at: int
    defect: str

    def to_posted(self, rounds: Sequence[bytes]) -> PostedShare:
        posted = posted_in_round(rounds[self.round], self.key).with_submit_at(self.submit_at)
        nullifier = make_posted_share(self.nullifier).nullifier
        if self.defect == "nullifier":
            return PostedShare(posted.share, nullifier[:5])
        if self.defect == "position":
            return PostedShare(replace(posted.share, tree_position=-1), nullifier)
        return PostedShare(posted.share, nullifier)


@dataclass(frozen=True)
class InitialState:
    """State of the rounds before the batch, as numbers of shares.

    Attributes:
        waiting: pending shares.
        confirmed: shares confirmed by the chain after they were stored.
        spent: shares counted by the chain but never stored.
        is_closed: whether the chain has closed the first round.
        is_damaged: whether the key of the second round is damaged.
    """

    waiting: frozenset[int]
    confirmed: frozenset[int]
    spent: frozenset[int]
    is_closed: bool
    is_damaged: bool


NUMBERS = st.integers(0, 11)
SMALL_SETS = st.frozensets(NUMBERS, max_size=3)
RARELY_TRUE = st.sampled_from([False] * 5 + [True])
DEFECTS = st.sampled_from([""] * 20 + ["nullifier", "position"])


@st.composite
def incoming_shares(draw: st.DrawFn) -> IncomingShare:
    """Most have the nullifier that belongs to their key, as all real ones do."""
    key = draw(NUMBERS)
    nullifier = draw(NUMBERS) if draw(RARELY_TRUE) else key
    times = st.sampled_from([0, int(NOW) + 1, int(NOW) + 500])
    return IncomingShare(draw(st.integers(0, ROUNDS - 1)), key, nullifier, draw(times), draw(DEFECTS))


ONE_OF_EACH_OUTCOME = [
    *(IncomingShare(0, number, number, 0, "") for number in range(1, 6)),
    IncomingShare(0, 4, 4, int(NOW) + 1, ""),
    IncomingShare(1, 1, 1, 0, ""),
    IncomingShare(2, 1, 1, 0, ""),
    IncomingShare(2, 2, 2, 0, "nullifier"),
    IncomingShare(2, 3, 3, 0, "position"),
    IncomingShare(2, 4, 4, 0, ""),
    IncomingShare(2, 5, 4, 0, ""),
    IncomingShare(2, 4, 6, 0, ""),
    IncomingShare(2, 7, 7, int(NOW) + 500, ""),
    IncomingShare(2, 7, 7, 0, ""),
]
"""One share of each kind."""


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner_:
        yield runner_


@pytest.mark.rule("R10")
def test_enqueue_batch_gives_same_outcomes_as_one_by_one(
    runner: asyncio.Runner, backend: StoreBackend, clock: FakeClock, reported: list[DamagedShare]
) -> None:
    store = backend.create_store(clock)
    runner.run(store.open())
    runner.run(backend.prepare_store(store))
    number = count()
    outcomes: set[Outcome] = set()
    examples = 8 if backend.locator[0] == "postgres" else 60  # each write to PostgreSQL costs a network round trip

    @example(
        ONE_OF_EACH_OUTCOME,
        InitialState(frozenset({1}), frozenset({2}), frozenset({3}), is_closed=True, is_damaged=True),
    )
    @example(
        [IncomingShare(0, 8, 0, int(NOW) + 500, ""), IncomingShare(0, 8, 8, 0, "")],
        InitialState(frozenset(), frozenset(), frozenset({8}), is_closed=False, is_damaged=False),
    )
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(incoming_shares(), max_size=24),
        st.builds(InitialState, SMALL_SETS, SMALL_SETS, SMALL_SETS, RARELY_TRUE, RARELY_TRUE),
    )
    def compare(batch: list[IncomingShare], before: InitialState) -> None:
        groups = [
            [bytes([group, backend]) + next(number).to_bytes(30) for backend in range(ROUNDS)] for group in range(2)
        ]
        for rounds in groups:
            runner.run(prepare_rounds(store, rounds, before))
        one_by_one = runner.run(enqueue_one_by_one(store, [request.to_posted(groups[0]) for request in batch]))
        writes = backend.count_writes()
        together = runner.run(enqueue_together(store, [request.to_posted(groups[1]) for request in batch]))

        assert together == one_by_one
        if batch and set(together) <= set(EnqueueResult):
            assert backend.count_writes() == writes + 1
        claims = [runner.run(claim_waiting(store, rounds, before)) for rounds in groups]
        assert claims[1] == claims[0]
        counts = runner.run(store.count_shares())
        assert [counts.get(round_id) for round_id in groups[1]] == [counts.get(round_id) for round_id in groups[0]]
        outcomes.update(together)

    try:
        compare()
    finally:
        runner.run(store.close())

    ends: set[Outcome] = {*EnqueueResult, struct.error, StoreError, StoreCorrupt}
    assert outcomes >= ends
    assert reported == []


async def prepare_rounds(store: Store, rounds: Sequence[bytes], before: InitialState) -> None:
    """Bring the rounds of a batch to their initial state."""
    round_id = rounds[0]
    await store.run(save_rounds, [make_stored_round(round_id)], NOW)
    await enqueue_together(store, [posted_in_round(round_id, number) for number in before.waiting | before.confirmed])
    await store.run(
        blocks.add_spent,
        [(round_id, make_posted_share(number).nullifier) for number in before.confirmed | before.spent],
    )
    if before.is_closed:
        await store.run(mark_closed, round_id, NOW)
    if before.is_damaged:
        await store._writer.run(partial(add_damaged_round, round_id=rounds[1]))


def posted_in_round(round_id: bytes, number: int) -> PostedShare:
    """Return share `number`, which differs between rounds only in its round id."""
    posted = make_posted_share(number)
    return PostedShare(replace(posted.share, round_id=round_id), posted.nullifier)


def add_damaged_round(tx: Transaction, round_id: bytes) -> None:
    """Insert a round key whose check does not match."""
    (last,) = tx.fetch_one("last_round_no") or (0,)
    tx.execute("add_round_key", (last + 1, round_id, b"k" * 32, bytes(8)))


async def claim_waiting(store: Store, rounds: Sequence[bytes], before: InitialState) -> set[tuple[object, ...]]:
    """Claim the pending shares, without ids and ranks, which differ; round ids are replaced with indexes."""
    intact_rounds = [round_id for round_id in rounds if not (before.is_damaged and round_id == rounds[1])]
    claimed = await store.run(shares.claim_due, now=NOW + 1000, limit=1000, rounds=intact_rounds)
    return {
        (
            rounds.index(queued.round_id),
            replace(queued.share, round_id=ROUND),
            queued.nullifier,
            (queued.due_ms, queued.first_due_ms),
            (queued.attempts, queued.crashes, queued.proved_height),
        )
        for queued in claimed
    }


async def enqueue_one_by_one(store: Store, batch: Sequence[PostedShare]) -> list[Outcome]:
    return [outcome for posted in batch for outcome in await enqueue_together(store, [posted])]


async def enqueue_together(store: Store, batch: Sequence[PostedShare]) -> list[Outcome]:
    calls = (enqueue(store, posted) for posted in batch)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    return [type(outcome) if isinstance(outcome, BaseException) else outcome for outcome in outcomes]
