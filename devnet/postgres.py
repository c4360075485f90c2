"""Temporary PostgreSQL cluster for demo and tests: unprivileged, on a socket in a temporary directory, with fsync."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

MIN_VERSION: Final = 15
"""The oldest version that the store supports."""
START_TIMEOUT_SECONDS: Final = 60.0
"""Timeout in seconds for starting and stopping the server."""


class ClusterError(RuntimeError):
    """PostgreSQL is not installed, or the server did not start. The text contains the end of its log."""


def find_binaries() -> Path | None:
    """Return the directory of the server's programs (Debian's or from PATH), None if there is none."""
    directories = (path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdecimal())
    installed = sorted(
        (path for path in directories if (path / "initdb").exists()), key=lambda path: int(path.parent.name)
    )
    if installed and int(installed[-1].parent.name) >= MIN_VERSION:
        return installed[-1]
    program = shutil.which("initdb")
    return None if program is None else Path(program).resolve().parent


def _server_user() -> str | None:
    """The user for the server if this process is root, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


class Cluster:
    """A cluster from `start` to `remove`, which also deletes its directory.

    Args:
        owner: owner of the database. Anyone with access to the directory can connect.
        timeout_seconds: timeout in seconds for starting and stopping the server.
        settings: server settings in addition to the defaults of this class, which they override.

    Attributes:
        directory: contains data and socket.
        settings: as above; a change applies at the next start.

    Raises:
        ClusterError: PostgreSQL is not installed.
    """

    def __init__(
        self,
        owner: str,
        *,
        timeout_seconds: float = START_TIMEOUT_SECONDS,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        programs = find_binaries()
        if programs is None:
            raise ClusterError(f"PostgreSQL {MIN_VERSION} or newer is not installed (initdb not found)")
        self._programs = programs
        self._owner = owner
        self._timeout_seconds = timeout_seconds
        self.settings = {
            "listen_addresses": "",
            "port": "5432",
            "fsync": "on",
            "max_connections": "60",
            "shared_buffers": "16MB",
            **settings,
        }
        self._server_user_name = _server_user()
        # The socket's path must be short, and the server's user must be able to access it.
        self.directory = Path(tempfile.mkdtemp(prefix="pg-"))
        if self._server_user_name is not None:
            shutil.chown(self.directory, self._server_user_name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The connection URL."""
        return f"postgresql://{self._owner}@/postgres?host={self.directory}&port={self.settings['port']}"

    @property
    def data_directory(self) -> Path:
        """The server's data directory."""
        return self.directory / "data"

    def start(self) -> None:
        """Create the cluster if it does not exist, start the server and wait until it accepts connections.

        Raises:
            ClusterError: the server did not start in time.
        """
        if not self.data_directory.exists():
            make = ["--auth=trust", f"--username={self._owner}", "--encoding=UTF8", "--no-locale", "--no-sync"]
            initdb = self.run("initdb", *make, "--pgdata", str(self.data_directory))
            if initdb.returncode != 0:
                raise ClusterError(f"initdb failed:\n{initdb.stderr.decode(errors='replace').strip()}")
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - an installed program
                [
                    str(self._programs / "postgres"),
                    *("-D", str(self.data_directory), "-k", str(self.directory)),
                    *(f"--{name}={value}" for name, value in self.settings.items()),
                ],
                stdout=log,
                stderr=log,
                user=self._server_user_name,
                cwd=self.directory,
            )
        deadline = time.monotonic() + self._timeout_seconds
        while not self._is_accepting_connections():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"the server did not start:\n{self._read_log_tail()}")
            time.sleep(0.02)

    def stop(self, stop_signal: signal.Signals = signal.SIGINT) -> None:
        """Stop the server. SIGINT disconnects all clients; SIGQUIT simulates a crash."""
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(stop_signal)
            process.wait(self._timeout_seconds)

    def remove(self) -> None:
        """Stop the server and delete its directory."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory)

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run one of PostgreSQL's programs as the server's user."""
        command = [str(self._programs / program), *arguments]
        return subprocess.run(  # noqa: S603 - as above
            command, check=False, capture_output=True, user=self._server_user_name, cwd=self.directory
        )

    def _is_accepting_connections(self) -> bool:
        address = ("--host", str(self.directory), "--port", self.settings["port"])
        return self.run("pg_isready", "--quiet", *address).returncode == 0

    def _read_log_tail(self) -> str:
        return "\n".join((self.directory / "log").read_text(errors="replace").splitlines()[-10:])
