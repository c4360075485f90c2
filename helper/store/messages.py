"""Operations on prepared messages: store, mark as sending, record the outcome, read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from helper.core.share import ShareState
from helper.store.table_rows import RevealRow, Row, ShareRow, is_sound, truncate_text, with_check
from helper.store.transaction import Transaction
from helper.store.transitions import (
    Transition,
    apply_transition_to_row,
    check_source,
    load_row,
    load_row_for,
    update_row,
)

NO_LIMIT: Final = 2**62
"""A number of rows, or a height, above all others."""
PREPARED_NOTIFICATION: Final = "prepared"
"""Notification of hosts when a message is ready to be sent."""


@dataclass(frozen=True, slots=True)
class SentReveal:
    """A message that is on disk and may have been sent, with what its sender knows of the share.

    Attributes:
        first_due_ms: Unix milliseconds at which the share's first attempt was due.
        rank: the share's sort key among those due in the same millisecond.
        is_first_message: the share never had another message, so none of its data was sent before this one.
    """

    row: RevealRow
    round_id: bytes
    nullifier: bytes = field(repr=False)
    attempts: int = 0
    due_ms: int = 0
    first_due_ms: int = 0
    rank: int = 0
    is_first_message: bool = True

    @property
    def share_id(self) -> int:
        """The number of the share; 0 if it is not stored."""
        return self.row.share_id


def prepare(tx: Transaction, share_id: int, reveal: RevealRow) -> bool:
    """Store a share's message before it is sent: PROVING -> SENT."""
    change = Transition(
        frozenset({ShareState.PROVING}),
        ShareState.SENT,
        "broadcast",
        f"proven with {reveal.circuit}, message stored",
        proved_height=reveal.height,
    )
    row = load_row_for(tx, share_id, change)
    if row is None:
        return False
    check_source(row, change)
    # Store the message first: the schema does not allow SENT without one.
    tx.execute("add_reveal", with_check(tx.keys.row_check, reveal._replace(share_id=share_id)))
    tx.notify(PREPARED_NOTIFICATION)
    apply_transition_to_row(tx, row, change)
    return True


def restore_message(tx: Transaction, row: ShareRow, reveal: RevealRow) -> None:
    """Move a stored share from WAITING to SENT, with a message that may have been sent for it."""
    row = update_row(tx, row, row._replace(state=ShareState.PROVING.value))
    tx.execute("add_reveal", with_check(tx.keys.row_check, reveal._replace(share_id=row.id)))
    update_row(tx, row, row._replace(state=ShareState.SENT.value))


def mark_sending(tx: Transaction, share_id: int, *, height: int, endpoint: str, decide_height: int = 0) -> bool:
    """Record that sending starts, before the first byte is sent, and the height of the next decision.

    Returns False if the share is not in SENT or this host may not send it.
    """
    if not tx.can_send():
        return False
    reveal = _load_reveal(tx, share_id)
    if reveal is None:
        return False
    first = height if reveal.first_sent_height is None else reveal.first_sent_height
    _update_reveal(
        tx,
        reveal._replace(
            sends=reveal.sends + 1,
            first_sent_height=first,
            last_sent_height=max(first, height),
            last_endpoint=truncate_text(endpoint),
            last_outcome=None,
            decide_height=decide_height,
        ),
    )
    return True


def record_outcome(tx: Transaction, share_id: int, *, outcome: str, decide_height: int = 0) -> None:
    """Record the result of the latest send, if the share is still in SENT and this host may send it.

    Otherwise another host has become the sender and has newer results.
    """
    reveal = _load_reveal(tx, share_id) if tx.can_send() else None
    if reveal is not None:
        _update_reveal(tx, reveal._replace(last_outcome=truncate_text(outcome), decide_height=decide_height))


def read_sent(rows: Iterable[Row], row_key: bytes) -> tuple[list[SentReveal], list[int]]:
    """Convert rows of the query `unconfirmed` to messages.

    A row has the columns of a share with its round id, those of its message (NULL if it has none), and the number of
    history entries about messages.

    Returns:
        The messages, and the ids of the shares with a damaged row.
    """
    sound: list[SentReveal] = []
    damaged: list[int] = []
    width = len(ShareRow._fields)
    for columns in rows:
        share, reveal = ShareRow(*columns[:width]), RevealRow(*columns[width:-1])
        if is_sound(row_key, share) and is_sound(row_key, reveal):
            sound.append(
                SentReveal(
                    row=reveal,
                    round_id=share.round_id,
                    nullifier=share.nullifier,
                    attempts=share.attempts,
                    due_ms=share.due_ms,
                    first_due_ms=share.first_due_ms,
                    rank=share.rank,
                    is_first_message=columns[-1] == 1,
                )
            )
        else:
            damaged.append(share.id)
    return sound, damaged


def quarantine(tx: Transaction, share_ids: Iterable[int]) -> None:
    """Quarantine those of these shares that are damaged."""
    for share_id in share_ids:
        _load_reveal(tx, share_id)


def check_broadcast_shares(tx: Transaction) -> None:
    """Read every share in SENT and quarantine those that are unreadable."""
    params = {"state": ShareState.SENT.value, "limit": NO_LIMIT}
    quarantine(tx, [row[0] for row in tx.fetch_all("shares_in_state", params)])


def check_batch(tx: Transaction, after: int, limit: int) -> int | None:
    """Check up to `limit` live shares with an id above `after`, and their messages. Damaged ones are quarantined.

    Returns:
        The id of the last row that was read, None if there was none.
    """
    ids = [row[0] for row in tx.fetch_all("share_ids", {"after": after, "limit": limit})]
    quarantine(tx, ids)
    return ids[-1] if ids else None


def _load_reveal(tx: Transaction, share_id: int) -> RevealRow | None:
    """Return the message of a share in SENT, None if there is none. If it is damaged, the share is quarantined."""
    row = load_row(tx, share_id)
    if row is None or row.state != ShareState.SENT:
        return None
    columns = tx.fetch_one("reveal", (share_id,))
    if columns is not None:
        reveal = RevealRow(*columns)
        if is_sound(tx.keys.row_check, reveal):
            return reveal
    tx.quarantine(share_id, row.to_damaged_share())
    return None


def _update_reveal(tx: Transaction, reveal: RevealRow) -> None:
    tx.execute("change_reveal", with_check(tx.keys.row_check, reveal)._asdict())
