"""Every legal move works, every other is refused, by the code and by the schema; and the documents say the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import product

import pytest

from helper.core.share import TRANSITIONS, ShareState
from helper.errors import StoreError
from helper.store.rows import QueueFilter
from helper.store.store import Store
from tests.unit.store.conformance.backends import Place, Reopen
from tests.unit.store.fixtures import NOW, ROUND, claim, operator_retry, posted, put, reveal

LATER = int(NOW + 50) * 1000
LIVE = [state for state in ShareState if state is not ShareState.SUBMITTED]
Act = Callable[[Store], Awaitable[object]]

MOVES: dict[str, tuple[Act, set[ShareState], ShareState]] = {
    "requeue": (
        lambda store: store.requeue(1, due_ms=LATER, stage="tree", note="no root yet"),
        {ShareState.WITNESSED, ShareState.BROADCAST},
        ShareState.RECEIVED,
    ),
    "record_crash": (
        lambda store: store.record_crash(1, due_ms=LATER, note="killed"),
        {ShareState.WITNESSED},
        ShareState.RECEIVED,
    ),
    "retry": (
        lambda store: store.retry(1, due_ms=LATER, stage="proof", note="failed"),
        {ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST},
        ShareState.RECEIVED,
    ),
    "fail": (
        lambda store: store.fail(1, stage="proof", note="for good", spend_attempt=True),
        {ShareState.RECEIVED, ShareState.WITNESSED, ShareState.BROADCAST},
        ShareState.FAILED,
    ),
    "prepare": (lambda store: store.prepare(1, reveal(1)), {ShareState.WITNESSED}, ShareState.BROADCAST),
}


async def bring_to(store: Store, state: ShareState) -> None:
    """Share 1, in this state."""
    await put(store, 1)
    if state is ShareState.FAILED:
        await store.fail(1, stage="proof", note="no", spend_attempt=False)
    elif state is not ShareState.RECEIVED:
        await claim(store)
    if state is ShareState.BROADCAST:
        await store.prepare(1, reveal(1))


async def state_of(store: Store) -> ShareState:
    (entry,) = await store.list_shares(QueueFilter(), 10)
    return entry.state


@pytest.mark.parametrize(("name", "state"), list(product(MOVES, LIVE)))
async def test_a_move_is_made_from_its_sources_and_refused_from_all_others(
    store: Store, name: str, state: ShareState
) -> None:
    act, legal, target = MOVES[name]
    await bring_to(store, state)

    if state in legal:
        assert await act(store)
        assert await state_of(store) is target
        assert await store.counts() == {ROUND: {target: 1}}
    else:
        with pytest.raises(StoreError, match=f"{state.name} cannot become {target.name}"):
            await act(store)
        assert await state_of(store) is state
        assert await store.counts() == {ROUND: {state: 1}}


@pytest.mark.parametrize("name", MOVES)
async def test_a_confirmed_share_is_no_error_and_is_not_touched(store: Store, name: str) -> None:
    await bring_to(store, ShareState.WITNESSED)
    await store.apply_block(5, [(ROUND, posted(1).nullifier)], now=NOW)

    assert not await MOVES[name][0](store)

    assert await store.counts() == {ROUND: {ShareState.SUBMITTED: 1}}


@pytest.mark.parametrize("name", sorted(MOVES))
async def test_a_move_that_comes_after_the_round_was_closed_is_told_that_nothing_is_left_to_do(
    store: Store, name: str
) -> None:
    await bring_to(store, ShareState.WITNESSED)
    await store.fail_unspent(ROUND, note="the round closed")
    before = await store.list_shares(QueueFilter(), 10)

    assert not await MOVES[name][0](store)
    assert await store.list_shares(QueueFilter(), 10) == before
    assert await operator_retry(store, 1), "an operator may still have it tried"
    assert await state_of(store) is ShareState.RECEIVED


@pytest.mark.rule("R12")
@pytest.mark.parametrize("state", LIVE)
async def test_a_spent_nullifier_is_success_from_every_state(store: Store, state: ShareState) -> None:
    await bring_to(store, state)

    assert await store.apply_block(5, [(ROUND, posted(1).nullifier)], now=NOW) == [1]

    assert await store.counts() == {ROUND: {ShareState.SUBMITTED: 1}}
    assert await claim(store) == []
    assert await store.unconfirmed() == []


def test_the_moves_of_the_code_are_the_table() -> None:
    made: dict[ShareState, set[ShareState]] = {state: set() for state in ShareState}
    for _, legal, target in MOVES.values():
        for state in legal - {target}:
            made[state].add(target)
    made[ShareState.RECEIVED].add(ShareState.WITNESSED)  # claim_due
    for state in LIVE:
        made[state].add(ShareState.SUBMITTED)  # apply_block
    made[ShareState.FAILED].add(ShareState.RECEIVED)  # retry_failed

    assert made == {state: set(targets) for state, targets in TRANSITIONS.items()}


@pytest.mark.rule("R11")
async def test_attempts_are_counted_across_restarts_and_outages_cost_none(
    reopen: Reopen, store: Store, place: Place
) -> None:
    await put(store, 1)
    for attempt in range(1, 4):
        (queued,) = await claim(store, now=NOW + 100)
        await store.requeue(queued.id, stage="outage", note="no node")
        (queued,) = await claim(store, now=NOW + 100)
        assert queued.attempts == attempt - 1
        assert await store.retry(queued.id, due_ms=LATER, stage="proof", note=f"failure {attempt}") == attempt
        assert await claim(store, now=NOW + 49) == [], "the next time is on disk before it is waited for"
    await store.close()

    again = await reopen()
    (queued,) = await claim(again, now=NOW + 50)
    assert queued.attempts == 3


async def test_two_crashes_are_counted_apart_from_attempts(store: Store) -> None:
    await put(store, 1)
    for crashes in (1, 2):
        (queued,) = await claim(store)
        assert await store.record_crash(queued.id, due_ms=queued.due_ms, note="out of memory") == crashes
    (queued,) = await claim(store)
    assert (queued.attempts, queued.crashes) == (0, 2)


@pytest.mark.rule("R9", "R6")
async def test_on_start_the_witnessed_go_back_to_their_own_time_and_the_sent_stay(
    reopen: Reopen, store: Store, place: Place
) -> None:
    await put(store, 1, submit_at=int(NOW) + 3)
    await put(store, 2)
    first, second = await claim(store)
    await store.prepare(first.id, reveal(2))
    await store.close()

    again = await reopen()
    assert await again.recover() == 1
    assert await again.recover() == 0
    assert await again.counts() == {ROUND: {ShareState.RECEIVED: 1, ShareState.BROADCAST: 1}}
    assert await again.next_due_ms([ROUND]) == (int(NOW) + 3) * 1000 == second.due_ms
    (sent,) = await again.unconfirmed()
    assert sent.prepared == reveal(2)


async def test_release_puts_back_what_is_in_hand_and_leaves_all_else(store: Store) -> None:
    await bring_to(store, ShareState.WITNESSED)

    assert await store.release_claim(1)
    assert await state_of(store) is ShareState.RECEIVED
    assert not await store.release_claim(1)
    assert not await store.release_claim(99)


@pytest.mark.rule("R15")
async def test_a_failed_share_keeps_its_witness_and_its_reason_and_can_be_asked_for_again(
    store: Store, place: Place
) -> None:
    await bring_to(store, ShareState.WITNESSED)
    await store.fail(1, stage="broadcast", note="invalid field", spend_attempt=True)

    (entry,) = await store.list_shares(QueueFilter(state=ShareState.FAILED), 10)
    assert (entry.stage, entry.note, entry.attempts) == ("broadcast", "invalid field", 1)

    assert await operator_retry(store, 1)
    (queued,) = await claim(store)
    assert queued.share == posted(1).share
    assert queued.attempts == 0


async def test_a_message_of_old_is_gone_when_its_share_is_proven_anew(store: Store, place: Place) -> None:
    await bring_to(store, ShareState.BROADCAST)
    await store.requeue(1, stage="broadcast", note="not counted")
    assert place.rows("SELECT * FROM reveals") == []

    (queued,) = await claim(store)
    assert queued.proved_height == reveal(1).height
    assert await store.prepare(1, reveal(2))
    (sent,) = await store.unconfirmed()
    assert sent.prepared == reveal(2)
    assert sent.sends == 0
    assert not sent.first_try
    assert not sent.first_message
