"""A TCP server that leaves nothing behind: its handlers have ended when the block ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serve_connections(handle: Handler) -> AsyncIterator[int]:
    """Accept connections on a free port of 127.0.0.1; yields the port.

    A handler that still runs at the end of the block is cancelled and awaited. Otherwise the garbage collector finds
    its connection later, and reports it in another test.
    """
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # asyncio reports a cancelled handler as an error
                await handle(reader, writer)
        finally:
            handlers.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        # The last connection may be accepted and not have its handler yet: asyncio needs three turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await server.wait_closed()
