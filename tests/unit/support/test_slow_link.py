"""A slow link forwards all bytes in order, at most at its bandwidth and never before its delay."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.servers import serve_connections
from tests.support.slow_link import SlowLink

pytestmark = pytest.mark.anyio

SIZE = 30_000


async def test_slow_link_connections_share_bandwidth_and_have_the_delay() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        await writer.drain()
        writer.close()

    async with (
        serve_connections(echo) as target,
        SlowLink(f"http://127.0.0.1:{target}", bytes_per_second=200_000, delay=0.1) as link,
    ):
        port = int(link.url.rpartition(":")[2])

        async def exchange(letter: bytes) -> tuple[bytes, float]:
            started_at = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(letter * SIZE)
            writer.write_eof()
            response = await reader.read()
            writer.close()
            return response, time.monotonic() - started_at

        short, seconds = await exchange(b"")
        assert short == b""
        assert seconds >= 0.2
        responses = await asyncio.gather(exchange(b"a"), exchange(b"b"))
    assert [response for response, _ in responses] == [b"a" * SIZE, b"b" * SIZE]
    # Both need the whole bandwidth for 0.3 s upwards; the link is free for the answers only partly before that.
    assert max(seconds for _, seconds in responses) >= 0.2 + 2 * SIZE / 200_000
