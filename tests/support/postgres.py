"""A PostgreSQL cluster of the tests' own: unprivileged, on a socket in a folder of its own, forgetting nothing."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psycopg

from tests.support.process import PATIENCE

_OLDEST: Final = 15


def binaries() -> Path | None:
    """Where the server's programs are, as Debian has them or on the path; None where there is no server."""
    versions = (path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdecimal())
    found = sorted((path for path in versions if (path / "initdb").exists()), key=lambda path: int(path.parent.name))
    if found and int(found[-1].parent.name) >= _OLDEST:
        return found[-1]
    program = shutil.which("initdb")
    return None if program is None else Path(program).resolve().parent


def _whoever() -> str | None:
    """Whose the server is to be: root it refuses."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


class Cluster:
    """One cluster, from `start` to `stop`; its folder goes with it.

    Attributes:
        folder: data and socket.
    """

    def __init__(self) -> None:
        programs = binaries()
        assert programs is not None
        self._programs = programs
        self._user = _whoever()
        # Not pytest's folder: a socket's path is short, and the server's user must get there.
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What a store connects to."""
        return f"postgresql://tests@/postgres?host={self.folder}"

    @property
    def data(self) -> Path:
        """The server's data."""
        return self.folder / "data"

    def start(self) -> None:
        """Make the cluster if there is none, start it and wait until it answers."""
        if not self.data.exists():
            make = ["initdb", "--auth=trust", "--username=tests", "--encoding=UTF8", "--no-locale", "--no-sync"]
            self._run([*make, "--pgdata", str(self.data)])
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._programs / "postgres"),
                    *("-D", str(self.data), "-k", str(self.folder), "-c", "listen_addresses="),
                    *("-c", "fsync=on", "-c", "max_connections=60", "-c", "shared_buffers=16MB"),
                ],
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self.folder,
            )
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT disconnects whoever is there, SIGQUIT is a crash."""
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(how)
            process.wait(PATIENCE)

    def remove(self) -> None:
        """End the server and delete its folder."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.address, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, command: list[str]) -> None:
        program = str(self._programs / command[0])
        subprocess.run([program, *command[1:]], check=True, capture_output=True, user=self._user, cwd=self.folder)
