"""Three independent helpers with a backlog of the same shares, killed at random moments.

Method. Each share is at all three daemons, as it is after wallets have posted overdue shares again. First no proof
ends, so that all shares become overdue. Then all three are killed and start with this backlog and a prover that works.
At random moments one of them is killed with SIGKILL and restarted, until the chain has counted every share. The fake
prover counts each proof that it begins.

Requirements. No acknowledged share is lost, early or counted twice. A backlog costs at most 1.5 proofs per reveal,
although no helper knows of the others: each has its own order and skips what the chain has counted. No helper keeps a
share that the chain has counted.

Injected fault: `[helper] backlog_after_seconds = 3600`, so that all helpers proved the backlog oldest first. The short
form reported: "proofs per reveal: 1.6979 (≤ 1.5)".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.campaign.promise_check import check_promises, count_confirmed, wait_until_drained
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess
from tests.support.process import find_free_port

HELPER_COUNT = 3
WORKER_COUNT = 2
PROOF_SECONDS = 0.5
MAX_PROOFS_PER_REVEAL = 1.5
BLOCKED_SECONDS = 3600.0
"""Seconds of a proof that does not end during the campaign."""
DUE_SECONDS = 3
"""Seconds from the post of a share within which it is due."""
MAX_PAUSE_SECONDS = 1.0
"""Maximum seconds for which a killed helper is down, and between two kills."""


@dataclass(slots=True)
class FleetMember:
    """A helper at a fixed port, and the file with a byte for each proof that its provers began."""

    helper: HelperProcess
    url: str
    proof_log: Path

    def spawn(self, proof_seconds: float = PROOF_SECONDS) -> None:
        """Start a run with proofs of this duration."""
        self.helper.spawn(STANDIN_SECONDS=str(proof_seconds), STANDIN_TALLY=str(self.proof_log))

    async def wait_until_ready(self) -> None:
        """Wait until this run processes its queue."""
        await self.helper.wait_until_listening()
        await self.helper.wait_until_ready()

    @property
    def started_proofs(self) -> int:
        """Number of proofs that its provers have begun."""
        return self.proof_log.stat().st_size if self.proof_log.exists() else 0


async def run(setting: CampaignRun) -> Findings:
    """Run the helpers, kill them, and check the promises."""
    findings, rng = Findings(), setting.seeded_random("kills")
    vote_count, kills = setting.scale(125, 12), setting.scale(60, 2)
    async with _create_fleet(setting) as (chain, members):
        round_id = await chain.open_round()
        wallets = WalletGroup(
            chain,
            lambda: [member.url for member in members],
            setting.seeded_random("wallets"),
            helpers_per_share=HELPER_COUNT,
        )
        votes = await wallets.cast_votes(round_id, vote_count)
        for member in members:
            member.spawn(BLOCKED_SECONDS)
        await asyncio.gather(*(member.wait_until_ready() for member in members))
        await wallets.post_shares(votes, lambda: int(time.time()) + rng.randint(0, DUE_SECONDS))
        for member in members:
            await member.helper.kill()
        blocked_proofs = sum(member.started_proofs for member in members)
        await asyncio.sleep(max(0.0, max(share.submit_at for share in wallets.ledger.posted.values()) - time.time()))
        for member in members:
            member.spawn()
        for number in range(kills):
            member = members[number % HELPER_COUNT]
            await member.wait_until_ready()
            await asyncio.sleep(rng.uniform(0, MAX_PAUSE_SECONDS))
            await member.helper.kill()
            await asyncio.sleep(rng.uniform(0, MAX_PAUSE_SECONDS))
            member.spawn()
        await asyncio.gather(*(member.wait_until_ready() for member in members))
        drained = await wait_until_drained(chain, wallets.ledger, 120 + PROOF_SECONDS * len(wallets.ledger.posted))
        findings.require_equal("drained", str(drained), "True")
        await check_promises(findings, chain, wallets.ledger)
        findings.require_equal(
            "shares posted and not acknowledged", len(wallets.ledger.posted) - len(wallets.ledger.acknowledged_at), 0
        )
        counted = len(await count_confirmed(chain, [round_id]))
        proofs = sum(member.started_proofs for member in members) - blocked_proofs
        findings.record_figure("kills in the backlog", kills)
        findings.record_figure("proofs", proofs)
        findings.require_at_most("proofs per reveal", proofs / max(1, counted), MAX_PROOFS_PER_REVEAL)
        await _check_queues(findings, members)
    return findings


async def _check_queues(findings: Findings, members: Sequence[FleetMember]) -> None:
    """Check that every helper has erased every share and stops with status 0."""
    for member in members:
        with contextlib.suppress(AssertionError):
            async with member.helper.timeout("has erased all shares"):
                while member.helper.query_rows("SELECT count(*) FROM shares")[0][0]:
                    await asyncio.sleep(0.1)
        remaining = member.helper.query_rows("SELECT count(*) FROM shares")[0][0]
        findings.require_equal("shares left in a queue", remaining, 0)
        findings.require_equal("exit status of a helper", await member.helper.stop(), 0)


@contextlib.asynccontextmanager
async def _create_fleet(setting: CampaignRun) -> AsyncIterator[tuple[DevChain, list[FleetMember]]]:
    """Start a chain, and create helpers for it that are not started; kill all at the end."""
    async with httpx.AsyncClient(timeout=30) as http:
        chain = DevChain(setting.directory, http, "--block-seconds", "1", "--stand-in-proofs")
        await chain.start()
        members = [_create_member(setting, http, chain, number) for number in range(HELPER_COUNT)]
        try:
            yield chain, members
        finally:
            for member in members:
                if member.helper.process is not None:
                    await member.helper.kill()
            await chain.kill()


def _create_member(setting: CampaignRun, http: httpx.AsyncClient, chain: DevChain, number: int) -> FleetMember:
    directory = setting.directory / f"helper-{number}"
    directory.mkdir()
    port = find_free_port()
    settings = {"port": port, "max_concurrent_proofs": WORKER_COUNT}
    helper = HelperProcess(directory, http, chain, program=STAND_IN_PROGRAM, cluster=setting.cluster, helper=settings)
    return FleetMember(helper, f"http://127.0.0.1:{port}", directory / "tally")


CAMPAIGN = Campaign("fleet", run)
