"""How a share moves from state to state: its row as it is read and written, and the line that its history gets.

All of it runs on the writer thread, inside its transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from helper.core.share import TRANSITIONS, ShareState
from helper.errors import StoreError
from helper.store.records import ShareRow, short
from helper.store.transaction import Transaction

HISTORY_KEPT: Final = 50
"""Notes kept of one share; older ones go, except those that cost an attempt."""
CLOSED: Final = "closed"
"""The stage at which a share fails that was not counted when its round was closed."""
_STAGE_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of one share's state, and what is told about it.

    Attributes:
        sources: the states from which it is meant; each must be legal in `TRANSITIONS`, or the target itself.
        target: the state that it leads to.
        stage: where it happens.
        note: what is told.
        at_ms: unix milliseconds now.
        due_ms: the new time, None to keep the share's own.
        attempts: attempts to add, or None to begin anew with none.
        crashes: crashes to add.
        proved_height: chain height of a new proof, None to keep.
        by_anyone: also where it is another host that works on the share.
    """

    sources: frozenset[ShareState]
    target: ShareState
    stage: str
    note: str
    at_ms: int
    due_ms: int | None = None
    attempts: int | None = 0
    crashes: int = 0
    proved_height: int | None = None
    by_anyone: bool = False


def move(tx: Transaction, share_id: int, change: Transition) -> ShareRow | None:
    """Move a share, with a line in its history; the row after it.

    Returns:
        None when the share is not there any more (it was confirmed), is set aside, failed with its round, or is another
        host's.

    Raises:
        StoreError: the share stands in a state from which this move is not meant.
    """
    row = load_for(tx, share_id, change)
    return None if row is None else move_row(tx, row, change)


def move_row(tx: Transaction, row: ShareRow, change: Transition) -> ShareRow:
    """Move a share whose row `load_for` has given in this transaction; the row after it.

    Raises:
        StoreError: the share stands in a state from which this move is not meant.
    """
    was = check_source(row, change)
    if was is ShareState.BROADCAST and change.target is ShareState.RECEIVED:
        tx.run("drop_reveal", (row.id,))
    moved = row._replace(
        state=change.target.value,
        due_ms=row.due_ms if change.due_ms is None else change.due_ms,
        attempts=0 if change.attempts is None else row.attempts + change.attempts,
        crashes=0 if change.attempts is None else row.crashes + change.crashes,
        proved_height=row.proved_height if change.proved_height is None else change.proved_height,
        stage=short(change.stage, _STAGE_CHARS),
        note=short(change.note),
    )
    moved = rewrite(tx, row, moved)
    _tell(tx, moved, change.at_ms, counted=bool(change.attempts))
    return moved


def check_source(row: ShareRow, change: Transition) -> ShareState:
    """The state that a share is in, if the move is meant from it and legal.

    Raises:
        StoreError: it is not; the text names both states.
    """
    was = ShareState(row.state)
    if was not in change.sources or change.target not in TRANSITIONS[was] | {was}:
        raise StoreError(
            f"a share that is {was.name} can not become {change.target.name}",
            advice="This is a fault of the helper: report it.",
        )
    return was


def load_for(tx: Transaction, share_id: int, change: Transition) -> ShareRow | None:
    """A sound row for a change, None when there is nothing left to change.

    Then it is gone, or set aside; or it failed when its round was closed, which may happen while its proof is made or
    its message sent; or another host has taken it up, or sends it.
    """
    row = load(tx, share_id, change.at_ms)
    if row is None or not (change.by_anyone or _is_ours(tx, row)):
        return None
    if row.state == ShareState.FAILED and row.stage == CLOSED:
        return row if ShareState.FAILED in change.sources else None
    return row


def _is_ours(tx: Transaction, row: ShareRow) -> bool:
    """Whether a share is this host's to change: it has its proof in hand, or sends what is proven."""
    return tx.sends() if row.state == ShareState.BROADCAST else tx.holds(row)


def load(tx: Transaction, share_id: int, at_ms: int) -> ShareRow | None:
    """A sound row, None when there is none; a damaged one is set aside and counts as none."""
    row = tx.live(share_id)
    if row is not None and not row.is_sound(tx.keys.rows):
        tx.set_aside(share_id, row.damaged(), at_ms)
        return None
    return row


def rewrite(tx: Transaction, was: ShareRow, row: ShareRow) -> ShareRow:
    """Write a changed row, if it still stands where it was read; the row with its check. The schema knows the moves.

    Raises:
        StoreError: it does not.
    """
    row = row.sealed(tx.keys.rows)
    changed = tx.run(
        "change_share",
        {
            "id": row.id,
            "was": was.state,
            "state": row.state,
            "due_ms": row.due_ms,
            "attempts": row.attempts,
            "crashes": row.crashes,
            "proved_height": row.proved_height,
            "stage": row.stage,
            "note": row.note,
            "row_check": row.row_check,
        },
    )
    if changed != 1:
        raise StoreError(f"share {row.id} changed under the writer: a second program writes to this file")
    if was.state != row.state:
        tx.count(row.round_no, was.state, -1)
        tx.count(row.round_no, row.state, 1)
    if was.state == ShareState.WITNESSED:
        tx.release_claim(row.id)
    return row


def _tell(tx: Transaction, row: ShareRow, at_ms: int, *, counted: bool) -> None:
    """Add a line to a share's history, and drop what is too old."""
    told = tx.one(
        "add_history",
        {"id": row.id, "at_ms": at_ms, "stage": row.stage, "note": row.note, "counted": int(counted)},
    )
    if told is not None and told[0] > HISTORY_KEPT:
        tx.run("trim_history", (row.id, told[0] - HISTORY_KEPT))
