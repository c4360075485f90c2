"""The send loop, which sends messages that other hosts have prepared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from helper.app.cluster import send_prepared
from helper.core.refusals import PauseReason
from helper.core.share import ShareState
from helper.lease import Lease
from helper.store import messages
from helper.store.transaction import Transaction
from tests.support.fakes import START_TIME, wait_until
from tests.support.queue_pipeline import Pipeline, open_pipeline


class FakeLease(Lease):
    """A lease that a test grants and revokes."""

    is_held = True


@pytest.fixture
def lease() -> FakeLease:
    return FakeLease()


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with open_pipeline(tmp_path / "queue.db") as opened:
        yield opened


@asynccontextmanager
async def run_send_loop(
    pipeline: Pipeline, lease: FakeLease, paused: list[str] | None = None
) -> AsyncIterator[asyncio.Event]:
    """Run a send loop next to a dispatcher that only proves."""
    pipeline.dispatcher.sender = None
    pipeline.sender = pipeline.make_sender(lease=lease)
    prepared = asyncio.Event()
    task = asyncio.create_task(
        send_prepared(
            pipeline.sender,
            prepared,
            get_pause_reason=lambda: paused[-1] if paused else None,
            clock=pipeline.clock,
            stats=pipeline.stats,
        )
    )
    try:
        yield prepared
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def enqueue_and_prepare(pipeline: Pipeline, number: int) -> bool:
    return list(pipeline.share_states().values()).count(ShareState.SENT) == number


async def test_send_loop_sends_prepared_share_within_a_second_without_notification(
    pipeline: Pipeline, lease: FakeLease
) -> None:
    async with run_send_loop(pipeline, lease), pipeline.run_dispatcher():
        await pipeline.enqueue(1, 2, 3)
        await wait_until(lambda: enqueue_and_prepare(pipeline, 3))
        assert pipeline.nodes.posts == []
        await pipeline.advance_when_idle(1.0)
        await wait_until(lambda: len(pipeline.nodes.posts) == 3)
        await pipeline.advance_when_idle(5.0)
        await pipeline.settle_dispatcher()
    assert len(pipeline.nodes.posts) == 3


@pytest.mark.parametrize("number", [1, 80], ids=["one", "more than the limit of concurrent sends"])
async def test_send_loop_notified_sends_immediately(pipeline: Pipeline, lease: FakeLease, number: int) -> None:
    async with run_send_loop(pipeline, lease) as prepared, pipeline.run_dispatcher():
        await pipeline.enqueue(*range(1, number + 1))
        await wait_until(lambda: enqueue_and_prepare(pipeline, number))
        prepared.set()
        await wait_until(lambda: len(pipeline.nodes.posts) == number)
    assert len({row[0] for row in pipeline.query_rows("SELECT share_id FROM reveals WHERE sends = 1")}) == number


async def test_send_loop_waits_for_lease(pipeline: Pipeline, lease: FakeLease) -> None:
    lease.is_held = False
    async with run_send_loop(pipeline, lease) as prepared, pipeline.run_dispatcher():
        await pipeline.enqueue(1, 2)
        await wait_until(lambda: enqueue_and_prepare(pipeline, 2))
        prepared.set()
        await pipeline.advance_when_idle(3.0)
        await pipeline.next_block()
        await pipeline.settle_dispatcher()
        assert pipeline.nodes.posts == []
        lease.is_held = True
        prepared.set()
        await wait_until(lambda: len(pipeline.nodes.posts) == 2)


def lose_lease(lease: FakeLease) -> None:
    lease.is_held = False


def lose_and_regain_lease(lease: FakeLease) -> None:
    lease.fence += 2  # another host held it in between, and may have sent this share or proven it again


@pytest.mark.parametrize("lose", [lose_lease, lose_and_regain_lease])
async def test_lease_change_while_recording_send_prevents_it(
    pipeline: Pipeline, lease: FakeLease, monkeypatch: pytest.MonkeyPatch, lose: Callable[[FakeLease], None]
) -> None:
    mark = messages.mark_sending
    marked: list[int] = []

    def slow(tx: Transaction, share_id: int, **details: Any) -> bool:
        is_marked = mark(tx, share_id, **details)
        lose(lease)
        marked.append(share_id)
        return is_marked

    monkeypatch.setattr(messages, "mark_sending", slow)
    async with run_send_loop(pipeline, lease) as prepared, pipeline.run_dispatcher():
        await pipeline.enqueue(1)
        await wait_until(lambda: enqueue_and_prepare(pipeline, 1))
        prepared.set()
        await wait_until(lambda: marked and pipeline.clock.sleeper_count == 2)  # the send has ended too
        await pipeline.settle_dispatcher()
        assert pipeline.nodes.posts == []
        monkeypatch.setattr(messages, "mark_sending", mark)
        lease.is_held = True
        await pipeline.next_block()  # it is unknown whether it was sent: it is sent a block later
        await wait_until(lambda: len(pipeline.nodes.posts) == 1)


async def test_paused_queue_holds_back_unsent_shares(pipeline: Pipeline, lease: FakeLease) -> None:
    paused: list[str] = [PauseReason.CLOCK_OFF_CHAIN]
    async with run_send_loop(pipeline, lease, paused) as prepared, pipeline.run_dispatcher():
        await pipeline.enqueue(1, submit_at=START_TIME)
        await wait_until(lambda: enqueue_and_prepare(pipeline, 1))
        prepared.set()
        await pipeline.advance_when_idle(2.0)
        await pipeline.settle_dispatcher()
        assert pipeline.nodes.posts == []
        paused.clear()
        prepared.set()
        await wait_until(lambda: len(pipeline.nodes.posts) == 1)
