"""A Debian system in a container, booted by systemd-nspawn, with systemd as its process 1.

Its root is an overlay of read-only directories and one that is removed with it. It has a network of its own, with
loopback only.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.deploy.commands import COMMAND_SECONDS, run

BOOT_SECONDS = 120.0
STOP_SECONDS = 120.0
CGROUP_SECONDS = 10.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HAS_SYSTEMD = Path("/run/systemd/system").exists()
_LEADER = re.compile(rb"^X_NSPAWN_LEADER_PID=(\d+)$", re.MULTILINE)


class BootedMachine:
    """A system that is booted when the block is entered, and shut down when it is left.

    Args:
        layers: directories of the root, the uppermost first.
        binds: directories of this machine by their paths in the system.

    Attributes:
        upper: directory with the changes to the root.
    """

    def __init__(self, layers: Sequence[Path], binds: Mapping[str, Path] | None = None) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="svote-machine-"))
        self.name = f"svote-machine-{secrets.token_hex(4)}"
        self.upper = self._directory / "tmpfs" / "upper"
        self._root = self._directory / "root"
        self._layers = tuple(layers)
        self._binds = dict(binds or {})
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._cgroups: list[Path] = []

    def __enter__(self) -> BootedMachine:
        try:
            self._mount()
            self._boot()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _mount(self) -> None:
        """Mount the overlay. Its upper directory is in memory, because it cannot be on another overlay."""
        work, tmpfs = self.upper.with_name("work"), self.upper.parent
        tmpfs.mkdir()
        self._root.mkdir()
        run(["mount", "-t", "tmpfs", "-o", "size=3g,mode=755", "tmpfs", tmpfs])
        self.upper.mkdir()
        work.mkdir()
        lower = ":".join(map(str, self._layers))
        options = f"lowerdir={lower},upperdir={self.upper},workdir={work}"
        run(["mount", "-t", "overlay", "-o", options, "overlay", self._root])

    def _boot(self) -> None:
        """Start systemd-nspawn, and wait until the system has booted."""
        command = ["systemd-nspawn", "--quiet", "--register=no", "--boot", f"--directory={self._root}"]
        command += [f"--machine={self.name}", "--private-network", "--console=pipe", "--notify-ready=yes"]
        command += ["--link-journal=no", "--resolv-conf=off", "--timezone=off"]
        command += [f"--bind={path}:{inside}" for inside, path in self._binds.items()]
        if not HAS_SYSTEMD:
            # Nothing allocates control groups here, and two containers may not share theirs.
            command.append("--keep-unit")
            self._cgroups = _create_cgroups(self.name)
            script = "".join(f"echo $$ >'{cgroup}/cgroup.procs' && " for cgroup in self._cgroups)
            command = ["sh", "-c", f'{script}exec "$@"', "sh", *command]
        # Otherwise the system would outlive a killed test process.
        command = ["setpriv", "--pdeathsig=TERM", "--", *command]
        address = str(self._directory / "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, (self._directory / "log").open("wb") as log:
            channel.bind(address)
            channel.settimeout(1.0)
            self._nspawn = subprocess.Popen(
                command,
                env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            self._wait_until_booted(channel)

    def _wait_until_booted(self, channel: socket.socket) -> None:
        assert self._nspawn is not None
        deadline = time.monotonic() + BOOT_SECONDS
        while True:
            assert time.monotonic() < deadline, f"the system did not boot:\n{self.console()}"
            assert self._nspawn.poll() is None, f"the system ended at its start:\n{self.console()}"
            with suppress(TimeoutError):
                message = channel.recv(4096)
                if match := _LEADER.search(message):
                    self._leader = int(match[1])
                if b"READY=1" in message.split(b"\n"):
                    return

    def console(self) -> str:
        """Return what systemd-nspawn and the system's console have printed."""
        return (self._directory / "log").read_text(errors="replace")

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command that runs the command appended to it in the system, as root, and ends it when it ends itself."""
        namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        enter = ("nsenter", f"--target={self._leader}", *namespaces, "--root", "--wd", "--")
        return (*enter, "setpriv", "--pdeathsig=TERM", "--")

    def run(
        self, *command: str, check: bool = True, timeout: float = COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root and wait for its end. The standard output includes the standard error."""
        completed = subprocess.run(
            [*self.prefix, *command],
            env={"PATH": PATH, "HOME": "/root"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        assert not check or completed.returncode == 0, (
            f"{' '.join(command)}\nexit status {completed.returncode}\n{completed.stdout}"
        )
        return completed

    def sh(self, script: str) -> str:
        """Run a script in a shell. Returns its output."""
        return self.run("sh", "-euc", script).stdout

    def read(self, path: str) -> str:
        return self.run("cat", path).stdout

    def write(self, path: str, text: str) -> None:
        """Write a file of the root, not below a directory where the system mounts another file system."""
        assert path.split("/")[1] in ("etc", "root", "opt", "srv", "usr"), path
        (self._root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path.lstrip("/")).write_text(text)

    def properties(self, unit: str, *names: str) -> dict[str, str]:
        """Return properties of a unit, as `systemctl show` prints them."""
        lines = self.run("systemctl", "show", unit, f"--property={','.join(names)}").stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def wait_until(self, script: str, *, timeout: float = COMMAND_SECONDS, interval: float = 0.1) -> str:
        """Repeat a script until it exits with 0. Returns its output."""
        deadline = time.monotonic() + timeout
        while True:
            completed = self.run("sh", "-euc", script, check=False)
            if completed.returncode == 0:
                return completed.stdout
            assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {script}\n{completed.stdout}"
            time.sleep(interval)

    def shut_down(self) -> None:
        """Shut the system down as `systemctl poweroff` does, and wait for its end."""
        if self._nspawn is None:
            return
        self._nspawn.send_signal(signal.SIGTERM)
        try:
            self._nspawn.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._nspawn.kill()
            self._nspawn.wait()
            raise
        finally:
            self._nspawn = None
            _remove_cgroups(self._cgroups)

    def remove(self) -> None:
        """Shut the system down and remove its files."""
        try:
            self.shut_down()
        finally:
            for mount in (self._root, self.upper.parent):
                if mount.is_mount():
                    run(["umount", "--lazy", mount])
            shutil.rmtree(self._directory, ignore_errors=True)


def _create_cgroups(name: str) -> list[Path]:
    """Create a control group in every hierarchy that can be written. Returns their directories."""
    groups: list[Path] = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mountpoint, kind, options, *_ = line.split()
        if kind in ("cgroup", "cgroup2") and "rw" in options.split(","):
            group = Path(mountpoint) / name
            group.mkdir()
            if "cpuset" in options.split(","):
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (group / file).write_text((group.parent / file).read_text())
            groups.append(group)
    return groups


def _remove_cgroups(groups: Sequence[Path]) -> None:
    """Remove control groups and those below them. Their processes have ended, or end now."""
    deadline = time.monotonic() + CGROUP_SECONDS
    while remaining := [group for group in groups if group.exists()]:
        assert time.monotonic() < deadline, f"control groups cannot be removed: {', '.join(map(str, remaining))}"
        for group in remaining:
            for directory, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):
                    Path(directory).rmdir()
        time.sleep(0.1)
