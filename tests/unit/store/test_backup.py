"""Backups: what a snapshot holds, that it disturbs nobody, that a file is encrypted, and how it comes back."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pyrage
import pytest

from helper.core.share import ShareState
from helper.errors import BackupError, BackupKeyError, StoreCorrupt, StoreForeign, StoreLocked
from helper.store.backup import MAX_WORK_FACTOR, restore, seal, unseal, write_backup
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.snapshot import Snapshot, examine, take_snapshot
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.unit.store.fixtures import NOW, ROUND, Opener, broadcast_one, claim, files, hands_on, posted, put

PASSPHRASE = "correct horse battery"


async def snapshot_of(store: SqliteStore, path: Path, *numbers: int) -> Snapshot:
    """A snapshot of a running store with these shares in it."""
    await put(store, *numbers)
    return take_snapshot(path, FakeClock())


def secrets_of(number: int) -> list[bytes]:
    share = posted(number).share
    return [share.primary_blind, share.share_comms[:32], share.c1, share.c2, share.shares_hash]


# ---------------------------------------------------------------------- the snapshot


async def test_a_snapshot_of_a_running_store_holds_what_is_still_in_the_wal(store: SqliteStore, path: Path) -> None:
    share_id = await broadcast_one(store, 1)
    await put(store, 2, 3)
    await store.apply_block(7, [(ROUND, posted(3).nullifier)], now=NOW)
    taken = take_snapshot(path, FakeClock())

    assert (taken.contents.live, taken.contents.confirmed, taken.contents.damaged) == (2, 1, 0)
    assert all(secret in taken.image for number in (1, 2) for secret in secrets_of(number))
    copy = sqlite3.connect(":memory:")
    copy.deserialize(taken.image)
    assert copy.execute("SELECT share_id FROM reveals").fetchall() == [(share_id,)]
    copy.close()


async def test_a_snapshot_writes_nothing_and_leaves_no_transaction_behind(store: SqliteStore, path: Path) -> None:
    await put(store, 1, 2)
    before = {name: data for name, data in files(path).items() if not name.endswith("-shm")}
    take_snapshot(path, FakeClock())
    assert {name: data for name, data in files(path).items() if not name.endswith("-shm")} == before

    await store.apply_block(7, [(ROUND, posted(1).nullifier)], now=NOW)
    await store.erased()
    assert not any(secret in data for data in files(path).values() for secret in secrets_of(1))


async def test_a_snapshot_of_a_crashed_daemons_files_leaves_them_as_they_are(store: SqliteStore, path: Path) -> None:
    await put(store, 1, 2)
    crashed = path.parent / "crashed"
    crashed.mkdir()
    for name, data in files(path).items():
        if not name.endswith((".lock", "-shm")):
            (crashed / name).write_bytes(data)
    there = crashed / path.name
    before = there.read_bytes(), Path(f"{there}-wal").read_bytes()

    assert take_snapshot(there, FakeClock()).contents.live == 2
    assert (there.read_bytes(), Path(f"{there}-wal").read_bytes()) == before


async def test_rows_that_were_damaged_are_counted(store: SqliteStore, path: Path) -> None:
    await put(store, 1, 2, 3)
    await store.close()
    with hands_on(path) as conn:
        conn.execute("UPDATE shares SET submit_at = submit_at + 1 WHERE id = 2")
    assert take_snapshot(path, FakeClock()).contents.damaged == 1


async def test_what_is_no_queue_or_a_damaged_one_is_refused(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    taken = await snapshot_of(store, path, *range(40))
    with pytest.raises(StoreForeign, match="not a database"):
        examine(b"something else", "it")
    with pytest.raises(StoreCorrupt, match="damaged"):
        examine(taken.image[: len(taken.image) // 8192 * 4096], "it")
    other = tmp_path / "other.db"
    with hands_on(other) as conn:
        conn.execute("CREATE TABLE t (a)")
    with pytest.raises(StoreForeign, match="another program"):
        take_snapshot(other, FakeClock())
    await store.close()
    with hands_on(path) as conn:
        conn.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreForeign, match="newer version"):
        take_snapshot(path, FakeClock())


# ---------------------------------------------------------------------- the file


def test_a_backup_opens_with_its_passphrase_only() -> None:
    sealed = seal(b"image", passphrase=PASSPHRASE)
    assert sealed.startswith(b"age-encryption.org/v1\n")
    assert b"image" not in sealed
    assert unseal(sealed, passphrase=PASSPHRASE) == b"image"
    with pytest.raises(BackupKeyError):
        unseal(sealed, passphrase="another passphrase")


def test_a_backup_opens_with_its_recipients_identity_only() -> None:
    mine, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    sealed = seal(b"image", recipients=[str(mine.to_public())])
    assert unseal(sealed, identities=[str(mine)]) == b"image"
    with pytest.raises(BackupKeyError):
        unseal(sealed, identities=[str(other)])
    with pytest.raises(BackupKeyError):
        unseal(sealed[:-1], identities=[str(mine)])
    with pytest.raises(BackupError, match="invalid identity"):
        unseal(sealed, identities=["nonsense"])


def test_nothing_is_sealed_weakly() -> None:
    with pytest.raises(BackupError, match="shorter than 12"):
        seal(b"image", passphrase="short")
    with pytest.raises(BackupError):
        seal(b"image", recipients=["age1nonsense"])
    with pytest.raises(BackupError):
        seal(b"image")
    with pytest.raises(BackupError, match="not encrypted"):
        unseal(b"SQLite format 3\x00", passphrase=PASSPHRASE)


@pytest.mark.parametrize("factor", [MAX_WORK_FACTOR + 1, 64, 99])
def test_unseal_work_factor_above_maximum_is_refused_before_decrypting(
    factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyrage.passphrase.decrypt", lambda *_: pytest.fail("decryption was started"))
    with pytest.raises(BackupError, match=f"work factor is {factor}, the maximum is {MAX_WORK_FACTOR}") as caught:
        unseal(_with_stanza(f"-> scrypt {'A' * 22} {factor}"), passphrase=PASSPHRASE)
    assert not isinstance(caught.value, BackupKeyError)


@pytest.mark.parametrize("factor", ["", "0", "-1", "021", "1e2", "999999999999", "18 19"])
def test_unseal_invalid_work_factor_is_refused_before_decrypting(factor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyrage.passphrase.decrypt", lambda *_: pytest.fail("decryption was started"))
    with pytest.raises(BackupError, match="invalid age header"):
        unseal(_with_stanza(f"-> scrypt {'A' * 22} {factor}"), passphrase=PASSPHRASE)


def test_unseal_expensive_second_scrypt_stanza_is_refused() -> None:
    stanza = f"-> scrypt {'A' * 22}"
    sealed = _with_stanza(f"{stanza} 10\n{'A' * 43}\n{stanza} 22")
    with pytest.raises(BackupKeyError, match="Header is invalid"):  # age allows scrypt as the only stanza
        unseal(sealed, passphrase=PASSPHRASE)


def test_seal_work_factor_above_maximum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyrage.passphrase.encrypt", lambda *_: _with_stanza(f"-> scrypt {'A' * 22} 22"))
    with pytest.raises(BackupError, match="work factor is 22"):
        seal(b"image", passphrase=PASSPHRASE)


def _with_stanza(stanza: str) -> bytes:
    """An age file with this recipient stanza; its MAC is not valid."""
    return f"age-encryption.org/v1\n{stanza}\n{'A' * 43}\n--- {'A' * 43}\n".encode() + b"\x00" * 32


def test_a_backup_is_the_owners_alone_and_replaces_only_a_backup(tmp_path: Path) -> None:
    output = tmp_path / "backup.age"
    before = os.umask(0)
    try:
        write_backup(output, b"age-encryption.org/v1\none")
    finally:
        os.umask(before)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    write_backup(output, b"age-encryption.org/v1\ntwo")
    assert output.read_bytes().endswith(b"two")

    output.write_bytes(b"SQLite format 3\x00")
    with pytest.raises(BackupError, match="not a backup or export"):
        write_backup(output, b"age-encryption.org/v1\nthree")
    assert output.read_bytes() == b"SQLite format 3\x00"
    with pytest.raises(BackupError, match="cannot be written"):
        write_backup(tmp_path / "nowhere" / "backup.age", b"age-encryption.org/v1\n")
    assert [file.name for file in tmp_path.iterdir()] == ["backup.age"]


# ---------------------------------------------------------------------- the way back


async def test_a_restored_database_goes_on_from_where_it_was(
    store: SqliteStore, path: Path, opened: Opener, tmp_path: Path
) -> None:
    await store.apply_block(7, [], now=NOW)
    taken = await snapshot_of(store, path, 1, 2)
    await store.apply_block(8, [(ROUND, posted(1).nullifier)], now=NOW)

    there = tmp_path / "other" / "queue.db"
    there.parent.mkdir()
    assert restore(taken.image, there, set_aside=False) is None
    assert stat.S_IMODE(there.stat().st_mode) == 0o600
    lock = FileLock(there)
    assert lock.take() is False, "the next start looks the file through"
    lock.release(clean=False)

    again = await opened(there)
    assert await again.counts() == {ROUND: {ShareState.RECEIVED: 2}}
    assert await again.cursor() == 7
    assert len(await claim(again)) == 2
    await again.apply_block(8, [(ROUND, posted(1).nullifier)], now=NOW)
    await again.erased()
    assert not any(secret in data for data in files(there).values() for secret in secrets_of(1))


async def test_a_running_daemons_database_is_not_replaced(store: SqliteStore, path: Path) -> None:
    taken = await snapshot_of(store, path, 1)
    with pytest.raises(StoreLocked):
        restore(taken.image, path, set_aside=True)
    await put(store, 2)
    assert await store.counts() == {ROUND: {ShareState.RECEIVED: 2}}


async def test_a_database_that_is_there_is_kept_aside_with_its_wal_or_not_touched(
    store: SqliteStore, path: Path, opened: Opener
) -> None:
    taken = await snapshot_of(store, path, 1)
    await put(store, 2)
    wal = files(path)["queue.db-wal"]
    await store.close()
    Path(f"{path}-wal").write_bytes(wal)
    before = path.read_bytes()

    with pytest.raises(BackupError, match="already"):
        restore(taken.image, path, set_aside=False)
    assert (path.read_bytes(), Path(f"{path}-wal").read_bytes()) == (before, wal)

    aside = restore(taken.image, path, set_aside=True)
    assert aside is not None
    assert (aside.read_bytes(), Path(f"{aside}-wal").read_bytes()) == (before, wal)
    again = await opened(path)
    assert await again.counts() == {ROUND: {ShareState.RECEIVED: 1}}


async def test_a_wal_without_its_database_is_not_taken_for_the_restored_ones(store: SqliteStore, path: Path) -> None:
    taken = await snapshot_of(store, path, 1)
    wal = files(path)["queue.db-wal"]
    await store.close()
    path.unlink()
    Path(f"{path}-wal").write_bytes(wal)
    with pytest.raises(BackupError, match="db-wal"):
        restore(taken.image, path, set_aside=False)


async def test_after_an_interrupted_restore_no_daemon_starts_until_it_is_done(
    store: SqliteStore, path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = await snapshot_of(store, path, 1)
    await store.close()

    def breaks(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("helper.store.backup._put", breaks)
        with pytest.raises(BackupError, match="Input/output"):
            restore(taken.image, path, set_aside=True)
    with pytest.raises(StoreCorrupt, match="interrupted"):
        await SqliteStore(path).open()
    assert not [file for file in path.parent.iterdir() if "partial" in file.name]

    restore(taken.image, path, set_aside=True)
    assert await (await opened(path)).counts() == {ROUND: {ShareState.RECEIVED: 1}}
