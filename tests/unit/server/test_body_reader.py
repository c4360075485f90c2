"""Body reader: limits on size, time and memory."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from starlette.exceptions import HTTPException

from helper.core.refusals import Situation, TemporaryRefusal
from helper.ingest import validator
from helper.server.body_reader import BodyReader
from helper.server.gateway_routes import BODY_SECONDS
from helper.server.protocol import Request
from tests.simulation.virtual_loop import SimLoop
from tests.unit.ingest.admission_fixtures import create_body
from tests.unit.server.wallet_fixtures import SHARES_PATH, WalletApp, error_text


class FakeRequest(Request):
    """A request with a body whose parts arrive when they are awaited."""

    def __init__(self, *parts: bytes, content_length: int = 0) -> None:
        self.head: Any = SimpleNamespace(content_length=content_length)
        self.body, self.is_body_complete, self.connection = b"", False, None
        self.parts = [*parts, b""]

    async def receive(self) -> tuple[bytes, bool]:
        return self.parts.pop(0), bool(self.parts)


async def test_body_reader_joins_chunks() -> None:
    assert await BodyReader().read(FakeRequest(b"ab", b"", b"c")) == b"abc"


async def test_body_reader_received_small_body_needs_no_wait() -> None:
    source = FakeRequest(b"received")
    source.body, source.is_body_complete = b"received", True
    with pytest.raises(TemporaryRefusal):
        await BodyReader(budget=0, uncounted_bytes=7).read(source)
    source.parts = [b"received"]
    assert await BodyReader(budget=0, uncounted_bytes=8).read(source) == b"received"


async def test_body_reader_endless_body_is_refused() -> None:
    source = FakeRequest(*[b" " * 65_536] * 1000)
    with pytest.raises(HTTPException) as caught:
        await BodyReader().read(source)
    assert (caught.value.status_code, caught.value.headers) == (413, {"Connection": "close"})
    assert len(source.parts) == 1000 - validator.MAX_SHARE_BODY_BYTES // 65_536


async def test_body_reader_large_content_length_is_refused_unread() -> None:
    source = FakeRequest(content_length=validator.MAX_SHARE_BODY_BYTES + 1)
    with pytest.raises(HTTPException) as caught:
        await BodyReader().read(source)
    assert (caught.value.status_code, source.parts) == (413, [b""])


async def test_body_reader_largest_body_is_read() -> None:
    wallets = WalletApp()
    padding = validator.MAX_SHARE_BODY_BYTES - len(create_body())
    async with wallets.create_client() as client:
        fits = await client.post(SHARES_PATH, content=create_body()[:-1] + b" " * padding + b"}")
        over = await client.post(SHARES_PATH, content=create_body()[:-1] + b" " * (padding + 1) + b"}")
    assert (fits.status_code, over.status_code) == (200, 413)
    error_text(over)


async def test_body_reader_counts_each_byte_of_a_body_without_a_length() -> None:
    reader = BodyReader(max_bytes=10)
    assert await reader.read(FakeRequest(b"x" * 9, b"x")) == b"x" * 10
    with pytest.raises(HTTPException, match="larger than 10 bytes"):
        await reader.read(FakeRequest(b"x" * 10, b"x"))


async def test_body_reader_holds_an_incomplete_body_once() -> None:
    reader, count, size = BodyReader(), 50, validator.SMALL_BODY_BYTES - 100
    stalled = asyncio.Semaphore(0)

    class StalledRequest(FakeRequest):
        async def receive(self) -> tuple[bytes, bool]:
            if not self.parts:
                stalled.release()
                await asyncio.Event().wait()
            self.parts.clear()
            return bytes(size), True

    tracemalloc.start()
    try:
        reads = [asyncio.create_task(reader.read(StalledRequest())) for _ in range(count)]
        for _ in reads:
            await stalled.acquire()
        held = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    assert held <= 1.5 * size, "4,000 clients that stall after 16 KiB would hold 128 MB"


Arrival = tuple[float, int]
"""Seconds since the previous part of a body, and the bytes of this one."""


def time_body(arrivals: Iterable[Arrival], **settings: Any) -> tuple[bool, float]:
    """Read a body on a virtual clock; return whether it was read, and after how many seconds."""

    async def read() -> tuple[bool, float]:
        loop, parts = asyncio.get_running_loop(), iter(arrivals)

        async def receive() -> tuple[bytes, bool]:
            seconds, size = next(parts, (0.0, 0))
            await asyncio.sleep(seconds)
            return b"x" * size, size > 0

        source = FakeRequest()
        source.receive = receive  # type: ignore[method-assign]
        try:
            await BodyReader(**settings).read(source)
        except TemporaryRefusal as refusal:
            return refusal.situation is not Situation.SLOW_BODY, loop.time()
        return True, loop.time()

    is_read, seconds = SimLoop(random.Random("loop")).run_until_complete(read())
    return is_read, round(seconds, 3)


@pytest.mark.rule("N3", "N29")
def test_body_reader_share_may_arrive_over_30_seconds() -> None:
    assert time_body([(1.0, 170)] * 29) == (True, 29.0)
    assert time_body([(19.9, 2500), (10.0, 2500)]) == (True, 29.9), "a Tor circuit may stall"
    assert time_body([(1.0, 170)] * 31) == (False, 30.0)


def test_body_reader_785_kb_arrive_at_20_kb_per_second_within_60_seconds() -> None:
    batch = [(2.0, 20_000), *[(1.0, 20_000)] * 39]
    assert time_body(batch) == (False, 30.0)
    assert time_body(batch, timeout_seconds=BODY_SECONDS) == (True, 41.0)
    assert time_body([(57.0 / 63, 1 << 14)] * 63, timeout_seconds=BODY_SECONDS) == (True, 57.0), "almost 1 MiB"


@pytest.mark.parametrize("arrivals", [[(1e6, 1)], [(1.0, 1)] * 100, [(1.0, 25)] * 100], ids=["none", "1 B/s", "25 B/s"])
def test_body_reader_slow_small_body_is_cut_off_after_20_seconds(arrivals: list[Arrival]) -> None:
    assert time_body(arrivals) == (False, 20.0)


@pytest.mark.parametrize(("size", "rate"), [(20_000, 1), (20_000, 63), (512 << 10, 1), (512 << 10, 4000)])
def test_body_reader_slow_large_body_is_cut_off_after_8_seconds(size: int, rate: int) -> None:
    assert time_body([(0.0, size), *[(1.0, rate)] * 100]) == (False, 8.0)


async def test_body_reader_total_budget_is_enforced() -> None:
    reader = BodyReader(budget=100, uncounted_bytes=0)
    with pytest.raises(TemporaryRefusal) as caught:
        await reader.read(FakeRequest(b" " * 60, b" " * 60))
    assert caught.value.situation is Situation.TOO_MANY_REQUESTS
    # The rejected body has released its memory.
    assert len(await reader.read(FakeRequest(b" " * 90))) == 90


async def test_body_reader_large_bodies_do_not_block_small_ones() -> None:
    reader = BodyReader(budget=100, uncounted_bytes=10)
    async with anyio.create_task_group() as group:
        started = anyio.Event()

        parts = [b" " * 110]

        async def receive() -> tuple[bytes, bool]:
            if parts:
                return parts.pop(), True
            started.set()
            await anyio.sleep_forever()
            raise AssertionError

        source = FakeRequest()
        source.receive = receive  # type: ignore[method-assign]
        group.start_soon(reader.read, source)
        await started.wait()
        assert len(await reader.read(FakeRequest(b" " * 5, b" " * 5))) == 10
        with pytest.raises(TemporaryRefusal) as caught:
            await reader.read(FakeRequest(b" " * 5, b" " * 6))
        assert caught.value.situation is Situation.TOO_MANY_REQUESTS
        group.cancel_scope.cancel()
    assert len(await reader.read(FakeRequest(b" " * 110))) == 110, "an abandoned reservation is released"


async def test_body_reader_body_counts_until_exit() -> None:
    reader = BodyReader(budget=40, uncounted_bytes=10)
    async with reader.buffer_body(FakeRequest(b"x" * 50)) as body:
        assert body == b"x" * 50
        with pytest.raises(TemporaryRefusal) as refused:
            await reader.read(FakeRequest(b"x" * 11))
        assert refused.value.situation is Situation.TOO_MANY_REQUESTS
        assert await reader.read(FakeRequest(b"x" * 10)) == b"x" * 10
    with pytest.raises(ZeroDivisionError):
        async with reader.buffer_body(FakeRequest(b"x" * 50)):
            raise ZeroDivisionError
    assert await reader.read(FakeRequest(b"x" * 50)) == b"x" * 50


async def test_shares_large_bodies_count_until_response() -> None:
    wallets = WalletApp(body_reader=BodyReader(budget=30_000))
    entered, gate = anyio.Event(), anyio.Event()
    large = create_body()[:-1] + b" " * 40_000 + b"}"
    run = wallets.store.run

    async def wait(*arguments: Any, **parts: Any) -> Any:
        entered.set()
        await gate.wait()
        return await run(*arguments, **parts)

    wallets.store.run = wait  # type: ignore[method-assign]
    async with wallets.create_client() as client, anyio.create_task_group() as group:
        group.start_soon(partial(client.post, SHARES_PATH, content=large))
        await entered.wait()
        assert (await client.post(SHARES_PATH, content=large)).status_code == 503
        gate.set()
    async with wallets.create_client() as client:
        assert (await client.post(SHARES_PATH, content=large)).json() == {"status": "duplicate"}
