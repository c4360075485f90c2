"""The two ends of a move by the words that an operator says."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.config import Config
from helper.store.factory import host_name, needing_postgres
from helper.store.migration.endpoint import MigrationEndpoint
from helper.store.migration.sqlite_endpoint import SqliteEndpoint

FILE: Final = "sqlite"
"""The file that the settings name: [helper] db_path."""
SHARED: Final = "postgresql"
"""The database that the settings name: [store] url."""
_PATIENCE: Final = 60.0
"""Seconds that the server waits for the next word inside a transaction: nobody else waits for the rows of a move."""
_NAME: Final = 60
_SCHEMES: Final = ("postgresql://", "postgres://")


def create_endpoint(word: str, config: Config, clock: Clock) -> MigrationEndpoint:
    """One end of a move; nothing is opened.

    Args:
        word: `sqlite`, `postgresql`, a database's address, or a file's path.
        config: what the words mean, and the keys.
        clock: for the file's erasing.

    Raises:
        ValueError: it is none of these.
        StoreError: its address or its keys will not do, or what it needs is not installed.
    """
    if word == FILE:
        return SqliteEndpoint(config.db_path, clock)
    if word == SHARED:
        if not config.store.url:
            raise ValueError("[store] url is empty: give the database's address itself, postgresql://…")
        return _shared(config, config.store.url)
    if word.startswith(_SCHEMES):
        return _shared(config, word)
    if "://" in word or not word:
        raise ValueError("neither postgresql://…, nor a file")
    return SqliteEndpoint(Path(word), clock)


def create_endpoints(
    origin: str | None, to: str, config: Config, clock: Clock
) -> tuple[MigrationEndpoint, MigrationEndpoint]:
    """Both ends of a move.

    Args:
        origin: the source; none for what the settings name, or, if that is the target, for the file of the settings.
        to: the target.
        config: as above.
        clock: as above.

    Raises:
        ValueError: as above.
        StoreError: as above.
    """
    target = create_endpoint(to, config, clock)
    source = create_source_endpoint(origin, config, clock)
    if origin is None and source.label == target.label and config.store.url:
        source = create_endpoint(FILE, config, clock)
    return source, target


def create_source_endpoint(word: str | None, config: Config, clock: Clock) -> MigrationEndpoint:
    """Where a queue is, or was: by a word, else where a helper with these settings looks for it.

    Raises:
        ValueError: as above.
        StoreError: as above.
    """
    return create_endpoint(word or (SHARED if config.store.url else FILE), config, clock)


def _shared(config: Config, address: str) -> MigrationEndpoint:
    with needing_postgres():
        from helper.store.migration.postgres_endpoint import PostgresEndpoint  # noqa: PLC0415 - as in `helper.store.factory`
        from helper.store.postgres.connection import create_connection_settings  # noqa: PLC0415
        from helper.store.postgres.keyfile import read_keyring  # noqa: PLC0415
    settings = config.store
    if not settings.key_file:
        raise ValueError("a shared database needs a key file: --key-file, or [store] key_file")
    host = f"move from {host_name(config)}"[:_NAME]
    link = create_connection_settings(address, schema=settings.schema_name, host=host, patience=_PATIENCE)
    return PostgresEndpoint(link, read_keyring(Path(settings.key_file)))
