"""Claims in a backlog: own order, turns of rounds, and shares that are gone."""

from __future__ import annotations

import math

from helper.core.dispatch_order import BacklogLimits
from helper.observability.stats import Stats
from helper.reveal.dispatcher import Backlog, BacklogClaim
from helper.reveal.revealer import ProofTimes
from helper.store import blocks, shares
from helper.store.store import Store
from helper.store.table_rows import ShareRow
from tests.support.clock import FakeClock
from tests.unit.store.fixtures import NOW, OTHER_ROUND, ROUND, enqueue, enqueue_shares, make_posted_share

LATE = NOW + 60
BOTH_ROUNDS = {ROUND: math.inf, OTHER_ROUND: math.inf}


def create_backlog(store: Store, clock: FakeClock) -> Backlog:
    return Backlog(
        store=store,
        proof_times=ProofTimes(2, lambda: 1.0),
        limits=BacklogLimits(due_shares=2, overdue_seconds=2.0),
        clock=clock,
        stats=Stats(),
    )


async def enqueue_in_other_round(store: Store, *numbers: int, now: float = NOW) -> None:
    for number in numbers:
        await enqueue(store, make_posted_share(number, round_id=OTHER_ROUND), now=now)


async def claim(
    backlog: Backlog,
    limit: int,
    *,
    ends: dict[bytes, float] = BOTH_ROUNDS,
    now: float = LATE,
    first_limit: int = 0,
) -> BacklogClaim:
    claimed = await backlog.claim(ends, now=now, chain_time=now, limit=limit, first_limit=max(limit, first_limit))
    assert claimed is not None
    return claimed


def numbers_of(claimed: list[ShareRow]) -> list[int]:
    return [queued.share.tree_position - 70_000 for queued in claimed]


async def test_list_due_is_by_due_time_or_own_order_of_due_shares(store: Store) -> None:
    for number in range(40):
        await enqueue_shares(store, number, now=NOW + number)
    await enqueue_shares(store, 99, submit_at=int(NOW) + 1000)

    by_time = await store.list_due(ROUND, now=NOW + 39, limit=100, by_rank=False)
    by_rank = await store.list_due(ROUND, now=NOW + 39, limit=100, by_rank=True)

    assert [share.due_ms for share in by_time] == [int(NOW + number) * 1000 for number in range(40)]
    assert sorted(by_rank) == by_time != by_rank
    assert by_rank == sorted(by_rank, key=lambda share: (share.rank < store._first_rank, share.rank))
    assert await store.list_due(ROUND, now=NOW + 39, limit=5, by_rank=True) == by_rank[:5]
    assert await store.list_due(b"?" * 32, now=LATE, limit=5, by_rank=True) == []


async def test_claim_listed_omits_shares_that_are_gone_claimed_or_not_due(store: Store) -> None:
    for number in (1, 2, 3):
        await enqueue_shares(store, number, now=NOW + number)
    await enqueue_shares(store, 4, submit_at=int(NOW) + 50)
    ids = [share.id for share in await store.list_due(ROUND, now=LATE, limit=9, by_rank=False)]
    await store.run(blocks.add_spent, [(ROUND, make_posted_share(2).nullifier)])
    await store.run(shares.claim_listed, [ids[2]], now=NOW + 10)

    claimed = await store.run(shares.claim_listed, [ids[3], *reversed(ids[:3]), 12345], now=NOW + 10)

    assert [queued.id for queued in claimed] == ids[:1]
    assert await store.count_waiting() == {ROUND: 1}


async def test_backlog_claims_all_due_shares_in_own_order(store: Store, clock: FakeClock) -> None:
    for number in range(30):
        await enqueue_shares(store, number, now=NOW + number)
    listed = await store.list_due(ROUND, now=LATE, limit=30, by_rank=True)
    backlog = create_backlog(store, clock)

    claimed = [queued for _ in range(14) for queued, _ in (await claim(backlog, 2)).shares]

    assert [queued.id for queued in claimed] == [share.id for share in listed[:28]], "the last two are no backlog"
    assert numbers_of(claimed) != sorted(numbers_of(claimed))
    assert await backlog.claim(BOTH_ROUNDS, now=LATE, chain_time=LATE, limit=2, first_limit=2) is None


async def test_backlog_is_none_without_enough_or_late_shares(store: Store, clock: FakeClock) -> None:
    backlog = create_backlog(store, clock)
    await enqueue_shares(store, 1, 2)
    assert await backlog.claim(BOTH_ROUNDS, now=LATE, chain_time=LATE, limit=2, first_limit=2) is None
    await enqueue_shares(store, 3)
    assert await backlog.claim(BOTH_ROUNDS, now=NOW + 2, chain_time=NOW, limit=2, first_limit=2) is None
    assert len((await claim(backlog, 2, now=NOW + 2.5)).shares) == 2


async def test_backlog_of_round_at_risk_goes_first(store: Store, clock: FakeClock) -> None:
    await enqueue_shares(store, *range(40))
    await enqueue_in_other_round(store, *range(40, 80))

    claimed = await claim(create_backlog(store, clock), 6, ends={ROUND: math.inf, OTHER_ROUND: LATE + 40})

    assert [(queued.round_id, is_first) for queued, is_first in claimed.shares] == [(OTHER_ROUND, True)] * 6


async def test_share_on_time_exceeds_limit_of_a_backlog_in_another_round(store: Store, clock: FakeClock) -> None:
    await enqueue_shares(store, *range(20))
    await enqueue_in_other_round(store, 20, now=LATE - 0.5)
    await enqueue(store, make_posted_share(21, submit_at=int(LATE) + 7, round_id=OTHER_ROUND))

    claimed = await claim(create_backlog(store, clock), 0, first_limit=2)

    assert [(queued.round_id, is_first) for queued, is_first in claimed.shares] == [(OTHER_ROUND, True)]
    assert claimed.on_time == [OTHER_ROUND]
    assert await store.next_due_ms(claimed.on_time) == (int(LATE) + 7) * 1000


async def test_backlog_omits_shares_confirmed_since_they_were_listed(store: Store, clock: FakeClock) -> None:
    await enqueue_shares(store, *range(30))
    backlog = create_backlog(store, clock)
    await claim(backlog, 1)
    spent = [(ROUND, make_posted_share(number).nullifier) for number in range(25)]
    await store.run(blocks.add_spent, spent)

    claimed = await claim(backlog, 4)  # eight selections of four shares reach each of the 29, in any order

    assert claimed.shares
    assert min(numbers_of([queued for queued, _ in claimed.shares])) >= 25


async def test_shares_due_later_take_their_place_when_round_is_listed_again(store: Store, clock: FakeClock) -> None:
    await enqueue_shares(store, *range(10))
    backlog = create_backlog(store, clock)
    await claim(backlog, 1)
    await enqueue_shares(store, *range(10, 60))
    expected = await store.list_due(ROUND, now=LATE, limit=1, by_rank=True)
    clock.advance(11)

    claimed = await claim(backlog, 1)

    assert [queued.id for queued, _ in claimed.shares] == [share.id for share in expected]
