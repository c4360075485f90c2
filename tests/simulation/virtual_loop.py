"""An event loop with virtual time and an execution order drawn from a seed.

The clock does not advance while callbacks are ready, and jumps to the next timer when none is. Callbacks that are ready
in the same pass run in a drawn order, because real loops guarantee no order between callbacks of different events.
There are no threads, sockets or signals. Tasks are numbered and hashed by their number, so that sets of tasks iterate
in a reproducible order. Futures are asyncio's own, which is faster; no code iterates over sets of futures.
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
"""Maximum passes of the loop without progress of time; more indicate a busy loop."""


class StuckError(AssertionError):
    """No callback is ready and no timer remains, or time does not advance."""


class Handle(list[Any]):
    """A scheduled callback: context, function and arguments; empty once cancelled.

    asyncio's own handle checks the loop's debug mode and stores a name for errors. With about ten thousand handles per
    seed that takes a tenth of the run time.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self.clear()


class SimTask(asyncio.Task[Any]):
    """A task with a number and an owner: the world (None) or one service run."""

    number: int
    owner: object = None

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


_current_task = cast(Callable[[asyncio.AbstractEventLoop], SimTask | None], asyncio.current_task)


_Loop: Any = asyncio.AbstractEventLoop


class SimLoop(_Loop):  # type: ignore[misc]  # its stub requires thirty methods that are unused here
    """The event loop.

    Args:
        shuffled: whether callbacks that are ready together run in a drawn order or in order of arrival.

    Attributes:
        owner: owner of tasks created outside any task; None is the world.
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

    # Interface required by asyncio and anyio

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
        tiebreak = self._rng.random() if self._shuffled else 0.0
        heappush(self._timers, (when, tiebreak, next(self._numbers), handle))
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
        # Set the number first: the constructor already adds the task to sets.
        task = SimTask.__new__(SimTask)
        task.number = number
        task.__init__(coro, loop=self, name=None if name is None else str(name))  # type: ignore[misc]
        creator = _current_task(self)
        task.owner = owner = creator.owner if creator is not None else self.owner
        if owner is not None:
            self._track_task(owner, task)
        return task

    def _track_task(self, owner: object, task: SimTask) -> None:
        """Record a task's owner, and drop finished tasks from time to time."""
        tasks = self._tasks_by_owner.setdefault(owner, [])
        tasks.append(task)
        if len(tasks) > 200:
            tasks[:] = [task for task in tasks if not task.done()]

    def create_owned_task(self, owner: object, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Create a task with an owner different from its creator's."""
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
        """Run a thread's function inline, after yielding to the loop once."""
        await asyncio.sleep(0)
        return func(*args)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:
        return self.create_task(self.run_inline(func, *args))

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: there are no asynchronous generators to close."""

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
        """Run a coroutine to its end and return its result."""
        with self._set_running():
            main = self.create_task(future)
            pass_limit = MAX_PASSES_WITHOUT_PROGRESS
            while not main.done():
                if not self._ready:
                    self._advance_to_next_timer()
                    pass_limit = self.passes + MAX_PASSES_WITHOUT_PROGRESS
                elif self.passes > pass_limit:
                    raise StuckError(f"time does not advance at {self.now}: busy loop")
                self._run_ready()
            return main.result()

    def _advance_to_next_timer(self) -> None:
        """Advance the time to the next timer and make due timers ready."""
        timers = self._timers
        while timers and not timers[0][3]:
            heappop(timers)
        if not timers:
            raise StuckError(f"no event is pending at {self.now}")
        now = self.now = max(self.now, timers[0][0])
        if now >= self._window_end:
            self._pass_callback(self.passes - self._passes_at_window_start)
            self._window_end, self._passes_at_window_start = now + self._window_seconds, self.passes
        while timers and timers[0][0] <= now:
            if handle := heappop(timers)[3]:
                self._ready.append(handle)

    def _run_ready(self) -> None:
        """Run the callbacks that are ready now; callbacks added by them wait for the next pass."""
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
            except Exception as error:  # an error in one callback: the others still run
                self.unhandled_errors.append({"message": "a callback failed", "exception": error})

    def report_passes(self, seconds: float, callback: Callable[[int], None]) -> None:
        """Call `callback` every `seconds` with the number of passes since the last call."""
        self._pass_callback, self._window_seconds, self._window_end = callback, seconds, self.now + seconds

    async def cancel_tasks(self, owner: object) -> None:
        """Cancel an owner's tasks repeatedly until all have finished."""
        for _ in range(1000):
            left = [task for task in self._tasks_by_owner.get(owner, []) if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        raise StuckError(f"tasks that do not end: {left}")
