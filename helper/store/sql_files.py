"""The SQL files beside this module: named queries and numbered migrations."""

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
    """A statement of `queries.sql` with one row of values, made to take so many."""
    return _ROW.sub(lambda row: "VALUES " + ", ".join(repeat(row[1], rows)), queries()[name])


def named(text: str) -> Mapping[str, str]:
    """The statements of a file by name, each on one line, without comments and the closing semicolon.

    A comment has a line to itself: behind a statement's words it would swallow all that follow.
    """
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith(_MARK):
            current = found[line.removeprefix(_MARK).strip()] = []
        elif line and not line.startswith("--"):
            current.append(line.strip())
    return MappingProxyType({name: " ".join(lines).removesuffix(";") for name, lines in found.items()})


@cache
def migrations() -> tuple[str, ...]:
    """The migrations in order; the n-th (from 1) leads to `user_version` n."""
    files = sorted(
        (file for file in (_folder() / "migrations").iterdir() if file.name.endswith(".sql")),
        key=lambda file: file.name,
    )
    return tuple(file.read_text("utf-8") for file in files)


def schema() -> str:
    """The schema that the migrations lead to, as it is meant to be read."""
    return (_folder() / "schema.sql").read_text("utf-8")
