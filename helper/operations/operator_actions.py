"""Operator actions on the queue: retry, export, import, purge and rescan.

Every action is recorded in the audit log before it begins. No action reveals a share before its time, changes
`submit_at`, or discloses a witness. Actions run one after the other, and each changes the queue in small batches, so
that the service continues to accept shares.

Each share of an import is validated like one from a wallet. Shares that are already queued here, confirmed on the
chain, or of a closed or unknown round are skipped. An import can therefore be repeated, also after an interruption. A
share that was moved from this host earlier is retried.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
import structlog

from helper.core.json_records import fact
from helper.core.share import ShareState
from helper.core.text_forms import clean_text
from helper.errors import ActionRefused, ExportFileError, HelperError, NotFound
from helper.ingest.validator import Checks
from helper.operations.export_format import MAX_LINE_BYTES, parse_header, parse_share_line
from helper.store import audit_log, blocks, exported_shares
from helper.store import rounds as round_operations
from helper.store.audit_log import Actor
from helper.store.exported_shares import ExportedShare, ImportedShare, ImportResult, RowVersion, ValidatedShare
from helper.store.ledger import Ledger, Rescan, count_heights, find_unread
from helper.store.messages import SentReveal
from helper.store.models import QueueFilter, SpentNullifier, StoredRound
from helper.store.shares import retry_failed
from helper.store.store import Store
from helper.store.table_rows import CHAIN_ID_KEY

if TYPE_CHECKING:  # commands import this module, and do not need the nodes
    from helper.chain.round_registry import RoundRegistry

BATCH_SHARES: Final = 50
"""Shares that are hashed together (15 ms, without the GIL), and that one store operation changes.

The operation blocks the writer, and thus every POST, for 10 to 20 ms."""
RETRY_MARGIN_SECONDS: Final = 3600
"""Maximum seconds between the round's end and a due time. Allows for a retry delayed shortly before the end."""


RoundsById = Mapping[bytes, StoredRound]
CountedLookup = Callable[[Sequence[SentReveal]], Awaitable[Sequence[SpentNullifier]]]
"""Returns the nullifiers of those messages that the chain has counted. It skips shares that are not due yet."""

log = structlog.get_logger("helper.operations")

MAX_ERROR_CHARS: Final = 200
MAX_LISTED_SKIPPED: Final = 1000
"""Maximum number of skipped shares that an import report lists; it counts all of them."""
_IMPORTED: Final = frozenset({ImportResult.IMPORTED, ImportResult.RESTORED})
_COUNTERS_BY_RESULT: Final[Mapping[ImportResult, tuple[str, ...]]] = {
    ImportResult.IMPORTED: ("taken",),
    ImportResult.RESTORED: ("taken", "revived"),
    ImportResult.QUEUED: ("known", "queued"),
    ImportResult.FAILED: ("known", "failed"),
    ImportResult.DAMAGED: ("known", "damaged"),
    ImportResult.CONFLICT: ("known", "conflict"),
    ImportResult.CONFIRMED: ("spent",),
    ImportResult.CLOSED: ("closed",),
    ImportResult.UNKNOWN: ("unknown",),
    ImportResult.INVALID: ("invalid",),
}
"""Counters to increment for each import result. The second counter is a subset of the first."""

Counts = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A share that was not imported."""

    number: int = fact("Position of the share in the file, from 1.", ge=1)
    ref: str | None = fact("Reference of the share in this queue; null if it has none.")
    round: str | None = fact("Round id, hex; null if the line cannot be parsed.")
    reason: ImportResult = fact("Why the share was not imported.")


class OperatorActions:
    """Performs operator actions and records them in the audit log.

    Args:
        rounds: the rounds of the running service, which processes the queue: shares that it has claimed stay as they
            are. None without a service: only the rounds that it recorded as closed are then closed.
        share_checks: validates imported shares; `helper.circuits`.
        wake: called when shares may have become due.
        find_counted: finds imported messages that the chain has counted; None without a connection to the chain.
        on_rescan: called when blocks are to be read again.
    """

    def __init__(
        self,
        *,
        store: Store,
        rounds: RoundRegistry | None,
        share_checks: Checks,
        wake: Callable[[], None] = lambda: None,
        find_counted: CountedLookup | None = None,
        on_rescan: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._share_checks = share_checks
        self._wake = wake
        self._find_counted = find_counted
        self._on_rescan = on_rescan
        self._action_lock = asyncio.Lock()

    async def retry(
        self, actor: Actor, share_filter: QueueFilter, refs: Sequence[str] = (), *, dry_run: bool = False
    ) -> Counts:
        """Retry failed shares. Each is due as at first, and its count of attempts starts again at 0.

        A share that waits for a retry is tried now if `refs` names it. A share that was moved to another machine is
        retried only if the filter has the stage "moved".

        Args:
            share_filter: selects failed shares.
            refs: prefixes of share references; empty for all selected failed shares.

        Returns:
            Number of shares by result: `retried`, `closed` (their round is closed), `moved` (to another machine) and
            `not_failed` (in `refs` only).

        Raises:
            NotFound: a prefix matches no share, or more than one.
            ActionRefused: the filter selects shares that have not failed.
        """
        if share_filter.state not in {None, ShareState.FAILED}:
            raise ActionRefused("only failed shares can be retried", advice="Omit --state or use --state failed.")
        share_ids = [await self._find_share_id(ref) for ref in dict.fromkeys(refs)]

        arguments = _audit_arguments(share_filter, len(refs))
        async with self._record_action(actor, "retry", arguments, dry_run=dry_run) as counts:
            closed = await self._closed_rounds()
            async for ids in self._iter_batches(share_filter.round_id, share_ids if refs else None):
                batch = await self._store.run(
                    retry_failed,
                    ids,
                    share_filter,
                    closed=closed,
                    note=_history_note(actor, "retried"),
                    dry_run=dry_run,
                )
                counts.update(batch)
                if batch["retried"] and not dry_run:
                    self._wake()
            if refs:
                counts["not_failed"] = len(set(share_ids)) - sum(counts.values())
        return {"retried": 0, "closed": 0, "moved": 0, "not_failed": 0, **counts}

    async def record_export(self, actor: Actor, share_filter: QueueFilter, ref_count: int, shares: int) -> Counts:
        """Record in the audit log that shares were copied into a file."""
        async with self._record_action(actor, "export", _audit_arguments(share_filter, ref_count)) as counts:
            counts["copied"] = shares
        return counts

    async def move_shares(
        self, actor: Actor, share_filter: QueueFilter, ref_count: int, marks: Sequence[RowVersion]
    ) -> Counts:
        """Mark exported shares as moved, so that this host does not reveal them.

        They get the state FAILED with the stage "moved" and keep it until they are confirmed or retried. A share that
        is claimed, or that changed since the export, is not marked: both hosts may then reveal it, and the chain counts
        it once.

        Returns:
            Number of shares by result: `moved` and `stayed` (not marked).
        """
        async with self._record_action(actor, "move", _audit_arguments(share_filter, ref_count)) as counts:
            for start in range(0, len(marks), BATCH_SHARES):
                batch = marks[start : start + BATCH_SHARES]
                note = _history_note(actor, "moved to another machine")
                counts.update(
                    await self._store.run(
                        exported_shares.mark_moved, batch, note=note, idle_only=self._rounds is not None
                    )
                )
        return {"moved": 0, "stayed": 0, **counts}

    async def import_shares(
        self, actor: Actor, lines: AsyncIterator[bytes], *, dry_run: bool = False
    ) -> tuple[Counts, list[SkippedRow]]:
        """Import shares from another host's export, in batches.

        Shares that were moved from this host earlier are retried, and their attempts start again at 0.

        Args:
            lines: the lines of the export, without line ends.

        Returns:
            Number of shares by outcome (docs/schemas/queue-import.json), and the first `MAX_LISTED_SKIPPED` shares that
            were not imported.

        Raises:
            ExportFileError: the file is not an export, or it is truncated. Shares imported until then remain.
            ActionRefused: the export belongs to another chain.
        """
        skipped: list[SkippedRow] = []
        async with self._record_action(actor, "import", {}, dry_run=dry_run) as counts:
            header = parse_header(await anext(lines, b""))
            chain_id = await self._store.get_meta(CHAIN_ID_KEY)
            if None not in {chain_id, header.chain_id} and chain_id != header.chain_id:
                raise ActionRefused(f"the export belongs to chain {header.chain_id}, this queue to {chain_id}")
            rounds = {stored.round_id: stored for stored in await self._store.list_rounds()}
            note, received = _history_note(actor, "imported from another machine"), 0
            async for batch in _batch_lines(lines):
                results = await self._import_batch(rounds, batch, note=note, dry_run=dry_run)
                for number, share in enumerate(results, start=received + 1):
                    counts.update(_COUNTERS_BY_RESULT[share.result])
                    if share.result not in _IMPORTED and len(skipped) < MAX_LISTED_SKIPPED:
                        round_id = None if share.round_id is None else share.round_id.hex()
                        skipped.append(SkippedRow(number=number, ref=share.ref, round=round_id, reason=share.result))
                received += len(results)
                if not dry_run and any(share.result in _IMPORTED for share in results):
                    self._wake()
            if received != header.shares:
                raise ExportFileError(f"the export is truncated: received {received} of {header.shares} shares")
        names = dict.fromkeys(name for names in _COUNTERS_BY_RESULT.values() for name in names)
        return {**dict.fromkeys(names, 0), **counts}, skipped

    async def _import_batch(
        self, rounds: RoundsById, batch: Sequence[bytes], *, note: str, dry_run: bool
    ) -> list[ImportedShare]:
        checked = await anyio.to_thread.run_sync(  # because hashing blocks
            lambda: [_validate_line(self._share_checks, rounds, line) for line in batch]
        )
        valid = [share for share in checked if share is not None]
        sent = [message for share in valid if (message := _sent_message(*share)) is not None]
        if sent and self._find_counted is not None and not dry_run and (counted := await self._find_counted(sent)):
            # This machine may have started after the blocks that contain them. The import then skips them as confirmed.
            await self._store.run(blocks.add_spent, counted)
        results = iter(await self._store.run(exported_shares.import_shares, valid, note=note, dry_run=dry_run))
        return [ImportedShare(ImportResult.INVALID) if share is None else next(results) for share in checked]

    async def purge(self, actor: Actor, round_id: bytes, *, dry_run: bool = False) -> Counts:
        """Delete all data of a round that the chain has closed, before the retention period ends.

        Returns:
            The number of shares per state before the purge.

        Raises:
            NotFound: the queue has no data of this round.
            ActionRefused: the chain has not closed the round, or its unconfirmed shares are not reported yet.
        """
        stored = next((known for known in await self._store.list_rounds() if known.round_id == round_id), None)
        if stored is None:
            raise NotFound("no data is stored for this round")
        frozen = None if self._rounds is None else self._rounds.frozen_reason(round_id)
        if frozen is not None:
            raise ActionRefused(f"the round cannot be purged: nodes report inconsistent data: {frozen}")
        if not await self._is_closed(stored):
            raise ActionRefused(
                "the round cannot be purged: the chain has not closed it",
                advice="The chain closes a round when a block after its end is processed and its tally has begun. "
                "If two or more nodes are configured, two must confirm it.",
            )
        if stored.alerted_at is None:
            raise ActionRefused(
                "the round cannot be purged: its unconfirmed shares are not reported yet",
                advice="The running helper reports them within seconds. Check its log, then retry.",
            )
        states = (await self._store.count_shares()).get(round_id, {})
        async with self._record_action(actor, "purge", {"round": round_id.hex()}, dry_run=dry_run) as counts:
            counts.update({state.json_name: number for state, number in states.items()})
            if not dry_run:
                await self._store.run_batches(round_operations.purge, round_id)
                if self._rounds is not None:
                    self._rounds.forget(round_id)
                await self._store.wait_for_erasure()
        return {**{state.json_name: 0 for state in ShareState}, **counts}

    async def rescan(self, actor: Actor, first: int) -> tuple[Ledger, Rescan]:
        """Request that the service reads the blocks from `first` to its newest one again; see `Store.begin_rescan`.

        The service reads them in the background, one host if several share the queue. Shares that are confirmed do not
        change.

        Raises:
            ActionRefused: the service has not read any block, or none as high as `first`.
        """
        ledger = await self._store.get_ledger()
        if ledger is None or ledger.top < ledger.first:
            raise ActionRefused("the helper has not read any block yet")
        if first > ledger.top:
            raise ActionRefused(
                f"block {first} has not been read yet: the newest block read is {ledger.top}",
                advice="A rescan reads blocks again. The helper reads new blocks by itself.",
            )
        async with self._record_action(actor, "rescan", {"from": first}) as counts:
            ledger = await self._store.run(blocks.begin_rescan, first)
            rescan = ledger.rescan
            assert rescan is not None
            counts["blocks"] = count_heights(find_unread(ledger, rescan.first, rescan.last))
        self._on_rescan()
        return ledger, rescan

    @asynccontextmanager
    async def _record_action(
        self, actor: Actor, name: str, arguments: dict[str, Any], *, dry_run: bool = False
    ) -> AsyncIterator[Counter[str]]:
        """Record the action of the body in the audit log, with its counters. A dry run leaves no entry."""
        counts: Counter[str] = Counter()
        if dry_run:
            yield counts
            return
        async with self._action_lock:
            number = await self._store.run(audit_log.begin_action, actor, name, arguments)
            try:
                yield counts
            except BaseException as error:
                # The text of an exception of another library may quote share data.
                reason = str(error) if isinstance(error, HelperError) else type(error).__name__
                await self._store.run(
                    audit_log.end_action, number, {**counts, "error": clean_text(reason)[:MAX_ERROR_CHARS]}
                )
                raise
            await self._store.run(audit_log.end_action, number, counts)
        log.info("operator_action_done", operator=actor.name, outcome=name, counts=dict(counts))

    async def _find_share_id(self, ref: str) -> int:
        """Return the id of the only share whose reference has this prefix."""
        ids = await self._store.find_share_ids(ref)
        if not ids:
            raise NotFound(f"no share matches {ref[:64]}")
        if len(ids) > 1:
            raise NotFound(f"several shares match {ref[:64]}; use a longer prefix")
        return ids[0]

    async def _is_closed(self, stored: StoredRound) -> bool:
        if self._rounds is None:
            return stored.closed_at is not None
        return await self._rounds.is_closed(stored.round_id)

    async def _closed_rounds(self) -> set[bytes]:
        return {
            stored.round_id
            for stored in await self._store.list_rounds()
            if stored.closed_at is not None or await self._is_closed(stored)
        }

    async def _iter_batches(self, round_id: bytes | None, share_ids: Sequence[int] | None) -> AsyncIterator[list[int]]:
        if share_ids is not None:
            for start in range(0, len(share_ids), BATCH_SHARES):
                yield list(share_ids[start : start + BATCH_SHARES])
            return
        after = 0
        while ids := await self._store.list_failed_ids(round_id, after_id=after, limit=BATCH_SHARES):
            yield ids
            after = ids[-1]


def _audit_arguments(share_filter: QueueFilter, ref_count: int) -> dict[str, Any]:
    """The action's arguments for the audit log, without share references: the log outlives the shares."""
    arguments = {
        "round": None if share_filter.round_id is None else share_filter.round_id.hex(),
        "state": None if share_filter.state is None else share_filter.state.json_name,
        "stage": share_filter.stage,
        "due_before": None if share_filter.due_before_ms is None else share_filter.due_before_ms // 1000,
        "named": ref_count or None,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _history_note(actor: Actor, change: str) -> str:
    return f"{change}, requested by {actor.name}"


def _sent_message(exported: ExportedShare, nullifier: bytes) -> SentReveal | None:
    """Return the message of a share that another machine has sent."""
    reveal = exported.reveal
    if reveal is None or not reveal.sends:
        return None
    due_ms = max(exported.due_ms, exported.share.submit_at * 1000)
    return SentReveal(reveal, exported.share.round_id, nullifier, due_ms=due_ms)


def _validate_line(share_checks: Checks, rounds: RoundsById, line: bytes) -> ValidatedShare | None:
    """Return the share with its nullifier, None if the chain would reject it."""
    try:
        exported, nullifier = parse_share_line(share_checks, line)
    except ExportFileError:
        return None
    stored_round = rounds.get(exported.share.round_id)
    if stored_round is not None and not _fits_round(exported, stored_round):
        return None
    return exported, nullifier


def _fits_round(exported: ExportedShare, stored_round: StoredRound) -> bool:
    """Return whether proposal, option, `submit_at` and due time are valid in the share's round."""
    share = exported.share
    end = stored_round.vote_end_time
    options = dict(stored_round.proposals).get(share.proposal_id, ())
    in_time = share.submit_at <= end and exported.due_ms <= (end + RETRY_MARGIN_SECONDS) * 1000
    return share.find_choice_error(options) is None and in_time


async def _batch_lines(lines: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    batch: list[bytes] = []
    async for line in lines:
        batch.append(line)
        if len(batch) == BATCH_SHARES:
            yield batch
            batch = []
    if batch:
        yield batch


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
