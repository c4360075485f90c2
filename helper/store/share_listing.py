"""Lists live shares for operators, including damaged ones."""

from __future__ import annotations

from typing import Final, NamedTuple

from helper.core.share import ShareState
from helper.store.models import MIN_REF_CHARS, DamagedShare, QueueEntry, QueueFilter
from helper.store.table_rows import Column, share_ref
from helper.store.transaction import UNREADABLE_SHARE, Params, RowReader

UNREADABLE_NOTE: Final = "the row cannot be read: it is damaged on disk"
_NO_LIMIT_MS: Final = 2**62
_MAC_CHARS: Final = 64
_COLUMN_TYPES: Final = (bytes, bytes, int, int, int, int, int, str, str)
"""Types of the columns of an entry in an undamaged row."""


class ListedShare(NamedTuple):
    """A live share as the queries of this module return it.

    In a damaged row, any column may have any value. The last three columns are those of the query `shares_by_prefix`.
    """

    mac: bytes
    round_id: bytes
    state: int
    submit_at: int
    due_ms: int
    attempts: int
    crashes: int
    stage: str
    note: str
    is_quarantined: int
    id: int = 0
    received_ms: int = 0
    vote_end_time: int | None = None


async def list_shares(reader: RowReader, query: QueueFilter, limit: int) -> list[QueueEntry]:
    """Return the first shares that match, by due time. Shares that were quarantined as unreadable always match.

    The states are read from one snapshot: otherwise a share that changes its state between two queries is not listed.
    """
    params: dict[str, Column] = {**to_query_params(query), "limit": limit}
    queries: list[tuple[str, Params]] = []
    if query.state in {None, ShareState.RECEIVED}:
        round_ids = [(query.round_id,)] if query.round_id is not None else await reader.fetch("all_round_ids", ())
        queries += [("list_waiting", {**params, "round_id": round_id}) for (round_id,) in round_ids]
    for state in sorted({ShareState.WITNESSED, ShareState.FAILED, ShareState.BROADCAST}):
        if query.state in {None, state}:
            queries.append(("list_in_progress", {**params, "round_id": query.round_id, "state": state.value}))
    entries = [to_queue_entry(ListedShare(*row)) for row in await reader.fetch_snapshot(queries)]
    damaged = [DamagedShare(*row) for row in await reader.fetch("damaged")]
    entries += [_make_damaged_entry("", b"", ShareState.RECEIVED) for share in damaged if share == UNREADABLE_SHARE]
    return sorted(entries, key=lambda entry: (entry.due_ms, entry.ref))[:limit]


def to_query_params(query: QueueFilter) -> dict[str, Column]:
    """Return due time and stage of a filter as query parameters."""
    return {
        "due_before_ms": _NO_LIMIT_MS if query.due_before_ms is None else query.due_before_ms,
        "stage": query.stage,
    }


def _is_malformed(row: ListedShare) -> bool:
    """Return whether a row has a column of the wrong type or an unknown state."""
    well_typed = all(type(value) is expected for value, expected in zip(row, _COLUMN_TYPES, strict=False))
    return not well_typed or row.state not in set(ShareState)


def to_queue_entry(row: ListedShare) -> QueueEntry:
    """Return the list entry of a row. For a malformed row, it contains only the reference and the state."""
    if _is_malformed(row):
        return _make_damaged_entry(
            share_ref(row.mac) if isinstance(row.mac, bytes) else "",
            row.round_id if isinstance(row.round_id, bytes) else b"",
            ShareState(row.state) if row.state in set(ShareState) else ShareState.RECEIVED,
        )
    return QueueEntry(
        ref=share_ref(row.mac),
        round_id=row.round_id,
        state=ShareState(row.state),
        submit_at=row.submit_at,
        due_ms=row.due_ms,
        attempts=row.attempts,
        crashes=row.crashes,
        stage=row.stage,
        note=row.note,
        damaged=bool(row.is_quarantined),
    )


def _make_damaged_entry(ref: str, round_id: bytes, state: ShareState) -> QueueEntry:
    return QueueEntry(ref, round_id, state, 0, 0, 0, 0, stage="damaged", note=UNREADABLE_NOTE, damaged=True)


def mac_bounds(ref: str) -> tuple[bytes, bytes] | None:
    """Return the lowest and highest mac with this hex prefix; None if the prefix is not valid."""
    prefix = ref.lower()
    if not MIN_REF_CHARS <= len(prefix) <= _MAC_CHARS or set(prefix) - set("0123456789abcdef"):
        return None
    return bytes.fromhex(prefix.ljust(_MAC_CHARS, "0")), bytes.fromhex(prefix.ljust(_MAC_CHARS, "f"))
