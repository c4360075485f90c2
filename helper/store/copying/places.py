"""The two ends of a move by the words that an operator says."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.config import Config
from helper.store.copying.file_side import FileSide
from helper.store.copying.side import Side
from helper.store.making import host_name, needing_postgres

FILE: Final = "sqlite"
"""The file that the settings name: [helper] db_path."""
SHARED: Final = "postgresql"
"""The database that the settings name: [store] url."""
_PATIENCE: Final = 60.0
"""Seconds that the server waits for the next word inside a transaction: nobody else waits for the rows of a move."""
_NAME: Final = 60
_SCHEMES: Final = ("postgresql://", "postgres://")


def make_side(word: str, config: Config, clock: Clock) -> Side:
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
        return FileSide(config.db_path, clock)
    if word == SHARED:
        if not config.store.url:
            raise ValueError("[store] url is empty: give the database's address itself, postgresql://…")
        return _shared(config, config.store.url)
    if word.startswith(_SCHEMES):
        return _shared(config, word)
    if "://" in word or not word:
        raise ValueError("neither postgresql://…, nor a file")
    return FileSide(Path(word), clock)


def make_ends(origin: str | None, to: str, config: Config, clock: Clock) -> tuple[Side, Side]:
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
    target = make_side(to, config, clock)
    source = make_origin(origin, config, clock)
    if origin is None and source.label == target.label and config.store.url:
        source = make_side(FILE, config, clock)
    return source, target


def make_origin(word: str | None, config: Config, clock: Clock) -> Side:
    """Where a queue is, or was: by a word, else where a helper with these settings looks for it.

    Raises:
        ValueError: as above.
        StoreError: as above.
    """
    return make_side(word or (SHARED if config.store.url else FILE), config, clock)


def _shared(config: Config, address: str) -> Side:
    with needing_postgres():
        from helper.store.copying.shared_side import SharedSide  # noqa: PLC0415 - as in `helper.store.making`
        from helper.store.postgres.keyfile import read_seals  # noqa: PLC0415
        from helper.store.postgres.link import make_link  # noqa: PLC0415
    settings = config.store
    if not settings.key_file:
        raise ValueError("a shared database needs a key file: --key-file, or [store] key_file")
    host = f"move from {host_name(config)}"[:_NAME]
    link = make_link(address, schema=settings.schema_name, host=host, patience=_PATIENCE)
    return SharedSide(link, read_seals(Path(settings.key_file)))
