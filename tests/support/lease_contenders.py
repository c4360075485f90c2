"""Contenders for one lease in an object store: `python -m tests.support.lease_contenders URL NAME COUNT SECONDS`.

Each contender is the product's keeper with a lease of SECONDS and a client of its own. While it holds the lease, it
writes an object `MARK_FOLDER/FENCE/NAME-NUMBER` every `MARK_SECONDS`, after the check that precedes every send. The
process prints "ready", runs until SIGTERM, and then releases the lease if one of its contenders holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from typing import Final

import structlog

from helper.clock import SystemClock
from helper.config.sections import S3Section
from helper.config.value_types import BucketLocation
from helper.errors import BucketError
from helper.lease import LeaseKeeper
from helper.lease.s3_lease import create_s3_lease
from helper.object_store import open_bucket
from tests.support.s3 import BUCKET_NAME

LEASE_OBJECT: Final = "contest/sender.json"
MARK_FOLDER: Final = "marks"
MARK_SECONDS: Final = 0.05


async def contend(url: str, name: str, seconds: float) -> None:
    clock, settings = SystemClock(), S3Section(endpoint=url)
    location = BucketLocation(BUCKET_NAME, LEASE_OBJECT)
    lease = create_s3_lease(settings, location, host=name, clock=clock, seconds=seconds)
    marks = open_bucket(settings, BucketLocation(BUCKET_NAME, MARK_FOLDER), clock=clock, seconds=seconds)
    keeping = asyncio.create_task(LeaseKeeper(lease, clock=clock, standby=True).run())
    try:
        for number in itertools.count():
            if lease.is_held:
                with contextlib.suppress(BucketError):
                    await marks.put(f"{lease.fence}/{name}-{number}", b"")
            await asyncio.sleep(MARK_SECONDS)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def main(url: str, name: str, count: int, seconds: float) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    tasks = [asyncio.create_task(contend(url, f"{name}.{number}", seconds)) for number in range(count)]
    print("ready", flush=True)
    await stopped.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
