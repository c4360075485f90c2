"""Migration of a queue: copy passes while the source is in use, a last pass under lock, a comparison, the marks.

At any moment at most one of the two databases can be used by a helper. The target is marked as unfinished before its
first row is written. The source is marked as moved after the comparison, and only then is the target's mark removed.
After an interruption the same command continues, because every pass writes only the differences.
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

FEW_DIFFERENCES: Final = 1000
"""Differing rows below which no further pass is made while the source is in use; the last pass finds the rest."""
MAX_PASSES: Final = 8
PROGRESS_SECONDS: Final = 5.0
"""Seconds between two progress messages."""

Say = Callable[[str], None]


@dataclass(slots=True)
class MigrationResult:
    """Result of a migration, complete or so far.

    Attributes:
        finished: whether the target now has the queue; otherwise a helper still uses the source.
        passes: passes made, without the final comparison.
        written: rows inserted, changed or deleted in all passes.
        live: shares with their witness.
        confirmed: tombstones.
        damaged: shares that were not copied, because their rows are damaged.
        uncounted: shares that the source counts beyond those it has; negative if it counts fewer.
        held_seconds: how long the source was locked.
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
    """A migration from one database to another.

    Args:
        source: the database that has the queue.
        target: the database that gets it.
        clock: for the time in marks and for durations.
        say: called with progress messages.
    """

    def __init__(self, source: MigrationEndpoint, target: MigrationEndpoint, *, clock: Clock, say: Say) -> None:
        self._source = source
        self._target = target
        self._clock = clock
        self._say = say
        self._mark = MigrationMark("", "", 0)
        self._result = MigrationResult()

    def begin(self) -> None:
        """Open both databases, check that they are suitable, and mark the target as unfinished.

        Raises:
            StoreLocked: a process uses the target.
            StoreMoved: the source no longer has the queue.
            StoreForeign: the target has another queue.
            StoreError: one of them cannot be used.
        """
        source, target = self._source, self._target
        self._open_source()
        target.hold()
        earlier = self._check_target()
        self._mark = MigrationMark(secrets.token_hex(8) if earlier is None else earlier.id, source.label, self._now())
        target.begin_copy(self._mark, source.all("page_meta"))

    def survey(self) -> MigrationResult:
        """Report what would be migrated, by the source's counters. Changes nothing.

        Raises:
            StoreError: as in `begin`, except that a target in use is not detected.
        """
        self._open_source()
        try:
            self._target.look()
        except NothingThere:
            self._check_source(None)
        else:
            self._check_target()
        for (_, state), n in self._source.counters().items():
            if state == ShareState.SUBMITTED:
                self._result.confirmed += n
            else:
                self._result.live += n
        return self._result

    def _open_source(self) -> None:
        if self._source.label == self._target.label:
            raise StoreForeign(
                f"{self._source.label} would be copied onto itself", advice="Choose another database: --to or --from."
            )
        self._source.look()

    def _check_target(self) -> MigrationMark | None:
        """Refuse a target that has another queue. Returns the mark of an unfinished migration into it."""
        source, target = self._source, self._target
        unfinished = target.mark(UNFINISHED)
        self._check_source(unfinished)
        ours = unfinished is not None or target.mark(MOVED) is not None
        if not target.is_fresh() and not (ours and target.row_key() == source.row_key()):
            raise StoreForeign(
                f"{target.label} already has another queue",
                advice="Choose an empty database, a file that does not exist, or a database that this queue was moved "
                "from.",
            )
        return unfinished

    def try_hold(self) -> bool:
        """Lock the source. Returns False if a helper uses it.

        Raises:
            StoreMoved: another migration has moved the queue in the meantime.
        """
        try:
            self._source.hold()
        except StoreLocked:
            self._source.look()
            return False
        self._check_source(self._mark)
        return True

    def _check_source(self, mark: MigrationMark | None) -> None:
        """Refuse a source that is marked, except as moved by this migration, which was then interrupted at its end."""
        moved = self._source.mark(MOVED)
        if moved is None or mark is None or moved.id != mark.id:
            _refuse(self._source)

    def pass_beside(self) -> int:
        """Make one pass while a helper uses the source. Returns the number of differing rows."""
        return sum(self._pass(write=True).differing.values())

    def catch_up(self) -> None:
        """Make passes while a helper uses the source, until few rows differ."""
        for _ in range(MAX_PASSES):
            if self.pass_beside() < FEW_DIFFERENCES:
                return

    def finish(self) -> MigrationResult:
        """Make the last pass, compare all rows and set the marks. The source must be locked.

        Raises:
            StoreCopyDiffers: the target differs from the source. No mark was changed; the source still has the queue.
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
        self._result.finished = True
        self._result.held_seconds = self._clock.monotonic() - began
        return self._result

    @property
    def told(self) -> MigrationResult:
        """The result so far."""
        return self._result

    # ------------------------------------------------------------------ passes and comparison

    def _now(self) -> int:
        return int(self._clock.now())

    def _pass(self, *, write: bool) -> PassStats:
        began = self._clock.monotonic()
        stats = run_pass(self._source, self._target, write=write, report=self._progress(began))
        result, changed = self._result, sum(stats.differing.values())
        result.damaged = stats.damaged
        result.live, result.confirmed = stats.read[SHARES.name], stats.read[TOMBSTONES.name]
        seconds = self._clock.monotonic() - began
        if write:
            result.passes += 1
            result.written += changed
            self._say(
                f"pass {result.passes}: {result.live} live shares and {result.confirmed} confirmed, "
                f"{sum(stats.read.values())} rows read, {changed} written, {seconds:.1f} s"
            )
        else:
            self._say(f"compared: {sum(stats.read.values())} rows, {changed} differ, {seconds:.1f} s")
        return stats

    def _progress(self, began: float) -> Callable[[str, int], None]:
        last = began

        def report(table: str, rows: int) -> None:
            nonlocal last
            now = self._clock.monotonic()
            if now - last >= PROGRESS_SECONDS:
                last = now
                self._say(f"… {rows} rows of {table}, {now - began:.0f} s")

        return report

    def _verify(self) -> None:
        stats = self._pass(write=False)
        differing = [f"{n} rows of {name}" for name, n in stats.differing.items() if n]
        expected = {key: n for key, n in stats.counts.items() if n}
        if self._target.counters() != expected:
            differing.append("the share counts")
        if differing:
            raise StoreCopyDiffers(f"{self._target.label} differs from {self._source.label}: {', '.join(differing)}")
        counted = sum(self._source.counters().values())
        self._result.uncounted = counted - sum(expected.values()) - len(stats.damaged)


def _refuse(source: MigrationEndpoint) -> None:
    rows: list[list[Row]] = [source.all("fact", (name,)) for name in (UNFINISHED, MOVED)]
    refuse_marked(rows[0], rows[1], source.label)
