"""One worker process as the pool sees it: frames out, frames back, and an end that is certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Protocol

from helper.errors import ProverDied, ProverTimeout
from helper.reveal.prover import frames
from helper.reveal.prover.frames import Frame

WorkerCommand = Sequence[str]
"""The program and arguments that start one worker."""


class Worker(Protocol):
    """A running worker, as `WorkerProcess` is."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    async def ended(self) -> int:
        """Wait until it has ended; how it did."""
        ...

    async def exchange(self, frame: Frame, timeout: float) -> Frame:
        """Ask and wait for the answer; raises ProverTimeout or ProverDied."""
        ...

    async def kill(self) -> None:
        """End it and wait until it is gone."""
        ...


class Spawn(Protocol):
    """Starts workers, as `WorkerProcess.spawn` does."""

    async def __call__(self, command: WorkerCommand, *, threads: int) -> Worker:
        """Start one; `threads` is how many a proof may use. Raises OSError."""
        ...


class WorkerProcess:
    """A running worker with a pipe to it and one from it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input = process.stdin
        self._output = process.stdout

    @classmethod
    async def spawn(cls, command: WorkerCommand, *, threads: int) -> WorkerProcess:
        """Start one; `threads` is how many a proof may use."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "RAYON_NUM_THREADS": str(threads)},
            limit=frames.MAX_FRAME,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def ended(self) -> int:
        """Wait until it has ended; its exit status, or minus the signal that ended it."""
        return await self._process.wait()

    async def exchange(self, frame: Frame, timeout: float) -> Frame:
        """Ask and wait for the answer.

        Raises:
            ProverTimeout: no answer within `timeout` seconds; the worker is of no more use.
            ProverDied: the worker has ended, or answered nonsense.
        """
        try:
            async with asyncio.timeout(timeout):
                self._input.write(frames.encode(frame))
                await self._input.drain()
                header = await self._output.readexactly(frames.HEADER.size)
                return frames.decode(await self._output.readexactly(frames.body_length(header)))
        except TimeoutError:
            raise ProverTimeout(f"no proof within {timeout:.0f} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise ProverDied(f"a worker ended during a proof ({type(error).__name__})") from None

    async def kill(self) -> None:
        """End it and wait until it is gone, also when we are being cancelled: SIGKILL takes no time."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._input.close()
        ended = asyncio.ensure_future(self.ended())
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await ended
            raise
