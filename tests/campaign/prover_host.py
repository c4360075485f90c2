"""One host of the `hosts` campaign: claims due shares, fakes proofs, stores messages, prints events.

`python -m tests.campaign.prover_host ADDRESS SCHEMA NAME LEASE` runs until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time

from helper.clock import SystemClock
from helper.errors import StoreError
from helper.store.models import QueuedShare
from helper.store.postgres import PostgresStore
from tests.unit.store.conformance.backends import PostgresBackend
from tests.unit.store.fixtures import ROUND, make_message

MAX_CONCURRENT_PROOFS = 4
PROOF_SECONDS = 0.3
PAUSE_SECONDS = 0.1


async def prove_share(store: PostgresStore, name: str, queued: QueuedShare) -> None:
    """Prove a share, store its message, and print an event."""
    if time.time() * 1000 < queued.share.submit_at * 1000:
        print("early", queued.id, flush=True)
    await asyncio.sleep(PROOF_SECONDS)
    while True:  # no other host may have a claim while this host has it
        try:
            stored = await store.prepare(queued.id, make_message(queued, name))
        except StoreError as error:
            print("error", queued.id, error, flush=True)
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            print("stored" if stored else "stale", queued.id, flush=True)
            return


async def main(address: str, schema: str, name: str, lease: float) -> None:
    """Run until killed."""
    store = PostgresBackend(address, schema).create_store(SystemClock(), print, host=name, lease=lease)
    await store.open()
    await store.recover()
    print("open", 0, flush=True)
    while True:
        try:
            claimed = await store.claim_due(now=time.time(), limit=MAX_CONCURRENT_PROOFS, rounds=[ROUND])
            await asyncio.gather(*(prove_share(store, name, queued) for queued in claimed))
        except StoreError as error:
            print("error", 0, error, flush=True)
            claimed = []
        if not claimed:
            await asyncio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
