"""Operator queries on a queue, for both databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, get_type_hints

from helper.core.share import ShareState
from helper.store.audit_log import ActionRow, read_action
from helper.store.ledger import LEDGER_KEY, Ledger, parse_ledger
from helper.store.models import (
    MIN_REF_CHARS,
    MINUTES_AHEAD,
    DamagedShare,
    DueBucket,
    DueForecast,
    FailedShares,
    HistoryEntry,
    PurgedShares,
    QueueEntry,
    QueueFilter,
    RetryingShares,
    ShareDetails,
    StoredRound,
    TransactionRow,
)
from helper.store.table_rows import (
    ROW_CHECK_KEY,
    Column,
    RevealRow,
    RoundKeyRow,
    ShareRow,
    read_key,
    read_meta_value,
    read_rounds,
    share_ref,
)
from helper.store.transaction import UNREADABLE_SHARE, Params, RowReader, StoredShare

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

UNREADABLE_NOTE: Final = "the row cannot be read: it is damaged on disk"
_NO_LIMIT_MS: Final = 2**62
_MAC_CHARS: Final = 64
_DAY_SECONDS: Final = 86_400

DocumentT = TypeVar("DocumentT", bound="DataclassInstance")


def _field_types(kind: type) -> dict[str, tuple[type, ...]]:
    """Return the types of a class's fields; two if a field may be None."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}


_COLUMN_TYPES: Final = _field_types(ShareRow)
"""Types of the columns of an undamaged row."""
_EMPTY_ENTRY: Final = QueueEntry(**{name: types[0]() for name, types in _field_types(QueueEntry).items()})


def _create(document: type[DocumentT], values: Mapping[str, Any]) -> DocumentT:
    """Create a document of those values that have the names of its fields."""
    return document(**{field.name: values[field.name] for field in fields(document)})


def to_query_params(query: QueueFilter) -> dict[str, Column]:
    """Return due time and stage of a filter as query parameters."""
    return {
        "due_before_ms": _NO_LIMIT_MS if query.due_before_ms is None else query.due_before_ms,
        "stage": query.stage,
    }


def _is_malformed(row: ShareRow) -> bool:
    """Return whether a row has a column of the wrong type or an unknown state."""
    well_typed = all(type(value) in expected for value, expected in zip(row, _COLUMN_TYPES.values(), strict=True))
    return not well_typed or row.state not in set(ShareState)


def to_queue_entry(stored: StoredShare) -> QueueEntry:
    """Return the list entry of a row. For a malformed row, it contains only the reference and the state.

    Fields of the entry that are named like a column, or an integer of the share, are copied.
    """
    row = stored.row
    if _is_malformed(row):
        return _make_damaged_entry(
            share_ref(row.mac) if isinstance(row.mac, bytes) else "",
            row.round_id if isinstance(row.round_id, bytes) else b"",
            ShareState(row.state) if row.state in set(ShareState) else ShareState.WAITING,
        )
    values = {
        "ref": share_ref(row.mac),
        "round": row.round_id.hex(),
        "state": ShareState(row.state).json_name,
        "due": row.due_ms / 1000,
        "damaged": stored.is_quarantined,
    }
    return _create(QueueEntry, {**row._asdict(), **row.integers, **values})


def _make_damaged_entry(ref: str, round_id: bytes, state: ShareState) -> QueueEntry:
    entry = replace(_EMPTY_ENTRY, ref=ref, round=round_id.hex(), state=state.json_name)
    return replace(entry, stage="damaged", note=UNREADABLE_NOTE, damaged=True)


def mac_bounds(ref: str) -> tuple[bytes, bytes] | None:
    """Return the lowest and highest mac with this hex prefix; None if the prefix is not valid."""
    prefix = ref.lower()
    if not MIN_REF_CHARS <= len(prefix) <= _MAC_CHARS or set(prefix) - set("0123456789abcdef"):
        return None
    return bytes.fromhex(prefix.ljust(_MAC_CHARS, "0")), bytes.fromhex(prefix.ljust(_MAC_CHARS, "f"))


class QueueReader:
    """Queries for operators. Results contain no witness field, position or nullifier. `now` is in Unix seconds.

    Every method may raise `StoreError`.

    Args:
        operator_reader: connection for these queries. They can take long, so the service uses a different connection.
    """

    def __init__(self, operator_reader: RowReader) -> None:
        self._operator_reader = operator_reader

    async def count_shares(self) -> dict[bytes, dict[ShareState, int]]:
        """Return the number of shares by round and state, with tombstones as CONFIRMED. Zero counts are omitted."""
        counts: dict[bytes, dict[ShareState, int]] = {}
        for round_id, state, number in await self._operator_reader.fetch("counts"):
            counts.setdefault(round_id, {})[ShareState(state)] = number
        return counts

    async def list_shares(self, query: QueueFilter, limit: int) -> list[QueueEntry]:
        """Return the first shares that match, by due time. Shares that were quarantined as unreadable always match.

        The states are read from one snapshot: otherwise a share that changes its state between two queries is not
        listed.
        """
        params: dict[str, Column] = {**to_query_params(query), "limit": limit}
        queries: list[tuple[str, Params]] = []
        if query.state in {None, ShareState.WAITING}:
            rounds = [(query.round_id,)] if query.round_id else await self._operator_reader.fetch("all_round_ids")
            queries += [("list_waiting", {**params, "round_id": round_id}) for (round_id,) in rounds]
        for state in sorted({ShareState.PROVING, ShareState.FAILED, ShareState.SENT}):
            if query.state in {None, state}:
                queries.append(("list_in_progress", {**params, "round_id": query.round_id, "state": state.value}))
        rows = await self._operator_reader.fetch_snapshot(queries)
        entries = [to_queue_entry(StoredShare(*row)) for row in rows]
        unreadable = [share for share in await self.list_damaged() if share == UNREADABLE_SHARE]
        entries += [_make_damaged_entry("", b"", ShareState.WAITING) for _ in unreadable]
        return sorted(entries, key=lambda entry: (entry.due, entry.ref))[:limit]

    async def get_share_details(self, share_ref: str) -> ShareDetails | None:
        """Return details and history of the share whose reference starts with `share_ref` (at least 6 hex characters).

        Returns None if no share or more than one matches.
        """
        bounds = mac_bounds(share_ref)
        rows = [] if bounds is None else await self._operator_reader.fetch("shares_by_prefix", bounds)
        if len(rows) != 1:
            return None
        *columns, vote_end_time = rows[0]
        stored = StoredShare(*columns)
        share = stored.row
        history = tuple(
            HistoryEntry(at_ms, stage, note, bool(counted))
            for at_ms, stage, note, counted in await self._operator_reader.fetch("history", (share.id,))
        )
        rows = await self._operator_reader.fetch("reveal", (share.id,)) if share.state == ShareState.SENT else []
        transactions = [
            _create(TransactionRow, {**reveal._asdict(), "hash": reveal.tx_hash.hex().upper()})
            for reveal in (RevealRow(*row) for row in rows)
            if reveal.tx_hash
        ]
        return ShareDetails(
            entry=to_queue_entry(stored),
            received_ms=share.received_ms,
            vote_end_time=vote_end_time if isinstance(vote_end_time, int) else None,
            history=(HistoryEntry(share.received_ms, "accepted", "", spent_attempt=False), *history),
            attempts_by_stage=dict(Counter(line.stage for line in history if line.spent_attempt)),
            transaction=transactions[0] if transactions else None,
        )

    async def find_share_ids(self, ref: str) -> list[int]:
        """Return the row ids of live shares whose reference starts with `ref`, at most two; none if malformed."""
        bounds = mac_bounds(ref)
        return [] if bounds is None else [row[0] for row in await self._operator_reader.fetch("ids_by_prefix", bounds)]

    async def list_failed_ids(self, round_id: bytes | None, *, after_id: int, limit: int) -> list[int]:
        """Return row ids of failed shares above `after_id`, ascending, of one round or all. Reads only an index."""
        round_no: int | None = None
        if round_id is not None:
            key_rows = await self._operator_reader.fetch("round_key", (round_id,))
            if not key_rows:
                return []
            round_no = RoundKeyRow(*key_rows[0]).no
        params: dict[str, Column] = {"round_no": round_no, "after": after_id, "limit": limit}
        return [row[0] for row in await self._operator_reader.fetch("failed_ids", params)]

    async def list_damaged(self) -> list[DamagedShare]:
        """Return the rows that were quarantined because they failed their check."""
        return [DamagedShare(*row[1:]) for row in await self._operator_reader.fetch("damaged")]

    async def list_matching_failures(self, query: QueueFilter, *, limit: int) -> list[FailedShares]:
        """Return failed shares that match a filter, grouped by stage and reason, the latest first."""
        if query.state not in {None, ShareState.FAILED}:
            return []
        params: dict[str, Column] = {**to_query_params(query), "round_id": query.round_id, "limit": limit}
        rows = await self._operator_reader.fetch("failed_groups", params)
        return [FailedShares(stage, note, count, at_ms / 1000) for at_ms, stage, note, count in rows]

    async def list_purged_failures(self) -> list[PurgedShares]:
        """Return failure counts of recently purged rounds by day, stage and reason, the latest day first."""
        rows = await self._operator_reader.fetch("purged_failures")
        return [PurgedShares(day * _DAY_SECONDS, *counted) for day, *counted in rows]

    async def count_due_ahead(self, *, now: float) -> dict[bytes, DueForecast]:
        """Return the due times of the pending shares by round; rounds without pending shares are omitted."""
        forecasts: dict[bytes, DueForecast] = {}
        now_ms = int(now * 1000)
        times: dict[str, Column] = {"now_ms": now_ms, "until_ms": now_ms + 60_000 * MINUTES_AHEAD}
        for (round_id,) in await self._operator_reader.fetch("all_round_ids"):
            params = {**times, "round_id": round_id}
            by_minute: dict[int, int] = dict(await self._operator_reader.fetch("due_ahead", params))
            waiting = by_minute.pop(-1, 0)
            if by_minute or waiting:
                minutes = tuple(by_minute.get(minute, 0) for minute in range(MINUTES_AHEAD))
                forecasts[round_id] = DueForecast(minutes, max(0, waiting - sum(minutes)))
        return forecasts

    async def list_retries(self, *, now: float) -> list[RetryingShares]:
        """Return the shares that wait for a retry, grouped by round, failure and minute."""
        rows = await self._operator_reader.fetch("retries", {"now_ms": int(now * 1000)})
        return [
            RetryingShares(round_id.hex(), stage, note, minute, count, next_ms / 1000)
            for round_id, stage, note, minute, count, next_ms in rows
        ]

    async def count_ready(self, *, now: float) -> dict[bytes, int]:
        """Return the number of waiting shares that are due, by round."""
        return dict(await self._operator_reader.fetch("ready_counts", {"now_ms": int(now * 1000)}))

    async def count_by_due_bucket(self, round_id: bytes, *, start: int, width: int, now: float) -> list[DueBucket]:
        """Return the number of live shares of a round by state and due time, in intervals of `width` seconds.

        Interval 0 begins at `start`, in Unix seconds.
        """
        params: dict[str, Column] = {
            "round_id": round_id,
            "start_ms": start * 1000,
            "width_ms": width * 1000,
            "now_ms": int(now * 1000),
        }
        rows = await self._operator_reader.fetch("due_buckets", params)
        return [DueBucket(ShareState(state), bool(is_due), index, count) for state, is_due, index, count in rows]

    async def list_rounds(self) -> list[StoredRound]:
        """Return all stored rounds, the oldest first. A damaged row is omitted until the chain lists its round again.

        Raises:
            StoreCorrupt: the key of the row checks is damaged.
        """
        key = read_key(await self._operator_reader.fetch("get_meta", (ROW_CHECK_KEY,)), ROW_CHECK_KEY)
        return read_rounds(await self._operator_reader.fetch("rounds"), key)

    async def count_leaves(self) -> dict[bytes, int]:
        """Return the number of stored leaves by round."""
        return dict(await self._operator_reader.fetch("tree_sizes"))

    async def find_rounds_of_nullifier(self, nullifier: bytes) -> list[bytes]:
        """Return the rounds in which a nullifier is spent on the chain."""
        return [row[0] for row in await self._operator_reader.fetch("rounds_of_spent", (nullifier,))]

    async def get_ledger(self) -> Ledger | None:
        """Return which blocks are read, None before the first start."""
        return parse_ledger(read_meta_value(await self._operator_reader.fetch("get_meta", (LEDGER_KEY,))))

    async def list_actions(self, *, limit: int) -> list[ActionRow]:
        """Return the latest operator actions of the audit log, newest first."""
        return [read_action(row) for row in await self._operator_reader.fetch("actions", (limit,))]
