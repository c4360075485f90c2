"""Reads the key file that the hosts of one database share."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from helper.errors import StoreError
from helper.store.postgres.keyring import KEY_BYTES, Keyring

_ADVICE: Final = (
    "It has one key of 64 hex digits per line, the same on every host. Create it with "
    "`(umask 077; openssl rand -hex 32 > FILE)`."
)


def read_keyring(file: Path) -> Keyring:
    """Read a key file: one key per line, the first one encrypts. Empty lines and lines that begin with # are ignored.

    Raises:
        StoreError: it cannot be read, users other than its owner may access it, or a line is not a key. The message
            never quotes a line.
    """
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read().decode("ascii")
    except PermissionError as error:
        advice = (
            f"Its owner must be the user of the helper, who needs access to its directory too: `chown USER {file}`."
        )
        raise StoreError(f"the key file {file} cannot be read: {error.strerror}", advice=advice) from None
    except OSError as error:
        raise StoreError(f"the key file {file} cannot be read: {error.strerror}", advice=_ADVICE) from None
    except UnicodeDecodeError:
        raise StoreError(f"the key file {file} is not text", advice=_ADVICE) from None
    if mode & 0o077:
        raise StoreError(
            f"users other than its owner may access the key file {file} (mode {mode:04o})",
            advice=f"`chmod 600 {file}`.",
        )
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if entry and not entry.startswith("#"):
            keys.append(_key(entry, f"{file}:{number}"))
    if not keys:
        raise StoreError(f"the key file {file} has no key", advice=_ADVICE)
    return Keyring(keys)


def _key(entry: str, place: str) -> bytes:
    try:
        key = bytes.fromhex(entry)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or len(entry) != 2 * KEY_BYTES:
        raise StoreError(f"{place} is not a key", advice=_ADVICE)
    return key
