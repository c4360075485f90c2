"""A PostgreSQL cluster of its own: unprivileged, on a socket in a folder of its own, forgetting nothing.

For the demonstration and the tests, where nothing is to be set up before and nothing to be left behind.
"""

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

OLDEST: Final = 15
"""The oldest version that the store works on."""
START_SECONDS: Final = 60.0
"""How long a server may take until it answers, or to end."""


class ClusterError(RuntimeError):
    """There is no server on this machine, or it did not start; the message has the end of its log."""


def binaries() -> Path | None:
    """Where the server's programs are, as Debian has them or on the path; None where there is no server."""
    versions = (path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdecimal())
    found = sorted((path for path in versions if (path / "initdb").exists()), key=lambda path: int(path.parent.name))
    if found and int(found[-1].parent.name) >= OLDEST:
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
    """One cluster, from `start` to `remove`; its folder goes with it.

    Args:
        user: who owns the database; whoever gets into the folder may connect.
        patience: seconds that the server may take to answer, and to end.

    Attributes:
        folder: data and socket.

    Raises:
        ClusterError: there is no PostgreSQL here.
    """

    def __init__(self, user: str, *, patience: float = START_SECONDS) -> None:
        programs = binaries()
        if programs is None:
            raise ClusterError(f"there is no PostgreSQL {OLDEST} or newer on this machine (initdb was not found)")
        self._programs = programs
        self._name = user
        self._patience = patience
        self._user = _whoever()
        # A socket's path is short, and the server's user must get there: no folder of somebody else's.
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What a store connects to."""
        return f"postgresql://{self._name}@/postgres?host={self.folder}"

    @property
    def data(self) -> Path:
        """The server's data."""
        return self.folder / "data"

    def start(self) -> None:
        """Make the cluster if there is none, start it and wait until it answers.

        Raises:
            ClusterError: it does not.
        """
        if not self.data.exists():
            make = ["--auth=trust", f"--username={self._name}", "--encoding=UTF8", "--no-locale", "--no-sync"]
            made = self.run("initdb", *make, "--pgdata", str(self.data))
            if made.returncode != 0:
                raise ClusterError(f"no cluster could be made:\n{made.stderr.decode(errors='replace').strip()}")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the server, where its package has it
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
        deadline = time.monotonic() + self._patience
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"the server does not answer:\n{self._log_end()}")
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT disconnects whoever is there, SIGQUIT is a crash."""
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(how)
            process.wait(self._patience)

    def remove(self) -> None:
        """End the server and delete its folder."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder)

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run one of the server's programs to its end, as the server's user."""
        command = [str(self._programs / program), *arguments]
        return subprocess.run(  # noqa: S603 - as above
            command, check=False, capture_output=True, user=self._user, cwd=self.folder
        )

    def _answers(self) -> bool:
        return self.run("pg_isready", "--quiet", "--host", str(self.folder)).returncode == 0

    def _log_end(self) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-10:])
