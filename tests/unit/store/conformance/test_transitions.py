"""Legal transitions work; code and schema refuse all others; the documents agree."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from itertools import product

import psycopg
import pytest

from helper.core.share import TRANSITIONS, ShareState
from helper.errors import StoreError
from helper.store import messages, rounds, shares
from helper.store.models import QueueFilter
from helper.store.store import Store
from tests.unit.store.conformance.backends import Reopen, StoreBackend
from tests.unit.store.fixtures import (
    NOW,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue_shares,
    make_reveal,
    retry_as_operator,
    without_sends,
)

REFUSED = (sqlite3.IntegrityError, psycopg.errors.IntegrityError)
LATER_MS = int(NOW + 50) * 1000
LIVE_STATES = [state for state in ShareState if state is not ShareState.CONFIRMED]
TransitionCall = Callable[[Store, int], Awaitable[object]]

TRANSITION_CASES: dict[str, tuple[TransitionCall, set[ShareState], ShareState]] = {
    "requeue": (
        lambda store, share: store.run(shares.requeue, share, due_ms=LATER_MS, stage="tree", note="no root yet"),
        {ShareState.PROVING, ShareState.SENT},
        ShareState.WAITING,
    ),
    "record_crash": (
        lambda store, share: store.run(shares.record_crash, share, due_ms=LATER_MS, note="killed"),
        {ShareState.PROVING},
        ShareState.WAITING,
    ),
    "retry": (
        lambda store, share: store.run(shares.retry, share, due_ms=LATER_MS, stage="proof", note="failed"),
        {ShareState.WAITING, ShareState.PROVING, ShareState.SENT},
        ShareState.WAITING,
    ),
    "fail": (
        lambda store, share: store.run(shares.fail, share, stage="proof", note="for good"),
        {ShareState.WAITING, ShareState.PROVING, ShareState.SENT},
        ShareState.FAILED,
    ),
    "prepare": (
        lambda store, share: store.run(messages.prepare, share, make_reveal(share)),
        {ShareState.PROVING},
        ShareState.SENT,
    ),
}


async def create_share_in_state(store: Store, state: ShareState, number: int = 1) -> None:
    """Bring the share with this number and id to this state."""
    await enqueue_shares(store, number)
    if state is ShareState.FAILED:
        await store.run(shares.fail, number, stage="proof", note="no")
    elif state is not ShareState.WAITING:
        assert len(await store.run(shares.claim_listed, [number], now=NOW)) == 1
    if state is ShareState.SENT:
        await store.run(messages.prepare, number, make_reveal(number))
    if state is ShareState.CONFIRMED:
        await confirm_shares(store, number, height=number)


async def current_state(store: Store) -> ShareState:
    (entry,) = await store.list_shares(QueueFilter(), 10)
    return ShareState.parse(entry.state)


async def test_transition_succeeds_only_from_legal_states(store: Store, backend: StoreBackend) -> None:
    counts = Counter[ShareState]()
    cases = product(TRANSITION_CASES.values(), LIVE_STATES)
    for share, ((transition, legal, target), state) in enumerate(cases, start=1):
        await create_share_in_state(store, state, share)
        if state in legal:
            assert await transition(store, share)
        else:
            with pytest.raises(StoreError, match=f"{state.name} cannot become {target.name}"):
                await transition(store, share)
        after = target if state in legal else state
        assert backend.query_rows(f"SELECT state FROM shares WHERE id = {share}") == [(after.value,)]
        counts[after] += 1
        assert await store.count_shares() == {ROUND: counts}


async def test_transition_of_confirmed_share_changes_nothing(store: Store) -> None:
    await create_share_in_state(store, ShareState.PROVING)
    await confirm_shares(store, 1, height=5)
    for transition, _, _ in TRANSITION_CASES.values():
        assert not await transition(store, 1)
    assert await store.count_shares() == {ROUND: {ShareState.CONFIRMED: 1}}


async def test_transition_after_round_closed_returns_false(store: Store) -> None:
    await create_share_in_state(store, ShareState.PROVING)
    await store.run_batches(rounds.fail_unconfirmed, ROUND, note="the round closed")
    before = await store.list_shares(QueueFilter(), 10)
    for transition, _, _ in TRANSITION_CASES.values():
        assert not await transition(store, 1)
        assert await store.list_shares(QueueFilter(), 10) == before
    assert await retry_as_operator(store, 1), "an operator may still retry it"
    assert await current_state(store) is ShareState.WAITING


@pytest.mark.rule("R12")
async def test_spent_nullifier_confirms_share_from_every_state(store: Store) -> None:
    for share, state in enumerate(LIVE_STATES, start=1):
        await create_share_in_state(store, state, share)

    assert await confirm_shares(store, 1, 2, 3, 4, height=5) == [1, 2, 3, 4]

    assert await store.count_shares() == {ROUND: {ShareState.CONFIRMED: 4}}
    assert await claim_all_due(store) == []
    assert await store.list_unconfirmed() == []


def test_transition_table_matches_transition_functions() -> None:
    covered: dict[ShareState, set[ShareState]] = {state: set() for state in ShareState}
    for _, legal, target in TRANSITION_CASES.values():
        for state in legal - {target}:
            covered[state].add(target)
    covered[ShareState.WAITING].add(ShareState.PROVING)  # claim_due
    for state in LIVE_STATES:
        covered[state].add(ShareState.CONFIRMED)  # apply_block
    covered[ShareState.FAILED].add(ShareState.WAITING)  # retry_failed

    assert covered == {state: set(targets) for state, targets in TRANSITIONS.items()}


@pytest.mark.rule("R11")
async def test_attempts_survive_restart_and_outages_spend_none(reopen: Reopen, store: Store) -> None:
    await enqueue_shares(store, 1)
    for attempt in range(1, 4):
        (queued,) = await claim_all_due(store, now=NOW + 100)
        await store.run(shares.requeue, queued.id, stage="outage", note="no node")
        (queued,) = await claim_all_due(store, now=NOW + 100)
        assert queued.attempts == attempt - 1
        assert (
            await store.run(shares.retry, queued.id, due_ms=LATER_MS, stage="proof", note=f"failure {attempt}")
            == attempt
        )
        assert await claim_all_due(store, now=NOW + 49) == [], "the next time is on disk before the wait begins"
    await store.close()

    reopened = await reopen()
    (queued,) = await claim_all_due(reopened, now=NOW + 50)
    assert queued.attempts == 3


@pytest.mark.rule("R9", "R6")
async def test_recover_requeues_witnessed_and_keeps_broadcast_shares(reopen: Reopen, store: Store) -> None:
    await enqueue_shares(store, 1, submit_at=int(NOW) + 3)
    await enqueue_shares(store, 2)
    first, second = await claim_all_due(store)
    await store.run(messages.prepare, first.id, make_reveal(2))
    await store.close()

    reopened = await reopen()
    assert await reopened.run_batches(shares.recover) == 1
    assert await reopened.run_batches(shares.recover) == 0
    assert await reopened.count_shares() == {ROUND: {ShareState.WAITING: 1, ShareState.SENT: 1}}
    assert await reopened.next_due_ms([ROUND]) == (int(NOW) + 3) * 1000 == second.due_ms
    (sent,) = await reopened.list_unconfirmed()
    assert without_sends(sent.row) == make_reveal(2)


@pytest.mark.parametrize("old_state", LIVE_STATES)
async def test_schema_transitions_match_code(store: Store, backend: StoreBackend, old_state: ShareState) -> None:
    await create_share_in_state(store, ShareState.SENT)
    await create_share_in_state(store, old_state, 2)
    await store.close()
    choices = [False] if old_state is ShareState.SENT else [False, True]

    with backend.connect() as conn:
        for new_state, gets_message in product(ShareState, choices):
            is_legal = new_state in TRANSITIONS[old_state] and new_state is not ShareState.CONFIRMED
            is_legal = is_legal and (gets_message or new_state is not ShareState.SENT)
            conn.execute("BEGIN")
            if gets_message:
                conn.execute("UPDATE reveals SET share_id = 2")
            with nullcontext() if is_legal or new_state is old_state else pytest.raises(REFUSED):
                conn.execute(f"UPDATE shares SET state = {new_state.value} WHERE id = 2")
            conn.execute("ROLLBACK")


async def test_schema_refuses_insert_in_state_other_than_received(store: Store, backend: StoreBackend) -> None:
    await create_share_in_state(store, ShareState.WAITING)
    await store.close()

    with backend.connect() as conn:
        columns = [column[0] for column in conn.execute("SELECT * FROM shares").description]
        for state in (1, 3, 4):
            chosen = ", ".join({"id": "99", "state": str(state)}.get(name, name) for name in columns)
            with pytest.raises(REFUSED, match="begins as received"):
                conn.execute(f"INSERT INTO shares SELECT {chosen} FROM shares")


@pytest.mark.parametrize("state", [ShareState.WAITING, ShareState.PROVING])
async def test_batch_of_damaged_rows_does_not_end_closure_or_recovery(
    reopen: Reopen, backend: StoreBackend, monkeypatch: pytest.MonkeyPatch, state: ShareState
) -> None:
    monkeypatch.setattr("helper.store.store.BATCH_SHARES", 2)
    store = await reopen()
    await enqueue_shares(store, *range(7))
    if state is ShareState.PROVING:
        await claim_all_due(store)
    await store.close()
    backend.execute(
        "UPDATE shares SET attempts = 3 WHERE id IN (SELECT id FROM shares ORDER BY due_ms, rank LIMIT 3) "
        "OR id IN (SELECT id FROM shares ORDER BY id LIMIT 3)"
    )
    ((damaged,),) = backend.query_rows("SELECT count(*) FROM shares WHERE attempts = 3")
    store = await reopen()
    if state is ShareState.PROVING:
        assert await store.run_batches(shares.recover) == 7 - damaged
    assert await store.run_batches(rounds.fail_unconfirmed, ROUND, note="closed") == 7 - damaged
