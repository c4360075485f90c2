"""Encryption of a database file: refused keys, key changes, and encrypting an existing file."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.errors import StoreCopyDiffers, StoreCorrupt, StoreKeyError
from helper.store import rounds
from helper.store.db_copy import file_encryption
from helper.store.db_copy.file_encryption import rewrite_file
from helper.store.keyring import Keyring
from helper.store.models import DamagedShare, EnqueueResult, QueueFilter
from helper.store.queue_reader import QueueReader
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sqlite import schema
from helper.store.sqlite.opening import open_database
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.snapshot import read_contents
from helper.store.sqlite.store import SqliteStore
from helper.store.table_rows import KEY_CHECK, make_meta_row
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import make_file_encryption
from tests.unit.store.fixtures import (
    OTHER_ROUND,
    ROUND,
    claim_all_due,
    confirm_shares,
    enqueue,
    enqueue_and_prepare,
    enqueue_shares,
    make_posted_share,
    make_reveal,
    open_closed_database,
    query_rows,
    read_database_files,
    select_shares,
)
from tests.unit.store.test_erasure import count_occurrences, witness_fragments
from tests.unit.store.test_export_import import enqueue_one_of_each

OLD_KEY, NEW_KEY = b"o" * 32, b"n" * 32
OLD = make_file_encryption([OLD_KEY])
NEW = make_file_encryption([NEW_KEY])
BOTH = make_file_encryption([NEW_KEY, OLD_KEY])


@asynccontextmanager
async def open_store(path: Path, encryption: RowEncryption = UNENCRYPTED) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, encryption=encryption)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def fill(path: Path, encryption: RowEncryption, *numbers: int) -> None:
    """Enqueue these shares in a file, and close it."""
    async with open_store(path, encryption) as store:
        await enqueue_shares(store, *numbers)


def secret_bytes(*numbers: int) -> list[bytes]:
    """Parts of the witnesses, nullifiers, messages and transaction hashes of shares."""
    secrets: list[bytes] = []
    for number in numbers:
        posted, sent = make_posted_share(number), make_reveal(number)
        secrets += witness_fragments(posted)
        secrets += [posted.nullifier, sent.message[50:62], sent.message[-12:], sent.tx_hash]
    return secrets


def read_first_round_key(path: Path, encryption: RowEncryption) -> bytes:
    ((columns),) = query_rows(path, "SELECT no, round_id, mac_key, row_check FROM round_keys WHERE no = 1")
    key: bytes = encryption.decrypt_rows("round_keys", [columns])[0][2]
    return key


async def test_encrypted_file_and_its_log_contain_no_secret(path: Path) -> None:
    async with open_store(path, NEW) as store:
        await enqueue_and_prepare(store, 1)
        await enqueue_shares(store, 2)
        mac_key = read_first_round_key(path, NEW)
        assert count_occurrences(path, [*secret_bytes(1, 2), mac_key]) == {}
        assert read_database_files(path)["queue.db-wal"], "the search reads the log"
    assert count_occurrences(path, [*secret_bytes(1, 2), mac_key]) == {}


async def test_start_decrypts_no_share(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(path, NEW, *range(20))
    decrypted: list[int] = []
    decrypt = Keyring.decrypt

    def count(self: Keyring, sealed: bytes) -> bytes:
        decrypted.append(len(sealed))
        return decrypt(self, sealed)

    monkeypatch.setattr(Keyring, "decrypt", count)
    async with open_store(path, NEW):
        pass
    assert decrypted, "the key check value and the key of the round are decrypted"
    assert max(decrypted) < 100, "no witness is"


# ---------------------------------------------------------------------- refused keys


@pytest.mark.parametrize(
    ("stored", "configured", "message"),
    [
        (OLD, UNENCRYPTED, "is encrypted, and .* key_file is not set"),
        (OLD, NEW, "is encrypted with a key that is not in the key file"),
        (UNENCRYPTED, NEW, "is not encrypted, but .* key_file is set"),
    ],
)
async def test_file_is_refused_unchanged_without_its_key(
    path: Path, stored: RowEncryption, configured: RowEncryption, message: str
) -> None:
    await fill(path, stored, 1)
    before = path.read_bytes()
    with pytest.raises(StoreKeyError, match=message) as refused:
        await SqliteStore(path, encryption=configured).open()
    assert str(path) in str(refused.value)
    assert "key_file" in refused.value.advice
    assert path.read_bytes() == before
    await fill(path, stored, 2)


@pytest.mark.parametrize("configured", [UNENCRYPTED, NEW])
async def test_offline_readers_refuse_file_without_its_key(path: Path, configured: RowEncryption) -> None:
    await fill(path, OLD, 1)
    with pytest.raises(StoreKeyError):
        async with open_queue_file(path, configured):
            pass
    with pytest.raises(StoreKeyError):
        read_contents(path, FakeClock(), configured)


async def test_offline_reader_reads_unencrypted_file_with_key_file(path: Path) -> None:
    await fill(path, UNENCRYPTED, 1)
    async with open_queue_file(path, NEW) as queue:
        assert await queue.count_shares() == {ROUND: {ShareState.WAITING: 1}}


async def test_damaged_key_check_value_is_reported(path: Path) -> None:
    await fill(path, NEW, 1)
    with open_closed_database(path) as conn:
        conn.execute("UPDATE meta SET value = 'ff' WHERE key = 'seal.check'")
    with pytest.raises(StoreCorrupt, match="key check value"):
        await SqliteStore(path, encryption=NEW).open()


async def test_file_whose_creation_was_interrupted_opens(path: Path) -> None:
    open_database(path, SystemClock(), encryption=NEW).close()
    with open_closed_database(path) as conn:
        conn.execute("DELETE FROM meta WHERE key IN ('seal.check', 'seal.keys')")
    await fill(path, NEW, 1)
    await fill(path, NEW, 2)


async def test_keys_and_their_check_value_are_written_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_second_row(key: str, value: str) -> object:
        if key == KEY_CHECK:
            raise RuntimeError
        return make_meta_row(key, value)

    with monkeypatch.context() as patch:
        patch.setattr(schema, "make_meta_row", fail_at_second_row)
        with pytest.raises(RuntimeError):
            open_database(path, SystemClock(), encryption=NEW)
    await fill(path, NEW, 1)
    await fill(path, NEW, 2)


# ---------------------------------------------------------------------- key change


async def test_shares_are_recognized_under_the_old_and_the_new_key(path: Path) -> None:
    await fill(path, OLD, 1)
    async with open_store(path, BOTH) as store:
        await enqueue_shares(store, 2)
        for number in (1, 2):
            assert await enqueue(store, make_posted_share(number)) is EnqueueResult.DUPLICATE
        await confirm_shares(store, 1, 2, height=9)
        assert await store.count_shares() == {ROUND: {ShareState.CONFIRMED: 2}}


async def test_old_key_can_be_removed_only_once_no_row_needs_it(path: Path) -> None:
    await fill(path, OLD, 1)
    await fill(path, BOTH, 2)
    with pytest.raises(StoreKeyError, match="not in the key file"):
        await SqliteStore(path, encryption=NEW).open()
    with pytest.raises(StoreKeyError, match="not in the key file"):
        async with open_queue_file(path, NEW):
            pass
    async with open_store(path, BOTH) as store:
        await store.run_batches(rounds.purge, ROUND)
    await fill(path, NEW, 3)
    assert query_rows(path, "SELECT value FROM meta WHERE key = 'seal.keys'") == [
        (Keyring([NEW_KEY]).key_ids[0].hex(),)
    ]


async def test_encrypting_again_makes_the_old_key_unnecessary(path: Path) -> None:
    async with open_store(path, OLD) as store:
        await enqueue_one_of_each(store)
    before = select_shares(path, encryption=OLD)
    rewrite_file(path, SystemClock(), BOTH, encrypt=True)
    assert select_shares(path, encryption=NEW) == before
    await fill(path, NEW, 6)


@pytest.mark.parametrize(
    "witness",
    ["CAST(x'00000000' || substr(witness, 5) AS BLOB)", "(SELECT witness FROM shares WHERE id = 2)"],
    ids=["unknown key", "of another row"],
)
async def test_witness_that_does_not_belong_to_its_row_is_damaged(
    path: Path, reported: list[DamagedShare], witness: str
) -> None:
    await fill(path, NEW, 1, 2)
    with open_closed_database(path) as conn:
        conn.execute(f"UPDATE shares SET witness = {witness} WHERE id = 1")
    async with open_store(path, NEW) as store:
        claimed = await claim_all_due(store)
    assert [queued.nullifier for queued in claimed] == [make_posted_share(2).nullifier]
    assert len(reported) == 1


# ---------------------------------------------------------------------- encrypting an existing file


async def list_queue(queue: QueueReader) -> object:
    entries = await queue.list_shares(QueueFilter(), 100)
    return entries, [await queue.get_share_details(entry.ref) for entry in entries], await queue.count_shares()


async def test_encrypting_and_decrypting_keep_the_queue(path: Path) -> None:
    async with open_store(path) as store:
        await enqueue_one_of_each(store)
        await enqueue_shares(store, 7)
        await confirm_shares(store, 7, height=120)
        listed = await list_queue(store)
    before, mac_key = select_shares(path, encryption=UNENCRYPTED), read_first_round_key(path, UNENCRYPTED)
    assert len(before.shares) == 5
    secrets = [*secret_bytes(1, 2, 3, 4), mac_key, *witness_fragments(make_posted_share(5, round_id=OTHER_ROUND))]
    assert count_occurrences(path, secrets), "the search finds existing data"

    result = rewrite_file(path, SystemClock(), NEW, encrypt=True)
    assert (result.live, result.damaged, result.is_erased) == (5, 0, True)
    assert count_occurrences(path, secrets) == {}
    assert select_shares(path, encryption=NEW) == before
    async with open_queue_file(path, NEW) as queue:
        assert await list_queue(queue) == listed
    assert read_contents(path, FakeClock(), NEW).encrypted

    async with open_store(path, NEW) as store:
        posted = make_posted_share(1)
        assert await enqueue(store, posted) is EnqueueResult.DUPLICATE
        assert await store.verify() == []

    rewrite_file(path, SystemClock(), NEW, encrypt=False)
    assert select_shares(path, encryption=UNENCRYPTED) == before
    async with open_queue_file(path) as queue:
        assert await list_queue(queue) == listed
    assert query_rows(path, "SELECT key FROM meta WHERE key LIKE 'seal.%'") == []
    await fill(path, UNENCRYPTED, 8)


async def test_encrypting_erases_a_large_file(path: Path) -> None:
    """More pages than the cache of a connection, so that pages are written before the commit."""
    numbers = range(3000)
    await fill(path, UNENCRYPTED, *numbers)
    secrets = [make_posted_share(number).share.primary_blind for number in range(0, 3000, 50)]
    assert count_occurrences(path, secrets)
    assert rewrite_file(path, SystemClock(), NEW, encrypt=True).is_erased
    assert count_occurrences(path, secrets) == {}


async def test_interrupted_encryption_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(path, UNENCRYPTED, 1, 2)
    before = select_shares(path, encryption=UNENCRYPTED)

    def refuse(*_: object) -> None:
        raise StoreCopyDiffers("rewritten rows differ")

    with monkeypatch.context() as patch:
        patch.setattr(file_encryption, "_verify", refuse)
        with pytest.raises(StoreCopyDiffers):
            rewrite_file(path, SystemClock(), NEW, encrypt=True)
    assert select_shares(path, encryption=UNENCRYPTED) == before
    await fill(path, UNENCRYPTED, 3)


async def test_row_that_reads_differently_stops_the_encryption(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(path, UNENCRYPTED, 1, 2)
    encrypt = Keyring.encrypt
    monkeypatch.setattr(Keyring, "encrypt", lambda self, plain: encrypt(self, bytes([plain[0] ^ 1]) + plain[1:]))
    with pytest.raises(StoreCopyDiffers):
        rewrite_file(path, SystemClock(), NEW, encrypt=True)
    monkeypatch.undo()
    await fill(path, UNENCRYPTED, 3)


async def test_reader_delays_erasure_until_the_next_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_encryption, "ERASE_SECONDS", 0.2)
    await fill(path, UNENCRYPTED, 1)
    secrets = secret_bytes(1)
    reader = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM shares").fetchall()
        assert not rewrite_file(path, SystemClock(), NEW, encrypt=True).is_erased
        assert count_occurrences(path, secrets)
    finally:
        reader.close()
    await fill(path, NEW, 2)
    assert count_occurrences(path, secrets) == {}


async def test_damaged_rows_are_deleted_and_reported(path: Path) -> None:
    async with open_store(path) as store:
        await enqueue_and_prepare(store, 1)
        await enqueue_shares(store, 2, 3)
    with open_closed_database(path) as conn:
        conn.execute("UPDATE shares SET witness = flip(witness, 'c1') WHERE id = 2")
    result = rewrite_file(path, SystemClock(), NEW, encrypt=True)
    assert (result.live, result.damaged) == (2, 1)
    assert read_contents(path, FakeClock(), NEW).damaged == 0
    async with open_queue_file(path, NEW) as queue:
        assert await queue.count_shares() == {ROUND: {ShareState.WAITING: 1, ShareState.SENT: 1}}
