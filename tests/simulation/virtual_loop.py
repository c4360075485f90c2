"""An event loop whose time is virtual and whose order is drawn from a seed.

Its clock stands still while anything is ready and jumps to the next timer when nothing is. What is ready in the same
pass is run in a drawn order: real loops promise none between callbacks that different events made ready. There are no
threads, no sockets and no signals. Tasks are numbered and hashed by their number, so that even the order in which sets
of them are walked is the same each time. Futures are asyncio's own, which is quicker: nobody walks sets of those.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar, cast

T = TypeVar("T")

MAX_PASSES_WITHOUT_PROGRESS = 3_000
"""Passes of the loop in which time stands still; beyond these somebody spins."""


class StuckError(AssertionError):
    """Nothing is ready and nothing will ever be, or time stands still."""


class Handle(list[Any]):
    """A callback that is to be run: its context, itself, and its arguments; empty once it is cancelled.

    asyncio's own asks for its loop's debug mode, keeps a name for errors and looks at the flag of its end: made and run
    some ten thousand times a seed, that is a tenth of a seed's cost.
    """

    __slots__ = ()

    def cancel(self) -> None:
        """It is not to be run any more."""
        self.clear()


class SimTask(asyncio.Task[Any]):
    """A task with a number, and with what it belongs to: the world, or one life of the service."""

    number: int
    owner: object = None

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


_current_task = cast(Callable[[asyncio.AbstractEventLoop], SimTask | None], asyncio.current_task)


_Loop: Any = asyncio.AbstractEventLoop


class SimLoop(_Loop):  # type: ignore[misc]  # its stub wants thirty methods that nobody calls here
    """The loop.

    Args:
        rng: draws the order.
        shuffled: whether what is ready together runs in a drawn order, or in order of arrival.

    Attributes:
        now: the loop's time, in seconds since it was made.
        unhandled_errors: what the exception handler was told of: each is an error that nobody took.
        owner: what tasks that no task makes belong to; None is the world.
    """

    def __init__(self, rng: random.Random, *, shuffled: bool = True) -> None:
        self._rng = rng
        self._shuffled = shuffled
        self.now = 0.0
        self._ready: list[Handle] = []
        self._timers: list[tuple[float, float, int, Handle]] = []
        self._numbers = itertools.count()
        self._closed = False
        self._running = False
        self._pass_callback: Callable[[int], None] = lambda passes: None
        self._window_seconds = self._window_end = math.inf
        self._passes_at_window_start = 0
        self.unhandled_errors: list[dict[str, Any]] = []
        self.owner: object = None
        self._tasks_by_owner: dict[object, list[SimTask]] = {}
        self.passes = 0

    # What asyncio and anyio ask of a loop

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle((copy_context() if context is None else context, callback, args))
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle((copy_context() if context is None else context, callback, args))
        tie = self._rng.random() if self._shuffled else 0.0
        heappush(self._timers, (when, tie, next(self._numbers), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        number = next(self._numbers)
        # The number first: the constructor already puts the task into sets.
        task = SimTask.__new__(SimTask)
        task.number = number
        task.__init__(coro, loop=self, name=None if name is None else str(name))  # type: ignore[misc]
        maker = _current_task(self)
        task.owner = owner = maker.owner if maker is not None else self.owner
        if owner is not None:
            self._track_task(owner, task)
        return task

    def _track_task(self, owner: object, task: SimTask) -> None:
        """Remember whose task it is, and forget those that are done now and then."""
        tasks = self._tasks_by_owner.setdefault(owner, [])
        tasks.append(task)
        if len(tasks) > 200:
            tasks[:] = [one for one in tasks if not one.done()]

    def create_owned_task(self, owner: object, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that belongs to somebody else than who makes it."""
        task = self.create_task(work)
        assert isinstance(task, SimTask)
        task.owner = owner
        self._track_task(owner, task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled_errors.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled_errors.append(context)

    def get_exception_handler(self) -> None:
        return None

    def get_task_factory(self) -> None:
        return None

    async def run_inline(self, func: Callable[..., T], *args: Any) -> T:
        """What a thread would do, done here, with a moment before it in which others run."""
        await asyncio.sleep(0)
        return func(*args)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:
        return self.create_task(self.run_inline(func, *args))

    async def shutdown_asyncgens(self) -> None:
        """There is nothing to shut down."""

    # Running

    @contextmanager
    def _set_running(self) -> Iterator[None]:
        self._running = True
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            self._running = False

    def run_until_complete(self, future: Any) -> Any:
        """Run until a coroutine has ended; its result.

        Raises:
            StuckError: it never would.
        """
        with self._set_running():
            main = self.create_task(future)
            pass_limit = MAX_PASSES_WITHOUT_PROGRESS
            while not main.done():
                if not self._ready:
                    self._advance_to_next_timer()
                    pass_limit = self.passes + MAX_PASSES_WITHOUT_PROGRESS
                elif self.passes > pass_limit:
                    raise StuckError(f"time stands still at {self.now}: somebody spins")
                self._run_ready()
            return main.result()

    def _advance_to_next_timer(self) -> None:
        """Let the time pass to the next timer, and make ready what is due then."""
        timers = self._timers
        while timers and not timers[0][3]:
            heappop(timers)
        if not timers:
            raise StuckError(f"nothing will ever happen again at {self.now}")
        now = self.now = max(self.now, timers[0][0])
        if now >= self._window_end:
            self._pass_callback(self.passes - self._passes_at_window_start)
            self._window_end, self._passes_at_window_start = now + self._window_seconds, self.passes
        while timers and timers[0][0] <= now:
            if handle := heappop(timers)[3]:
                self._ready.append(handle)

    def _run_ready(self) -> None:
        """Run what is ready now; what becomes ready meanwhile waits for the next pass."""
        batch, self._ready = self._ready, []
        self.passes += 1
        if self._shuffled and len(batch) > 1:
            if len(batch) > 2:
                self._rng.shuffle(batch)
            elif self._rng.random() < 0.5:
                batch.reverse()
        handles = iter(batch)
        while True:
            try:
                for handle in handles:
                    if handle:
                        context, callback, args = handle
                        context.run(callback, *args)
                return
            except Exception as error:  # of one callback: the others are run all the same
                self.unhandled_errors.append({"message": "a callback failed", "exception": error})

    def report_passes(self, seconds: float, callback: Callable[[int], None]) -> None:
        """Tell every so many seconds how often the loop went round in them."""
        self._pass_callback, self._window_seconds, self._window_end = callback, seconds, self.now + seconds

    async def cancel_tasks(self, owner: object) -> None:
        """Cancel every task of an owner until none is left, whatever they do about it."""
        for _ in range(1000):
            left = [task for task in self._tasks_by_owner.get(owner, []) if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        raise StuckError(f"tasks that do not end: {left}")
