"""Compares the shares that wallets posted with the reveals that the chain received
and counted. The dev chain is a separate process. Its request log shows when each reveal arrived, and its blocks show
which reveals were counted; both are independent of the helper's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.campaign.campaign import Findings
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess


@dataclass(frozen=True, slots=True)
class PostedShare:
    """A share that was posted to a helper: its round, and its due time in seconds, 0 for immediately."""

    round_id: bytes
    submit_at: int


@dataclass(slots=True)
class ShareLedger:
    """The wallets' records by nullifier (hex): posted shares, acknowledgment times and response times."""

    posted: dict[str, PostedShare] = field(default_factory=dict)
    acknowledged_at: dict[str, float] = field(default_factory=dict)
    response_seconds: list[float] = field(default_factory=list)

    def record_post(self, nullifier: bytes, round_id: bytes, submit_at: int) -> None:
        self.posted.setdefault(nullifier.hex(), PostedShare(round_id, submit_at))

    def record_acknowledgment(self, nullifier: bytes, at: float, seconds: float) -> None:
        """Record a 200 for a share: its Unix time and the response time in seconds."""
        self.acknowledged_at.setdefault(nullifier.hex(), at)
        self.response_seconds.append(seconds)

    @property
    def round_ids(self) -> set[bytes]:
        return {share.round_id for share in self.posted.values()}


async def count_confirmed(chain: DevChain, rounds: Iterable[bytes]) -> Counter[str]:
    """Return how often each nullifier (hex) was counted."""
    counts: Counter[str] = Counter()
    for round_id in rounds:
        counts.update(await chain.spent_nullifiers(round_id))
    return counts


async def wait_until_drained(chain: DevChain, ledger: ShareLedger, seconds: float) -> None:
    """Wait until all acknowledged shares are confirmed, at most this long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while ledger.acknowledged_at.keys() - (await count_confirmed(chain, ledger.round_ids)).keys():
                await asyncio.sleep(0.5)


@dataclass
class StatusObservations:
    """What the helper and the chain reported of shares while they were polled.

    Attributes:
        confirmed: shares that the helper reported as confirmed.
        wrongly_confirmed: those that the chain had not counted at that moment.
        counted_at: Unix time at which the chain was first seen to have counted a share.
    """

    confirmed: set[str] = field(default_factory=set)
    wrongly_confirmed: set[str] = field(default_factory=set)
    counted_at: dict[str, float] = field(default_factory=dict)

    async def poll(self, helper: HelperProcess, chain: DevChain, ledger: ShareLedger) -> None:
        """Poll every acknowledged share forever, and compare each "confirmed" with the chain."""
        while True:
            newly_confirmed = set()
            for nullifier in ledger.acknowledged_at.keys() - self.confirmed:
                round_id = ledger.posted[nullifier].round_id
                with contextlib.suppress(httpx.HTTPError):
                    if await helper.share_status(round_id, bytes.fromhex(nullifier)) == "confirmed":
                        newly_confirmed.add(nullifier)
            if ledger.acknowledged_at.keys() - self.confirmed:
                counted = await count_confirmed(chain, ledger.round_ids)
                self.wrongly_confirmed |= newly_confirmed - counted.keys()
                self.confirmed |= newly_confirmed
                self.counted_at = dict.fromkeys(counted, time.time()) | self.counted_at
            await asyncio.sleep(0.2)


async def find_broadcasts(chain: DevChain, ledger: ShareLedger) -> list[dict[str, Any]]:
    """Return the requests with reveals of the ledger's shares, oldest first."""
    return [entry for entry in await chain.broadcasts() if entry["nullifier"] in ledger.posted]


async def check_promises(findings: Findings, chain: DevChain, ledger: ShareLedger) -> None:
    """Check that no share is lost, early or counted twice."""
    spent = await count_confirmed(chain, ledger.round_ids)
    sent = await find_broadcasts(chain, ledger)
    early = [entry for entry in sent if entry["time"] < ledger.posted[entry["nullifier"]].submit_at]
    findings.record_figure("posted", len(ledger.posted))
    findings.record_figure("acknowledged", len(ledger.acknowledged_at))
    findings.record_figure("broadcasts", len(sent))
    findings.require_equal("acknowledged and not counted", len(ledger.acknowledged_at.keys() - spent.keys()), 0)
    findings.require_equal("sent before submit_at", len(early), 0)
    findings.require_equal("counted twice", sum(times > 1 for times in spent.values()), 0)
    findings.require_at_least("shares acknowledged", len(ledger.acknowledged_at), 1)


async def check_one_broadcast_per_height(findings: Findings, chain: DevChain, ledger: ShareLedger) -> None:
    """Check for at most one broadcast per share and height of the receiving node."""
    times = Counter((entry["nullifier"], entry["height"]) for entry in await find_broadcasts(chain, ledger))
    findings.require_at_most("broadcasts of a share at one height", max(times.values(), default=0), 1)


async def check_no_share_charged(findings: Findings, helper: HelperProcess, *, closed: int = 0) -> None:
    """Check in the counters and the database that no attempt, failure, closing or purge occurred."""
    counts = await helper.service_counts()
    findings.require_equal("attempts spent", counts.get("failures", 0), 0)
    findings.require_equal("failed", counts.get("failed", 0) + counts.get("expired", 0), 0)
    findings.require_equal("shares quarantined", helper.count_rows("damaged"), 0)
    closed_rounds = helper.query_rows(
        "SELECT count(*) FROM rounds WHERE closed_ms IS NOT NULL OR alerted_ms IS NOT NULL"
    )[0][0]
    findings.require_equal("rounds closed", closed_rounds, closed)
