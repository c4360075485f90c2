"""Selects the live shares for an export from a snapshot of the database."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from helper.core.share import ShareState
from helper.store.action_models import ExportedReveal, ExportedShare, RowVersion
from helper.store.models import HistoryEntry, PreparedReveal, QueueFilter
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.shares import matches_filter
from helper.store.sql_files import sqlite_statements
from helper.store.sqlite.errors import translate
from helper.store.sqlite.file_keys import open_encryption, read_shares
from helper.store.table_rows import ROW_CHECK_KEY, RevealRow, RoundRow, Row, ShareRow, read_key, read_meta_value
from helper.store.transaction import Params

_CHAIN_ID: Final = "chain_id"


@dataclass(slots=True)
class ExportSelection:
    """The shares of an export.

    Attributes:
        chain_id: id of the shares' chain, None if it is not known yet.
        shares: the shares.
        versions: the versions of their rows.
        skipped: number of shares that are not exported, by reason: `closed` round, already `moved`, or `damaged`.
            Damaged shares are included even if they do not match.
        round_ends: Unix seconds at which voting ends, by round.
    """

    chain_id: str | None
    shares: list[ExportedShare] = field(default_factory=list)
    versions: list[RowVersion] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    round_ends: dict[bytes, int] = field(default_factory=dict)


def select_for_export(
    image: bytes, query: QueueFilter, refs: Collection[str] = (), encryption: RowEncryption = UNENCRYPTED
) -> ExportSelection:
    """Select the shares in a database image that match.

    Args:
        image: a checked image from `take_snapshot`.
        query: the filter that they must match.
        refs: prefixes of references, at least one of which must match; empty for any.
        encryption: made from the key file.

    Raises:
        StoreKeyError: the image is encrypted, and a key that it needs is missing.
        StoreError: the image cannot be read.
    """
    try:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
            conn.text_factory = partial(str, encoding="utf-8", errors="replace")
            conn.deserialize(image)
            image_reader = _Image(conn, open_encryption(conn, encryption, "the database"))
            return _select_shares(image_reader, query, tuple(refs))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise translate(error) from error


@dataclass(frozen=True, slots=True)
class _Image:
    """An open image and its encryption."""

    conn: sqlite3.Connection
    encryption: RowEncryption

    def fetch(self, name: str, params: Params = ()) -> list[Row]:
        """Return all rows of a named query, decrypted."""
        return self.encryption.decrypt_rows(name, self.conn.execute(sqlite_statements()[name], params).fetchall())


def _select_shares(image: _Image, query: QueueFilter, refs: tuple[str, ...]) -> ExportSelection:
    row_key = read_key(image.fetch("get_meta", (ROW_CHECK_KEY,)), ROW_CHECK_KEY)
    selection = ExportSelection(read_meta_value(image.fetch("get_meta", (_CHAIN_ID,))))
    rounds = dict(_read_rounds(image, row_key))
    selection.round_ends = {round_id: row.vote_end_time for round_id, row in rounds.items()}
    closed = {round_id for round_id, row in rounds.items() if row.closed_ms is not None}
    aside = {row[0] for row in image.fetch("quarantined_ids")}
    for row in read_shares(image.conn, image.encryption):
        if row.id in aside or not row.is_sound(row_key):
            selection.skipped["damaged"] += 1
        elif matches_filter(row, query) and (not refs or row.mac.hex().startswith(refs)):
            _add_share(image, row, row_key, closed, selection)
    return selection


def _read_rounds(image: _Image, row_key: bytes) -> Iterator[tuple[bytes, RoundRow]]:
    for round_id, *columns in image.fetch("rounds"):
        row = RoundRow(*columns)
        if row.is_sound(row_key):
            yield round_id, row


def _add_share(image: _Image, row: ShareRow, row_key: bytes, closed: set[bytes], selection: ExportSelection) -> None:
    """Add a share, unless its round is closed or it was already moved to another machine."""
    if row.round_id in closed:
        selection.skipped["closed"] += 1
    elif row.is_moved:
        selection.skipped["moved"] += 1
    else:
        selection.shares.append(_export_share(image, row, row_key))
        selection.versions.append((row.id, row.row_check))


def _export_share(image: _Image, row: ShareRow, row_key: bytes) -> ExportedShare:
    state = ShareState(row.state)
    reveal = _read_reveal(image, row.id, row_key) if state is ShareState.BROADCAST else None
    if reveal is None and state in {ShareState.BROADCAST, ShareState.WITNESSED}:
        state = ShareState.RECEIVED  # without a message, the importing machine proves it again
    return ExportedShare(
        share=row.to_share(),
        received_ms=row.received_ms,
        state=state,
        due_ms=row.due_ms,
        attempts=row.attempts,
        crashes=row.crashes,
        proved_height=row.proved_height,
        stage=row.stage,
        note=row.note,
        history=tuple(
            HistoryEntry(at_ms, stage, note, bool(counted))
            for at_ms, stage, note, counted in image.fetch("history", (row.id,))
        ),
        reveal=reveal,
    )


def _read_reveal(image: _Image, share_id: int, row_key: bytes) -> ExportedReveal | None:
    """Return the message of a share, None if it is damaged."""
    rows = [RevealRow(*columns) for columns in image.fetch("reveal", (share_id,))]
    if not rows or not rows[0].is_sound(row_key):
        return None
    row = rows[0]
    return ExportedReveal(
        prepared=PreparedReveal(row.message, row.tx_hash, row.anchor_height, row.circuit, row.height),
        sends=row.sends,
        first_sent_height=row.first_sent_height,
        last_sent_height=row.last_sent_height,
        last_endpoint=row.last_endpoint,
        last_outcome=row.last_outcome,
    )
