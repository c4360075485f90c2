"""Kills the service and its prover workers with SIGKILL at random moments, under load.

Method. Wallets post and shares come due throughout. One kill in five hits the service during its start, the others
while it works; workers are killed in between. There is no other intervention: the service is only restarted, one time
in five after more blocks than a sent message is waited for. The first series uses fake proofs, each of which is
counted when a prover begins it; the full form adds a series with the real prover.

Requirements. No acknowledged share is lost, early or counted twice; the service is ready again after each kill; at most
kills × workers proofs are repeated; no attempt is spent, because a crash that the share did not cause spends none (the
third crash of a worker on one share does, see the verdict table).

With PostgreSQL the name of a killed host is released when the server detects its end: a start before that is refused
and repeated, as a service manager would.

Injected fault: `Service.run` did not run `shares.recover`, so that shares claimed at a kill stayed claimed. The short
form reported: "acknowledged and not counted: 27 (= 0)", "shares left in the database: 27 (= 0)".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.process_lifecycle import WORKER_COUNT, HelperLifecycle, create_lifecycle
from tests.support.harness import REAL_PROGRAM, STAND_IN_PROGRAM

EARLY_PROBABILITY = 0.2
"""Fraction of the service's kills that occur during its start."""
OFFLINE_PROBABILITY = 0.2
"""Fraction of kills after which the chain advances so far that sent messages might be given up."""
OFFLINE_BLOCKS = 12
STARTUP_SECONDS = 1.2
"""Approximate seconds of a start."""


@dataclass(frozen=True, slots=True)
class KillSeries:
    """One series of kills.

    Attributes:
        kills: number of kills of the service.
        worker_kills: number of kills of workers.
        proof_seconds: duration of a proof: that of a fake one, or the most that a real one takes on a busy machine.
        life_seconds: maximum seconds from readiness to the kill.
    """

    name: str
    program: Sequence[str]
    kills: int
    worker_kills: int
    shares: int
    proof_seconds: float
    life_seconds: float


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    stand_in = KillSeries(
        "stand-in",
        STAND_IN_PROGRAM,
        setting.scale(200, 8),
        setting.scale(200, 6),
        setting.scale(2000, 128),
        proof_seconds=0.08,
        life_seconds=1.0,
    )
    await _run_series(setting, stand_in, findings)
    if not setting.is_quick:
        real = KillSeries("real", REAL_PROGRAM, 20, 0, 96, proof_seconds=6.0, life_seconds=4.0)
        real_findings = Findings()
        await _run_series(setting, real, real_findings)
        findings.merge(real_findings, "real prover")
    return findings


async def _run_series(setting: CampaignRun, series: KillSeries, findings: Findings) -> None:
    rng = setting.seeded_random(f"{series.name} kills")
    async with create_lifecycle(
        setting,
        series.name,
        number=series.kills,
        shares=series.shares,
        proof_seconds=series.proof_seconds,
        program=series.program,
    ) as lifecycle:
        early = set(rng.sample(range(series.kills), int(series.kills * EARLY_PROBABILITY)))
        offline = set(rng.sample(range(series.kills), int(series.kills * OFFLINE_PROBABILITY)))
        killed = 0

        async def end(run_number: int) -> None:
            nonlocal killed
            if run_number in early:
                await asyncio.sleep(rng.uniform(0, STARTUP_SECONDS))
            else:
                await lifecycle.wait_until_ready()
                remaining = -(-series.worker_kills * (run_number + 1) // series.kills) - killed
                killed += await _kill_workers(lifecycle, rng.uniform(0, series.life_seconds), remaining, rng.random())
            await lifecycle.helper.kill()
            if run_number in offline:
                await lifecycle.chain.mine(OFFLINE_BLOCKS)

        await lifecycle.run_all(end)
        await lifecycle.check_promises(findings)
        findings.record_figure("kills of the service", series.kills)
        findings.record_figure("of them while it started", len(early))
        if series.program is STAND_IN_PROGRAM:
            findings.require_at_least("kills of workers", killed, series.worker_kills / 2)
            await lifecycle.check_extra_proofs(findings, series.kills + killed)


async def _kill_workers(lifecycle: HelperLifecycle, seconds: float, worker_kills: int, fraction: float) -> int:
    """Run for a few seconds and kill workers; return how many were killed."""
    killed = 0
    for _ in range(worker_kills):
        await asyncio.sleep(seconds / (worker_kills + 1))
        await _wait_for_proof(lifecycle)
        workers = await lifecycle.helper.worker_pids()
        if workers:
            os.kill(workers[int(fraction * len(workers))], signal.SIGKILL)
            killed += 1
    await asyncio.sleep(seconds / (worker_kills + 1))
    return killed


async def _wait_for_proof(lifecycle: HelperLifecycle) -> None:
    """Wait until a prover begins a proof, up to the time that may take with pending work."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
            proof_count = lifecycle.started_proofs
            while lifecycle.started_proofs == proof_count:
                await asyncio.sleep(0.01)


assert WORKER_COUNT > 1, "one worker must remain after a kill"
