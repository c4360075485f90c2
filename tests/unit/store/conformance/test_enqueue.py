"""Enqueue: stored data, duplicates, and one fsync for many shares."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.store.models import EnqueueResult
from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import Reopen, StoreBackend
from tests.unit.store.conformance.test_chain_data import ChainRound
from tests.unit.store.conformance.test_transitions import create_share_in_state
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    make_posted_share,
)


@pytest.mark.rule("R1")
async def test_claim_due_returns_all_fields_of_enqueued_share(store: Store) -> None:
    posted = make_posted_share(5, submit_at=int(NOW) + 100)

    assert await store.enqueue(posted.share, posted.nullifier, now=NOW) is EnqueueResult.QUEUED

    assert await claim_all_due(store, now=NOW + 99.9) == []
    (queued,) = await claim_all_due(store, now=NOW + 100)
    assert queued.share == posted.share
    assert queued.nullifier == posted.nullifier
    assert queued.state is ShareState.WITNESSED
    assert queued.due_ms == (int(NOW) + 100) * 1000
    assert (queued.attempts, queued.crashes, queued.proved_height) == (0, 0, None)


async def test_claim_due_returns_extra_fields_of_share(store: Store) -> None:
    posted = make_posted_share(5)
    share = replace(posted.share, kind="hidden-choice", extra=bytes(range(256)) * 2)

    await store.enqueue(share, posted.nullifier, now=NOW)

    (queued,) = await claim_all_due(store)
    assert queued.share == share


@pytest.mark.rule("R10")
async def test_enqueue_same_share_later_changes_nothing(store: Store, backend: StoreBackend) -> None:
    posted = make_posted_share(1, submit_at=int(NOW) + 60)
    await store.enqueue(posted.share, posted.nullifier, now=NOW)
    before = backend.query_rows("SELECT * FROM shares")
    for again_at in (int(NOW) + 60, int(NOW) + 500):
        outcome = await store.enqueue(posted.with_submit_at(again_at).share, posted.nullifier, now=NOW + 1)
        assert outcome is EnqueueResult.DUPLICATE
        assert backend.query_rows("SELECT * FROM shares") == before
        assert await store.is_known(posted.share.key)


@pytest.mark.rule("R10")
async def test_enqueue_known_share_in_every_state_is_duplicate(store: Store) -> None:
    for number, state in enumerate(ShareState, start=1):
        await create_share_in_state(store, state, number)
    counts = await store.count_shares()
    assert counts == {ROUND: dict.fromkeys(ShareState, 1)}
    for number in range(1, len(ShareState) + 1):
        posted = make_posted_share(number)
        outcome = await store.enqueue(posted.with_submit_at(0).share, posted.nullifier, now=NOW)
        assert outcome is EnqueueResult.DUPLICATE
        assert await store.count_shares() == counts
        assert await store.is_known(posted.share.key)


@pytest.mark.rule("R10", "W6")
@pytest.mark.parametrize("again_at", [0, int(NOW) + 5])
async def test_enqueue_waiting_share_with_earlier_time_moves_it_up(
    reopen: Reopen, store: Store, backend: StoreBackend, again_at: int
) -> None:
    first, other = make_posted_share(1, submit_at=int(NOW) + 3600), make_posted_share(2, submit_at=int(NOW) + 3600)
    for posted in (first, other):
        await store.enqueue(posted.share, posted.nullifier, now=NOW)

    again = first.with_submit_at(again_at)
    assert await store.enqueue(again.share, again.nullifier, now=NOW + 1) is EnqueueResult.MOVED_UP
    assert await store.enqueue(first.share, first.nullifier, now=NOW + 2) is EnqueueResult.DUPLICATE
    assert await store.enqueue(again.share, again.nullifier, now=NOW + 2) is EnqueueResult.DUPLICATE

    assert await store.count_shares() == {ROUND: {ShareState.RECEIVED: 2}}
    await store.close()
    store = await reopen()
    due = max(again_at, NOW + 1)
    assert await claim_all_due(store, now=due - 0.1) == []
    (queued,) = await claim_all_due(store, now=due)
    assert (queued.share, queued.nullifier, queued.due_ms) == (again.share, first.nullifier, due * 1000)


@pytest.mark.rule("R10", "W6")
async def test_enqueue_same_share_in_one_batch_takes_earliest_time(store: Store) -> None:
    times = (3600, 60, 600, 0, 3600)
    posts = [make_posted_share(1, submit_at=int(NOW) + seconds) for seconds in times]

    outcomes = await asyncio.gather(*(store.enqueue(each.share, each.nullifier, now=NOW) for each in posts))

    moved, known = EnqueueResult.MOVED_UP, EnqueueResult.DUPLICATE
    assert outcomes == [EnqueueResult.QUEUED, moved, known, moved, known]
    (queued,) = await claim_all_due(store, now=NOW)
    assert queued.share == posts[3].share


@pytest.mark.rule("R10")
async def test_enqueue_earlier_time_does_not_shorten_a_retry(store: Store, backend: StoreBackend) -> None:
    posted = make_posted_share(1, submit_at=int(NOW) + 60)
    await store.enqueue(posted.share, posted.nullifier, now=NOW)
    (queued,) = await claim_all_due(store, now=NOW + 60)
    await store.retry(queued.id, due_ms=int(NOW + 600) * 1000, stage="proof", note="no")
    before = backend.query_rows("SELECT * FROM shares")

    again = posted.with_submit_at(0)
    assert await store.enqueue(again.share, again.nullifier, now=NOW + 61) is EnqueueResult.DUPLICATE

    assert backend.query_rows("SELECT * FROM shares") == before


async def test_enqueue_unknown_share_with_spent_nullifier_is_duplicate(store: Store) -> None:
    posted = make_posted_share(1)
    await store.save_rounds([ChainRound()], NOW)
    await store.apply_blocks([(7, 7)], [(ROUND, posted.nullifier)], now=NOW)

    assert await store.enqueue(posted.share, posted.nullifier, now=NOW) is EnqueueResult.DUPLICATE

    assert await store.count_shares() == {}
    assert not await store.is_known(posted.share.key)
    assert await store.is_spent(ROUND, posted.nullifier)
    assert not await store.is_spent(OTHER_ROUND, posted.nullifier)


async def test_enqueue_concurrent_shares_use_one_commit_and_survive_reopen(
    reopen: Reopen, store: Store, backend: StoreBackend, clock: FakeClock
) -> None:
    numbers = range(512)
    before = store.stats.commits

    outcomes = await asyncio.gather(
        *(store.enqueue(make_posted_share(n).share, make_posted_share(n).nullifier, now=NOW) for n in numbers)
    )

    assert set(outcomes) == {EnqueueResult.QUEUED}
    assert store.stats.commits - before == 1
    await store.close()
    reopened = await reopen()
    assert await reopened.count_shares() == {ROUND: {ShareState.RECEIVED: 512}}


async def test_enqueue_known_share_waits_for_a_sync_like_a_new_one(store: Store, backend: StoreBackend) -> None:
    posted = make_posted_share(1)
    await store.enqueue(posted.share, posted.nullifier, now=NOW)
    before = backend.read_synced_log()

    assert await store.enqueue(posted.share, posted.nullifier, now=NOW) is EnqueueResult.DUPLICATE

    assert backend.read_synced_log() != before


async def test_enqueue_with_cancelled_caller_still_stores_share(store: Store) -> None:
    posted = make_posted_share(1)
    task = asyncio.create_task(store.enqueue(posted.share, posted.nullifier, now=NOW))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert await store.enqueue(posted.share, posted.nullifier, now=NOW) is EnqueueResult.DUPLICATE


CHILD_SCRIPT = """
import asyncio, sys
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import parse_locator
from tests.unit.store.fixtures import NOW, make_posted_share

async def main() -> None:
    store = parse_locator(sys.argv[1:]).create_store(FakeClock(), print)
    await store.open()

    async def one(number: int) -> None:
        await store.enqueue(make_posted_share(number).share, make_posted_share(number).nullifier, now=NOW)
        print(number, flush=True)

    await asyncio.gather(*(one(number) for number in range(4_000)))

asyncio.run(main())
"""


async def test_enqueue_acknowledged_shares_survive_sigkill(
    reopen: Reopen, backend: StoreBackend, clock: FakeClock
) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD_SCRIPT,
        *backend.locator,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    assert child.stdout is not None
    acknowledged = [int(await child.stdout.readline()) for _ in range(700)]
    os.kill(child.pid, signal.SIGKILL)
    remaining = (await child.stdout.read()).splitlines(keepends=True)
    acknowledged += [int(line) for line in remaining if line.endswith(b"\n")]
    await child.wait()

    store = await reopen()

    lost = [number for number in acknowledged if not await store.is_known(make_posted_share(number).share.key)]
    assert len(acknowledged) >= 700
    assert lost == []
    await store.close()
