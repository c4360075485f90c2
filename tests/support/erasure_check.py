"""Searches all bytes of a database's files for erased data."""

from __future__ import annotations

from tests.support.harness import HelperProcess

_PUBLIC_QUERIES = (
    "SELECT leaves FROM tree_leaves",
    "SELECT nodes FROM tree_subtrees",
    "SELECT nullifier FROM spent",
    "SELECT mac FROM tombstones",
    "SELECT round_id FROM round_keys",
    "SELECT mac_key FROM round_keys",
    "SELECT value FROM meta",
)
_PAGE_COUNT = slice(28, 32)
"""Where the header of a database file has its number of pages (sqlite.org/fileformat2.html)."""
_PAGE_BYTES = 4096
_PAGE_NUMBER_BYTES = 4


def read_public_blobs(helper: HelperProcess) -> list[bytes]:
    """Return the blobs that may contain any bytes: the chain's leaves, nodes and nullifiers, and keyed hashes."""
    values = [value for query in _PUBLIC_QUERIES for (value,) in helper.query_rows(query)]
    return [value.encode() if isinstance(value, str) else value for value in values]


def find_outside_public(files: bytes, pattern: bytes, public: list[bytes]) -> list[int]:
    """Return all offsets of the pattern outside the public blobs.

    A blob that spans pages is not contiguous in the file, and fragments may remain on free pages. A match is
    therefore public if 16 bytes around it, starting at it or 13 bytes before, belong to a blob. The first bytes of a
    page are no content: in a blob that spans pages, they are the number of the next page. Followed by one byte of the
    blob, it is equal to a position in one of 256 databases.

    Args:
        files: the bytes of a SQLite database file, then those of its write-ahead log and lock.
        pattern: the bytes to find.
        public: the blobs.
    """
    known = b"\0".join(public)
    database_end = int.from_bytes(files[_PAGE_COUNT]) * _PAGE_BYTES
    positions, at = [], files.find(pattern)
    while at >= 0:
        before, after = files[at - 13 : at + 3], files[at : at + 16]
        is_header = at < database_end and at % _PAGE_BYTES < _PAGE_NUMBER_BYTES
        if before not in known and after not in known and not is_header:
            positions.append(at)
        at = files.find(pattern, at + 1)
    return positions


def columns_containing(helper: HelperProcess, number: int) -> list[str]:
    return [
        f"{table}.{column}"
        for table, column in helper.storage.numeric_columns()
        if helper.query_rows(f"SELECT 1 FROM {table} WHERE {column} = ? LIMIT 1", number)
    ]
