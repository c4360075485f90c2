"""SIGKILL at every write: one share's whole life, from an empty database to its erasure, killed at each call in turn.

strace kills the service when its writer is about to make its n-th pwrite64, fdatasync, fsync or ftruncate, for each n
that a life has. Then it is started again, the wallet posts again where it had no answer, and the share must come to its
end: counted once, not early, erased from every file, the database sound after an orderly end.

A kill does not lose what the kernel already has, a power cut does. So the order is looked at in a trace: the fdatasync
of the WAL in which a share's row stands is over before its answer begins to leave, and that of its message before the
first byte of the broadcast does.

Planted: the migrations without their transaction. The short form said: "not started again after: pwrite64 91,
pwrite64 42 (= none)". And `PRAGMA synchronous = NORMAL`: "answers before the fdatasync of their row: 3 (= 0)",
"broadcasts before the fdatasync of their message: 3 (= 0)".
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from devnet.ballot import SHARES, Ballot
from tests.campaign import syscalls
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.promise_check import Ledger, judge
from tests.campaign.syscalls import Call
from tests.campaign.wallet_clients import Crowd
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper
from tests.support.process import free_port

LANES = 3
"""Lives at once: each waits more than it works."""
QUICK_POINTS = 6
TRACED = 3
"""Shares whose way is traced."""
PATIENCE = 240.0
"""Seconds for what takes two, as the machine may have other work."""
Point = tuple[str, int]


@dataclass(slots=True)
class Tally:
    """What became of the lives so far."""

    killed: int = 0
    survived: int = 0
    unconfirmed: int = 0
    left: int = 0
    not_started: list[str] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)


@dataclass(slots=True)
class World:
    """A chain with one vote on it, whose 16 shares live in as many helpers."""

    chain: Chain
    vote: Ballot
    position: int
    ledger: Ledger
    folder: Path
    http: httpx.AsyncClient
    dice: random.Random

    def helper(self, name: str) -> Helper:
        """A helper of its own, not started."""
        folder = self.folder / name
        folder.mkdir()
        port = free_port()
        settings = {"port": port, "max_concurrent_proofs": 1}
        made = Helper(folder, self.http, self.chain, program=STAND_IN, helper=settings)
        made.told = {"url": f"http://127.0.0.1:{port}"}
        return made


async def run(setting: Setting) -> Findings:
    """The trace first: it also tells how many moments there are."""
    findings = Findings()
    if not syscalls.installed():
        findings.exactly("strace is installed", "no", "yes")
        return findings
    async with _world(setting, "trace") as world:
        every = await _order(world, findings)
        await judge(findings, world.chain, world.ledger)
    chosen = every
    if setting.quick:
        step = -(-len(every) // QUICK_POINTS)
        chosen = every[setting.dice("offset").randrange(step) :: step]
    tally = Tally()
    for number, batch in enumerate(_batches(chosen)):
        async with _world(setting, f"batch-{number}") as world:
            await _lanes(world, batch, tally)
            await judge(findings, world.chain, world.ledger)
    _tell(findings, tally, len(every), len(chosen))
    return findings


def _tell(findings: Findings, tally: Tally, every: int, chosen: int) -> None:
    findings.figure("writes in a life", every)
    findings.figure("lives that ended before their write", tally.survived)
    findings.at_least("kills", tally.killed, 0.8 * chosen)
    findings.exactly("not started again after", ", ".join(tally.not_started) or "none", "none")
    findings.exactly("shares not confirmed after a kill", tally.unconfirmed, 0)
    findings.exactly("witnesses left on disk", tally.left, 0)
    findings.exactly("databases not sound", "; ".join(tally.unsound) or "none", "none")
    findings.exactly("exit status in the end", " ".join(map(str, sorted(tally.statuses))), "0")


def _batches(chosen: Sequence[Point]) -> list[Sequence[Point]]:
    return [chosen[start : start + SHARES] for start in range(0, len(chosen), SHARES)]


@contextlib.asynccontextmanager
async def _world(setting: Setting, name: str) -> AsyncIterator[World]:
    """A young chain, so that no life has many blocks to read."""
    folder = setting.folder / name
    folder.mkdir()
    async with httpx.AsyncClient(timeout=30) as http:
        chain = Chain(folder, http, "--block-seconds", "0.5", "--stand-in-proofs")
        await chain.start()
        try:
            round_id = await chain.open_round()
            dice = setting.dice(name)
            ((vote, position),) = await Crowd(chain, list, dice).vote(round_id, 1)
            yield World(chain, vote, position, Ledger(), folder, http, dice)
        finally:
            await chain.kill()


# ---------------------------------------------------------------- the order of one life


async def _order(world: World, findings: Findings) -> list[Point]:
    """Trace some shares' lives in one helper; every moment of the first life's writes."""
    trace = world.folder / "trace"
    helper = world.helper("traced")
    helper.launch(under=syscalls.told(trace))
    try:
        await helper.listening()
        for index in range(TRACED):
            await _post(world, helper, index)
            async with helper.patience("has erased a share"):
                while not await _erased(world, helper, index):
                    await asyncio.sleep(0.05)
            if index == 0:
                lines = trace.read_text(errors="replace").count("\n")
        assert await helper.stop() == 0
        found = await syscalls.calls(trace, helper.pid)
    finally:
        await helper.kill()
    late_answers = late_broadcasts = seen = 0
    for index, answer in zip(range(TRACED), _answers(found), strict=True):
        share = world.vote.shares[index]
        late_answers += not _synced(found, share.blind, answer)
        late_broadcasts += not _synced(found, b"\x04\x0a\x20" + share.nullifier, _broadcast(found, share.nullifier))
        seen += 1
    findings.figure("shares traced", seen)
    findings.exactly("answers before the fdatasync of their row", late_answers, 0)
    findings.exactly("broadcasts before the fdatasync of their message", late_broadcasts, 0)
    return syscalls.points([call for call in found if call.ended < lines], helper.db.name)


def _answers(found: Sequence[Call]) -> list[Call]:
    """What brought the wallets' answers, in their order."""
    return [call for call in found if call.file.startswith("socket:") and b'"queued"' in call.data]


def _broadcast(found: Sequence[Call], nullifier: bytes) -> Call:
    """What brought the first byte of the request with this nullifier: its head, which may be sent before its body."""
    name = base64.b64encode(nullifier)
    sent = [call for call in found if call.file.startswith("socket:")]
    body = next(call for call in sent if name in call.data)
    before = [call for call in sent if call.file == body.file and call.began <= body.began]
    return next(call for call in reversed(before) if b"/reveal-share" in call.data)


def _synced(found: Sequence[Call], needle: bytes, sending: Call) -> bool:
    """Whether a WAL that these bytes were written to was synced between that and the sending."""
    written = next(call for call in found if call.file.endswith("-wal") and needle in call.data)
    return any(
        call.name in ("fdatasync", "fsync")
        and call.file == written.file
        and written.ended < call.began
        and call.ended < sending.began
        for call in found
    )


# ---------------------------------------------------------------- kills


async def _lanes(world: World, batch: Sequence[Point], tally: Tally) -> None:
    queue = iter(enumerate(batch))

    async def lane() -> None:
        for index, point in queue:
            await _life(world, index, point, tally)

    await asyncio.gather(*(lane() for _ in range(LANES)))


async def _life(world: World, index: int, point: Point, tally: Tally) -> None:
    """One share's life with a kill in it."""
    helper = world.helper("{}-{}".format(*point))
    helper.launch(under=syscalls.kill_at(*point))
    try:
        posting = asyncio.create_task(_post(world, helper, index))
        try:
            if await _killed(world, helper, index, point):
                tally.killed += 1
                if not await _starts(helper):
                    tally.not_started.append("{} {}".format(*point))
                    return
            else:
                tally.survived += 1
            await posting
        finally:
            posting.cancel()
        try:
            async with helper.patience("has confirmed and erased its share", PATIENCE):
                while not await _erased(world, helper, index):
                    await asyncio.sleep(0.05)
        except AssertionError:
            tally.unconfirmed += 1
        tally.statuses.add(await helper.stop())
    finally:
        await helper.kill()
    share = world.vote.shares[index]
    secrets = (share.blind, share.c1, share.c2, b"".join(world.vote.share_comms))
    tally.left += any(secret in helper.bytes_on_disk() for secret in secrets)
    if (said := helper.kept.integrity()) != "ok":
        tally.unsound.append(f"{point}: {said}")


async def _starts(helper: Helper) -> bool:
    """Whether it comes up again by itself."""
    helper.launch()
    try:
        await helper.listening()
    except AssertionError:
        return False
    return True


async def _killed(world: World, helper: Helper, index: int, point: Point) -> bool:
    """Wait for the kill; False when the share's life was over before."""
    async with helper.patience("is killed, or has lived to the end"):
        while True:
            assert helper.process is not None
            status = helper.process.poll()
            if status is not None:
                assert status == -signal.SIGKILL, f"{point}: ended with {status}\n{helper.tail()}"
                return True
            if await _erased(world, helper, index):
                return False
            await asyncio.sleep(0.05)


async def _post(world: World, helper: Helper, index: int) -> None:
    """Post a share until it is acknowledged, by whichever life of its helper."""
    crowd = Crowd(world.chain, lambda: [helper.url], world.dice)
    crowd.ledger = world.ledger
    await crowd.post([(world.vote, world.position)], lambda: 0, posters=1, patience=PATIENCE, indices=[index])


async def _erased(world: World, helper: Helper, index: int) -> bool:
    """Whether a share is confirmed, and its witness in no file."""
    share = world.vote.shares[index]
    with contextlib.suppress(httpx.HTTPError, FileNotFoundError):
        if share.nullifier.hex() in world.ledger.acknowledged:
            confirmed = await helper.share_status(world.vote.round_id, share.nullifier) == "confirmed"
            return confirmed and share.blind not in helper.bytes_on_disk()
    return False


CAMPAIGN = Campaign("writes", run)
