"""What of the PostgreSQL store needs no server: addresses, seals, and the names of its statements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helper.errors import StoreError
from helper.store.postgres.link import make_link
from helper.store.postgres.seals import Seals, UnsealedError
from helper.store.postgres.tx import statements
from helper.store.queries import queries

NEAR = [
    "postgresql:///queue",
    "postgresql://me@localhost/queue",
    "postgresql://me@127.0.0.1:5433/queue?sslmode=disable",
    "postgresql://me@[::1]/queue",
    "host=/run/postgresql dbname=queue",
]
FAR = ["db.example.org", "10.0.0.7", "localhost,db.example.org"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("address", NEAR)
def test_on_this_host_a_connection_needs_no_tls(address: str) -> None:
    assert "verify" not in make_link(address, schema="s", host="one").conninfo


@pytest.mark.parametrize("host", FAR)
def test_over_a_network_the_server_is_verified_or_it_is_refused(host: str) -> None:
    words = make_link(f"host={host} dbname=queue", schema="s", host="one").conninfo
    assert "sslmode=verify-full" in words
    assert "sslrootcert=system" in words
    kept = make_link(f"host={host} sslmode=verify-ca sslrootcert=ca.pem", schema="s", host="one").conninfo
    assert "sslmode=verify-ca" in kept
    for mode in ("disable", "allow", "prefer", "require"):
        with pytest.raises(StoreError, match=mode):
            make_link(f"host={host} sslmode={mode}", schema="s", host="one")


def test_a_host_of_the_environment_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "db.example.org")
    assert "verify-full" in make_link("dbname=queue", schema="s", host="one").conninfo
    monkeypatch.setenv("PGSERVICE", "queue")
    with pytest.raises(StoreError, match="service"):
        make_link("dbname=queue", schema="s", host="one")


def test_names_that_will_not_do_are_refused_and_a_password_is_not_shown() -> None:
    for schema in ("", "a b", "Upper", "x;drop", "é"):
        with pytest.raises(StoreError, match="schema"):
            make_link("dbname=queue", schema=schema, host="one")
    for host in ("", "a\nb", "h" * 64):
        with pytest.raises(StoreError, match="host"):
            make_link("dbname=queue", schema="s", host=host)
    with pytest.raises(StoreError, match="address") as refused:
        make_link("postgresql://me:hush@[", schema="s", host="one")
    assert "hush" not in str(refused.value)
    assert "hush" not in repr(make_link("postgresql://me:hush@localhost/q", schema="s", host="one"))


def test_what_is_sealed_is_opened_by_whoever_has_the_key_and_shows_when_it_was_changed() -> None:
    old, new = Seals([b"o" * 32]), Seals([b"n" * 32, b"o" * 32])
    sealed = old.seal(b"word")
    assert b"word" not in sealed
    assert sealed != old.seal(b"word")
    assert new.open(sealed) == b"word"
    assert new.tags(b"nullifier")[1:] == old.tags(b"nullifier")
    for place in range(4, len(sealed)):
        with pytest.raises(UnsealedError):
            old.open(sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :])
    for short in (sealed[:-1], sealed[:8]):
        with pytest.raises(UnsealedError):
            old.open(short)
    with pytest.raises(StoreError, match="key that this host does not have"):
        old.open(new.seal(b"word"))
    for keys in ([], [b"short"]):
        with pytest.raises(StoreError, match="key file"):
            Seals(keys)


def test_both_databases_have_a_statement_for_all_that_operations_ask() -> None:
    only_a_file_has = {
        "every_share", "tombstone_count", "set_aside_ids", "last_share_id", "waiting_ids", "under_way_ids", "list_one",
        "mac_by_index",
    }  # fmt: skip
    assert set(queries()) - set(statements()) == only_a_file_has
    assert [name for name, sql in statements().items() if b"--" in sql] == []


def test_sqlite_loads_nothing_of_it() -> None:
    look = "import sys, helper.app, helper.store.sqlite; print([m for m in sys.modules if 'psycopg' in m])"
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=Path(__file__).parents[3], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
