"""Loads the SQL files of this package: named queries and numbered migrations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from itertools import repeat
from types import MappingProxyType

_MARK = "-- name: "
_ROW = re.compile(r"VALUES (\((?:\?, )*\?\))")


@cache
def queries() -> Mapping[str, str]:
    """The statements of `queries.sql` by name."""
    return named((resources.files("helper.store") / "queries.sql").read_text("utf-8"))


@cache
def of_rows(name: str, rows: int) -> str:
    """A statement of `queries.sql` that inserts one row of values, extended to `rows` rows."""
    return _ROW.sub(lambda row: "VALUES " + ", ".join(repeat(row[1], rows)), queries()[name])


def named(text: str) -> Mapping[str, str]:
    """The statements of a file by name, each on one line, without comments and the closing semicolon.

    A comment must be on its own line: after a part of a statement it would comment out the rest.
    """
    statements: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith(_MARK):
            current = statements[line.removeprefix(_MARK).strip()] = []
        elif line and not line.startswith("--"):
            current.append(line.strip())
    return MappingProxyType({name: " ".join(lines).removesuffix(";") for name, lines in statements.items()})


def read_migrations(package: str) -> tuple[str, ...]:
    """Read the files in `migrations/` of a package, in order; number n (from 1) leads to schema version n."""
    folder = resources.files(package) / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(file.read_text("utf-8") for file in files)
