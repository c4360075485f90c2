"""Making and opening the schema in a database: everything that refuses a start."""

from __future__ import annotations

import secrets
from functools import cache
from importlib import resources
from typing import Any, Final

import psycopg
from psycopg import sql

from helper.errors import NothingThere, StoreCorrupt, StoreError, StoreForeign, StoreLocked
from helper.store.copying.marks import refuse_marked
from helper.store.copying.tables import MOVED, UNFINISHED
from helper.store.postgres.link import Link
from helper.store.postgres.seals import Seals, UnsealedError
from helper.store.postgres.tx import statements
from helper.store.tx import Keys, fact_row, read_fact

OLDEST_SERVER: Final = 150_000
_PROBE: Final = b"svote-helper"

Connection = psycopg.Connection[tuple[Any, ...]]


@cache
def migrations() -> tuple[str, ...]:
    """The migrations in order; the n-th (from 1) leads to version n."""
    folder = resources.files("helper.store.postgres") / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(file.read_text("utf-8") for file in files)


def connect(link: Link) -> Connection:
    """A writing connection, on which a commit is on disk when it is answered."""
    conn: Connection = psycopg.connect(link.conninfo, **link.options())
    try:
        conn.prepare_threshold = 2
        if conn.info.server_version < OLDEST_SERVER:
            raise StoreForeign("the database is older than PostgreSQL 15")
        for name in ("fsync", "full_page_writes"):
            if _setting(conn, name) != "on":
                raise StoreError(
                    f"the database runs with {name} = off: what it has answered for could be lost",
                    advice=f"Set {name} = on in postgresql.conf.",
                )
        if _setting(conn, "synchronous_commit") not in {"on", "remote_apply"}:
            conn.execute("SET synchronous_commit = on")
        if _setting(conn, "transaction_read_only") == "on":
            raise StoreError("the database only reads: it is a standby", advice="Connect to the primary.")
    except BaseException:
        conn.close()
        raise
    return conn


def take_name(conn: Connection, link: Link) -> None:
    """Hold this host's name for as long as the connection lives.

    Raises:
        StoreLocked: another process holds it.
    """
    taken = "SELECT pg_try_advisory_lock(hashtext(%s), hashtext('host ' || %s))"
    if conn.execute(taken, (link.schema, link.host)).fetchone() != (True,):
        raise StoreLocked(
            f"another process uses this database under the name {link.host!r}",
            advice="Give every host a name of its own.",
        )


def join(conn: Connection, link: Link) -> None:
    """Be one of those that work on the database, for as long as the connection lives: a move has it alone.

    Raises:
        StoreLocked: it is being moved.
    """
    if conn.execute("SELECT pg_try_advisory_lock_shared(hashtext(%s), 3)", (link.schema,)).fetchone() != (True,):
        raise StoreLocked(
            "the queue in this database is being moved", advice="Wait for the end of `svote-helper db copy`."
        )


def refuse_moved(conn: Connection, link: Link) -> None:
    """Refuse a database that a move has marked.

    Raises:
        StoreMoved: the queue is elsewhere.
    """
    unfinished, moved = (conn.execute(statements()["get_meta"], (name,)).fetchall() for name in (UNFINISHED, MOVED))
    refuse_marked(unfinished, moved, f"{link.shown()}, schema {link.schema}")


def need_ready(conn: Connection, link: Link, seals: Seals) -> None:
    """Look whether the schema is this version's and these are its hosts' keys; nothing is made or changed.

    Raises:
        NothingThere: there is no schema.
        StoreForeign: it is another version's.
        StoreError: this key file is not the hosts'.
        StoreCorrupt: its sealed word is damaged.
    """
    there = conn.execute("SELECT to_regclass('schema_version') IS NOT NULL").fetchone()
    if there != (True,):
        raise NothingThere(f"the schema {link.schema} has no queue", advice="Look at [store] url and schema_name.")
    if conn.execute("SELECT version FROM schema_version").fetchall() != [(len(migrations()),)]:
        raise StoreForeign(
            f"the schema {link.schema} is not of this version", advice="Bring all hosts to this version first."
        )
    _open_probe(read_fact(conn.execute(statements()["get_meta"], ("seal.check",)).fetchall()), seals)


def prepare(conn: Connection, link: Link, seals: Seals) -> Keys:
    """Make the schema or bring it up to date, one host at a time; the database's own keys.

    Raises:
        StoreForeign: the schema is another program's, or a newer version's.
        StoreError: this host's key file is not the others'.
        StoreCorrupt: a key is damaged.
    """
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 2)", (link.schema,))
        conn.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(link.schema)))
        _migrate(conn, link)
        keys = Keys(_key(conn, "key.rows"), _key(conn, "key.order"))
        _check_seals(conn, seals)
    return keys


def _migrate(conn: Connection, link: Link) -> None:
    tables = {row[0] for row in conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (link.schema,))}
    if tables and "schema_version" not in tables:
        raise StoreForeign(f"the schema {link.schema} is another program's")
    if not tables:
        conn.execute("CREATE TABLE schema_version (version BIGINT NOT NULL)")
        conn.execute("INSERT INTO schema_version VALUES (0)")
    ((version,),) = conn.execute("SELECT version FROM schema_version").fetchall()
    if version > len(migrations()):
        raise StoreForeign(
            f"the schema {link.schema} was written by a newer version (it is {version}, ours {len(migrations())})",
            advice="Start the version that wrote it, or a newer one.",
        )
    for step in migrations()[version:]:
        conn.execute(step.encode())
    conn.execute("UPDATE schema_version SET version = %s WHERE version <> %s", (len(migrations()), len(migrations())))


def _key(conn: Connection, name: str) -> bytes:
    text = _fact(conn, name, secrets.token_hex(32))
    if text is None:
        raise StoreCorrupt(f"the database is damaged: {name} is not what it was")
    return bytes.fromhex(text)


def _check_seals(conn: Connection, seals: Seals) -> None:
    """Refuse a key file that can not open what the other hosts sealed."""
    _open_probe(_fact(conn, "seal.check", seals.seal(_PROBE).hex()), seals)
    # From now on older keys are needed only for as long as what they sealed is kept.
    conn.execute(statements()["set_meta"], fact_row("seal.check", seals.seal(_PROBE).hex()))


def _open_probe(text: str | None, seals: Seals) -> None:
    try:
        sound = text is not None and seals.open(bytes.fromhex(text)) == _PROBE
    except (UnsealedError, ValueError):
        sound = False
    if not sound:
        raise StoreCorrupt("the database is damaged: its sealed word is not what it was")


def _fact(conn: Connection, name: str, fresh: str) -> str | None:
    """A remembered text, made when there is none."""
    conn.execute(statements()["add_meta"], fact_row(name, fresh))
    return read_fact(conn.execute(statements()["get_meta"], (name,)).fetchall())


def _setting(conn: Connection, name: str) -> str:
    ((value,),) = conn.execute("SELECT current_setting(%s)", (name,)).fetchall()
    return str(value)
