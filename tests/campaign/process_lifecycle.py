"""Repeatedly stops and restarts one helper while wallets post and shares become due."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from devnet.ballot import SHARE_COUNT
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.promise_check import check_promises, count_confirmed, wait_until_drained
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, run_chain
from tests.support.process import find_free_port

WORKER_COUNT = 2
IMMEDIATE_PROBABILITY = 0.25
"""Fraction of the shares without a due time."""
MAX_AHEAD_SECONDS = 5.0
"""Seconds, about three runs, over which the other shares of a vote fall due."""
DRAIN_TIMEOUT_SECONDS = 90.0
"""Seconds for the remaining shares after the last start, in addition to the time of their proofs."""
START_TIMEOUT_SECONDS = 300.0
"""Seconds within which a run must be up without intervention, on a shared machine."""
FREE_WORKER_DEATHS = 2
"""Number of worker crashes on a share that spend no attempt."""
DATABASE_LOCKED_TEXT = "another process uses this database under the name"
"""Error of a run that starts before the server has detected the exit of the previous one."""


@dataclass(slots=True)
class HelperLifecycle:
    """A helper with its wallets and provers, over many runs.

    Attributes:
        start_count: number of runs to end, without the last run, which continues.
        proof_log: the file with a byte for each proof that a fake prover began.
        proof_seconds: duration of a fake proof, or the most that a real one takes.
        refused_starts: number of starts repeated because the name was still in use.
    """

    helper: HelperProcess
    chain: DevChain
    wallets: WalletGroup
    round_id: bytes
    start_count: int
    votes: int
    proof_log: Path
    proof_seconds: float
    rng: random.Random
    refused_starts: int = 0

    @property
    def started_proofs(self) -> int:
        """Number of proofs that the fake provers have begun."""
        return self.proof_log.stat().st_size if self.proof_log.exists() else 0

    def spawn(self) -> None:
        self.helper.spawn(STANDIN_SECONDS=str(self.proof_seconds), STANDIN_TALLY=str(self.proof_log))

    async def wait_until_listening(self) -> None:
        """Wait until this run listens; restart it while its name is still in use, as a supervisor would."""
        while True:
            try:
                await self.helper.wait_until_listening()
            except AssertionError:
                has_exited = self.helper.process is not None and self.helper.process.poll() is not None
                if not has_exited or DATABASE_LOCKED_TEXT not in self.helper.log_tail().splitlines()[-1]:
                    raise
                self.refused_starts += 1
                self.spawn()
            else:
                return

    async def wait_until_ready(self) -> None:
        """Wait until this run processes its queue: real provers first create keys, and missed blocks are read."""
        await self.wait_until_listening()
        async with self.helper.timeout("is ready", START_TIMEOUT_SECONDS):
            while True:
                with contextlib.suppress(AssertionError):
                    await self.helper.wait_until_ready()
                    await self.helper.wait_until("processes its queue", lambda facts: facts["paused"] is None)
                    return

    async def run_all(self, end: Callable[[int], Awaitable[None]]) -> None:
        """Execute all runs. `end` is called with a run's number immediately after its launch, and ends it.

        The votes are posted in proportion to the runs, so that each has work on a machine of any speed.
        """
        votes = await self.wallets.cast_votes(self.round_id, self.votes)
        posted = 0
        async with asyncio.TaskGroup() as group:
            for run_number in range(self.start_count):
                stop = -(-len(votes) * (run_number + 1) // self.start_count)
                for vote in votes[posted:stop]:
                    group.create_task(
                        self.wallets.post_shares([vote], self._draw_due_time, timeout_seconds=START_TIMEOUT_SECONDS)
                    )
                posted = stop
                self.spawn()
                await end(run_number)
            self.spawn()
            await self.wait_until_ready()

    def _draw_due_time(self) -> int:
        return (
            0
            if self.rng.random() < IMMEDIATE_PROBABILITY
            else int(time.time() + self.rng.uniform(0, MAX_AHEAD_SECONDS)) + 1
        )

    async def check_promises(self, findings: Findings) -> None:
        """Check the promises, no spent attempts, no remaining shares, and a sound database."""
        ledger = self.wallets.ledger
        await wait_until_drained(self.chain, ledger, DRAIN_TIMEOUT_SECONDS + self.proof_seconds * len(ledger.posted))
        await check_promises(findings, self.chain, ledger)
        findings.require_equal(
            "shares posted and not acknowledged", len(ledger.posted) - len(ledger.acknowledged_at), 0
        )
        findings.require_equal("shares refused", len(self.wallets.refused), 0)
        with contextlib.suppress(AssertionError):
            await self.helper.wait_for("has erased all shares", lambda: not self.helper.count_rows())
        findings.require_equal("exit status of the last run", await self.helper.stop(), 0)
        findings.require_equal("shares left in the database", self.helper.count_rows(), 0)
        findings.require_equal("integrity_check", self.helper.storage.check_integrity(), "ok")
        spent, allowed = count_attempts(self.helper.log)
        # A kill between the third crash and the log line of the attempt leaves fewer.
        findings.require_at_most("attempts spent", spent - allowed, 0)
        findings.record_figure("starts refused while the previous run's name was in use", self.refused_starts)
        findings.record_figure("attempts spent for a third worker crash", allowed)

    async def check_extra_proofs(self, findings: Findings, kills: int) -> None:
        """Check that repeated proofs are at most those that kills could interrupt, and not none."""
        extra = self.started_proofs - (await count_confirmed(self.chain, [self.round_id])).total()
        findings.require_at_most("extra proofs", extra, kills * WORKER_COUNT)
        findings.require_at_least("proofs repeated after kills", extra, 1)


@contextlib.asynccontextmanager
async def create_lifecycle(
    setting: CampaignRun,
    part: str,
    *,
    number: int,
    shares: int,
    proof_seconds: float,
    program: Sequence[str] = STAND_IN_PROGRAM,
) -> AsyncIterator[HelperLifecycle]:
    """Create a helper that is not started, on a chain with an open round; kill all at the end.

    Args:
        part: name of the helper's directory.
        proof_seconds: duration of a fake proof, or the most that a real one takes.
    """
    directory = setting.directory / part
    flags = ("--stand-in-proofs",) if program is STAND_IN_PROGRAM else ()
    async with run_chain(directory, "--block-seconds", "1", *flags) as chain:
        port = find_free_port()
        settings = {"port": port, "max_concurrent_proofs": WORKER_COUNT}
        helper = HelperProcess(directory, chain.http, chain, program=program, cluster=setting.cluster, helper=settings)
        try:
            yield HelperLifecycle(
                helper=helper,
                chain=chain,
                wallets=WalletGroup(
                    chain, lambda: [f"http://127.0.0.1:{port}"], setting.seeded_random(f"{part} wallets")
                ),
                round_id=await chain.open_round(),
                start_count=number,
                votes=shares // SHARE_COUNT,
                proof_log=directory / "tally",
                proof_seconds=proof_seconds,
                rng=setting.seeded_random(f"{part} times"),
            )
        finally:
            if helper.process is not None:
                await helper.kill()


def count_attempts(log: Path) -> tuple[int, int]:
    """Return the attempts spent according to the log, and how many may be due to third worker crashes."""
    spent = allowed = 0
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            spent += entry["event"] in {"reveal_retried", "quick_retries_failed", "share_failed"}
            allowed += entry["event"] == "prover_worker_crashed" and entry["crashes"] > FREE_WORKER_DEATHS
    return spent, allowed
