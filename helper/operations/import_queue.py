"""Imports another host's export. Each share is validated like one from a wallet.

Shares that are already queued here, confirmed on the chain, or of a closed or unknown round are skipped. An import can
therefore be repeated, also after an interruption. A share that was moved from this host earlier is retried.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final

import anyio.to_thread

from helper.errors import ActionRefused, ExportFileError
from helper.ingest.validator import Checks
from helper.operations.export_format import MAX_LINE_BYTES, decode_message, parse_header, parse_share_line
from helper.store.action_models import ExportedShare, ImportedShare, ImportResult, ValidatedShare
from helper.store.models import SentReveal, SpentNullifier, StoredRound
from helper.store.store import Store

BATCH_SHARES: Final = 50
"""Shares that are validated and stored together: about 15 ms of hashing, without the GIL."""
RETRY_MARGIN_SECONDS: Final = 3600
"""Maximum seconds between the round's end and a due time. Allows for a retry delayed shortly before the end."""
_CHAIN_ID_KEY: Final = "chain_id"


RoundsById = Mapping[bytes, StoredRound]
CountedLookup = Callable[[Sequence[SentReveal]], Awaitable[Sequence[SpentNullifier]]]
"""Returns the nullifiers of those messages that the chain has counted. It skips shares that are not due yet."""


async def import_shares(
    store: Store,
    share_checks: Checks,
    lines: AsyncIterator[bytes],
    *,
    note: str,
    dry_run: bool,
    find_counted: CountedLookup | None = None,
) -> AsyncIterator[list[ImportedShare]]:
    """Import an export in batches. Yields the results of each batch, in file order.

    Args:
        store: the queue to import into.
        share_checks: validates shares.
        lines: the lines of the export, without line ends.
        note: the history entry of each imported share.
        dry_run: count the shares without storing them.
        find_counted: finds messages that the chain has counted, before they are stored and sent again.

    Raises:
        ExportFileError: the file is not an export, or it is truncated.
        ActionRefused: the export belongs to another chain.
    """
    head = parse_header(await anext(lines, b""))
    chain_id = await store.get_meta(_CHAIN_ID_KEY)
    if None not in {chain_id, head.chain_id} and chain_id != head.chain_id:
        raise ActionRefused(f"the export belongs to chain {head.chain_id}, this queue to {chain_id}")
    rounds = {stored.round_id: stored for stored in await store.list_rounds()}
    lookup = None if dry_run else find_counted
    count, batch = 0, list[bytes]()
    async for line in lines:
        batch.append(line)
        if len(batch) == BATCH_SHARES:
            yield await _import_batch(store, share_checks, rounds, batch, lookup, note=note, dry_run=dry_run)
            count, batch = count + len(batch), []
    if batch:
        yield await _import_batch(store, share_checks, rounds, batch, lookup, note=note, dry_run=dry_run)
    if count + len(batch) != head.shares:
        raise ExportFileError(f"the export is truncated: received {count + len(batch)} of {head.shares} shares")


async def _import_batch(
    store: Store,
    share_checks: Checks,
    rounds: RoundsById,
    batch: Sequence[bytes],
    find_counted: CountedLookup | None,
    *,
    note: str,
    dry_run: bool,
) -> list[ImportedShare]:
    checked = await anyio.to_thread.run_sync(_validate_lines, share_checks, rounds, batch)
    sent = [message for share in checked if share is not None and (message := _sent_message(*share)) is not None]
    if sent and find_counted is not None and (counted := await find_counted(sent)):
        # This machine may have started after the blocks that contain them. The import then skips them as confirmed.
        await store.add_spent(counted)
    results = iter(
        await store.import_shares([share for share in checked if share is not None], note=note, dry_run=dry_run)
    )
    return [ImportedShare(ImportResult.INVALID) if share is None else next(results) for share in checked]


def _sent_message(exported: ExportedShare, nullifier: bytes) -> SentReveal | None:
    """Return the message of a share that another machine has sent."""
    reveal = exported.reveal
    if reveal is None or not reveal.sends:
        return None
    return SentReveal(
        share_id=0,  # not stored yet
        round_id=exported.share.round_id,
        nullifier=nullifier,
        prepared=reveal.prepared,
        sends=reveal.sends,
        first_sent_height=reveal.first_sent_height,
        last_sent_height=reveal.last_sent_height,
        last_endpoint=reveal.last_endpoint,
        last_outcome=reveal.last_outcome,
        due_ms=max(exported.due_ms, exported.share.submit_at * 1000),
    )


def _validate_lines(share_checks: Checks, rounds: RoundsById, batch: Sequence[bytes]) -> list[ValidatedShare | None]:
    """Validate a batch. Runs in a thread because hashing blocks."""
    return [_validate_line(share_checks, rounds, line) for line in batch]


def _validate_line(share_checks: Checks, rounds: RoundsById, line: bytes) -> ValidatedShare | None:
    """Return the share with its nullifier, None if the chain would reject it."""
    try:
        exported, nullifier = parse_share_line(share_checks, line)
    except ExportFileError:
        return None
    stored_round = rounds.get(exported.share.round_id)
    if stored_round is not None and not _fits_round(exported, stored_round):
        return None
    if exported.reveal is not None and decode_message(exported.reveal.prepared.message).nullifier != nullifier:
        return None
    return exported, nullifier


def _fits_round(exported: ExportedShare, stored_round: StoredRound) -> bool:
    """Return whether proposal, option, `submit_at` and due time are valid in the share's round."""
    share = exported.share
    end = stored_round.vote_end_time
    options = dict(stored_round.proposals).get(share.proposal_id, ())
    in_time = share.submit_at <= end and exported.due_ms <= (end + RETRY_MARGIN_SECONDS) * 1000
    return share.find_choice_error(options) is None and in_time


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a byte stream into lines, without line ends.

    Raises:
        ExportFileError: a line is too long, or the last line has no end.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            break
    if rest:
        raise ExportFileError("the export is truncated or has a line that is too long")
