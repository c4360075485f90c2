"""The store that the settings name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from helper.clock import Clock
from helper.config import Config
from helper.errors import StoreError
from helper.store.sqlite.store import SqliteStore
from helper.store.store import Store

if TYPE_CHECKING:
    from helper.store.postgres import PostgresStore


def create_store(config: Config, clock: Clock) -> Store:
    """A store, not yet open: a file of this host's, or a database that hosts share.

    Raises:
        StoreError: its address or its keys will not do, or what it needs is not installed.
    """
    return create_shared_store(config, clock) if config.store.url else SqliteStore(config.db_path)


def create_shared_store(config: Config, clock: Clock) -> PostgresStore:
    """The store on `[store] url`.

    Raises:
        StoreError: as above.
    """
    with needing_postgres():
        # loaded here: who keeps the queue in a file need not have it
        from helper.store.postgres import PostgresStore  # noqa: PLC0415
        from helper.store.postgres.keyfile import read_keyring  # noqa: PLC0415
    settings = config.store
    return PostgresStore(
        settings.url,
        seals=read_keyring(Path(settings.key_file)),
        host=host_name(config),
        schema=settings.schema_name,
        clock=clock,
        lease=settings.lease_seconds,
    )


def refuse_held_host(config: Config) -> None:
    """Look whether another process works under this host's name on the database that hosts share, as long as little is
    loaded. The store takes the name for good when it opens. (`helper.cli.single_instance` does it for a file.)

    Raises:
        StoreLocked: another process does.
        StoreError: the address will not do, or what it needs is not installed.
    """
    if not config.store.url:
        return
    with needing_postgres():
        from helper.store.postgres.connection import create_connection_settings  # noqa: PLC0415 - as above
        from helper.store.postgres.opening import refuse_held_name  # noqa: PLC0415
    refuse_held_name(
        create_connection_settings(config.store.url, schema=config.store.schema_name, host=host_name(config))
    )


def host_name(config: Config) -> str:
    """What this host is called among those that share a queue: `[store] host`, else the machine's own name."""
    return config.store.host or socket.gethostname()


@contextmanager
def needing_postgres() -> Iterator[None]:
    """Says what to install where something that the engine needs is not.

    Raises:
        StoreError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise StoreError(
            f"a queue in PostgreSQL needs {error.name}, which is not installed",
            advice="Install it beside the helper: `pip install 'svote-helper[postgres]'`.",
        ) from None
