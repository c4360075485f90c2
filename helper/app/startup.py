"""Makes the service that the settings ask for, and runs it until it is told to stop."""

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

log = structlog.get_logger("helper.running")


def create_service(config: Config) -> Service | AdminOnlyService:
    """What these settings ask for: the whole helper, or all but its queue."""
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
        listener: the wallets' socket, if somebody has opened it already.
        manager: is told how the service is.
    """
    told = manager or ServiceManager({}, os.getpid(), SystemClock())

    def ready(url: str) -> None:
        # What is loaded now stays: each search for dead cycles in all of it would stop the service for 20 to 40 ms.
        gc.collect()
        gc.freeze()
        told.tell("READY=1")
        started(url)

    def stop() -> None:
        log.info("stopping")
        told.tell("STOPPING=1", "STATUS=stopping")
        service.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    telling = asyncio.create_task(told.keep_told(service.alive), name="manager")
    try:
        await service.run(started=ready, listener=listener)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
