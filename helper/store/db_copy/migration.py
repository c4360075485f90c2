"""Procedure of a migration.

A migration makes copy passes while the source is in use, makes a last pass under lock, compares all rows, and sets the
marks.

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
from helper.errors import NotFound, StoreCopyDiffers, StoreForeign, StoreLocked
from helper.store.db_copy.endpoint import MigrationEndpoint
from helper.store.db_copy.table_pass import PassStats, TablePass
from helper.store.db_copy.tables import SHARES, TOMBSTONES
from helper.store.meta import MOVED_KEY, UNFINISHED_KEY, MigrationMark, refuse_marked
from helper.store.models import DamagedShare

MAX_FINAL_DIFFERENCES: Final = 1000
"""Number of differing rows below which the remaining rows are left to the last pass, under lock."""
MAX_PASSES: Final = 8
PROGRESS_SECONDS: Final = 5.0
"""Seconds between two progress messages."""

ProgressCallback = Callable[[str], None]


@dataclass(slots=True)
class MigrationResult:
    """Result of a migration, complete or so far.

    Attributes:
        is_finished: whether the target now contains the queue; otherwise a helper still uses the source.
        passes: number of passes, without the final comparison.
        written: rows inserted, changed or deleted in all passes.
        live: shares with their witness.
        confirmed: tombstones.
        damaged: shares that were not copied, because their rows are damaged.
        uncounted: stored share count of the source minus its actual shares; negative if the stored count is too low.
        locked_seconds: how long the source was locked.
    """

    is_finished: bool = False
    passes: int = 0
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
    """

    def __init__(
        self, source: MigrationEndpoint, target: MigrationEndpoint, *, clock: Clock, on_progress: ProgressCallback
    ) -> None:
        self._source = source
        self._target = target
        self._clock = clock
        self._on_progress = on_progress
        self._mark = MigrationMark("", "", 0)
        self._result = MigrationResult()

    def begin(self) -> None:
        """Open both databases, check that they are suitable, and mark the target as unfinished.

        Raises:
            StoreLocked: a process uses the target.
            StoreMoved: the source no longer contains the queue.
            StoreForeign: the target contains another queue.
            StoreError: one of them cannot be used.
        """
        source, target = self._source, self._target
        self._open_source()
        target.lock_exclusive()
        earlier = self._check_target()
        self._mark = MigrationMark(secrets.token_hex(8) if earlier is None else earlier.id, source.label, self._now())
        target.begin_copy(self._mark, source.fetch_all("page_meta"))

    def estimate(self) -> MigrationResult:
        """Report what would be migrated, from the source's counters. Changes nothing.

        Raises:
            StoreError: as in `begin`, except that a target in use is not detected.
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

    def try_lock_source(self) -> bool:
        """Lock the source. Returns False if a helper uses it.

        Raises:
            StoreMoved: another migration has moved the queue in the meantime.
        """
        try:
            self._source.lock_exclusive()
        except StoreLocked:
            self._source.connect_read_only()
            return False
        self._check_source(self._mark)
        return True

    def _check_source(self, mark: MigrationMark | None) -> None:
        """Refuse a marked source, unless this migration marked it as moved and was interrupted directly afterwards."""
        moved = self._source.get_mark(MOVED_KEY)
        if moved is None or mark is None or moved.id != mark.id:
            refuse_marked(self._source.fetch_all("get_marks"), self._source.label)

    def run_live_pass(self) -> int:
        """Make one pass while a helper uses the source. Returns the number of differing rows."""
        return sum(self._run_pass(write=True).rows_differing.values())

    def catch_up(self) -> None:
        """Make passes while a helper uses the source, until few rows differ."""
        for _ in range(MAX_PASSES):
            if self.run_live_pass() < MAX_FINAL_DIFFERENCES:
                return

    def finish(self) -> MigrationResult:
        """Make the last pass, compare all rows and set the marks. The source must be locked.

        Raises:
            StoreCopyDiffers: the target differs from the source. No mark was changed; the queue remains in the source.
        """
        began = self._clock.monotonic()
        self._run_pass(write=True)
        with self._target.write_transaction():
            self._target.end_copy()
        self._verify()
        source, target = self._source, self._target
        mark = source.get_mark(MOVED_KEY)
        if mark is None:
            with source.write_transaction():
                source.set_mark(MOVED_KEY, MigrationMark(self._mark.id, target.label, self._now()))
        with target.write_transaction():
            target.set_mark(UNFINISHED_KEY, None)
        self._result.is_finished = True
        self._result.locked_seconds = self._clock.monotonic() - began
        return self._result

    @property
    def result(self) -> MigrationResult:
        """The result so far."""
        return self._result

    # ------------------------------------------------------------------ passes and comparison

    def _now(self) -> int:
        return int(self._clock.now())

    def _run_pass(self, *, write: bool) -> PassStats:
        began = self._clock.monotonic()
        report = self._create_progress_report(began)
        stats = TablePass(self._source, self._target, write=write, report=report).run()
        result, changed = self._result, sum(stats.rows_differing.values())
        result.damaged = stats.damaged
        result.live, result.confirmed = stats.rows_read[SHARES.name], stats.rows_read[TOMBSTONES.name]
        seconds = self._clock.monotonic() - began
        if write:
            result.passes += 1
            result.written += changed
            self._on_progress(
                f"pass {result.passes}: {result.live} live shares and {result.confirmed} confirmed, "
                f"{sum(stats.rows_read.values())} rows read, {changed} written, {seconds:.1f} s"
            )
        else:
            self._on_progress(f"compared: {sum(stats.rows_read.values())} rows, {changed} differ, {seconds:.1f} s")
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
        stats = self._run_pass(write=False)
        differing = [f"{n} rows of {name}" for name, n in stats.rows_differing.items() if n]
        expected = {key: n for key, n in stats.counts.items() if n}
        if self._target.read_counters() != expected:
            differing.append("the share counts")
        if differing:
            raise StoreCopyDiffers(f"{self._target.label} differs from {self._source.label}: {', '.join(differing)}")
        counted = sum(self._source.read_counters().values())
        self._result.uncounted = counted - sum(expected.values()) - len(stats.damaged)
