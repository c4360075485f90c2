"""Imports shares from another machine's export.

A share that was exported from this queue is queued again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Final

from helper.core.share import Share, ShareState
from helper.store.action_models import ExportedShare, ImportedShare, ImportResult, ValidatedShare
from helper.store.models import HistoryEntry
from helper.store.operations.actions import requeue_failed
from helper.store.operations.messages import restore_message
from helper.store.operations.shares import create_row
from helper.store.operations.transitions import add_history, load_row, update_row
from helper.store.table_rows import MAX_STAGE_CHARS, RevealRow, ShareRow, share_ref, truncate_text
from helper.store.transaction import ShareIdentity, Transaction

IMPORT_STAGE: Final = "import"


def import_shares(
    tx: Transaction, shares: Sequence[ValidatedShare], note: str, at_ms: int, *, dry_run: bool
) -> list[ImportedShare]:
    """Import shares, each in the state that it had on the other machine.

    A share that is FAILED here with the stage `MOVED` was moved to another machine earlier. It returns to RECEIVED with
    attempts reset, regardless of its state on the other machine; otherwise neither machine would reveal it.

    Args:
        shares: validated in the same way as posted shares.
        note: text of the history entry.
        at_ms: Unix milliseconds now.
        dry_run: change nothing.

    Returns:
        The results in the order of `shares`. A share of an unknown round is skipped, because it could never be purged.
    """
    tx.lock_shared()
    return [_import_share(tx, exported, nullifier, note, at_ms, dry_run=dry_run) for exported, nullifier in shares]


def _import_share(
    tx: Transaction, exported: ExportedShare, nullifier: bytes, note: str, at_ms: int, *, dry_run: bool
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
    elif tx.fetch_one("is_spent", (key.no, nullifier)) is not None:
        result = ImportResult.CONFIRMED
    elif tx.find_taken([(key.no, mac, nullifier)]):
        known = _find_moved(tx, (key.no, mac, nullifier), exported.share, at_ms)
        result = known if isinstance(known, ImportResult) else ImportResult.RESTORED
        if isinstance(known, ShareRow) and not dry_run:
            _requeue_moved(tx, known, exported, note, at_ms)
    elif not dry_run:
        row = _create_row(tx, (key.no, mac, nullifier), exported)
        tx.add_shares([row])
        tx.adjust_count(key.no, ShareState.RECEIVED, 1)
        for entry in (*exported.history, HistoryEntry(at_ms, IMPORT_STAGE, note, spent_attempt=False)):
            add_history(tx, row.id, entry)
        _restore_state(tx, row, exported, at_ms)
    return ImportedShare(result, share_ref(mac), round_id)


def _find_moved(tx: Transaction, identity: ShareIdentity, share: Share, at_ms: int) -> ShareRow | ImportResult:
    """Return the row of a known share that was moved to another machine, else the reason for skipping the share."""
    round_no, mac, nullifier = identity
    live = tx.fetch_one("get_share_id", (mac,))
    if live is None:
        is_confirmed = tx.fetch_one("has_tombstone", (round_no, mac)) is not None
        # Neither live nor confirmed under its own key, so another share has its nullifier.
        return ImportResult.CONFIRMED if is_confirmed else ImportResult.QUEUED
    row = load_row(tx, live[0], at_ms)
    if row is None:
        return ImportResult.DAMAGED
    if _comparable_fields(row.to_share()) != _comparable_fields(share):
        return ImportResult.CONFLICT
    if row.state != ShareState.FAILED:
        return ImportResult.QUEUED
    return row if row.is_moved and row.nullifier == nullifier else ImportResult.FAILED


def _comparable_fields(share: Share) -> tuple[object, ...]:
    """Return what two copies of a share have in common. Its `submit_at` may differ; the stored value applies."""
    return astuple(replace(share, submit_at=0))


def _requeue_moved(tx: Transaction, row: ShareRow, exported: ExportedShare, note: str, at_ms: int) -> None:
    """Return a moved share to RECEIVED, or to BROADCAST if its message may have been sent."""
    rows = tx.fetch_all("history", (row.id,))
    stored = {HistoryEntry(entry_at_ms, stage, text, bool(counted)) for entry_at_ms, stage, text, counted in rows}
    for entry in exported.history:
        if entry not in stored:
            add_history(tx, row.id, entry)
    requeued = requeue_failed(tx, row, IMPORT_STAGE, note, at_ms, proved_height=exported.proved_height)
    # The file may have another submit_at for the same share; the value acknowledged here applies.
    if exported.state is ShareState.BROADCAST and row.submit_at * 1000 <= at_ms:
        _restore_state(tx, requeued, exported, at_ms)


def _create_row(tx: Transaction, identity: ShareIdentity, exported: ExportedShare) -> ShareRow:
    """Return the row of a new share, in RECEIVED."""
    due_ms = max(exported.due_ms, exported.share.submit_at * 1000)  # never before submit_at, regardless of the file
    row = create_row(tx, exported.share, identity, received_ms=exported.received_ms, due_at_ms=due_ms)
    return row._replace(
        attempts=exported.attempts,
        crashes=exported.crashes,
        proved_height=exported.proved_height,
        stage=truncate_text(exported.stage, MAX_STAGE_CHARS),
        note=truncate_text(exported.note),
    ).with_check(tx.keys.row_check)


def _restore_state(tx: Transaction, row: ShareRow, exported: ExportedShare, at_ms: int) -> None:
    """Move a share from RECEIVED to its exported state by legal transitions."""
    if exported.state is ShareState.FAILED:
        update_row(tx, row, row._replace(state=ShareState.FAILED.value))
    elif exported.state is ShareState.BROADCAST and may_have_been_sent(exported, at_ms):
        restore_message(tx, row, _create_reveal(row.id, exported))


def may_have_been_sent(exported: ExportedShare, at_ms: int) -> bool:
    """Return whether to keep an imported message: a send was started and `submit_at` is not in the future.

    Any other message never left the other machine. It is dropped, and the share is proven again when it is due.
    """
    reveal = exported.reveal
    return reveal is not None and reveal.sends > 0 and exported.share.submit_at * 1000 <= at_ms


def _create_reveal(share_id: int, exported: ExportedShare) -> RevealRow:
    """Return the row of an imported message, without its check."""
    reveal = exported.reveal
    assert reveal is not None
    prepared = reveal.prepared
    return RevealRow(
        share_id=share_id,
        message=prepared.message,
        tx_hash=prepared.tx_hash,
        anchor_height=prepared.anchor_height,
        circuit=prepared.circuit,
        height=prepared.height,
        sends=reveal.sends,
        first_sent_height=reveal.first_sent_height,
        last_sent_height=reveal.last_sent_height,
        last_endpoint=_truncate_or_none(reveal.last_endpoint),
        last_outcome=_truncate_or_none(reveal.last_outcome),
        decide_height=(reveal.last_sent_height or 0) + 1,
    )


def _truncate_or_none(text: str | None) -> str | None:
    return None if text is None else truncate_text(text)
