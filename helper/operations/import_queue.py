"""Reads another machine's export: each share is validated in the same way as a wallet's, then taken over.

A share that is live here, counted by the chain, or of a closed or unknown round is left. An import can therefore be
repeated, or started again after an interruption. A share that was handed over from here before is revived.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, Protocol

import anyio.to_thread

from helper.errors import ActionRefused, ExportFileError
from helper.ingest.validator import ShareChecks, check_share
from helper.operations.export_format import MAX_LINE, message_of, read_head, read_line
from helper.store.action_rows import Checked, ExportedShare, ImportedShare, ImportResult
from helper.store.rows import StoredRound
from proofs import ProofsError

TAKEN_AT_ONCE: Final = 50
"""Shares that are checked and kept together: some 15 ms of hashing, outside the interpreter's lock."""
RETRY_MARGIN: Final = 3600
"""Seconds after its round's end at which a share may be due: a retry that was put off shortly before the end."""
_CHAIN_ID: Final = "chain_id"


Rounds = Mapping[bytes, StoredRound]


class ImportStore(Protocol):
    """The part of the store that shares are taken over into."""

    async def rounds(self) -> list[StoredRound]:
        """All rounds kept."""
        ...

    async def get_meta(self, key: str) -> str | None:
        """A remembered text."""
        ...

    async def import_shares(self, carried: Sequence[Checked], *, note: str, dry: bool) -> list[ImportedShare]:
        """Take over those that are not known, or were handed over from here."""
        ...


async def import_shares(
    store: ImportStore, checks: ShareChecks, lines: AsyncIterator[bytes], *, note: str, dry: bool
) -> AsyncIterator[list[ImportedShare]]:
    """Take over an export in batches; yields what was done with the shares of each, in the file's order.

    Args:
        store: where they go.
        checks: the hashes.
        lines: the export's lines, without their ends.
        note: what the shares' histories are told.
        dry: only count.

    Raises:
        TransferError: it is no export, or it ends early.
        ActRefused: it is of another chain.
    """
    head = read_head(await anext(lines, b""))
    ours = await store.get_meta(_CHAIN_ID)
    if None not in {ours, head.chain_id} and ours != head.chain_id:
        raise ActionRefused(f"the export is of chain {head.chain_id}, and this queue of {ours}")
    rounds = {stored.round_id: stored for stored in await store.rounds()}
    seen, lot = 0, list[bytes]()
    async for line in lines:
        lot.append(line)
        if len(lot) == TAKEN_AT_ONCE:
            yield await _take(store, checks, rounds, lot, note=note, dry=dry)
            seen, lot = seen + len(lot), []
    if lot:
        yield await _take(store, checks, rounds, lot, note=note, dry=dry)
    if seen + len(lot) != head.shares:
        raise ExportFileError(f"the export is cut off: {seen + len(lot)} of {head.shares} shares came")


async def _take(
    store: ImportStore,
    checks: ShareChecks,
    rounds: Rounds,
    lot: Sequence[bytes],
    *,
    note: str,
    dry: bool,
) -> list[ImportedShare]:
    checked = await anyio.to_thread.run_sync(_check_all, checks, rounds, lot)
    valid = iter(await store.import_shares([one for one in checked if one is not None], note=note, dry=dry))
    return [ImportedShare(ImportResult.INVALID) if one is None else next(valid) for one in checked]


def _check_all(checks: ShareChecks, rounds: Rounds, lot: Sequence[bytes]) -> list[Checked | None]:
    """Shares with their nullifiers, None for one that would never be counted (in a thread)."""
    return [_check(checks, rounds, line) for line in lot]


def _check(checks: ShareChecks, rounds: Rounds, line: bytes) -> Checked | None:
    try:
        carried = read_line(line)
        nullifier = check_share(checks, carried.share).nullifier
    except (ExportFileError, ProofsError):
        return None
    told = rounds.get(carried.share.round_id)
    if told is not None and not _fits(carried, told):
        return None
    if carried.reveal is not None and message_of(carried.reveal.prepared.message).nullifier != nullifier:
        return None
    return carried, nullifier


def _fits(carried: ExportedShare, told: StoredRound) -> bool:
    """Whether a share is one of its round: its question, its answer, its time, and when it is due."""
    share = carried.share
    options = dict(told.proposals).get(share.proposal_id, ())
    in_time = share.submit_at <= told.vote_end_time and carried.due_ms <= (told.vote_end_time + RETRY_MARGIN) * 1000
    return share.vote_decision in options and in_time


async def split_lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a stream of bytes, without their ends.

    Raises:
        TransferError: one is too long, or the last has no end.
    """
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > MAX_LINE:
            break
    if rest:
        raise ExportFileError("the export is cut off, or has a line that is too long")
