"""The file with the keys that the hosts of one database share."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from helper.errors import StoreError
from helper.store.postgres.keyring import KEY_BYTES, Keyring

_ADVICE: Final = (
    "It holds lines of 64 hex digits, the same on every host: `(umask 077; openssl rand -hex 32 > FILE)` makes one."
)


def read_keyring(file: Path) -> Keyring:
    """The keys in a file: one a line, the first seals; empty lines and those that begin with # are passed over.

    Raises:
        StoreError: it cannot be read, others than its owner may read it, or a line is no key. No line is quoted.
    """
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read().decode("ascii")
    except PermissionError as error:
        advice = f"Its owner must be the helper's user, who must get to its folder too: `chown USER {file}`."
        raise StoreError(f"the key file {file} cannot be read: {error.strerror}", advice=advice) from None
    except OSError as error:
        raise StoreError(f"the key file {file} cannot be read: {error.strerror}", advice=_ADVICE) from None
    except UnicodeDecodeError:
        raise StoreError(f"the key file {file} is no text", advice=_ADVICE) from None
    if mode & 0o077:
        raise StoreError(
            f"others than its owner may use the key file {file} (mode {mode:04o})", advice=f"`chmod 600 {file}`."
        )
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if word and not word.startswith("#"):
            keys.append(_key(word, f"{file}:{number}"))
    if not keys:
        raise StoreError(f"the key file {file} holds no key", advice=_ADVICE)
    return Keyring(keys)


def _key(word: str, place: str) -> bytes:
    try:
        key = bytes.fromhex(word)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or len(word) != 2 * KEY_BYTES:
        raise StoreError(f"{place} is no key", advice=_ADVICE)
    return key
