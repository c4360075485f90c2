"""One pass over all rows of two databases: what differs is written, or only counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from helper.store.migration.endpoint import MigrationEndpoint
from helper.store.migration.tables import (
    ROUND_KEYS,
    SHARES,
    TABLES,
    Key,
    LiveShare,
    Row,
    Table,
    compare,
    counted,
    fit_to_carry,
    is_right,
    last_common,
    up_to,
)
from helper.store.rows import DamagedShare


@dataclass(slots=True)
class PassStats:
    """What one pass saw.

    Attributes:
        read: rows of the source, by table.
        differing: rows that the target had not, or otherwise, or alone, by table.
        damaged: shares of the source that are not as they were written, or were set aside: they stay behind.
        counts: the source's sound shares by round number and state.
    """

    read: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    damaged: list[DamagedShare] = field(default_factory=list)
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)


def run_pass(
    source: MigrationEndpoint, target: MigrationEndpoint, *, write: bool, tell: Callable[[str, int], None]
) -> PassStats:
    """Go over all tables once.

    Args:
        source: may change meanwhile: the next pass finds what this one missed.
        target: held.
        write: make the target the source's; else only tell what differs.
        tell: is called after each page with the table's name and how many of its rows were read.

    Raises:
        StoreError: one of them could not be read or written; what was written before stays, and is the next pass's.
    """
    return _Pass(source, target, write=write, tell=tell).run()


class _Pass:
    def __init__(
        self, source: MigrationEndpoint, target: MigrationEndpoint, *, write: bool, tell: Callable[[str, int], None]
    ) -> None:
        self._source = source
        self._target = target
        self._write = write
        self._tell = tell
        self._row_key = source.row_key()
        self._aside = source.aside()
        self._rounds: dict[int, bytes] = {}
        self._passed = PassStats()

    def run(self) -> PassStats:
        for table in TABLES:
            self._table(table)
        return self._passed

    def _table(self, table: Table) -> None:
        after: Key | None = table.start or ()
        while after is not None:
            ours, theirs = self._source.page(table, after), self._target.page(table, after)
            after = last_common(table, ours, theirs)
            self._part(table, self._carried(table, up_to(table, ours, after)), up_to(table, theirs, after))
            self._tell(table.name, self._passed.read[table.name])

    def _part(self, table: Table, source: Sequence[Row], target: Sequence[Row]) -> None:
        if table is ROUND_KEYS:
            self._rounds |= {row[0]: row[1] for row in source}
        self._passed.read[table.name] += len(source)
        self._passed.counts.update(counted(table, source))
        difference = compare(table, source, target)
        self._passed.differing[table.name] += difference.size
        if self._write and difference.size:
            self._target.apply(table, difference)

    def _carried(self, table: Table, page: Sequence[Row]) -> list[Row]:
        """The rows of the source that the target is to have."""
        if table is SHARES:
            return [fit for row in page if (fit := self._share(LiveShare(*row))) is not None]
        return [row for row in page if self._is_known(table, row) and is_right(table, row, self._row_key)]

    def _share(self, one: LiveShare) -> LiveShare | None:
        aside = self._aside.get(one.id)
        fit = None if aside is not None else fit_to_carry(one, self._row_key)
        if fit is None:
            self._passed.damaged.append(one.share.damaged() if aside is None else aside)
            return None
        # a round that came meanwhile is the next pass's
        return fit if self._rounds.get(fit.round_no) == fit.share.round_id else None

    def _is_known(self, table: Table, row: Row) -> bool:
        return table.of_round is None or row[table.of_round] in self._rounds
