"""The loop of the host that sends what others have prepared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from helper.cluster.send_loop import SendLoop
from helper.core.pause import PauseCause, PauseReason
from helper.core.share import ShareState
from helper.lease.local import LocalLease
from tests.support.fakes import START, until
from tests.support.queue_pipeline import Line, open_line


class Held(LocalLease):
    """A lease that a test gives and takes."""

    def __init__(self) -> None:
        self.held = True


@pytest.fixture
def lease() -> Held:
    return Held()


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with open_line(tmp_path / "queue.db") as opened:
        yield opened


@asynccontextmanager
async def sending(line: Line, lease: Held, paused: list[PauseReason] | None = None) -> AsyncIterator[SendLoop]:
    """A sender beside a processor that only proves."""
    line.processor._broadcaster = None
    line.broadcaster = line.make_broadcaster(lease=lease)
    loop = SendLoop(
        broadcaster=line.broadcaster,
        retention=line.retention,
        paused=lambda: paused[-1] if paused else None,
        clock=line.clock,
    )
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def prepared(line: Line, number: int) -> bool:
    return list(line.states().values()).count(ShareState.BROADCAST) == number


async def test_what_is_prepared_is_sent_without_a_word_within_a_second_and_once(line: Line, lease: Held) -> None:
    async with sending(line, lease), line.running():
        await line.put(1, 2, 3)
        await until(lambda: prepared(line, 3))
        assert line.nodes.posts == []
        await line.later(1.0)
        await until(lambda: len(line.nodes.posts) == 3)
        await line.later(5.0)
        await line.settle()
    assert len(line.nodes.posts) == 3


async def test_a_word_has_it_sent_at_once(line: Line, lease: Held) -> None:
    async with sending(line, lease) as loop, line.running():
        await line.put(1)
        await until(lambda: prepared(line, 1))
        loop.wake()
        await until(lambda: len(line.nodes.posts) == 1)


async def test_more_than_are_sent_at_once_all_go(line: Line, lease: Held) -> None:
    async with sending(line, lease) as loop, line.running():
        await line.put(*range(1, 81))
        await until(lambda: prepared(line, 80))
        loop.wake()
        await until(lambda: len(line.nodes.posts) == 80)
    assert len({row[0] for row in line.rows("SELECT share_id FROM reveals WHERE sends = 1")}) == 80


async def test_nothing_is_sent_without_the_lease_and_all_once_it_is_there(line: Line, lease: Held) -> None:
    lease.held = False
    async with sending(line, lease) as loop, line.running():
        await line.put(1, 2)
        await until(lambda: prepared(line, 2))
        loop.wake()
        await line.later(3.0)
        await line.next_block()
        await line.settle()
        assert line.nodes.posts == []
        lease.held = True
        loop.wake()
        await until(lambda: len(line.nodes.posts) == 2)


def ends(lease: Held) -> None:
    lease.held = False


def goes_and_comes_back(lease: Held) -> None:
    lease.fence += 2  # another host had it in between, and may have sent this share, or had it proven anew


@pytest.mark.parametrize("hurt", [ends, goes_and_comes_back])
async def test_a_lease_that_changes_while_a_send_is_noted_keeps_it_back(
    line: Line, lease: Held, monkeypatch: pytest.MonkeyPatch, hurt: Callable[[Held], None]
) -> None:
    mark = line.store.mark_sending
    marked: list[int] = []

    async def slow(share_id: int, *, height: int, endpoint: str) -> bool:
        done = await mark(share_id, height=height, endpoint=endpoint)
        hurt(lease)
        marked.append(share_id)
        return done

    monkeypatch.setattr(line.store, "mark_sending", slow)
    async with sending(line, lease) as loop, line.running():
        await line.put(1)
        await until(lambda: prepared(line, 1))
        loop.wake()
        await until(lambda: marked)
        await line.settle()
        assert line.nodes.posts == []
        monkeypatch.setattr(line.store, "mark_sending", mark)
        lease.held = True
        await line.next_block()  # nobody knows whether it was sent: it goes a block later
        await until(lambda: len(line.nodes.posts) == 1)


async def test_what_pauses_the_queue_holds_back_what_was_never_sent(line: Line, lease: Held) -> None:
    paused = [PauseCause.CLOCK_OFF_CHAIN.reason()]
    async with sending(line, lease, paused) as loop, line.running():
        await line.put(1, submit_at=START)
        await until(lambda: prepared(line, 1))
        loop.wake()
        await line.later(2.0)
        await line.settle()
        assert line.nodes.posts == []
        paused.clear()
        loop.wake()
        await until(lambda: len(line.nodes.posts) == 1)
