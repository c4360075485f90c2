"""Checks under load: a wallet's 128 posts at once, and other requests during it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from conformance.check_failures import require
from conformance.checks import CheckList
from conformance.http_requests import ATTEMPT_HEADER, PATIENCE_SECONDS, Reply, open_raw, retry_pause_seconds
from conformance.post_checks import VIZOR_SECONDS
from conformance.session import Session, describe_many
from conformance.shares import TestShare, encode
from conformance.status_checks import STATUS_PATH, STATUS_SECONDS

_ROW_9: Final = "protocol-now §12 row 9"
_LIBRARY: Final = "wallet 5.3.0: 128 POSTs, 30 s"
_POSTS: Final = 128

checks = CheckList()


@dataclass(frozen=True, slots=True)
class _Burst:
    """128 shares posted at once: last response to each, how long it took, and responses of `status` meanwhile."""

    shares: Sequence[TestShare]
    replies: Sequence[Reply]
    seconds: Sequence[float]
    statuses: Sequence[Reply]


async def _post_burst(session: Session) -> _Burst:
    """Post 128 new shares, each on its own connection, and poll the status until all have a response."""
    shares = session.take_many(_POSTS)
    is_over = asyncio.Event()
    asking = asyncio.ensure_future(_poll_status(session, is_over))
    try:
        results = await asyncio.gather(*(_post_alone(session, share) for share in shares))
    finally:
        is_over.set()
        statuses = await asking
    return _Burst(shares, [reply for reply, _ in results], [seconds for _, seconds in results], statuses)


async def _post_alone(session: Session, share: TestShare) -> tuple[Reply, float]:
    """Post a share on its own connection, and again after 429 until the time limit.

    Returns:
        the last response, and how many seconds it took.
    """
    due, ends_at = session.time_for(share), session.clock.monotonic() + PATIENCE_SECONDS
    while True:
        started = session.clock.monotonic()
        reply = await _post_once(session, encode(share.body(due)))
        ended = session.clock.monotonic()
        if reply.is_accepted:
            session.record_accepted(share, due, session.clock.now())
        if reply.status != 429 or ended > ends_at:
            return reply, ended - started
        await session.clock.sleep(retry_pause_seconds(reply))


async def _post_once(session: Session, content: bytes) -> Reply:
    async with open_raw(session.client.address, session.client.token) as connection:
        # As wallet library 5.3.0: with the header, 429 is the response to "not now", and no 5xx is.
        headers = [("Connection", "close"), (ATTEMPT_HEADER, secrets.token_hex(32))]
        await connection.send(connection.share_request(content, headers))
        return await connection.response(PATIENCE_SECONDS)


async def _poll_status(session: Session, is_over: asyncio.Event) -> list[Reply]:
    replies: list[Reply] = []
    while not is_over.is_set():
        replies.append(await session.client.get(STATUS_PATH))
        await session.clock.sleep(0.05)
    return replies


@checks.must("LOAD-001", "128 shares at once are all queued", _ROW_9, shares=_POSTS, needs_shares=True)
async def _(session: Session) -> str:
    burst = await session.once(_post_burst)
    return require(
        {reply.outcome for reply in burst.replies} == {"queued"}, f"128 at once → {describe_many(burst.replies)}"
    )


@checks.must("LOAD-002", "128 shares at once get responses within 30 s", _LIBRARY, needs_shares=True)
async def _(session: Session) -> str:
    burst = await session.once(_post_burst)
    return require(max(burst.seconds) < PATIENCE_SECONDS, f"128 at once: slowest {max(burst.seconds):.2f} s")


@checks.should(
    "LOAD-003", "128 shares at once get responses within 5 s", "protocol §2: Vizor, 5 s per POST", needs_shares=True
)
async def _(session: Session) -> str:
    burst = await session.once(_post_burst)
    return require(max(burst.seconds) < VIZOR_SECONDS, f"128 at once: slowest {max(burst.seconds):.2f} s")


@checks.must("LOAD-004", "no share of a burst gets a 5xx", "protocol-now §12 row 8", needs_shares=True)
async def _(session: Session) -> str:
    burst = await session.once(_post_burst)
    return require(all(reply.status < 500 for reply in burst.replies), f"128 at once → {describe_many(burst.replies)}")


@checks.should("LOAD-005", "status responds within 2 s during a burst", "protocol-now §12 row 6", needs_shares=True)
async def _(session: Session) -> str:
    burst = await session.once(_post_burst)
    slowest = max(reply.seconds for reply in burst.statuses)
    is_met = slowest < STATUS_SECONDS and {reply.status for reply in burst.statuses} == {200}
    return require(
        is_met, f"{len(burst.statuses)} × GET status: slowest {slowest:.2f} s, {describe_many(burst.statuses)}"
    )


@checks.must("LOAD-006", "the same 128 again are all `duplicate`", "protocol R10", needs_shares=True)
async def _(session: Session) -> str:
    burst = await session.once(_post_burst)
    accepted = [share for share, reply in zip(burst.shares, burst.replies, strict=True) if reply.is_accepted]
    results = await asyncio.gather(*(_post_alone(session, share) for share in accepted))
    replies = [reply for reply, _ in results]
    return require({reply.outcome for reply in replies} == {"duplicate"}, f"again → {describe_many(replies)}")


@checks.must(
    "LOAD-007", "status responds while 64 bodies are incomplete", "protocol-now §11: slow clients hold no workers"
)
async def _(session: Session) -> str:
    async with AsyncExitStack() as stack:
        for _ in range(64):
            connection = await stack.enter_async_context(open_raw(session.client.address, session.client.token))
            await connection.send(connection.share_request(b'{"primary_blind":"', length=4000))
        reply = await session.client.get(STATUS_PATH)
    is_met = reply.status == 200 and reply.seconds < STATUS_SECONDS
    return require(is_met, f"64 incomplete bodies, GET status → {reply.status} after {reply.seconds:.2f} s")


@checks.must(
    "LOAD-008",
    "a share is accepted while 64 connections are idle",
    "protocol-now §11: short connections",
    shares=1,
    needs_shares=True,
)
async def _(session: Session) -> str:
    async with AsyncExitStack() as stack:
        for _ in range(64):
            await stack.enter_async_context(open_raw(session.client.address, session.client.token))
        reply = await session.post_share(session.take())
    return require(
        reply.is_accepted and reply.seconds < VIZOR_SECONDS, f"64 idle, POST → {reply} after {reply.seconds:.2f} s"
    )
