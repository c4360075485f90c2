"""Reads pages of leaves in turn; equal requests that wait for their turn share one read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import anyio

from helper.chain.node_http import StreamedResponse
from helper.core.refusals import Situation, TemporaryRefusal
from helper.errors import ChainError


class PageReads:
    """Reads of pages of leaves, of which a limited number is in progress.

    Requests for a page that is not being read yet share its read: their response is as new as that of a read of their
    own. While too much is shared, each of them reads the page itself, one after the other.

    Args:
        max_reads: maximum number of reads in progress.
        max_waiting: maximum number of requests that wait for a read to begin. Another one takes the place of the one
            that has waited longest, but not of requests that share a read while there is one that does not.
        slow_seconds: the requests of a read without a response for this long may be aborted for another read.
        max_shared_bytes: maximum bytes of all shared responses, which are in memory until their requests have ended.
    """

    def __init__(self, *, max_reads: int, max_waiting: int, slow_seconds: float, max_shared_bytes: int) -> None:
        self._max_reads = max_reads
        self._max_waiting = max_waiting
        self._slow_seconds = slow_seconds
        self._max_shared_bytes = max_shared_bytes
        self._shared_bytes = 0
        self._waiting: dict[str, _Read] = {}  # by target, in order
        self._running: dict[_Read, float] = {}  # the time of their start, or of the start of their response, in order

    @asynccontextmanager
    async def read(
        self, target: str, forward: AbstractAsyncContextManager[StreamedResponse], abort: Callable[[], None]
    ) -> AsyncIterator[StreamedResponse]:
        """Read a page.

        Args:
            target: path and query; the same for the same page.
            forward: sends the request, unless the response to another one is shared.
            abort: aborts the request.

        Raises:
            TemporaryRefusal: another request has taken the place.
            ChainError: as `forward`.
        """
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        read = self._join(target, turn, abort)
        try:
            async with AsyncExitStack() as stack:
                if not await turn:
                    raise TemporaryRefusal(Situation.TOO_MANY_CHAIN_REQUESTS)
                async with read.lock:
                    response = await self._get_response(read, forward, stack)
                self._end_turn(read, turn)
                yield response
        finally:
            self._end_turn(read, turn)
            read.users -= 1
            if not read.users:
                self._shared_bytes -= read.shared_bytes

    def _join(self, target: str, turn: asyncio.Future[bool], abort: Callable[[], None]) -> _Read:
        self._abort_slow()
        if sum(len(read.turns) for read in self._waiting.values()) >= self._max_waiting:
            displaced = min(self._waiting.values(), key=lambda each: len(each.turns))
            longest = next(iter(displaced.turns))
            _set(longest, is_granted=False)
            self._end_turn(displaced, longest)
        read = self._waiting.setdefault(target, _Read(target))
        read.turns[turn] = abort
        read.users += 1
        self._start_next()
        return read

    def _abort_slow(self) -> None:
        """Abort the requests of the oldest read if it is slow and others must wait for it."""
        if len(self._running) >= self._max_reads:
            read, started_at = next(iter(self._running.items()))
            if started_at <= anyio.current_time() - self._slow_seconds:
                for abort in list(read.turns.values()):
                    abort()
                del self._running[read]  # their tasks end only after the connections

    def _start_next(self) -> None:
        while self._waiting and len(self._running) < self._max_reads:
            read = self._waiting.pop(next(iter(self._waiting)))
            self._running[read] = anyio.current_time()
            for turn in read.turns:
                _set(turn, is_granted=True)

    async def _get_response(
        self, read: _Read, forward: AbstractAsyncContextManager[StreamedResponse], stack: AsyncExitStack
    ) -> StreamedResponse:
        """Return the shared response or error, or send the request and share its response if others want it."""

        def share(size: int) -> bool:
            read.shared_bytes += size
            self._shared_bytes += size
            return self._shared_bytes <= self._max_shared_bytes

        if isinstance(read.outcome, ChainError):
            raise read.outcome
        if read.outcome is not None:
            return read.outcome
        try:
            response = await stack.enter_async_context(forward)
            if self._running.pop(read, None) is not None:
                self._running[read] = anyio.current_time()  # as much time for the body
            if len(read.turns) > 1 and await response.buffer(share):
                read.outcome = response
                await stack.aclose()  # releases the connection to the node
        except ChainError as error:
            read.outcome = error
            raise
        return response

    def _end_turn(self, read: _Read, turn: asyncio.Future[bool]) -> None:
        """End the part of one request in a read. The read ends with the last one."""
        read.turns.pop(turn, None)
        if not read.turns:
            self._running.pop(read, None)
            if self._waiting.get(read.target) is read:
                del self._waiting[read.target]
            self._start_next()


class _Read:
    """A read of one page.

    Attributes:
        target: path and query of the page.
        turns: of requests without a response yet, in order; with what aborts the request. The result is whether the
            read has begun, or another request has taken the place.
        users: number of requests that have not ended.
        lock: held by the request that reads.
        outcome: the complete response, or the error; None before, or if it is not shared.
        shared_bytes: bytes of the response that are in memory.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.turns: dict[asyncio.Future[bool], Callable[[], None]] = {}
        self.users = 0
        self.lock = anyio.Lock()
        self.outcome: StreamedResponse | ChainError | None = None
        self.shared_bytes = 0


def _set(turn: asyncio.Future[bool], *, is_granted: bool) -> None:
    if not turn.done():  # it is cancelled if the client has left
        turn.set_result(is_granted)
