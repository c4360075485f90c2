"""Shares, chain facts and access to the files, for the tests of the store."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from helper.core.share import Share
from helper.store import blocks, messages, shares
from helper.store.db_copy.export import ExportedQueue
from helper.store.db_copy.sqlite_endpoint import SqliteEndpoint
from helper.store.exported_shares import ExportedShare, RowVersion
from helper.store.models import EnqueueResult, QueueFilter
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store
from helper.store.table_rows import RevealRow, ShareRow
from tests.support.clock import FakeClock
from tests.support.sealed_fields import add_field_functions

NOW = 1_795_268_000.0
ROUND = bytes(range(32))
OTHER_ROUND = bytes(range(1, 33))

StoreOpener = Callable[[Path], Awaitable[SqliteStore]]
"""Opens a store that is closed at the end of the test."""


@dataclass(frozen=True)
class PostedShare:
    """A share with its nullifier."""

    share: Share
    nullifier: bytes

    def with_submit_at(self, submit_at: int) -> PostedShare:
        return replace(self, share=replace(self.share, submit_at=submit_at))


def make_posted_share(number: int, *, submit_at: int = 0, round_id: bytes = ROUND) -> PostedShare:
    """The share with this number: always the same bytes, distinct from those of other numbers."""
    source = random.Random(f"{number} {round_id.hex()}")
    share = Share(
        round_id=round_id,
        share_index=number % 16,
        proposal_id=1 + number % 3,
        vote_decision=number % 2,
        tree_position=70_000 + number,
        submit_at=submit_at,
        shares_hash=source.randbytes(32),
        share_comms=source.randbytes(512),
        primary_blind=source.randbytes(32),
        c1=source.randbytes(32),
        c2=source.randbytes(32),
    )
    return PostedShare(share, source.randbytes(32))


def make_reveal(number: int) -> RevealRow:
    """The message of the share with this number, as long as a real one."""
    source = random.Random(f"message {number}")
    nullifier = make_posted_share(number).nullifier
    return RevealRow(
        share_id=0,
        message=b"\x04" + nullifier + source.randbytes(5_200),
        tx_hash=source.randbytes(32),
        anchor_height=100,
        circuit="k10",
        height=101,
    )


def without_sends(row: RevealRow) -> RevealRow:
    """The message of a stored row, as `make_reveal` returns it."""
    return RevealRow(0, *row[1:6])


async def retry_as_operator(store: Store, *share_ids: int, note: str = "asked for") -> int:
    """Retry failed shares as an operator does; return their number."""
    return (await store.run(shares.retry_failed, share_ids, QueueFilter(), closed=(), note=note, dry_run=False))[
        "retried"
    ]


async def enqueue(store: Store, posted: PostedShare, *, now: float = NOW) -> EnqueueResult:
    return await store.run(shares.EnqueueOperation(posted.share, posted.nullifier, now=now))


async def enqueue_shares(store: Store, *numbers: int, submit_at: int = 0, now: float = NOW) -> None:
    for number in numbers:
        await enqueue(store, make_posted_share(number, submit_at=submit_at), now=now)


async def claim_all_due(store: Store, *, limit: int = 100, now: float = NOW + 10) -> list[ShareRow]:
    """Claim the due shares of the first round."""
    return await store.run(shares.claim_due, now=now, limit=limit, rounds=[ROUND])


async def enqueue_and_claim(store: Store, number: int) -> int:
    await enqueue_shares(store, number)
    (queued,) = await claim_all_due(store)
    return queued.id


async def enqueue_and_prepare(store: Store, number: int) -> int:
    """Bring one share to SENT; return its id."""
    share_id = await enqueue_and_claim(store, number)
    assert await store.run(messages.prepare, share_id, make_reveal(number))
    return share_id


async def confirm_shares(store: Store, *numbers: int, height: int) -> list[int]:
    """Apply a block with the reveals of the shares with these numbers; return the ids of the confirmed ones."""
    spent = [(ROUND, make_posted_share(number).nullifier) for number in numbers]
    return await store.run(blocks.apply_blocks, [(height, height)], spent)


@dataclass(frozen=True)
class Selection:
    """The shares that an export of a file would contain; the other fields are as in `ExportedQueue`."""

    shares: list[ExportedShare]
    versions: list[RowVersion]
    chain_id: str | None
    skipped: Counter[str]


def select_shares(
    path: Path, query: QueueFilter | None = None, *refs: str, encryption: RowEncryption = UNENCRYPTED
) -> Selection:
    with closing(SqliteEndpoint(path, FakeClock(), encryption)) as source:
        source.connect_read_only()
        queue = ExportedQueue(source, query or QueueFilter(), refs)
        rows = list(queue.read())
        return Selection([row[0] for row in rows], [row[1] for row in rows], queue.chain_id, queue.skipped)


def read_database_files(path: Path) -> dict[str, bytes]:
    """Names and bytes of the database file and all files whose names begin with its name."""
    return {file.name: file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*"))}


async def copy_as_crashed(store: Store, path: Path) -> Path:
    """The files of a helper that was killed with two shares in its WAL; returns the path of the database."""
    await enqueue_shares(store, 1, 2)
    copied = path.parent / "crashed" / path.name
    copied.parent.mkdir()
    for name, data in read_database_files(path).items():
        if not name.endswith("-shm"):
            (copied.parent / name).write_bytes(data)
    return copied


@contextmanager
def open_closed_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file of a closed store for writing by hand."""
    conn = add_field_functions(sqlite3.connect(path, isolation_level=None))
    try:
        yield conn
    finally:
        conn.close()


def query_rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    """Run a query while a store may be open."""
    conn = add_field_functions(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True))
    try:
        return conn.execute(sql).fetchall()
    finally:
        conn.close()


async def greatest_height(store: Store) -> int | None:
    ledger = await store.get_ledger()
    return None if ledger is None else ledger.top
