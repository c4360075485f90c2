"""Checks the server and the keys, and creates or upgrades the schema, when a host connects."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from typing import Final

import psycopg
from psycopg import sql

from helper.errors import (
    NotFound,
    StoreCorrupt,
    StoreDisplaced,
    StoreError,
    StoreForeign,
    StoreLocked,
    StoreRefused,
    StoreUnreachable,
)
from helper.store.keyring import Keyring, missing_key_error
from helper.store.postgres.connection import (
    CERTIFICATE_REFUSED,
    POOLER_ADVICE,
    PRIVILEGES_ADVICE,
    ConnectionSettings,
    read_server_certificates,
    translate,
    translating,
)
from helper.store.sql_files import FIRST_VERSION, check_version, postgres_statements, read_migrations
from helper.store.table_rows import (
    KEY_CHECK,
    KEYS_IN_USE,
    RANK_KEY,
    ROW_CHECK_KEY,
    Row,
    make_meta_row,
    read_key,
    read_meta_value,
    refuse_marked,
)
from helper.store.transaction import DatabaseKeys

OLDEST_SERVER: Final = 150_000
_STATEMENT_LOGS: Final = (
    ("log_statement", ("none", "ddl", "mod")),
    ("log_min_duration_statement", ("-1",)),
    ("log_min_duration_sample", ("-1",)),
    ("log_transaction_sample_rate", ("0",)),
)
"""Settings that can log statement parameters, and the values with which they do not."""
_OTHER_LOGS: Final = (("auto_explain.log_min_duration", ("", "-1")), ("pgaudit.log_parameter", ("", "off")))
"""The same for settings of extensions."""
_SET_SYNCHRONOUS_COMMIT: Final = b"""
SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')
  WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false)"""
"""Sets it for the session, so that a later change of the server's or the role's default has no effect."""
_LOCK_SECONDS: Final = 1
"""Time limit for a lock of a host that starts, or of a copy."""

Connection = psycopg.Connection[Row]


@cache
def migrations() -> tuple[str, ...]:
    """Return the migrations of the schema on PostgreSQL."""
    return read_migrations("helper.store.postgres")


def connect(settings: ConnectionSettings) -> Connection:
    """Open a writing connection whose commits are on disk when they return.

    Raises:
        StoreForeign: the server is too old.
        StoreUnreachable: a certificate was refused; the message states the reason.
        StoreRefused: sessions are read-only, or a pooler is between this host and the server.
        StoreError: a server setting makes commits unsafe or logs parameters, or the encoding is not UTF8.
    """
    try:
        conn: Connection = psycopg.connect(settings.conninfo, **settings.options())
    except psycopg.OperationalError as error:
        raise explain_refused_certificate(error, settings) from error
    try:
        conn.prepare_threshold = 2
        if conn.info.server_version < OLDEST_SERVER:
            raise StoreForeign("the server is older than PostgreSQL 15")
        if (encoding := _read_server_setting(conn, "server_encoding")) != "UTF8":
            raise StoreError(
                f"the database has the encoding {encoding} and cannot store every text",
                advice="Create a database WITH ENCODING 'UTF8' TEMPLATE template0 for the helper.",
            )
        for name in ("fsync", "full_page_writes"):
            if _read_server_setting(conn, name) != "on":
                raise StoreError(
                    f"the server has {name} = off and can lose committed data",
                    advice=f"Set {name} = on in postgresql.conf.",
                )
        _refuse_parameter_logging(conn)
        conn.execute(_SET_SYNCHRONOUS_COMMIT)
        _require_own_session(conn, settings)
    except BaseException:
        conn.close()
        raise
    return conn


def _require_own_session(conn: Connection, settings: ConnectionSettings) -> None:
    """Check that the session is this connection's own, with its settings, and that it can write.

    A pooler reports process ids of its own and drops settings. If it shares sessions, it also shares locks on names.

    Raises:
        StoreRefused: it is not.
    """
    required = {
        "search_path": settings.schema,
        "transaction_isolation": "read committed",
        "TimeZone": "UTC",
        "session_replication_role": "origin",  # otherwise deleted shares leave their messages and histories
    }
    wrong = [name for name, value in required.items() if _read_server_setting(conn, name) != value]
    if conn.execute("SELECT pg_backend_pid()").fetchone() != (conn.info.backend_pid,):
        wrong.append("the process id")
    if wrong:
        raise StoreRefused(
            f"the database session is not as requested ({', '.join(wrong)}): a pooler is in between, or the role has "
            "this setting",
            advice=POOLER_ADVICE,
        )
    if _read_server_setting(conn, "transaction_read_only") == "on":
        raise StoreRefused(
            "sessions on the database server are read-only",
            advice="Free space if a provider made the server read-only because its disk is full. Otherwise set "
            "default_transaction_read_only = off for the helper's role.",
        )


def check_connection(settings: ConnectionSettings) -> float | None:
    """Connect as a host does, without changes. Blocks.

    Returns:
        Unix time at which the first certificate of the servers expires; None for a connection without TLS.

    Raises:
        StoreError: as `connect`, or no server could be reached.
    """
    with translating(), closing(connect(settings)) as conn:
        if require_privileges(conn, settings):
            _read_version(conn, settings)
            refuse_moved(conn, settings)
    certificates = read_server_certificates(settings.conninfo)
    return min((server.expires_at for server in certificates if server.expires_at is not None), default=None)


def explain_refused_certificate(error: psycopg.Error, settings: ConnectionSettings) -> Exception:
    """Return an error that states why a server's certificate was refused; for any other reason, the same error.

    Blocks for up to the time of another attempt to connect.
    """
    translated = translate(error)
    if CERTIFICATE_REFUSED not in str(error) or not isinstance(translated, StoreError):
        return error
    certificates = read_server_certificates(settings.conninfo)
    reasons = [f"{server.host}: {server.problem}" for server in certificates if server.problem is not None]
    return StoreUnreachable(f"{translated} ({'; '.join(reasons)})", advice=translated.advice) if reasons else error


def _refuse_parameter_logging(conn: Connection) -> None:
    """Refuse a server that logs statement parameters.

    They contain the nullifier of each share on arrival, so the log would link arrivals to reveals.
    """
    parameters_cut = _read_server_setting(conn, "log_parameter_max_length") == "0"
    for name, silent_values in _OTHER_LOGS if parameters_cut else (*_STATEMENT_LOGS, *_OTHER_LOGS):
        if _read_server_setting(conn, name) not in silent_values:
            raise StoreError(
                f"the server logs statement parameters ({name} is set), which links arrivals to reveals",
                advice="As superuser, run ALTER ROLE … SET log_parameter_max_length = 0 for the helper's role, and "
                "disable auto_explain and pgaudit.log_parameter for it.",
            )


def acquire_host_name(conn: Connection, settings: ConnectionSettings) -> None:
    """Lock this host's name for the lifetime of the connection.

    Raises:
        StoreLocked: another process has locked it.
    """
    refusal = StoreLocked(
        f"another process uses this database under the name {settings.host!r}",
        advice="Configure a different name on each host. If no other host has it, the server still runs the last "
        "statement of a process that was killed, and waits for a lock or a standby: see pg_stat_activity.",
    )
    name = (settings.schema, settings.host)
    with waiting_briefly(conn, refusal):
        conn.execute("SELECT pg_advisory_lock(hashtext(%s), hashtext('host ' || %s))", name)


@contextmanager
def waiting_briefly(conn: Connection, refusal: StoreLocked) -> Iterator[None]:
    """Limit the wait for a lock, and raise the refusal if another host keeps it.

    A lock may be free a moment later: the server notices late that a connection has ended, and the end of a transaction
    releases its locks one after the other.
    """
    conn.execute(f"SET lock_timeout = '{_LOCK_SECONDS}s'")
    try:
        yield
    except psycopg.errors.LockNotAvailable:
        raise refusal from None
    conn.execute("RESET lock_timeout")


def refuse_host_name_in_use(settings: ConnectionSettings) -> None:
    """Check early in the start that this host's name is not in use.

    Other errors, such as an unreachable database, are ignored here and reported when the store is opened.

    Raises:
        StoreLocked: another process has locked it.
    """
    with suppress(psycopg.Error), psycopg.connect(settings.conninfo, **settings.options(reading=True)) as conn:
        acquire_host_name(conn, settings)
        conn.execute("SELECT pg_advisory_unlock_all()")  # the server may detect the end of the connection late


def acquire_host_lock(conn: Connection, settings: ConnectionSettings) -> None:
    """Acquire the hosts' shared lock for the lifetime of the connection. A copy acquires it exclusively.

    An upgrade of the schema needs it exclusively too. One host at a time has it and prepares the schema, in one
    transaction: otherwise hosts that start together would keep each other from the upgrade. A host that proves also
    holds a lock that says so (`has_prover`).

    Raises:
        StoreLocked: the queue is being copied.
    """
    conn.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 2)", (settings.schema,))
    refusal = StoreLocked(
        "the queue in this database is being copied", advice="Wait until `svote-helper db copy` has finished."
    )
    with waiting_briefly(conn, refusal):
        conn.execute("SELECT pg_advisory_lock_shared(hashtext(%s), 3)", (settings.schema,))
    if settings.proves:
        conn.execute("SELECT pg_advisory_lock_shared(hashtext(%s), hashtext('prover'))", (settings.schema,))


def refuse_moved(conn: Connection, settings: ConnectionSettings) -> None:
    """Refuse a database that a copy has marked.

    Raises:
        StoreMoved: the queue is in another database.
    """
    marks = conn.execute(postgres_statements()["get_marks"]).fetchall()
    refuse_marked(marks, f"{settings.to_display_text()}, schema {settings.schema}")


def require_same_queue(conn: Connection, settings: ConnectionSettings, keys: DatabaseKeys) -> None:
    """Check after a lost connection that the database still contains the queue, because a missing one is created.

    Raises:
        StoreDisplaced: the schema is missing or contains another queue: it was dropped, or this is another server.
    """
    is_same = conn.execute("SELECT to_regclass('meta') IS NOT NULL").fetchone() == (True,)
    if is_same:
        is_same = conn.execute(postgres_statements()["get_meta"], (ROW_CHECK_KEY,)).fetchall() == [
            make_meta_row(ROW_CHECK_KEY, keys.row_check.hex())
        ]
    if not is_same:
        raise StoreDisplaced(
            f"{settings.to_display_text()}, schema {settings.schema}, no longer contains the queue of this host",
            advice="Restore the database, or start the server that has the queue; the helper then continues "
            "automatically. Only if the queue is permanently lost, restart the helper to begin with this database.",
        )


def require_privileges(conn: Connection, settings: ConnectionSettings) -> bool:
    """Check that the role may use every table and sequence of the schema, or may create the schema.

    Returns:
        Whether the schema contains a queue.

    Raises:
        StoreRefused: it may not.
    """
    usable = conn.execute(postgres_statements()["schema_privilege"], (settings.schema,)).fetchall()
    if not usable:
        if conn.execute("SELECT has_database_privilege(current_database(), 'CREATE')").fetchone() != (True,):
            raise StoreRefused(
                f"the role may not create the schema {settings.schema}",
                advice="Make the role the owner of the database, or grant it CREATE on the database.",
            )
        return False
    refused = [row[0] for row in conn.execute(postgres_statements()["missing_privileges"])]
    if usable != [(True,)]:
        refused = [f"the schema {settings.schema}"]
    if refused:
        raise StoreRefused(f"nothing was written: no privileges on {', '.join(refused)}", advice=PRIVILEGES_ADVICE)
    return conn.execute("SELECT to_regclass('schema_version') IS NOT NULL").fetchone() == (True,)


def require_ready(conn: Connection, settings: ConnectionSettings, keyring: Keyring) -> None:
    """Check the schema version and the keys, without changes, and set the missing keys of the keyring.

    Raises:
        NotFound: the schema does not exist.
        StoreForeign: it has another version.
        StoreError: the key file differs from that of the hosts.
        StoreCorrupt: the key check value is damaged.
    """
    exists = conn.execute("SELECT to_regclass('schema_version') IS NOT NULL").fetchone()
    if exists != (True,):
        raise NotFound(f"the schema {settings.schema} has no queue", advice="Check [store] url and schema_name.")
    _read_version(conn, settings, upgrade="Upgrade all hosts to this version first.")
    key_check, in_use = (
        conn.execute(postgres_statements()["get_meta"], (key,)).fetchall() for key in (KEY_CHECK, KEYS_IN_USE)
    )
    keyring.check_probe(read_meta_value(key_check))
    keyring.missing_keys = _parse_key_ids(in_use) - set(keyring.key_ids)


def prepare_schema(conn: Connection, settings: ConnectionSettings, keyring: Keyring) -> DatabaseKeys:
    """Create or upgrade the schema, and return the keys of the database. Also sets the missing keys of the keyring.

    The caller has the lock of `acquire_host_lock` in this transaction, or exclusively.

    Raises:
        StoreForeign: the schema belongs to another program or a newer version.
        StoreLocked: it must be upgraded, and another host uses it.
        StoreError: this host's key file differs from that of the others, or a running host lacks its first key.
        StoreKeyError: rows are encrypted with a key that this host does not have.
        StoreCorrupt: a key is damaged.
    """
    _publish_key_ids(conn, settings, keyring)
    with conn.transaction():
        if not conn.execute(postgres_statements()["schema_privilege"], (settings.schema,)).fetchall():
            # even with IF NOT EXISTS, this needs the right to create schemas
            conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(settings.schema)))
        _migrate(conn, settings)
        keys = DatabaseKeys(_load_key(conn, ROW_CHECK_KEY), _load_key(conn, RANK_KEY))
        _check_keyring(conn, settings, keyring)
        keyring.missing_keys = _record_keys(conn, keyring)
        for key in keyring.missing_keys:
            if conn.execute(postgres_statements()["uses_key"], {"id": key}).fetchone() == (True,):
                raise missing_key_error()
    return keys


def _migrate(conn: Connection, settings: ConnectionSettings) -> None:
    tables = {
        row[0] for row in conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (settings.schema,))
    }
    if tables and "schema_version" not in tables:
        raise StoreForeign(f"the schema {settings.schema} belongs to another program")
    if not tables:
        conn.execute("CREATE TABLE schema_version (version BIGINT NOT NULL)")
        conn.execute("INSERT INTO schema_version VALUES (0)")
    latest, version = _latest_version(), _read_version(conn, settings)
    if 0 < version < latest:
        refusal = StoreLocked(
            f"the schema {settings.schema} must be upgraded, and hosts of an older version use it",
            advice="Stop all hosts, back up the queue, and start all of them with this version; see docs/cluster.md.",
        )
        with waiting_briefly(conn, refusal):  # for the lock of all hosts, as a copy does
            conn.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 3)", (settings.schema,))
    for step in migrations()[max(0, version - FIRST_VERSION + 1) :]:
        conn.execute(step.encode())
    conn.execute("UPDATE schema_version SET version = %s WHERE version <> %s", (latest, latest))


def _latest_version() -> int:
    return FIRST_VERSION - 1 + len(migrations())


def _read_version(conn: Connection, settings: ConnectionSettings, *, upgrade: str = "") -> int:
    """Return the version of the schema, 0 for a new one; see `check_version`."""
    ((version,),) = conn.execute("SELECT version FROM schema_version").fetchall()
    check_version(version, _latest_version(), f"the schema {settings.schema}", upgrade=upgrade)
    return int(version)


def _load_key(conn: Connection, name: str) -> bytes:
    return read_key(_get_or_store_meta(conn, name, secrets.token_hex(32)), name)


def _check_keyring(conn: Connection, settings: ConnectionSettings, keyring: Keyring) -> None:
    """Refuse a key file that cannot decrypt the other hosts' rows, or that encrypts with a key they lack."""
    used = keyring.check_probe(read_meta_value(_get_or_store_meta(conn, KEY_CHECK, keyring.make_probe())))
    if used != keyring.key_ids[0]:
        _require_key_on_all_hosts(conn, settings, keyring.key_ids[0])
    # From now on, older keys are needed only for rows that were encrypted with them.
    conn.execute(postgres_statements()["set_meta"], make_meta_row(KEY_CHECK, keyring.make_probe()))


def _record_keys(conn: Connection, keyring: Keyring) -> frozenset[bytes]:
    """Record the identifiers of this host's keys. Returns those that other hosts have recorded and it lacks."""
    own = frozenset(keyring.key_ids)
    recorded = _parse_key_ids(_get_or_store_meta(conn, KEYS_IN_USE, _format_key_ids(own)))
    if not own <= recorded:
        conn.execute(postgres_statements()["set_meta"], make_meta_row(KEYS_IN_USE, _format_key_ids(own | recorded)))
    return recorded - own


def _format_key_ids(ids: Iterable[bytes]) -> str:
    return " ".join(sorted(key.hex() for key in ids))


def _parse_key_ids(rows: list[Row]) -> frozenset[bytes]:
    text = read_meta_value(rows)
    if text is None:
        raise StoreCorrupt(f"the database is damaged: {KEYS_IN_USE} failed its check")
    return frozenset(map(bytes.fromhex, text.split()))


def _publish_key_ids(conn: Connection, settings: ConnectionSettings, keyring: Keyring) -> None:
    """Publish the ids of this host's keys as advisory locks, held for the lifetime of the connection."""
    for name in keyring.key_ids:
        conn.execute(
            "SELECT pg_advisory_lock_shared(hashtext(%s), hashtext('key ' || %s))", (settings.schema, name.hex())
        )


def _require_key_on_all_hosts(conn: Connection, settings: ConnectionSettings, name: bytes) -> None:
    """Refuse to encrypt with a key that a running host does not have.

    That host could not recognize the nullifiers of these shares in blocks.
    """
    if conn.execute(
        postgres_statements()["hosts_without_key"], {"schema": settings.schema, "name": name.hex()}
    ).fetchall():
        raise StoreError(
            "a running host lacks the first key of this key file and could not decrypt data encrypted with it",
            advice="Put the new key second in every host's key file and restart the hosts one by one; then put it "
            "first and restart them again.",
        )


def _get_or_store_meta(conn: Connection, name: str, fresh: str) -> list[Row]:
    """Return the row of a text; store `fresh` first if there is no row."""
    conn.execute(postgres_statements()["add_meta"], make_meta_row(name, fresh))
    return conn.execute(postgres_statements()["get_meta"], (name,)).fetchall()


def _read_server_setting(conn: Connection, name: str) -> str:
    """Return a server setting, "" if the server does not have it."""
    ((value,),) = conn.execute("SELECT coalesce(current_setting(%s, true), '')", (name,)).fetchall()
    return str(value)
