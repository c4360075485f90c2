"""Makes the service that the settings ask for, and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable

import structlog

from helper.app import Service
from helper.clock import SystemClock
from helper.config import Config
from helper.manager import Manager
from helper.nodes import nodes_of
from helper.reception import Reception

log = structlog.get_logger("helper.running")


def make_service(config: Config) -> Service | Reception:
    """What these settings ask for: the whole helper, or all but its queue."""
    if not config.helper.disable:
        return Service(config)
    clock = SystemClock()
    return Reception(config, endpoints=nodes_of(config, clock), clock=clock)


async def run_service(
    service: Service | Reception,
    *,
    started: Callable[[str], None] = lambda _: None,
    listener: socket.socket | None = None,
    manager: Manager | None = None,
) -> None:
    """Run a service until SIGTERM or SIGINT.

    Args:
        service: from `make_service`.
        started: called with the wallets' base URL once the sockets listen.
        listener: the wallets' socket, if somebody has opened it already.
        manager: is told how the service is.
    """
    told = manager or Manager({}, os.getpid(), SystemClock())

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
