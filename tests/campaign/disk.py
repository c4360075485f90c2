"""Fills the database's disk, then makes every fsync fail with EIO.

Method. The database is alone on a small tmpfs. While wallets post and shares come due, a filler file takes every free
byte for a while, and is then deleted. Later every fsync and fdatasync of the service fails with EIO (injected with
strace) for a while. Wallets keep retrying; one of them posts its own shares and requests the status continuously. The
long form also kills the helper during each failure and starts it after the disk has recovered.

Requirements. Every acknowledged share is confirmed in the end, none early, none twice. Within a second of the failure
POST and status return only 503, each within a second; no POST that arrives while every fsync fails returns 200. At most
ten seconds after the end of the failure both return 200 again, without intervention.

Without root (to mount) or strace the goal "requirements are installed" is not met.

Injected fault that it caught: `SqliteWriter._commit` in helper/store/sqlite/store.py treats a disk error as a
successful commit. It printed "acknowledged and not counted: 14 (= 0)", "EIO: POSTs answered 200 while every fsync
failed: 4 (= 0)". An original bug that it found: the disk probe was an update without a change, which SQLite does not
write, so that the status alternated: "EIO: other responses of status after the first 503: 2 (= 0)".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from devnet import ballot
from devnet.ballot import Ballot
from tests.campaign import promise_check
from tests.campaign.attack_clients import SHARES_PATH
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.promise_check import ShareLedger
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess
from tests.support.process import find_free_port
from tests.support.tasks import poll

TMPFS_SIZE = "24m"
STATUS_PATH = "/shielded-vote/v1/status"


@dataclass(frozen=True, slots=True)
class TimedResponse:
    """A response to the sequential wallet, in monotonic seconds; code 0 is no response."""

    endpoint: str
    sent_at: float
    answered_at: float
    code: int


@dataclass
class SequentialWallet:
    """A wallet that posts shares one after another until accepted, and requests the status in between."""

    helper: HelperProcess
    http: httpx.AsyncClient
    ledger: ShareLedger
    shares: Iterator[tuple[Ballot, int, int]]
    responses: list[TimedResponse] = field(default_factory=list)

    async def run(self) -> None:
        for vote, index, position in self.shares:
            share = vote.shares[index]
            self.ledger.record_post(share.nullifier, vote.round_id, 0)
            body = ballot.post_body(vote, share, position, 0)
            while (response := await self._request("POST", SHARES_PATH, body)).code != 200:
                await self._request("GET", STATUS_PATH)
                await asyncio.sleep(0.05)
            self.ledger.record_acknowledgment(share.nullifier, time.time(), response.answered_at - response.sent_at)
            await self._request("GET", STATUS_PATH)
            await asyncio.sleep(0.05)

    async def _request(self, method: str, path: str, body: object = None) -> TimedResponse:
        sent_at, code = time.monotonic(), 0
        with contextlib.suppress(httpx.HTTPError):
            code = (await self.http.request(method, self.helper.url + path, json=body, timeout=30)).status_code
        self.responses.append(TimedResponse(method, sent_at, time.monotonic(), code))
        return self.responses[-1]

    def seconds_until_status(self, what: str, code: int, after: float) -> float:
        """Return seconds from a moment to the first such response to a later request."""
        times = [
            response.answered_at - after
            for response in self.responses
            if response.sent_at >= after and (response.endpoint, response.code) == (what, code)
        ]
        return min(times, default=float("inf"))

    def responses_between(self, what: str, start: float, end: float) -> list[TimedResponse]:
        """Return responses whose requests were sent and completed within a time span."""
        return [
            response
            for response in self.responses
            if response.endpoint == what and start <= response.sent_at and response.answered_at <= end
        ]


async def run(setting: CampaignRun) -> Findings:
    findings, missing = Findings(), _missing_requirement()
    findings.require_equal("requirements are installed", missing, "yes")
    if missing != "yes":
        return findings
    disk = setting.directory / "disk"
    with _mount_tmpfs(disk):
        settings = {"port": find_free_port(), "db_path": str(disk / "queue.db")}
        async with setting.run_helper(helper=settings) as (chain, helper):
            await _run_failures(setting, findings, chain, helper)
    return findings


def _missing_requirement() -> str:
    if shutil.which("strace") is None:
        return "no strace"
    return "yes" if os.geteuid() == 0 else "not root: no tmpfs can be mounted"


@contextlib.contextmanager
def _mount_tmpfs(disk: Path) -> Iterator[None]:
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS_SIZE},mode=700", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def _run_failures(setting: CampaignRun, findings: Findings, chain: DevChain, helper: HelperProcess) -> None:
    wallets = WalletGroup(chain, lambda: [helper.url], setting.seeded_random("crowd"))
    round_id = await chain.open_round()
    votes = await wallets.cast_votes(round_id, setting.scale(60, 8))
    own_votes = await wallets.cast_votes(round_id, setting.scale(120, 14))
    await helper.wait_for_leaf(round_id, max(position for _, position in votes + own_votes))
    wallet = SequentialWallet(
        helper, chain.http, wallets.ledger, iter([(v, s.index, p) for v, p in own_votes for s in v.shares])
    )
    rng, start, window = setting.seeded_random("times"), time.time(), setting.scale(120, 12)
    clients = [
        asyncio.create_task(wallet.run()),
        asyncio.create_task(
            wallets.post_shares(
                votes, lambda: int(start + rng.uniform(0, window)), posters=8, pause_seconds=setting.scale(0.8, 0.4)
            )
        ),
    ]
    try:
        for kill in setting.scale((False, True), (False,)):
            await _measure_failure(setting, findings, wallet, "full", _fill_disk(helper.db.parent), kill=kill)
        for kill in setting.scale((False, True), (False,)):
            await _measure_failure(setting, findings, wallet, "EIO", _fail_fsync(setting, findings, helper), kill=kill)
        await clients[1]
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    findings.record_figure(
        "POSTs of the sequential wallet", sum(response.endpoint == "POST" for response in wallet.responses)
    )
    findings.record_figure(
        "of them 503", sum((response.endpoint, response.code) == ("POST", 503) for response in wallet.responses)
    )
    codes = {response.code for response in wallet.responses}
    findings.require_none("responses other than 200 and 503", codes - {200, 503, 0})
    findings.require_equal("permanently refused", len(wallets.refused), 0)
    await promise_check.wait_until_drained(chain, wallets.ledger, setting.scale(180, 60))
    await promise_check.check_promises(findings, chain, wallets.ledger)
    await promise_check.check_no_share_charged(findings, helper)


async def _measure_failure(
    setting: CampaignRun,
    findings: Findings,
    wallet: SequentialWallet,
    name: str,
    failure: contextlib.AbstractAsyncContextManager[None],
    *,
    kill: bool,
) -> None:
    helper = wallet.helper
    async with helper.timeout("accepts shares before the failure"):
        await poll(lambda: wallet.responses and wallet.responses[-1].code == 200)
    async with failure:
        started_at = time.monotonic()
        await asyncio.sleep(setting.scale(15, 3))
        if kill:
            await helper.kill()
        ended_at = time.monotonic()
    if kill:
        await helper.start()
    recovered_at = time.monotonic()
    # The time bounds apply to the helper's own work; after a kill that includes its start.
    async with helper.timeout(f"accepts shares again after {name}"):
        await poll(
            lambda: (
                wallet.seconds_until_status("POST", 200, recovered_at)
                + wallet.seconds_until_status("GET", 200, recovered_at)
                < float("inf")
            )
        )
    for what, label in (("POST", "POST"), ("GET", "status")):
        findings.require_at_most(
            f"{name}: seconds to the first 503 of {label}", wallet.seconds_until_status(what, 503, started_at), 1
        )
        known = started_at + wallet.seconds_until_status("POST", 503, started_at)
        others = [
            response for response in wallet.responses_between(what, known, ended_at) if response.code not in (503, 0)
        ]
        findings.require_equal(f"{name}: other responses of {label} after the first 503", len(others), 0)
        findings.require_at_most(
            f"{name}: seconds to the first 200 of {label} after the end",
            wallet.seconds_until_status(what, 200, recovered_at),
            10,
        )
    slowest = max(
        response.answered_at - response.sent_at for response in wallet.responses_between("POST", started_at, ended_at)
    )
    findings.require_at_most(f"{name}: seconds of the slowest POST", slowest, 1)
    if name == "EIO":
        accepted = [
            response for response in wallet.responses_between("POST", started_at, ended_at) if response.code == 200
        ]
        findings.require_equal("EIO: POSTs with response 200 while every fsync failed", len(accepted), 0)


@contextlib.asynccontextmanager
async def _fill_disk(disk: Path) -> AsyncIterator[None]:
    """Fill the disk, including bytes that are freed in the meantime."""
    filler = disk / "ballast"
    filling = asyncio.create_task(_consume_space(filler))
    try:
        await poll(lambda: _free_bytes(disk) == 0)
        yield
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        filler.unlink()


async def _consume_space(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        while True:
            while free := _free_bytes(filler.parent):
                with contextlib.suppress(OSError):
                    file.write(bytes(min(free, 2**20)))
            await asyncio.sleep(0.01)


def _free_bytes(disk: Path) -> int:
    stats = os.statvfs(disk)
    return stats.f_bfree * stats.f_frsize


@contextlib.asynccontextmanager
async def _fail_fsync(setting: CampaignRun, findings: Findings, helper: HelperProcess) -> AsyncIterator[None]:
    """Make every fsync and fdatasync of the service fail."""
    trace = setting.directory / "strace.txt"
    calls = "fsync,fdatasync"
    tracer = await asyncio.create_subprocess_exec(
        *("strace", "-f", "-p", str(helper.pid), "-o", str(trace)),
        *("-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert tracer.stderr is not None
        async with asyncio.timeout(30):
            message = await tracer.stderr.readline()
        assert b"attached" in message, message
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            tracer.send_signal(signal.SIGTERM)
        # Wait until it exits, because strace detaches from every thread first.
        await tracer.communicate()
    findings.require_at_least("EIO: fsyncs that failed", trace.read_text(errors="replace").count("(INJECTED)"), 1)
