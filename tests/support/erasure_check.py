"""Looks for what should be gone in every byte of a database's files."""

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


def read_public_blobs(helper: HelperProcess) -> list[bytes]:
    """The blobs in which any bytes may stand: the chain's leaves, nodes and nullifiers, and our keyed hashes."""
    values = [value for query in _PUBLIC_QUERIES for (value,) in helper.query_rows(query)]
    return [value.encode() if isinstance(value, str) else value for value in values]


def find_outside_public(files: bytes, pattern: bytes, public: list[bytes]) -> list[int]:
    """Every offset of the pattern that is in none of the public blobs.

    A blob of several pages is not in one piece in the file, and a piece of one may stand on a page that was given
    free: so what counts is whether the 16 bytes around the pattern (some on either side) are a blob's.
    """
    known = b"\0".join(public)
    found, at = [], files.find(pattern)
    while at >= 0:
        before, after = files[at - 13 : at + 3], files[at : at + 16]
        if before not in known and after not in known:
            found.append(at)
        at = files.find(pattern, at + 1)
    return found


def columns_containing(helper: HelperProcess, number: int) -> list[str]:
    """Every column of every table that holds this number."""
    return [
        f"{table}.{column}"
        for table, column in helper.storage.numeric_columns()
        if helper.query_rows(f"SELECT 1 FROM {table} WHERE {column} = ? LIMIT 1", number)
    ]
