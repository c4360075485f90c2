"""What operators have done to the queue: retry, hand over, take over, purge. Each act is on record before it begins.

The running daemon does the same acts as a command on the file alone, while none runs. None of them reveals a share
before its time, changes `submit_at`, or tells anything of a witness. Each goes through the queue in small pieces, so
that wallets are answered meanwhile, and one act waits for the other.
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
from helper.ingest.validator import ShareChecks
from helper.operations.import_queue import import_shares
from helper.store.action_rows import Action, Actor, ImportResult, RowMark
from helper.store.rows import QueueFilter
from helper.store.store import Store

log = structlog.get_logger("helper.operations")

AT_ONCE: Final = 50
"""Shares that one operation of the store changes: some 10 to 20 ms during which no POST is kept."""
ERROR_CHARS: Final = 200
MAX_LEFT: Final = 1000
"""Shares that the report of an import names; beyond them it only counts."""
_TAKEN_OVER: Final = frozenset({ImportResult.TAKEN, ImportResult.REVIVED})
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
"""The counters that a share of an import adds to: the second is a part of the first."""

Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class LeftShare:
    """A share of an export that an import did not take over.

    Attributes:
        number: its place in the file, 1 for the first.
        ref: its name in this queue, None where it cannot have one.
        round_id: its round, None where the line could not be read.
        reason: why it was left.
    """

    number: int
    ref: str | None
    round_id: bytes | None
    reason: ImportResult


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did.

    Attributes:
        counts: shares by outcome; see docs/schemas/queue-import.json.
        left: the first `MAX_LEFT` of those that were not taken over.
    """

    counts: Counts
    left: tuple[LeftShare, ...]


Work = Callable[[Counter[str]], Awaitable[None]]
"""Does an act, and counts what it has done so far."""


class RoundAuthority(Protocol):
    """Who knows which rounds are closed, as `helper.chain.round_registry.RoundRegistry` does."""

    def frozen(self, round_id: bytes) -> str | None:
        """Why nothing may be done about the round now, or None."""
        ...

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether the chain's own word has closed the round for good."""
        ...

    def forget(self, round_id: bytes) -> None:
        """The round was purged."""
        ...


class Operations:
    """Does what operators ask for.

    Args:
        store: where the shares are.
        judge: which rounds are closed.
        checks: the hashes of a share; `proofs`.
        wake: called whenever shares became due.
        running: whether a daemon works on the queue: what it has in hand is then left to it.
    """

    def __init__(
        self, *, store: Store, judge: RoundAuthority, checks: ShareChecks, wake: Callable[[], None], running: bool
    ) -> None:
        self._store = store
        self._judge = judge
        self._checks = checks
        self._wake = wake
        self._running = running
        self._alone = asyncio.Lock()

    async def retry(self, actor: Actor, wanted: QueueFilter, refs: Sequence[str] = (), *, dry: bool = False) -> Counts:
        """Have failed shares tried again, each at its own time, with all its attempts back.

        Args:
            actor: who asks for it.
            wanted: which failed shares.
            refs: the beginnings of their names; none for any.
            dry: only tell what would be done.

        Returns:
            How many were `retried`, left as their round is `closed`, or named and `not_failed`.

        Raises:
            NothingThere: a name is that of no share, or of more than one.
            ActRefused: other shares than failed ones are wanted.
        """
        if wanted.state not in {None, ShareState.FAILED}:
            raise ActionRefused("only failed shares are tried again", advice="Leave --state out, or give failed.")
        named = [await self._named(ref) for ref in dict.fromkeys(refs)]

        async def work(counts: Counter[str]) -> None:
            closed = await self._closed_rounds()
            async for ids in self._pieces(wanted.round_id, named if refs else None):
                some = await self._store.retry_failed(ids, wanted, closed=closed, note=_note(actor, "retry"), dry=dry)
                counts.update(some)
                if some["retried"] and not dry:
                    self._wake()
            if refs:
                counts["not_failed"] = len(set(named)) - counts["retried"] - counts["closed"]

        counts = await self._act(actor, "retry", _wanted(wanted, len(refs)), work, dry=dry)
        return {"retried": 0, "closed": 0, "not_failed": 0, **counts}

    async def note_export(self, actor: Actor, wanted: QueueFilter, named: int, shares: int) -> Counts:
        """Put on record that shares were copied into a file."""

        async def work(counts: Counter[str]) -> None:
            counts["copied"] = shares

        return await self._act(actor, "export", _wanted(wanted, named), work)

    async def hand_over(self, actor: Actor, wanted: QueueFilter, named: int, marks: Sequence[RowMark]) -> Counts:
        """Give up shares that a file carries to another machine, so that this one leaves them alone.

        They are failed here with the stage "moved", until the chain has counted them or somebody retries them. What is
        in hand, or changed since it was carried, stays: both machines may reveal it, and the chain counts it once.

        Returns:
            How many were `moved`, and how many `stayed`.
        """

        async def work(counts: Counter[str]) -> None:
            for start in range(0, len(marks), AT_ONCE):
                piece = marks[start : start + AT_ONCE]
                note = _note(actor, "export")
                counts.update(await self._store.mark_moved(piece, note=note, at_rest=self._running))

        counts = await self._act(actor, "move", _wanted(wanted, named), work)
        return {"moved": 0, "stayed": 0, **counts}

    async def import_shares(self, actor: Actor, lines: AsyncIterator[bytes], *, dry: bool = False) -> ImportReport:
        """Take shares over from another machine's export; see `helper.operations.import_queue`.

        Shares that were handed over from here before wait here again, with all their attempts.

        Raises:
            TransferError: it is no export, or it ends early; what was taken until then is kept.
            ActRefused: it is of another chain.
        """
        left: list[LeftShare] = []

        async def work(counts: Counter[str]) -> None:
            number = 1
            async for some in import_shares(self._store, self._checks, lines, note=_note(actor, "import"), dry=dry):
                taken = 0
                for one in some:
                    counts.update(_COUNTED_AS[one.result])
                    if one.result in _TAKEN_OVER:
                        taken += 1
                    elif len(left) < MAX_LEFT:
                        left.append(LeftShare(number, one.ref, one.round_id, one.result))
                    number += 1
                if taken and not dry:
                    self._wake()

        counts = await self._act(actor, "import", {}, work, dry=dry)
        names = dict.fromkeys(name for names in _COUNTED_AS.values() for name in names)
        return ImportReport({**dict.fromkeys(names, 0), **counts}, tuple(left))

    async def purge(self, actor: Actor, round_id: bytes, *, dry: bool = False) -> Counts:
        """Erase everything of a round that the chain's own word has closed, now.

        Returns:
            Shares by state's name, as they were.

        Raises:
            NothingThere: nothing is kept of such a round.
            ActRefused: the chain has not closed it, or what was not counted in it has not been reported yet.
        """
        stored = next((one for one in await self._store.rounds() if one.round_id == round_id), None)
        if stored is None:
            raise NothingThere("nothing is kept of such a round")
        frozen = self._judge.frozen(round_id)
        if frozen is not None:
            raise ActionRefused(f"the round is not purged: no node shows it as it should be: {frozen}")
        if not await self._judge.is_closed(round_id):
            raise ActionRefused(
                "the round is not purged: the chain's own word has not closed it",
                advice="A round is closed once a block past its end is processed and its tally has begun there, by two "
                "endpoints where there are two. Neither a clock nor a refusal closes one.",
            )
        if stored.alerted_at is None:
            raise ActionRefused(
                "the round is not purged: what was not counted in it has not been reported yet",
                advice="The running helper does that within seconds; look into its log, and try again.",
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

    async def acts(self, limit: int) -> list[Action]:
        """What was done, the latest first."""
        return await self._store.actions(limit=limit)

    # ------------------------------------------------------------------ inside

    async def _act(self, actor: Actor, what: str, wanted: dict[str, Any], work: Work, *, dry: bool = False) -> Counts:
        """Do something, on record from its begin to its end; a rehearsal changes nothing and leaves no record."""
        counts: Counter[str] = Counter()
        if dry:
            await work(counts)
            return dict(counts)
        async with self._alone:
            number = await self._store.begin_action(actor, what, wanted)
            try:
                await work(counts)
            except BaseException as error:
                # The text of an error that is not ours may quote anything.
                told = str(error) if isinstance(error, HelperError) else type(error).__name__
                await self._store.end_action(number, {**counts, "error": clean_text(told)[:ERROR_CHARS]})
                raise
            await self._store.end_action(number, counts)
        log.info("an operator's act is done", operator=actor.name, outcome=what, counts=dict(counts))
        return dict(counts)

    async def _named(self, ref: str) -> int:
        """The one share whose name begins so."""
        ids = await self._store.share_ids(ref)
        if len(ids) != 1:
            raise NothingThere(f"no share, or more than one, has the name {ref[:64]}")
        return ids[0]

    async def _closed_rounds(self) -> set[bytes]:
        return {
            stored.round_id
            for stored in await self._store.rounds()
            if stored.closed_at is not None or await self._judge.is_closed(stored.round_id)
        }

    async def _pieces(self, round_id: bytes | None, named: Sequence[int] | None) -> AsyncIterator[list[int]]:
        """The shares to look at, a few at once: those that are named, or all that failed."""
        if named is not None:
            for start in range(0, len(named), AT_ONCE):
                yield list(named[start : start + AT_ONCE])
            return
        after = 0
        while ids := await self._store.failed_ids(round_id, after_id=after, limit=AT_ONCE):
            yield ids
            after = ids[-1]


def _wanted(wanted: QueueFilter, named: int) -> dict[str, Any]:
    """What was asked for, for the record: no share's name, which must not outlive it."""
    told = {
        "round": None if wanted.round_id is None else wanted.round_id.hex(),
        "state": None if wanted.state is None else wanted.state.name.lower(),
        "stage": wanted.stage,
        "due_before": None if wanted.due_before_ms is None else wanted.due_before_ms // 1000,
        "named": named or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def _note(actor: Actor, what: str) -> str:
    """What a share's history is told."""
    texts = {"retry": "tried again", "export": "handed over to another machine", "import": "taken over from another"}
    return f"{texts[what]}, asked for by {actor.name}"
