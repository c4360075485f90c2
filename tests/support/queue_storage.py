"""Where a helper under test keeps its queue, and what a test asks of that place beside it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

import psycopg

from tests.support.postgres import Cluster

LONG_ZERO_RUN = re.compile(rb"\0{64,}")
"""What a server lays out ahead of its words: it tells nothing, and there is much of it."""
ZERO_GAP = bytes(8)


class QueueStorage(Protocol):
    """A place of one helper's."""

    @property
    def store_section(self) -> dict[str, Any]:
        """The helper's settings, section `[store]`."""
        ...

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What a query gives beside a running helper, with a ? for each value."""
        ...

    def numeric_columns(self) -> list[tuple[str, str]]:
        """Table and name of every column that may hold a number."""
        ...

    def bytes_on_disk(self) -> bytes:
        """Every byte of the files that are kept."""
        ...

    def check_integrity(self) -> str:
        """What the engine says of them once no helper runs: "ok", or what is wrong."""
        ...


class SqliteFile:
    """A file.

    Args:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def store_section(self) -> dict[str, Any]:
        """Nothing: a file is the default."""
        return {}

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the file itself, as an operator's tool would."""
        with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as file:
            return file.execute(query, values).fetchall()

    def numeric_columns(self) -> list[tuple[str, str]]:
        """Every column: here any may."""
        return self.query_rows(
            "SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c"
            " WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'"
        )

    def bytes_on_disk(self) -> bytes:
        """Every byte of the database's files."""
        return b"".join(path.read_bytes() for path in sorted(self._path.parent.glob(f"{self._path.name}*")))

    def check_integrity(self) -> str:
        """What SQLite says of a closed database."""
        with contextlib.closing(sqlite3.connect(self._path)) as file:
            return "; ".join(str(row[0]) for row in file.execute("PRAGMA integrity_check"))


class PostgresSchema:
    """A schema of its own in a cluster, for one host.

    Args:
        cluster: a server that runs.
        folder: where the host's key file is made.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self.name = f"queue_{token_hex(6)}"
        keys = folder / "store.key"
        keys.touch(0o600)
        keys.write_text(token_hex(32))
        self.store_section: dict[str, Any] = {
            "url": cluster.url,
            "key_file": str(keys),
            "schema_name": self.name,
            "host": "one",
        }

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection that sees the schema's tables, as the server's superuser."""
        search_path_option = f"-c search_path={self.name},public"
        return psycopg.connect(self._cluster.url, options=search_path_option, autocommit=True)

    def query_rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask the server, as an operator's tool would."""
        with self.connect() as conn:
            return conn.execute(query.replace("?", "%s").encode(), values).fetchall()

    def numeric_columns(self) -> list[tuple[str, str]]:
        """Those of whole numbers: here no other may."""
        return self.query_rows(
            "SELECT table_name, column_name FROM information_schema.columns"
            " WHERE table_schema = ? AND data_type IN ('bigint', 'integer')",
            self.name,
        )

    def read_files(self) -> dict[Path, bytes]:
        """What says anything in every file of the whole cluster, by its path from the cluster's folder: tables,
        indexes, write-ahead log, temporary files, and the server's own log.
        """
        found = {}
        for path in sorted(self._cluster.folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # a server gives files up at any time
                if path.is_file():
                    found[path.relative_to(self._cluster.folder)] = LONG_ZERO_RUN.sub(ZERO_GAP, path.read_bytes())
        return found

    def table_files(self, table: str) -> set[Path]:
        """Those of them that have a table's rows and its indexes; of one larger than a gigabyte the first."""
        there = self.query_rows(
            "SELECT pg_relation_filepath(oid) FROM pg_class WHERE oid = ?::regclass"
            " UNION SELECT pg_relation_filepath(indexrelid) FROM pg_index WHERE indrelid = ?::regclass",
            *(table, table),
        )
        return {Path("data") / path for (path,) in there}

    def bytes_on_disk(self) -> bytes:
        """All of that."""
        return ZERO_GAP.join(self.read_files().values())

    def check_integrity(self) -> str:
        """What PostgreSQL's own checks say of the schema's tables, and of its indexes against them.

        Planted: some bytes of a table's file, and of an index's, changed between two lives of the server. It said
        "shares: line pointer to page offset 8053 is not maximally aligned" and "item order invariant violated for index
        "shares_pkey"".
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
        return "; ".join(f"{table}: {told}" for table, told in problems) or "ok"
