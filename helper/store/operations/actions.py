"""Operator actions: the audit log, retries, and marking exported shares as moved.

Each operation reads a bounded number of rows, so that wallets never wait long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from hmac import compare_digest
from typing import Any, Final

import orjson

from helper.core.share import ShareState
from helper.store.action_models import MOVED, Action, Actor, RowVersion
from helper.store.models import QueueFilter
from helper.store.operations.transitions import Transition, apply_transition, apply_transition_to_row, load_row
from helper.store.table_rows import Row, ShareRow, truncate_text
from helper.store.transaction import Transaction

MAX_ACTIONS: Final = 10_000
"""Maximum number of entries in the audit log; older ones are deleted."""
_NAME_CHARS: Final = 64

_IDLE_STATES: Final = frozenset({ShareState.RECEIVED, ShareState.FAILED})
_LIVE_STATES: Final = frozenset(ShareState) - {ShareState.SUBMITTED}


# ---------------------------------------------------------------------- audit log


def begin_action(tx: Transaction, actor: Actor, name: str, parameters: Mapping[str, Any], at_ms: int) -> int:
    """Record that an action starts. Returns its number."""
    row = (
        at_ms,
        actor.uid,
        truncate_text(actor.name, _NAME_CHARS),
        actor.channel,
        name,
        orjson.dumps(dict(parameters)).decode(),
    )
    inserted = tx.fetch_one("begin_action", row)
    assert inserted is not None
    number = int(inserted[0])
    tx.execute("trim_actions", (number - MAX_ACTIONS,))
    return number


def end_action(tx: Transaction, number: int, outcome: Mapping[str, Any], at_ms: int) -> None:
    """Record the outcome of an action."""
    tx.execute("end_action", (at_ms, orjson.dumps(dict(outcome)).decode(), number))


def read_action(row: Row) -> Action:
    """Return an audit log entry from a row of the query `actions`."""
    number, uid, user, channel, started_ms, name, parameters, ended_ms, outcome = row
    return Action(
        id=number,
        actor=Actor(uid, user, channel),
        started_ms=started_ms,
        name=name,
        parameters=_parse_object(parameters),
        ended_ms=ended_ms,
        outcome=None if outcome is None else _parse_object(outcome),
    )


def _parse_object(text: str) -> dict[str, Any]:
    """Return a JSON object; {"damaged": true} if the text is damaged."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"damaged": True}


# ---------------------------------------------------------------------- retries


def retry_failed(
    tx: Transaction,
    ids: Sequence[int],
    query: QueueFilter,
    *,
    closed: Collection[bytes],
    note: str,
    at_ms: int,
    dry_run: bool,
) -> Counter[str]:
    """Make failed shares, and shares that wait for a retry, RECEIVED with attempts reset; see `Store.retry_failed`."""
    counts: Counter[str] = Counter()
    for share_id in ids:
        row = load_row(tx, share_id, at_ms)
        if row is None or not _can_be_retried(row) or not matches_filter(row, query):
            continue
        if row.round_id in closed or is_marked_closed(tx, row.round_no):
            counts["closed"] += 1
            continue
        if row.is_moved and query.stage != MOVED:  # the other machine reveals it
            counts["moved"] += 1
            continue
        if not dry_run:
            requeue_failed(tx, row, "operator", note, at_ms)
        counts["retried"] += 1
    return counts


def _can_be_retried(row: ShareRow) -> bool:
    return row.state == ShareState.FAILED or (row.state == ShareState.RECEIVED and row.attempts > 0)


def requeue_failed(
    tx: Transaction, row: ShareRow, stage: str, note: str, at_ms: int, *, proved_height: int | None = None
) -> ShareRow:
    """Make a share RECEIVED at the time of its first attempt, with attempts reset and without its message.

    Args:
        row: a sound row in FAILED, or in RECEIVED while it waits for a retry, read in this transaction.
        stage: stage of the history entry.
        note: text of the history entry.
        at_ms: Unix milliseconds now.
        proved_height: chain height of a proof made on another machine, None for no change.

    Returns:
        The new row.
    """
    change = Transition(
        _IDLE_STATES,
        ShareState.RECEIVED,
        stage,
        note,
        at_ms,
        due_ms=min(row.due_ms, row.first_due_ms),
        attempts=None,
        proved_height=proved_height,
        ignore_claim=True,
    )
    requeued = apply_transition_to_row(tx, row, change)
    tx.execute("drop_reveal", (row.id,))
    return requeued


def matches_filter(row: ShareRow, query: QueueFilter) -> bool:
    """Return whether a sound row matches a filter."""
    return (
        query.round_id in (None, row.round_id)
        and query.state in (None, row.state)
        and query.stage in (None, row.stage)
        and (query.due_before_ms is None or row.due_ms < query.due_before_ms)
    )


def is_marked_closed(tx: Transaction, round_no: int) -> bool:
    """Return whether the store has marked a round as closed by the chain."""
    stored = tx.read_round(round_no)
    return stored is not None and stored.closed_ms is not None


# ---------------------------------------------------------------------- exports to another machine


def mark_moved(
    tx: Transaction, versions: Sequence[RowVersion], note: str, at_ms: int, *, idle_only: bool
) -> Counter[str]:
    """Fail shares that were exported to another machine; see `Store.mark_moved`."""
    counts: Counter[str] = Counter()
    sources = _IDLE_STATES if idle_only else _LIVE_STATES
    change = Transition(sources, ShareState.FAILED, MOVED, note, at_ms, ignore_claim=True)
    for share_id, check in versions:
        row = load_row(tx, share_id, at_ms)
        if row is None or row.state not in sources or not compare_digest(row.row_check, check):
            counts["stayed"] += 1
            continue
        apply_transition(tx, share_id, change)
        counts["moved"] += 1
    return counts
