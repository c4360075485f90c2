"""Stops the service with SIGTERM repeatedly, while wallets post and shares become due.

Method. One stop in five comes between listening and readiness, the others while the helper works.

Requirements. Each shutdown is clean: exit status 0 within 4 s, no worker process remains, no attempt is spent. No
acknowledged share is lost, early or counted twice.

Injected fault: `Revealer._make_proof` treated a cancelled proof as a failed one. The short form reported: "attempts
spent: 24 (= 0)".
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.process_lifecycle import create_lifecycle
from tests.support.process import child_pids, is_running

EARLY_PROBABILITY = 0.2
"""Fraction of the stops that come before readiness."""
STARTUP_SECONDS = 0.4
"""Approximate seconds from listening to readiness."""
LIFE_SECONDS = 1.0
"""Maximum seconds of a run after readiness."""
MAX_STOP_SECONDS = 4.0
"""Less than the grace period of requests, in which one that waits for the chain would otherwise wait in vain."""


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    rng = setting.seeded_random("ends")
    number = setting.scale(500, 8)
    early = set(rng.sample(range(number), int(number * EARLY_PROBABILITY)))
    interrupted = 0
    # proofs take long enough that most stops interrupt some
    async with create_lifecycle(
        setting, "restarts", number=number, shares=setting.scale(2000, 96), proof_seconds=0.2
    ) as lifecycle:

        async def end(run_number: int) -> None:
            nonlocal interrupted
            await lifecycle.wait_until_listening()
            if run_number not in early:
                await lifecycle.wait_until_ready()
            await asyncio.sleep(rng.uniform(0, STARTUP_SECONDS if run_number in early else LIFE_SECONDS))
            with contextlib.suppress(KeyError):
                interrupted += bool((await lifecycle.helper.service_stats())["in_hand"])
            workers = child_pids(lifecycle.helper.pid)
            started_at = time.monotonic()
            findings.require_equal("exit status", await lifecycle.helper.stop(), 0)
            findings.require_at_most("seconds to exit", time.monotonic() - started_at, MAX_STOP_SECONDS)
            findings.require_equal("workers left behind", sum(map(is_running, workers)), 0)

        await lifecycle.run_all(end)
        await lifecycle.check_promises(findings)
        findings.record_figure("stops", number)
        findings.record_figure("proofs started", lifecycle.started_proofs)
        findings.require_at_least("stops with shares in progress", interrupted, number / 4)
    return findings
