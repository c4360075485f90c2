"""Loads the SQL files of this package: named queries and numbered migrations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from itertools import repeat
from types import MappingProxyType

_NAME_PREFIX = "-- name: "
_VALUES_ROW = re.compile(r"VALUES (\((?:\?, )*\?\))")


@cache
def queries() -> Mapping[str, str]:
    """Return the statements of `queries.sql` by name."""
    return parse_statements((resources.files("helper.store") / "queries.sql").read_text("utf-8"))


@cache
def multi_row_statement(name: str, rows: int) -> str:
    """Return a statement of `queries.sql` that inserts one row of values, extended to `rows` rows."""
    return _VALUES_ROW.sub(lambda row: "VALUES " + ", ".join(repeat(row[1], rows)), queries()[name])


def parse_statements(text: str) -> Mapping[str, str]:
    """Return the statements of a file by name, each on one line, without comments and the closing semicolon.

    A comment must be on its own line. Otherwise it would comment out the rest of the joined statement.
    """
    statements: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith(_NAME_PREFIX):
            current = statements[line.removeprefix(_NAME_PREFIX).strip()] = []
        elif line and not line.startswith("--"):
            current.append(line.strip())
    return MappingProxyType({name: " ".join(lines).removesuffix(";") for name, lines in statements.items()})


def read_migrations(package: str) -> tuple[str, ...]:
    """Read the files in `migrations/` of a package, in order; number n (from 1) leads to schema version n."""
    folder = resources.files(package) / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(file.read_text("utf-8") for file in files)
