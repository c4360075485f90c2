"""Storage of a helper under test: file or PostgreSQL schema, with queries for tests."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import psycopg

from tests.support.postgres import Cluster
from tests.support.sealed_fields import add_field_functions

LONG_ZERO_RUN = re.compile(rb"\0{64,}")
"""Long runs of zeros, which the server preallocates. They contain no information."""
ZERO_GAP = bytes(8)


class QueueStorage(Protocol):
    @property
    def store_section(self) -> dict[str, Any]: ...

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a query while the helper runs. A ? stands for each value."""
        ...

    def numeric_columns(self) -> list[tuple[str, str]]:
        """Return table and name of every column that may contain a number."""
        ...

    def bytes_on_disk(self) -> bytes: ...

    def check_integrity(self) -> str:
        """Run the engine's integrity check after the helper has stopped. Returns "ok" or the problem."""
        ...


class SqliteFile:
    """A SQLite file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def store_section(self) -> dict[str, Any]:
        return {}

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the file directly, like an operator's tool."""
        with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as file:
            return add_field_functions(file).execute(query, values).fetchall()

    def numeric_columns(self) -> list[tuple[str, str]]:
        """Every column: SQLite columns may contain any type."""
        return self.query_rows(
            "SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c"
            " WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'"
        )

    def bytes_on_disk(self) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(self._path.parent.glob(f"{self._path.name}*")))

    def check_integrity(self) -> str:
        """Return SQLite's integrity check of a closed database."""
        with contextlib.closing(sqlite3.connect(self._path)) as file:
            return "; ".join(str(row[0]) for row in file.execute("PRAGMA integrity_check"))


class PostgresSchema:
    """A separate schema in a cluster, for one host."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster = cluster
        self.name = f"queue_{token_hex(6)}"
        keys = directory / "store.key"
        keys.touch(0o600)
        keys.write_text(token_hex(32))
        self.store_section: dict[str, Any] = {
            "url": cluster.url,
            "key_file": str(keys),
            "schema_name": self.name,
            "host": "one",
        }

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a superuser connection with the schema in its search path."""
        search_path_option = f"-c search_path={self.name},public"
        return psycopg.connect(self._cluster.url, options=search_path_option, autocommit=True)

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Query the server, like an operator's tool."""
        with self.connect() as conn:
            return conn.execute(query.replace("?", "%s").encode(), values).fetchall()

    def numeric_columns(self) -> list[tuple[str, str]]:
        """The integer columns: no other column can contain a number."""
        return self.query_rows(
            "SELECT table_name, column_name FROM information_schema.columns"
            " WHERE table_schema = ? AND data_type IN ('bigint', 'integer')",
            self.name,
        )

    def read_files(self) -> dict[Path, bytes]:
        """Return the contents of all files of the cluster by relative path.

        Includes tables, indexes, write-ahead log, temporary files and the server's log.
        """
        contents = {}
        for path in sorted(self._cluster.directory.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # the server may delete files at any time
                if path.is_file():
                    contents[path.relative_to(self._cluster.directory)] = LONG_ZERO_RUN.sub(ZERO_GAP, path.read_bytes())
        return contents

    def table_files(self, table: str) -> set[Path]:
        """Return the files of a table and its indexes; for a table above 1 GB only the first file."""
        paths = self.query_rows(
            "SELECT pg_relation_filepath(oid) FROM pg_class WHERE oid = ?::regclass"
            " UNION SELECT pg_relation_filepath(indexrelid) FROM pg_index WHERE indrelid = ?::regclass",
            *(table, table),
        )
        return {Path("data") / path for (path,) in paths}

    def bytes_on_disk(self) -> bytes:
        return ZERO_GAP.join(self.read_files().values())

    def check_integrity(self) -> str:
        """Run PostgreSQL's integrity checks on the schema's tables and indexes.

        Verified with injected faults: bytes of a table's file and of an index's file, changed while the server was
        stopped. It reported "shares: line pointer to page offset 8053 is not maximally aligned" and "item order
        invariant violated for index "shares_pkey"".
        """
        in_schema = "relnamespace = %s::regnamespace"
        with self.connect() as conn:
            conn.execute("CREATE EXTENSION IF NOT EXISTS amcheck SCHEMA public")
            try:
                conn.execute(
                    "SELECT bt_index_check(c.oid, true) FROM pg_class c JOIN pg_am a ON a.oid = relam"
                    f" WHERE {in_schema} AND amname = 'btree'".encode(),
                    (self.name,),
                )
            except psycopg.errors.IndexCorrupted as error:
                return str(error)
            problems = conn.execute(
                "SELECT relname, msg FROM pg_class c, verify_heapam(c.oid) "
                f"WHERE {in_schema} AND relkind = 'r'".encode(),
                (self.name,),
            ).fetchall()
        return "; ".join(f"{table}: {errors}" for table, errors in problems) or "ok"
