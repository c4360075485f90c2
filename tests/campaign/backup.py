"""Backs up a running helper, deletes its database, and restores the backup.

Method. Wallets post, and shares are revealed and confirmed, while `db backup` runs as a separate process. Wallets
continue for a while, then the helper gets a SIGKILL, every file of its database is deleted, the backup is restored and
the helper is started. The restored queue is behind the chain: since the backup, some of its shares were sent and some
confirmed.

Requirements. Every share acknowledged before the backup began, or after the restored helper started, is confirmed at
the end; none is early, none counted twice. No share that was confirmed before the restored helper started is sent
again: the helper reads the blocks first. The restored file passes every check, immediately and at the end. Neither the
backup nor any file left by making it contains a secret of the votes in plain text. Shares acknowledged between the
backup and the loss of the database are not promised: wallets also send them to other helpers.

Injected fault that it caught: `Gates.get_dispatch_gate` in helper/app/gates.py does not pause until the
missed blocks are read. It printed "of them sent again: 6 (= 0)".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from devnet.ballot import SHARE_COUNT, Ballot
from helper.observability.stats import percentile
from tests.campaign import promise_check
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.promise_check import ShareLedger
from tests.campaign.wallet_clients import WalletGroup
from tests.support.command import run_command
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess
from tests.support.process import find_free_port
from tests.support.tasks import is_met_within, running

PASSPHRASE = "correct horse battery staple"
ENV = {"SVOTE_HELPER_BACKUP_PASSPHRASE": PASSPHRASE}


@dataclass
class RestoreLosses:
    """Shares that a restore may lose, and times of confirmation.

    Attributes:
        unprotected_spans: from the start of each backup to the loss of the database (Unix seconds).
        confirmed_at: nullifiers confirmed when a restored helper started, with that time.
    """

    unprotected_spans: list[tuple[float, float]] = field(default_factory=list)
    confirmed_at: dict[str, float] = field(default_factory=dict)


async def run(setting: CampaignRun) -> Findings:
    findings, losses = Findings(), RestoreLosses()
    ledger = ShareLedger()
    async with setting.run_helper(helper={"port": find_free_port()}) as (chain, helper):
        for cycle in range(setting.scale(3, 1)):
            wallets = WalletGroup(chain, lambda: [helper.url], setting.seeded_random(f"cycle {cycle}"))
            wallets.ledger = ledger
            await _run_cycle(setting, findings, chain, helper, wallets, losses)
        await _check_promises(setting, findings, chain, helper, ledger, losses)
    return findings


async def _run_cycle(
    setting: CampaignRun,
    findings: Findings,
    chain: DevChain,
    helper: HelperProcess,
    wallets: WalletGroup,
    losses: RestoreLosses,
) -> None:
    rng, total = setting.seeded_random("times"), setting.scale(60, 10)
    round_id = await chain.open_round()
    votes = await wallets.cast_votes(round_id, total)
    await helper.wait_for_leaf(round_id, max(position for _, position in votes))
    before = len(wallets.ledger.acknowledged_at)
    start, window = time.time(), setting.scale(60, 14)
    async with running(
        wallets.post_shares(votes, lambda: int(start + rng.uniform(0, window)), posters=8, pause_seconds=0.4)
    ) as posting:
        await _wait_for_acknowledged(helper, wallets.ledger, before + total * SHARE_COUNT // 3)
        # no command replaces an existing file
        output = setting.directory / f"backup-{len(losses.unprotected_spans)}.age"
        backup_started_at = time.time()
        await _create_backup(setting, findings, helper, output, votes)
        await _wait_for_acknowledged(helper, wallets.ledger, before + total * SHARE_COUNT // 2)
        await _wait_for_newer_reveals(helper, chain, backup_started_at)
        await helper.kill()
        losses.unprotected_spans.append((backup_started_at, time.time()))
        await chain.mine(2)
        for file in helper.db.parent.glob(f"{helper.db.name}*"):
            file.unlink()
        restored = await run_command("db", "restore", str(output), "--config", str(helper.config), "--json", env=ENV)
        findings.require_at_least("shares restored", restored.json()["live"], 1)
        checked = await run_command("db", "check", "--config", str(helper.config), "--json")
        findings.require_equal("exit status of db check on the restored file", checked.exit_code, 0)
        now = time.time()
        for nullifier in await promise_check.count_confirmed(chain, wallets.ledger.round_ids):
            losses.confirmed_at.setdefault(nullifier, now)
        await helper.start()
        await helper.wait_until_ready()
        await posting


async def _create_backup(
    setting: CampaignRun, findings: Findings, helper: HelperProcess, output: Path, votes: Sequence[tuple[Ballot, int]]
) -> None:
    """Create the backup and check that no plain-text secret is in it or left behind."""
    scratch = setting.directory / "scratch"
    scratch.mkdir(exist_ok=True)
    live = helper.bytes_on_disk()
    known = {path.name for path in setting.directory.iterdir()}
    result = await run_command(
        *("db", "backup", "--config", str(helper.config), "--output", str(output), "--json"),
        env={**ENV, "TMPDIR": str(scratch)},
    )
    report = result.json()
    findings.record_figure("backup, bytes", report["bytes"])
    findings.record_figure("backup, seconds", result.seconds)
    findings.require_at_most("seconds that the backup delayed the WAL's truncation", report["read_seconds"], 1)
    data = output.read_bytes()
    secrets = [secret for vote, _ in votes for secret in _collect_secrets(vote)]
    findings.require_equal("plain-text secrets in the backup", sum(secret in data for secret in secrets), 0)
    # the live queue's files contain them, which shows that the search finds them
    findings.require_at_least("secrets in the live database", sum(secret in live for secret in secrets), 1)
    left = [*scratch.iterdir(), *({path.name for path in setting.directory.iterdir()} - known - {output.name})]
    findings.require_equal("files left behind by the backup", len(left), 0)


def _collect_secrets(vote: Ballot) -> list[bytes]:
    return [secret for share in vote.shares for secret in (share.blind, share.c1, share.c2)]


async def _wait_for_acknowledged(helper: HelperProcess, ledger: ShareLedger, number: int) -> None:
    await helper.wait_for(f"has acknowledged {number} shares", lambda: len(ledger.acknowledged_at) >= number)


async def _wait_for_newer_reveals(helper: HelperProcess, chain: DevChain, since: float) -> None:
    """Wait until one block has counted a reveal sent since the backup."""
    async with helper.timeout("has revealed shares since the backup"):
        while sum(entry["time"] > since for entry in await chain.broadcasts()) < SHARE_COUNT:
            await asyncio.sleep(0.1)
    await chain.mine()


async def _check_promises(
    setting: CampaignRun,
    findings: Findings,
    chain: DevChain,
    helper: HelperProcess,
    ledger: ShareLedger,
    losses: RestoreLosses,
) -> None:
    findings.record_figure("POST p99, ms", 1000 * (percentile(ledger.response_seconds, 0.99) or 0))
    promised = ShareLedger(posted=ledger.posted)
    promised.acknowledged_at = {
        nullifier: at
        for nullifier, at in ledger.acknowledged_at.items()
        if not any(started_at <= at <= ended for started_at, ended in losses.unprotected_spans)
    }
    findings.record_figure(
        "acknowledged between a backup and the loss", len(ledger.acknowledged_at) - len(promised.acknowledged_at)
    )
    await promise_check.wait_until_drained(chain, promised, setting.scale(180, 60))
    await promise_check.check_promises(findings, chain, promised)
    resent = [
        entry
        for entry in await promise_check.find_broadcasts(chain, ledger)
        if entry["time"] > losses.confirmed_at.get(entry["nullifier"], float("inf"))
    ]
    findings.require_at_least("shares confirmed before a restored helper started", len(losses.confirmed_at), 1)
    findings.require_equal("of them sent again", len(resent), 0)
    counts = await helper.service_counts()
    findings.require_equal("attempts spent", counts.get("failures", 0), 0)
    await is_met_within(30, lambda: not helper.count_rows())
    findings.require_equal("live shares left at the end", helper.count_rows(), 0)
    checked = await run_command("db", "check", "--config", str(helper.config), "--json")
    findings.require_equal("exit status of db check at the end", checked.exit_code, 0)
