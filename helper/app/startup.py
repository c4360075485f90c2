"""Creates the configured service and runs it until a signal stops it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable

import structlog

from helper.app.admin_only import AdminOnlyService
from helper.app.service import Service
from helper.chain.node_pool import create_node_pool
from helper.clock import SystemClock
from helper.config import Config
from helper.runtime.systemd import ServiceManager

log = structlog.get_logger("helper.app")


def create_service(config: Config) -> Service | AdminOnlyService:
    """Create the complete helper, or the admin-only service if `[helper] disable` is set."""
    if not config.helper.disable:
        return Service(config)
    clock = SystemClock()
    return AdminOnlyService(config, endpoints=create_node_pool(config, clock), clock=clock)


async def run_service(
    service: Service | AdminOnlyService,
    *,
    started: Callable[[str], None] = lambda _: None,
    listener: socket.socket | None = None,
    manager: ServiceManager | None = None,
) -> None:
    """Run a service until SIGTERM or SIGINT.

    Args:
        service: from `create_service`.
        started: called with the wallets' base URL once the sockets listen.
        listener: the wallets' socket, if it is already open.
        manager: receives the state of the service.
    """
    notified = manager or ServiceManager({}, os.getpid(), SystemClock())

    def ready(url: str) -> None:
        # Exempt startup objects from garbage collection: each full pass over them would take 20 to 40 ms.
        gc.collect()
        gc.freeze()
        notified.tell("READY=1")
        started(url)

    def stop() -> None:
        log.info("service_stopping")
        notified.tell("STOPPING=1", "STATUS=stopping")
        service.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    notifier = asyncio.create_task(notified.keep_told(service.alive), name="manager")
    try:
        await service.run(started=ready, listener=listener)
    finally:
        notifier.cancel()
        await asyncio.gather(notifier, return_exceptions=True)
