"""Copies a queue to another database, while no helper runs, and marks the source as moved.

At any moment at most one of the two databases can be used by a helper. The target is marked as unfinished before its
first row is written. The source is marked as moved after the comparison, and only then is the target's mark removed.
After an interruption the same command begins again: it first deletes what the target contains. Once the source is
marked, it only compares again, because the source may then be erased at any time.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from shlex import quote
from typing import Final

from helper.clock import Clock
from helper.core.share import ShareState
from helper.errors import HelperError, NotFound, StoreCopyDiffers, StoreForeign
from helper.store.db_copy.endpoint import (
    META,
    ROUND_KEYS,
    SHARES,
    TABLES,
    TOMBSTONES,
    CopyEndpoint,
    LiveShare,
    Table,
    select_sound,
)
from helper.store.models import DamagedShare
from helper.store.table_rows import MOVED_KEY, UNFINISHED_KEY, CopyMark, Row, is_sound, refuse_marked

PROGRESS_SECONDS: Final = 5.0
"""Seconds between two progress messages."""

ProgressCallback = Callable[[str], None]


@dataclass(slots=True)
class CopyResult:
    """Result of a copy.

    Attributes:
        live: shares with their witness.
        confirmed: tombstones.
        damaged: shares that were not copied, because their rows are damaged.
        uncounted: stored share count of the source minus its actual shares; negative if the stored count is too low.
    """

    written: int = 0
    live: int = 0
    confirmed: int = 0
    damaged: list[DamagedShare] = field(default_factory=list)
    uncounted: int = 0
    locked_seconds: float = 0.0


def copy_queue(
    source: CopyEndpoint, target: CopyEndpoint, *, clock: Clock, on_progress: ProgressCallback
) -> CopyResult:
    """Lock both databases, copy and compare all rows, and set the marks.

    Raises:
        StoreLocked: a process uses one of them.
        StoreMoved: the source no longer contains the queue.
        StoreForeign: the target contains another queue.
        StoreCopyDiffers: the target differs from the source. The queue remains in the source.
        StoreError: one of them cannot be used.
    """
    began = clock.monotonic()
    _open_source(source, target)
    source.lock_exclusive()
    target.lock_exclusive()
    earlier = _check_target(source, target)
    moved = source.get_mark(MOVED_KEY)  # if there is one, the target had every row when it was written
    is_erased = moved is not None and moved.is_erased  # perhaps not completely
    written = 0
    try:
        if moved is None:
            mark = CopyMark(secrets.token_hex(8) if earlier is None else earlier.id, source.label, int(clock.now()))
            target.begin_copy(mark, source.read_page(META, ()))
            target.delete_rows()
            written = _copy_rows(SourceRows(source, clock, on_progress), target)
        compared = SourceRows(source, clock, on_progress)
        if not is_erased:
            _compare_rows(compared, target)
        if moved is None:
            with source.write_transaction():
                source.set_mark(MOVED_KEY, CopyMark(mark.id, target.label, int(clock.now())))
        with target.write_transaction():
            target.set_mark(UNFINISHED_KEY, None)
    except (HelperError, KeyboardInterrupt):
        on_progress("the move is not finished: run the same command again")
        raise
    live, confirmed = _count_live_and_confirmed(target.read_counters())
    counted = 0 if is_erased else sum(source.read_counters().values())
    return CopyResult(
        written=written,
        live=live,
        confirmed=confirmed,
        damaged=compared.damaged,
        uncounted=counted - compared.counts.total() - len(compared.damaged),
        locked_seconds=clock.monotonic() - began,
    )


def estimate_copy(source: CopyEndpoint, target: CopyEndpoint) -> CopyResult:
    """Report what would be copied, from the source's counters. Changes nothing.

    Raises:
        StoreError: as in `copy_queue`, except that databases in use are not detected.
    """
    _open_source(source, target)
    try:
        target.connect_read_only()
    except NotFound:
        _check_source(source, None)
    else:
        _check_target(source, target)
    live, confirmed = _count_live_and_confirmed(source.read_counters())
    return CopyResult(live=live, confirmed=confirmed)


def _open_source(source: CopyEndpoint, target: CopyEndpoint) -> None:
    if source.label == target.label:
        raise StoreForeign(
            f"{source.label} would be copied onto itself", advice="Choose another database with --to or --from."
        )
    source.connect_read_only()


def _check_target(source: CopyEndpoint, target: CopyEndpoint) -> CopyMark | None:
    """Refuse a target that contains another queue. Returns the mark of an unfinished copy into it."""
    unfinished = target.get_mark(UNFINISHED_KEY)
    _check_source(source, unfinished)
    has_own_mark = unfinished is not None or target.get_mark(MOVED_KEY) is not None
    if not target.is_fresh() and not (has_own_mark and target.read_row_key() == source.read_row_key()):
        raise StoreForeign(
            f"{target.label} already contains another queue",
            advice="Choose an empty database, a file that does not exist, or a database that this queue was moved "
            "from.",
        )
    return unfinished


def _check_source(source: CopyEndpoint, mark: CopyMark | None) -> None:
    """Refuse a marked source, unless this copy marked it as moved and was interrupted directly afterwards."""
    moved = source.get_mark(MOVED_KEY)
    if moved is None or mark is None or moved.id != mark.id:
        refuse_marked(source.fetch_all("get_marks"), source.label)


def _copy_rows(rows: SourceRows, target: CopyEndpoint) -> int:
    """Copy all rows. Returns their number."""
    for table in TABLES:
        for page in rows.read_pages(table):
            if table is not META:  # copied together with the mark
                target.write_rows(table, page)
    with target.write_transaction():
        target.end_copy()
    rows.report("copied")
    return rows.number


def _compare_rows(rows: SourceRows, target: CopyEndpoint) -> None:
    """Compare all rows, and the counters with the shares.

    Raises:
        StoreCopyDiffers: the target differs from the source.
    """
    differing = []
    for table in TABLES:
        pages = rows.read_pages(table), target.read_pages(table)
        if any(row != other for row, other in zip_longest(*map(chain.from_iterable, pages))):
            differing.append(table.name)
    if target.read_counters() != rows.counts:
        differing.append("the share counts")
    if differing:
        advice = None
        if rows.source.get_mark(MOVED_KEY) is not None:
            advice = (
                "The source still has all rows, but is marked as moved. Run `svote-helper db copy --undo --from "
                f"{quote(rows.source.cli_value)}`, then this command again: it copies them again."
            )
        raise StoreCopyDiffers(
            f"{target.label} differs from {rows.source.label}: {', '.join(differing)}", advice=advice
        )
    rows.report("compared")


class SourceRows:
    """One pass over the rows of a source that its copy should have.

    Attributes:
        number: rows so far.
        counts: shares so far by round number and state.
        damaged: shares so far that are damaged or were quarantined; they are not copied.
    """

    def __init__(self, source: CopyEndpoint, clock: Clock, on_progress: ProgressCallback) -> None:
        self.source = source
        self._clock = clock
        self._on_progress = on_progress
        self._row_key = source.read_row_key()
        self._quarantined = source.read_quarantined()
        self._rounds: dict[int, bytes] = {}
        self._began = self._reported = clock.monotonic()
        self.number = 0
        self.counts: Counter[tuple[int, int]] = Counter()
        self.damaged: list[DamagedShare] = []

    def read_pages(self, table: Table) -> Iterator[list[Row]]:
        """Yield the rows of a table. The tables must be read in the order of `TABLES`."""
        for page in self.source.read_pages(table):
            rows = [row for original in page if (row := self._select(table, original)) is not None]
            if table is ROUND_KEYS:
                self._rounds |= {row[0]: row[1] for row in rows}
            elif table is SHARES:
                self.counts.update((row[1], row[2].state) for row in rows)
            elif table is TOMBSTONES:
                self.counts.update((row[0], ShareState.CONFIRMED.value) for row in rows)
            self.number += len(rows)
            if self._clock.monotonic() - self._reported >= PROGRESS_SECONDS:
                self._reported = self._clock.monotonic()
                self.report(f"… {table.name}")
            yield rows

    def report(self, done: str) -> None:
        """Report the rows so far."""
        self._on_progress(f"{done}: {self.number} rows, {self._clock.monotonic() - self._began:.1f} s")

    def _select(self, table: Table, row: Row) -> Row | None:
        """Return the row as the target should have it, None if it is damaged or of an unknown round."""
        if table is SHARES:
            return self._select_share(LiveShare(*row))
        is_known = table.round_column is None or row[table.round_column] in self._rounds
        is_checked = table.name in {"round_keys", "rounds"}
        return row if is_known and (not is_checked or is_sound(self._row_key, row)) else None

    def _select_share(self, share: LiveShare) -> LiveShare | None:
        quarantined = self._quarantined.get(share.id)
        sound = None if quarantined is not None else select_sound(share, self._row_key)
        if sound is None or self._rounds.get(sound.round_no) != sound.share.round_id:  # its round's key is damaged
            self.damaged.append(quarantined or share.share.to_damaged_share())
            return None
        return sound


def _count_live_and_confirmed(counts: Mapping[tuple[int, int], int]) -> tuple[int, int]:
    confirmed = sum(number for (_, state), number in counts.items() if state == ShareState.CONFIRMED)
    return sum(counts.values()) - confirmed, confirmed


# ---------------------------------------------------------------------- after a copy


def read_moved_mark(source: CopyEndpoint, *, to_undo: bool = False) -> CopyMark:
    """Return the mark with the database to which the queue was moved. Changes nothing.

    Raises:
        StoreForeign: the database is not marked as moved; or, `to_undo`, its rows were erased.
    """
    source.connect_read_only()
    mark = source.get_mark(MOVED_KEY)
    if mark is None or source.get_mark(UNFINISHED_KEY) is not None:
        raise StoreForeign(f"{source.label} is not marked as moved", advice="Nothing was changed.")
    if to_undo and mark.is_erased:
        raise StoreForeign(
            f"the data of {source.label} was erased after the queue had been moved to {mark.other}",
            advice="Nothing was changed. To move the queue back, run `svote-helper db copy --to` with that database "
            "as the source. If that database is lost, use a new one.",
        )
    return mark


def undo_copy(source: CopyEndpoint) -> None:
    """Remove the mark, so that a helper can use the source again.

    Raises:
        StoreForeign: the database is not marked as moved, or its rows were erased.
        StoreLocked: a process uses it.
    """
    _lock_moved(source, to_undo=True)
    with source.write_transaction():
        source.set_mark(MOVED_KEY, None)


def erase_source(source: CopyEndpoint) -> None:
    """Delete all rows of the source except those of `meta`, which include the mark.

    After a file is closed, it contains no deleted data. The queue can still be copied back to it.

    Raises:
        StoreForeign: the database is not marked as moved.
        StoreLocked: a process uses it.
    """
    mark = _lock_moved(source)
    with source.write_transaction():  # a copy that was interrupted between its two marks must not be repeated from here
        source.set_mark(MOVED_KEY, replace(mark, is_erased=True))
    source.delete_rows()


def _lock_moved(source: CopyEndpoint, *, to_undo: bool = False) -> CopyMark:
    """Lock the source and return its mark, which is checked again under the lock."""
    read_moved_mark(source, to_undo=to_undo)
    source.lock_exclusive()
    return read_moved_mark(source, to_undo=to_undo)
