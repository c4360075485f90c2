"""A child process that writes a ready file once it listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.tasks import poll

LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_FREE_PORT = 15_000
"""Above the default ports of the service and of the programs that tests start."""
_taken_ports = contextlib.ExitStack()
TIMEOUT_SECONDS = 60.0
"""Default timeout of a wait, in seconds."""


class ChildProcess:
    """A child process that writes a ready file once it listens."""

    def __init__(
        self, name: str, directory: Path, arguments: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.name = name
        self.log = directory / f"{name}.log"
        self._ready_file = directory / f"{name}.ready"
        self._arguments = (*arguments, "--ready-file", str(self._ready_file))
        self._env = {key: value for key, value in os.environ.items() if not key.startswith("SVOTE_HELPER_")}
        self._env.update(env or {})
        # Not an asyncio process: tests share a chain, and each test has its own event loop.
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_data: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def spawn(self, *, wrapper: Sequence[str] = (), **env: str) -> None:
        """Start the process without waiting for it to listen.

        `wrapper` is a program that runs the command appended to its own arguments.
        """
        self._ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, *self._arguments], stdout=log, stderr=log, env={**self._env, **env}
            )

    async def start(self, **env: str) -> None:
        self.spawn(**env)
        try:
            await self.wait_until_listening()
        except BaseException:
            await self.kill()
            raise

    async def wait_until_listening(self) -> None:
        async with self.timeout("listens"):
            while not self._ready_file.exists():
                assert self.process is not None
                if self.process.poll() is not None:
                    raise AssertionError(f"{self.name} ended at start:\n{self.log_tail()}")
                await asyncio.sleep(0.02)
        self.ready_data = json.loads(self._ready_file.read_text())

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.wait_for_exit()

    async def stop(self) -> int:
        """Send SIGTERM. Returns the exit status."""
        assert self.process is not None
        self.process.terminate()
        return await self.wait_for_exit()

    async def wait_for_exit(self) -> int:
        assert self.process is not None
        async with self.timeout("has ended"):
            while (status := self.process.poll()) is None:
                await asyncio.sleep(0.02)
        return status

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    @contextlib.asynccontextmanager
    async def timeout(self, description: str, seconds: float = TIMEOUT_SECONDS) -> AsyncIterator[None]:
        """Limit the duration of the block. Shows the log on a timeout."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise AssertionError(
                f"waited {seconds:.0f} s until {self.name} {description}; its log:\n{self.log_tail()}"
            ) from None

    async def wait_for(
        self, description: str, condition: Callable[[], object], seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """Wait for a condition, which may be an awaitable. Shows the log on a timeout."""
        async with self.timeout(description, seconds):
            await poll(condition)


def find_free_port(count: int = 1) -> int:
    """Return the first of consecutive free ports, for services that listen later or restart at the same address.

    The kernel takes no port below its range of local ports for an outgoing connection, and other processes of tests get
    none that this process has got: their names, as unix sockets, are in use until it ends.
    """
    end = int(LOCAL_PORT_RANGE.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(LOWEST_FREE_PORT, end - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes, contextlib.ExitStack() as names:
            for number in range(port, port + count):
                names.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0svote-helper-test-port-{number}")
                probes.enter_context(socket.socket()).bind(("127.0.0.1", number))
            _taken_ports.push(names.pop_all())
            return port


async def wait_until_gone(pids: Sequence[int]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await poll(lambda: not any(map(is_running, pids)))


def child_pids(pid: int) -> list[int]:
    """Return the running child processes, regardless of the thread that started them."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, task.read_text().split())
    return pids


def is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie process does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
