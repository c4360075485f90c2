"""Admin-only mode (`[helper] disable`): serves validator onboarding and the page, without a queue."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from helper.app.listeners import Listeners
from helper.chain.node_pool import NodePool
from helper.clock import Clock
from helper.config.sections import Config
from helper.runtime.supervisor import supervise


class AdminOnlyService:
    """Serves the admin API and the page, and accepts no shares."""

    def __init__(self, config: Config, *, node_pool: NodePool, clock: Clock) -> None:
        self._listeners = Listeners(config, node_pool=node_pool, clock=clock)
        self._node_pool = node_pool
        self._clock = clock
        self._poll_seconds = config.chain.poll_seconds
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Request shutdown; `run` returns when all tasks have ended."""
        self._stop.set()

    async def get_status(self) -> str:
        """Return a short status."""
        return "accepts no shares ([helper] disable)"

    async def run(
        self, *, on_started: Callable[[str], None] = lambda _: None, wallet_socket: socket.socket | None = None
    ) -> None:
        """Run until `stop`.

        Args:
            on_started: called with the base URL once the socket listens.
            wallet_socket: the socket, if it is already open.

        Raises:
            HelperError: the service could not start or cannot continue.
        """
        try:
            async with self._listeners.open(on_started, wallet_socket) as servers:
                await supervise(
                    {"endpoints": self._monitor_nodes()},
                    servers,
                    self._stop,
                    auxiliary=self._listeners.auxiliary_tasks,
                    clock=self._clock,
                )
        finally:
            await self._node_pool.aclose()

    async def _monitor_nodes(self) -> None:
        await self._node_pool.probe_all()
        await self._node_pool.monitor(self._poll_seconds)
