"""A backup is made beside the working helper; then the helper dies, its database is gone, and the backup comes back.

How it hurts. Wallets post, and shares are revealed and confirmed, while `db backup` runs as a process of its own.
Wallets go on for a while, then the helper gets a SIGKILL, every file of its database is deleted, the backup is restored
and the helper started. The restored queue is behind the chain: some of its shares were counted, and some sent, since.

What must hold. Every share that was acknowledged before the backup began, or after the restored helper came, is counted
in the end; none is early, none counted twice. Nothing that the chain had counted before the restored helper started is
sent again: it reads the blocks first. The restored file passes every check, right away and in the end. The backup holds
none of the votes' secrets in the plain, nor does anything that making it left behind. Shares that were acknowledged
between the backup and the end of the old database are not promised: their wallets have them from other helpers.

The planted bug that it caught: `ServiceHealth.gate` in helper/app/health.py does not wait for the listener's arrival.
It printed "of them sent again: 6 (= 0)".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from devnet.ballot import Ballot
from helper.observability.stats import percentile
from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.promise_check import Ledger
from tests.campaign.wallet_clients import Crowd
from tests.support.command import command
from tests.support.devnet import Chain
from tests.support.harness import Helper, helping
from tests.support.process import free_port

PASSPHRASE = "correct horse battery staple"
ENV = {"SVOTE_HELPER_BACKUP_PASSPHRASE": PASSPHRASE}
VOTE = 16


@dataclass
class Losses:
    """What restoring may cost, and what it did.

    Attributes:
        unpromised: from the beginning of each backup to the end of the database (unix seconds).
        counted: nullifiers that the chain had counted when a restored helper started, with that time.
    """

    unpromised: list[tuple[float, float]] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)


async def run(setting: Setting) -> Findings:
    """Back up, destroy, restore, again and again; then judge."""
    findings, losses = Findings(), Losses()
    ledger = Ledger()
    async with httpx.AsyncClient(timeout=30) as http:
        chain = Chain(setting.folder, http, "--block-seconds", "0.3", "--stand-in-proofs")
        await chain.start()
        try:
            async with helping(setting.folder, http, chain, helper={"port": free_port()}) as helper:
                for cycle in range(setting.scale(3, 1)):
                    crowd = Crowd(chain, lambda: [helper.url], setting.dice(f"cycle {cycle}"))
                    crowd.ledger = ledger
                    await _cycle(setting, findings, chain, helper, crowd, losses)
                await _judge(setting, findings, chain, helper, ledger, losses)
        finally:
            await chain.kill()
    return findings


async def _cycle(
    setting: Setting, findings: Findings, chain: Chain, helper: Helper, crowd: Crowd, losses: Losses
) -> None:
    dice, total = setting.dice("times"), setting.scale(60, 10)
    round_id = await chain.open_round()
    votes = await crowd.vote(round_id, total)
    await helper.knows_leaf(round_id, max(position for _, position in votes))
    before = len(crowd.ledger.acknowledged)
    begin, window = time.time(), setting.scale(60, 14)
    posting = asyncio.create_task(crowd.post(votes, lambda: int(begin + dice.uniform(0, window)), posters=8, pause=0.4))
    try:
        await _acknowledged(helper, crowd.ledger, before + total * VOTE // 3)
        output = setting.folder / "backup.age"
        began = time.time()
        await _back_up(setting, findings, helper, output, votes)
        await _acknowledged(helper, crowd.ledger, before + total * VOTE // 2)
        await _counted_since(helper, chain, began)
        await helper.kill()
        losses.unpromised.append((began, time.time()))
        await chain.mine(2)
        for file in helper.db.parent.glob(f"{helper.db.name}*"):
            file.unlink()
        restored = await command("db", "restore", str(output), "--config", str(helper.config), "--json", env=ENV)
        findings.at_least("shares restored", restored.json()["live"], 1)
        checked = await command("db", "check", "--config", str(helper.config), "--json")
        findings.exactly("exit status of db check on the restored file", checked.code, 0)
        now = time.time()
        for nullifier in await promise_check.counted(chain, crowd.ledger.rounds):
            losses.counted.setdefault(nullifier, now)
        await helper.start()
        await helper.ready()
        await posting
    finally:
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)


async def _back_up(
    setting: Setting, findings: Findings, helper: Helper, output: Path, votes: Sequence[tuple[Ballot, int]]
) -> None:
    """Make the backup; it must hold nothing in the plain, nor leave anything behind."""
    scratch = setting.folder / "scratch"
    scratch.mkdir(exist_ok=True)
    live = helper.bytes_on_disk()
    known = {path.name for path in setting.folder.iterdir()}
    ran = await command(
        *("db", "backup", "--config", str(helper.config), "--output", str(output), "--json"),
        env={**ENV, "TMPDIR": str(scratch)},
    )
    made = ran.json()
    findings.figure("backup, bytes", made["bytes"])
    findings.figure("backup, seconds", ran.seconds)
    findings.at_most("seconds that the backup kept the WAL from being truncated", made["read_seconds"], 1)
    plain = output.read_bytes()
    secrets = [secret for vote, _ in votes for secret in _secrets(vote)]
    findings.exactly("secrets in the plain in the backup", sum(secret in plain for secret in secrets), 0)
    # the files of the live queue had them: they are what is looked for
    findings.at_least("secrets in the live database", sum(secret in live for secret in secrets), 1)
    left = [*scratch.iterdir(), *({path.name for path in setting.folder.iterdir()} - known - {output.name})]
    findings.exactly("files left behind by the backup", len(left), 0)


def _secrets(vote: Ballot) -> list[bytes]:
    return [secret for share in vote.shares for secret in (share.blind, share.c1, share.c2)]


async def _acknowledged(helper: Helper, ledger: Ledger, number: int) -> None:
    async with helper.patience(f"has taken {number} shares"):
        while len(ledger.acknowledged) < number:
            await asyncio.sleep(0.05)


async def _counted_since(helper: Helper, chain: Chain, began: float) -> None:
    """Wait until the chain is ahead of the backup: reveals of its shares came since, and one block counted them."""
    async with helper.patience("has revealed shares since the backup"):
        while sum(entry["time"] > began for entry in await chain.reveals()) < VOTE:
            await asyncio.sleep(0.1)
    await chain.mine()


async def _judge(
    setting: Setting, findings: Findings, chain: Chain, helper: Helper, ledger: Ledger, losses: Losses
) -> None:
    findings.figure("POST p99, ms", 1000 * (percentile(ledger.waits, 0.99) or 0))
    promised = Ledger(posted=ledger.posted)
    promised.acknowledged = {
        nullifier: at
        for nullifier, at in ledger.acknowledged.items()
        if not any(began <= at <= ended for began, ended in losses.unpromised)
    }
    findings.figure("acknowledged between a backup and the end", len(ledger.acknowledged) - len(promised.acknowledged))
    await promise_check.drained(chain, promised, setting.scale(180, 60))
    await promise_check.judge(findings, chain, promised)
    again = [
        entry
        for entry in await promise_check.broadcasts(chain, ledger)
        if entry["time"] > losses.counted.get(entry["nullifier"], float("inf"))
    ]
    findings.at_least("shares counted before a restored helper started", len(losses.counted), 1)
    findings.exactly("of them sent again", len(again), 0)
    counts = await helper.counts()
    findings.exactly("attempts spent", counts.get("failures", 0), 0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while helper.rows("SELECT count(*) FROM shares")[0][0]:
                await asyncio.sleep(0.1)
    findings.exactly("live shares left in the end", helper.rows("SELECT count(*) FROM shares")[0][0], 0)
    checked = await command("db", "check", "--config", str(helper.config), "--json")
    findings.exactly("exit status of db check in the end", checked.code, 0)


CAMPAIGN = Campaign("backup", run)
