"""The way of a move: passes beside the source's daemon, the last one without it, a comparison of all, then the marks.

At any moment at most one database of a queue can be served. The target is marked as unfinished before its first row is
written; the source is marked as moved once all was compared, and only then is the target's mark taken away. Wherever
that is cut off, the same command goes on: every pass writes only what differs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from helper.clock import Clock
from helper.core.share import ShareState
from helper.errors import NothingThere, StoreCopyDiffers, StoreForeign, StoreLocked
from helper.store.migration.endpoint import MigrationEndpoint
from helper.store.migration.marks import MigrationMark, refuse_marked
from helper.store.migration.table_pass import PassStats, run_pass
from helper.store.migration.tables import (
    MOVED,
    SHARES,
    TOMBSTONES,
    UNFINISHED,
    Row,
)
from helper.store.rows import DamagedShare

ENOUGH: Final = 1000
"""Rows that differed, below which a pass beside the daemon need not be followed by another: the last finds the rest."""
MOST_PASSES: Final = 8
TELL_EVERY: Final = 5.0
"""Seconds between two words on how far a pass is."""

Say = Callable[[str], None]


@dataclass(slots=True)
class MigrationResult:
    """What a move came to.

    Attributes:
        finished: the queue is the target's from now on; else its daemon still runs.
        passes: how many were made, the comparison at the end not counted.
        written: rows that were written, changed or deleted in all of them.
        live: shares with their witness.
        confirmed: tombstones.
        damaged: shares that stay behind, as their rows are not what was written.
        uncounted: shares that the source counts beyond those that are in it, or fewer.
        held_seconds: how long no daemon could run on the source.
    """

    finished: bool = False
    passes: int = 0
    written: int = 0
    live: int = 0
    confirmed: int = 0
    damaged: list[DamagedShare] = field(default_factory=list)
    uncounted: int = 0
    held_seconds: float = 0.0


class Migration:
    """A move from one database to another.

    Args:
        source: where the queue is.
        target: where it is to be.
        clock: gives the marks' time, and measures.
        say: is told how it goes.
    """

    def __init__(self, source: MigrationEndpoint, target: MigrationEndpoint, *, clock: Clock, say: Say) -> None:
        self._source = source
        self._target = target
        self._clock = clock
        self._say = say
        self._mark = MigrationMark("", "", 0)
        self._told = MigrationResult()

    def begin(self) -> None:
        """Open both, and make sure that one is a queue and the other may become it.

        Raises:
            StoreLocked: somebody works on the target.
            StoreMoved: the source is not where the queue is.
            StoreForeign: the target has a queue of its own.
            StoreError: one of them cannot be used.
        """
        source, target = self._source, self._target
        self._look()
        target.hold()
        before = self._need_fit()
        self._mark = MigrationMark(secrets.token_hex(8) if before is None else before.id, source.label, self._now())
        target.begin_copy(self._mark, source.all("page_meta"))

    def survey(self) -> MigrationResult:
        """What would be moved, as the source counts it; nothing is made or changed.

        Raises:
            StoreError: as `begin`; that somebody works on the target is not found out.
        """
        self._look()
        try:
            self._target.look()
        except NothingThere:
            self._need_queue(None)
        else:
            self._need_fit()
        for (_, state), n in self._source.counters().items():
            if state == ShareState.SUBMITTED:
                self._told.confirmed += n
            else:
                self._told.live += n
        return self._told

    def _look(self) -> None:
        if self._source.label == self._target.label:
            raise StoreForeign(
                f"{self._source.label} would be copied onto itself", advice="Give another place: --to, or --from."
            )
        self._source.look()

    def _need_fit(self) -> MigrationMark | None:
        """Refuse a target with a queue of its own; the mark of a move into it that has not ended."""
        source, target = self._source, self._target
        before = target.mark(UNFINISHED)
        self._need_queue(before)
        ours = before is not None or target.mark(MOVED) is not None
        if not target.is_fresh() and not (ours and target.row_key() == source.row_key()):
            raise StoreForeign(
                f"{target.label} has a queue of its own already",
                advice="Give an empty database or a file that is not there yet; one that this queue was moved from "
                "will do as well.",
            )
        return before

    def try_hold(self) -> bool:
        """Keep every daemon off the source, if none works on it now.

        Raises:
            StoreMoved: another move has taken the queue elsewhere meanwhile.
        """
        try:
            self._source.hold()
        except StoreLocked:
            self._source.look()
            return False
        self._need_queue(self._mark)
        return True

    def _need_queue(self, mark: MigrationMark | None) -> None:
        """Refuse a source where the queue is not, unless it is this very move that said so, cut off at its end."""
        gone = self._source.mark(MOVED)
        if gone is None or mark is None or gone.id != mark.id:
            _refuse(self._source)

    def pass_beside(self) -> int:
        """One pass while the source's daemon runs; how many rows differed."""
        return sum(self._pass(write=True).differing.values())

    def catch_up(self) -> None:
        """Passes beside the daemon until there is little left to do."""
        for _ in range(MOST_PASSES):
            if self.pass_beside() < ENOUGH:
                return

    def finish(self) -> MigrationResult:
        """The last pass, the comparison, the marks; the source is held.

        Raises:
            StoreCopyDiffers: the target is not what the source is. Nothing was marked: the queue is where it was.
        """
        began = self._clock.monotonic()
        self._pass(write=True)
        with self._target.changing():
            self._target.end_copy()
        self._verify()
        source, target = self._source, self._target
        mark = source.mark(MOVED)
        if mark is None:
            with source.changing():
                source.set_mark(MOVED, MigrationMark(self._mark.id, target.label, self._now()))
        with target.changing():
            target.set_mark(UNFINISHED, None)
        self._told.finished = True
        self._told.held_seconds = self._clock.monotonic() - began
        return self._told

    @property
    def told(self) -> MigrationResult:
        """How far it is."""
        return self._told

    # ------------------------------------------------------------------ the parts

    def _now(self) -> int:
        return int(self._clock.now())

    def _pass(self, *, write: bool) -> PassStats:
        began = self._clock.monotonic()
        passed = run_pass(self._source, self._target, write=write, tell=self._progress(began))
        told, changed = self._told, sum(passed.differing.values())
        told.damaged = passed.damaged
        told.live, told.confirmed = passed.read[SHARES.name], passed.read[TOMBSTONES.name]
        seconds = self._clock.monotonic() - began
        if write:
            told.passes += 1
            told.written += changed
            self._say(
                f"pass {told.passes}: {told.live} live shares and {told.confirmed} confirmed, "
                f"{sum(passed.read.values())} rows read, {changed} written, {seconds:.1f} s"
            )
        else:
            self._say(f"compared: {sum(passed.read.values())} rows, {changed} differ, {seconds:.1f} s")
        return passed

    def _progress(self, began: float) -> Callable[[str, int], None]:
        said = began

        def tell(table: str, rows: int) -> None:
            nonlocal said
            now = self._clock.monotonic()
            if now - said >= TELL_EVERY:
                said = now
                self._say(f"… {rows} rows of {table}, {now - began:.0f} s")

        return tell

    def _verify(self) -> None:
        passed = self._pass(write=False)
        wrong = [f"{n} rows of {name}" for name, n in passed.differing.items() if n]
        expected = {place: n for place, n in passed.counts.items() if n}
        if self._target.counters() != expected:
            wrong.append("the counts of shares")
        if wrong:
            raise StoreCopyDiffers(f"{self._target.label} is not what {self._source.label} is: {', '.join(wrong)}")
        counted = sum(self._source.counters().values())
        self._told.uncounted = counted - sum(expected.values()) - len(passed.damaged)


def _refuse(source: MigrationEndpoint) -> None:
    rows: list[list[Row]] = [source.all("fact", (name,)) for name in (UNFINISHED, MOVED)]
    refuse_marked(rows[0], rows[1], source.label)
