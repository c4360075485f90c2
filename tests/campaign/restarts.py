"""SIGTERM in the middle of work, again and again, while a crowd posts and shares come due.

One in five comes between listening and being ready, the others at work. Each end must be in order: exit status 0 within
10 s, no worker left behind, no attempt spent; and in the end no acknowledged share is lost, early or counted twice.

Planted: `Revealer._make_proof` took a cancelled proof for a failed one. The short form said: "attempts spent: 24
(= 0)".
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.campaign.process_lifecycle import create_lifecycle
from tests.support.process import child_pids, wait_until_gone

EARLY_PROBABILITY = 0.2
"""The part of the ends that come before it is ready."""
STARTUP_SECONDS = 0.4
"""Seconds from listening to being ready, about."""
LIFE_SECONDS = 1.0
"""The longest that it may live once it is ready, seconds."""


async def run(setting: CampaignRun) -> Findings:
    """All lives."""
    findings = Findings()
    rng = setting.seeded_random("ends")
    number = setting.scale(500, 8)
    early = set(rng.sample(range(number), int(number * EARLY_PROBABILITY)))
    at_work = 0
    # proofs take long enough that most ends come in the middle of some
    async with create_lifecycle(
        setting, "restarts", number=number, shares=setting.scale(2000, 96), seconds=0.2
    ) as story:

        async def end(life: int) -> None:
            nonlocal at_work
            await story.wait_until_listening()
            if life not in early:
                await story.wait_until_ready()
            await asyncio.sleep(rng.uniform(0, STARTUP_SECONDS if life in early else LIFE_SECONDS))
            with contextlib.suppress(KeyError):
                at_work += bool((await story.helper.service_stats())["in_hand"])
            workers = child_pids(story.helper.pid)
            began = time.monotonic()
            findings.require_equal("exit status", await story.helper.stop(), 0)
            findings.require_at_most("seconds to exit", time.monotonic() - began, 10)
            findings.require_equal("workers left behind", await count_survivors(workers), 0)

        await story.run_all(end)
        await story.check_promises(findings)
        findings.record_figure("ends", number)
        findings.record_figure("proofs begun", story.started_proofs)
        findings.require_at_least("ends with shares in hand", at_work, number / 4)
    return findings


async def count_survivors(pids: list[int]) -> int:
    """How many of these still run a second after."""
    with contextlib.suppress(TimeoutError):
        await wait_until_gone(pids, 1)
        return 0
    return len(pids)


CAMPAIGN = Campaign("restarts", run)
