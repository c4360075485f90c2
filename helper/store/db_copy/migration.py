"""Procedure of a migration.

A migration locks both databases, copies all rows, compares them, and sets the marks.

At any moment at most one of the two databases can be used by a helper. The target is marked as unfinished before its
first row is written. The source is marked as moved after the comparison, and only then is the target's mark removed.
After an interruption the same command continues, because only differences are written.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from helper.clock import Clock
from helper.core.share import ShareState
from helper.errors import NotFound, StoreCopyDiffers, StoreForeign
from helper.store.db_copy.endpoint import MigrationEndpoint
from helper.store.db_copy.table_pass import PassStats, TablePass
from helper.store.db_copy.tables import SHARES, TOMBSTONES
from helper.store.meta import MOVED_KEY, UNFINISHED_KEY, MigrationMark, refuse_marked
from helper.store.models import DamagedShare

PROGRESS_SECONDS: Final = 5.0
"""Seconds between two progress messages."""

ProgressCallback = Callable[[str], None]


@dataclass(slots=True)
class MigrationResult:
    """Result of a migration.

    Attributes:
        written: rows inserted, changed or deleted.
        live: shares with their witness.
        confirmed: tombstones.
        damaged: shares that were not copied, because their rows are damaged.
        uncounted: stored share count of the source minus its actual shares; negative if the stored count is too low.
        locked_seconds: how long the source was locked.
    """

    written: int = 0
    live: int = 0
    confirmed: int = 0
    damaged: list[DamagedShare] = field(default_factory=list)
    uncounted: int = 0
    locked_seconds: float = 0.0


class Migration:
    """A migration from one database to another.

    Args:
        source: the database that contains the queue.
        target: the database to which the queue is copied.
        clock: for the time in marks and for durations.
        on_progress: called with progress messages.

    Attributes:
        has_begun: whether the target is marked as unfinished; the same migration then continues it.
    """

    def __init__(
        self, source: MigrationEndpoint, target: MigrationEndpoint, *, clock: Clock, on_progress: ProgressCallback
    ) -> None:
        self._source = source
        self._target = target
        self._clock = clock
        self._on_progress = on_progress
        self.has_begun = False
        self._result = MigrationResult()

    def run(self) -> MigrationResult:
        """Lock both databases, copy and compare all rows, and set the marks.

        Raises:
            StoreLocked: a process uses one of them.
            StoreMoved: the source no longer contains the queue.
            StoreForeign: the target contains another queue.
            StoreCopyDiffers: the target differs from the source. The queue remains in the source.
            StoreError: one of them cannot be used.
        """
        began = self._clock.monotonic()
        source, target = self._source, self._target
        self._open_source()
        source.lock_exclusive()
        target.lock_exclusive()
        earlier = self._check_target()
        mark = MigrationMark(secrets.token_hex(8) if earlier is None else earlier.id, source.label, self._now())
        self.has_begun = True
        target.begin_copy(mark, source.fetch_all("page_meta"))
        self._result.written = sum(self._pass_tables(write=True).rows_differing.values())
        with target.write_transaction():
            target.end_copy()
        self._verify()
        if source.get_mark(MOVED_KEY) is None:
            with source.write_transaction():
                source.set_mark(MOVED_KEY, MigrationMark(mark.id, target.label, self._now()))
        with target.write_transaction():
            target.set_mark(UNFINISHED_KEY, None)
        self._result.locked_seconds = self._clock.monotonic() - began
        return self._result

    def estimate(self) -> MigrationResult:
        """Report what would be migrated, from the source's counters. Changes nothing.

        Raises:
            StoreError: as in `run`, except that databases in use are not detected.
        """
        self._open_source()
        try:
            self._target.connect_read_only()
        except NotFound:
            self._check_source(None)
        else:
            self._check_target()
        for (_, state), n in self._source.read_counters().items():
            if state == ShareState.SUBMITTED:
                self._result.confirmed += n
            else:
                self._result.live += n
        return self._result

    def _open_source(self) -> None:
        if self._source.label == self._target.label:
            raise StoreForeign(
                f"{self._source.label} would be copied onto itself",
                advice="Choose another database with --to or --from.",
            )
        self._source.connect_read_only()

    def _check_target(self) -> MigrationMark | None:
        """Refuse a target that contains another queue. Returns the mark of an unfinished migration into it."""
        source, target = self._source, self._target
        unfinished = target.get_mark(UNFINISHED_KEY)
        self._check_source(unfinished)
        has_own_mark = unfinished is not None or target.get_mark(MOVED_KEY) is not None
        if not target.is_fresh() and not (has_own_mark and target.read_row_key() == source.read_row_key()):
            raise StoreForeign(
                f"{target.label} already contains another queue",
                advice="Choose an empty database, a file that does not exist, or a database that this queue was moved "
                "from.",
            )
        return unfinished

    def _check_source(self, mark: MigrationMark | None) -> None:
        """Refuse a marked source, unless this migration marked it as moved and was interrupted directly afterwards."""
        moved = self._source.get_mark(MOVED_KEY)
        if moved is None or mark is None or moved.id != mark.id:
            refuse_marked(self._source.fetch_all("get_marks"), self._source.label)

    # ------------------------------------------------------------------ copying and comparison

    def _now(self) -> int:
        return int(self._clock.now())

    def _pass_tables(self, *, write: bool) -> PassStats:
        began = self._clock.monotonic()
        report = self._create_progress_report(began)
        stats = TablePass(self._source, self._target, write=write, report=report).run()
        result, changed = self._result, sum(stats.rows_differing.values())
        result.damaged = stats.damaged
        result.live, result.confirmed = stats.rows_read[SHARES.name], stats.rows_read[TOMBSTONES.name]
        rows, seconds = sum(stats.rows_read.values()), self._clock.monotonic() - began
        what = f"copied: {rows} rows, {changed} written" if write else f"compared: {rows} rows, {changed} differ"
        self._on_progress(f"{what}, {seconds:.1f} s")
        return stats

    def _create_progress_report(self, began: float) -> Callable[[str, int], None]:
        last = began

        def report(table: str, rows: int) -> None:
            nonlocal last
            now = self._clock.monotonic()
            if now - last >= PROGRESS_SECONDS:
                last = now
                self._on_progress(f"… {rows} rows of {table}, {now - began:.0f} s")

        return report

    def _verify(self) -> None:
        stats = self._pass_tables(write=False)
        differing = [f"{n} rows of {name}" for name, n in stats.rows_differing.items() if n]
        expected = {key: n for key, n in stats.counts.items() if n}
        if self._target.read_counters() != expected:
            differing.append("the share counts")
        if differing:
            raise StoreCopyDiffers(f"{self._target.label} differs from {self._source.label}: {', '.join(differing)}")
        counted = sum(self._source.read_counters().values())
        self._result.uncounted = counted - sum(expected.values()) - len(stats.damaged)
