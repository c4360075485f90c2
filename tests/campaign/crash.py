"""SIGKILL of the service and of its prover workers at random moments, while a crowd posts and shares come due.

One kill in five hits the service while it still starts, the others at work; workers are killed in between. Nobody
helps: the service is only started again, one time in five after more blocks than a sent message is waited for. First
with stand-in proofs, of which each is counted when a prover begins it; the full form does it once more with the real
prover.

What must hold: no acknowledged share lost, early or twice; the service is ready again after each kill; no more proofs
made anew than kills × workers; no attempt spent, as a death that is not the share's fault costs it none (a third
worker's under one share does, by the table).

With PostgreSQL the name of a host that was killed is free when the server knows of it: a life that begins earlier is
refused and begun again, as a service manager would.

Planted: `Service.run` no longer called `store.recover()`, so that shares taken up at a kill stayed taken up. The short
form said: "acknowledged and not counted: 27 (= 0)", "shares left in the database: 27 (= 0)".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.process_lifecycle import WORKERS, Lives, lives
from tests.support.harness import REAL, STAND_IN

EARLY = 0.2
"""The part of the service's kills that hit it while it starts."""
AWAY = 0.2
"""The part of them after which the chain is so far ahead that what was sent might be given up."""
BLOCKS_AWAY = 12
STARTING = 1.2
"""Seconds in which it starts, about."""


@dataclass(frozen=True, slots=True)
class Part:
    """One series of kills.

    Attributes:
        kills: of the service.
        worker_kills: of workers.
        life: the longest that a service which is up may live, seconds.
    """

    name: str
    program: Sequence[str]
    kills: int
    worker_kills: int
    shares: int
    life: float


async def run(setting: Setting) -> Findings:
    """Both series."""
    findings = Findings()
    stand_in = Part(
        "stand-in", STAND_IN, setting.scale(200, 8), setting.scale(200, 6), setting.scale(2000, 128), life=1.0
    )
    await _series(setting, stand_in, findings)
    if not setting.quick:
        real = Findings()
        await _series(setting, Part("real", REAL, 20, 0, 96, life=4.0), real)
        findings.take(real, "real prover")
    return findings


async def _series(setting: Setting, part: Part, findings: Findings) -> None:
    dice = setting.dice(f"{part.name} kills")
    async with lives(
        setting, part.name, number=part.kills, shares=part.shares, seconds=0.08, program=part.program
    ) as story:
        early = set(dice.sample(range(part.kills), int(part.kills * EARLY)))
        away = set(dice.sample(range(part.kills), int(part.kills * AWAY)))
        killed = 0

        async def end(life: int) -> None:
            nonlocal killed
            if life in early:
                await asyncio.sleep(dice.uniform(0, STARTING))
            else:
                await story.ready()
                wanted = -(-part.worker_kills * (life + 1) // part.kills) - killed
                killed += await _live(story, dice.uniform(0, part.life), wanted, dice.random())
            await story.helper.kill()
            if life in away:
                await story.chain.mine(BLOCKS_AWAY)

        await story.run(end)
        await story.judge(findings)
        findings.figure("kills of the service", part.kills)
        findings.figure("of them while it started", len(early))
        if part.program is STAND_IN:
            findings.at_least("kills of workers", killed, part.worker_kills / 2)
            await story.extra_proofs(findings, part.kills + killed)


async def _live(story: Lives, seconds: float, worker_kills: int, where: float) -> int:
    """Let it live for some seconds and kill workers meanwhile; how many were killed."""
    killed = 0
    for _ in range(worker_kills):
        await asyncio.sleep(seconds / (worker_kills + 1))
        await _proof_begins(story)
        workers = await story.helper.workers()
        if workers:
            os.kill(workers[int(where * len(workers))], signal.SIGKILL)
            killed += 1
    await asyncio.sleep(seconds / (worker_kills + 1))
    return killed


async def _proof_begins(story: Lives) -> None:
    """Wait until a prover begins a proof, for as long as that may take where there is work."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
            begun = story.proofs_begun
            while story.proofs_begun == begun:
                await asyncio.sleep(0.01)


CAMPAIGN = Campaign("crash", run)

assert WORKERS > 1, "a killed worker must leave another"
