"""Taking shares in: what is kept, what is a duplicate, and that one fsync serves many."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from helper.core.share import ShareState
from helper.store.rows import Enqueued
from helper.store.store import Store
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import Place, Reopen
from tests.unit.store.fixtures import NOW, OTHER_ROUND, ROUND, broadcast_one, claim, posted, put


@pytest.mark.rule("R1")
async def test_all_that_was_posted_comes_back_when_it_is_due(store: Store) -> None:
    one = posted(5, submit_at=int(NOW) + 100)

    assert await store.enqueue(one.share, one.nullifier, now=NOW) is Enqueued.QUEUED

    assert await claim(store, now=NOW + 99.9) == []
    (queued,) = await claim(store, now=NOW + 100)
    assert queued.share == one.share
    assert queued.nullifier == one.nullifier
    assert queued.state is ShareState.WITNESSED
    assert queued.due_ms == (int(NOW) + 100) * 1000
    assert (queued.attempts, queued.crashes, queued.proved_height) == (0, 0, None)


@pytest.mark.rule("R10")
@pytest.mark.parametrize("again_at", [0, int(NOW) + 5, int(NOW) + 500])
async def test_the_same_share_again_changes_nothing(store: Store, place: Place, again_at: int) -> None:
    one = posted(1, submit_at=int(NOW) + 60)
    await store.enqueue(one.share, one.nullifier, now=NOW)
    before = place.rows("SELECT * FROM shares")

    outcome = await store.enqueue(one.at(again_at).share, one.nullifier, now=NOW + 1)

    assert outcome is Enqueued.DUPLICATE
    assert place.rows("SELECT * FROM shares") == before
    assert await store.is_known(one.share.key)


@pytest.mark.rule("R10")
@pytest.mark.parametrize("state", [ShareState.WITNESSED, ShareState.BROADCAST, ShareState.FAILED, ShareState.SUBMITTED])
async def test_it_is_a_duplicate_in_every_state(store: Store, state: ShareState) -> None:
    one = posted(1)
    await put(store, 1)
    if state is ShareState.WITNESSED:
        await claim(store)
    elif state is ShareState.FAILED:
        await store.fail(1, stage="proof", note="no", spend_attempt=True)
    elif state is ShareState.BROADCAST:
        await broadcast_one(store, 1)
    else:
        await store.apply_block(7, [(ROUND, one.nullifier)], now=NOW)
    counts = await store.counts()

    assert await store.enqueue(one.at(0).share, one.nullifier, now=NOW) is Enqueued.DUPLICATE

    assert counts == {ROUND: {state: 1}}
    assert await store.counts() == counts
    assert await store.is_known(one.share.key)


async def test_a_spent_nullifier_of_an_unknown_share_is_a_duplicate_and_stores_nothing(store: Store) -> None:
    one = posted(1)
    await store.apply_block(7, [(ROUND, one.nullifier)], now=NOW)

    assert await store.enqueue(one.share, one.nullifier, now=NOW) is Enqueued.DUPLICATE

    assert await store.counts() == {}
    assert not await store.is_known(one.share.key)
    assert await store.is_spent(ROUND, one.nullifier)
    assert not await store.is_spent(OTHER_ROUND, one.nullifier)


async def test_the_same_key_in_another_round_is_another_share(store: Store) -> None:
    here, there = posted(1), posted(1, round_id=OTHER_ROUND)

    assert await store.enqueue(here.share, here.nullifier, now=NOW) is Enqueued.QUEUED
    assert not await store.is_known(there.share.key)
    assert await store.enqueue(there.share, there.nullifier, now=NOW) is Enqueued.QUEUED


async def test_many_at_once_share_a_commit_and_stay_when_the_file_is_opened_again(
    reopen: Reopen, store: Store, place: Place, clock: FakeClock
) -> None:
    numbers = range(512)
    before = store.stats.commits

    outcomes = await asyncio.gather(*(store.enqueue(posted(n).share, posted(n).nullifier, now=NOW) for n in numbers))

    assert set(outcomes) == {Enqueued.QUEUED}
    assert store.stats.commits - before == 1
    await store.close()
    again = await reopen()
    assert await again.counts() == {ROUND: {ShareState.RECEIVED: 512}}


async def test_of_the_same_share_posted_many_times_at_once_one_is_queued(store: Store) -> None:
    one = posted(1)

    outcomes = await asyncio.gather(*(store.enqueue(one.share, one.nullifier, now=NOW) for _ in range(64)))

    assert sorted(outcome.name for outcome in outcomes) == ["DUPLICATE"] * 63 + ["QUEUED"]


async def test_a_cancelled_caller_does_not_undo_the_share(store: Store) -> None:
    one = posted(1)
    task = asyncio.create_task(store.enqueue(one.share, one.nullifier, now=NOW))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    assert await store.enqueue(one.share, one.nullifier, now=NOW) is Enqueued.DUPLICATE


CHILD = """
import asyncio, sys
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import place_of
from tests.unit.store.fixtures import NOW, posted

async def main() -> None:
    store = place_of(sys.argv[1:]).store(FakeClock(), print)
    await store.open()

    async def one(number: int) -> None:
        await store.enqueue(posted(number).share, posted(number).nullifier, now=NOW)
        print(number, flush=True)

    await asyncio.gather(*(one(number) for number in range(4_000)))

asyncio.run(main())
"""


async def test_what_was_answered_survives_sigkill(reopen: Reopen, place: Place, clock: FakeClock) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, *place.in_words, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[4]
    )
    assert child.stdout is not None
    answered = [int(await child.stdout.readline()) for _ in range(700)]
    os.kill(child.pid, signal.SIGKILL)
    answered += [int(line) for line in (await child.stdout.read()).splitlines(keepends=True) if line.endswith(b"\n")]
    await child.wait()

    store = await reopen()

    lost = [number for number in answered if not await store.is_known(posted(number).share.key)]
    assert len(answered) >= 700
    assert lost == []
    await store.close()
