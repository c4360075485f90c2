"""Backups: a snapshot in one encrypted file, and such a file back in the database's place.

The format is age's (https://age-encryption.org/v1), so that any `age` opens it: to a passphrase, or to recipients
whose identities are kept elsewhere. Nothing is ever written in the plain but the restored database itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyrage

from helper.errors import BackupError, BackupKeyError
from helper.runtime.privileges import acting_as_owner
from helper.store.sqlite.file_lock import FileLock

MIN_PASSPHRASE: Final = 12
"""Characters of a passphrase that a backup is made with."""
_AGE: Final = b"age-encryption.org/v1\n"
_WITH_PASSPHRASE: Final = _AGE + b"-> scrypt "
_SCRYPT_STANZA: Final = re.compile(re.escape(_WITH_PASSPHRASE) + rb"[A-Za-z0-9+/]+ ([1-9][0-9]?)\n")
MAX_WORK_FACTOR: Final = 21
"""Largest accepted scrypt work factor (log2 of N) of a passphrase-encrypted file.

age uses r = 8, so decryption allocates 2^(factor + 10) bytes: 2 GiB for 21. Encryption picks the factor that costs
about one second on the machine it runs on, which is 18 to 20 on current hardware.
"""
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
        _check_work_factor(sealed)  # a file that this version could not open again is not a backup
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
        BackupError: the file is not a backup, its scrypt work factor is above `MAX_WORK_FACTOR`, or an identity
            cannot be parsed.
        BackupKeyError: these do not open it, or it was changed.
    """
    refuse_other(sealed, "this file")
    try:
        if needs_passphrase(sealed):
            _check_work_factor(sealed)
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


def _check_work_factor(sealed: bytes) -> None:
    """Check the scrypt work factor in the header, before decryption spends memory and time on it.

    Raises:
        BackupError: the factor is above `MAX_WORK_FACTOR` or cannot be parsed.
    """
    stanza = _SCRYPT_STANZA.match(sealed)
    if stanza is None:
        raise BackupError("the file has an invalid age header: no valid scrypt work factor")
    factor = int(stanza[1])
    if factor > MAX_WORK_FACTOR:
        raise BackupError(
            f"the file's scrypt work factor is {factor}, the maximum is {MAX_WORK_FACTOR}: decrypting it would take "
            f"2^{factor + 10} bytes of memory",
            advice="If you trust the file, decrypt it with age and encrypt it again with a lower work factor.",
        )


def refuse_other(head: bytes, name: str) -> None:
    """Raise BackupError when the first bytes of a file are not a backup's."""
    if not head.startswith(_AGE):
        raise BackupError(f"{name} is no backup or export of this helper: it is not encrypted as those are")


def write_backup(path: Path, sealed: bytes) -> None:
    """Write a sealed backup, 0600 and fsync'd, in one step; an older backup of this name is replaced.

    Root writes it with the rights of the directory's owner, whose the file then is.

    Raises:
        BackupError: there is something else of this name, or it could not be written.
    """
    try:
        with acting_as_owner(path) as real:
            if real.exists():
                with real.open("rb") as file:
                    refuse_other(file.read(len(_AGE)), str(path))
            written = _write_beside(real, sealed)
            try:
                _put(written, real)
            finally:
                written.unlink(missing_ok=True)
    except OSError as error:
        raise BackupError(f"{path} can not be written: {error.strerror or error}") from error


@contextmanager
def new_file(path: Path, sealed: bytes) -> Iterator[Path]:
    """Write a sealed file of a new name, 0600 and fsync'd; the body runs once it is on disk, before it has its name.

    Root writes it with the rights of the directory's owner, whose the file then is.

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
        with acting_as_owner(path) as real:
            written = _write_beside(real, sealed)
    except OSError as error:
        raise BackupError(f"{path} can not be written: {error.strerror or error}") from error
    yield written
    try:
        with acting_as_owner(path):
            _put(written, real)
    except OSError as error:
        raise BackupError(f"{path} can not be written: {error.strerror or error}; it is kept as {written}") from error


def restore(image: bytes, database: Path, *, set_aside: bool) -> Path | None:
    """Put an image, decrypted and checked, in the database's place; no daemon may run on it.

    While files change places the lock's file says so, and no daemon starts if that is interrupted. The next start
    looks the whole file through. Root does it with the rights of the directory's owner, whose the files then are.

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
    try:
        with acting_as_owner(database) as real:
            lock = FileLock(real)
            lock.take(to_restore=True)
            try:
                return _restore_locked(image, real, lock, set_aside=set_aside)
            finally:
                lock.release(clean=False)
    except OSError as error:
        raise BackupError(
            f"{database} can not be written: {error.strerror or error}",
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
    """Write a file next to its later place, with mode 0600, and fsync it."""
    written = path.with_name(f".{path.name}.{os.getpid()}.partial")
    fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
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
