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


def _folder() -> resources.abc.Traversable:
    return resources.files("helper.store")


@cache
def queries() -> Mapping[str, str]:
    """The statements of `queries.sql` by name."""
    return named((_folder() / "queries.sql").read_text("utf-8"))


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


@cache
def migrations() -> tuple[str, ...]:
    """The migrations in order; number n (from 1) leads to `user_version` n."""
    files = sorted(
        (file for file in (_folder() / "migrations").iterdir() if file.name.endswith(".sql")),
        key=lambda file: file.name,
    )
    return tuple(file.read_text("utf-8") for file in files)


def schema() -> str:
    """The schema that results from all migrations, as a readable file."""
    return (_folder() / "schema.sql").read_text("utf-8")
