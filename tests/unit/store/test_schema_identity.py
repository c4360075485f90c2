"""Every function that opens a file applies the same identity check and raises the same error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.errors import StoreCorrupt, StoreError, StoreForeign
from helper.store.backup import restore_database
from helper.store.db_copy.sqlite_endpoint import SqliteEndpoint
from helper.store.sqlite.opening import open_database
from helper.store.sqlite.quick_check import quick_check
from helper.store.sqlite.reader import open_queue_file
from helper.store.sqlite.schema import latest_version
from helper.store.sqlite.snapshot import check_image, take_snapshot
from tests.unit.store.fixtures import open_closed_database, read_database_files
from tests.unit.store.test_schema_upgrade import add_migration

CLOCK = SystemClock()


async def by_daemon(path: Path) -> None:
    open_database(path, CLOCK).close()


async def by_operator_query(path: Path) -> None:
    async with open_queue_file(path):
        pass


async def by_backup(path: Path) -> None:
    take_snapshot(path, CLOCK)


async def by_restore(path: Path) -> None:
    check_image(path.read_bytes(), str(path))


async def by_doctor(path: Path) -> None:
    quick_check(path, CLOCK, seconds=60)


async def by_migration(path: Path) -> None:
    endpoint = SqliteEndpoint(path, CLOCK)
    try:
        endpoint.connect_read_only()
    finally:
        endpoint.close()


Use = Callable[[Path], Awaitable[None]]
USES = [by_daemon, by_operator_query, by_backup, by_restore, by_doctor, by_migration]


def set_header(path: Path, pragma: str, value: int) -> None:
    open_database(path, CLOCK).close()
    with open_closed_database(path) as conn:
        conn.execute("PRAGMA journal_mode = DELETE")  # as in a backup
        conn.execute(f"PRAGMA {pragma} = {value}")


def foreign(path: Path) -> None:
    with open_closed_database(path) as conn:
        conn.execute("CREATE TABLE songs (title TEXT)")


REFUSED: list[tuple[Callable[[Path], object], type[StoreError], str]] = [
    (lambda path: path.write_text("not a database\n" * 500), StoreForeign, "is not a database"),
    (foreign, StoreForeign, "is a database of another program"),
    (lambda path: set_header(path, "user_version", 99), StoreForeign, "was written by a newer version"),
    (lambda path: set_header(path, "user_version", 0), StoreCorrupt, "is damaged: its schema version is 0"),
]


@pytest.mark.parametrize("operation", USES)
@pytest.mark.parametrize(("make", "kind", "text"), REFUSED, ids=["text", "foreign", "newer", "no-version"])
async def test_every_operation_refuses_foreign_file_with_same_error(
    path: Path, operation: Use, make: Callable[[Path], object], kind: type[StoreError], text: str
) -> None:
    make(path)
    before = path.read_bytes()

    with pytest.raises(kind) as refused:
        await operation(path)

    assert str(refused.value).startswith(f"{path} {text}")
    assert refused.value.advice
    assert kind is not StoreForeign or "db_path" in refused.value.advice or "newer" in text
    assert path.read_bytes() == before


@pytest.mark.parametrize("operation", [by_operator_query, by_migration])
async def test_older_database_is_refused_by_what_reads_the_latest_schema_only(
    path: Path, operation: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_database(path, CLOCK).close()
    add_migration(monkeypatch)
    before = read_database_files(path)[path.name]

    with pytest.raises(StoreForeign, match=rf"older version \(schema {latest_version() - 1}") as refused:
        await operation(path)

    assert "svote-helper db migrate" in refused.value.advice
    assert read_database_files(path)[path.name] == before


@pytest.mark.parametrize("operation", [by_operator_query, by_doctor, by_migration])
async def test_empty_file_is_a_new_database_for_the_helper_only(path: Path, operation: Use) -> None:
    path.touch()
    with pytest.raises(StoreForeign, match="is an empty database"):
        await operation(path)
    await by_daemon(path)
    await operation(path)


async def over_existing_path(path: Path) -> None:
    restore_database(b"image", path, set_aside=True)


@pytest.mark.parametrize("operation", [*(use for use in USES if use != by_restore), over_existing_path])
@pytest.mark.parametrize("make", [Path.mkdir, foreign, lambda path: path.write_text("a letter")])
async def test_nothing_is_created_beside_or_instead_of_what_is_no_queue(
    path: Path, operation: Use, make: Callable[[Path], object]
) -> None:
    make(path)
    mode = path.stat().st_mode
    with pytest.raises(StoreForeign, match=r"is not a file|is not a database|is a database of another program"):
        await operation(path)
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode == mode


def test_examine_of_empty_image_is_refused() -> None:
    with pytest.raises(StoreForeign, match="is not a database"):
        check_image(b"", "backup.age")
