"""Copies of a queue between stores: copied data, conflicts, interruption at any point."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any
from unittest.mock import Mock

import pytest

from helper.core.share import ShareState
from helper.errors import NotFound, StoreCopyDiffers, StoreCorrupt, StoreForeign, StoreLocked, StoreMoved
from helper.store import audit_log, blocks, exported_shares, messages, rounds, shares
from helper.store.db_copy.endpoint import SHARES, TABLES, CopyEndpoint
from helper.store.db_copy.export import ExportedQueue
from helper.store.db_copy.postgres_endpoint import PostgresEndpoint
from helper.store.db_copy.queue_copy import (
    CopyResult,
    copy_queue,
    erase_source,
    estimate_copy,
    read_moved_mark,
    undo_copy,
)
from helper.store.db_copy.sqlite_endpoint import SqliteEndpoint
from helper.store.keyring import Keyring
from helper.store.models import EnqueueResult, QueueFilter
from helper.store.postgres.connection import create_connection_settings
from helper.store.postgres.opening import migrations as postgres_migrations
from helper.store.row_encryption import REVEAL_COLUMNS, SHARE_COLUMNS
from helper.store.sqlite.schema import migrations
from helper.store.store import Store
from helper.store.table_rows import UNFINISHED_KEY, CopyMark
from tests.support.clock import FakeClock
from tests.support.fakes import TIMEOUT_SECONDS
from tests.unit.store.conformance.backends import SEALING_KEYS, PostgresBackend, SqliteBackend, StoreBackend
from tests.unit.store.conformance.conftest import BACKEND_KINDS
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.conformance.test_operator_actions import ACTOR, fail_share
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue,
    enqueue_and_claim,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    open_closed_database,
    without_sends,
)

LEAVES = bytes(range(32)) * 3
SUBTREE_BYTES = b"n" * 32_736
BackendPair = tuple[StoreBackend, StoreBackend]
EndpointPair = tuple[CopyEndpoint, CopyEndpoint]
OpenStore = Callable[[StoreBackend], Awaitable[Store]]
MIXED_KINDS = [(kind, BACKEND_KINDS[number - 1]) for number, kind in enumerate(BACKEND_KINDS)]
"""Each kind once as source and once as target."""
ALL_KINDS = list(itertools.product(BACKEND_KINDS, repeat=2))


def create_backend(kind: str, name: str, request: pytest.FixtureRequest, directory: Path) -> StoreBackend:
    if kind == "postgres":
        return PostgresBackend(request.getfixturevalue("cluster").url, f"test_{secrets.token_hex(6)}")
    (directory / name).mkdir()
    return SqliteBackend(directory / name, is_encrypted=kind == "encrypted sqlite")


def create_backend_pair(request: pytest.FixtureRequest, directory: Path) -> BackendPair:
    first, second = (
        create_backend(kind, name, request, directory)
        for kind, name in zip(request.param, ("here", "there"), strict=True)
    )
    return first, second


@pytest.fixture(params=MIXED_KINDS, ids=["-".join(kinds) for kinds in MIXED_KINDS])
def backends(request: pytest.FixtureRequest, tmp_path: Path) -> BackendPair:
    """Source and target of different kinds."""
    return create_backend_pair(request, tmp_path)


@pytest.fixture(params=ALL_KINDS, ids=["-".join(kinds) for kinds in ALL_KINDS])
def any_backends(request: pytest.FixtureRequest, tmp_path: Path) -> BackendPair:
    """Source and target of any kinds, including the same."""
    return create_backend_pair(request, tmp_path)


@pytest.fixture
async def open_store(clock: FakeClock) -> AsyncIterator[OpenStore]:
    """Opens stores, and closes them at the end."""
    stores: list[Store] = []

    async def open_on(backend: StoreBackend) -> Store:
        store_ = backend.create_store(clock)
        await store_.open()
        stores.append(store_)
        await backend.prepare_store(store_)
        return store_

    yield open_on
    for store_ in stores:
        await store_.close()


def create_endpoint(backend: StoreBackend) -> CopyEndpoint:
    if isinstance(backend, SqliteBackend):
        return SqliteEndpoint(backend.path, FakeClock(), backend.encryption)
    assert isinstance(backend, PostgresBackend)
    return PostgresEndpoint(
        create_connection_settings(backend.address, schema=backend.schema, host="mover", idle_seconds=60),
        Keyring(SEALING_KEYS),
    )


@pytest.fixture
def endpoints(backends: BackendPair) -> Iterator[EndpointPair]:
    both = create_endpoint(backends[0]), create_endpoint(backends[1])
    yield both
    for end in both:
        end.close()


@pytest.fixture
async def filled(backends: BackendPair, open_store: OpenStore) -> BackendPair:
    """A queue that no helper uses, and an empty target."""
    store = await open_store(backends[0])
    await fill_store(store)
    await store.close()
    return backends


def migrate_between(endpoints: EndpointPair) -> CopyResult:
    """Run a copy, and close both databases."""
    try:
        return copy_queue(*endpoints, clock=FakeClock(), on_progress=lambda _: None)
    finally:
        for end in endpoints:
            end.close()


def migrate(source: StoreBackend, target: StoreBackend) -> CopyResult:
    return migrate_between((create_endpoint(source), create_endpoint(target)))


def read_all_rows(backend: StoreBackend) -> dict[str, list[Any]]:
    endpoint = create_endpoint(backend)
    try:
        endpoint.connect_read_only()
        return {table.name: list(itertools.chain.from_iterable(endpoint.read_pages(table))) for table in TABLES}
    finally:
        endpoint.close()


async def fill_store(store: Store) -> None:
    """Data of every kind: a share in each state, tombstones, trees, audit entries, a purged round."""
    await fail_share(store, 20, note="no leaf")
    await store.run_batches(rounds.purge, ROUND)
    action = await store.run(audit_log.begin_action, ACTOR, "purge", {"round": ROUND.hex()})
    await store.run(audit_log.end_action, action, {"purged": 1})
    await store.run(audit_log.begin_action, ACTOR, "retry", {})
    await store.run(rounds.save_rounds, [make_stored_round(), make_stored_round(OTHER_ROUND, created_at_height=3)], NOW)
    await store.run(blocks.set_meta, "chain_id", "chain-1")
    await enqueue_shares(store, 8)
    assert len(await confirm_shares(store, 8, 99, height=90)) == 1
    share_id = await enqueue_and_prepare(store, 1)  # may have been sent
    assert await store.run(messages.mark_sending, share_id, height=110, endpoint="node:80")
    await fail_share(store, 2, note="refused")
    await enqueue_and_claim(store, 3)  # is being proven
    await enqueue_shares(store, 4, 5, 6, submit_at=int(NOW) + 50)
    await enqueue(store, make_posted_share(7, round_id=OTHER_ROUND))
    await store.run(rounds.save_leaves, ROUND, 7, 0, LEAVES)
    await store.run(rounds.save_subtrees, ROUND, 0, SUBTREE_BYTES)


async def list_refs(store: Store) -> list[tuple[str, str]]:
    listed = await store.list_shares(QueueFilter(), 100)
    return sorted((entry.ref, entry.state) for entry in listed)


async def test_migration_copies_all_rows_and_retires_source(any_backends: BackendPair, open_store: OpenStore) -> None:
    source, target = any_backends
    source_store = await open_store(source)
    await fill_store(source_store)
    named, counted = await list_refs(source_store), await source_store.count_shares()
    await source_store.close()
    before = read_all_rows(source)
    assert [name for name, rows in before.items() if not rows] == []
    assert {record.share.state for record in before["shares"]} == set(ShareState) - {ShareState.CONFIRMED}

    moved = migrate(source, target)

    assert (moved.live, moved.confirmed, moved.damaged, moved.uncounted) == (7, 1, [], 0)
    assert read_all_rows(target) == before
    with pytest.raises(StoreMoved, match="was moved to") as refused:
        await open_store(source)
    assert "--undo" in refused.value.advice
    target_store = await open_store(target)
    assert await list_refs(target_store) == named
    assert await target_store.count_shares() == counted
    assert await target_store.verify() == []


@pytest.mark.parametrize("small", [1, 2, 500])
async def test_export_reads_pages_while_hosts_change_the_queue(
    backends: BackendPair, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr("helper.store.db_copy.endpoint.SHARES", replace(SHARES, rows=small))
    store = await open_store(backends[0])
    await fill_store(store)
    with closing(create_endpoint(backends[0])) as source:
        source.connect_read_only()
        queue = ExportedQueue(source, QueueFilter())
        rows = queue.read()
        exported = [next(rows)]
        # The same share, due earlier: its row is replaced by a new one.
        assert await enqueue_shares_again(store, 6) == EnqueueResult.MOVED_UP
        await enqueue_shares(store, 9)
        exported += rows

    states = {share.share.tree_position - 70_000: share.state.name for share, _ in exported}
    waiting = dict.fromkeys([3, 4, 5, 6, 7] if small == 500 else [3, 4, 5, 7], "WAITING")
    assert states == {1: "SENT", 2: "FAILED", **waiting}
    assert len(exported) == len(states)
    assert (queue.chain_id, queue.skipped) == ("chain-1", {})
    (sent,) = [share.reveal for share, _ in exported if share.reveal is not None]
    assert (without_sends(sent), sent.sends) == (make_reveal(1), 1)
    versions = [version for _, version in exported]
    counts = await store.run(exported_shares.mark_moved, versions, note="gone", idle_only=True)
    # Shares 1 and 3 are being processed, and share 6 has changed.
    assert counts == {"moved": 4, "stayed": 3 if small == 500 else 2}


async def enqueue_shares_again(store: Store, number: int) -> EnqueueResult:
    """Post a share again, due earlier."""
    posted = make_posted_share(number, submit_at=int(NOW) + 40)
    return await enqueue(store, posted)


async def test_migrated_claims_are_recovered_as_after_crash(backends: BackendPair, open_store: OpenStore) -> None:
    source, target = backends
    source_store = await open_store(source)
    await fill_store(source_store)
    (sent,) = await source_store.list_unconfirmed()
    await source_store.close()
    migrate(source, target)

    target_store = await open_store(target)
    assert (
        await target_store.run_batches(shares.recover) == 1
    )  # the share that was being proven; a share that may have been sent is unchanged

    assert await target_store.list_unconfirmed() == [sent]
    assert await target_store.count_shares() == {
        ROUND: {
            ShareState.WAITING: 4,
            ShareState.SENT: 1,
            ShareState.FAILED: 1,
            ShareState.CONFIRMED: 1,
        },
        OTHER_ROUND: {ShareState.WAITING: 1},
    }
    claimed = await claim_all_due(target_store, now=NOW + 60)
    assert claimed[0].share.tree_position - 70_000 == 3
    assert sorted(queued.share.tree_position - 70_000 for queued in claimed) == [3, 4, 5, 6]
    for number in (1, 8):  # known in the target: live, and confirmed
        posted = make_posted_share(number)
        assert (await enqueue(target_store, posted)).name == "DUPLICATE"
    await enqueue_shares(target_store, 30)
    (fresh,) = await claim_all_due(target_store, now=NOW + 60)
    assert fresh.id > max(queued.id for queued in claimed)


async def test_round_trip_migration_restores_no_erased_rows(filled: BackendPair, open_store: OpenStore) -> None:
    source, target = filled
    migrate(source, target)
    target_store = await open_store(target)
    assert len(await confirm_shares(target_store, 1, 3, 4, height=120)) == 3
    await enqueue_shares(target_store, 40, 41)
    await target_store.run(rounds.mark_closed, OTHER_ROUND, NOW)
    await target_store.run_batches(rounds.purge, OTHER_ROUND)
    counted = await target_store.count_shares()
    await target_store.close()
    expected = read_all_rows(target)
    source.execute("INSERT INTO damaged SELECT id, 0, '', mac, 0 FROM shares")

    migrate(target, source)

    assert read_all_rows(source) == expected
    if isinstance(source, SqliteBackend):
        left = b"".join(file.read_bytes() for file in source.path.parent.iterdir())
        assert (make_posted_share(5).share.shares_hash in left) == (not source.encryption.is_encrypted)
        for number in (1, 3, 4, 7, 8):
            posted = make_posted_share(number, round_id=OTHER_ROUND if number == 7 else ROUND)
            assert posted.share.shares_hash not in left
    reopened = await open_store(source)
    assert await reopened.count_shares() == counted
    assert await reopened.list_damaged() == []
    assert await enqueue(reopened, make_posted_share(4)) is not None
    assert await reopened.count_shares() == counted
    with pytest.raises(StoreMoved):
        await open_store(target)


def interrupt_after(endpoints: EndpointPair, steps: int) -> None:
    """Interrupt a copy after this many transactions: nothing else changes a database."""
    left = itertools.count(steps, -1)
    for end in endpoints:

        def cut(begin: Callable[[], Any] = end.write_transaction) -> Any:
            if next(left) <= 0:
                raise KeyboardInterrupt
            return begin()

        end.write_transaction = cut  # type: ignore[method-assign]


async def open_once_unlocked(open_store: OpenStore, backend: StoreBackend) -> Store:
    """Open a store after a copy: a server ends its connection, and with it its lock, a moment after the close."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            try:
                return await open_store(backend)
            except StoreLocked:
                await asyncio.sleep(0.02)


async def test_interrupted_migration_is_repeated_without_duplicates(filled: BackendPair, open_store: OpenStore) -> None:
    source, target = filled
    before = read_all_rows(source)
    cuts, is_finished = 0, False
    while not is_finished:
        ends = create_endpoint(source), create_endpoint(target)
        interrupt_after(ends, cuts)
        with suppress(KeyboardInterrupt):
            is_finished = migrate_between(ends) is not None
        cuts += not is_finished
        if cuts > 1 and not is_finished:  # the target is marked
            with pytest.raises(StoreMoved):
                await open_once_unlocked(open_store, target)
    assert cuts >= 20
    assert read_all_rows(target) == before
    await open_once_unlocked(open_store, target)


def interrupt_between_marks(ends: EndpointPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a move when the source is marked as moved, and the target still as unfinished."""
    set_mark = ends[1].set_mark

    def cut(name: str, mark: CopyMark | None) -> None:
        if (name, mark) == (UNFINISHED_KEY, None):
            raise KeyboardInterrupt
        set_mark(name, mark)

    monkeypatch.setattr(ends[1], "set_mark", cut)
    with pytest.raises(KeyboardInterrupt):
        migrate_between(ends)


async def test_migration_interrupted_between_marks_blocks_both_and_resumes(
    filled: BackendPair, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = filled
    ends = create_endpoint(source), create_endpoint(target)
    interrupt_between_marks(ends, monkeypatch)
    for backend in filled:
        with pytest.raises(StoreMoved):
            await open_store(backend)

    migrate(source, target)
    await open_store(target)
    with pytest.raises(StoreMoved, match="was moved to"):
        await open_store(source)


@pytest.mark.parametrize("is_erasure_cut", [False, True])
async def test_source_erased_between_marks_is_not_copied_again(
    filled: BackendPair,
    endpoints: EndpointPair,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_erasure_cut: bool,
) -> None:
    source, target = filled
    before = read_all_rows(source)
    interrupt_between_marks(endpoints, monkeypatch)
    with closing(create_endpoint(source)) as endpoint, suppress(KeyboardInterrupt):
        if is_erasure_cut:
            monkeypatch.setattr(endpoint, "delete_rows", Mock(side_effect=KeyboardInterrupt))
        erase_source(endpoint)

    moved = migrate(source, target)
    assert (moved.written, moved.live, moved.confirmed, moved.uncounted) == (0, 7, 1, 0)
    assert read_all_rows(target) == before
    await open_store(target)


async def test_target_that_is_damaged_between_marks_is_copied_again_after_undo(
    filled: BackendPair, endpoints: EndpointPair, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = filled
    before = read_all_rows(source)
    interrupt_between_marks(endpoints, monkeypatch)
    target.execute("DELETE FROM tombstones")
    with pytest.raises(StoreCopyDiffers) as raised:
        migrate(source, target)
    with closing(create_endpoint(source)) as endpoint:
        assert f"`svote-helper db copy --undo --from {quote(endpoint.cli_value)}`" in raised.value.advice
        undo_copy(endpoint)
    migrate(source, target)
    assert read_all_rows(target) == before
    await open_once_unlocked(open_store, target)


async def test_repetition_of_a_copy_between_marks_may_be_interrupted_too(
    filled: BackendPair, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = filled
    before = read_all_rows(source)
    ends = create_endpoint(source), create_endpoint(target)
    interrupt_between_marks(ends, monkeypatch)
    ends = create_endpoint(source), create_endpoint(target)
    interrupt_after(ends, 5)  # has fewer transactions, unless it copies again
    with suppress(KeyboardInterrupt):
        migrate_between(ends)
    with closing(create_endpoint(source)) as endpoint:
        erase_source(endpoint)
    with suppress(StoreMoved):  # the repetition has finished the move
        migrate(source, target)
    assert read_all_rows(target) == before
    await open_once_unlocked(open_store, target)


TAMPERING_STATEMENTS = {
    "a due time": "UPDATE shares SET due_ms = due_ms - 1 WHERE id = (SELECT max(id) FROM shares)",
    "a share": "DELETE FROM shares WHERE state = 3",
    "a tombstone": "DELETE FROM tombstones",
    "a spent nullifier": "UPDATE spent SET round_no = round_no + 1 WHERE round_no = (SELECT min(round_no) FROM spent)",
    "a leaf": "UPDATE tree_leaves SET height = height + 1",
    "a history entry": "UPDATE history SET note = 'x'",
    "a meta value": "UPDATE meta SET value = 'chain-2' WHERE key = 'chain_id'",
    "a round": "UPDATE rounds SET status = status + 1",
    "a message": "UPDATE reveals SET anchor_height = anchor_height + 1",
    "an action": "UPDATE actions SET who = 'bob'",
    "purged failures": "UPDATE failed_before SET n = n + 1",
    "the counters": "UPDATE counters SET n = n + 1 WHERE state = 0",
}


def tamper_with_witness(backend: StoreBackend) -> str:
    """A statement that changes the witnesses of all shares."""
    if isinstance(backend, PostgresBackend):
        return "UPDATE shares SET witness = set_byte(witness, 300, get_byte(witness, 300) # 1)"
    return "UPDATE shares SET witness = zeroblob(748)"


async def test_migration_with_tampered_copy_fails_and_next_run_repairs_it(
    filled: BackendPair, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = filled
    for what in [*TAMPERING_STATEMENTS, "a witness"]:
        ends = create_endpoint(source), create_endpoint(target)
        end_copy = ends[1].end_copy

        def tampered(what: str = what, end: Any = ends[1], end_copy: Callable[[], None] = end_copy) -> None:
            end_copy()
            assert (
                end._connection.execute(TAMPERING_STATEMENTS.get(what) or tamper_with_witness(target)).rowcount > 0
            ), what

        monkeypatch.setattr(ends[1], "end_copy", tampered)
        with pytest.raises(StoreCopyDiffers, match="differs from"):
            migrate_between(ends)

    with pytest.raises(StoreMoved, match="unfinished copy"):
        await open_store(target)
    await (await open_store(source)).close()
    migrate(source, target)
    assert read_all_rows(target) == read_all_rows(source)


async def test_migration_reports_and_skips_damaged_rows(backends: BackendPair, open_store: OpenStore) -> None:
    source, target = backends
    source_store = await open_store(source)
    await fill_store(source_store)
    named = await list_refs(source_store)
    await source_store.close()
    source.execute("UPDATE shares SET due_ms = due_ms + 1 WHERE round_no = (SELECT max(no) FROM round_keys)")
    source.execute("UPDATE reveals SET height = height + 1")

    moved = migrate(source, target)

    assert (moved.live, moved.uncounted) == (5, 0)
    assert len(moved.damaged) == 2
    target_store = await open_store(target)
    left = await list_refs(target_store)
    assert {entry.ref for entry in moved.damaged} == {ref for ref, _ in named} - {ref for ref, _ in left}
    assert await target_store.verify() == []
    assert await target_store.list_damaged() == []


async def test_migration_reports_shares_whose_round_key_is_damaged(filled: BackendPair) -> None:
    source, target = filled
    source.execute(
        "UPDATE round_keys SET row_check = substr(mac_key, 1, 8) WHERE no = (SELECT max(no) FROM round_keys)"
    )
    if isinstance(source, SqliteBackend):
        with pytest.raises(StoreCorrupt, match="the key of a round fails its check"):
            migrate(source, target)
        return
    moved = migrate(source, target)
    assert (moved.live, moved.uncounted, [share.round_id for share in moved.damaged]) == (6, 0, [OTHER_ROUND])


async def test_migration_into_other_queue_is_refused(backends: BackendPair, open_store: OpenStore) -> None:
    source, target = backends
    for backend in backends:
        store = await open_store(backend)
        await fill_store(store)
        await store.close()
    before = read_all_rows(target)
    with pytest.raises(StoreForeign, match="already contains another queue"):
        migrate(source, target)
    assert read_all_rows(target) == before
    with pytest.raises(StoreForeign, match="onto itself"):
        migrate(source, source)
    for backend in backends:
        await open_store(backend)


@pytest.mark.parametrize("place", [0, 1], ids=["source", "target"])
async def test_migration_of_database_in_use_is_refused(filled: BackendPair, open_store: OpenStore, place: int) -> None:
    source, target = filled
    in_use = await open_once_unlocked(open_store, filled[place])
    with pytest.raises(StoreLocked):
        migrate(source, target)
    await in_use.close()
    for backend in filled:
        await (await open_once_unlocked(open_store, backend)).close()


async def test_migration_continued_after_another_has_moved_the_queue_is_refused(
    filled: BackendPair,
    endpoints: EndpointPair,
    open_store: OpenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = filled
    monkeypatch.setattr(endpoints[1], "end_copy", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        migrate_between(endpoints)
    (tmp_path / "third").mkdir()
    third = SqliteBackend(tmp_path / "third")
    migrate(source, third)
    with pytest.raises(StoreMoved, match=str(third.path)):
        migrate(source, target)
    await open_store(third)
    with pytest.raises(StoreMoved, match="unfinished copy"):
        await open_once_unlocked(open_store, target)


async def test_migration_survey_writes_nothing(backends: BackendPair, open_store: OpenStore) -> None:
    source, target = backends
    await fill_store(await open_store(source))
    estimates = []
    for _ in range(2):
        ends = create_endpoint(source), create_endpoint(target)
        estimates.append(estimate_copy(*ends))
        for end in ends:
            end.close()
    assert [(estimate.live, estimate.confirmed) for estimate in estimates] == [(7, 1)] * 2
    with pytest.raises(NotFound):
        create_endpoint(target).connect_read_only()


async def test_erase_migrated_source_allows_migration_back(filled: BackendPair, open_store: OpenStore) -> None:
    source, target = filled
    endpoint = create_endpoint(source)
    with pytest.raises(StoreForeign, match="not marked"):
        erase_source(endpoint)
    endpoint.close()
    before = read_all_rows(source)
    migrate(source, target)
    endpoint = create_endpoint(source)
    erase_source(endpoint)
    endpoint.close()
    with closing(create_endpoint(source)) as erased, pytest.raises(StoreForeign, match="was erased"):
        undo_copy(erased)

    assert {name for name, rows in read_all_rows(source).items() if rows} == {"meta"}
    if isinstance(source, SqliteBackend):
        left = b"".join(file.read_bytes() for file in source.path.parent.iterdir())
        for number in range(1, 9):
            posted = make_posted_share(number, round_id=OTHER_ROUND if number == 7 else ROUND)
            assert posted.share.shares_hash not in left
            assert posted.nullifier not in left
    with pytest.raises(StoreMoved):
        await open_store(source)
    migrate(target, source)
    assert read_all_rows(source) == before
    await open_store(source)


async def test_undo_removes_mark_when_copy_is_lost(
    filled: BackendPair, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = filled
    migrate(source, target)
    with pytest.raises(StoreMoved):
        migrate(source, target)
    endpoint, other = create_endpoint(source), create_endpoint(source)
    assert read_moved_mark(endpoint).other == create_endpoint(target).label
    lock = endpoint.lock_exclusive

    def lock_after_undo() -> None:
        undo_copy(other)
        other.close()
        lock()

    monkeypatch.setattr(endpoint, "lock_exclusive", lock_after_undo)
    with pytest.raises(StoreForeign, match="not marked"):
        erase_source(endpoint)
    endpoint.close()
    await open_store(source)


async def test_migration_replaces_damaged_characters_of_texts_without_a_check(filled: BackendPair) -> None:
    source, target = filled
    if not isinstance(source, SqliteBackend):
        return
    with open_closed_database(source.path) as conn:
        conn.execute("UPDATE history SET note = char(97, 0, 98)")
        conn.execute("UPDATE actions SET who = cast(x'61ff62' AS TEXT)")
        conn.execute("UPDATE failed_before SET reason = cast(x'61ff62' AS TEXT)")
    assert migrate(source, target).damaged == []
    copied = read_all_rows(target)
    endpoint = create_endpoint(source)
    erase_source(endpoint)  # also the rows whose key was replaced
    endpoint.close()
    assert {name for name, rows in read_all_rows(source).items() if rows} == {"meta"}
    texts = {line[3] for record in copied["shares"] for line in record.history} | {row[3] for row in copied["actions"]}
    assert texts == {"a\ufffdb"}


def test_every_table_is_migrated_or_rebuilt() -> None:
    rebuilt = {"counters", "damaged"}
    with_its_share = {"reveals", "history"}
    known = {table.name for table in TABLES} | rebuilt | with_its_share
    assert parse_columns(migrations()).keys() == known
    assert parse_columns(postgres_migrations()).keys() == known | {"claims", "sender"}  # a file has one host


def test_both_engines_have_the_same_columns() -> None:
    columns, shared = parse_columns(migrations()), parse_columns(postgres_migrations())
    shared["counters"].remove("part")  # of a host
    assert {table: shared[table] for table in columns} == columns
    assert [*SHARE_COLUMNS] == columns["shares"]
    assert [*REVEAL_COLUMNS] == columns["reveals"]


def parse_columns(texts: Iterable[str]) -> dict[str, list[str]]:
    """The columns of each table, in order."""
    tables = re.findall(r"^CREATE TABLE (\w+) \(\n(.*?)^\)", "".join(texts), re.MULTILINE | re.DOTALL)
    return {name: re.findall(r"^  ([a-z]\w+) ", body, re.MULTILINE) for name, body in tables}
