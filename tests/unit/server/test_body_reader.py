"""Body reader: limits on size, time and memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import anyio
import pytest
from starlette.types import Message, Receive, Scope

from helper.core.refusals import Situation, TemporaryRefusal
from helper.ingest import payload
from helper.server import body_reader as body_module
from helper.server.body_reader import BodyReader
from helper.server.gateway_routes import BODY_SECONDS
from helper.store.models import EnqueueResult
from tests.simulation.virtual_loop import SimLoop
from tests.unit.ingest.admission_fixtures import create_body
from tests.unit.server.wallet_fixtures import SHARES_PATH, WalletApp, error_text


def create_request(*parts: bytes) -> tuple[Scope, Receive]:
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        return messages.pop(0)

    return {"type": "http", "method": "POST", "headers": []}, receive


async def endless_body(sent: list[int]) -> AsyncIterator[bytes]:
    while True:
        sent.append(65_536)
        yield b" " * 65_536


async def stalled_body(prefix: bytes) -> AsyncIterator[bytes]:
    yield prefix
    await anyio.sleep_forever()


async def test_body_reader_joins_chunks() -> None:
    assert await BodyReader().read(*create_request(b"ab", b"", b"c")) == b"abc"


async def test_body_reader_received_small_body_needs_no_wait() -> None:
    scope, receive = create_request(b"from the wire")
    complete_scope = {**scope, "state": {body_module.COMPLETE_BODY_KEY: bytearray(b"here")}}
    assert await BodyReader(uncounted_bytes=3).read(complete_scope, receive) == b"from the wire", (
        "a large body is counted as it arrives"
    )
    assert await BodyReader().read(complete_scope, receive) == b"here"
    assert complete_scope["state"][body_module.COMPLETE_BODY_KEY] == b"", "an idle connection reserves no memory"


async def test_body_reader_endless_body_is_refused() -> None:
    wallets, sent = WalletApp(), list[int]()
    async with wallets.create_client() as client:
        response = await client.post(SHARES_PATH, content=endless_body(sent))
    assert response.status_code == 413
    error_text(response)
    assert response.headers["connection"] == "close"
    assert payload.MAX_SHARE_BODY_BYTES < sum(sent) < payload.MAX_SHARE_BODY_BYTES + 2 * body_module.DRAIN_BYTES


async def test_body_reader_two_mebibytes_are_refused() -> None:
    wallets = WalletApp()
    async with wallets.create_client() as client:
        response = await client.post(SHARES_PATH, content=create_body()[:-1] + b" " * (2 << 20) + b"}")
    assert response.status_code == 413
    error_text(response)
    assert wallets.store.calls == []


async def test_body_reader_large_content_length_is_refused_unread() -> None:
    wallets = WalletApp()
    headers = {"Content-Length": str(payload.MAX_SHARE_BODY_BYTES + 1), "Expect": "100-continue"}
    async with wallets.create_client() as client:
        response = await client.post(SHARES_PATH, content=stalled_body(b""), headers=headers)
    assert response.status_code == 413


async def test_body_reader_largest_body_is_read() -> None:
    wallets = WalletApp()
    padding = payload.MAX_SHARE_BODY_BYTES - len(create_body())
    async with wallets.create_client() as client:
        fits = await client.post(SHARES_PATH, content=create_body()[:-1] + b" " * padding + b"}")
        over = await client.post(SHARES_PATH, content=create_body()[:-1] + b" " * (padding + 1) + b"}")
    assert (fits.status_code, over.status_code) == (200, 413)


Arrival = tuple[float, int]
"""Seconds since the previous part of a body, and the bytes of this one."""


def time_body(arrivals: Iterable[Arrival], **settings: Any) -> tuple[bool, float]:
    """Read a body on a virtual clock; return whether it was read, and after how many seconds."""

    async def read() -> tuple[bool, float]:
        loop, parts = asyncio.get_running_loop(), iter(arrivals)

        async def receive() -> Message:
            seconds, size = next(parts, (0.0, 0))
            await asyncio.sleep(seconds)
            return {"type": "http.request", "body": b"x" * size, "more_body": size > 0}

        try:
            await BodyReader(**settings).read({"type": "http", "method": "POST", "headers": []}, receive)
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
        await reader.read(*create_request(b" " * 60, b" " * 60))
    assert caught.value.situation is Situation.TOO_MANY_REQUESTS
    # The rejected body has released its memory.
    assert len(await reader.read(*create_request(b" " * 90))) == 90


async def test_body_reader_large_bodies_do_not_block_small_ones() -> None:
    reader = BodyReader(budget=100, uncounted_bytes=10)
    async with anyio.create_task_group() as group:
        started = anyio.Event()

        messages: list[Message] = [{"type": "http.request", "body": b" " * 110, "more_body": True}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            started.set()
            await anyio.sleep_forever()
            raise AssertionError

        group.start_soon(reader.read, {"type": "http", "method": "POST", "headers": []}, receive)
        await started.wait()
        assert len(await reader.read(*create_request(b" " * 5, b" " * 5))) == 10
        with pytest.raises(TemporaryRefusal) as caught:
            await reader.read(*create_request(b" " * 5, b" " * 6))
        assert caught.value.situation is Situation.TOO_MANY_REQUESTS
        group.cancel_scope.cancel()
    assert len(await reader.read(*create_request(b" " * 110))) == 110, "an abandoned reservation is released"


async def test_body_reader_body_counts_until_exit() -> None:
    reader = BodyReader(budget=40, uncounted_bytes=10)
    async with reader.buffer_body(*create_request(b"x" * 50)) as body:
        assert body == b"x" * 50
        with pytest.raises(TemporaryRefusal) as refused:
            await reader.read(*create_request(b"x" * 11))
        assert refused.value.situation is Situation.TOO_MANY_REQUESTS
        assert await reader.read(*create_request(b"x" * 10)) == b"x" * 10
    with pytest.raises(ZeroDivisionError):
        async with reader.buffer_body(*create_request(b"x" * 50)):
            raise ZeroDivisionError
    assert await reader.read(*create_request(b"x" * 50)) == b"x" * 50


async def test_shares_large_bodies_count_until_response() -> None:
    wallets = WalletApp(body_reader=BodyReader(budget=30_000))
    entered, gate = anyio.Event(), anyio.Event()
    large = create_body()[:-1] + b" " * 40_000 + b"}"
    enqueue = wallets.store.enqueue

    async def wait(*arguments: Any, **parts: Any) -> EnqueueResult:
        entered.set()
        await gate.wait()
        return await enqueue(*arguments, **parts)

    wallets.store.enqueue = wait  # type: ignore[method-assign]
    async with wallets.create_client() as client, anyio.create_task_group() as group:
        group.start_soon(partial(client.post, SHARES_PATH, content=large))
        await entered.wait()
        assert (await client.post(SHARES_PATH, content=large)).status_code == 503
        gate.set()
    async with wallets.create_client() as client:
        assert (await client.post(SHARES_PATH, content=large)).json() == {"status": "duplicate"}


async def test_body_reader_client_disconnect_logs_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": SHARES_PATH, "headers": [], "query_string": b""}
    await WalletApp().app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert "failed" not in capsys.readouterr().out
