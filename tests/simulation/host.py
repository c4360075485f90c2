"""The machine that the service runs on: it starts it, kills it, stops it, and starts it again."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from helper.app.dependencies import Dependencies
from helper.app.service import Service
from helper.clock import SLICE
from helper.config import Config
from helper.errors import HelperError
from tests.simulation.chain import EPOCH
from tests.simulation.clients import Life, endpoint_of
from tests.simulation.event_log import Story
from tests.simulation.fakes import SimChecks
from tests.simulation.node import SimNode
from tests.simulation.prover import Provers
from tests.simulation.scenario import Plan
from tests.simulation.store import Disk, SimStore
from tests.simulation.virtual_loop import SimLoop

T = TypeVar("T")

STOP_SECONDS = 10.0
REQUEST_GRACE = 5.0
RESTART_SECONDS = 3.0


class UnreachableError(Exception):
    """The service does not answer."""


class SimClock:
    """The service's clock: the wall time may be wrong."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._offset = 0.0
        self._waits: dict[asyncio.Timeout, float] = {}  # and when its first slice began

    def set(self, offset: float) -> None:
        """From now on the wall time is wrong by so many seconds."""
        self._offset = offset
        now = self._loop.time()
        for timeout, began in self._waits.items():
            planned = timeout.when()
            if planned is not None and not timeout.expired():
                timeout.reschedule(min(planned, now + (began - now) % SLICE))

    def now(self) -> float:
        return EPOCH + self._loop.now + self._offset

    def monotonic(self) -> float:
        return self._loop.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """As `SlicedWait` does it, without the looks that see nothing: only after the clock was set does it matter when
        a slice ends.
        """
        while not event.is_set() and (remaining := until - self.now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining) as timeout:
                    self._waits[timeout] = self._loop.now
                    try:
                        await event.wait()
                    finally:
                        del self._waits[timeout]


class Host:
    """The service and what it stands on.

    Attributes:
        service: the one that lives, None while none does.
        on_spend: told of every attempt that is spent.
    """

    def __init__(
        self, loop: SimLoop, plan: Plan, story: Story, nodes: list[SimNode], disk: Disk, provers: Provers
    ) -> None:
        self._loop = loop
        self._plan = plan
        self._story = story
        self._nodes = nodes
        self._provers = provers
        self.disk = disk
        self.clock = SimClock(loop)
        self.service: Service | None = None
        self.store: SimStore | None = None
        self.lives = 0
        self._life = Life()
        self._owner: object = None
        self._task: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[Any]] = set()
        self.on_spend: Callable[[int, str, str], None] = lambda share_id, stage, note: None

    def _config(self) -> Config:
        plan = self._plan
        return Config.model_validate(
            {
                "helper": {"max_concurrent_proofs": plan.workers, "purge_after_hours": plan.purge_after / 3600},
                "chain": {"poll_seconds": plan.poll, "chain_id": "svote-sim-1" if plan.chain_id_set else ""},
                "prover": {"circuit": plan.setting},
            }
        )

    def start(self) -> None:
        """Start the service, and again whenever it ends by an error of its disk."""
        self.lives += 1
        self._life, self._owner = Life(), f"life {self.lives}"
        self._requests = set()
        self._task = self._spawn(self._live(self._life))
        self._story.tell("service starts")

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that belongs to this life of the service."""
        return self._loop.create_task_of(self._owner, work)

    async def _live(self, life: Life) -> None:
        while True:
            try:
                await self._live_once(life)
                return
            except HelperError as error:
                self._story.tell("service ends", repr(error))
                if "ended unexpectedly" in str(error):
                    self._story.fail("a part of the service died", error)
                    return
                await asyncio.sleep(RESTART_SECONDS)
            except Exception as error:
                self._story.fail("the service died", repr(error), *traceback.format_exception(error))
                return

    async def _live_once(self, life: Life) -> None:
        store = self.store = SimStore(self.disk, self.clock)
        store.on_spend = self.on_spend
        nodes = [endpoint_of(node, life, rpc=rpc) for node, rpc in zip(self._nodes, self._plan.rpcs, strict=True)]
        edges = Dependencies(store=store, nodes=nodes, spawn=self._provers.spawn, checks=SimChecks())
        service = Service(self._config(), clock=self.clock, edges=edges)
        try:
            async with service.opened():
                self.service = service
                await service.work()
                self.service = None
                if self._requests:
                    await asyncio.wait(self._requests, timeout=REQUEST_GRACE)
                for request in self._requests:
                    request.cancel()
        finally:
            self.service = None

    async def ask(self, work: Callable[[Service], Awaitable[T]]) -> T:
        """A request to the service.

        Raises:
            UnreachableError: nobody answers, or the service ended before it did.
        """
        service = self.service
        if service is None:
            await asyncio.sleep(0)
            raise UnreachableError
        request: asyncio.Task[T] = self._spawn(_awaited(work(service)))
        requests = self._requests
        requests.add(request)
        request.add_done_callback(requests.discard)
        await asyncio.wait([request])
        if request.cancelled():
            raise UnreachableError
        return request.result()

    @property
    def alive(self) -> bool:
        """Whether it runs, or tries to."""
        return self._task is not None and not self._task.done()

    async def kill(self) -> None:
        """SIGKILL: from now on nothing that it does has any effect."""
        if self.die():
            await self.bury()

    def die(self) -> bool:
        """The moment of the kill; False when it does not run."""
        if not self.alive or self._life.dead:
            return False
        self._life.dead = True
        if self.store is not None:
            self.store.inline.dead = True
        self._story.tell("service is killed")
        return True

    async def bury(self) -> None:
        """Take away what is left of it."""
        await self._loop.end(self._owner)
        self.service, self._task = None, None

    async def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        if self.service is None or self._task is None:
            await self.kill()
            return
        self._story.tell("service is stopped")
        self.service.stop()
        before = self._loop.time()
        while self.alive and self._loop.time() < before + STOP_SECONDS + REQUEST_GRACE:
            await asyncio.wait([self._task], timeout=1)
        if self.alive:
            self._story.fail("the service does not stop")
            await self.kill()
            return
        self._story.tell("service has stopped")
        await self.bury()


async def _awaited(work: Awaitable[T]) -> T:
    return await work
