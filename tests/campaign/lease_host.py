"""One host of the campaign `lease`: a copy of a queue, its sender, and the lease in an object store that lets it send.

`python -m tests.campaign.lease_host URL FOLDER NAME SKEW LEASE`; it ends when it is killed. Store, broadcaster, keeper
and lease are the product's; the prover and the node are stand-ins. It tells, by the machine's monotonic clock:

    open                           it works
    held FENCE TIME                the lease said "held"
    sent CLAIMED LOOKED TIME       the first byte of a reveal would have left now; LOOKED is 0 where the lease was not
                                   found held after the claim
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from helper.lease.keeper import LeaseKeeper
from helper.lease.s3 import S3Lease, s3_lease
from helper.object_store.bucket import BucketLocation, S3Settings
from tests.support.fakes import ROUND, START, CountingClock, says
from tests.support.queue_pipeline import Line, open_line
from tests.support.s3 import BUCKET

OBJECT = "lease/sender.json"
EACH = 0.1
"""Seconds between two new shares, and between two looks for what there is to send."""
BLOCK = 1.0
LEFT = 50
"""Shares that wait for their block."""
AT_ONCE = 10
LOOK = 0.005
"""Seconds between two questions whether it is held."""
accepts = says(200, tx_hash="", code=0)


class OwnClock(CountingClock):
    """The machine's, but for a wall clock that is set wrong."""

    def __init__(self, skew: float) -> None:
        super().__init__()
        self._ahead = START + skew - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._ahead

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class ToldLease:
    """The lease, and what it was asked by whom."""

    def __init__(self, lease: S3Lease) -> None:
        self._lease = lease
        self.seconds = lease.seconds
        self.acquire, self.renew, self.release = lease.acquire, lease.renew, lease.release
        self.looked: dict[asyncio.Task[Any] | None, float] = {}

    @property
    def held(self) -> bool:
        """Whether it is, and told when it is."""
        now = time.monotonic()  # before: it is surely held at a moment at which it still is a little later
        if not self._lease.held:
            return False
        self.looked[asyncio.current_task()] = now
        print("held", self.fence, now, flush=True)
        return True

    @property
    def fence(self) -> int:
        """See `Lease`."""
        return self._lease.fence

    @property
    def holder(self) -> str:
        """See `Lease`."""
        return self._lease.holder


def tell_sends(line: Line, lease: ToldLease) -> None:
    """Have every claim noted, and every send told."""
    claimed: dict[asyncio.Task[Any] | None, float] = {}
    mark = line.store.mark_sending

    async def noted(share_id: int, *, height: int, endpoint: str) -> bool:
        task = asyncio.current_task()
        lease.looked.pop(task, None)
        done = await mark(share_id, height=height, endpoint=endpoint)
        claimed[task] = time.monotonic()
        return done

    async def answer(body: dict[str, Any]) -> httpx.Response:
        task = asyncio.current_task()
        print("sent", claimed.pop(task), lease.looked.pop(task, 0), time.monotonic(), flush=True)
        return await accepts(body)

    setattr(line.store, "mark_sending", noted)  # noqa: B010 - the broadcaster's view of it
    line.all_nodes(answer)


async def vote(line: Line) -> None:
    """Shares come in and are proven, and blocks come, which count those of some blocks ago."""
    position, counted, block = 0, 0, time.monotonic()
    while True:
        position += 1
        await line.put(position)
        for queued in await line.store.claim_due(now=line.clock.now(), limit=AT_ONCE, rounds=[ROUND]):
            await line.revealer.prove(queued)
        if time.monotonic() - block > BLOCK:
            block = time.monotonic()
            line.block()
            until = max(counted, position - LEFT)
            await line.count_on_chain(*range(counted + 1, until + 1))
            counted = until
        await asyncio.sleep(EACH)


async def send(line: Line) -> None:
    """Send what nobody has sent, and again what is not counted, as a sender does."""
    while True:
        await line.broadcaster.send_new()
        await line.broadcaster.reconcile(line.height)
        await asyncio.sleep(EACH)


async def watch(lease: ToldLease) -> None:
    """Look at it without end."""
    while True:
        _ = lease.held
        await asyncio.sleep(LOOK)


async def main(url: str, folder: Path, name: str, skew: float, seconds: float) -> None:
    """Work until the end."""
    clock = OwnClock(skew)
    place = BucketLocation(BUCKET, OBJECT)
    settings = S3Settings(endpoint=url)
    lease = ToldLease(s3_lease(settings, place, host=name, clock=clock, env=os.environ, seconds=seconds))
    folder.mkdir(exist_ok=True)
    async with open_line(folder / f"{os.getpid()}.db", clock=clock) as line, asyncio.TaskGroup() as group:
        line.broadcaster = line.make_broadcaster(lease=lease)
        tell_sends(line, lease)
        print("open", flush=True)
        for part in (LeaseKeeper(lease, clock=clock, standby=True).run(), vote(line), send(line), watch(lease)):
            group.create_task(part)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]), float(sys.argv[5])))
