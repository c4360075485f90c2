"""One pass over all rows of two databases; writes or only counts the differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from helper.store.db_copy.endpoint import MigrationEndpoint
from helper.store.db_copy.tables import (
    ROUND_KEYS,
    SHARES,
    TABLES,
    Key,
    LiveShare,
    Table,
    compare,
    count_by_state,
    is_row_valid,
    last_common_key,
    make_portable,
    rows_up_to,
)
from helper.store.models import DamagedShare
from helper.store.table_rows import Row


@dataclass(slots=True)
class PassStats:
    """Statistics of one pass.

    Attributes:
        rows_read: rows of the source, by table.
        rows_differing: rows that were missing, different or extra in the target, by table.
        damaged: shares of the source that are damaged or were quarantined; they are not copied.
        counts: undamaged shares of the source by round number and state.
    """

    rows_read: Counter[str] = field(default_factory=Counter)
    rows_differing: Counter[str] = field(default_factory=Counter)
    damaged: list[DamagedShare] = field(default_factory=list)
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)


class TablePass:
    """Compares all tables once.

    Args:
        source: must be locked.
        target: must be locked.
        write: apply the differences to the target; otherwise only count them.
        report: called after each page with the table name and the number of rows read from it so far.
    """

    def __init__(
        self, source: MigrationEndpoint, target: MigrationEndpoint, *, write: bool, report: Callable[[str, int], None]
    ) -> None:
        self._source = source
        self._target = target
        self._write = write
        self._report = report
        self._row_key = source.read_row_key()
        self._aside = source.read_quarantined()
        self._rounds: dict[int, bytes] = {}
        self._stats = PassStats()

    def run(self) -> PassStats:
        """Make the pass.

        Raises:
            StoreError: a database could not be read or written. Rows that were already written remain.
        """
        for table in TABLES:
            self._pass_table(table)
        return self._stats

    def _pass_table(self, table: Table) -> None:
        after: Key | None = table.start or ()
        while after is not None:
            source_page, target_page = self._source.read_page(table, after), self._target.read_page(table, after)
            after = last_common_key(table, source_page, target_page)
            source_rows = self._portable_rows(table, rows_up_to(table, source_page, after))
            self._compare_pages(table, source_rows, rows_up_to(table, target_page, after))
            self._report(table.name, self._stats.rows_read[table.name])

    def _compare_pages(self, table: Table, source: Sequence[Row], target: Sequence[Row]) -> None:
        if table is ROUND_KEYS:
            self._rounds |= {row[0]: row[1] for row in source}
        self._stats.rows_read[table.name] += len(source)
        self._stats.counts.update(count_by_state(table, source))
        difference = compare(table, source, target)
        self._stats.rows_differing[table.name] += difference.size
        if self._write and difference.size:
            self._target.apply_difference(table, difference)

    def _portable_rows(self, table: Table, page: Sequence[Row]) -> list[Row]:
        """Return the rows of a source page that the target should have."""
        if table is SHARES:
            return [fit for row in page if (fit := self._portable_share(LiveShare(*row))) is not None]
        return [row for row in page if self._has_known_round(table, row) and is_row_valid(table, row, self._row_key)]

    def _portable_share(self, live: LiveShare) -> LiveShare | None:
        aside = self._aside.get(live.id)
        fit = None if aside is not None else make_portable(live, self._row_key)
        if fit is None:
            self._stats.damaged.append(live.share.to_damaged_share() if aside is None else aside)
            return None
        return fit if self._rounds.get(fit.round_no) == fit.share.round_id else None

    def _has_known_round(self, table: Table, row: Row) -> bool:
        return table.round_column is None or row[table.round_column] in self._rounds
