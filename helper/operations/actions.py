"""Operator actions on the queue: retry, export, import and purge.

Every action is entered in the audit log before it begins. No action reveals a share before its time, changes
`submit_at`, or discloses a witness. Actions run one after the other, and each changes the queue in small batches, so
that the daemon continues to accept shares.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from helper.core.share import ShareState
from helper.core.text import clean_text
from helper.errors import ActionRefused, HelperError, NothingThere
from helper.ingest.validator import Checks
from helper.operations.import_queue import import_shares
from helper.store.action_rows import Actor, ImportResult, RowMark
from helper.store.rows import QueueFilter
from helper.store.store import Store

log = structlog.get_logger("helper.operations")

BATCH_SHARES: Final = 50
"""Shares that one store operation changes. It blocks the writer, and with it every POST, for 10 to 20 ms."""
ERROR_CHARS: Final = 200
MAX_LEFT: Final = 1000
"""Maximum number of skipped shares that an import report lists; it counts all of them."""
_IMPORTED: Final = frozenset({ImportResult.TAKEN, ImportResult.REVIVED})
_COUNTED_AS: Final[Mapping[ImportResult, tuple[str, ...]]] = {
    ImportResult.TAKEN: ("taken",),
    ImportResult.REVIVED: ("taken", "revived"),
    ImportResult.QUEUED: ("known", "queued"),
    ImportResult.FAILED: ("known", "failed"),
    ImportResult.DAMAGED: ("known", "damaged"),
    ImportResult.CONFIRMED: ("spent",),
    ImportResult.CLOSED: ("closed",),
    ImportResult.UNKNOWN: ("unknown",),
    ImportResult.INVALID: ("invalid",),
}
"""Counters to increment for each import result. The second counter is a subset of the first."""

Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class LeftShare:
    """A share in an export file that was not imported.

    Attributes:
        number: its 1-based position in the file.
        ref: its reference in this queue, None if it has none.
        round_id: its round, None if the line is unreadable.
        reason: why it was not imported.
    """

    number: int
    ref: str | None
    round_id: bytes | None
    reason: ImportResult


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import.

    Attributes:
        counts: shares by outcome; see docs/schemas/queue-import.json.
        left: the first `MAX_LEFT` shares that were not imported.
    """

    counts: Counts
    left: tuple[LeftShare, ...]


Work = Callable[[Counter[str]], Awaitable[None]]
"""Performs an action and updates the counters as it proceeds."""


class RoundAuthority(Protocol):
    """Decides which rounds are closed. `helper.chain.round_registry.RoundRegistry` in production."""

    def frozen(self, round_id: bytes) -> str | None:
        """Return why the round is frozen, None if it is not."""
        ...

    async def is_closed(self, round_id: bytes) -> bool:
        """Return whether the chain has closed the round."""
        ...

    def forget(self, round_id: bytes) -> None:
        """Drop all state of a purged round."""
        ...


class Operations:
    """Performs operator actions and records them in the audit log.

    Args:
        store: the queue.
        judge: decides which rounds are closed.
        checks: validates imported shares; `proofs`.
        wake: called when shares may have become due.
        running: whether a daemon is working on the queue. Shares that it has claimed are then left alone.
    """

    def __init__(
        self, *, store: Store, judge: RoundAuthority, checks: Checks, wake: Callable[[], None], running: bool
    ) -> None:
        self._store = store
        self._judge = judge
        self._checks = checks
        self._wake = wake
        self._running = running
        self._action_lock = asyncio.Lock()

    async def retry(self, actor: Actor, wanted: QueueFilter, refs: Sequence[str] = (), *, dry: bool = False) -> Counts:
        """Retry failed shares. Each keeps its due time and gets its full attempt budget.

        Args:
            actor: the operator.
            wanted: selects failed shares.
            refs: prefixes of share references; empty for all selected shares.
            dry: only count what would be done.

        Returns:
            The number of shares `retried`, skipped because their round is `closed`, or referenced but `not_failed`.

        Raises:
            NothingThere: a prefix matches no share, or more than one.
            ActionRefused: the filter selects a state other than failed.
        """
        if wanted.state not in {None, ShareState.FAILED}:
            raise ActionRefused("only failed shares can be retried", advice="Omit --state or use --state failed.")
        named = [await self._named(ref) for ref in dict.fromkeys(refs)]

        async def work(counts: Counter[str]) -> None:
            closed = await self._closed_rounds()
            async for ids in self._batches(wanted.round_id, named if refs else None):
                batch = await self._store.retry_failed(ids, wanted, closed=closed, note=_note(actor, "retry"), dry=dry)
                counts.update(batch)
                if batch["retried"] and not dry:
                    self._wake()
            if refs:
                counts["not_failed"] = len(set(named)) - counts["retried"] - counts["closed"]

        counts = await self._act(actor, "retry", _arguments(wanted, len(refs)), work, dry=dry)
        return {"retried": 0, "closed": 0, "not_failed": 0, **counts}

    async def note_export(self, actor: Actor, wanted: QueueFilter, named: int, shares: int) -> Counts:
        """Record in the audit log that shares were copied into a file."""

        async def work(counts: Counter[str]) -> None:
            counts["copied"] = shares

        return await self._act(actor, "export", _arguments(wanted, named), work)

    async def hand_over(self, actor: Actor, wanted: QueueFilter, named: int, marks: Sequence[RowMark]) -> Counts:
        """Mark exported shares as moved, so that this host does not reveal them.

        They become failed with the stage "moved" until they are confirmed or retried. A share that is claimed, or that
        changed since the export, stays: both hosts may then reveal it, and the chain counts it once.

        Returns:
            The number of shares `moved` and `stayed`.
        """

        async def work(counts: Counter[str]) -> None:
            for start in range(0, len(marks), BATCH_SHARES):
                batch = marks[start : start + BATCH_SHARES]
                note = _note(actor, "export")
                counts.update(await self._store.mark_moved(batch, note=note, at_rest=self._running))

        counts = await self._act(actor, "move", _arguments(wanted, named), work)
        return {"moved": 0, "stayed": 0, **counts}

    async def import_shares(self, actor: Actor, lines: AsyncIterator[bytes], *, dry: bool = False) -> ImportReport:
        """Import shares from another host's export; see `helper.operations.import_queue`.

        Shares that were moved away earlier are revived with their full attempt budget.

        Raises:
            ExportFileError: the file is not an export, or it is truncated. Shares imported until then remain.
            ActionRefused: the export belongs to another chain.
        """
        left: list[LeftShare] = []

        async def work(counts: Counter[str]) -> None:
            number = 1
            async for batch in import_shares(self._store, self._checks, lines, note=_note(actor, "import"), dry=dry):
                imported = 0
                for share in batch:
                    counts.update(_COUNTED_AS[share.result])
                    if share.result in _IMPORTED:
                        imported += 1
                    elif len(left) < MAX_LEFT:
                        left.append(LeftShare(number, share.ref, share.round_id, share.result))
                    number += 1
                if imported and not dry:
                    self._wake()

        counts = await self._act(actor, "import", {}, work, dry=dry)
        names = dict.fromkeys(name for names in _COUNTED_AS.values() for name in names)
        return ImportReport({**dict.fromkeys(names, 0), **counts}, tuple(left))

    async def purge(self, actor: Actor, round_id: bytes, *, dry: bool = False) -> Counts:
        """Delete all data of a round that the chain has closed, before the retention period ends.

        Returns:
            The number of shares per state before the purge.

        Raises:
            NothingThere: the queue has no data of this round.
            ActionRefused: the chain has not closed the round, or its unconfirmed shares are not reported yet.
        """
        stored = next((known for known in await self._store.rounds() if known.round_id == round_id), None)
        if stored is None:
            raise NothingThere("no data is stored for this round")
        frozen = self._judge.frozen(round_id)
        if frozen is not None:
            raise ActionRefused(f"the round cannot be purged: nodes report inconsistent data: {frozen}")
        if not await self._judge.is_closed(round_id):
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
        states = (await self._store.counts()).get(round_id, {})

        async def work(counts: Counter[str]) -> None:
            counts.update({state.name.lower(): number for state, number in states.items()})
            if not dry:
                await self._store.purge(round_id)
                self._judge.forget(round_id)
                await self._store.erased()

        counts = await self._act(actor, "purge", {"round": round_id.hex()}, work, dry=dry)
        return {**{state.name.lower(): 0 for state in ShareState}, **counts}

    async def _act(
        self, actor: Actor, name: str, arguments: dict[str, Any], work: Work, *, dry: bool = False
    ) -> Counts:
        """Perform an action with an audit log entry at its start and end. A dry run leaves no entry."""
        counts: Counter[str] = Counter()
        if dry:
            await work(counts)
            return dict(counts)
        async with self._action_lock:
            number = await self._store.begin_action(actor, name, arguments)
            try:
                await work(counts)
            except BaseException as error:
                # The text of a foreign exception may quote share data.
                reason = str(error) if isinstance(error, HelperError) else type(error).__name__
                await self._store.end_action(number, {**counts, "error": clean_text(reason)[:ERROR_CHARS]})
                raise
            await self._store.end_action(number, counts)
        log.info("operator_action_done", operator=actor.name, outcome=name, counts=dict(counts))
        return dict(counts)

    async def _named(self, ref: str) -> int:
        """Return the id of the only share whose reference has this prefix."""
        ids = await self._store.share_ids(ref)
        if not ids:
            raise NothingThere(f"no share matches {ref[:64]}")
        if len(ids) > 1:
            raise NothingThere(f"more than one share matches {ref[:64]}")
        return ids[0]

    async def _closed_rounds(self) -> set[bytes]:
        return {
            stored.round_id
            for stored in await self._store.rounds()
            if stored.closed_at is not None or await self._judge.is_closed(stored.round_id)
        }

    async def _batches(self, round_id: bytes | None, named: Sequence[int] | None) -> AsyncIterator[list[int]]:
        """Yield batches of the named shares, or of all failed shares."""
        if named is not None:
            for start in range(0, len(named), BATCH_SHARES):
                yield list(named[start : start + BATCH_SHARES])
            return
        after = 0
        while ids := await self._store.failed_ids(round_id, after_id=after, limit=BATCH_SHARES):
            yield ids
            after = ids[-1]


def _arguments(wanted: QueueFilter, named: int) -> dict[str, Any]:
    """The action's arguments for the audit log, without share references: the log outlives the shares."""
    arguments = {
        "round": None if wanted.round_id is None else wanted.round_id.hex(),
        "state": None if wanted.state is None else wanted.state.name.lower(),
        "stage": wanted.stage,
        "due_before": None if wanted.due_before_ms is None else wanted.due_before_ms // 1000,
        "named": named or None,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _note(actor: Actor, name: str) -> str:
    """The history entry of a share that an action changed."""
    texts = {"retry": "tried again", "export": "handed over to another machine", "import": "taken over from another"}
    return f"{texts[name]}, asked for by {actor.name}"
