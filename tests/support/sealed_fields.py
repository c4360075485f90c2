"""SQL functions on the sealed column `shares.witness` of an unencrypted file, for tests that read or change its fields.

`field(witness, 'c1')` is the value of a field, and `flip(witness, 'c1')` a witness with one bit of the field flipped.
"""

from __future__ import annotations

import sqlite3
import struct
from typing import Any

from helper.store.table_rows import WITNESS_FORMATS, read_extra


def add_field_functions(conn: sqlite3.Connection) -> sqlite3.Connection:
    """Add the functions to a connection; returns it."""
    conn.create_function("field", 2, _read_field, deterministic=True)
    conn.create_function("flip", 2, _flip_field, deterministic=True)
    return conn


def _locate(name: str) -> tuple[int, str]:
    """Return the offset of a field in the column, and its format."""
    names = list(WITNESS_FORMATS)
    formats = list(WITNESS_FORMATS.values())
    return struct.calcsize(">" + "".join(formats[: names.index(name)])), f">{WITNESS_FORMATS[name]}"


def _read_field(witness: bytes, name: str) -> Any:
    if name in {"kind", "extra"}:
        return read_extra(witness)[name == "extra"]
    start, width = _locate(name)
    return struct.unpack_from(width, witness, start)[0]


def _flip_field(witness: bytes, name: str) -> bytes:
    """Flip the lowest bit of the last byte of a field."""
    start, width = _locate(name)
    end = start + struct.calcsize(width)
    return witness[: end - 1] + bytes([witness[end - 1] ^ 1]) + witness[end:]
