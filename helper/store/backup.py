"""Backups: a snapshot in one encrypted file, and such a file back in the database's place.

The format is age's (https://age-encryption.org/v1), so that any `age` opens it: to a passphrase, or to recipients
whose identities are kept elsewhere. Nothing is ever written in the plain but the restored database itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyrage

from helper.errors import BackupError, BackupKeyError
from helper.store.filelock import FileLock

MIN_PASSPHRASE: Final = 12
"""Characters of a passphrase that a backup is made with."""
_AGE: Final = b"age-encryption.org/v1\n"
_WITH_PASSPHRASE: Final = _AGE + b"-> scrypt "
_SIDE_FILES: Final = ("-wal", "-shm")


def seal(image: bytes, *, passphrase: str = "", recipients: Sequence[str] = ()) -> bytes:
    """Encrypt an image to a passphrase, or else to recipients (`age1…`).

    Raises:
        BackupError: the passphrase is too short, or a recipient is none.
    """
    if passphrase:
        if len(passphrase) < MIN_PASSPHRASE:
            raise BackupError(f"the passphrase is shorter than {MIN_PASSPHRASE} characters")
        sealed: bytes = pyrage.passphrase.encrypt(image, passphrase)
        return sealed
    try:
        keys = [pyrage.x25519.Recipient.from_str(recipient) for recipient in recipients]
        sealed = pyrage.encrypt(image, keys)
    except (pyrage.RecipientError, pyrage.EncryptError) as error:
        raise BackupError(f"the backup could not be encrypted to its recipients: {error}") from None
    return sealed


def unseal(sealed: bytes, *, passphrase: str = "", identities: Sequence[str] = ()) -> bytes:
    """Decrypt a backup with its passphrase, or with one of the identities (`AGE-SECRET-KEY-1…`).

    Raises:
        BackupError: it is no backup, or an identity is none.
        BackupKeyError: these do not open it, or it was changed.
    """
    refuse_other(sealed, "this file")
    try:
        if needs_passphrase(sealed):
            image: bytes = pyrage.passphrase.decrypt(sealed, passphrase)
        else:
            image = pyrage.decrypt(sealed, [pyrage.x25519.Identity.from_str(one) for one in identities])
    except pyrage.IdentityError as error:
        raise BackupError(f"an identity can not be read: {error}") from None
    except pyrage.DecryptError as error:
        raise BackupKeyError(f"the file could not be decrypted: {error}") from None
    return image


def needs_passphrase(sealed: bytes) -> bool:
    """Whether a backup was made with a passphrase; else it was made to recipients."""
    return sealed.startswith(_WITH_PASSPHRASE)


def refuse_other(head: bytes, name: str) -> None:
    """Raise BackupError when the first bytes of a file are not a backup's."""
    if not head.startswith(_AGE):
        raise BackupError(f"{name} is no backup or export of this helper: it is not encrypted as those are")


def write_backup(path: Path, sealed: bytes) -> None:
    """Write a sealed backup, 0600 and fsync'd, in one step; an older backup of this name is replaced.

    Raises:
        BackupError: there is something else of this name, or it could not be written.
    """
    try:
        if path.exists():
            with path.open("rb") as file:
                refuse_other(file.read(len(_AGE)), str(path))
        written = _write_beside(path, sealed)
        try:
            _put(written, path)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise BackupError(f"{path} can not be written: {error.strerror}") from error


@contextmanager
def new_file(path: Path, sealed: bytes) -> Iterator[Path]:
    """Write a sealed file of a new name, 0600 and fsync'd: what is done inside is done once it is on disk, unnamed.

    Args:
        path: its name; nothing may have it yet.
        sealed: its bytes.

    Yields:
        What the file is called until it gets its name; it stays so where something fails inside.

    Raises:
        BackupError: there is something of this name, or it could not be written.
    """
    if path.exists():
        raise BackupError(f"there is something of this name already: {path}", advice="Give another name.")
    try:
        written = _write_beside(path, sealed)
    except OSError as error:
        raise BackupError(f"{path} can not be written: {error.strerror}") from error
    yield written
    try:
        _put(written, path)
    except OSError as error:
        raise BackupError(f"{path} can not be written: {error.strerror}; it is kept as {written}") from error


def restore(image: bytes, database: Path, *, set_aside: bool) -> Path | None:
    """Put an image, decrypted and checked, in the database's place; no daemon may run on it.

    While files change places the lock's file says so, and no daemon starts if that is interrupted. The next start
    looks the whole file through.

    Args:
        image: the bytes of a database file.
        database: where it belongs.
        set_aside: keep a database that is there already under another name; without it, that is an error.

    Returns:
        The new name of the database that was there, None when there was none.

    Raises:
        StoreLocked: a daemon has the database open.
        BackupError: there is a database already, or it could not be written.
    """
    lock = FileLock(database)
    try:
        lock.take(to_restore=True)
        try:
            return _restore_locked(image, database, lock, set_aside=set_aside)
        finally:
            lock.release(clean=False)
    except OSError as error:
        raise BackupError(
            f"{database} can not be written: {error.strerror}",
            advice="Mend what is named and run the command again, with --force.",
        ) from error


def _restore_locked(image: bytes, database: Path, lock: FileLock, *, set_aside: bool) -> Path | None:
    # A WAL that was left alone would be taken for the restored file's own; an empty one is what readers leave.
    there = [path for path in (database, Path(f"{database}-wal")) if path.exists() and path.stat().st_size > 0]
    if there and not set_aside:
        raise BackupError(
            f"there is a database already: {there[0]}",
            advice="With --force it is kept under another name, and the backup takes its place.",
        )
    written = _write_beside(database, image)
    try:
        lock.say_restoring()
        aside = _set_aside(database) if there else None
        for suffix in _SIDE_FILES:
            Path(f"{database}{suffix}").unlink(missing_ok=True)
        _put(written, database)
    finally:
        written.unlink(missing_ok=True)
    lock.say_open()
    _give_to_owner_of_folder(Path(f"{database}.lock"))
    return aside


def _set_aside(database: Path) -> Path:
    """Rename a database with its side files, those of them that are there."""
    number = 1
    while any(Path(f"{database}.before-restore-{number}{suffix}").exists() for suffix in ("", *_SIDE_FILES)):
        number += 1
    aside = Path(f"{database}.before-restore-{number}")
    for suffix in (*_SIDE_FILES, ""):
        with suppress(FileNotFoundError):
            Path(f"{database}{suffix}").rename(f"{aside}{suffix}")
    return aside


def _write_beside(path: Path, data: bytes) -> Path:
    """Write a file next to its later place, the owner's alone from its first moment, and fsync it."""
    written = path.with_name(f".{path.name}.{os.getpid()}.partial")
    fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        _give_to_owner_of_folder(written)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    return written


def _put(written: Path, path: Path) -> None:
    """Give a finished file its name, for good."""
    written.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _give_to_owner_of_folder(path: Path) -> None:
    """Where root writes into the service user's directory, the service must be able to open it."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
