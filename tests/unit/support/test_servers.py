"""Servers of tests that end with their block."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.servers import serve_connections

pytestmark = pytest.mark.anyio


async def test_handlers_have_ended_and_closed_their_connections_after_the_block() -> None:
    """As the handler of a node that never responds."""
    started, ended = asyncio.Event(), asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def wait(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serve_connections(wait) as port:
        reader, client = await asyncio.open_connection("127.0.0.1", port)
        await started.wait()
    assert ended.is_set()
    assert [writer.transport.is_closing() for writer in writers] == [True]
    with pytest.raises((ConnectionError, EOFError)):
        await reader.readexactly(1)
    client.close()
