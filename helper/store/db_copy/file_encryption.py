"""Encrypts or decrypts an existing database file, or encrypts it again with another key.

The secret columns of all rows are rewritten in one transaction, so that after an interruption the file is either as
before or complete. Afterwards the old values are erased from the files like the rows of confirmed shares.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.errors import StoreCopyDiffers
from helper.store.db_copy.endpoint import select_sound
from helper.store.db_copy.sqlite_endpoint import SqliteEndpoint
from helper.store.row_encryption import REVEAL_COLUMNS, SHARE_COLUMNS, UNENCRYPTED, RowEncryption
from helper.store.sqlite.erasure import Eraser
from helper.store.sqlite.schema import APPLICATION_ID, ENCRYPTED_APPLICATION_ID, record_keys
from helper.store.table_rows import KEY_CHECK, KEYS_IN_USE, is_sound

ERASE_SECONDS: Final = 10.0
"""Seconds to wait for readers of the file, which block the erasure of old values."""
_RETRY_SECONDS: Final = 0.05


@dataclass(slots=True)
class RewriteResult:
    """Result of a rewrite.

    Attributes:
        live: shares with their witness.
        damaged: shares that were deleted, because their rows were damaged and no helper would have used them.
        is_erased: whether the old values were erased. If not, a reader or the disk prevented it, and the next start of
            the helper erases them.
    """

    live: int = 0
    damaged: int = 0
    is_erased: bool = False


def rewrite_file(path: Path, clock: Clock, encryption: RowEncryption, *, encrypt: bool) -> RewriteResult:
    """Encrypt all rows of a file with the first key, or decrypt them. The helper must not be running.

    Args:
        encryption: made from the key file. To encrypt a file again, it has the new key first, and the old ones.

    Raises:
        StoreLocked: a helper has it open.
        StoreKeyError: the file is encrypted with another key.
        StoreError: it failed; the file is unchanged.
    """
    with closing(SqliteEndpoint(path, clock, encryption)) as endpoint:
        endpoint.lock_exclusive()
        with endpoint.write_transaction():
            result = _rewrite(endpoint, encryption if encrypt else UNENCRYPTED)
        result.is_erased = _erase(endpoint.opened.eraser, clock)
    return result


def _erase(eraser: Eraser, clock: Clock) -> bool:
    """Erase the old values. Returns False if a reader or the disk prevents it for `ERASE_SECONDS`."""
    eraser.record_deletion()
    deadline = clock.monotonic() + ERASE_SECONDS
    eraser.run_due(idle=True)
    while eraser.is_pending and clock.monotonic() < deadline:
        time.sleep(_RETRY_SECONDS)
        eraser.run_due(idle=True)
    return not eraser.is_pending


# ---------------------------------------------------------------------- the transaction


def _rewrite(endpoint: SqliteEndpoint, target: RowEncryption) -> RewriteResult:
    conn, row_key = endpoint.opened.tx.conn, endpoint.opened.tx.keys.row_check
    # SQLite refuses to delete or change a damaged row whose values are not in the indexes.
    conn.execute("REINDEX shares")
    for name in ("drop_lost_reveals", "drop_lost_history"):
        endpoint.execute_many(name, [()])
    keys = [target.encrypt_round_key(row)._asdict() for row in endpoint.fetch_all("round_keys")]
    conn.executemany("UPDATE round_keys SET mac_key = :mac_key WHERE no = :no", keys)
    result = _rewrite_shares(endpoint, target, row_key)
    endpoint.end_copy()
    endpoint.encryption = target
    application_id = ENCRYPTED_APPLICATION_ID if target.is_encrypted else APPLICATION_ID
    conn.execute(f"PRAGMA application_id = {application_id}")
    if target.keyring is not None:
        record_keys(conn, target.keyring, only_first=True)
    else:
        conn.execute("DELETE FROM meta WHERE key IN (?, ?)", (KEY_CHECK, KEYS_IN_USE))
    _verify(endpoint, row_key, result)
    return result


def _rewrite_shares(endpoint: SqliteEndpoint, target: RowEncryption, row_key: bytes) -> RewriteResult:
    conn, aside = endpoint.opened.tx.conn, endpoint.read_quarantined()
    result = RewriteResult()
    for live in endpoint.read_shares():
        sound = None if live.id in aside else select_sound(live, row_key)
        if sound is None:
            result.damaged += 1
            endpoint.execute_many("delete_share", [(live.id,)])
            continue
        result.live += 1
        columns = dict(zip(SHARE_COLUMNS, target.encrypt_share(sound.share), strict=True))
        conn.execute("UPDATE shares SET tag = :tag, witness = :witness WHERE id = :id", columns)
        if sound.reveal is not None:
            columns = dict(zip(REVEAL_COLUMNS, target.encrypt_reveal(sound.reveal), strict=True))
            conn.execute("UPDATE reveals SET message = :message WHERE share_id = :share_id", columns)
        elif live.reveal is not None:
            endpoint.execute_many("drop_reveal", [(live.id,)])
    return result


def _verify(endpoint: SqliteEndpoint, row_key: bytes, result: RewriteResult) -> None:
    """Read all rewritten rows and check them.

    Raises:
        StoreCopyDiffers: a row cannot be read as it was.
    """
    live = sum(select_sound(share, row_key) == share for share in endpoint.read_shares())
    ((stored,),) = endpoint.opened.tx.conn.execute("SELECT count(*) FROM shares").fetchall()
    keys = endpoint.fetch_all("round_keys")
    if not live == stored == result.live or not all(is_sound(row_key, row) for row in keys):
        raise StoreCopyDiffers("rewritten rows differ from the original ones")
