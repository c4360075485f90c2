"""Encrypted backup files, and restoring a database from one.

The format is age (https://age-encryption.org/v1), with a passphrase or with recipients, so any age implementation can
decrypt a backup. Only the restored database itself is ever written unencrypted.

pyrage measures the work factor of a passphrase by stopwatch: on a busy machine it picks any from 14 to 20, and refuses
files at random. Therefore files with a passphrase are encrypted, with a fixed factor, and decrypted here.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

import pyrage
from nacl.bindings import crypto_aead_chacha20poly1305_ietf_decrypt as aead_decrypt
from nacl.bindings import crypto_aead_chacha20poly1305_ietf_encrypt as aead_encrypt
from nacl.bindings import crypto_pwhash_scryptsalsa208sha256_ll as scrypt
from nacl.exceptions import CryptoError

from helper.clock import SystemClock
from helper.errors import BackupError, BackupKeyError
from helper.runtime.process_security import acting_as_owner
from helper.store.sqlite.file_lock import AGE_HEADER, FileLock, find_temporary_files, temporary_path
from helper.store.sqlite.opening import DATABASE_HEADER, refuse_other_file

_PASSPHRASE_HEADER: Final = AGE_HEADER + b"-> scrypt "
_HEADER: Final = re.compile(
    rb"(%s([A-Za-z0-9+/]{22}) ([1-9][0-9]?)\n([A-Za-z0-9+/]{43})\n---) ([A-Za-z0-9+/]{43})\n"
    % re.escape(_PASSPHRASE_HEADER)
)
"""What the MAC covers, with salt, work factor and encrypted file key; and the MAC."""
_MAX_HEADER_BYTES: Final = 256
MAX_WORK_FACTOR: Final = 21
"""Maximum accepted scrypt work factor (log2 of N) of a passphrase-encrypted file.

age uses r = 8, so decryption allocates 2^(factor + 10) bytes: 2 GiB for 21.
"""
WORK_FACTOR: Final = 18
"""Work factor of a new file, as in the reference implementation of age: 256 MiB, about one second."""
_SCRYPT_R: Final = 8
_SCRYPT_LABEL: Final = b"age-encryption.org/v1/scrypt"
_NONCE_BYTES: Final = 16
_CHUNK_BYTES: Final = 64 * 1024
_TAG_BYTES: Final = 16
_SIDE_FILES: Final = ("-wal", "-shm")
_ABANDONED_SECONDS: Final = 3600.0
"""Seconds without a change after which the temporary file of a backup is one of a killed command."""


WriteContent = Callable[[BinaryIO], object]
"""Writes the content of a new file."""


def encrypt_backup(file: BinaryIO, content: BinaryIO, *, passphrase: str = "", recipients: Sequence[str] = ()) -> None:
    """Write the content of a database file, encrypted with a passphrase, or to recipients (`age1…`) if it is empty.

    Raises:
        BackupError: a recipient is invalid.
    """
    if passphrase:
        writer = EncryptedWriter(file, passphrase)
        while chunk := content.read(_CHUNK_BYTES):
            writer.write(chunk)
        writer.finish()
        return
    try:
        keys = [pyrage.x25519.Recipient.from_str(recipient) for recipient in recipients]
        pyrage.encrypt_io(content, file, keys)
    except (pyrage.RecipientError, pyrage.EncryptError) as error:
        raise BackupError(f"the backup could not be encrypted to its recipients: {error}") from None


class EncryptedWriter:
    """Encrypts content to a file in the age format, with one scrypt stanza, while it is produced.

    The first chunk is written last, so that content can begin with what is known only at its end.

    Args:
        file: an empty file that can be searched.
        head_bytes: length of what `finish` adds before the content, at most `_CHUNK_BYTES`.
    """

    def __init__(self, file: BinaryIO, passphrase: str, *, head_bytes: int = 0) -> None:
        file_key, salt, nonce = os.urandom(16), os.urandom(16), os.urandom(_NONCE_BYTES)
        wrapped_key = aead_encrypt(file_key, None, bytes(12), _derive_wrap_key(passphrase, salt, WORK_FACTOR))
        header = b"%s%s %d\n%s\n---" % (_PASSPHRASE_HEADER, _base64(salt), WORK_FACTOR, _base64(wrapped_key))
        self._file = file
        self._payload_at = file.write(b"%s %s\n%s" % (header, _base64(_header_mac(file_key, header)), nonce))
        self._key = _derive_key(file_key, nonce, b"payload")
        self._pending = bytearray(head_bytes)
        self._first_chunk = b""
        self._chunks = 0

    def write(self, data: bytes) -> None:
        """Add to the content."""
        self._pending += data
        while len(self._pending) > _CHUNK_BYTES:  # a last chunk is empty only if the content is
            self._end_chunk()

    def finish(self, head: bytes = b"") -> None:
        """Write the last chunk, and the first one with `head`."""
        self._end_chunk(is_last=True)
        self._write_chunk(0, head + self._first_chunk[len(head) :], is_last=self._chunks == 1)

    def _end_chunk(self, *, is_last: bool = False) -> None:
        chunk = bytes(self._pending[:_CHUNK_BYTES])
        del self._pending[:_CHUNK_BYTES]
        if self._chunks:
            self._write_chunk(self._chunks, chunk, is_last=is_last)
        else:
            self._first_chunk = chunk
        self._chunks += 1

    def _write_chunk(self, number: int, chunk: bytes, *, is_last: bool) -> None:
        self._file.seek(self._payload_at + number * (_CHUNK_BYTES + _TAG_BYTES))
        self._file.write(aead_encrypt(chunk, None, _chunk_nonce(number, is_last=is_last), self._key))


def _chunk_nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def _derive_wrap_key(passphrase: str, salt: bytes, factor: int) -> bytes:
    """Derive the key that encrypts the key of a file.

    Raises:
        BackupError: there is not enough memory.
    """
    try:
        return scrypt(passphrase.encode(), _SCRYPT_LABEL + salt, 1 << factor, _SCRYPT_R, 1, 32, 2 << factor + 10)
    except CryptoError:
        raise BackupError(f"not enough memory for the scrypt work factor {factor}: 2^{factor + 10} bytes") from None


def _header_mac(file_key: bytes, header: bytes) -> bytes:
    return hmac.digest(_derive_key(file_key, b"", b"header"), header, "sha256")


def _derive_key(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Derive a key of 32 bytes: HKDF-SHA256."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\x01", "sha256")


def _base64(data: bytes) -> bytes:
    return b64encode(data).rstrip(b"=")


def _from_base64(text: bytes) -> bytes:
    return b64decode(text + b"==")


def decrypt_backup(sealed: bytes, *, passphrase: str = "", identities: Sequence[str] = ()) -> bytes:
    """Decrypt a backup (`read_backup`) with its passphrase or one of the identities (`AGE-SECRET-KEY-1…`).

    Raises:
        BackupError: the scrypt work factor of the file is above `MAX_WORK_FACTOR`, or an identity cannot be parsed.
        BackupKeyError: the passphrase or the identities do not match, or the file is damaged.
    """
    if needs_passphrase(sealed):
        return b"".join(_decrypt_chunks(BytesIO(sealed), passphrase))
    try:
        image: bytes = pyrage.decrypt(sealed, [pyrage.x25519.Identity.from_str(identity) for identity in identities])
    except pyrage.IdentityError as error:
        raise BackupError(f"invalid identity: {error}") from None
    except pyrage.DecryptError as error:
        raise BackupKeyError(f"the file could not be decrypted: {error}") from None
    return image


def needs_passphrase(sealed: bytes) -> bool:
    """Return whether a backup is encrypted with a passphrase, rather than to recipients."""
    return sealed.startswith(_PASSPHRASE_HEADER)


def _decrypt_chunks(file: BinaryIO, passphrase: str) -> Iterator[bytes]:
    """Decrypt a file with a passphrase, chunk by chunk. The work factor is checked before it costs memory and time.

    Raises:
        BackupError: the header is invalid, or its work factor is above `MAX_WORK_FACTOR`.
        BackupKeyError: the passphrase does not match, or the file is damaged.
    """
    header = _HEADER.match(file.read(_MAX_HEADER_BYTES))
    if header is None:
        raise BackupError("the file has an invalid age header: no valid scrypt work factor")
    covered, salt, digits, wrapped_key, mac = header.groups()
    factor = int(digits)
    if factor > MAX_WORK_FACTOR:
        raise BackupError(
            f"the file's scrypt work factor is {factor}, the maximum is {MAX_WORK_FACTOR}: decrypting it would take "
            f"2^{factor + 10} bytes of memory",
            advice="If you trust the file, decrypt it with age and encrypt it again with a lower work factor.",
        )
    wrap_key = _derive_wrap_key(passphrase, _from_base64(salt), factor)
    try:
        file_key = aead_decrypt(_from_base64(wrapped_key), None, bytes(12), wrap_key)
        if not hmac.compare_digest(_header_mac(file_key, covered), _from_base64(mac)):
            raise CryptoError
        file.seek(header.end())
        key = _derive_key(file_key, file.read(_NONCE_BYTES), b"payload")
        chunk, number = file.read(_CHUNK_BYTES + _TAG_BYTES), 0
        while len(chunk) >= _TAG_BYTES:
            following = file.read(_CHUNK_BYTES + _TAG_BYTES)
            yield aead_decrypt(chunk, None, _chunk_nonce(number, is_last=not following), key)
            if not following:
                return
            chunk, number = following, number + 1
        raise CryptoError  # truncated
    except CryptoError:
        raise BackupKeyError("the file could not be decrypted: another passphrase, or it is damaged") from None


def read_backup(path: Path) -> bytes:
    """Read an encrypted file. The header comes first: another file may not fit into memory, and a device has no end.

    Raises:
        BackupError: it does not begin with the header of a backup.
    """
    with path.open("rb") as file:
        head = file.read(len(AGE_HEADER))
        _require_header(head, path)
        return head + file.read()


def _require_header(head: bytes, path: Path) -> None:
    if not head.startswith(AGE_HEADER):
        raise BackupError(f"{path} is not a backup or export of this helper: it is not encrypted with age")


def write_backup(path: Path, write: WriteContent, *, replace: bool = False, passphrase: str = "") -> None:
    """Write an encrypted backup or export atomically, with mode 0600 and fsync.

    Root writes it as the owner of the directory, so that the file belongs to that user.

    Args:
        replace: replace an existing backup. An export is never replaced: it can be the only copy of live shares.
        passphrase: passphrase of the backup, which identifies an existing file as a backup.

    Raises:
        BackupError: a file of this name exists that may not be replaced, or the file could not be written.
    """
    with _writing(path) as real:
        if not replace:
            _refuse_existing(real)
        elif real.exists():
            with real.open("rb") as existing:
                _require_backup(existing, path, passphrase)
        _remove_abandoned(real)
        written = _write_temporary(real, write)
        try:
            (_replace_file if replace else _create_file)(written, real)
        finally:
            written.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files that killed commands have left of a backup or export."""
    with suppress(OSError):  # this user may only write to the directory, or one is written to its end in the meantime
        for file in find_temporary_files(path):
            if SystemClock().now() - file.lstat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()


def _require_backup(file: BinaryIO, path: Path, passphrase: str) -> None:
    """Raise BackupError unless a file is a backup: encrypted to recipients, or a database in this passphrase.

    Backups and exports look alike without the passphrase, but an export is never encrypted to recipients.
    """
    head = file.read(len(_PASSPHRASE_HEADER))
    _require_header(head, path)
    if not needs_passphrase(head):
        return
    file.seek(0)
    try:
        is_database = next(_decrypt_chunks(file, passphrase)).startswith(DATABASE_HEADER)
    except BackupKeyError:
        is_database = False
    if not is_database:
        raise BackupError(
            f"{path} is not replaced: it is an export, or a file with another passphrase, and may be the only copy of "
            "its shares",
            advice="Choose another name.",
        )


def write_unencrypted_file(path: Path, write: WriteContent) -> None:
    """Write a file, with mode 0600 and fsync, for another program.

    It has no name while it is written (O_TMPFILE, open(2)), so a process that is killed leaves no part of it. Root
    writes it as the owner of the directory.

    Raises:
        BackupError: the path exists, the file could not be written, or the file system has no such files (NFS, FAT).
    """
    with _writing(path) as real:
        _refuse_existing(real)
        fd = os.open(real.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            write(file)
            file.flush()
            os.fsync(fd)
            os.link(f"/proc/self/fd/{fd}", real, src_dir_fd=fd)  # with a descriptor, Python follows the link in /proc
        _sync_directory(real.parent)


@contextmanager
def _writing(path: Path, advice: str | None = None) -> Iterator[Path]:
    """Act as the owner of a path; an OSError of the body becomes a BackupError."""
    try:
        with acting_as_owner(path) as real:
            yield real
    except OSError as error:
        raise BackupError(f"{path} cannot be written: {error.strerror or error}", advice=advice) from error


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise BackupError(
            f"the file exists already: {path}",
            advice="Choose another name; `db backup --force` replaces an older backup.",
        )


def restore_database(image: bytes, database: Path, *, set_aside: bool) -> Path | None:
    """Replace the database with a decrypted and checked image. No helper may use the database.

    The lock file records that files are being replaced, and no helper starts after an interruption. The next start
    checks the entire file. Root acts as the owner of the directory, so that the files belong to that user.

    Args:
        set_aside: rename an existing database; otherwise an existing one is an error.

    Returns:
        The new path of the previous database, None if there was none.

    Raises:
        StoreLocked: a helper has the database open.
        StoreForeign: there is a file at its path that is not a database of this helper.
        BackupError: a database exists already, or the files could not be written.
    """
    with _writing(database, advice="Fix the problem and run the command again with --force.") as real:
        refuse_other_file(real, may_be_damaged=True)
        lock = FileLock(real)
        lock.acquire(to_restore=True)
        try:
            return _restore_locked(image, real, lock, set_aside=set_aside)
        finally:
            lock.release(clean=False)


def _restore_locked(image: bytes, database: Path, lock: FileLock, *, set_aside: bool) -> Path | None:
    # SQLite would apply a remaining WAL to the restored file. Readers can leave an empty WAL behind.
    existing = [path for path in (database, Path(f"{database}-wal")) if path.exists() and path.stat().st_size > 0]
    if existing and not set_aside:
        raise BackupError(
            f"a database exists already: {existing[0]}",
            advice="With --force, it is renamed and the backup replaces it.",
        )
    written = _write_temporary(database, lambda file: file.write(image))
    try:
        lock.mark_restoring()
        aside = _set_aside(database) if existing else None
        for suffix in _SIDE_FILES:
            Path(f"{database}{suffix}").unlink(missing_ok=True)
        _replace_file(written, database)
    finally:
        written.unlink(missing_ok=True)
    lock.mark_open()
    return aside


def _set_aside(database: Path) -> Path:
    number = 1
    while any(Path(f"{database}.before-restore-{number}{suffix}").exists() for suffix in ("", *_SIDE_FILES)):
        number += 1
    renamed = Path(f"{database}.before-restore-{number}")
    for suffix in (*_SIDE_FILES, ""):
        with suppress(FileNotFoundError):
            Path(f"{database}{suffix}").rename(f"{renamed}{suffix}")
    return renamed


def _write_temporary(path: Path, write: WriteContent) -> Path:
    """Write a temporary file next to its final path, with mode 0600, and fsync it."""
    written = temporary_path(path)
    fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            write(file)
            file.flush()
            os.fsync(fd)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    return written


def _replace_file(written: Path, path: Path) -> None:
    written.replace(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _create_file(written: Path, path: Path) -> None:
    """Rename a complete file to a final path that must not exist, even if another process creates it now.

    Raises:
        FileExistsError: the final path exists.
    """
    try:
        path.hardlink_to(written)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, such as FAT
        if path.exists():
            raise FileExistsError(errno.EEXIST, "it exists already") from None
    # Has no effect if both are names of one file, as after `hardlink_to`.
    _replace_file(written, path)
