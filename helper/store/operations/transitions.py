"""State transitions of shares: loads and checks a row, writes it, and adds a history entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from helper.core.share import TRANSITIONS, ShareState
from helper.errors import StoreError
from helper.store.records import ShareRow, short
from helper.store.transaction import Transaction

HISTORY_KEPT: Final = 50
"""History entries stored per share. Older ones are deleted, except those that spent an attempt."""
CLOSED: Final = "closed"
"""The stage of a share that failed because it was not confirmed when its round was closed."""
_STAGE_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of one share's state, and its history entry.

    Attributes:
        sources: the accepted current states; each must be legal in `TRANSITIONS`, or the target itself.
        target: the new state.
        stage: stage of the history entry.
        note: text of the history entry.
        at_ms: unix milliseconds now.
        due_ms: the new due time, None for no change.
        attempts: attempts to add, None to reset attempts and crashes to 0.
        crashes: crashes to add.
        proved_height: chain height of a new proof, None for no change.
        by_anyone: apply it even if another host holds the claim.
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
    """Load a share, change its state and add a history entry.

    Returns:
        The new row. None if the share no longer exists (it was confirmed), is set aside, failed when its round was
        closed, or is claimed by another host.

    Raises:
        StoreError: the share's state is not one of the accepted ones.
    """
    row = load_for(tx, share_id, change)
    return None if row is None else move_row(tx, row, change)


def move_row(tx: Transaction, row: ShareRow, change: Transition) -> ShareRow:
    """Change the state of a share that `load_for` returned in this transaction. Returns the new row.

    Raises:
        StoreError: the share's state is not one of the accepted ones.
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
    _add_history(tx, moved, change.at_ms, counted=bool(change.attempts))
    return moved


def check_source(row: ShareRow, change: Transition) -> ShareState:
    """The share's state, if the transition is legal from it.

    Raises:
        StoreError: it is not legal; the text names both states.
    """
    was = ShareState(row.state)
    if was not in change.sources or change.target not in TRANSITIONS[was] | {was}:
        raise StoreError(
            f"a share that is {was.name} cannot become {change.target.name}",
            advice="This is a bug in the helper: report it.",
        )
    return was


def load_for(tx: Transaction, share_id: int, change: Transition) -> ShareRow | None:
    """A sound row for a change, None if there is nothing left to change.

    None means that the row is deleted or set aside, that the share failed because its round was closed (which may
    happen while it is proven or sent), or that another host has claimed or sends it.
    """
    row = load(tx, share_id, change.at_ms)
    if row is None or not (change.by_anyone or _is_ours(tx, row)):
        return None
    if row.state == ShareState.FAILED and row.stage == CLOSED:
        return row if ShareState.FAILED in change.sources else None
    return row


def _is_ours(tx: Transaction, row: ShareRow) -> bool:
    """Whether this host may change a share: it sends, for a share in BROADCAST; else it holds the claim."""
    return tx.sends() if row.state == ShareState.BROADCAST else tx.holds(row)


def load(tx: Transaction, share_id: int, at_ms: int) -> ShareRow | None:
    """A sound row, None if there is none. A damaged row is set aside, and None returned."""
    row = tx.live(share_id)
    if row is not None and not row.is_sound(tx.keys.rows):
        tx.set_aside(share_id, row.damaged(), at_ms)
        return None
    return row


def rewrite(tx: Transaction, was: ShareRow, row: ShareRow) -> ShareRow:
    """Write a changed row, and update claim and counters. The schema enforces legal transitions.

    Returns:
        The row with its check.

    Raises:
        StoreError: the row's state is no longer the one that was read.
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
        raise StoreError(f"share {row.id} was changed by another program that writes to this database")
    if was.state != row.state:
        tx.count(row.round_no, was.state, -1)
        tx.count(row.round_no, row.state, 1)
    if was.state == ShareState.WITNESSED:
        tx.release_claim(row.id)
    return row


def _add_history(tx: Transaction, row: ShareRow, at_ms: int, *, counted: bool) -> None:
    """Add a history entry, and delete entries beyond `HISTORY_KEPT`."""
    added = tx.one(
        "add_history",
        {"id": row.id, "at_ms": at_ms, "stage": row.stage, "note": row.note, "counted": int(counted)},
    )
    if added is not None and added[0] > HISTORY_KEPT:
        tx.run("trim_history", (row.id, added[0] - HISTORY_KEPT))
