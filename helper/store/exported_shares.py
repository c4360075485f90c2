"""Moves shares between queues: imports shares of an export, and marks exported shares as moved.

A moved share that is imported into the queue from which it was exported is queued again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from hmac import compare_digest
from typing import Final

from helper.core.share import LIVE_STATES, Share, ShareState
from helper.store.messages import restore_message
from helper.store.models import MOVED, HistoryEntry
from helper.store.shares import IDLE_STATES, create_row, find_known_shares, requeue_failed
from helper.store.table_rows import RevealRow, ShareRow, share_ref, with_check
from helper.store.transaction import ShareIdentity, TakenShare, Transaction
from helper.store.transitions import Transition, add_history, apply_transition, load_row, update_row

IMPORT_STAGE: Final = "import"


@dataclass(frozen=True, slots=True)
class ExportedShare:
    """A live share with all data that another machine needs to continue processing it.

    Attributes:
        share: as the wallet posted it.
        state: never CONFIRMED.
        due_ms: Unix milliseconds at which it is processed next.
        crashes: prover workers that crashed on it so far.
        proved_height: chain height at its last proof, None before the first.
        stage: that of its last event, as `note`.
        history: its events, oldest first.
        reveal: its message, if it may have been sent, before it has a share and a check.
    """

    share: Share
    received_ms: int
    state: ShareState
    due_ms: int
    attempts: int
    crashes: int
    proved_height: int | None
    stage: str
    note: str
    history: tuple[HistoryEntry, ...] = ()
    reveal: RevealRow | None = field(default=None, repr=False)


class ImportResult(StrEnum):
    """Result of importing a share.

    IMPORTED and RESTORED mean success; the others are reasons for skipping it.
    """

    IMPORTED = "taken"
    """It was unknown in this queue and was added."""
    RESTORED = "revived"
    """It had been moved from this queue by an export (`MOVED`) and was queued again."""
    CONFIRMED = "confirmed"
    """The chain has confirmed it."""
    QUEUED = "queued"
    """It is already pending, being proven or being sent here."""
    FAILED = "failed"
    """It failed here, and was not moved by an export."""
    DAMAGED = "damaged"
    """Its row here is damaged."""
    CONFLICT = "conflict"
    """Another content is stored here under its key."""
    CLOSED = "closed"
    """The chain has closed its round."""
    UNKNOWN = "unknown"
    """Its round is not known to this queue."""
    INVALID = "invalid"
    """It fails the validation of posted shares."""


@dataclass(frozen=True, slots=True)
class ImportedShare:
    """Result of importing one share.

    Attributes:
        ref: the share's reference in this queue, None if it has none (`UNKNOWN`, `INVALID`).
        round_id: its round, None if the line could not be parsed.
    """

    result: ImportResult
    ref: str | None = None
    round_id: bytes | None = None


ValidatedShare = tuple[ExportedShare, bytes]
"""An imported share, and its nullifier as computed by this helper."""

RowVersion = tuple[int, bytes]
"""Identifies a version of a live row: its id and its row check."""


def import_shares(
    tx: Transaction, shares: Sequence[ValidatedShare], *, note: str, dry_run: bool
) -> list[ImportedShare]:
    """Import shares, each in the state that it had on the other machine. None is due before its `submit_at`.

    A share that is FAILED here with the stage `MOVED` was moved to another machine earlier. It returns to WAITING with
    attempts reset, regardless of its state on the other machine; otherwise neither machine would reveal it.

    Args:
        shares: validated in the same way as posted shares.

    Returns:
        The results in the order of `shares`. A share of an unknown round is skipped, because it could never be purged.
    """
    tx.lock_shared()
    return [_import_share(tx, exported, nullifier, note, dry_run=dry_run) for exported, nullifier in shares]


def _import_share(
    tx: Transaction, exported: ExportedShare, nullifier: bytes, note: str, *, dry_run: bool
) -> ImportedShare:
    round_id = exported.share.round_id
    key = tx.round_key(round_id)
    stored_round = None if key is None else tx.read_round(key.no)
    if key is None or stored_round is None:
        return ImportedShare(ImportResult.UNKNOWN, round_id=round_id)
    mac = key.mac(exported.share.key)
    result = ImportResult.IMPORTED
    if stored_round.closed_ms is not None:
        result = ImportResult.CLOSED
    elif (taken := find_known_shares(tx, [(key.no, mac, nullifier)]).get(0)) is not None:
        known = _find_moved(tx, taken, exported.share, nullifier)
        result = known if isinstance(known, ImportResult) else ImportResult.RESTORED
        if isinstance(known, ShareRow) and not dry_run:
            _requeue_moved(tx, known, exported, note)
    elif not dry_run:
        row = _create_row(tx, (key.no, mac, nullifier), exported)
        tx.add_shares([row])
        tx.adjust_count(key.no, ShareState.WAITING, 1)
        for entry in (*exported.history, HistoryEntry(tx.now_ms, IMPORT_STAGE, note, spent_attempt=False)):
            add_history(tx, row.id, entry)
        _restore_state(tx, row, exported)
    return ImportedShare(result, share_ref(mac), round_id)


def _find_moved(tx: Transaction, taken: TakenShare, share: Share, nullifier: bytes) -> ShareRow | ImportResult:
    """Return the row of a known share that was moved to another machine, else the reason for skipping the share."""
    if taken.is_confirmed:
        return ImportResult.CONFIRMED
    if taken.id_by_mac is None:  # a damaged index hides it
        return ImportResult.QUEUED
    row = load_row(tx, taken.id_by_mac)
    if row is None:
        return ImportResult.DAMAGED
    if _comparable_fields(row.share) != _comparable_fields(share):
        return ImportResult.CONFLICT
    if row.state != ShareState.FAILED:
        return ImportResult.QUEUED
    return row if row.is_moved and row.nullifier == nullifier else ImportResult.FAILED


def _comparable_fields(share: Share) -> tuple[object, ...]:
    """Return what two copies of a share have in common. Its `submit_at` may differ; the stored value applies."""
    return astuple(replace(share, submit_at=0))


def _requeue_moved(tx: Transaction, row: ShareRow, exported: ExportedShare, note: str) -> None:
    """Return a moved share to WAITING, or to SENT if its message may have been sent."""
    rows = tx.fetch_all("history", (row.id,))
    stored = {HistoryEntry(entry_at_ms, stage, text, bool(counted)) for entry_at_ms, stage, text, counted in rows}
    for entry in exported.history:
        if entry not in stored:
            add_history(tx, row.id, entry)
    requeued = requeue_failed(tx, row, IMPORT_STAGE, note, proved_height=exported.proved_height)
    # The file may have another submit_at for the same share; the value acknowledged here applies.
    if exported.state is ShareState.SENT and row.submit_at * 1000 <= tx.now_ms:
        _restore_state(tx, requeued, exported)


def _create_row(tx: Transaction, identity: ShareIdentity, exported: ExportedShare) -> ShareRow:
    due_ms = max(exported.due_ms, exported.share.submit_at * 1000)  # never before submit_at, regardless of the file
    row = create_row(tx, exported.share, identity, received_ms=exported.received_ms, due_at_ms=due_ms)
    row = row._replace(
        attempts=exported.attempts,
        crashes=exported.crashes,
        proved_height=exported.proved_height,
        stage=exported.stage,
        note=exported.note,
    )
    return with_check(tx.keys.row_check, row)


def _restore_state(tx: Transaction, row: ShareRow, exported: ExportedShare) -> None:
    """Move a share from WAITING to its exported state by legal transitions.

    Its message is kept if a send was started and `submit_at` is not in the future. Any other message never left the
    other machine. It is dropped, and the share is proven again when it is due.
    """
    reveal = exported.reveal
    if exported.state is ShareState.FAILED:
        update_row(tx, row, row._replace(state=ShareState.FAILED.value))
    elif reveal is not None and reveal.sends and exported.share.submit_at * 1000 <= tx.now_ms:
        restore_message(tx, row, reveal._replace(decide_height=(reveal.last_sent_height or 0) + 1))


def mark_moved(tx: Transaction, versions: Sequence[RowVersion], *, note: str, idle_only: bool) -> Counter[str]:
    """Fail shares that an export moves to another machine (stage `MOVED`), unless their row has changed.

    Args:
        versions: the rows as they were exported.
        idle_only: only shares in WAITING or FAILED. Set while a helper is running, which may be processing the others.

    Returns:
        How many were `moved`, and how many `stayed`.
    """
    counts: Counter[str] = Counter()
    sources = IDLE_STATES if idle_only else LIVE_STATES
    change = Transition(sources, ShareState.FAILED, MOVED, note, ignore_claim=True)
    for share_id, check in versions:
        row = load_row(tx, share_id)
        if row is None or row.state not in sources or not compare_digest(row.row_check, check):
            counts["stayed"] += 1
            continue
        apply_transition(tx, share_id, change)
        counts["moved"] += 1
    return counts
