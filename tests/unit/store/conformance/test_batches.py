"""Shares that come together become what they would one after the other, and take few statements."""

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
from helper.store.rows import DamagedShare, Enqueued
from helper.store.store import Store
from helper.store.transaction import Transaction
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import Place
from tests.unit.store.conformance.test_chain_facts import ToldRound
from tests.unit.store.fixtures import NOW, ROUND, Posted, posted

ROUNDS = 3
"""Rounds of one batch; the chain has told of the first only."""
Outcome = Enqueued | type[BaseException]


@dataclass(frozen=True)
class Comer:
    """A share that comes, of one of the rounds of its batch.

    Attributes:
        round: its number in the batch.
        key: the number that its key is made from.
        nullifier: the number that its nullifier is made from.
        submit_at: its time.
        wrong: what is wrong with it: nothing, a nullifier that the schema refuses, a position that has no name.
    """

    round: int
    key: int
    nullifier: int
    submit_at: int
    wrong: str

    def of(self, rounds: Sequence[bytes]) -> Posted:
        """It, as a wallet posted it."""
        one = of_round(rounds[self.round], self.key).at(self.submit_at)
        nullifier = posted(self.nullifier).nullifier
        if self.wrong == "nullifier":
            return Posted(one.share, nullifier[:5])
        if self.wrong == "position":
            return Posted(replace(one.share, tree_position=-1), nullifier)
        return Posted(one.share, nullifier)


@dataclass(frozen=True)
class Before:
    """What there was before a batch, of the rounds of it: numbers of shares.

    Attributes:
        kept: waiting.
        counted: counted by the chain after they were kept.
        spent: counted by the chain, and never kept.
        closed: the first round was closed by the chain's word.
        damaged: the key of the second round is not what it was.
    """

    kept: frozenset[int]
    counted: frozenset[int]
    spent: frozenset[int]
    closed: bool
    damaged: bool


NUMBERS = st.integers(0, 11)
FEW = st.frozensets(NUMBERS, max_size=3)
SELDOM = st.sampled_from([False] * 5 + [True])
RIGHT_OR_WRONG = st.sampled_from([""] * 20 + ["nullifier", "position"])


@st.composite
def comers(draw: st.DrawFn) -> Comer:
    """Most have the nullifier that belongs to their key, as all real ones do."""
    key = draw(NUMBERS)
    nullifier = draw(NUMBERS) if draw(SELDOM) else key
    times = st.sampled_from([0, int(NOW) + 1, int(NOW) + 500])
    return Comer(draw(st.integers(0, ROUNDS - 1)), key, nullifier, draw(times), draw(RIGHT_OR_WRONG))


EACH_END = [
    *(Comer(0, number, number, 0, "") for number in range(1, 6)),
    Comer(0, 4, 4, int(NOW) + 1, ""),
    Comer(1, 1, 1, 0, ""),
    Comer(2, 1, 1, 0, ""),
    Comer(2, 2, 2, 0, "nullifier"),
    Comer(2, 3, 3, 0, "position"),
    Comer(2, 4, 4, 0, ""),
    Comer(2, 5, 4, 0, ""),
    Comer(2, 4, 6, 0, ""),
]
"""One of each kind."""


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.mark.rule("R10")
def test_of_shares_that_come_together_becomes_what_would_one_after_the_other(
    runner: asyncio.Runner, place: Place, clock: FakeClock, reported: list[DamagedShare]
) -> None:
    store = place.store(clock, reported.append)
    runner.run(store.open())
    runner.run(place.begin(store))
    number = count()
    seen: set[Outcome] = set()

    @example(EACH_END, Before(frozenset({1}), frozenset({2}), frozenset({3}), closed=True, damaged=True))
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(comers(), max_size=24), st.builds(Before, FEW, FEW, FEW, SELDOM, SELDOM))
    def compare(batch: list[Comer], before: Before) -> None:
        ways = [[bytes([way, place]) + next(number).to_bytes(30) for place in range(ROUNDS)] for way in range(2)]
        for rounds in ways:
            runner.run(prepare(store, rounds, before))
        one_by_one = runner.run(each(store, [one.of(ways[0]) for one in batch]))
        commits = store.stats.commits
        together = runner.run(at_once(store, [one.of(ways[1]) for one in batch]))

        assert together == one_by_one
        if batch and set(together) <= set(Enqueued):
            assert store.stats.commits == commits + 1
        kept = [runner.run(waiting(store, rounds, before)) for rounds in ways]
        assert kept[1] == kept[0]
        counts = runner.run(store.counts())
        assert [counts.get(round_id) for round_id in ways[1]] == [counts.get(round_id) for round_id in ways[0]]
        seen.update(together)

    try:
        compare()
    finally:
        runner.run(store.close())

    ends: set[Outcome] = {*Enqueued, struct.error, StoreError, StoreCorrupt}
    assert ends - seen == (set() if closes(place) else {Enqueued.CLOSED})
    assert reported == []


def closes(place: Place) -> bool:
    """Whether another host may close a round."""
    return place.in_words[0] == "postgres"


async def prepare(store: Store, rounds: Sequence[bytes], before: Before) -> None:
    """Bring the rounds of a batch to where they stand before it."""
    told = rounds[0]
    await store.save_rounds([ToldRound(told)], NOW)
    await at_once(store, [of_round(told, number) for number in before.kept | before.counted])
    await store.add_spent([(told, posted(number).nullifier) for number in before.counted | before.spent])
    if before.closed:
        await store.mark_closed(told, NOW)
    if before.damaged:
        await store._writer.run(partial(add_damaged_round, round_id=rounds[1]))


def of_round(round_id: bytes, number: int) -> Posted:
    """The share with this number: the same in every round, but for the round's name."""
    one = posted(number)
    return Posted(replace(one.share, round_id=round_id), one.nullifier)


def add_damaged_round(tx: Transaction, round_id: bytes) -> None:
    """Put in the key of a round with a check that does not belong to it."""
    (last,) = tx.one("last_round_no") or (0,)
    tx.run("add_round_key", (last + 1, round_id, b"k" * 32, bytes(8)))


async def waiting(store: Store, rounds: Sequence[bytes], before: Before) -> set[tuple[object, ...]]:
    """What is kept and waits, but for the names of the rounds."""
    sound = [round_id for round_id in rounds if not (before.damaged and round_id == rounds[1])]
    claimed = await store.claim_due(now=NOW + 1000, limit=1000, rounds=sound)
    return {
        (rounds.index(one.share.round_id), replace(one, id=0, share=replace(one.share, round_id=ROUND)))
        for one in claimed
    }


async def each(store: Store, batch: Sequence[Posted]) -> list[Outcome]:
    """What becomes of shares that come one after the other."""
    return [outcome for one in batch for outcome in await at_once(store, [one])]


async def at_once(store: Store, batch: Sequence[Posted]) -> list[Outcome]:
    """What becomes of shares that come together."""
    coming = (store.enqueue(one.share, one.nullifier, now=NOW) for one in batch)
    outcomes = await asyncio.gather(*coming, return_exceptions=True)
    return [type(one) if isinstance(one, BaseException) else one for one in outcomes]
