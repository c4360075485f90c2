"""PostgreSQL clusters for tests."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, urlencode

import psycopg

from devnet import postgres
from devnet.postgres import ClusterError, find_binaries
from tests.support.process import TIMEOUT_SECONDS, find_free_port

__all__ = [
    "REQUIRE_NO_STANDBY",
    "REQUIRE_STANDBY",
    "Cluster",
    "NetworkCluster",
    "Standby",
    "find_binaries",
]

REQUIRE_STANDBY: Final = "ALTER SYSTEM SET synchronous_standby_names = '*';\nSELECT pg_reload_conf();"
REQUIRE_NO_STANDBY: Final = "ALTER SYSTEM SET synchronous_standby_names = '';\nSELECT pg_reload_conf();"
PASSWORD: Final = "correct horse"
TLS_FILES: Final = {"ssl_cert_file": "server.pem", "ssl_key_file": "server.key"}
"""File names of the certificate and its key, by setting."""
_CLIENT_AUTHENTICATION: Final = """\
local all all trust
hostssl all all 127.0.0.1/32 scram-sha-256
hostnossl all all 127.0.0.1/32 scram-sha-256
"""


class Cluster(postgres.Cluster):
    """A cluster with the timeout of the tests."""

    def __init__(self, *, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__("tests", timeout_seconds=TIMEOUT_SECONDS, settings=settings)

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Execute a statement as superuser. Returns its rows."""
        with psycopg.connect(self.url, autocommit=True) as conn:
            cursor = conn.execute(statement.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def execute_all(self, statements: str) -> None:
        """Execute statements that end with semicolons, each in a transaction of its own."""
        for statement in statements.strip().removesuffix(";").split(";"):
            self.execute(statement)


class Standby(Cluster):
    """A synchronous standby of a running cluster. It has the settings of the primary, which require a standby.

    Args:
        primary: the cluster. `start` copies it and makes its commits wait for this standby.
    """

    def __init__(self, primary: Cluster) -> None:
        super().__init__()
        self._primary = primary

    def start(self) -> None:
        """Copy the primary, start the standby, and wait until commits wait for it."""
        self._primary.execute_all(REQUIRE_STANDBY)
        source = ["--host", str(self._primary.directory), "--port", self._primary.settings["port"]]
        user = ["--username", "tests", "--write-recovery-conf", "--no-sync", "--checkpoint", "fast"]
        copied = self.run("pg_basebackup", *source, *user, "--pgdata", str(self.data_directory))
        if copied.returncode != 0:
            raise ClusterError(f"pg_basebackup failed:\n{copied.stderr.decode(errors='replace')}")
        super().start()
        deadline = time.monotonic() + self._timeout_seconds
        while self._primary.execute("SELECT sync_state FROM pg_stat_replication") != [("sync",)]:
            if time.monotonic() > deadline:
                raise ClusterError("the standby did not become synchronous")
            time.sleep(0.02)

    def promote(self) -> None:
        """Promote the standby, and wait until it accepts writes."""
        promoted = self.run("pg_ctl", "promote", "--wait", "--pgdata", str(self.data_directory))
        if promoted.returncode != 0:
            raise ClusterError(f"pg_ctl promote failed:\n{promoted.stderr.decode(errors='replace')}")


class NetworkCluster(Cluster):
    """A cluster that listens on a port of 127.0.0.1, with TLS and a user with a password (SCRAM).

    `use_certificate` must be called before `start` unless `ssl` is off.
    """

    def __init__(self, *, ssl: bool = True) -> None:
        self.port = find_free_port()
        settings = {"listen_addresses": "127.0.0.1", "port": str(self.port)}
        if ssl:
            settings |= {name: str(Path("..", file)) for name, file in TLS_FILES.items()} | {"ssl": "on"}
        super().__init__(settings=settings)

    def use_certificate(self, certificate: bytes, key: bytes) -> None:
        """Install a certificate; a running server uses it for new connections."""
        for name, content in zip(TLS_FILES.values(), (certificate, key), strict=True):
            file = self.directory / name
            file.touch(0o600)
            file.write_bytes(content)
            if self._server_user_name is not None:
                shutil.chown(file, self._server_user_name)
        if self._process is not None:
            self.execute("SELECT pg_reload_conf()")

    def start(self) -> None:
        """Start the server and create the user."""
        super().start()
        (self.data_directory / "pg_hba.conf").write_text(_CLIENT_AUTHENTICATION)
        self.execute(f"CREATE ROLE helper LOGIN PASSWORD '{PASSWORD}'")
        self.execute("GRANT ALL ON DATABASE postgres TO helper")
        self.execute("SELECT pg_reload_conf()")

    def network_url(self, host: str, **parameters: str) -> str:
        """Return the URL of the port, with this host name in it and these connection parameters."""
        query = {"hostaddr": "127.0.0.1", "port": str(self.port), "password": PASSWORD, **parameters}
        return f"postgresql://helper@{host}/postgres?{urlencode(query, quote_via=quote)}"
