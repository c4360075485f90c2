"""Checks the tables and indexes of an open database in short reads.

During a read the write-ahead log cannot be truncated, so confirmed witnesses are not erased. `PRAGMA integrity_check`
on a file with a million shares is one read of 10 s or more. Therefore it runs for one table at a time, and a large
table with indexes is read in pieces.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from helper.errors import StoreCorrupt
from helper.store.sqlite.reader import SqliteReader

LARGE_TABLE_ROWS: Final = 20_000
"""Number of rows from which a table is read in pieces; a check of that many shares takes about 0.2 s."""
PIECE_ROWS: Final = 1000
_TABLES: Final = "SELECT name, wr FROM pragma_table_list WHERE schema = 'main' AND type = 'table' ORDER BY name"
_INDEXES: Final = """
SELECT s.name, s.sql FROM pragma_index_list(?) AS l JOIN sqlite_schema AS s ON s.name = l.name
WHERE NOT EXISTS (SELECT 1 FROM pragma_index_info(l.name) WHERE cid = -2)"""
"""Indexes of a table, without those on expressions."""
_INDEX_COLUMNS: Final = "SELECT name FROM pragma_index_info(?) WHERE cid >= 0"
_FIRST_ROWS: Final = "SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT ?)"
_PIECE: Final = """
SELECT max(row_number), {counts}
FROM (SELECT rowid AS row_number, * FROM {table} NOT INDEXED WHERE rowid > ? ORDER BY rowid LIMIT ?) AS checked"""
_MISSING: Final = """
total(({applies}) AND NOT EXISTS (
  SELECT 1 FROM {table} AS entry INDEXED BY {index}
  WHERE {applies} AND {equal} AND entry.rowid = checked.row_number))"""


async def check_integrity(reader: SqliteReader, pause: Callable[[], Awaitable[None]]) -> list[str]:
    """Check every table with its indexes, and read large ones in pieces.

    Not checked: the list of free pages, and in a large table indexes on expressions and superfluous index entries.

    Args:
        reader: a connection of its own.
        pause: awaited between two reads; returns once deleted rows are erased.

    Returns:
        Descriptions of the problems.
    """
    problems: list[str] = []
    for table, has_no_rowid in await reader.run(_TABLES):
        await pause()
        try:
            # The rows of a table without rowids are its only index.
            if has_no_rowid or not await _is_large(reader, table):
                found = [str(row[0]) for row in await reader.run(f"PRAGMA integrity_check('{table}')")]
                problems += [] if found == ["ok"] else found
            else:
                problems += await _check_in_pieces(reader, table, pause)
        except StoreCorrupt as error:
            problems.append(f"{table}: {error}")
    return problems


async def _is_large(reader: SqliteReader, table: str) -> bool:
    return await reader.run(_FIRST_ROWS.format(table=table), (LARGE_TABLE_ROWS,)) == [(LARGE_TABLE_ROWS,)]


async def _check_in_pieces(reader: SqliteReader, table: str, pause: Callable[[], Awaitable[None]]) -> list[str]:
    """Read all rows of a table, and look each up in its indexes."""
    indexes = [
        (index, await _count_missing(reader, table, index, sql or ""))
        for index, sql in await reader.run(_INDEXES, (table,))
    ]
    query = _PIECE.format(table=table, counts=", ".join(count for _, count in indexes) or "0")
    missing = [0.0] * len(indexes)
    last: int | None = -1 << 63
    while last is not None:
        ((last, *counts),) = await reader.run(query, (last, PIECE_ROWS))
        missing = [total + count for total, count in zip(missing, counts, strict=False)]
        await pause()
    return [
        f"{count:.0f} rows are missing from index {index}"
        for (index, _), count in zip(indexes, missing, strict=True)
        if count
    ]


async def _count_missing(reader: SqliteReader, table: str, index: str, sql: str) -> str:
    """Return the expression for the number of rows that are not in an index."""
    columns = [row[0] for row in await reader.run(_INDEX_COLUMNS, (index,))]
    applies = sql.partition(" WHERE ")[2] or "true"
    equal = " AND ".join(f"entry.{column} IS checked.{column}" for column in columns)
    return _MISSING.format(table=table, index=index, applies=applies, equal=equal or "true")
