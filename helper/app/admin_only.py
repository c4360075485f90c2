"""The service without its queue (`[helper] disable`): validators join and the page is served, no share is taken."""

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
    """The admin part and the page, over the chain's nodes."""

    def __init__(self, config: Config, *, endpoints: NodePool, clock: Clock) -> None:
        self._doors = Listeners(config, endpoints=endpoints, clock=clock)
        self._endpoints = endpoints
        self._interval = config.chain.poll_seconds
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Begin to stop; `run` returns when all has ended."""
        self._stop.set()

    async def alive(self) -> str:
        """How it is, in a few words."""
        return "takes no shares ([helper] disable)"

    async def run(
        self, *, started: Callable[[str], None] = lambda _: None, listener: socket.socket | None = None
    ) -> None:
        """Run until `stop`; `started` is called with the base URL once the socket listens.

        `listener` is that socket, if somebody has opened it already.

        Raises:
            HelperError: it could not start, or must not go on.
        """
        try:
            async with self._doors.open(started, listener) as servers:
                await supervise({"endpoints": self._follow(), **self._doors.parts}, servers, self._stop)
        finally:
            await self._endpoints.aclose()

    async def _follow(self) -> None:
        await self._endpoints.check()
        await self._endpoints.monitor(self._interval)
