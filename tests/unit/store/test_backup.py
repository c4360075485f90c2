"""Backups: content of a snapshot, no effect on the running store, encryption, restore."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import stat
import time
import tracemalloc
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pyrage
import pytest

from helper.core.share import ShareState
from helper.errors import BackupError, BackupKeyError, StoreCorrupt, StoreForeign, StoreFull
from helper.store.backup import (
    MAX_WORK_FACTOR,
    WORK_FACTOR,
    EncryptedWriter,
    WriteContent,
    decrypt_backup,
    encrypt_backup,
    restore_database,
    write_backup,
    write_unencrypted_file,
)
from helper.store.sqlite.file_lock import FileLock
from helper.store.sqlite.snapshot import check_image, read_contents, take_snapshot
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.support.command import LOW_WORK_FACTOR
from tests.unit.store.fixtures import (
    ROUND,
    StoreOpener,
    claim_all_due,
    confirm_shares,
    copy_as_crashed,
    enqueue_and_prepare,
    enqueue_shares,
    greatest_height,
    make_posted_share,
    read_database_files,
)

PASSPHRASE = "correct horse battery"


@pytest.fixture(autouse=True)
def _low_work_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.store.backup.WORK_FACTOR", LOW_WORK_FACTOR)


def read_image(path: Path) -> bytes:
    """The content of a backup."""
    with take_snapshot(path, FakeClock()) as snapshot:
        return snapshot.file.read()


async def image_with_shares(store: SqliteStore, path: Path, *numbers: int) -> bytes:
    await enqueue_shares(store, *numbers)
    return read_image(path)


def secrets_of(number: int) -> list[bytes]:
    share = make_posted_share(number).share
    return [share.primary_blind, share.share_comms[:32], share.c1, share.c2, share.shares_hash]


# ---------------------------------------------------------------------- the snapshot


async def test_snapshot_of_running_store_contains_wal_content(store: SqliteStore, path: Path) -> None:
    share_id = await enqueue_and_prepare(store, 1)
    await enqueue_shares(store, 2, 3)
    await confirm_shares(store, 3, height=7)
    contents, image = read_contents(path, FakeClock()), read_image(path)

    assert (contents.live, contents.confirmed, contents.damaged) == (2, 1, 0)
    assert all(secret in image for number in (1, 2) for secret in secrets_of(number))
    copy = sqlite3.connect(":memory:")
    copy.deserialize(image)
    assert copy.execute("SELECT share_id FROM reveals").fetchall() == [(share_id,)]
    copy.close()


async def test_snapshot_writes_nothing_and_leaves_no_transaction(store: SqliteStore, path: Path) -> None:
    await enqueue_shares(store, 1, 2)
    before = {name: data for name, data in read_database_files(path).items() if not name.endswith("-shm")}
    read_contents(path, FakeClock())
    assert {name: data for name, data in read_database_files(path).items() if not name.endswith("-shm")} == before

    await confirm_shares(store, 1, height=7)
    await store.wait_for_erasure()
    assert not any(secret in data for data in read_database_files(path).values() for secret in secrets_of(1))


async def test_copy_has_no_name_and_is_erased(store: SqliteStore, path: Path) -> None:
    """A command that is killed therefore leaves nothing of it."""
    await enqueue_shares(store, 1)
    before = set(path.parent.iterdir())
    with take_snapshot(path, FakeClock()) as snapshot:
        assert set(path.parent.iterdir()) == before
        image = snapshot.file.read()
        assert all(secret in image for secret in secrets_of(1))
        copy = os.dup(snapshot.file.fileno())
    assert os.pread(copy, snapshot.size, 0) == bytes(snapshot.size)
    os.close(copy)


async def test_copy_of_database_on_full_disk_is_in_memory(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue_shares(store, 1)
    statvfs = os.statvfs

    def nearly_full(directory: Path) -> os.statvfs_result:
        found = statvfs(directory)
        return os.statvfs_result((*found[:4], 20, *found[5:])) if directory in full else found

    full = {path.parent}
    monkeypatch.setattr(os, "statvfs", nearly_full)
    with take_snapshot(path, FakeClock()) as snapshot:
        copy = Path(f"/proc/self/fd/{snapshot.file.fileno()}").readlink()
        assert copy.parent == Path("/dev/shm")
        assert snapshot.contents.live == 1
    full.add(Path("/dev/shm"))
    with pytest.raises(StoreFull, match="no space for a copy"):
        read_contents(path, FakeClock())


@pytest.mark.parametrize("passphrase", ["", PASSPHRASE])
async def test_backup_does_not_hold_the_database_in_memory(
    store: SqliteStore, path: Path, tmp_path: Path, passphrase: str
) -> None:
    for start in range(0, 3000, 500):
        await enqueue_shares(store, *range(start, start + 500))
    recipients = [] if passphrase else [str(pyrage.x25519.Identity.generate().to_public())]
    tracemalloc.start()
    try:
        for replace in (False, True):
            with take_snapshot(path, FakeClock()) as snapshot:
                write = partial(encrypt_backup, content=snapshot.file, passphrase=passphrase, recipients=recipients)
                write_backup(tmp_path / "backup.age", write, replace=replace, passphrase=passphrase)
        assert tracemalloc.get_traced_memory()[1] < snapshot.size // 2
    finally:
        tracemalloc.stop()


async def test_snapshot_after_crash_leaves_files_unchanged(store: SqliteStore, path: Path) -> None:
    copied = await copy_as_crashed(store, path)
    Path(f"{copied}.lock").unlink()
    before = copied.read_bytes(), Path(f"{copied}-wal").read_bytes()

    assert read_contents(copied, FakeClock()).live == 2
    assert (copied.read_bytes(), Path(f"{copied}-wal").read_bytes()) == before


async def test_image_that_is_foreign_or_damaged_is_refused(store: SqliteStore, path: Path) -> None:
    image = await image_with_shares(store, path, *range(40))
    for other in (b"", b"something else"):
        with pytest.raises(StoreForeign, match="not a database"):
            check_image(other, "it")
    with pytest.raises(StoreCorrupt, match="damaged"):
        check_image(image[: len(image) // 8192 * 4096], "it")


# ---------------------------------------------------------------------- the file


def seal(image: bytes, *, passphrase: str = "", recipients: Sequence[str] = ()) -> bytes:
    """The encrypted image."""
    file = BytesIO()
    encrypt_backup(file, BytesIO(image), passphrase=passphrase, recipients=recipients)
    return file.getvalue()


def content(data: bytes) -> WriteContent:
    """Writes these bytes."""
    return lambda file: file.write(data)


def test_unseal_accepts_only_the_passphrase() -> None:
    sealed = seal(b"image", passphrase=PASSPHRASE)
    assert sealed.startswith(b"age-encryption.org/v1\n")
    assert b"image" not in sealed
    assert decrypt_backup(sealed, passphrase=PASSPHRASE) == b"image"
    payload_bytes = 16 + len(b"image") + 16  # nonce, content, tag
    for damaged in (sealed[:-1], sealed[:-21], sealed[:-payload_bytes], sealed[:-1] + bytes([sealed[-1] ^ 1])):
        with pytest.raises(BackupKeyError):
            decrypt_backup(damaged, passphrase=PASSPHRASE)
    with pytest.raises(BackupKeyError):
        decrypt_backup(sealed, passphrase="another passphrase")


def test_unseal_accepts_only_the_recipient_identity() -> None:
    own_key, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    sealed = seal(b"image", recipients=[str(own_key.to_public())])
    assert decrypt_backup(sealed, identities=[str(own_key)]) == b"image"
    with pytest.raises(BackupKeyError):
        decrypt_backup(sealed, identities=[str(other)])
    with pytest.raises(BackupKeyError):
        decrypt_backup(sealed[:-1], identities=[str(own_key)])
    with pytest.raises(BackupError, match="invalid identity"):
        decrypt_backup(sealed, identities=["nonsense"])


def test_seal_without_valid_recipient_is_refused() -> None:
    with pytest.raises(BackupError):
        seal(b"image", recipients=["age1nonsense"])
    with pytest.raises(BackupError):
        seal(b"image")


@pytest.mark.parametrize("factor", [MAX_WORK_FACTOR + 1, 64, 99])
def test_unseal_work_factor_above_maximum_is_refused_before_decrypting(
    factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helper.store.backup.scrypt", lambda *_: pytest.fail("decryption was started"))
    with pytest.raises(BackupError, match=f"work factor is {factor}, the maximum is {MAX_WORK_FACTOR}") as caught:
        decrypt_backup(_with_stanza(f"-> scrypt {'A' * 22} {factor}"), passphrase=PASSPHRASE)
    assert not isinstance(caught.value, BackupKeyError)


@pytest.mark.parametrize("factor", ["", "0", "-1", "021", "1e2", "999999999999", "18 19"])
def test_unseal_invalid_work_factor_is_refused_before_decrypting(factor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.store.backup.scrypt", lambda *_: pytest.fail("decryption was started"))
    with pytest.raises(BackupError, match="invalid age header"):
        decrypt_backup(_with_stanza(f"-> scrypt {'A' * 22} {factor}"), passphrase=PASSPHRASE)


def test_unseal_expensive_second_scrypt_stanza_is_refused() -> None:
    stanza = f"-> scrypt {'A' * 22}"
    sealed = _with_stanza(f"{stanza} 10\n{'A' * 43}\n{stanza} 22")
    with pytest.raises(BackupError, match="invalid age header"):  # age allows scrypt as the only stanza
        decrypt_backup(sealed, passphrase=PASSPHRASE)


def test_work_factor_does_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.store.backup.WORK_FACTOR", WORK_FACTOR)
    monkeypatch.setattr("helper.store.backup.scrypt", lambda *_: bytes(32))  # takes a second
    sealed = seal(b"image", passphrase=PASSPHRASE)
    assert re.match(rb"age-encryption\.org/v1\n-> scrypt [A-Za-z0-9+/]{22} 18\n", sealed)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 131_072])
def test_age_decrypts_files_with_a_passphrase(size: int) -> None:
    image = os.urandom(size)
    sealed = seal(image, passphrase="pässphrase of age")
    assert pyrage.passphrase.decrypt(sealed, "pässphrase of age") == image
    assert decrypt_backup(sealed, passphrase="pässphrase of age") == image
    assert sealed != seal(image, passphrase="pässphrase of age")


@pytest.mark.parametrize("size", [0, 1, 65_531, 65_532, 65_533, 131_067, 1_000_000])
def test_content_is_encrypted_while_it_is_produced(size: int) -> None:
    file, content = BytesIO(), os.urandom(size)
    writer = EncryptedWriter(file, PASSPHRASE, head_bytes=4)
    for start in range(0, size, 1000):
        writer.write(content[start : start + 1000])
        assert file.tell() == 0 or start - file.tell() <= 2 * 65_536, "only the first and last chunks are in memory"
    writer.finish(b"head")
    assert pyrage.passphrase.decrypt(file.getvalue(), PASSPHRASE) == b"head" + content


def _with_stanza(stanza: str) -> bytes:
    """An age file with this recipient stanza; its MAC is not valid."""
    return f"age-encryption.org/v1\n{stanza}\n{'A' * 43}\n--- {'A' * 43}\n".encode() + b"\x00" * 32


def test_backup_file_is_private_and_replaces_only_a_backup(tmp_path: Path) -> None:
    output, first = tmp_path / "backup.age", seal(b"SQLite format 3\0one", passphrase=PASSPHRASE)
    before = os.umask(0)
    try:
        write_backup(output, content(first))
    finally:
        os.umask(before)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    with pytest.raises(BackupError, match="exists already"):
        write_backup(output, content(b"age-encryption.org/v1\ntwo"))
    with pytest.raises(BackupError, match="another passphrase"):
        write_backup(output, content(b"age-encryption.org/v1\ntwo"), replace=True)
    assert output.read_bytes() == first
    write_backup(output, content(b"age-encryption.org/v1\ntwo"), replace=True, passphrase=PASSPHRASE)
    write_backup(
        output, content(b"age-encryption.org/v1\nthree"), replace=True
    )  # encrypted to recipients: not an export
    assert output.read_bytes().endswith(b"three")

    output.write_bytes(b"SQLite format 3\x00")
    with pytest.raises(BackupError, match="not a backup or export"):
        write_backup(output, content(b"age-encryption.org/v1\nfour"), replace=True)
    assert output.read_bytes() == b"SQLite format 3\x00"
    with pytest.raises(BackupError, match="cannot be written"):
        write_backup(tmp_path / "nowhere" / "backup.age", content(b"age-encryption.org/v1\n"))
    assert [file.name for file in tmp_path.iterdir()] == ["backup.age"]


def test_file_of_killed_command_blocks_no_other_and_is_removed_later(tmp_path: Path) -> None:
    output, left, other = tmp_path / "queue.age", tmp_path / ".queue.age.7.partial", tmp_path / ".queue.age.x.partial"
    for file, age in ((left, 3500), (other, 3700)):
        file.touch()
        os.utime(file, (0, time.time() - age))
    write_backup(output, content(b"age-encryption.org/v1\n2"))
    assert output.read_bytes() == b"age-encryption.org/v1\n2"
    assert {*tmp_path.iterdir()} == {output, left, other}
    os.utime(left, (0, time.time() - 3700))
    write_backup(output, content(b"age-encryption.org/v1\n3"), replace=True)
    assert {*tmp_path.iterdir()} == {output, other}


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_backup_never_replaces_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_hard_links: bool) -> None:
    output = tmp_path / "shares.age"
    export = seal(b'{"format":"svote-helper queue"}\n', passphrase=PASSPHRASE)
    if not has_hard_links:

        def refuse(path: Path, target: Path) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
    write_backup(output, content(export))
    for replace in (False, True):
        with pytest.raises(BackupError, match=r"exists already|is an export"):
            write_backup(output, content(b"age-encryption.org/v1\n"), replace=replace, passphrase=PASSPHRASE)
    # a file that appears while the export is written is not replaced either
    late = tmp_path / "late.age"
    with pytest.raises(BackupError, match="exists"):
        write_backup(late, lambda _: late.write_bytes(b"another file"))
    assert (output.read_bytes(), late.read_bytes()) == (export, b"another file")
    assert {*tmp_path.iterdir()} == {output, late}


def test_unencrypted_file_has_no_name_before_it_is_complete(tmp_path: Path) -> None:
    """A command that is killed therefore leaves no part of it."""
    output, write = tmp_path / "queue.json", content(b"shares")

    def write_partly(file: BinaryIO) -> None:
        file.write(b"part")
        file.flush()
        assert list(tmp_path.iterdir()) == []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_unencrypted_file(output, write_partly)
    assert list(tmp_path.iterdir()) == []
    write_unencrypted_file(output, write)
    assert list(tmp_path.iterdir()) == [output]
    assert (output.read_bytes(), stat.S_IMODE(output.stat().st_mode)) == (b"shares", 0o600)
    with pytest.raises(BackupError, match="exists already"):
        write_unencrypted_file(output, write)


# ---------------------------------------------------------------------- restore


async def test_restored_database_continues_from_the_backup(
    store: SqliteStore, path: Path, open_sqlite_store: StoreOpener, tmp_path: Path
) -> None:
    await confirm_shares(store, height=7)
    image = await image_with_shares(store, path, 1, 2)
    await confirm_shares(store, 1, height=8)

    other_path = tmp_path / "other" / "queue.db"
    other_path.parent.mkdir()
    assert restore_database(image, other_path, set_aside=False) is None
    assert stat.S_IMODE(other_path.stat().st_mode) == 0o600
    lock = FileLock(other_path)
    assert lock.acquire() is False, "the next start checks the whole file"
    lock.release(clean=False)

    reopened = await open_sqlite_store(other_path)
    assert await reopened.count_shares() == {ROUND: {ShareState.WAITING: 2}}
    assert await greatest_height(reopened) == 7
    assert len(await claim_all_due(reopened)) == 2
    await confirm_shares(reopened, 1, height=8)
    await reopened.wait_for_erasure()
    assert not any(secret in data for data in read_database_files(other_path).values() for secret in secrets_of(1))


async def test_restore_over_existing_database_renames_it_with_its_wal(
    store: SqliteStore, path: Path, open_sqlite_store: StoreOpener
) -> None:
    image = await image_with_shares(store, path, 1)
    await enqueue_shares(store, 2)
    wal = read_database_files(path)["queue.db-wal"]
    await store.close()
    Path(f"{path}-wal").write_bytes(wal)
    before = path.read_bytes()

    with pytest.raises(BackupError, match="already"):
        restore_database(image, path, set_aside=False)
    assert (path.read_bytes(), Path(f"{path}-wal").read_bytes()) == (before, wal)

    old_path = restore_database(image, path, set_aside=True)
    assert old_path is not None
    assert (old_path.read_bytes(), Path(f"{old_path}-wal").read_bytes()) == (before, wal)
    reopened = await open_sqlite_store(path)
    assert await reopened.count_shares() == {ROUND: {ShareState.WAITING: 1}}


@pytest.mark.parametrize("step", ["_set_aside", "_replace_file"])
async def test_open_after_interrupted_restore_is_refused(
    store: SqliteStore, path: Path, open_sqlite_store: StoreOpener, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    image = await image_with_shares(store, path, 1)
    await store.close()

    def breaks(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(f"helper.store.backup.{step}", breaks)
        with pytest.raises(BackupError, match="Input/output"):
            restore_database(image, path, set_aside=True)
    with pytest.raises(StoreCorrupt, match="interrupted"):
        await SqliteStore(path).open()
    assert not [file for file in path.parent.iterdir() if "partial" in file.name]

    restore_database(image, path, set_aside=True)
    assert await (await open_sqlite_store(path)).count_shares() == {ROUND: {ShareState.WAITING: 1}}


@pytest.mark.parametrize("how", ["serve", "restore", "refused serve"])
async def test_copy_that_killed_restore_left_is_erased(
    store: SqliteStore, path: Path, open_sqlite_store: StoreOpener, how: str
) -> None:
    image = await image_with_shares(store, path, 1)
    await store.close()
    left, *kept = (path.with_name(f".{path.name}.{end}.partial") for end in ("12345", "12346", "age.12345", "x"))
    left.write_bytes(image)
    kept[0].write_bytes(seal(b"a backup of the same name", passphrase="correct horse"))
    for other in kept[1:]:
        other.write_bytes(image)
    with left.open("rb") as opened:
        if how == "serve":
            await open_sqlite_store(path)
        elif how == "restore":
            restore_database(image, path, set_aside=True)
        else:
            Path(f"{path}.lock").write_bytes(b"restoring\n")
            with pytest.raises(StoreCorrupt, match="interrupted"):
                await SqliteStore(path).open()
        assert opened.read() == bytes(len(image)), "its bytes are no longer on the disk"
    assert not left.exists()
    assert all(other.exists() for other in kept)
