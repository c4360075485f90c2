"""Admin-only mode (`[helper] disable`): serves validator onboarding and the page, without a queue."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from helper.app.listeners import Listeners
from helper.chain.node_pool import NodePool
from helper.clock import Clock
from helper.config import Config
from helper.runtime.supervisor import supervise


class AdminOnlyService:
    """Serves the admin API and the page, and accepts no shares."""

    def __init__(self, config: Config, *, endpoints: NodePool, clock: Clock) -> None:
        self._listeners = Listeners(config, endpoints=endpoints, clock=clock)
        self._endpoints = endpoints
        self._interval = config.chain.poll_seconds
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Begin to stop; `run` returns once everything has ended."""
        self._stop.set()

    async def alive(self) -> str:
        """Return a short status."""
        return "accepts no shares ([helper] disable)"

    async def run(
        self, *, started: Callable[[str], None] = lambda _: None, listener: socket.socket | None = None
    ) -> None:
        """Run until `stop`.

        Args:
            started: called with the base URL once the socket listens.
            listener: the socket, if it is already open.

        Raises:
            HelperError: the service could not start, or must not continue.
        """
        try:
            async with self._listeners.open(started, listener) as servers:
                await supervise({"endpoints": self._follow(), **self._listeners.parts}, servers, self._stop)
        finally:
            await self._endpoints.aclose()

    async def _follow(self) -> None:
        await self._endpoints.check()
        await self._endpoints.monitor(self._interval)
