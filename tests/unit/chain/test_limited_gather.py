"""`gather_limited`: order of results, concurrency limit, stop after an error."""

from __future__ import annotations

import asyncio

import pytest

from helper.chain.limited_gather import gather_limited
from helper.errors import HelperError
from tests.support.fakes import TIMEOUT_SECONDS


async def test_gather_limited_returns_in_order_and_stops_after_error() -> None:
    started: list[int] = []

    async def work(number: int) -> int:
        started.append(number)
        if number == 3:
            raise HelperError("three")
        return number * 2

    assert await gather_limited([0, 1, 2], work, 2) == [0, 2, 4]
    assert await gather_limited([], work, 2) == []
    started.clear()
    with pytest.raises(HelperError, match="three"):
        await gather_limited(range(100), work, 1)
    assert started == [0, 1, 2, 3]


async def test_gather_limited_runs_exactly_limit_concurrently() -> None:
    under_way, most = 0, 0
    together = asyncio.Barrier(3)

    async def work(_: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await together.wait()
        under_way -= 1

    async with asyncio.timeout(TIMEOUT_SECONDS):  # Two concurrent calls would wait for a third.
        await gather_limited(range(21), work, 3)
    assert most == 3
