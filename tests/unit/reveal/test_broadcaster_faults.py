"""Slow nodes, internal errors and cancelled sends: no reveal blocks another or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from helper.reveal import broadcaster
from helper.reveal.broadcaster import CONCURRENT_RESENDS
from tests.support.fakes import (
    ACCEPTED_REPLY,
    FIRST_NODE,
    SECOND_NODE,
    create_share,
    wait_for_length,
    wait_until,
)
from tests.support.queue_pipeline import Pipeline, open_pipeline


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


async def test_hanging_node_delays_only_sends_in_flight(pipeline: Pipeline) -> None:
    release = asyncio.Event()
    under_way = most = 0

    async def tarpit(body: dict[str, Any]) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await release.wait()
        under_way -= 1
        return await ACCEPTED_REPLY(body)

    pipeline.set_replies(tarpit)
    number = 3 * CONCURRENT_RESENDS
    await pipeline.enqueue(*range(number))
    for queued in await pipeline.store.claim_due(
        now=pipeline.clock.now(), limit=number, rounds=[create_share(1).round_id]
    ):
        assert await pipeline.revealer.prove(queued)
    task = asyncio.create_task(pipeline.broadcaster.reconcile(pipeline.height))
    await wait_until(lambda: under_way == CONCURRENT_RESENDS)
    release.set()
    await task
    assert (most, len(pipeline.nodes.posts)) == (CONCURRENT_RESENDS, number)


async def test_error_with_one_unconfirmed_reveal_does_not_stop_others(pipeline: Pipeline) -> None:
    async def raise_bug(body: dict[str, Any]) -> httpx.Response:
        raise RuntimeError("a bug")

    pipeline.set_replies(raise_bug)
    await pipeline.prepare_message(1)
    with capture_logs() as logs:
        await pipeline.broadcaster.reconcile(pipeline.height)
    assert [entry["event"] for entry in logs] == ["follow_up_failed"]
    pipeline.set_replies(ACCEPTED_REPLY)
    await pipeline.prepare_message(2)
    pipeline.store.failing_calls.add("record_outcome")
    await pipeline.next_block()
    pipeline.store.failing_calls.clear()
    assert len(pipeline.nodes.posts) == 3
    await pipeline.next_block()
    assert [row[0] for row in pipeline.query_rows("SELECT last_outcome FROM reveals")] == ["ACCEPTED"] * 2


async def test_failing_sends_do_not_occupy_slots_of_others(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcaster, "MAX_FOLLOW_UPS", 2)
    broken = [await pipeline.prepare_message(position) for position in (1, 2)]
    original = pipeline.store.mark_sending

    async def mark_sending(share_id: int, **details: Any) -> bool:
        if share_id in broken:
            raise RuntimeError("a bug")
        return await original(share_id, **details)

    monkeypatch.setattr(pipeline.store, "mark_sending", mark_sending)
    await pipeline.prepare_message(3)
    with capture_logs() as logs:
        await pipeline.next_block()
        assert (len(logs), pipeline.nodes.posts) == (2, [])
        await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 1
    broken.clear()
    await pipeline.next_block()
    await pipeline.next_block()
    assert len(pipeline.nodes.posts) == 3


async def test_cancelled_send_is_resent_after_restart(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path / "queue.db") as pipeline:
        held = asyncio.Event()

        async def hold_forever(body: dict[str, Any]) -> httpx.Response:
            await held.wait()
            return await ACCEPTED_REPLY(body)

        pipeline.nodes.replies[FIRST_NODE] = hold_forever
        async with pipeline.run_dispatcher():
            await pipeline.enqueue(1)
            await wait_for_length(pipeline.nodes.posts, 1)
    async with open_pipeline(tmp_path / "queue.db") as pipeline:
        assert await pipeline.store.recover() == 0
        await pipeline.broadcaster.reconcile(pipeline.height)
        assert pipeline.nodes.posts == [], "the node may have accepted it at this height"
        await pipeline.next_block()
        assert pipeline.nodes.posted_to == [SECOND_NODE]
        assert pipeline.read_send_state()[0] == 2
