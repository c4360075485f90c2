"""Simulated machine that starts, stops, kills and restarts the service."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from helper.app.service import Service
from helper.clock import RECHECK_SECONDS, Clock
from helper.config.sections import Config
from helper.errors import HelperError
from tests.simulation.chain import EPOCH
from tests.simulation.clients import ServiceRun, create_node
from tests.simulation.event_log import EventLog
from tests.simulation.fakes import SimShareValidator
from tests.simulation.node import SimNode
from tests.simulation.prover import SimProvers
from tests.simulation.scenario import Scenario
from tests.simulation.store import SimDisk, SimStore
from tests.simulation.virtual_loop import SimLoop

T = TypeVar("T")

STOP_SECONDS = 10.0
REQUEST_GRACE = 5.0
RESTART_SECONDS = 3.0


class UnreachableError(Exception):
    """The service does not respond."""


class SimClock(Clock):
    """Clock of the service. Its wall time can be set wrong."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._offset = 0.0
        self._wait_started_at: dict[asyncio.Timeout, float] = {}  # and the time its first slice began

    def set_offset(self, offset: float) -> None:
        """Set the error of the wall time, in seconds."""
        self._offset = offset
        now = self._loop.time()
        for timeout, started_at in self._wait_started_at.items():
            planned = timeout.when()
            if planned is not None and not timeout.expired():
                timeout.reschedule(min(planned, now + (started_at - now) % RECHECK_SECONDS))

    def now(self) -> float:
        return EPOCH + self._loop.now + self._offset

    def monotonic(self) -> float:
        return self._loop.now

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(max(0.0, seconds))

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """Wait as `Clock.wait` does, without a timer for each slice.

        The end of a slice matters only after the clock was set.
        """
        while not event.is_set() and (remaining := until - self.now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining) as timeout:
                    self._wait_started_at[timeout] = self._loop.now
                    try:
                        await event.wait()
                    finally:
                        del self._wait_started_at[timeout]


class ServiceHost:
    """Runs the service with its simulated dependencies."""

    def __init__(
        self,
        loop: SimLoop,
        plan: Scenario,
        event_log: EventLog,
        nodes: list[SimNode],
        disk: SimDisk,
        provers: SimProvers,
        *,
        name: str = "",
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self._loop = loop
        self._name = name
        self._settings = settings or {}
        self._plan = plan
        self._event_log = event_log
        self._nodes = nodes
        self._provers = provers
        self.disk = disk
        self.clock = SimClock(loop)
        self.service: Service | None = None
        self.store: SimStore | None = None
        self.start_count = 0
        self._service_run = ServiceRun()
        self._owner: object = None
        self._task: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[Any]] = set()
        self.on_attempt_spent: Callable[[int, str, str], None] = lambda share_id, stage, note: None

    def _create_config(self) -> Config:
        plan = self._plan
        sections: dict[str, dict[str, object]] = {
            "helper": {"max_concurrent_proofs": plan.workers, "purge_after_hours": plan.purge_after_seconds / 3600},
            "chain": {"poll_seconds": plan.poll_seconds, "chain_id": "svote-sim-1" if plan.has_chain_id else ""},
            "prover": {"circuit": plan.circuit_setting},
        }
        for section, values in self._settings.items():
            sections.setdefault(section, {}).update(values)
        return Config.model_validate(sections)

    def start(self) -> None:
        """Start the service; it restarts itself after a disk error."""
        self.start_count += 1
        self._service_run, self._owner = ServiceRun(), f"{self._name} run {self.start_count}"
        self._requests = set()
        self._task = self._create_service_task(self._run_service(self._service_run))
        self._event_log.record("service starts")

    def _create_service_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._loop.create_owned_task(self._owner, coroutine)

    async def _run_service(self, service_run: ServiceRun) -> None:
        while True:
            try:
                await self._run_service_once(service_run)
                return
            except HelperError as error:
                self._event_log.record("service ends", repr(error))
                if "ended unexpectedly" in str(error):
                    self._event_log.record_violation("a component of the service failed", error)
                    return
                await asyncio.sleep(RESTART_SECONDS)
            except Exception as error:
                self._event_log.record_violation("the service failed", repr(error), *traceback.format_exception(error))
                return

    async def _run_service_once(self, service_run: ServiceRun) -> None:
        store = self.store = SimStore(self.disk, self.clock)
        store.on_attempt_spent = self.on_attempt_spent
        nodes = [
            create_node(node, service_run, rpc=rpc)
            for node, rpc in zip(self._nodes, self._plan.nodes_with_rpc, strict=True)
        ]
        service = Service(
            self._create_config(),
            clock=self.clock,
            store=store,
            nodes=nodes,
            spawn_worker=self._provers.spawn,
            share_checks=SimShareValidator(),
        )
        try:
            async with service.open_queue():
                self.service = service
                await service.run_components()
                self.service = None
                if self._requests:
                    await asyncio.wait(self._requests, timeout=REQUEST_GRACE)
                for request in self._requests:
                    request.cancel()
        finally:
            self.service = None

    async def send_request(self, request_handler: Callable[[Service], Awaitable[T]]) -> T:
        """Send a request to the service."""
        service = self.service
        if service is None:
            await asyncio.sleep(0)
            raise UnreachableError
        request: asyncio.Task[T] = self._create_service_task(_as_coroutine(request_handler(service)))
        requests = self._requests
        requests.add(request)
        request.add_done_callback(requests.discard)
        await asyncio.wait([request])
        if request.cancelled():
            raise UnreachableError
        return request.result()

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def kill(self) -> None:
        """Kill the service with SIGKILL: it has no further effect."""
        if self.mark_killed():
            await self.clean_up()

    def mark_killed(self) -> bool:
        """Mark the service as killed; return False if it does not run."""
        if not self.is_running or self._service_run.is_killed:
            return False
        self._service_run.is_killed = True
        if self.store is not None:
            self.store.inline_writer.is_killed = True
        self._event_log.record("service is killed")
        return True

    async def clean_up(self) -> None:
        """Cancel the remaining tasks of the service."""
        await self._loop.cancel_tasks(self._owner)
        self.service, self._task = None, None

    async def stop(self) -> None:
        """Stop the service with SIGTERM and wait for its end."""
        if self.service is None or self._task is None:
            await self.kill()
            return
        self._event_log.record("service is stopped")
        self.service.stop()
        before = self._loop.time()
        while self.is_running and self._loop.time() < before + STOP_SECONDS + REQUEST_GRACE:
            await asyncio.wait([self._task], timeout=1)
        if self.is_running:
            self._event_log.record_violation("the service does not stop")
            await self.kill()
            return
        self._event_log.record("service has stopped")
        await self.clean_up()


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
