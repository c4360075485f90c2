"""The independent witness: what wallets were promised, held against what the chain saw and counted.

The dev chain is a process of its own. Its request log says when each reveal came, its blocks say what counted: neither
knows what the helper believes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.campaign.campaign import Findings
from tests.support.devnet import Chain
from tests.support.harness import Helper

BROADCAST = "reveal-share"


@dataclass(frozen=True, slots=True)
class Posted:
    """A share that some helper may have.

    Attributes:
        round_id: its round.
        submit_at: its second, 0 for at once.
        position: leaf index of its vote commitment.
        order: how many shares were handed to the ledger before it.
    """

    round_id: bytes
    submit_at: int
    position: int
    order: int


@dataclass(slots=True)
class Ledger:
    """The wallets' side, by nullifier (hex): what was posted, when each was acknowledged, how long answers took."""

    posted: dict[str, Posted] = field(default_factory=dict)
    acknowledged: dict[str, float] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)

    def post(self, nullifier: bytes, round_id: bytes, submit_at: int, position: int) -> None:
        """A share is about to be posted."""
        self.posted.setdefault(nullifier.hex(), Posted(round_id, submit_at, position, len(self.posted)))

    def acknowledge(self, nullifier: bytes, at: float, seconds: float) -> None:
        """A helper answered 200 for it at this time (unix), after so many seconds."""
        self.acknowledged.setdefault(nullifier.hex(), at)
        self.waits.append(seconds)

    @property
    def rounds(self) -> set[bytes]:
        """The rounds of all shares."""
        return {share.round_id for share in self.posted.values()}


async def counted(chain: Chain, rounds: Iterable[bytes]) -> Counter[str]:
    """How often each nullifier (hex) counted."""
    found: Counter[str] = Counter()
    for round_id in rounds:
        found.update(await chain.spent(round_id))
    return found


async def drained(chain: Chain, ledger: Ledger, seconds: float) -> bool:
    """Wait until all that was acknowledged has counted; whether it did in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while ledger.acknowledged.keys() - (await counted(chain, ledger.rounds)).keys():
                await asyncio.sleep(0.5)
            return True
    return False


async def broadcasts(chain: Chain, ledger: Ledger) -> list[dict[str, Any]]:
    """Every request that brought a reveal of the ledger's shares, oldest first."""
    return [entry for entry in await chain.reveals() if entry["nullifier"] in ledger.posted]


async def judge(findings: Findings, chain: Chain, ledger: Ledger, *, tolerance: float = 0) -> None:
    """The promise of every campaign: none lost, none early (by more than `tolerance` seconds), none twice."""
    spent = await counted(chain, ledger.rounds)
    sent = await broadcasts(chain, ledger)
    early = [entry for entry in sent if entry["time"] < ledger.posted[entry["nullifier"]].submit_at - tolerance]
    findings.figure("posted", len(ledger.posted))
    findings.figure("acknowledged", len(ledger.acknowledged))
    findings.figure("broadcasts", len(sent))
    findings.exactly("acknowledged and not counted", len(ledger.acknowledged.keys() - spent.keys()), 0)
    early_by = f" by more than {tolerance:g} s" if tolerance else ""
    findings.exactly(f"sent before submit_at{early_by}", len(early), 0)
    findings.exactly("counted twice", sum(times > 1 for times in spent.values()), 0)
    findings.at_least("shares witnessed", len(ledger.acknowledged), 1)


async def once_a_height(findings: Findings, chain: Chain, ledger: Ledger) -> None:
    """At most one broadcast a share and block height, by the height that the node had when it came."""
    times = Counter((entry["nullifier"], entry["height"]) for entry in await broadcasts(chain, ledger))
    findings.at_most("broadcasts of a share at one height", max(times.values(), default=0), 1)


async def unharmed(findings: Findings, helper: Helper, *, closed: int = 0) -> None:
    """Nothing was charged to a share, given up, closed or purged, by a helper's own word since its start and by its
    file.
    """
    counts = await helper.counts()
    findings.exactly("attempts spent", counts.get("failures", 0), 0)
    findings.exactly("failed", counts.get("failed", 0) + counts.get("expired", 0), 0)
    findings.exactly("shares set aside", helper.rows("SELECT count(*) FROM damaged")[0][0], 0)
    found = helper.rows("SELECT count(*) FROM rounds WHERE closed_ms IS NOT NULL OR alerted_ms IS NOT NULL")[0][0]
    findings.exactly("rounds closed", found, closed)
