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

from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.process_lifecycle import lives
from tests.support.process import children, gone

EARLY = 0.2
"""The part of the ends that come before it is ready."""
STARTING = 0.4
"""Seconds from listening to being ready, about."""
LIFE = 1.0
"""The longest that it may live once it is ready, seconds."""


async def run(setting: Setting) -> Findings:
    """All lives."""
    findings = Findings()
    dice = setting.dice("ends")
    number = setting.scale(500, 8)
    early = set(dice.sample(range(number), int(number * EARLY)))
    at_work = 0
    # proofs take long enough that most ends come in the middle of some
    async with lives(setting, "restarts", number=number, shares=setting.scale(2000, 96), seconds=0.2) as story:

        async def end(life: int) -> None:
            nonlocal at_work
            await story.up()
            if life not in early:
                await story.ready()
            await asyncio.sleep(dice.uniform(0, STARTING if life in early else LIFE))
            with contextlib.suppress(KeyError):
                at_work += bool((await story.helper.service())["in_hand"])
            workers = children(story.helper.pid)
            began = time.monotonic()
            findings.exactly("exit status", await story.helper.stop(), 0)
            findings.at_most("seconds to exit", time.monotonic() - began, 10)
            findings.exactly("workers left behind", await gone_in_time(workers), 0)

        await story.run(end)
        await story.judge(findings)
        findings.figure("ends", number)
        findings.figure("proofs begun", story.proofs_begun)
        findings.at_least("ends with shares in hand", at_work, number / 4)
    return findings


async def gone_in_time(pids: list[int]) -> int:
    """How many of these still run a second after."""
    with contextlib.suppress(TimeoutError):
        await gone(pids, 1)
        return 0
    return len(pids)


CAMPAIGN = Campaign("restarts", run)
