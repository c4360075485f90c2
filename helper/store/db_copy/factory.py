"""Creates the endpoints of a copy from command-line arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.config.sections import Config
from helper.errors import UsageError
from helper.store.db_copy.endpoint import CopyEndpoint
from helper.store.db_copy.sqlite_endpoint import SqliteEndpoint
from helper.store.factory import get_host_name, read_file_encryption, require_postgres_packages

SQLITE_ENGINE: Final = "sqlite"
"""Argument for the configured file, [helper] db_path."""
POSTGRES_ENGINE: Final = "postgresql"
"""Argument for the configured database, [store] url."""
_IDLE_SECONDS: Final = 60.0
"""Idle timeout of transactions in seconds. It can be long, because no other host waits for the copied rows."""
_MAX_NAME: Final = 60
_SCHEMES: Final = ("postgresql://", "postgres://")


def create_endpoint(location: str | None, config: Config, clock: Clock) -> CopyEndpoint:
    """Create an endpoint without opening it.

    Args:
        location: `sqlite`, `postgresql`, a database URL or a file path; empty for the configured database.

    Raises:
        UsageError: `location` is none of these.
        StoreError: the URL or the keys are invalid, or the PostgreSQL libraries are not installed.
    """
    if not location:
        location = POSTGRES_ENGINE if config.store.url else SQLITE_ENGINE
    if location == SQLITE_ENGINE:
        return SqliteEndpoint(config.db_path, clock, read_file_encryption(config.store.key_file))
    if location == POSTGRES_ENGINE:
        if not config.store.url:
            raise UsageError("[store] url is empty: specify the database URL instead, postgresql://…")
        return _create_postgres_endpoint(config, config.store.url)
    if location.startswith(_SCHEMES):
        return _create_postgres_endpoint(config, location)
    if "://" in location:
        raise UsageError("not a postgresql:// URL or a file path")
    return SqliteEndpoint(Path(location), clock, read_file_encryption(config.store.key_file))


def create_endpoints(
    origin: str | None, destination: str, config: Config, clock: Clock
) -> tuple[CopyEndpoint, CopyEndpoint]:
    """Create source and target of a copy; see `create_endpoint`.

    Without an origin, the source is the configured database or, if that is the target, the configured file.
    """
    target = create_endpoint(destination, config, clock)
    source = create_endpoint(origin, config, clock)
    if origin is None and source.label == target.label and config.store.url:
        source = create_endpoint(SQLITE_ENGINE, config, clock)
    return source, target


def _create_postgres_endpoint(config: Config, address: str) -> CopyEndpoint:
    with require_postgres_packages():
        from helper.store.db_copy.postgres_endpoint import PostgresEndpoint  # noqa: PLC0415 - optional
        from helper.store.keyring import read_keyring  # noqa: PLC0415
        from helper.store.postgres.connection import create_connection_settings  # noqa: PLC0415
    settings = config.store
    if not settings.key_file:
        raise UsageError("a shared database needs a key file: --key-file or [store] key_file")
    host = f"move from {get_host_name(config)}"[:_MAX_NAME]
    connection_settings = create_connection_settings(
        address, schema=settings.schema_name, host=host, idle_seconds=_IDLE_SECONDS
    )
    return PostgresEndpoint(connection_settings, read_keyring(Path(settings.key_file)))
