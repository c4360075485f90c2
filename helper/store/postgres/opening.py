"""Making and opening the schema in a database: everything that refuses a start."""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any, Final

import psycopg
from psycopg import sql

from helper.errors import NothingThere, StoreCorrupt, StoreError, StoreForeign, StoreLocked
from helper.store.migration.marks import refuse_marked
from helper.store.migration.tables import MOVED, UNFINISHED
from helper.store.postgres.connection import ConnectionSettings
from helper.store.postgres.keyring import NAME_BYTES, DecryptionError, Keyring
from helper.store.postgres.transaction import statements
from helper.store.transaction import Keys, fact_row, read_fact

OLDEST_SERVER: Final = 150_000
_STATEMENT_LOGS: Final = (
    ("log_statement", ("none", "ddl", "mod")),
    ("log_min_duration_statement", ("-1",)),
    ("log_min_duration_sample", ("-1",)),
    ("log_transaction_sample_rate", ("0",)),
)
"""What writes questions into the server's log, with their parameters, and what each is when it does not."""
_OTHER_LOGS: Final = (("auto_explain.log_min_duration", ("", "-1")), ("pgaudit.log_parameter", ("", "off")))
"""The same of modules, whatever is set for the server's own."""
_PROBE: Final = b"svote-helper"
_NAME_SECONDS: Final = 1
"""How long a name that is held is waited for."""

Connection = psycopg.Connection[tuple[Any, ...]]


@cache
def migrations() -> tuple[str, ...]:
    """The migrations in order; the n-th (from 1) leads to version n."""
    folder = resources.files("helper.store.postgres") / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(file.read_text("utf-8") for file in files)


def connect(link: ConnectionSettings) -> Connection:
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
        _need_discretion(conn)
        if _setting(conn, "synchronous_commit") not in {"on", "remote_apply"}:
            conn.execute("SET synchronous_commit = on")
        if _setting(conn, "transaction_read_only") == "on":
            raise StoreError("the database only reads: it is a standby", advice="Connect to the primary.")
    except BaseException:
        conn.close()
        raise
    return conn


def _need_discretion(conn: Connection) -> None:
    """Refuse a server that writes the parameters of questions into its log: when a share arrives, it is asked with the
    share's own nullifier whether that is spent.
    """
    bare = _setting(conn, "log_parameter_max_length") == "0"
    for name, silent in _OTHER_LOGS if bare else (*_STATEMENT_LOGS, *_OTHER_LOGS):
        if _setting(conn, name) not in silent:
            raise StoreError(
                f"the database writes into its log what it is asked ({name} is set): which joins arrivals to reveals",
                advice="As its superuser: ALTER ROLE … SET log_parameter_max_length = 0, for the helper's role; and no "
                "auto_explain and no pgaudit.log_parameter for it.",
            )


def take_name(conn: Connection, link: ConnectionSettings) -> None:
    """Hold this host's name for as long as the connection lives. The server waits for it a moment: it notices the end
    of a former holder's connection a little late.

    Raises:
        StoreLocked: another process holds it.
    """
    conn.execute(f"SET lock_timeout = '{_NAME_SECONDS}s'")
    try:
        name = (link.schema, link.host)
        conn.execute("SELECT pg_advisory_lock(hashtext(%s), hashtext('host ' || %s))", name)
    except psycopg.errors.LockNotAvailable:
        raise StoreLocked(
            f"another process uses this database under the name {link.host!r}",
            advice="Give every host a name of its own.",
        ) from None
    conn.execute("RESET lock_timeout")


def refuse_held_name(link: ConnectionSettings) -> None:
    """Take this host's name and give it back: whether it is free is known before anything else is loaded. Whatever else
    is wrong, a database that cannot be reached too, is for the opening to say.

    Raises:
        StoreLocked: another process holds it.
    """
    with suppress(psycopg.Error), psycopg.connect(link.conninfo, **link.options(reading=True)) as conn:
        take_name(conn, link)
        conn.execute("SELECT pg_advisory_unlock_all()")  # not by the connection's end, of which the server hears late


def join(conn: Connection, link: ConnectionSettings) -> None:
    """Be one of those that work on the database, for as long as the connection lives: a move has it alone.

    Raises:
        StoreLocked: it is being moved.
    """
    if conn.execute("SELECT pg_try_advisory_lock_shared(hashtext(%s), 3)", (link.schema,)).fetchone() != (True,):
        raise StoreLocked(
            "the queue in this database is being moved", advice="Wait for the end of `svote-helper db copy`."
        )


def refuse_moved(conn: Connection, link: ConnectionSettings) -> None:
    """Refuse a database that a move has marked.

    Raises:
        StoreMoved: the queue is elsewhere.
    """
    unfinished, moved = (conn.execute(statements()["get_meta"], (name,)).fetchall() for name in (UNFINISHED, MOVED))
    refuse_marked(unfinished, moved, f"{link.shown()}, schema {link.schema}")


def need_ready(conn: Connection, link: ConnectionSettings, seals: Keyring) -> None:
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


def prepare(conn: Connection, link: ConnectionSettings, seals: Keyring) -> Keys:
    """Make the schema or bring it up to date, one host at a time; the database's own keys.

    Raises:
        StoreForeign: the schema is another program's, or a newer version's.
        StoreError: this host's key file is not the others', or they do not have its first key.
        StoreCorrupt: a key is damaged.
    """
    _show_keys(conn, link, seals)
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 2)", (link.schema,))
        conn.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(link.schema)))
        _migrate(conn, link)
        keys = Keys(_key(conn, "key.rows"), _key(conn, "key.order"))
        _check_seals(conn, link, seals)
    return keys


def _migrate(conn: Connection, link: ConnectionSettings) -> None:
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


def _check_seals(conn: Connection, link: ConnectionSettings, seals: Keyring) -> None:
    """Refuse a key file that can not open what the other hosts sealed, or that seals what they can not open."""
    told = _fact(conn, "seal.check", seals.seal(_PROBE).hex())
    _open_probe(told, seals)
    fresh = seals.seal(_PROBE).hex()
    if told is not None and told[: 2 * NAME_BYTES] != fresh[: 2 * NAME_BYTES]:
        _need_known(conn, link, seals.names[0])
    # From now on older keys are needed only for as long as what they sealed is kept.
    conn.execute(statements()["set_meta"], fact_row("seal.check", fresh))


def _show_keys(conn: Connection, link: ConnectionSettings, seals: Keyring) -> None:
    """Have others see which keys this host has while the connection lives; their names tell nothing of them."""
    for name in seals.names:
        conn.execute("SELECT pg_advisory_lock_shared(hashtext(%s), hashtext('key ' || %s))", (link.schema, name.hex()))


def _need_known(conn: Connection, link: ConnectionSettings, name: bytes) -> None:
    """Refuse to seal with a key that a host that lives does not have: it would not know the nullifiers of these shares
    when the chain counts them, and what it has taken in no other host looks through again.
    """
    if conn.execute(statements()["hosts_without_key"], {"schema": link.schema, "name": name.hex()}).fetchall():
        raise StoreError(
            "another host lives that does not have the key that comes first here: it could not work on what that seals",
            advice="Put the new key second in every host's key file and start them again one after the other; "
            "then put it first, and start them again likewise.",
        )


def _open_probe(text: str | None, seals: Keyring) -> None:
    try:
        sound = text is not None and seals.open(bytes.fromhex(text)) == _PROBE
    except (DecryptionError, ValueError):
        sound = False
    if not sound:
        raise StoreCorrupt("the database is damaged: its sealed word is not what it was")


def _fact(conn: Connection, name: str, fresh: str) -> str | None:
    """A remembered text, made when there is none."""
    conn.execute(statements()["add_meta"], fact_row(name, fresh))
    return read_fact(conn.execute(statements()["get_meta"], (name,)).fetchall())


def _setting(conn: Connection, name: str) -> str:
    """A setting as the server tells it, "" where it knows none of this name."""
    ((value,),) = conn.execute("SELECT coalesce(current_setting(%s, true), '')", (name,)).fetchall()
    return str(value)
