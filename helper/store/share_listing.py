"""Lists live shares for operators, including damaged ones."""

from __future__ import annotations

from typing import Final, NamedTuple

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store.models import MIN_REF_CHARS, QueueEntry, QueueFilter
from helper.store.table_rows import Column, share_ref
from helper.store.transaction import Params, RowReader

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
    """Return the first shares that match, by due time. Includes unreadable shares, which do not hide others.

    The states are read from one snapshot: otherwise a share that changes its state between two queries is not listed.
    """
    states = set(ShareState) - {ShareState.SUBMITTED} if query.state is None else {query.state}
    try:
        queries = await _matching_queries(reader, query, states, limit)
        rows = [ListedShare(*row) for row in await reader.fetch_snapshot(queries)]
    except StoreCorrupt:
        rows = [row for row in await _read_individually(reader, query, states) if _matches(row, query, states)]
    entries = [to_queue_entry(row) for row in rows]
    return sorted(entries, key=lambda entry: (entry.due_ms, entry.ref))[:limit]


async def _matching_queries(
    reader: RowReader, query: QueueFilter, states: set[ShareState], limit: int
) -> list[tuple[str, Params]]:
    """Return queries for the matches: at most `limit` pending ones per round and at most `limit` per other state."""
    params: dict[str, Column] = {**to_query_params(query), "limit": limit}
    queries: list[tuple[str, Params]] = []
    if ShareState.RECEIVED in states:
        for round_id in await _list_round_ids(reader, query):
            queries.append(("list_waiting", {**params, "round_id": round_id}))
    for state in sorted(states - {ShareState.RECEIVED}):
        queries.append(("list_in_progress", {**params, "round_id": query.round_id, "state": state.value}))
    return queries


def to_query_params(query: QueueFilter) -> dict[str, Column]:
    """Return due time and stage of a filter as query parameters."""
    return {
        "due_before_ms": _NO_LIMIT_MS if query.due_before_ms is None else query.due_before_ms,
        "stage": query.stage,
    }


async def _read_individually(reader: RowReader, query: QueueFilter, states: set[ShareState]) -> list[ListedShare]:
    """Return the rows in these states, reading each with its own query; all rows if the indexes are unreadable."""
    try:
        candidates = await _list_candidates(reader, query, states)
    except StoreCorrupt:
        ids = await reader.fetch("share_ids", {"after": 0, "limit": -1})
        candidates = [(share_id, b"", ShareState.RECEIVED, 0) for (share_id,) in ids]
    return [await _read_row(reader, *candidate) for candidate in candidates]


async def _list_candidates(
    reader: RowReader, query: QueueFilter, states: set[ShareState]
) -> list[tuple[int, bytes, ShareState, int]]:
    """Return id, round, state and due time (0 if unknown) of every share in these states, from the indexes only."""
    entries: list[tuple[int, bytes, ShareState, int]] = []
    if ShareState.RECEIVED in states:
        for round_id in await _list_round_ids(reader, query):
            rows = await reader.fetch("waiting_ids", {"round_id": round_id})
            entries += [(share_id, round_id, ShareState.RECEIVED, due_ms) for share_id, due_ms in rows]
    for state in sorted(states - {ShareState.RECEIVED}):
        rows = await reader.fetch("in_progress_ids", {"round_id": query.round_id, "state": state.value})
        entries += [(share_id, round_id or b"", state, 0) for share_id, round_id in rows]
    return entries


async def _read_row(reader: RowReader, share_id: int, round_id: bytes, state: ShareState, due_ms: int) -> ListedShare:
    """Return a share's row; if it is unreadable, a row made from the index entries."""
    try:
        rows = await reader.fetch("list_share", (share_id,))
    except StoreCorrupt:
        rows = []
    if rows:
        return ListedShare(*rows[0])
    return ListedShare(
        mac=b"",
        round_id=round_id,
        state=state.value,
        submit_at=0,
        due_ms=due_ms,
        attempts=0,
        crashes=0,
        stage="damaged",
        note=UNREADABLE_NOTE,
        is_quarantined=1,
    )


async def _list_round_ids(reader: RowReader, query: QueueFilter) -> list[bytes]:
    if query.round_id is not None:
        return [query.round_id]
    return [round_id for (round_id,) in await reader.fetch("all_round_ids", ())]


def _matches(row: ListedShare, query: QueueFilter, states: set[ShareState]) -> bool:
    """Return whether a row matches the filter; a damaged row always does."""
    if _is_malformed(row) or row.note == UNREADABLE_NOTE:
        return True
    in_time = query.due_before_ms is None or row.due_ms < query.due_before_ms
    in_round = query.round_id in (None, row.round_id)
    return in_time and in_round and row.state in states and query.stage in (None, row.stage)


def _is_malformed(row: ListedShare) -> bool:
    """Return whether a row has a column of the wrong type or an unknown state."""
    well_typed = all(type(value) is expected for value, expected in zip(row, _COLUMN_TYPES, strict=False))
    return not well_typed or row.state not in set(ShareState)


def to_queue_entry(row: ListedShare) -> QueueEntry:
    """Return the list entry of a row. For a malformed row, it contains only the reference and the state."""
    if _is_malformed(row):
        return QueueEntry(
            ref=share_ref(row.mac) if isinstance(row.mac, bytes) else "",
            round_id=row.round_id if isinstance(row.round_id, bytes) else b"",
            state=ShareState(row.state) if row.state in set(ShareState) else ShareState.RECEIVED,
            submit_at=0,
            due_ms=0,
            attempts=0,
            crashes=0,
            stage="damaged",
            note=UNREADABLE_NOTE,
            damaged=True,
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


def mac_bounds(ref: str) -> tuple[bytes, bytes] | None:
    """Return the lowest and highest mac with this hex prefix; None if the prefix is not valid."""
    prefix = ref.lower()
    if not MIN_REF_CHARS <= len(prefix) <= _MAC_CHARS or set(prefix) - set("0123456789abcdef"):
        return None
    return bytes.fromhex(prefix.ljust(_MAC_CHARS, "0")), bytes.fromhex(prefix.ljust(_MAC_CHARS, "f"))
