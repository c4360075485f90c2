"""Creates the configured store."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from helper.clock import Clock
from helper.config.sections import ROLES, Config
from helper.errors import StoreError, StoreLocked
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sqlite.file_lock import is_locked
from helper.store.sqlite.opening import MOUNTS_FILE, refuse_unsuitable_file_system
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store

if TYPE_CHECKING:
    from helper.store.postgres.connection import ConnectionSettings


def create_store(config: Config, clock: Clock) -> Store:
    """Return the configured store, not yet open: a local SQLite file, or a PostgreSQL database that hosts share.

    Raises:
        StoreError: its URL or its keys are not valid, or a required package is not installed.
    """
    if not config.store.url:
        return SqliteStore(config.db_path, encryption=read_file_encryption(config.store.key_file))
    with require_postgres_packages():
        # Imported here because a helper with a SQLite file does not need these packages.
        from helper.store.keyring import read_keyring  # noqa: PLC0415
        from helper.store.postgres.store import PostgresStore  # noqa: PLC0415
    settings = config.store
    return PostgresStore(
        settings.url,
        keyring=read_keyring(Path(settings.key_file)),
        host=get_host_name(config),
        schema=settings.schema_name,
        clock=clock,
        lease_seconds=settings.lease_seconds,
        proves=ROLES[config.helper.role].can_prove,
    )


def read_file_encryption(key_file: str) -> RowEncryption:
    """Return the encryption of a database file with the keys of a key file; "" for none.

    Raises:
        StoreError: the key file cannot be used.
    """
    if not key_file:
        return UNENCRYPTED
    # Imported here because most helpers with a SQLite file do not need the cipher.
    from helper.store.keyring import read_keyring  # noqa: PLC0415

    return RowEncryption(read_keyring(Path(key_file)))


def check_before_start(config: Config) -> None:
    """Refuse to start a helper with a database that it could not use, before most modules are imported.

    The store checks file or host name again when it acquires them.

    Raises:
        StoreLocked: another process uses the database file, or this host's name on the shared database.
        StoreError: the file is in a directory of another user, who could not use the files that root creates, or on a
            file system that may lose or damage it; or the URL is not valid, or a required package is not installed.
    """
    if config.store.url:
        with require_postgres_packages():
            from helper.store.postgres.opening import refuse_host_name_in_use  # noqa: PLC0415 - as above
        refuse_host_name_in_use(_create_connection_settings(config))
        return
    directory = Path(os.path.realpath(config.db_path)).parent
    if os.geteuid() == 0 and directory.exists() and (owner := directory.stat().st_uid):
        raise StoreError(
            f"{directory} belongs to user {owner}, who could not use the files that root creates there",
            advice="Start the helper as that user: `systemctl start svote-helper`.",
        )
    with suppress(OSError):  # without /proc
        refuse_unsuitable_file_system(config.db_path, MOUNTS_FILE.read_text("utf-8", "surrogateescape"))
    if is_locked(config.db_path):
        raise StoreLocked(f"another helper has this database open: {config.db_path}")


def check_shared_database(config: Config) -> float | None:
    """Connect to the shared database as the helper does, without changes. Blocks for up to the time limits in the URL.

    Returns:
        Unix time at which the first certificate of its servers expires; None for a connection without TLS.

    Raises:
        StoreError: the URL is not valid, a required package is not installed, or the helper could not use the server.
    """
    with require_postgres_packages():
        from helper.store.postgres.opening import check_connection  # noqa: PLC0415 - as above
    return check_connection(_create_connection_settings(config))


def _create_connection_settings(config: Config) -> ConnectionSettings:
    from helper.store.postgres.connection import create_connection_settings  # noqa: PLC0415 - as above

    return create_connection_settings(config.store.url, schema=config.store.schema_name, host=get_host_name(config))


def get_host_name(config: Config) -> str:
    """Return this host's name in the shared queue: `[store] host`, else the machine's host name."""
    return config.store.host or socket.gethostname()


@contextmanager
def require_postgres_packages() -> Iterator[None]:
    """Convert a missing PostgreSQL package to an error that names the package to install.

    Raises:
        StoreError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise StoreError(
            f"a queue in PostgreSQL needs {error.name}, which is not installed",
            advice="Install it: `pip install 'svote-helper[postgres]'`.",
        ) from None
