"""Times of a request in the response, for clients that name it with X-Vote-Request-ID, if the setting is on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from structlog.testing import capture_logs

from tests.support.clock import FakeClock
from tests.unit.ingest.admission_fixtures import create_body
from tests.unit.server.wallet_fixtures import SHARES_PATH, STATUS_PATH, WalletApp

pytestmark = pytest.mark.anyio

ID = "0123456789ABCDEF" * 2
STARTED_AT = 1_790_000_000.25
HEADERS = {
    "x-vote-request-id": ID.lower(),
    "x-vote-handler-started-us": "1790000000250000",
    "x-vote-handler-duration-us": "0",
    "x-vote-body-read-us": "0",
}


def trace_headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("x-vote-")}


@pytest.mark.parametrize("body", [create_body(), b"{}"], ids=["accepted", "refused"])
async def test_named_request_gets_its_times(body: bytes) -> None:
    with capture_logs() as logs:
        async with WalletApp(trace_clock=FakeClock(STARTED_AT)).create_client() as client:
            posted = await client.post(SHARES_PATH, content=body, headers={"X-Vote-Request-ID": ID})
            status = await client.get(STATUS_PATH, headers={"X-Vote-Request-ID": ID})
    assert (trace_headers(posted), trace_headers(status)) == (HEADERS, HEADERS)
    assert ID.lower() not in repr(logs).lower()


async def test_body_that_arrives_later_has_its_time() -> None:
    begun = asyncio.Event()

    class Clock(FakeClock):
        def now(self) -> float:
            begun.set()
            return super().now()

    clock, body = Clock(STARTED_AT), create_body()

    async def send_slowly() -> AsyncIterator[bytes]:
        yield body[:100]
        await begun.wait()
        clock.advance(1.5)
        yield body[100:]

    async with WalletApp(trace_clock=clock).create_client() as client:
        response = await client.post(SHARES_PATH, content=send_slowly(), headers={"X-Vote-Request-ID": ID})
    times = {"x-vote-handler-duration-us": "1500000", "x-vote-body-read-us": "1500000"}
    assert trace_headers(response) == {**HEADERS, **times}


@pytest.mark.parametrize(
    "ids",
    [[], [ID[:-1]], [ID + "0"], [ID[:-1] + "g"], [ID, ID], [""]],
    ids=["none", "31", "33", "not hex", "two", "empty"],
)
async def test_request_without_valid_id_is_not_traced(ids: list[str]) -> None:
    async with WalletApp(trace_clock=FakeClock(STARTED_AT)).create_client() as client:
        response = await client.get(STATUS_PATH, headers=[("X-Vote-Request-ID", each) for each in ids])
    assert trace_headers(response) == {}


async def test_request_is_not_traced_by_default() -> None:
    async with WalletApp().create_client() as client:
        response = await client.get(STATUS_PATH, headers={"X-Vote-Request-ID": ID})
    assert trace_headers(response) == {}
