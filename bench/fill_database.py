"""Great queues, made quickly: shares of random bytes, written straight into a database that no daemon has open.

The store does not look inside a share, and none of these falls due while anything is measured; their keys and
nullifiers are spread as real ones are, so they cost the indexes what real ones cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helper.clock import SystemClock
from helper.core.share import Share
from helper.store.operations.shares import enqueue
from helper.store.sqlite.opening import OpenedDatabase, open_database
from helper.store.sqlite.transaction import SqliteTransaction

SHARES_PER_TRANSACTION = 10_000
"""Shares of one transaction."""
SPREAD_SECONDS = 86_400
"""Over which the shares' times are spread."""


def generate_shares(round_id: bytes, first: int, last: int, due: int) -> Iterator[tuple[Share, bytes]]:
    """Shares with their nullifiers.

    Args:
        round_id: 32 bytes.
        first: number of the first of them; no two calls for one queue may share numbers.
        last: number after the last.
        due: unix second from which on they are due.
    """
    for number in range(first, last):
        noise = os.urandom(672)
        yield (
            Share(
                round_id=round_id,
                share_index=number % 16,
                proposal_id=1,
                vote_decision=number >> 24,
                tree_position=0xFFFFFF - (number & 0xFFFFFF),  # beyond those of real votes
                submit_at=due + number * 7919 % SPREAD_SECONDS,
                shares_hash=noise[:32],
                share_comms=noise[32:544],
                primary_blind=noise[544:576],
                c1=noise[576:608],
                c2=noise[608:640],
            ),
            noise[640:],
        )


@contextmanager
def open_existing_database(path: Path) -> Iterator[OpenedDatabase]:
    """The database of a service that does not run."""
    database = open_database(path, SystemClock())
    try:
        yield database
    finally:
        database.close()


@contextmanager
def transaction(database: OpenedDatabase) -> Iterator[SqliteTransaction]:
    """One transaction, as the writer makes them."""
    database.tx.conn.execute("BEGIN IMMEDIATE")
    yield database.tx
    database.tx.flush_counts()
    database.tx.conn.execute("COMMIT")
    database.eraser.run_due(idle=False)


def insert_shares(path: Path, round_id: bytes, count: int, *, due: int, first: int = 0) -> None:
    """Put so many shares into a database, made where there is none; `first` is the number of the first of them."""
    with open_existing_database(path) as database:
        for start in range(first, first + count, SHARES_PER_TRANSACTION):
            with transaction(database) as tx:
                for share, nullifier in generate_shares(
                    round_id, start, min(first + count, start + SHARES_PER_TRANSACTION), due
                ):
                    enqueue(tx, share, nullifier, due - 1000.0)


def delete_newer_shares(path: Path, *, after: int) -> None:
    """Take out the shares that came after a row, so that they can come again."""
    with open_existing_database(path) as database:
        with transaction(database) as tx:
            newer = "SELECT id, round_no, state FROM shares WHERE id > ?"
            for share_id, round_no, state in tx.conn.execute(newer, (after,)).fetchall():
                tx.execute("delete_share", (share_id,))
                tx.adjust_count(round_no, state, -1)
        database.eraser.record_deletion()
        # all of it, with what a crash before it left to look through: what is measured next is not to wait for it
        while database.eraser.is_pending:
            database.eraser.run_due(idle=True)
