"""Three hosts, each with a copy of a queue, and a lease in an object store: killed, stopped, the store slow and away.

The hosts are processes whose wall clocks are up to 5 s wrong (`lease_host.py`). At most one may hold the lease at any
time, no send may begin without a look at it after the share was claimed, and who is gone is followed soon.

Planted: that a lease is over was concluded from the time that its holder had written, by one's own wall clock. The
short form said: "moments with two holders: 1 (= 0)", "sends that began while another held it: 57 (= 0)" and "SIGKILL:
seconds until somebody sends: 6.0605 (≤ 6)".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.campaign.campaign import Campaign, Findings, Setting
from tests.support.s3 import ENV, ObjectStore, storing

ROOT: Final = Path(__file__).parents[2]
SKEWS: Final = {"red": -5.0, "green": 0.0, "blue": 5.0}
SLACK: Final = 5.0
"""Seconds beyond a lease after whose loss another one sends."""
ROUNDS: Final = ("SIGKILL", "SIGSTOP", "503", "slow", "answers lost")


@dataclass(frozen=True, slots=True)
class Sent:
    """A send: when the share was claimed, when the lease was looked at after that (0: never), when it left."""

    claimed: float
    looked: float
    left: float


class Host:
    """A process that sends when it may, and all that its lives have said."""

    def __init__(self, store: ObjectStore, folder: Path, name: str, lease: float) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "tests.campaign.lease_host", store.url, str(folder / name), name]
        self._command += [str(SKEWS[name]), str(lease)]
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.held: dict[tuple[int, int], list[float]] = {}  # (life, fence) -> first and last moment
        self.sent: list[Sent] = []
        self.last = 0.0
        self.lives = 0

    async def start(self) -> None:
        """Start it, and wait until it works."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=log, cwd=ROOT, env={**os.environ, **ENV}
            )
        assert self._process.stdout is not None
        self.lives += 1
        opened = asyncio.Event()
        self._reading = asyncio.create_task(self._read(self._process.stdout, opened))
        async with asyncio.timeout(60):
            await opened.wait()

    async def _read(self, lines: asyncio.StreamReader, opened: asyncio.Event) -> None:
        while (line := await lines.readline()).endswith(b"\n"):
            what, *rest = line.decode().split()
            if what == "open":
                opened.set()
            elif what == "held":
                self.last = float(rest[1])
                self.held.setdefault((self.lives, int(rest[0])), [self.last, self.last])[1] = self.last
            elif what == "sent":
                self.sent.append(Sent(*map(float, rest)))

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """End it as a power failure does."""
        assert self._process is not None
        assert self._reading is not None
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        await self._process.wait()
        await self._reading


async def run(setting: Setting) -> Findings:
    """Start, hurt, and judge."""
    findings = Findings()
    lease, hurts = setting.scale(10.0, 1.0), setting.scale(40, len(ROUNDS))
    began = time.monotonic()
    async with storing(setting.folder) as store, _working(store, setting.folder, lease) as hosts:
        await _soon("somebody sends", lambda: _holder(hosts) is not None)
        for kind in itertools.islice(itertools.cycle(ROUNDS), hurts):
            seconds = await _hurt(kind, hosts, store, lease)
            findings.at_most(f"{kind}: seconds until somebody sends", seconds, lease + SLACK)
        lasted = time.monotonic() - began
    findings.figure("seconds", lasted)
    _judge(findings, hosts, hurts)
    return findings


def _judge(findings: Findings, hosts: list[Host], hurts: int) -> None:
    """What they said, compared."""
    spans = [(span[0], span[1], host.name) for host in hosts for span in host.held.values()]
    fences = [fence for host in hosts for _, fence in host.held]
    others: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for first, last, name in spans:
        for other in SKEWS:
            if other != name:
                others[other].append((first, last))
    sent = [(host.name, one) for host in hosts for one in host.sent]
    findings.exactly("moments with two holders", _overlaps([(first, last) for first, last, _ in spans]), 0)
    findings.exactly("fences that two holdings had", len(fences) - len(set(fences)), 0)
    findings.at_least("holdings", len(spans), 2)
    findings.at_least("sends", len(sent), 20)
    unlooked = sum(not one.claimed <= one.looked <= one.left for _, one in sent)
    findings.exactly("sends without a look at the lease after the claim", unlooked, 0)
    begun = sum(_within(one.looked, others[name]) for name, one in sent)
    findings.exactly("sends that began while another held it", begun, 0)
    late = sum(_within(one.left, others[name]) for name, one in sent)
    findings.at_most("sends that had begun when their host was stopped", late, hurts)


def _overlaps(spans: list[tuple[float, float]]) -> int:
    """How many of these begin before all earlier ones have ended."""
    found, until = 0, 0.0
    for first, last in sorted(spans):
        found += first <= until
        until = max(until, last)
    return found


def _within(moment: float, spans: list[tuple[float, float]]) -> bool:
    return any(first <= moment <= last for first, last in spans)


def _holder(hosts: list[Host], since: float = 0.0) -> Host | None:
    """Who held it last, later than this moment; None for nobody."""
    found = max(hosts, key=lambda host: host.last)
    return found if found.last > since else None


async def _hurt(kind: str, hosts: list[Host], store: ObjectStore, lease: float) -> float:
    """Do one thing to them; after how many seconds somebody sends again."""
    victim = _holder(hosts)
    assert victim is not None
    began = time.monotonic()
    if kind == "SIGKILL":
        await victim.kill()
        await _soon("another has it", lambda: _holder(hosts, began) is not None)
        took = time.monotonic() - began
        await victim.start()
        return took
    if kind == "SIGSTOP":
        victim.send(signal.SIGSTOP)
        try:
            await _soon("another has it", lambda: _holder(_others(hosts, victim), began) is not None)
        finally:
            victim.send(signal.SIGCONT)
        return time.monotonic() - began
    faults: dict[str, dict[str, float]] = {
        "503": {"busy": 10**6},
        "slow": {"slow": lease / 8},
        "answers lost": {"lost": 10**6},
    }
    await store.faults(**faults[kind])
    await asyncio.sleep(1.5 * lease)
    await store.faults()
    ended = time.monotonic()
    await _soon("somebody sends", lambda: _holder(hosts, ended) is not None)
    return time.monotonic() - ended


def _others(hosts: list[Host], one: Host) -> list[Host]:
    return [host for host in hosts if host is not one]


async def _soon(what: str, holds: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(90):
            while not holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited 90 s until {what}") from None


@contextlib.asynccontextmanager
async def _working(store: ObjectStore, folder: Path, lease: float) -> AsyncIterator[list[Host]]:
    """Hosts at work, and none of them afterwards."""
    hosts = [Host(store, folder, name, lease) for name in SKEWS]
    try:
        await asyncio.gather(*(host.start() for host in hosts))
        yield hosts
    finally:
        await asyncio.gather(*(host.kill() for host in hosts if host.lives))


CAMPAIGN = Campaign("lease", run)
