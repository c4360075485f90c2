"""Runs a command in a pseudo-terminal and renders its screen."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Mapping

import pyte

from tests.support.process import TIMEOUT_SECONDS


class Terminal:
    """A screen of the given size with a process."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, columns: int, lines: int) -> None:
        self._process = process
        self._master = master
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    @property
    def lines(self) -> list[str]:
        return [str(line).rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).strip("\n")

    async def wait_for_text(self, description: str, condition: Callable[[str], object]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not condition(self.text):
                    self._read()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(
                f"waited {TIMEOUT_SECONDS:.0f} s until it {description}; it shows:\n{self.text}"
            ) from None

    async def interrupt(self, signal_number: int = signal.SIGINT) -> int:
        os.killpg(self._process.pid, signal_number)
        return await self.wait_for_exit()

    async def wait_for_exit(self) -> int:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (status := self._process.poll()) is None:
                self._read()
                await asyncio.sleep(0.02)
        self._read()
        return status

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # no data yet, or the other end is closed
            while chunk := os.read(self._master, 65536):
                self.raw += chunk
                self._stream.feed(chunk)


@contextlib.asynccontextmanager
async def run_in_terminal(
    *arguments: str, columns: int = 80, lines: int = 24, env: Mapping[str, str] | None = None
) -> AsyncIterator[Terminal]:
    """Run `svote-helper` in a terminal. Kills it at the end if it still runs."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    os.set_blocking(master, False)
    clean = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "helper", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**clean, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(env or {})},
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master, columns, lines)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(master)
