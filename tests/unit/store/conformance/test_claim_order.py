"""What is claimed, when, and in which order."""

from __future__ import annotations

import pytest

from helper.core.share import ShareState
from helper.store.store import Store
from tests.unit.store.fixtures import NOW, OTHER_ROUND, ROUND, claim, posted, put

SECOND = int(NOW) + 5


@pytest.mark.rule("R2")
async def test_immediate_shares_go_at_once_in_order_of_arrival(store: Store) -> None:
    for place, number in enumerate([5, 3, 9, 1]):
        past = 0 if number % 2 else int(NOW) - 1000
        await put(store, number, submit_at=past, now=NOW + place / 1000)

    claimed = await claim(store, now=NOW + 0.01)

    assert [queued.share.tree_position - 70_000 for queued in claimed] == [5, 3, 9, 1]


@pytest.mark.rule("R5")
async def test_shares_of_one_second_go_together_in_an_order_that_is_not_that_of_arrival(store: Store) -> None:
    await put(store, *range(64), submit_at=SECOND)

    claimed = await claim(store, now=SECOND, limit=64)

    order = [queued.share.tree_position for queued in claimed]
    assert len(order) == 64
    assert order != sorted(order)
    assert order != sorted(order, reverse=True)


@pytest.mark.rule("R4")
async def test_nothing_is_claimed_before_its_second(store: Store) -> None:
    await put(store, 1, submit_at=SECOND)

    assert await claim(store, now=SECOND - 0.001) == []
    assert await store.next_due_ms([ROUND]) == SECOND * 1000
    assert len(await claim(store, now=SECOND)) == 1
    assert await store.next_due_ms([ROUND]) is None


async def test_rounds_are_merged_by_time_and_only_those_asked_for_are_looked_at(store: Store) -> None:
    for second in range(6):
        one = posted(second, submit_at=SECOND + second, round_id=(ROUND, OTHER_ROUND)[second % 2])
        await store.enqueue(one.share, one.nullifier, now=NOW)

    assert await store.next_due_ms([OTHER_ROUND]) == (SECOND + 1) * 1000
    both = await store.claim_due(now=SECOND + 60, limit=3, rounds=[OTHER_ROUND, ROUND, b"?" * 32])
    assert [queued.share.submit_at - SECOND for queued in both] == [0, 1, 2]
    rest = await store.claim_due(now=SECOND + 60, limit=99, rounds=[OTHER_ROUND])
    assert [queued.share.submit_at - SECOND for queued in rest] == [3, 5]
    assert await store.claim_due(now=SECOND + 60, limit=99, rounds=[]) == []


async def test_a_share_is_claimed_once(store: Store) -> None:
    await put(store, *range(10))

    first, second = await claim(store, limit=6), await claim(store, limit=6)

    assert len({queued.id for queued in [*first, *second]}) == 10
    assert await claim(store) == []
    assert await store.counts() == {ROUND: {ShareState.WITNESSED: 10}}


async def test_ids_are_not_used_again(store: Store) -> None:
    await put(store, 1)
    await store.apply_block(5, [(ROUND, posted(1).nullifier)], now=NOW)

    await put(store, 2)

    assert [queued.id for queued in await claim(store)] == [2]
