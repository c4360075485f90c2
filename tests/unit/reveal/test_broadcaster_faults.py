"""Slow nodes, errors of ours and cancelled sends: no unconfirmed reveal holds up another, none is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from helper.reveal import broadcaster
from helper.reveal.broadcaster import IN_FLIGHT
from tests.support.fakes import (
    ACCEPTS,
    FIRST,
    SECOND,
    make_share,
    until,
    until_length,
)
from tests.support.queue_pipeline import Line, open_line


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with open_line(tmp_path / "queue.db") as opened:
        yield opened


async def test_a_tarpit_holds_up_only_as_many_as_are_in_flight(line: Line) -> None:
    release = asyncio.Event()
    under_way = most = 0

    async def tarpit(body: dict[str, Any]) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await release.wait()
        under_way -= 1
        return await ACCEPTS(body)

    line.all_nodes(tarpit)
    number = 3 * IN_FLIGHT
    await line.put(*range(number))
    for queued in await line.store.claim_due(now=line.clock.now(), limit=number, rounds=[make_share(1).round_id]):
        assert await line.revealer.prove(queued)
    task = asyncio.create_task(line.broadcaster.reconcile(line.height))
    await until(lambda: under_way == IN_FLIGHT)
    release.set()
    await task
    assert (most, len(line.nodes.posts)) == (IN_FLIGHT, number)


async def test_an_error_with_one_unconfirmed_reveal_stops_no_other(line: Line) -> None:
    async def surprise(body: dict[str, Any]) -> httpx.Response:
        raise RuntimeError("a bug")

    line.all_nodes(surprise)
    await line.prepared(1)
    with capture_logs() as logs:
        await line.broadcaster.reconcile(line.height)
    assert [entry["event"] for entry in logs] == ["follow_up_failed"]
    line.all_nodes(ACCEPTS)
    await line.prepared(2)
    line.store.broken.add("record_outcome")
    await line.next_block()
    line.store.broken.clear()
    assert len(line.nodes.posts) == 3
    await line.next_block()
    assert [row[0] for row in line.rows("SELECT last_outcome FROM reveals")] == ["ACCEPTED"] * 2


async def test_those_that_an_error_of_ours_stops_do_not_take_the_places_of_others(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "FOLLOWED_UP", 2)
    broken = [await line.prepared(position) for position in (1, 2)]
    original = line.store.mark_sending

    async def mark_sending(share_id: int, **details: Any) -> bool:
        if share_id in broken:
            raise RuntimeError("a bug")
        return await original(share_id, **details)

    monkeypatch.setattr(line.store, "mark_sending", mark_sending)
    await line.prepared(3)
    with capture_logs() as logs:
        await line.next_block()
        assert (len(logs), line.nodes.posts) == (2, [])
        await line.next_block()
    assert len(line.nodes.posts) == 1
    broken.clear()
    await line.next_block()
    await line.next_block()
    assert len(line.nodes.posts) == 3


async def test_a_send_that_is_cancelled_is_sent_again_after_the_next_start(tmp_path: Path) -> None:
    async with open_line(tmp_path / "queue.db") as line:
        held = asyncio.Event()

        async def never(body: dict[str, Any]) -> httpx.Response:
            await held.wait()
            return await ACCEPTS(body)

        line.nodes.answers[FIRST] = never
        async with line.running():
            await line.put(1)
            await until_length(line.nodes.posts, 1)
    async with open_line(tmp_path / "queue.db") as line:
        assert await line.store.recover() == 0
        await line.broadcaster.reconcile(line.height)
        assert line.nodes.posts == [], "it may have been taken at this height"
        await line.next_block()
        assert line.nodes.asked == [SECOND]
        assert line.sending()[0] == 2
