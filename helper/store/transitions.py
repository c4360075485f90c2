"""State transitions of shares: loads and checks a row, writes it, and adds a history entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from helper.core.share import TRANSITIONS, ShareState
from helper.errors import StoreError
from helper.store.models import HistoryEntry
from helper.store.table_rows import MAX_STAGE_CHARS, Column, ShareRow, is_sound, truncate_text, with_check
from helper.store.transaction import Transaction

MAX_HISTORY_ENTRIES: Final = 50
"""Maximum number of history entries per share. Older ones are deleted, except those that spent an attempt."""
CLOSED_STAGE: Final = "closed"
"""Stage of a share that failed because it was not confirmed when its round was closed."""

PROVER_STAGES: Final = frozenset({"tree", "proof"})
"""Stages of changes by the host that has claimed the share."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of one share's state, and its history entry.

    Attributes:
        sources: accepted current states; each must be the target itself or have a legal transition in `TRANSITIONS`.
        due_ms: the new due time, None for no change.
        attempts: attempts to add, None to reset attempts and crashes to 0.
        crashes: prover crashes to add.
        proved_height: chain height of a new proof, None for no change.
        ignore_claim: apply it even if another host holds the claim.
    """

    sources: frozenset[ShareState]
    target: ShareState
    stage: str
    note: str
    due_ms: int | None = None
    attempts: int | None = 0
    crashes: int = 0
    proved_height: int | None = None
    ignore_claim: bool = False


def apply_transition(tx: Transaction, share_id: int, change: Transition) -> ShareRow | None:
    """Load a share, change its state and add a history entry.

    Returns:
        The new row. None if the share no longer exists (it was confirmed), is quarantined, failed when its round was
        closed, or is claimed by another host.

    Raises:
        StoreError: the share's state is not one of the accepted ones.
    """
    row = load_row_for(tx, share_id, change)
    return None if row is None else apply_transition_to_row(tx, row, change)


def apply_transition_to_row(tx: Transaction, row: ShareRow, change: Transition) -> ShareRow:
    """Change the state of a share that `load_row_for` returned in this transaction. Returns the new row.

    Raises:
        StoreError: the share's state is not one of the accepted ones.
    """
    source = check_source(row, change)
    if source is ShareState.SENT and change.target is ShareState.WAITING:
        tx.execute("drop_reveal", (row.id,))
    new_row = row._replace(
        state=change.target.value,
        due_ms=row.due_ms if change.due_ms is None else change.due_ms,
        attempts=0 if change.attempts is None else row.attempts + change.attempts,
        crashes=0 if change.attempts is None else row.crashes + change.crashes,
        proved_height=row.proved_height if change.proved_height is None else change.proved_height,
        stage=truncate_text(change.stage, MAX_STAGE_CHARS),
        note=truncate_text(change.note),
    )
    new_row = update_row(tx, row, new_row)
    entry = HistoryEntry(tx.now_ms, change.stage, change.note, spent_attempt=bool(change.attempts))
    number = add_history(tx, row.id, entry)
    if number > MAX_HISTORY_ENTRIES:
        tx.execute("trim_history", (row.id, number - MAX_HISTORY_ENTRIES))
    return new_row


def apply_transition_to_batch(tx: Transaction, share_ids: Sequence[int], change: Transition) -> tuple[int, bool]:
    """Change the state of shares that a query of shares to be changed has returned.

    Returns:
        How many were changed, and whether the query may return others now. It excludes changed shares and those that
        were found to be damaged; without either, it would return the same ones again.
    """
    quarantined = len(tx.damaged_shares)
    changed = sum(apply_transition(tx, share_id, change) is not None for share_id in share_ids)
    return changed, changed > 0 or len(tx.damaged_shares) > quarantined


def check_source(row: ShareRow, change: Transition) -> ShareState:
    """Return the share's state, if the transition is legal from it.

    Raises:
        StoreError: it is not legal; the message names both states.
    """
    state = ShareState(row.state)
    if state not in change.sources or change.target not in TRANSITIONS[state] | {state}:
        raise StoreError(
            f"a share that is {state.name} cannot become {change.target.name}",
            advice="This is a bug in the helper: report it.",
        )
    return state


def load_row_for(tx: Transaction, share_id: int, change: Transition) -> ShareRow | None:
    """Return a verified row for a change, None if the share must not be changed.

    None means that the row was deleted or quarantined, that the share failed because its round was closed (which may
    happen while it is proven or sent), or that another host has claimed or sends it.
    """
    row = load_row(tx, share_id)
    if row is None or not (change.ignore_claim or _can_change(tx, row, change)):
        return None
    if row.state == ShareState.FAILED and row.stage == CLOSED_STAGE:
        return row if ShareState.FAILED in change.sources else None
    return row


def _can_change(tx: Transaction, row: ShareRow, change: Transition) -> bool:
    """Return whether this host may change a share: as the sender in SENT, with its claim in other states.

    A change by a prover needs the claim in SENT too. If the claim has expired, the message is another host's.
    """
    is_by_prover = change.stage in PROVER_STAGES or ShareState.SENT not in change.sources
    return tx.can_send() if row.state == ShareState.SENT and not is_by_prover else tx.has_claim(row)


def load_row(tx: Transaction, share_id: int) -> ShareRow | None:
    """Return a verified row, None if it does not exist. A damaged row is quarantined, and None is returned."""
    row = tx.get_live_share(share_id)
    if row is not None and not is_sound(tx.keys.row_check, row):
        tx.quarantine(share_id, row.to_damaged_share())
        return None
    return row


def update_row(tx: Transaction, before: ShareRow, row: ShareRow) -> ShareRow:
    """Write a changed row, and update claim and counters. The schema enforces legal transitions.

    Returns:
        The row with its check.

    Raises:
        StoreError: the row's state is no longer the one that was read.
    """
    row = with_check(tx.keys.row_check, row)
    changed = tx.execute("change_share", {**row._asdict(), "was": before.state})
    if changed != 1:
        raise StoreError(f"share {row.id} was changed by another program that writes to this database")
    if before.state != row.state:
        tx.adjust_count(row.round_no, before.state, -1)
        tx.adjust_count(row.round_no, row.state, 1)
    if before.state == ShareState.PROVING:
        tx.release_claim(row.id)
    return row


def add_history(tx: Transaction, share_id: int, entry: HistoryEntry) -> int:
    """Add a history entry. Returns its number in the history of the share."""
    params: dict[str, Column] = {
        "id": share_id,
        "at_ms": entry.at_ms,
        "stage": truncate_text(entry.stage, MAX_STAGE_CHARS),
        "note": truncate_text(entry.note),
        "counted": int(entry.spent_attempt),
    }
    ((number,),) = tx.fetch_all("add_history", params)
    return int(number)
