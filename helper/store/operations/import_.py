"""Imports shares from another machine's export. A share that was handed over from here is revived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from helper.core.schedule import rank
from helper.core.share import ShareState
from helper.store.action_rows import MOVED, Checked, ExportedShare, ImportedShare, ImportResult
from helper.store.operations.actions import revive
from helper.store.operations.chain_facts import kept_round
from helper.store.operations.transitions import load, rewrite
from helper.store.records import Column, RevealRow, ShareRow, share_ref, short
from helper.store.rows import HistoryEntry
from helper.store.transaction import RoundKey, Transaction

STAGE: Final = "import"
_STAGE_CHARS: Final = 32


def import_shares(
    tx: Transaction, carried: Sequence[Checked], note: str, at_ms: int, *, dry: bool
) -> list[ImportedShare]:
    """Take over shares, each in the state that it had there.

    A share that is failed here with the stage `MOVED` was handed over before: it goes back to RECEIVED, with all its
    attempts, whatever its state was there. Otherwise neither machine would reveal it.

    Args:
        carried: checked in the same way as a wallet's shares.
        note: of the line in their histories.
        at_ms: unix milliseconds now.
        dry: change nothing.

    Returns:
        What was done with each, in their order. A share of an unknown round is left, as it could never be purged.
    """
    tx.beside()
    return [_take_over(tx, one, nullifier, note, at_ms, dry=dry) for one, nullifier in carried]


def _take_over(
    tx: Transaction, one: ExportedShare, nullifier: bytes, note: str, at_ms: int, *, dry: bool
) -> ImportedShare:
    round_id = one.share.round_id
    key = tx.round_key(round_id)
    told = None if key is None else kept_round(tx, key.no)
    if key is None or told is None:
        return ImportedShare(ImportResult.UNKNOWN, round_id=round_id)
    mac = key.mac(one.share.key)
    result = ImportResult.TAKEN
    if told.closed_ms is not None:
        result = ImportResult.CLOSED
    elif tx.one("is_spent", (key.no, nullifier)) is not None:
        result = ImportResult.CONFIRMED
    elif tx.are_taken([(key.no, mac, nullifier)]):
        known = _find_known(tx, key, mac, nullifier, at_ms)
        result = known if isinstance(known, ImportResult) else ImportResult.REVIVED
        if isinstance(known, ShareRow) and not dry:
            _revive(tx, known, one, note, at_ms)
    elif not dry:
        row = _row(tx, key, one, nullifier)
        tx.add_shares([row])
        tx.count(key.no, ShareState.RECEIVED, 1)
        for line in one.history:
            _tell(tx, row.id, line)
        _tell(tx, row.id, HistoryEntry(at_ms, STAGE, note, counted=False))
        _bring(tx, row, one, at_ms)
    return ImportedShare(result, share_ref(mac), round_id)


def _find_known(tx: Transaction, key: RoundKey, mac: bytes, nullifier: bytes, at_ms: int) -> ShareRow | ImportResult:
    """The row of a known share that was handed over from here, else why the share is left."""
    live = tx.one("live_id", (mac,))
    if live is None:
        buried = tx.one("is_buried", (key.no, mac)) is not None
        # Neither live nor confirmed under its own key: another share has its nullifier.
        return ImportResult.CONFIRMED if buried else ImportResult.QUEUED
    row = load(tx, live[0], at_ms)
    if row is None:
        return ImportResult.DAMAGED
    if row.state != ShareState.FAILED:
        return ImportResult.QUEUED
    return row if row.stage == MOVED and row.nullifier == nullifier else ImportResult.FAILED


def _revive(tx: Transaction, row: ShareRow, one: ExportedShare, note: str, at_ms: int) -> None:
    """Move a share that was handed over back to RECEIVED, or to BROADCAST with a message that may have been sent."""
    lines = tx.all("history", (row.id,))
    kept = {HistoryEntry(line_at_ms, stage, text, bool(counted)) for line_at_ms, stage, text, counted in lines}
    for line in one.history:
        if line not in kept:
            _tell(tx, row.id, line)
    revived = revive(tx, row, STAGE, note, at_ms, proved_height=one.proved_height)
    # The file may name another time for the same share; the time that was acknowledged here counts.
    if one.state is ShareState.BROADCAST and row.submit_at * 1000 <= at_ms:
        _bring(tx, revived, one, at_ms)


def _row(tx: Transaction, key: RoundKey, one: ExportedShare, nullifier: bytes) -> ShareRow:
    """The share's row as it begins: received."""
    share, mac = one.share, key.mac(one.share.key)
    return ShareRow(
        round_id=share.round_id,
        id=tx.new_id(),
        round_no=key.no,
        mac=mac,
        share_index=share.share_index,
        proposal_id=share.proposal_id,
        vote_decision=share.vote_decision,
        tree_position=share.tree_position,
        submit_at=share.submit_at,
        shares_hash=share.shares_hash,
        share_comms=share.share_comms,
        primary_blind=share.primary_blind,
        c1=share.c1,
        c2=share.c2,
        nullifier=nullifier,
        received_ms=one.received_ms,
        rank=rank(tx.keys.order, mac),
        state=ShareState.RECEIVED.value,
        # Whatever a file says: never before its own time.
        due_ms=max(one.due_ms, share.submit_at * 1000),
        attempts=one.attempts,
        crashes=one.crashes,
        proved_height=one.proved_height,
        stage=short(one.stage, _STAGE_CHARS),
        note=short(one.note),
    ).sealed(tx.keys.rows)


def _bring(tx: Transaction, row: ShareRow, one: ExportedShare, at_ms: int) -> None:
    """Bring a share to where it stood by legal moves."""
    if one.state is ShareState.FAILED:
        rewrite(tx, row, row._replace(state=ShareState.FAILED.value))
    elif one.state is ShareState.BROADCAST and one.reveal is not None and may_have_been_sent(one, at_ms):
        row = rewrite(tx, row, row._replace(state=ShareState.WITNESSED.value))
        _keep_reveal(tx, row.id, one)
        rewrite(tx, row, row._replace(state=ShareState.BROADCAST.value))


def may_have_been_sent(one: ExportedShare, at_ms: int) -> bool:
    """Whether a carried message is gone on with: its sending was begun, and its time has come here too.

    Any other is dropped, and its share proven anew at its time: nothing of it left the other machine.
    """
    return one.reveal is not None and one.reveal.sends > 0 and one.share.submit_at * 1000 <= at_ms


def _keep_reveal(tx: Transaction, share_id: int, one: ExportedShare) -> None:
    assert one.reveal is not None
    prepared = one.reveal.prepared
    kept = RevealRow(
        share_id=share_id,
        message=prepared.message,
        tx_hash=prepared.tx_hash,
        anchor_height=prepared.anchor_height,
        circuit=prepared.circuit,
        height=prepared.height,
        sends=one.reveal.sends,
        first_sent_height=one.reveal.first_sent_height,
        last_sent_height=one.reveal.last_sent_height,
        last_endpoint=_short_or_none(one.reveal.last_endpoint),
        last_outcome=_short_or_none(one.reveal.last_outcome),
    ).sealed(tx.keys.rows)
    tx.run("carry_reveal", tuple(kept))


def _short_or_none(text: str | None) -> str | None:
    return None if text is None else short(text)


def _tell(tx: Transaction, share_id: int, line: HistoryEntry) -> None:
    told: dict[str, Column] = {
        "id": share_id,
        "at_ms": line.at_ms,
        "stage": short(line.stage, _STAGE_CHARS),
        "note": short(line.note),
        "counted": int(line.counted),
    }
    tx.one("add_history", told)
