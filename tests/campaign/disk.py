"""The database's disk is full, and then it fails: every fsync is an EIO.

How it hurts. The database is alone on a small tmpfs. While wallets post and shares come due, a ballast takes every byte
that is left, and whatever is freed, for a while; then it is gone. Later every fsync and fdatasync of the service ends
with EIO (injected with strace), for a while. Wallets do not give up; one of them asks all the time, with shares of its
own, and asks for the status too. The long form also kills the helper in the midst of each, and starts it when the disk
is well.

What must hold. Every share that was acknowledged is counted in the end, none early, none twice. Within a second of the
trouble POST and status are 503 and nothing else, each answered within a second; no POST that came while no fsync went
well is answered 200. Ten seconds after the end of the trouble, at most, both are 200 again, by themselves.

Without root (to mount) or strace the goal "can be tried here" is broken.

The planted bug that it caught: `Writer._commit` in helper/store/sqlite/writer.py returns after an error of the disk
as if all were kept. It printed "acknowledged and not counted: 14 (= 0)", "EIO: POSTs answered 200 while every fsync
failed: 4 (= 0)". No plant but the state of the product at first: its probe of the disk was an update that changes
nothing, which SQLite does not write, so that the status wavered: "EIO: other answers of status after the first 503: 2
(= 0)".
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
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.promise_check import Ledger
from tests.campaign.wallet_clients import SHARES, Crowd
from tests.support.devnet import Chain
from tests.support.harness import Helper, helping
from tests.support.process import free_port

TMPFS = "24m"
STATUS = "/shielded-vote/v1/status"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to the wallet that asks all the time; times are monotonic seconds, code 0 is no answer."""

    what: str
    asked: float
    answered: float
    code: int


@dataclass
class Asker:
    """A wallet that posts one share after the other, each until it is taken, and asks for the status between."""

    helper: Helper
    http: httpx.AsyncClient
    ledger: Ledger
    shares: Iterator[tuple[Ballot, int, int]]
    answers: list[Answer] = field(default_factory=list)

    async def run(self) -> None:
        for vote, index, position in self.shares:
            share = vote.shares[index]
            self.ledger.post(share.nullifier, vote.round_id, 0, position)
            body = ballot.post_body(vote, share, position, 0)
            while (answer := await self._ask("POST", SHARES, body)).code != 200:
                await self._ask("GET", STATUS)
                await asyncio.sleep(0.05)
            self.ledger.acknowledge(share.nullifier, time.time(), answer.answered - answer.asked)
            await self._ask("GET", STATUS)
            await asyncio.sleep(0.05)

    async def _ask(self, method: str, path: str, body: object = None) -> Answer:
        asked, code = time.monotonic(), 0
        with contextlib.suppress(httpx.HTTPError):
            code = (await self.http.request(method, self.helper.url + path, json=body, timeout=30)).status_code
        self.answers.append(Answer(method, asked, time.monotonic(), code))
        return self.answers[-1]

    def first(self, what: str, code: int, after: float) -> float:
        """Seconds from a moment to the first such answer to what was asked after it."""
        times = [
            one.answered - after for one in self.answers if one.asked >= after and (one.what, one.code) == (what, code)
        ]
        return min(times, default=float("inf"))

    def between(self, what: str, begin: float, end: float) -> list[Answer]:
        """Answers to what was asked and answered within a time."""
        return [one for one in self.answers if one.what == what and begin <= one.asked and one.answered <= end]


async def run(setting: Setting) -> Findings:
    """Fill the disk, break it, and judge."""
    findings, missing = Findings(), _missing()
    findings.exactly("can be tried here", missing, "yes")
    if missing != "yes":
        return findings
    disk = setting.folder / "disk"
    with _mounted(disk):
        async with httpx.AsyncClient(timeout=30) as http:
            chain = Chain(setting.folder, http, "--block-seconds", "0.3", "--stand-in-proofs")
            await chain.start()
            try:
                where = {"port": free_port(), "db_path": str(disk / "queue.db")}
                async with helping(setting.folder, http, chain, helper=where) as helper:
                    await _hurt(setting, findings, http, chain, helper)
            finally:
                await chain.kill()
    return findings


def _missing() -> str:
    if shutil.which("strace") is None:
        return "no strace"
    return "yes" if os.geteuid() == 0 else "not root: no tmpfs can be mounted"


@contextlib.contextmanager
def _mounted(disk: Path) -> Iterator[None]:
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS},mode=700", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def _hurt(setting: Setting, findings: Findings, http: httpx.AsyncClient, chain: Chain, helper: Helper) -> None:
    crowd = Crowd(chain, lambda: [helper.url], setting.dice("crowd"))
    round_id = await chain.open_round()
    votes = await crowd.vote(round_id, setting.scale(60, 8))
    own = await crowd.vote(round_id, setting.scale(120, 14))
    await helper.knows_leaf(round_id, max(position for _, position in votes + own))
    asker = Asker(helper, http, crowd.ledger, iter([(v, s.index, p) for v, p in own for s in v.shares]))
    dice, begin, window = setting.dice("times"), time.time(), setting.scale(120, 12)
    busy = [
        asyncio.create_task(asker.run()),
        asyncio.create_task(
            crowd.post(votes, lambda: int(begin + dice.uniform(0, window)), posters=8, pause=setting.scale(0.8, 0.4))
        ),
    ]
    try:
        for kill in setting.scale((False, True), (False,)):
            await _trouble(setting, findings, asker, "full", _full(helper.db.parent), kill=kill)
        for kill in setting.scale((False, True), (False,)):
            await _trouble(setting, findings, asker, "EIO", _failing(setting, findings, helper), kill=kill)
        await busy[1]
    finally:
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
    findings.figure("POSTs of the one that asks", sum(one.what == "POST" for one in asker.answers))
    findings.figure("of them 503", sum((one.what, one.code) == ("POST", 503) for one in asker.answers))
    strange = {one.code for one in asker.answers} - {200, 503, 0}
    findings.exactly("answers other than 200 and 503", ", ".join(map(str, sorted(strange))) or "none", "none")
    findings.exactly("refused for good", len(crowd.refused), 0)
    await promise_check.drained(chain, crowd.ledger, setting.scale(180, 60))
    await promise_check.judge(findings, chain, crowd.ledger)
    await promise_check.unharmed(findings, helper)


async def _trouble(
    setting: Setting,
    findings: Findings,
    asker: Asker,
    name: str,
    trouble: contextlib.AbstractAsyncContextManager[None],
    *,
    kill: bool,
) -> None:
    """One time of trouble, from its beginning to the first 200 after it."""
    helper = asker.helper
    async with helper.patience("takes shares before the trouble"):
        await _until(lambda: asker.answers and asker.answers[-1].code == 200)
    async with trouble:
        began = time.monotonic()
        await asyncio.sleep(setting.scale(15, 3))
        if kill:
            await helper.kill()
        ended = time.monotonic()
    if kill:
        await helper.start()
    mended = time.monotonic()
    # what the bounds of time are about is the helper's own doing; after a kill it is also its start
    async with helper.patience(f"takes shares again after {name}"):
        await _until(lambda: asker.first("POST", 200, mended) + asker.first("GET", 200, mended) < float("inf"))
    for what, word in (("POST", "POST"), ("GET", "status")):
        findings.at_most(f"{name}: seconds to the first 503 of {word}", asker.first(what, 503, began), 1)
        known = began + asker.first("POST", 503, began)
        others = [one for one in asker.between(what, known, ended) if one.code not in (503, 0)]
        findings.exactly(f"{name}: other answers of {word} after the first 503", len(others), 0)
        findings.at_most(f"{name}: seconds to the first 200 of {word} after it", asker.first(what, 200, mended), 10)
    slowest = max(one.answered - one.asked for one in asker.between("POST", began, ended))
    findings.at_most(f"{name}: seconds that a POST waited, at most", slowest, 1)
    if name == "EIO":
        taken = [one for one in asker.between("POST", began, ended) if one.code == 200]
        findings.exactly("EIO: POSTs answered 200 while every fsync failed", len(taken), 0)


async def _until(holds: object) -> None:
    assert callable(holds)
    while not holds():
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _full(disk: Path) -> AsyncIterator[None]:
    """Every byte of the disk is taken, also those that are freed meanwhile."""
    ballast = disk / "ballast"
    eating = asyncio.create_task(_eat(ballast))
    try:
        await _until(lambda: _free(disk) == 0)
        yield
    finally:
        eating.cancel()
        await asyncio.gather(eating, return_exceptions=True)
        ballast.unlink()


async def _eat(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        while True:
            while free := _free(ballast.parent):
                with contextlib.suppress(OSError):
                    file.write(bytes(min(free, 2**20)))
            await asyncio.sleep(0.01)


def _free(disk: Path) -> int:
    about = os.statvfs(disk)
    return about.f_bfree * about.f_frsize


@contextlib.asynccontextmanager
async def _failing(setting: Setting, findings: Findings, helper: Helper) -> AsyncIterator[None]:
    """Every fsync and fdatasync of the service fails."""
    trace = setting.folder / "strace.txt"
    calls = "fsync,fdatasync"
    tracer = await asyncio.create_subprocess_exec(
        *("strace", "-f", "-p", str(helper.pid), "-o", str(trace)),
        *("-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert tracer.stderr is not None
        async with asyncio.timeout(30):
            told = await tracer.stderr.readline()
        assert b"attached" in told, told
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            tracer.send_signal(signal.SIGTERM)
        # to its end: strace takes its hands off every thread before
        await tracer.communicate()
    findings.at_least("EIO: fsyncs that failed", trace.read_text(errors="replace").count("(INJECTED)"), 1)


CAMPAIGN = Campaign("disk", run)
