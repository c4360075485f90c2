"""PostgreSQL store without a server: URLs, row encryption, and statement names."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool.pool_async import WaitingClient

from helper.errors import StoreError, StoreKeyError, StoreUnreachable
from helper.store.keyring import Keyring
from helper.store.null_cipher import DecryptionError
from helper.store.postgres.connection import (
    CONNECT_SECONDS,
    create_connection_settings,
    find_system_authorities,
    translate,
)
from helper.store.postgres.reader import PostgresReader
from helper.store.sql_files import postgres_statements, sqlite_statements

LOCAL_DSNS = [
    "postgresql:///queue",
    "postgresql://me@localhost/queue",
    "postgresql://me@127.0.0.1:5433/queue?sslmode=disable",
    "postgresql://me@[::1]/queue",
    "host=/run/postgresql dbname=queue",
]
REMOTE_DSNS = ["db.example.org", "10.0.0.7", "localhost,db.example.org"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGTARGETSESSIONATTRS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("address", LOCAL_DSNS)
def test_local_connection_needs_no_tls(address: str) -> None:
    assert "verify" not in create_connection_settings(address, schema="s", host="one").conninfo


@pytest.mark.parametrize("host", REMOTE_DSNS)
def test_remote_connection_without_verified_tls_is_refused(host: str) -> None:
    conninfo = create_connection_settings(f"host={host} dbname=queue", schema="s", host="one").conninfo
    assert "sslmode=verify-full" in conninfo
    assert conninfo_to_dict(conninfo)["sslrootcert"] == find_system_authorities()
    conninfo = create_connection_settings(
        f"host={host} sslmode=verify-ca sslrootcert=ca.pem", schema="s", host="one"
    ).conninfo
    assert "sslmode=verify-ca" in conninfo
    for mode in ("disable", "allow", "prefer", "require"):
        with pytest.raises(StoreError, match=mode):
            create_connection_settings(f"host={host} sslmode={mode}", schema="s", host="one")


@pytest.mark.parametrize("mode", ["verify-ca", "require"])
def test_authorities_of_the_system_require_the_host_name(mode: str) -> None:
    with pytest.raises(StoreError, match=f"sslrootcert=system requires sslmode=verify-full, not sslmode={mode}"):
        create_connection_settings(f"host=localhost sslmode={mode} sslrootcert=system", schema="s", host="one")


def test_authorities_of_the_system_are_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libpq of psycopg's wheels does not find them by `system`: its OpenSSL has another directory."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    found = find_system_authorities()
    assert Path(found).is_absolute()
    assert b"BEGIN CERTIFICATE" in Path(found).read_bytes()
    file = tmp_path / "own.pem"
    file.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert find_system_authorities() == str(file)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    monkeypatch.setattr("helper.store.postgres.connection._AUTHORITY_FILES", ())
    assert find_system_authorities() == "system"


@pytest.mark.parametrize("attributes", ["", "any", "read-write", "primary"])
def test_only_a_primary_is_connected_to(attributes: str) -> None:
    url = "postgresql://me@a.example,b.example/queue" + (attributes and f"?target_session_attrs={attributes}")
    settings = create_connection_settings(url, schema="s", host="one")
    assert conninfo_to_dict(settings.conninfo)["target_session_attrs"] == "primary"
    assert settings.connect_seconds == 2 * CONNECT_SECONDS


def test_url_that_selects_a_standby_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="target_session_attrs=prefer-standby selects a standby"):
        create_connection_settings("host=a target_session_attrs=prefer-standby", schema="s", host="one")
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "read-only")
    with pytest.raises(StoreError, match="read-only"):
        create_connection_settings("host=localhost", schema="s", host="one")


def test_display_text_has_each_host_with_its_port() -> None:
    def shown(address: str) -> str:
        return create_connection_settings(address, schema="s", host="one").to_display_text()

    assert (
        shown("postgresql://me:secret@a.example:1,b.example:2/queue") == "postgresql://me@a.example:1,b.example:2/queue"
    )
    assert shown("postgresql://me@a.example,b.example/queue?port=3") == "postgresql://me@a.example:3,b.example:3/queue"
    assert shown("host=a.example,b.example dbname=queue") == "postgresql://a.example,b.example/queue"


def test_connection_error_names_each_host_and_what_to_do() -> None:
    error = psycopg.OperationalError(
        'connection failed: connection to server at "192.0.2.2", port 5432 failed: FATAL:  password authentication '
        'failed for user "helper"\nMultiple connection attempts failed. All failures were:\n'
        "- host: 'a.example', port: None, hostaddr: '192.0.2.1': connection is bad: connection to server at"
        ' "192.0.2.1", port 5432 failed: Connection refused\n\tIs the server running on that host?\n'
        "- host: 'b.example', port: None, hostaddr: '192.0.2.2': connection failed: connection to server at"
        ' "192.0.2.2", port 5432 failed: FATAL:  password authentication failed for user "helper"\n'
        "- host: 'c.example', port: None, hostaddr: '192.0.2.3': connection timeout expired"
    )
    translated = translate(error)
    assert isinstance(translated, StoreUnreachable)
    assert str(translated) == (
        'the database is unreachable: connection to server at "192.0.2.1", port 5432 failed: Connection refused; '
        'connection to server at "192.0.2.2", port 5432 failed: FATAL:  password authentication failed for user '
        "\"helper\"; host: 'c.example', port: None, hostaddr: '192.0.2.3': connection timeout expired"
    )
    assert "~/.pgpass" in translated.advice
    assert str(translate(psycopg.OperationalError("is lost\nmore"))) == "the database is unreachable: is lost"
    for text in ("unsupported startup parameter: options", "currently doesn't support command-line options"):
        assert "without a pooler" in cast("StoreError", translate(psycopg.OperationalError(f"FATAL:  {text}"))).advice


@pytest.mark.parametrize(("value", "seconds"), [("", 10.0), ("?connect_timeout=0", 10.0), ("?connect_timeout=3", 6.0)])
def test_connect_seconds_are_for_all_hosts(value: str, seconds: float) -> None:
    settings = create_connection_settings(f"postgresql://a.example,b.example/queue{value}", schema="s", host="one")
    assert settings.connect_seconds == seconds


def test_remote_host_of_environment_requires_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "db.example.org")
    assert "verify-full" in create_connection_settings("dbname=queue", schema="s", host="one").conninfo
    monkeypatch.setenv("PGSERVICE", "queue")
    with pytest.raises(StoreError, match="service"):
        create_connection_settings("dbname=queue", schema="s", host="one")


@pytest.mark.parametrize(
    "address",
    [
        "host=evil.example,localhost hostaddr=,127.0.0.1 dbname=queue",
        "postgresql://me@/queue?host=evil.example,localhost&hostaddr=,127.0.0.1",
        "host=localhost hostaddr=127.0.0.1,127.0.0.2",
        "host=a.example,b.example hostaddr=192.0.2.1",
    ],
)
def test_connection_settings_hostaddr_with_several_hosts_is_refused(address: str) -> None:
    with pytest.raises(StoreError, match="hostaddr with several hosts"):
        create_connection_settings(address, schema="s", host="one")


def test_connection_settings_remote_hostaddr_requires_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOSTADDR", "192.0.2.1")
    link = create_connection_settings("postgresql://me@localhost/queue", schema="s", host="one")
    assert "verify-full" in link.conninfo
    assert "hostaddr=192.0.2.1" in link.conninfo, "libpq gets the checked settings"
    assert link.to_display_text() == "postgresql://me@localhost/queue?hostaddr=192.0.2.1"
    monkeypatch.setenv("PGHOST", "a.example,b.example")
    with pytest.raises(StoreError, match="hostaddr with several hosts"):
        create_connection_settings("dbname=queue", schema="s", host="one")


def test_connection_settings_with_one_remote_host_requires_tls() -> None:
    assert "verify-full" in create_connection_settings("host=localhost,db.example", schema="s", host="one").conninfo
    assert "verify" not in create_connection_settings("host=localhost,/run/postgresql", schema="s", host="one").conninfo


def test_invalid_names_are_refused_without_showing_password() -> None:
    for schema in ("", "a b", "Upper", "x;drop", "é"):
        with pytest.raises(StoreError, match="schema"):
            create_connection_settings("dbname=queue", schema=schema, host="one")
    for host in ("", "a\nb", "h" * 64):
        with pytest.raises(StoreError, match="host"):
            create_connection_settings("dbname=queue", schema="s", host=host)
    with pytest.raises(StoreError, match="URL") as refused:
        create_connection_settings("postgresql://me:hush@[", schema="s", host="one")
    assert "hush" not in str(refused.value)
    assert "hush" not in repr(create_connection_settings("postgresql://me:hush@localhost/q", schema="s", host="one"))


def test_sealed_row_opens_with_key_and_detects_changes() -> None:
    old, new = Keyring([b"o" * 32]), Keyring([b"n" * 32, b"o" * 32])
    sealed = old.encrypt(b"word")
    assert b"word" not in sealed
    assert sealed != old.encrypt(b"word")
    assert new.decrypt(sealed) == b"word"
    assert new.nullifier_tags(b"nullifier")[1:] == old.nullifier_tags(b"nullifier")
    for index in range(4, len(sealed)):
        with pytest.raises(DecryptionError):
            old.decrypt(sealed[:index] + bytes([sealed[index] ^ 1]) + sealed[index + 1 :])
    for short in (sealed[:-1], sealed[:8]):
        with pytest.raises(DecryptionError):
            old.decrypt(short)
    with pytest.raises(DecryptionError):
        old.decrypt(new.encrypt(b"word"))
    old.missing_keys = frozenset(new.key_ids)
    with pytest.raises(StoreKeyError, match="key that this host does not have"):
        old.decrypt(new.encrypt(b"word"))


def test_both_engines_define_every_statement() -> None:
    only_a_file_has = {"all_shares", "tombstone_count", "shares_of_tag"}
    assert set(sqlite_statements()) - set(postgres_statements()) == only_a_file_has
    assert [name for name, sql in postgres_statements().items() if b"--" in sql] == []
    assert [name for name, sql in sqlite_statements().items() if "--" in sql] == []


def test_sqlite_store_does_not_import_postgres() -> None:
    script = (
        "import sys, helper.app.service, helper.store.sqlite.store; print([m for m in sys.modules if 'psycopg' in m])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True, capture_output=True, text=True
    )
    assert completed.stdout.strip() == "[]"


class FullPool:
    """A pool without a free connection: each reader waits as the real pool lets it wait."""

    def __init__(self) -> None:
        self.waiting: WaitingClient[Any] = WaitingClient()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        yield await self.waiting.wait(60)


class IdleConnection:
    """A connection whose statements return no rows, after one iteration of the event loop."""

    description = None

    async def execute(self, _sql: bytes, _params: object) -> IdleConnection:
        return self


@pytest.mark.parametrize("iterations", range(8))
async def test_reader_cancelled_while_it_gets_a_connection_is_cancelled(iterations: int) -> None:
    reader = PostgresReader(create_connection_settings("dbname=queue", schema="s", host="one"), cast("Any", None))
    pool = FullPool()
    reader._pool = cast("Any", pool)
    reading = asyncio.create_task(reader.run(b"SELECT"))
    await asyncio.sleep(0.01)
    await pool.waiting.set(IdleConnection())
    for _ in range(iterations):
        await asyncio.sleep(0)
    was_done = reading.done()
    reading.cancel()
    await asyncio.wait([reading], timeout=5)
    assert reading.cancelled() is not was_done
