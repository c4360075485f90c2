"""SQL functions on the sealed column `shares.witness` of an unencrypted file, for tests that read or change its fields.

`field(witness, 'c1')` is the value of a field, and `flip(witness, 'c1')` a witness with one bit of the field flipped.
"""

from __future__ import annotations

import re
import sqlite3
import struct
from typing import Any

from helper.store.null_cipher import HEADER_BYTES
from helper.store.row_encryption import _PLAINTEXT, SEALED_FIELDS, _decode_witness

_FORMATS = re.findall(r"\d*[a-zA-Z]", _PLAINTEXT.format)


def add_field_functions(conn: sqlite3.Connection) -> sqlite3.Connection:
    """Add the functions to a connection; returns it."""
    conn.create_function("field", 2, _read_field, deterministic=True)
    conn.create_function("flip", 2, _flip_field, deterministic=True)
    return conn


def _read_field(witness: bytes, name: str) -> Any:
    return _decode_witness(witness[HEADER_BYTES:])[SEALED_FIELDS.index(name)]


def _flip_field(witness: bytes, name: str) -> bytes:
    """Flip the lowest bit of the last byte of a field."""
    end = HEADER_BYTES + struct.calcsize(">" + "".join(_FORMATS[: SEALED_FIELDS.index(name) + 1]))
    return witness[: end - 1] + bytes([witness[end - 1] ^ 1]) + witness[end:]
