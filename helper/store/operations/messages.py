"""Operations on the messages of shares: keeping, sending, reading them back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from helper.core.share import ShareState
from helper.store.operations.transitions import Transition, check_source, load, load_for, move_row
from helper.store.records import RevealRow, ShareRow, short
from helper.store.rows import PreparedReveal, SentReveal
from helper.store.transaction import Transaction

PREPARED: Final = "prepared"
"""What hosts are told when there is a message to send."""


def prepare(tx: Transaction, share_id: int, prepared: PreparedReveal, at_ms: int) -> bool:
    """WITNESSED -> BROADCAST with its message."""
    change = Transition(
        frozenset({ShareState.WITNESSED}),
        ShareState.BROADCAST,
        "broadcast",
        f"proven with {prepared.circuit}, the message is kept",
        at_ms,
        proved_height=prepared.height,
    )
    row = load_for(tx, share_id, change)
    if row is None:
        return False
    check_source(row, change)
    kept = RevealRow(
        share_id, prepared.message, prepared.tx_hash, prepared.anchor_height, prepared.circuit, prepared.height
    ).sealed(tx.keys.rows)
    # The message first: the schema lets no share be BROADCAST without one.
    tx.run("add_reveal", (*kept[:6], kept.row_check))
    tx.tell(PREPARED)
    move_row(tx, row, change)
    return True


def mark_sending(tx: Transaction, share_id: int, at_ms: int, height: int, endpoint: str) -> bool:
    """One send more, at this chain height, to this endpoint; False where it is another host that sends."""
    if not tx.sends():
        return False
    kept = _reveal(tx, share_id, at_ms)
    if kept is None:
        return False
    first = height if kept.first_sent_height is None else kept.first_sent_height
    _write(
        tx,
        kept._replace(
            sends=kept.sends + 1,
            first_sent_height=first,
            last_sent_height=max(first, height),
            last_endpoint=short(endpoint),
            last_outcome=None,
        ),
    )
    return True


def record_outcome(tx: Transaction, share_id: int, at_ms: int, outcome: str) -> None:
    """What the latest send came to, unless another host sends by now: what it knows is newer."""
    kept = _reveal(tx, share_id, at_ms) if tx.sends() else None
    if kept is not None:
        _write(tx, kept._replace(last_outcome=short(outcome)))


def read_sent(found: Iterable[tuple[Any, ...]], row_key: bytes) -> tuple[list[SentReveal], list[int]]:
    """The messages of rows as the query `unconfirmed` gives them, and the ids of those that are damaged.

    Args:
        found: the columns of a share with its round's id, those of its message (NULL when it has none), and the numbers
            of lines in its history, of all and of those about its messages.
        row_key: the key of the checks.
    """
    sound: list[SentReveal] = []
    damaged: list[int] = []
    width = len(ShareRow._fields)
    for columns in found:
        share, kept = ShareRow(*columns[:width]), RevealRow(*columns[width:-2])
        if share.is_sound(row_key) and kept.is_sound(row_key):
            sound.append(kept.sent(share, first_try=columns[-2] == 1, first_message=columns[-1] == 1))
        else:
            damaged.append(share.id)
    return sound, damaged


def set_aside(tx: Transaction, share_ids: Iterable[int], at_ms: int) -> None:
    """Look again at shares that a reader found damaged, and set them aside."""
    for share_id in share_ids:
        _reveal(tx, share_id, at_ms)


def look_through(tx: Transaction, at_ms: int) -> None:
    """Read every share in BROADCAST, so that those that can not be read are set aside."""
    params = {"state": ShareState.BROADCAST.value, "limit": -1}
    set_aside(tx, [row[0] for row in tx.all("shares_in_state", params)], at_ms)


def check_some(tx: Transaction, at_ms: int, after: int, limit: int) -> int | None:
    """Read some live shares, and the messages of those that have one; those that are damaged are set aside.

    Returns:
        The last row that was looked at, None when there was none beyond `after`.
    """
    ids = [row[0] for row in tx.all("share_ids", {"after": after, "limit": limit})]
    set_aside(tx, ids, at_ms)
    return ids[-1] if ids else None


def _reveal(tx: Transaction, share_id: int, at_ms: int) -> RevealRow | None:
    """A sound message of a share in BROADCAST; with a damaged one the whole share is set aside."""
    row = load(tx, share_id, at_ms)
    if row is None or row.state != ShareState.BROADCAST:
        return None
    found = tx.one("reveal", (share_id,))
    if found is not None:
        kept = RevealRow(*found)
        if kept.is_sound(tx.keys.rows):
            return kept
    tx.set_aside(share_id, row.damaged(), at_ms)
    return None


def _write(tx: Transaction, kept: RevealRow) -> None:
    kept = kept.sealed(tx.keys.rows)
    names = ("share_id", "sends", "first_sent_height", "last_sent_height", "last_endpoint", "last_outcome", "row_check")
    tx.run("change_reveal", {name: getattr(kept, name) for name in names})
