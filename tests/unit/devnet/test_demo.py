"""The demo's final stage: it ends with the tally, not with the round's end time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from devnet.demo.plan import DemoOptions
from devnet.demo.progress import ProgressBars
from devnet.demo.run import Demo
from tests.support.process import TIMEOUT_SECONDS

ROUND_ID = bytes(range(32))
OPTIONS = DemoOptions(voters=1)


@pytest.fixture
async def demo() -> AsyncIterator[Demo]:
    demo_ = Demo(OPTIONS, {"rest": "http://chain", "rpc": "http://rpc"}, {"url": "http://helper", "sockets": []})
    real = demo_._http
    yield demo_
    await real.aclose()


@pytest.mark.parametrize(
    ("confirmed", "posted"),
    [
        (OPTIONS.share_count, [("/devnet/rounds/end", {"round_id": ROUND_ID.hex()})]),
        (OPTIONS.share_count - 1, []),
    ],
)
async def test_round_end_with_all_shares_confirmed_queries_chain_immediately(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, confirmed: int, posted: list[tuple[str, Any]]
) -> None:
    seen: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json={})

    async def facts() -> dict[str, Any]:
        return {"counts": {"confirmed": confirmed}}

    monkeypatch.setattr(demo, "_merged_stats", facts)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as chain, asyncio.timeout(TIMEOUT_SECONDS):
        monkeypatch.setattr(demo, "_http", chain)
        await demo._end_round(ROUND_ID, ProgressBars(1))
    assert seen == posted
