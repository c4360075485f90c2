"""Operations that operators ask for: the log of their acts, retries, and handing shares over.

Each looks at a bounded number of rows, so that wallets never wait long for one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from hmac import compare_digest
from typing import Any, Final

import orjson

from helper.core.share import ShareState
from helper.store.action_rows import MOVED, Action, Actor, RowMark
from helper.store.operations.chain_facts import kept_round
from helper.store.operations.transitions import Transition, load, move, move_row
from helper.store.records import ShareRow, short
from helper.store.rows import QueueFilter
from helper.store.transaction import Transaction

ACTIONS_KEPT: Final = 10_000
"""Acts that are remembered; older ones go."""
_NAME_CHARS: Final = 64

_RETRY: Final = frozenset({ShareState.FAILED})
_AT_REST: Final = frozenset({ShareState.RECEIVED, ShareState.FAILED})
_ANYWHERE: Final = frozenset(ShareState) - {ShareState.SUBMITTED}


# ---------------------------------------------------------------------- the log


def begin_action(tx: Transaction, actor: Actor, what: str, wanted: Mapping[str, Any], at_ms: int) -> int:
    """Note that an act begins; its number."""
    row = (at_ms, actor.uid, short(actor.name, _NAME_CHARS), actor.way, what, orjson.dumps(dict(wanted)).decode())
    found = tx.one("begin_action", row)
    assert found is not None
    number = int(found[0])
    tx.run("trim_actions", (number - ACTIONS_KEPT,))
    return number


def end_action(tx: Transaction, number: int, outcome: Mapping[str, Any], at_ms: int) -> None:
    """Note what came of an act."""
    tx.run("end_action", (at_ms, orjson.dumps(dict(outcome)).decode(), number))


def read_action(row: tuple[Any, ...]) -> Action:
    """An act from its row, as the query `actions` gives it."""
    number, uid, who, way, begun_ms, what, wanted, ended_ms, outcome = row
    return Action(
        id=number,
        actor=Actor(uid, who, way),
        begun_ms=begun_ms,
        what=what,
        wanted=_object(wanted),
        ended_ms=ended_ms,
        outcome=None if outcome is None else _object(outcome),
    )


def _object(text: str) -> dict[str, Any]:
    """A JSON object; what a damaged disk made of one is shown as what it is."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"damaged": True}


# ---------------------------------------------------------------------- retries


def retry_failed(
    tx: Transaction,
    ids: Sequence[int],
    wanted: QueueFilter,
    *,
    closed: Collection[bytes],
    note: str,
    at_ms: int,
    dry: bool,
) -> Counter[str]:
    """Put failed shares back at their own time, all attempts back; a closed round's stay.

    Args:
        ids: live shares; those that are not failed, or not what is wanted, are passed over.
        wanted: which of them.
        closed: rounds that the chain's word has closed; those that are marked so here are looked up as well.
        note: what their histories are told.
        dry: only count.

    Returns:
        How many were `retried`, and how many left because their round is `closed`.
    """
    counts: Counter[str] = Counter()
    for share_id in ids:
        row = load(tx, share_id, at_ms)
        if row is None or row.state != ShareState.FAILED or not matches(row, wanted):
            continue
        if row.round_id in closed or is_marked_closed(tx, row.round_no):
            counts["closed"] += 1
            continue
        if not dry:
            revive(tx, row, "operator", note, at_ms)
        counts["retried"] += 1
    return counts


def revive(
    tx: Transaction, row: ShareRow, stage: str, note: str, at_ms: int, *, proved_height: int | None = None
) -> ShareRow:
    """Move a failed share back to RECEIVED at its own time, with all attempts back and without its message.

    Args:
        row: sound and failed, as read in this transaction.
        stage: of the line in its history.
        note: of the line in its history.
        at_ms: unix milliseconds now.
        proved_height: chain height of a proof made elsewhere, None to keep the share's own.

    Returns:
        The row after it.
    """
    change = Transition(
        _RETRY,
        ShareState.RECEIVED,
        stage,
        note,
        at_ms,
        attempts=None,
        proved_height=proved_height,
        by_anyone=True,
    )
    revived = move_row(tx, row, change)
    tx.run("drop_reveal", (row.id,))
    return revived


def matches(row: ShareRow, wanted: QueueFilter) -> bool:
    """Whether a sound row is what an operator asked for."""
    return (
        wanted.round_id in (None, row.round_id)
        and wanted.state in (None, row.state)
        and wanted.stage in (None, row.stage)
        and (wanted.due_before_ms is None or row.due_ms < wanted.due_before_ms)
    )


def is_marked_closed(tx: Transaction, round_no: int) -> bool:
    """Whether a round is marked as closed by the chain's word."""
    kept = kept_round(tx, round_no)
    return kept is not None and kept.closed_ms is not None


# ---------------------------------------------------------------------- handing over


def mark_moved(tx: Transaction, marks: Sequence[RowMark], note: str, at_ms: int, *, at_rest: bool) -> Counter[str]:
    """Give up shares that a file carries to another machine: they fail here, with the stage `MOVED`.

    Args:
        marks: the rows as the file has them; one that changed since stays.
        note: what their histories are told.
        at_rest: only shares that nobody works on. Without a daemon nobody works on any.

    Returns:
        How many were `moved`, and how many `stayed`.
    """
    counts: Counter[str] = Counter()
    sources = _AT_REST if at_rest else _ANYWHERE
    change = Transition(sources, ShareState.FAILED, MOVED, note, at_ms, by_anyone=True)
    for share_id, check in marks:
        row = load(tx, share_id, at_ms)
        if row is None or row.state not in sources or not compare_digest(row.row_check, check):
            counts["stayed"] += 1
            continue
        move(tx, share_id, change)
        counts["moved"] += 1
    return counts
