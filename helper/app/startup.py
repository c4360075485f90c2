"""Creates the configured service, or one without a queue (`[helper] disable`), and runs it until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import uvloop

from helper.app.listeners import Listeners
from helper.app.service import Service
from helper.chain.node_pool import create_node_pool
from helper.clock import SystemClock
from helper.config.sections import Config
from helper.observability.log_config import configure
from helper.observability.sentry import create_reporter
from helper.runtime.process_security import harden_process
from helper.runtime.supervisor import supervise
from helper.runtime.systemd import ServiceManager, adopt_inherited_listener, is_journal, priority_prefix


class AdminOnlyService:
    """Serves the admin API and the page, and accepts no shares."""

    def __init__(self, config: Config) -> None:
        self._clock = SystemClock()
        self._node_pool = create_node_pool(config, self._clock)
        self._listeners = Listeners(config, node_pool=self._node_pool, clock=self._clock)
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
        """Run until `stop`. The arguments are those of `Listeners.open`.

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


log = structlog.get_logger("helper.app")


YOUNG_OBJECTS: Final = 10_000
"""Number of new objects after which the garbage collector runs.

The objects of the requests in progress are more than Python's default of 700, so it would traverse them again and again
without finding garbage: 3.4 µs for each share, instead of 0.2.
"""


_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 128 << 10
"""Size from which glibc maps each allocation, and returns its memory when it is freed.

By default the size grows with each such allocation that is freed, and after the first large body all others are in the
heap, which keeps their memory.
"""


def return_freed_memory() -> None:
    """Make glibc return the memory of large buffers when they are freed."""
    with contextlib.suppress(AttributeError):  # only glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


async def run_service(
    service: Service | AdminOnlyService,
    *,
    on_started: Callable[[str], None] = lambda _: None,
    wallet_socket: socket.socket | None = None,
    service_manager: ServiceManager | None = None,
) -> None:
    """Run a service until SIGTERM or SIGINT, and report its state to the service manager."""
    for failure in harden_process():
        log.warning("process_not_hardened", reason=failure)
    return_freed_memory()
    systemd_manager = service_manager or ServiceManager({}, os.getpid(), SystemClock())

    def on_ready(url: str) -> None:
        # Exempt startup objects from garbage collection: each full pass over them would take 20 to 40 ms.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        systemd_manager.notify("READY=1")
        on_started(url)

    def on_signal() -> None:
        log.info("service_stopping")
        systemd_manager.notify("STOPPING=1", "STATUS=stopping")
        service.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    notifier = asyncio.create_task(systemd_manager.run_heartbeat(service.get_status), name="manager")
    try:
        await service.run(on_started=on_ready, wallet_socket=wallet_socket)
    finally:
        notifier.cancel()
        await asyncio.gather(notifier, return_exceptions=True)


def serve_until_signal(config: Config, *, announce: Callable[[str], None], ready_file: Path | None = None) -> None:
    """Run the configured service, with its logs and error reports, in this process until a signal stops it.

    Args:
        ready_file: file to write once the sockets listen, with the base URL as JSON.
    """
    clock = SystemClock()
    reporter = create_reporter(config.helper.sentry_dsn, clock) if config.helper.sentry_dsn else None
    configure(
        config.log.level,
        config.log.format,
        report=reporter.report if reporter is not None else None,
        prefix=priority_prefix if is_journal(os.environ, sys.stderr) else None,
    )
    service = AdminOnlyService(config) if config.helper.disable else Service(config)

    def on_started(url: str) -> None:
        if isinstance(service, Service) and service.new_database:
            announce(f"created a new, empty queue: {service.new_database}")
        announce(f"listening on {url}")
        if ready_file is not None:
            partial = ready_file.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            with partial.open("x", encoding="utf-8") as file:  # never through an existing link
                file.write(json.dumps({"url": url, "socket": str(config.socket_path)}) + "\n")
            partial.replace(ready_file)

    manager = ServiceManager(os.environ, os.getpid(), clock)
    listener = adopt_inherited_listener(os.environ, os.getpid())
    try:
        uvloop.run(run_service(service, on_started=on_started, wallet_socket=listener, service_manager=manager))
    finally:
        if reporter is not None:
            reporter.close()
