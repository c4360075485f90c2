"""Prover worker process: exchanges frames with a worker and kills it reliably."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Protocol

from helper.errors import ProverCrashed, ProverTimeout
from helper.reveal.prover import frames
from helper.reveal.prover.frames import Frame

WorkerCommand = Sequence[str]
"""The program and arguments that start a worker."""


WAIT_SLICE_SECONDS = 1.0
"""Maximum seconds that one wait for a reply counts."""


class WorkerSpawner(Protocol):
    """Starts a worker (`WorkerProcess.spawn`)."""

    async def __call__(self, command: WorkerCommand, *, threads: int) -> WorkerProcess:
        """Start a worker whose proofs use `threads` threads. Raises OSError."""
        ...


class WorkerProcess:
    """A running worker process, connected by two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input = process.stdin
        self._output = process.stdout

    @classmethod
    async def spawn(cls, command: WorkerCommand, *, threads: int) -> WorkerProcess:
        """Start a worker whose proofs use `threads` threads."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "RAYON_NUM_THREADS": str(threads)},
            limit=frames.MAX_FRAME_BYTES,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def wait_ended(self) -> int:
        """Wait until the worker exits and return its exit status.

        If a signal killed the worker, this is the negated signal number.
        """
        return await self._process.wait()

    async def exchange(self, frame: Frame, timeout: float) -> Frame:
        """Send a request and return the reply.

        The time for which this process was stopped or did not run (SIGSTOP, a suspended machine) does not count: the
        worker usually did not run either.

        Raises:
            ProverTimeout: no reply within `timeout` seconds; the worker must not be used again.
            ProverCrashed: the worker exited, or its reply is invalid.
        """
        reply, waited = asyncio.ensure_future(self._exchange(frame)), 0.0
        try:
            while not reply.done():
                if waited >= timeout:
                    raise ProverTimeout(f"no proof within {timeout:.0f} s")
                slice_seconds = min(WAIT_SLICE_SECONDS, timeout - waited)
                await asyncio.wait((reply,), timeout=slice_seconds)
                waited += slice_seconds  # however long it took
            return await reply
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise ProverCrashed(f"worker exited during a proof ({type(error).__name__})") from None
        finally:
            reply.cancel()

    async def _exchange(self, frame: Frame) -> Frame:
        self._input.write(frames.encode_frame(frame))
        await self._input.drain()
        header = await self._output.readexactly(frames.HEADER.size)
        return frames.decode_frame(await self._output.readexactly(frames.body_length(header)))

    async def kill(self) -> None:
        """Kill the worker with SIGKILL and wait until it has exited, even if cancelled."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._input.close()
        ended = asyncio.ensure_future(self.wait_ended())
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await ended
            raise
