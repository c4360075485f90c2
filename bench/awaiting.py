"""Measure the cost of unconfirmed reveals: `python -m bench.awaiting [--sizes 100 10000] [--quick]`.

Runs the real service and its own chain with a database of accepted, unconfirmed messages. Measures the CPU time of the
service during a block in which no message needs a decision, compared with an empty queue, and the number of reveals
sent in one block when every message needs one. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.accept import PRODUCTION_SETTINGS
from bench.fill_database import generate_shares, open_existing_database, transaction
from helper.chain.reveal_transaction import RevealMessage
from helper.reveal import send_policy
from helper.store.messages import mark_sending, prepare, record_outcome
from helper.store.shares import EnqueueOperation, claim_due
from helper.store.table_rows import RevealRow
from tests.support.devnet import DevChain
from tests.support.event_clients import cpu_seconds
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, unix_time_in

SIZES = (100, 1000, 10_000)
BLOCK_SECONDS = 4.0
IDLE_BLOCKS = 1
"""Blocks during which no sent share needs a decision: one is due three blocks after the send."""
BUSY_BLOCKS = 3
PROOF_BYTES = 4992


def insert_prepared_shares(path: Path, round_id: bytes, first: int, last: int, height: int) -> list[int]:
    """Insert shares with prepared messages. Returns their ids."""
    past = unix_time_in(-600)
    with open_existing_database(path) as database:
        with transaction(database) as tx:
            for share, nullifier in generate_shares(round_id, first, last, past - 86_400):
                EnqueueOperation(share, nullifier, past - 100_000.0)(tx)
        with transaction(database) as tx:
            claimed = claim_due(tx, now=float(past), limit=last - first, rounds=[round_id])
            for queued in claimed:
                message = RevealMessage(
                    nullifier=queued.nullifier,
                    enc_share=queued.share.c1 + queued.share.c2,
                    proposal_id=1,
                    vote_decision=0,
                    proof=bytes(PROOF_BYTES),
                    round_id=round_id,
                    anchor_height=height,
                )
                row = RevealRow(queued.id, message.to_tx(), message.tx_hash(), height, "k10", height)
                prepare(tx, queued.id, row)
    return [queued.id for queued in claimed]


def record_sends(path: Path, share_ids: Sequence[int], height: int) -> None:
    """Record that all messages were sent and accepted at one height."""
    decide_height = send_policy.decide_height(first=height, last=height, outcome="ACCEPTED")
    with open_existing_database(path) as database, transaction(database) as tx:
        for share_id in share_ids:
            mark_sending(tx, share_id, height=height, endpoint="node", decide_height=height + 1)
            record_outcome(tx, share_id, outcome="ACCEPTED", decide_height=decide_height)


async def wait_for_block(chain: DevChain) -> int:
    """Wait for a block. Returns its height."""
    height = before = (await chain.get("/devnet/stats"))["height"]
    while height == before:
        await asyncio.sleep(0.05)
        height = (await chain.get("/devnet/stats"))["height"]
    return int(height)


async def measure(size: int) -> dict[str, float]:
    """Run once."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with httpx.AsyncClient(timeout=30) as http:
            chain = DevChain(directory, http, "--stand-in-proofs", "--block-seconds", str(BLOCK_SECONDS))
            await chain.start()
            helper = HelperProcess(directory, http, chain, program=STAND_IN_PROGRAM, **PRODUCTION_SETTINGS)
            try:
                round_id = await chain.open_round(seconds=3600)
                await helper.start()
                await helper.wait_until_ready()
                await wait_for_block(chain)
                idle = await _cpu_seconds(chain, helper, IDLE_BLOCKS)
                await helper.stop()
                height = (await chain.get("/devnet/stats"))["height"]
                share_ids: list[int] = []
                for first in range(0, size, 1000):
                    share_ids += insert_prepared_shares(helper.db, round_id, first, min(size, first + 1000), height)
                # Sent in the block before the measurement, so that none needs a decision during it.
                height = (await chain.get("/devnet/stats"))["height"] + 1 + size // 4000
                record_sends(helper.db, share_ids, height)
                await helper.start()
                await helper.wait_until_ready()
                while (reached := await wait_for_block(chain)) <= height:
                    pass
                if reached > height + 1:
                    raise RuntimeError("filling the database took too many blocks")
                waiting = await _cpu_seconds(chain, helper, IDLE_BLOCKS)
                sent = await _max_sent_in_block(chain, BUSY_BLOCKS)
            finally:
                await chain.kill()
                if helper.process is not None:
                    await helper.kill()
    return {
        "size": size,
        "idle_percent": 100 * idle / (IDLE_BLOCKS * BLOCK_SECONDS),
        "cpu_percent": 100 * waiting / (IDLE_BLOCKS * BLOCK_SECONDS),
        "added_percent": 100 * (waiting - idle) / (IDLE_BLOCKS * BLOCK_SECONDS),
        "sent_in_a_block": sent,
    }


async def _cpu_seconds(chain: DevChain, helper: HelperProcess, blocks: int) -> float:
    """Return the service's CPU seconds over this many blocks, starting just after a block."""
    await asyncio.sleep(BLOCK_SECONDS / 4)
    before = cpu_seconds(helper.pid)
    for _ in range(blocks):
        await wait_for_block(chain)
    await asyncio.sleep(BLOCK_SECONDS / 4)
    return cpu_seconds(helper.pid) - before


async def _max_sent_in_block(chain: DevChain, blocks: int) -> int:
    """Return the largest number of reveals received within one block interval."""
    for _ in range(blocks):
        await wait_for_block(chain)
    counts: Counter[int] = Counter()
    after = 0
    while entries := (await chain.get("/devnet/requests", after=after))["requests"]:
        counts.update(entry["height"] for entry in entries if "reveal" in entry["path"] and entry["method"] == "POST")
        after = entries[-1]["seq"]
    return max(counts.values(), default=0)


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of the smallest size")
    options = parser.parse_args()
    sizes, runs = (SIZES[:1], 1) if options.quick else (options.sizes, options.runs)
    results = []
    for size in sizes:
        for number in range(runs):
            print(f"{size} unconfirmed: run {number + 1}", file=sys.stderr)
            results.append(asyncio.run(measure(size)))
    print(json.dumps({"name": "awaiting", "runs": results}))


if __name__ == "__main__":
    main()
