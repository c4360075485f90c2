"""Replaces systemctl if systemd does not run: reads the installed unit, starts and stops its service.

    fake_systemctl.py PLACES COMMAND...

`PLACES` is a JSON file that maps the directories of the unit to directories of this machine. Supported are credentials,
environment, working directory, waiting for READY=1, SIGTERM and the stop timeout. Restarts, sandboxing and the
watchdog are not supported. Standard library only.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

READY_SECONDS = 60.0
POLL_SECONDS = 0.02


class SystemdUnit:
    """One installed unit and its process."""

    def __init__(self, places: dict[str, str], name: str) -> None:
        self.run = Path(places["/run"]) / name
        self.run.mkdir(parents=True, exist_ok=True)
        text = (Path(places["/etc/systemd/system"]) / f"{name}.service").read_text()
        for old, new in sorted(places.items(), key=lambda place: -len(place[0])):
            text = text.replace(old, new)
        state, credentials = str(Path(places["/var/lib/svote-helper"]).parent), str(self.run / "credentials")
        text = text.replace("%S", state).replace("%d", credentials)
        self.credentials = Path(credentials)
        self.lines = [line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#")]

    def values(self, key: str) -> list[str]:
        return [value for name, value in self.lines if name == key]

    def pid(self) -> int | None:
        try:
            pid = int((self.run / "pid").read_text())
            stat_text = Path(f"/proc/{pid}/stat").read_text()
        except (OSError, ValueError):
            return None
        return None if stat_text.rpartition(")")[2].split()[0] in "ZX" else pid

    def start(self) -> int:
        """Start the service and wait until it is ready. Returns 1 if it exits first."""
        if self.pid() is not None:
            return 0
        shutil.rmtree(self.credentials, ignore_errors=True)
        self.credentials.mkdir(mode=0o700)
        for loaded in self.values("LoadCredential"):
            name, _, path = loaded.partition(":")
            copy = self.credentials / name
            copy.write_bytes(Path(path).read_bytes())
            copy.chmod(0o400)
        env = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("SVOTE_HELPER_")}
        env["CREDENTIALS_DIRECTORY"] = str(self.credentials)
        env |= dict(assignment.split("=", 1) for assignment in self.values("Environment"))
        address = self.run / "notify"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, (self.run / "journal").open("ab") as journal:
            channel.bind(str(address))
            channel.settimeout(POLL_SECONDS)
            process = subprocess.Popen(
                shlex.split(self.values("ExecStart")[0]),
                env={**env, "NOTIFY_SOCKET": str(address)},
                cwd=self.values("WorkingDirectory")[0],
                stdin=subprocess.DEVNULL,
                stdout=journal,
                stderr=journal,
                umask=int(self.values("UMask")[0], 8),
                start_new_session=True,
            )
            (self.run / "pid").write_text(str(process.pid))
            return self._wait_until_ready(process, channel)

    def _wait_until_ready(self, process: subprocess.Popen[bytes], channel: socket.socket) -> int:
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if process.poll() is not None:
                print("Job for the service failed: it ended at its start", file=sys.stderr)
                return 1
            try:
                if b"READY=1" in channel.recv(4096).split(b"\n"):
                    return 0
            except TimeoutError:
                continue
        print("Job for the service failed: it was not ready in time", file=sys.stderr)
        return 1

    def stop(self) -> int:
        """Send SIGTERM, and SIGKILL after the timeout, which counts as a failure here."""
        pid = self.pid()
        if pid is None:
            return 0
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + float(self.values("TimeoutStopSec")[0])
        while self.pid() is not None:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                return 1
            time.sleep(POLL_SECONDS)
        return 0

    def is_active(self) -> int:
        active = self.pid() is not None
        print("active" if active else "inactive")
        return 0 if active else 3


def main(arguments: list[str]) -> int:
    places: dict[str, str] = json.loads(Path(arguments[0]).read_text())
    words = [argument for argument in arguments[1:] if argument not in ("enable", "--now")]
    if words == ["daemon-reload"]:
        return 0
    action, name = (["start", *words])[-2:]
    unit = SystemdUnit(places, name)
    if action == "restart":
        return unit.stop() or unit.start()
    return {"start": unit.start, "stop": unit.stop, "is-active": unit.is_active}[action]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
