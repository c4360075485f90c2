"""One host of the `lease` campaign: a queue, its sender, and a lease in an object store.

`python -m tests.campaign.lease_host URL FOLDER NAME SKEW LEASE` runs until it is killed. Store, sender, keeper and
lease are the product's; the prover and the node are fakes. It prints these events, with times of the machine's
monotonic clock:

    open                           it is ready
    held FENCE TIME                the lease was reported as held
    sent CLAIMED CHECKED TIME      the first byte of a reveal would have been sent now; CHECKED is 0 if no successful
                                   lease check followed the claim
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from helper.lease.keeper import LeaseKeeper
from helper.lease.s3 import S3Lease, create_s3_lease
from helper.object_store.bucket import BucketLocation, S3Settings
from tests.support.fakes import ROUND, START_TIME, CountingClock, reply_with
from tests.support.queue_pipeline import Pipeline, open_pipeline
from tests.support.s3 import BUCKET_NAME

LEASE_OBJECT = "lease/sender.json"
ENQUEUE_SECONDS = 0.1
"""Seconds between two new shares, and between two checks for messages to send."""
BLOCK_SECONDS = 1.0
UNCONFIRMED_BLOCKS = 50
"""Number of shares that wait for confirmation in a block."""
MAX_CONCURRENT_SENDS = 10
CHECK_INTERVAL_SECONDS = 0.005
"""Seconds between two lease checks."""
ACCEPTED_REPLY = reply_with(200, tx_hash="", code=0)


class SkewedClock(CountingClock):
    """The machine's clock with a wrong wall time."""

    def __init__(self, skew: float) -> None:
        super().__init__()
        self._skew = START_TIME + skew - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._skew

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


@dataclass
class Claim:
    """Times of a claim and of the last lease check after it."""

    claimed_at: float
    checked_at: float = 0.0


CURRENT_CLAIM: ContextVar[Claim | None] = ContextVar("CURRENT_CLAIM", default=None)
"""The latest claim of a task. A call that sends the message is a task of its own and inherits it."""


class ReportingLease:
    """A lease that prints when it is held and records the checks of each claim."""

    def __init__(self, lease: S3Lease) -> None:
        self._lease = lease
        self.seconds = lease.seconds
        self.acquire, self.renew, self.release = lease.acquire, lease.renew, lease.release

    @property
    def is_held(self) -> bool:
        """Whether the lease is held; prints an event if it is."""
        now = time.monotonic()  # taken before the check: if the check succeeds, the lease was held at this earlier time
        if not self._lease.is_held:
            return False
        if (claim := CURRENT_CLAIM.get()) is not None:
            claim.checked_at = now
        print("held", self.fence, now, flush=True)
        return True

    @property
    def fence(self) -> int:
        return self._lease.fence

    @property
    def holder(self) -> str:
        return self._lease.holder

    @property
    def holder_seconds(self) -> float:
        return self._lease.holder_seconds


def report_sends(pipeline: Pipeline) -> None:
    """Record every claim and print every send."""
    mark = pipeline.store.mark_sending

    async def record_claim(share_id: int, **details: Any) -> bool:
        is_marked = await mark(share_id, **details)
        CURRENT_CLAIM.set(Claim(time.monotonic()))
        return is_marked

    async def report_send(body: dict[str, Any]) -> httpx.Response:
        claim = CURRENT_CLAIM.get()
        assert claim is not None
        print("sent", claim.claimed_at, claim.checked_at, time.monotonic(), flush=True)
        return await ACCEPTED_REPLY(body)

    setattr(pipeline.store, "mark_sending", record_claim)  # noqa: B010 - replaces the method that the sender calls
    pipeline.set_replies(report_send)


async def enqueue_and_confirm(pipeline: Pipeline) -> None:
    """Enqueue and prove shares, and confirm those of earlier blocks."""
    position, counted, block = 0, 0, time.monotonic()
    while True:
        position += 1
        await pipeline.enqueue(position)
        for queued in await pipeline.store.claim_due(
            now=pipeline.clock.now(), limit=MAX_CONCURRENT_SENDS, rounds=[ROUND]
        ):
            await pipeline.revealer.prove(queued)
        if time.monotonic() - block > BLOCK_SECONDS:
            block = time.monotonic()
            pipeline.show_block()
            until = max(counted, position - UNCONFIRMED_BLOCKS)
            await pipeline.count_on_chain(*range(counted + 1, until + 1))
            counted = until
        await asyncio.sleep(ENQUEUE_SECONDS)


async def send_prepared(pipeline: Pipeline) -> None:
    """Send new messages and resend unconfirmed ones, as a sender does."""
    while True:
        await pipeline.sender.send_new()
        await pipeline.sender.reconcile()
        await asyncio.sleep(ENQUEUE_SECONDS)


async def watch_lease(lease: ReportingLease) -> None:
    while True:
        _ = lease.is_held
        await asyncio.sleep(CHECK_INTERVAL_SECONDS)


async def main(url: str, directory: Path, name: str, skew: float, seconds: float) -> None:
    clock = SkewedClock(skew)
    location = BucketLocation(BUCKET_NAME, LEASE_OBJECT)
    settings = S3Settings(endpoint=url)
    lease = ReportingLease(create_s3_lease(settings, location, host=name, clock=clock, env=os.environ, seconds=seconds))
    directory.mkdir(exist_ok=True)
    async with open_pipeline(directory / f"{os.getpid()}.db", clock=clock) as pipeline, asyncio.TaskGroup() as group:
        pipeline.sender = pipeline.make_sender(lease=lease)
        report_sends(pipeline)
        print("open", flush=True)
        for part in (
            LeaseKeeper(lease, clock=clock, standby=True).run(),
            enqueue_and_confirm(pipeline),
            send_prepared(pipeline),
            watch_lease(lease),
        ):
            group.create_task(part)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]), float(sys.argv[5])))
