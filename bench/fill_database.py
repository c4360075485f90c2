"""Fills a closed database directly with a large number of random shares.

The store does not interpret the contents of a share, and none of these shares becomes due during a measurement.
Their keys and nullifiers are uniformly distributed like real ones, so the indexes cost the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helper.clock import SystemClock
from helper.core.share import Share
from helper.store.shares import EnqueueOperation
from helper.store.sqlite.opening import OpenedDatabase, open_database
from helper.store.sqlite.transaction import SqliteTransaction

SHARES_PER_TRANSACTION = 10_000
"""Shares per transaction."""
SPREAD_SECONDS = 86_400
"""Seconds over which due times are spread."""


def generate_shares(round_id: bytes, first: int, last: int, due: int) -> Iterator[tuple[Share, bytes]]:
    """Generate shares with their nullifiers.

    Args:
        round_id: 32 bytes.
        first: number of the first share. Ranges of calls for the same queue must not overlap.
        last: number after the last share.
        due: earliest due time, in Unix seconds.
    """
    for number in range(first, last):
        noise = os.urandom(672)
        yield (
            Share(
                round_id=round_id,
                share_index=number % 16,
                proposal_id=1,
                vote_decision=number >> 24,
                tree_position=0xFFFFFF - (number & 0xFFFFFF),  # above the positions of real votes
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
    """Open the database of a stopped service."""
    database = open_database(path, SystemClock())
    try:
        yield database
    finally:
        database.close()


@contextmanager
def transaction(database: OpenedDatabase) -> Iterator[SqliteTransaction]:
    """Run one transaction, like the store's writer."""
    database.tx.conn.execute("BEGIN IMMEDIATE")
    yield database.tx
    database.tx.flush_counts()
    database.tx.conn.execute("COMMIT")
    database.eraser.run_due(idle=False)


def insert_shares(path: Path, round_id: bytes, count: int, *, due: int, first: int = 0) -> None:
    """Insert shares, creating the database if needed. `first` is the number of the first share."""
    with open_existing_database(path) as database:
        for start in range(first, first + count, SHARES_PER_TRANSACTION):
            with transaction(database) as tx:
                for share, nullifier in generate_shares(
                    round_id, start, min(first + count, start + SHARES_PER_TRANSACTION), due
                ):
                    EnqueueOperation(share, nullifier, due - 1000.0)(tx)


def delete_newer_shares(path: Path, *, after: int) -> None:
    """Delete the shares inserted after a row, so that they can be posted again."""
    with open_existing_database(path) as database:
        with transaction(database) as tx:
            newer = "SELECT id, round_no, state FROM shares WHERE id > ?"
            for share_id, round_no, state in tx.conn.execute(newer, (after,)).fetchall():
                tx.execute("delete_share", (share_id,))
                tx.adjust_count(round_no, state, -1)
        database.eraser.record_deletion()
        # Finish all erasure, including the scan after a crash, so that it does not delay the next measurement.
        while database.eraser.is_pending:
            database.eraser.run_due(idle=True)
