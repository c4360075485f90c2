"""Three hosts on one PostgreSQL database: killed, stopped for longer than their leases, the server crashed under them.

The hosts are processes around the store alone, with a stand-in for the prover; one more sends, and is the chain.
Nothing may be lost, early, or kept twice, and what a host had in hand is another's soon after.

Planted: `lapsed` (queries.sql) did not ask whether a claim's time is over, so that hosts took from each other what they
had in hand. The short form said: "lost: 134 (= 0)" and "confirmed: 26 (= 160)".
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.errors import StoreError
from helper.store.postgres import PostgresStore
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.support.postgres import Cluster, binaries
from tests.unit.store.conformance.backends import PostgresPlace
from tests.unit.store.fixtures import ROUND, posted

ROOT: Final = Path(__file__).parents[2]
_WORDS: Final = frozenset({"kept", "stale", "early"})
NAMES: Final = ("red", "green", "blue")
SLACK: Final = 5.0
"""Seconds beyond a lease in which what a silent host had in hand is another's."""


class Host:
    """A process that proves, and all that its lives have said."""

    def __init__(self, place: PostgresPlace, name: str, lease: float) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "tests.campaign.prover_host", *place.in_words[1:], name, str(lease)]
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.said: list[tuple[str, int]] = []

    async def start(self) -> None:
        """Start it; its name may still be its last life's for a moment."""
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT
            )
            assert self._process.stdout is not None
            if await self._process.stdout.readline():
                break
            await self._process.wait()
            await asyncio.sleep(0.1)
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    async def _read(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            what, *rest = line.decode().split()
            if what in _WORDS and line.endswith(b"\n"):  # the log comes the same way
                self.said.append((what, int(rest[0])))

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """End it as a power failure does."""
        assert self._process is not None
        assert self._reading is not None
        self.send(signal.SIGKILL)
        await self._process.wait()
        await self._reading


class Sender:
    """The one that sends, and the chain: what it counts, how late, and how often."""

    def __init__(self, store: PostgresStore, due: dict[bytes, float]) -> None:
        self._store = store
        self._due = due
        self.counted: Counter[bytes] = Counter()
        self.early = 0
        self.latest = 0.0
        self._height = 0

    async def run(self) -> None:
        """Send whatever is kept, for ever, and have it counted in a block."""
        while True:
            try:
                await self._turn()
            except StoreError:
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.05)

    async def _turn(self) -> None:
        if not await self._store.keep_sender():
            await self._store.take_sender()
        sent = await self._store.unconfirmed()
        now = time.time()
        spent = []
        for one in sent:
            if await self._store.mark_sending(one.share_id, height=self._height, endpoint="node"):
                self.early += now < self._due[one.nullifier]
                if not self.counted[one.nullifier]:
                    self.latest = max(self.latest, now - self._due[one.nullifier])
                    self.counted[one.nullifier] += 1
                spent.append((ROUND, one.nullifier))
        self._height += 1
        if spent:
            await self._store.apply_block(self._height, spent, now=now)


async def run(setting: Setting) -> Findings:
    """Start, hurt, and judge."""
    findings = Findings()
    findings.exactly("can be tried here", "yes" if binaries() is not None else "no PostgreSQL", "yes")
    if not findings.held:
        return findings
    cluster = Cluster()
    try:
        cluster.start()
        await _hurt(setting, findings, cluster)
    finally:
        cluster.remove()
    return findings


async def _hurt(setting: Setting, findings: Findings, cluster: Cluster) -> None:
    shares, lease = setting.scale(2_000, 160), setting.scale(10.0, 1.0)
    place = PostgresPlace(cluster.address, "hosts")
    dice = setting.dice("hurts")
    store = place.store(SystemClock(), print, host="sender", lease=lease)
    await store.open()
    due: dict[bytes, float] = {}
    sender = Sender(store, due)
    hosts = [Host(place, name, lease) for name in NAMES]
    hurts: Counter[str] = Counter()
    async with _working(hosts, sender):
        span, begin = setting.scale(400, 12), int(time.time()) + 1
        for number in range(shares):
            one = posted(number, submit_at=begin + dice.randrange(span))
            due[one.nullifier] = one.share.submit_at
            await store.enqueue(one.share, one.nullifier, now=time.time())
        began, silence = time.monotonic(), 0.0
        with _looking(place) as in_hand:
            for number in range(setting.scale(100, 4)):
                await asyncio.sleep(dice.uniform(0.2, setting.scale(3.0, 0.8)))
                how, seconds = await _hurt_one(in_hand, hosts[number % 3], dice, lease, number)
                hurts[how] += 1
                silence = max(silence, seconds)
        cluster.stop(signal.SIGQUIT)
        cluster.start()
        back = time.monotonic()
        await _answers(store)
        findings.at_most("seconds until a host writes again after the server's crash", time.monotonic() - back, 10)
        deadline = begin + span + 4 * lease + setting.scale(60, 60)
        while len(sender.counted) < shares and time.time() < deadline:
            await asyncio.sleep(0.1)
        findings.figure("seconds", time.monotonic() - began)
    counts = await store.counts()
    await store.close()
    said = Counter(word for host in hosts for word, _ in host.said)
    kept = Counter(share_id for host in hosts for word, share_id in host.said if word == "kept")
    findings.at_most("seconds of silence until its shares are another's", silence, lease + SLACK)
    for what, number in hurts.items():
        findings.figure(what, number)
    findings.figure("writes of late hosts that matched no row", said["stale"])
    findings.exactly("lost", shares - len(sender.counted), 0)
    findings.exactly("early", sender.early + said["early"], 0)
    findings.exactly("messages kept twice for one share", sum(n > 1 for n in kept.values()), 0)
    findings.exactly("confirmed", counts[ROUND].get(ShareState.SUBMITTED, 0), shares)
    findings.figure("seconds from due to sent, at most", sender.latest)


ClaimState = Callable[[str], Awaitable[int]]
"""How many shares a host has in hand, as the database has it."""


async def _hurt_one(
    in_hand: ClaimState, host: Host, dice: random.Random, lease: float, number: int
) -> tuple[str, float]:
    """Kill it or stop it, mostly for longer than its lease, with something in its hands if it gets any.

    Returns:
        What was done, and after how many seconds it had nothing in hand any more (0 if it came back earlier).
    """
    kill, long = number % 2 == 0, number < 2 or dice.random() < 0.7
    patience = time.monotonic() + 2
    host.send(signal.SIGSTOP)
    while not await in_hand(host.name) and time.monotonic() < patience:
        host.send(signal.SIGCONT)
        await asyncio.sleep(0.05)
        host.send(signal.SIGSTOP)
    silent, busy = time.monotonic(), "yes" if await in_hand(host.name) else "none"
    if kill:
        await host.kill()
    if not long:
        await asyncio.sleep(lease * 0.3)
    while long and await in_hand(host.name) and time.monotonic() < silent + 10 * lease:
        await asyncio.sleep(0.05)
    seconds = time.monotonic() - silent if long else 0
    if kill:
        await host.start()
    else:
        host.send(signal.SIGCONT)
    return f"SIG{'KILL' if kill else 'STOP'} for {'long' if long else 'a moment'}, shares in hand: {busy}", seconds


@contextlib.contextmanager
def _looking(place: PostgresPlace) -> Iterator[ClaimState]:
    """A look at what hosts have in hand, over a connection of its own."""
    with place.connect() as conn:

        def look(host: str) -> int:
            found = conn.execute("SELECT count(*) FROM claims WHERE host = %s", (host,)).fetchone()
            return 0 if found is None else int(found[0])

        async def in_hand(host: str) -> int:
            return await asyncio.to_thread(look, host)

        yield in_hand


async def _answers(store: PostgresStore) -> None:
    """Wait until the store takes a write again."""
    while True:
        with contextlib.suppress(StoreError):
            await store.set_meta("campaign", "after")
            return
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _working(hosts: list[Host], sender: Sender) -> AsyncIterator[None]:
    """Hosts and sender at work, and none of them afterwards."""
    sending = asyncio.create_task(sender.run())
    started: list[Host] = []
    try:
        for host in hosts:
            await host.start()
            started.append(host)
        yield
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        for host in started:
            with contextlib.suppress(ProcessLookupError):
                host.send(signal.SIGCONT)
            await host.kill()


CAMPAIGN = Campaign("hosts", run)
