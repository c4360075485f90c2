"""Changes the service's wall clock while the chain's clock stays correct.

Method. The service runs under libfaketime: its wall clock changes while it runs; its monotonic clock and the chain's
clock do not. The wall clock jumps an hour back, an hour ahead and ten years ahead, each time for a while, and is then
corrected. In the meantime shares come due, wallets post shares that are due immediately, other shares wait for a time
that only the wrong clock has passed, and a round that the chain has closed waits for its purge after 24 hours.

Requirements. No share is revealed more than 120 s before its time by the chain's clock. Each jump is detected: wallets
get 503. Within 30 s of the correction shares are accepted and all due shares are confirmed. No attempt is spent, no
share fails, no round is closed or purged because of a jump, waiting shares keep waiting, and the service uses at most
16 MiB more memory than before.

Injected fault: admission stores a share that is due immediately with the time of its arrival (`now=arrived`), which may
have been wrong and corrected before admission checked it. Reported: "an hour ahead: drained: False (= True)",
"acknowledged and not counted: 2 (= 0)", "shares still pending: 34 (= 32)".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from devnet.ballot import Ballot
from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, run_helper, unix_time_in

HOUR_SECONDS = 3600
CLOCK_JUMPS = {
    "an hour back": -HOUR_SECONDS,
    "an hour ahead": HOUR_SECONDS,
    "ten years ahead": 10 * 365 * 24 * HOUR_SECONDS,
}
TOLERANCE_SECONDS = 120
"""Seconds by which a share may be early when clocks disagree."""
MAX_MEMORY_GROWTH_BYTES = 16 << 20


class FakeTimeClock:
    """The wall clock of processes that are started with `env`."""

    def __init__(self, library: Path, directory: Path) -> None:
        self._offset = directory / "offset"
        self.set_offset(0)
        self.env = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._offset),
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # libfaketime's fix for monotonic conditions delays taking the interpreter lock by a fifth of a second.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            "NO_FAKE_STAT": "1",
        }

    def set_offset(self, seconds: int) -> None:
        """Set the clock's offset from now on."""
        partial = self._offset.with_suffix(".partial")
        partial.write_text(f"{seconds:+d}\n")
        partial.replace(self._offset)


@dataclass
class Environment:
    """Chain, helper and wallets; the `far` shares must not be revealed during the campaign."""

    setting: CampaignRun
    findings: Findings
    chain: DevChain
    helper: HelperProcess
    clock: FakeTimeClock
    wallets: WalletGroup
    far_votes: WalletGroup


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    libraries = sorted(Path("/usr").glob("lib*/**/faketime/libfaketimeMT.so.1"))
    findings.require_equal("libfaketime is installed", str(bool(libraries)), "True")
    if not libraries:
        return findings
    wrong = FakeTimeClock(libraries[0], setting.directory)
    async with httpx.AsyncClient(timeout=30) as http:
        chain = DevChain(setting.directory, http, "--block-seconds", setting.scale("1", "0.3"), "--stand-in-proofs")
        await chain.start()
        try:
            poll = {"poll_seconds": setting.scale(1.0, 0.2)}
            async with run_helper(
                setting.directory, http, chain, cluster=setting.cluster, env=wrong.env, chain=poll
            ) as helper:
                wallet_groups = [
                    WalletGroup(chain, lambda: [helper.url], setting.seeded_random(name)) for name in ("near", "far")
                ]
                await _run_jumps(Environment(setting, findings, chain, helper, wrong, *wallet_groups))
        finally:
            await chain.kill()
    return findings


async def _run_jumps(env: Environment) -> None:
    setting, findings, chain, helper = env.setting, env.findings, env.chain, env.helper
    votes_per_jump, rng = setting.scale(8, 2), setting.seeded_random("times")
    closed = await _create_closed_round(env)
    round_id = await chain.open_round(3 * HOUR_SECONDS)
    far_votes = await env.far_votes.cast_votes(round_id, setting.scale(8, 2))
    near_votes = await env.wallets.cast_votes(round_id, votes_per_jump * len(CLOCK_JUMPS))
    await helper.wait_for_leaf(round_id, max(position for _, position in (*far_votes, *near_votes)))
    start = int(time.time())
    await env.far_votes.post_shares(
        far_votes, lambda: int(start + rng.uniform(2 * TOLERANCE_SECONDS + 600, HOUR_SECONDS * 1.5))
    )
    before = _resident_bytes(helper)
    for number, (name, seconds) in enumerate(CLOCK_JUMPS.items()):
        await _run_jump(env, name, seconds, near_votes[votes_per_jump * number : votes_per_jump * (number + 1)])
    await promise_check.check_promises(findings, chain, env.wallets.ledger, tolerance=TOLERANCE_SECONDS)
    spent = await promise_check.count_confirmed(chain, [round_id])
    sent = {entry["nullifier"] for entry in await chain.broadcasts()}
    findings.require_equal(
        "shares revealed an hour early", len(env.far_votes.ledger.posted.keys() & (sent | spent.keys())), 0
    )
    waiting = helper.query_rows("SELECT count(*) FROM shares WHERE state = 0")[0][0]
    findings.require_equal("shares still pending", waiting, len(env.far_votes.ledger.acknowledged_at))
    await promise_check.check_no_share_charged(findings, helper, closed=1)
    known = helper.query_rows(
        "SELECT count(*) FROM tombstones JOIN round_keys ON no = round_no WHERE round_id = ?", closed
    )
    findings.require_equal("shares of the closed round still known", known[0][0], 16)
    findings.require_at_most("added bytes of memory", _resident_bytes(helper) - before, MAX_MEMORY_GROWTH_BYTES)
    findings.record_figure("bytes of memory before", before)


async def _create_closed_round(env: Environment) -> bytes:
    """Create a closed round with a confirmed vote; its purge is a day away."""
    chain, helper = env.chain, env.helper
    round_id = await chain.open_round(vote_end_time=unix_time_in(env.setting.scale(15, 8)), tally_blocks=1)
    vote = await env.wallets.cast_votes(round_id, 1)
    await env.wallets.post_shares(vote, lambda: 0)
    async with helper.timeout("has closed a round"):
        while not helper.query_rows("SELECT 1 FROM rounds WHERE alerted_ms IS NOT NULL"):
            await asyncio.sleep(0.1)
    return round_id


async def _run_jump(env: Environment, name: str, seconds: int, votes: list[tuple[Ballot, int]]) -> None:
    """Jump and return, with shares due before, during and after the jump."""
    length = env.setting.scale(20.0, 2.0)
    findings, helper, rng = env.findings, env.helper, env.setting.seeded_random(name)
    half, start = len(votes) // 2, int(time.time())
    await env.wallets.post_shares(votes[:half], lambda: int(start + rng.uniform(0, 2 + 1.5 * length)))
    # lasts as long as the jump, and 2 s more
    pause = 2 * (length + 2) / (16 * len(votes[half:]))
    posting = asyncio.create_task(env.wallets.post_shares(votes[half:], lambda: 0, posters=2, pause_seconds=pause))
    await asyncio.sleep(1)
    env.clock.set_offset(seconds)
    jumped_at = time.time()
    detected = await _wait_until(lambda facts: facts["intake_paused"] is not None, helper)
    findings.require_at_most(f"{name}: seconds until it is detected", detected - jumped_at, 5)
    await asyncio.sleep(max(0.0, jumped_at + length - time.time()))
    env.clock.set_offset(0)
    fixed = time.time()
    await posting
    drained = await promise_check.wait_until_drained(env.chain, env.wallets.ledger, 60 + length)
    # Shares may become due after the correction; the wait then includes that time.
    due = max(share.submit_at for share in env.wallets.ledger.posted.values())
    findings.require_at_most(
        f"{name}: seconds from the correction until all shares are counted", time.time() - max(fixed, due), 30
    )
    findings.require_equal(f"{name}: drained", str(drained), "True")
    normal = await _wait_until(lambda facts: facts["ready"] and facts["paused"] is None, helper)
    findings.require_at_most(f"{name}: seconds from the correction until it is ready", normal - fixed, 30)


async def _wait_until(condition: Callable[[dict[str, object]], object], helper: HelperProcess) -> float:
    """Wait up to a minute for a condition; return the Unix time at which it was met."""
    await helper.wait_until("shows the change", condition)
    return time.time()


def _resident_bytes(helper: HelperProcess) -> int:
    status = Path(f"/proc/{helper.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) * 1024


CAMPAIGN = Campaign("clock", run)
