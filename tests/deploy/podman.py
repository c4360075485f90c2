"""Runs podman and podman-compose with images, containers, volumes and networks of their own, in `build/deploy/`."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.commands import COMMAND_SECONDS, run

COMPOSE = Path(sys.executable).parent / "podman-compose"
BUILD_SECONDS = 1800.0
POLL_SECONDS = 0.2


class Podman:
    """The podman command with a storage in a directory.

    It uses runc and cgroupfs, which work without systemd and with every layout of cgroups. Containers get the limits
    of this process, because raising them needs a capability that this machine may not have.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.storage = directory / "storage"
        self.build_volumes: list[str] = []
        """Mounts (`SOURCE:TARGET[:ro]`) for all steps of builds; their contents do not get into an image."""
        self._engine = directory / "containers.conf"
        self._builder = directory / "containers.build.conf"
        (directory / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.storage}"\nrunroot = "{directory / "run"}"\n'
        )
        files, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
        processes = min(processes, int(Path("/proc/sys/kernel/pid_max").read_text()))  # podman lowers its own to this
        limits = [f"nofile={files}:{files}", f"nproc={processes}:{processes}"]
        self._settings = (
            f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{directory / "networks"}"\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        self._engine.write_text(f"[containers]\ndefault_ulimits = {json.dumps(limits)}\n{self._settings}")
        self.environment = {
            **os.environ,
            "CONTAINERS_CONF": str(self._engine),
            "CONTAINERS_STORAGE_CONF": str(directory / "storage.conf"),
            # a build needs no namespaces and no cgroup, and keeps the health check, which the OCI format does not have
            "BUILDAH_ISOLATION": "chroot",
            "BUILDAH_FORMAT": "docker",
            # podman would start the timer of health checks with systemd
            "DISABLE_HC_SYSTEMD": "true",
        }

    def output(self, *arguments: str | Path, timeout: float = COMMAND_SECONDS) -> str:
        return run(["podman", *arguments], self.environment, timeout=timeout)

    def exit_code(self, *arguments: str | Path) -> int:
        command = ["podman", *map(str, arguments)]
        return subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60
        ).returncode

    def build(self, *arguments: str | Path, stdin: str = "", program: Sequence[str | Path] = ("podman",)) -> None:
        """Run `podman build`, or that of another program, with the mounts of builds."""
        self._builder.write_text(f"[containers]\nvolumes = {json.dumps(self.build_volumes)}\n{self._settings}")
        environment = {**self.environment, "CONTAINERS_CONF": str(self._builder)}
        run([*program, *arguments], environment, stdin=stdin, timeout=BUILD_SECONDS)

    def has_image(self, name: str) -> bool:
        return self.exit_code("image", "exists", name) == 0

    def inspect(self, container: str) -> dict[str, Any]:
        (described,) = json.loads(self.output("container", "inspect", container))
        return dict(described)

    def remove_containers(self) -> None:
        """Remove all containers with their volumes and networks; images remain."""
        self.output("pod", "rm", "--all", "--force", "--time", "0")
        self.output("rm", "--all", "--force", "--volumes", "--time", "0")
        self.output("volume", "prune", "--force")
        self.output("network", "prune", "--force")

    def unmount_storage(self) -> None:
        """Unmount what podman leaves mounted: the storage's overlay directory, bound to itself."""
        directory = str((self.storage / "overlay").resolve())
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for _ in range(mounts.count(directory)):
            run(["umount", "--lazy", directory], self.environment)


class Compose:
    """One project of podman-compose: compose files of which later ones override earlier ones, and profiles."""

    def __init__(
        self, podman: Podman, files: Sequence[Path], profiles: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        self._podman = podman
        self._environment = {**podman.environment, **(variables or {})}
        self.command: list[str | Path] = [COMPOSE]
        for file in files:
            self.command += ["--file", file]
        for profile in profiles:
            self.command += ["--profile", profile]

    def output(self, *arguments: str) -> str:
        return run([*self.command, *arguments], self._environment)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, oldest first."""
        label = f"label=com.docker.compose.service={service}"
        ids = self._podman.output("ps", "--all", "--quiet", "--no-trunc", "--sort", "created", "--filter", label)
        return ids.split()

    def container(self, service: str) -> str:
        (container_id,) = self.containers(service)
        return container_id

    def exec(self, service: str, *arguments: str) -> str:
        return self._podman.output("exec", self.container(service), *arguments)

    def address(self, service: str, port: int) -> str:
        """Return the URL of a published port on this machine."""
        return "http://" + self._podman.output("port", self.container(service), f"{port}/tcp").strip()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 180.0) -> None:
    """Poll another process's state, which has no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(POLL_SECONDS)
