"""Encrypts or decrypts an existing database file, or encrypts it again with another key.

All rows of the tables with encrypted columns are rewritten in one transaction, so that after an interruption the file
is either as before or complete. Afterwards the old rows are erased from the files like those of confirmed shares:
`secure_delete` zeroes the pages of the old tables, and the write-ahead log is checkpointed and truncated.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.errors import StoreCopyDiffers, StoreKeyError
from helper.store.db_copy.endpoint import load_copy_statements
from helper.store.db_copy.tables import LiveShare, live_shares, make_portable
from helper.store.meta import KEY_CHECK, KEYS_IN_USE
from helper.store.models import DamagedShare
from helper.store.row_encryption import RowEncryption
from helper.store.sqlite.errors import translate
from helper.store.sqlite.opening import OpenedDatabase, open_database
from helper.store.sqlite.row_format import UNENCRYPTED, RowFormat, record_keys
from helper.store.sqlite.schema import APPLICATION_ID, ENCRYPTED_APPLICATION_ID, schema_objects
from helper.store.table_rows import RevealRow, RoundKeyRow, is_sound

_TABLES: Final = ("round_keys", "shares", "reveals")
"""The tables with encrypted columns."""
_PAGE_ROWS: Final = 500
ERASE_SECONDS: Final = 10.0
"""Seconds to wait for readers of the file, which block the erasure of old rows."""
_RETRY_SECONDS: Final = 0.05


@dataclass(slots=True)
class RewriteResult:
    """Result of a rewrite.

    Attributes:
        live: shares with their witness.
        damaged: shares whose rows were damaged; they were deleted, because no helper would have used them.
        is_erased: whether the old rows were erased. If not, a reader or the disk prevented it, and the next start of
            the helper erases them.
    """

    live: int = 0
    damaged: list[DamagedShare] = field(default_factory=list)
    is_erased: bool = False


def rewrite_file(path: Path, clock: Clock, encryption: RowEncryption, *, encrypt: bool) -> RewriteResult:
    """Encrypt all rows of a file with the first key, or decrypt them. The helper must not be running.

    Args:
        path: the file.
        clock: measures the delay of erasure.
        encryption: made from the key file. To encrypt a file again, it has the new key first, and the old ones.
        encrypt: whether the rows are to be encrypted.

    Raises:
        StoreLocked: a helper has it open.
        StoreKeyError: the file is encrypted with another key, or is to be decrypted and is not encrypted.
        StoreError: it failed; the file is unchanged.
    """
    opened = open_database(path, clock, marked=True, encryption=encryption, allow_unencrypted=True)
    try:
        source = opened.tx.row_format
        if not encrypt and not source.is_encrypted:
            raise StoreKeyError(f"{path} is not encrypted", advice="Nothing was changed.")
        result = _rewrite(opened, source, RowFormat(encryption) if encrypt else UNENCRYPTED)
        result.is_erased = _erase(opened, clock)
    finally:
        opened.close()
    return result


def _erase(opened: OpenedDatabase, clock: Clock) -> bool:
    """Erase the old rows. Returns False if a reader or the disk prevents it for `ERASE_SECONDS`."""
    eraser = opened.eraser
    eraser.record_deletion()
    deadline = clock.monotonic() + ERASE_SECONDS
    eraser.run_due(idle=True)
    while eraser.is_pending and clock.monotonic() < deadline:
        time.sleep(_RETRY_SECONDS)
        eraser.run_due(idle=True)
    return not eraser.is_pending


# ---------------------------------------------------------------------- the transaction


def _rewrite(opened: OpenedDatabase, source: RowFormat, target: RowFormat) -> RewriteResult:
    conn, row_key = opened.tx.conn, opened.tx.keys.row_check
    try:
        # Otherwise renaming a table would change the foreign keys of other tables.
        conn.execute("PRAGMA foreign_keys = OFF")
        conn.execute("PRAGMA legacy_alter_table = ON")
        conn.execute("BEGIN IMMEDIATE")
        try:
            _replace_tables(conn, target)
            result = _copy_rows(conn, source, target, row_key)
            _complete_tables(conn, target)
            _verify(conn, target, row_key, result)
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            raise
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise translate(error) from error
    return result


def _replace_tables(conn: sqlite3.Connection, target: RowFormat) -> None:
    """Rename the tables, and create empty ones of the target's schema without indexes and triggers."""
    for kind, name, table, sql in schema_objects(is_encrypted=not target.is_encrypted) + schema_objects(
        is_encrypted=target.is_encrypted
    ):
        if table in _TABLES and kind in {"index", "trigger"} and sql is not None:
            conn.execute(f"DROP {kind} IF EXISTS {name}")
    for table in _TABLES:
        conn.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    for sql in _schema_texts(target, {"table"}):
        conn.execute(sql)


def _complete_tables(conn: sqlite3.Connection, target: RowFormat) -> None:
    """Drop the old tables, and create the indexes and triggers of the new ones."""
    for table in reversed(_TABLES):
        conn.execute(f"DROP TABLE old_{table}")
    for sql in _schema_texts(target, {"index", "trigger"}):
        conn.execute(sql)
    conn.execute("DELETE FROM history WHERE share_id NOT IN (SELECT id FROM shares)")
    for name in ("drop_all_aside", "drop_counters", "count_shares_sqlite"):
        conn.execute(load_copy_statements()[name])
    application_id = ENCRYPTED_APPLICATION_ID if target.is_encrypted else APPLICATION_ID
    conn.execute(f"PRAGMA application_id = {application_id}")
    if target.is_encrypted:
        record_keys(conn, target, only_first=True)
    else:
        conn.execute("DELETE FROM meta WHERE key IN (?, ?)", (KEY_CHECK, KEYS_IN_USE))


def _schema_texts(target: RowFormat, kinds: set[str]) -> list[str]:
    return [
        sql
        for kind, _, table, sql in schema_objects(is_encrypted=target.is_encrypted)
        if table in _TABLES and kind in kinds and sql is not None
    ]


def _copy_rows(conn: sqlite3.Connection, source: RowFormat, target: RowFormat, row_key: bytes) -> RewriteResult:
    old_keys = conn.execute("SELECT no, round_id, mac_key, row_check FROM old_round_keys").fetchall()
    keys = [target.encrypt_params("add_round_key", row) for row in source.decrypt_rows("round_keys", old_keys)]
    conn.executemany(target.statement("add_round_key"), keys)
    aside = {row[0]: DamagedShare(*row[1:]) for row in conn.execute(load_copy_statements()["list_quarantined"])}
    result = RewriteResult()
    for page in _read_pages(conn, source):
        usable = []
        for live in page:
            fit = None if live.id in aside else make_portable(live, row_key)
            if fit is None:
                result.damaged.append(aside.get(live.id) or live.share.to_damaged_share())
            else:
                usable.append(fit)
        shares = [target.encrypt_params("add_share", live.share.to_columns()) for live in usable]
        conn.executemany(target.statement("add_share"), shares)
        reveals = [target.encrypt_params("add_reveal", live.reveal) for live in usable if live.reveal is not None]
        conn.executemany(target.statement("add_reveal"), reveals)
        result.live += len(usable)
    return result


def _read_pages(conn: sqlite3.Connection, source: RowFormat) -> Iterator[list[LiveShare]]:
    """Yield pages of the old shares with their messages, without their histories."""
    last = 0
    while rows := conn.execute(
        "SELECT k.round_id, s.* FROM old_shares s LEFT JOIN round_keys k ON k.no = s.round_no WHERE s.id > ? "
        "ORDER BY s.id LIMIT ?",
        (last, _PAGE_ROWS),
    ).fetchall():
        span = (last, last := rows[-1][1])
        reveals = conn.execute("SELECT * FROM old_reveals WHERE share_id > ? AND share_id <= ?", span).fetchall()
        yield live_shares(source.decrypt_rows("share_by_id", rows), source.decrypt_rows("reveal", reveals), ())


def _verify(conn: sqlite3.Connection, target: RowFormat, row_key: bytes, result: RewriteResult) -> None:
    """Read all rewritten rows and check them.

    Raises:
        StoreCopyDiffers: a row cannot be read as it was.
    """
    live = sum(share.is_sound(row_key) for share in target.read_shares(conn))
    ((stored,),) = conn.execute("SELECT count(*) FROM shares").fetchall()
    reveals = (target.decrypt_rows("reveal", [row])[0] for row in conn.execute("SELECT * FROM reveals"))
    keys = target.decrypt_rows("round_keys", conn.execute(target.statement("round_keys")).fetchall())
    if (
        not live == stored == result.live
        or not all(RevealRow(*row).is_sound(row_key) for row in reveals)
        or not all(is_sound(row_key, RoundKeyRow(*row)) for row in keys)
        or conn.execute("PRAGMA foreign_key_check").fetchall()
    ):
        raise StoreCopyDiffers("rewritten rows differ from the original ones")
