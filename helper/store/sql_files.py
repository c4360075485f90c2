"""Loads the SQL files of this package: named statements and numbered migrations.

Statements name their columns, because a migration adds a column at the end of a table. The names of the columns of
shares, messages and rounds stand once, in the code: `{share}`, `{reveal}` and `{round}` in a statement are the columns
of the tables with the aliases s, m and r; `{share_columns}`, `{share_values}` and the like are for an INSERT,
`{share_arrays}` for one of many rows on PostgreSQL, and `{share_changes}` and the like for an UPDATE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from itertools import repeat
from typing import Final, get_type_hints

from helper.errors import StoreForeign
from helper.store.row_encryption import REVEAL_COLUMNS, SHARE_COLUMNS
from helper.store.table_rows import RoundRow, ShareRow

FIRST_VERSION: Final = 12
"""Schema version after the first migration. Lower ones were layouts of versions before the first release."""
_NAME_PREFIX = "-- name: "
_NAMED_PARAMETER = re.compile(r"(?<!:):(\w+)")  # not a cast (::)
_ARRAY_TYPES = {int: "bigint[]", int | None: "bigint[]", bytes: "bytea[]", str: "text[]"}
_COLUMN_TYPES = {**get_type_hints(ShareRow), "tag": bytes}
_SHARE_CHANGES = SHARE_COLUMNS[SHARE_COLUMNS.index("state") :]
_REVEAL_CHANGES = REVEAL_COLUMNS[REVEAL_COLUMNS.index("sends") :]
_COLUMNS = {
    "{share}": ", ".join(f"s.{column}" for column in SHARE_COLUMNS),
    "{reveal}": ", ".join(f"m.{column}" for column in REVEAL_COLUMNS),
    "{round}": ", ".join(f"r.{column}" for column in RoundRow._fields),
    "{round_columns}": ", ".join(RoundRow._fields),
    "{round_values}": ", ".join("?" * len(RoundRow._fields)),
    "{round_changes}": ", ".join(f"{column} = excluded.{column}" for column in RoundRow._fields[1:]),
    "{share_columns}": ", ".join(SHARE_COLUMNS),
    "{share_arrays}": ", ".join(f"%s::{_ARRAY_TYPES[_COLUMN_TYPES[column]]}" for column in SHARE_COLUMNS),
    "{share_changes}": ", ".join(f"{column} = :{column}" for column in _SHARE_CHANGES),
    "{share_values}": ", ".join("?" * len(SHARE_COLUMNS)),
    "{reveal_columns}": ", ".join(REVEAL_COLUMNS),
    "{reveal_values}": ", ".join("?" * len(REVEAL_COLUMNS)),
    "{reveal_changes}": ", ".join(f"{column} = :{column}" for column in _REVEAL_CHANGES),
}
_COLUMNS_KEY = re.compile(r"\{\w+\}")
_VALUES_ROW = re.compile(r"VALUES (\((?:\?, )*\?\))")


@cache
def sqlite_statements() -> dict[str, str]:
    """Return the statements of the store on SQLite, by name."""
    return read_statements("helper.store") | read_statements("helper.store.sqlite")


@cache
def postgres_statements() -> Mapping[str, bytes]:
    """Return the statements of the store on PostgreSQL, by name."""
    shared = {name: to_postgres(sql) for name, sql in read_statements("helper.store").items()}
    own = {name: sql.encode() for name, sql in read_statements("helper.store.postgres").items()}
    return shared | own


def check_version(version: int, latest: int, name: str, *, upgrade: str = "") -> None:
    """Refuse a schema that this version of the helper cannot use.

    A schema without tables has version 0. With `upgrade`, an advice, one that must be upgraded first is refused too.

    Raises:
        StoreForeign: it is from before the first release or newer than this helper, or must be upgraded.
    """
    if 0 < version < FIRST_VERSION:
        raise StoreForeign(
            f"{name} was written before the first release (schema {version})",
            advice="Export its queue with the version that wrote it (`svote-helper queue export --move`), and import "
            "it into a new database.",
        )
    if version > latest:
        raise StoreForeign(
            f"{name} was written by a newer version (schema {version}, supported {latest})",
            advice="Use the version that wrote it, or a newer one. If no newer version ever ran, the database is "
            "damaged: restore the newest backup.",
        )
    if upgrade and version < latest:
        raise StoreForeign(
            f"{name} was written by an older version (schema {version}, supported {latest})", advice=upgrade
        )


def to_postgres(sql: str) -> bytes:
    """Convert the parameters of a statement that is the same on both databases."""
    return _NAMED_PARAMETER.sub(r"%(\1)s", sql).replace("?", "%s").encode()


@cache
def multi_row_statement(statement: str, rows: int) -> str:
    """Return a statement on SQLite that takes one row of values, extended to `rows` rows."""
    return _VALUES_ROW.sub(lambda row: "VALUES " + ", ".join(repeat(row[1], rows)), statement)


def read_statements(package: str, file: str = "queries.sql") -> dict[str, str]:
    """Return the statements of a file by name, each on one line, without comments and the closing semicolon.

    A comment must be on its own line. Otherwise it would comment out the rest of the joined statement.
    """
    statements: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (resources.files(package) / file).read_text("utf-8").splitlines():
        if line.startswith(_NAME_PREFIX):
            current = statements[line.removeprefix(_NAME_PREFIX).strip()] = []
        elif line and not line.startswith("--"):
            current.append(line.strip())
    return {name: _expand_columns(" ".join(lines).removesuffix(";")) for name, lines in statements.items()}


def _expand_columns(sql: str) -> str:
    return _COLUMNS_KEY.sub(lambda key: _COLUMNS[key[0]], sql)


def read_migrations(package: str) -> tuple[str, ...]:
    """Read the files in `migrations/` of a package, in order; the first one leads to schema version `FIRST_VERSION`.

    SQL cannot compute a `row_check`. So a migration adds a column to a table with checks at its end, without a default:
    NULLs at the end of a row do not change its check.
    """
    folder = resources.files(package) / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(file.read_text("utf-8") for file in files)


sqlite_statements()  # read at the import, because root acts as a file's owner, who may not read this installation
