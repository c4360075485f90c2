"""One host of the campaign `hosts`: takes up what is due, "proves" it, keeps its message, and says so.

`python -m tests.campaign.prover_host ADDRESS SCHEMA NAME LEASE`; it ends when it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time

from helper.clock import SystemClock
from helper.errors import StoreError
from helper.store.postgres import PostgresStore
from helper.store.rows import QueuedShare
from tests.unit.store.conformance.backends import PostgresPlace
from tests.unit.store.fixtures import ROUND, message_of

AT_ONCE = 4
PROOF_SECONDS = 0.3
PAUSE = 0.1


async def prove(store: PostgresStore, name: str, one: QueuedShare) -> None:
    """One share's way to the message that is kept; said when it is."""
    if time.time() * 1000 < one.share.submit_at * 1000:
        print("early", one.id, flush=True)
    await asyncio.sleep(PROOF_SECONDS)
    while True:  # as long as it is in our hands it is in no other's
        try:
            kept = await store.prepare(one.id, message_of(one, name))
        except StoreError as error:
            print("trouble", one.id, error, flush=True)
            await asyncio.sleep(PAUSE)
        else:
            print("kept" if kept else "stale", one.id, flush=True)
            return


async def main(address: str, schema: str, name: str, lease: float) -> None:
    """Work until the end."""
    store = PostgresPlace(address, schema).store(SystemClock(), print, host=name, lease=lease)
    await store.open()
    await store.recover()
    print("open", 0, flush=True)
    while True:
        try:
            claimed = await store.claim_due(now=time.time(), limit=AT_ONCE, rounds=[ROUND])
            await asyncio.gather(*(prove(store, name, one) for one in claimed))
        except StoreError as error:
            print("trouble", 0, error, flush=True)
            claimed = []
        if not claimed:
            await asyncio.sleep(PAUSE)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
