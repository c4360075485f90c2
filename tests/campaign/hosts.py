"""Three hosts on one PostgreSQL database with kills, long stops and server crashes.

Method. The hosts are processes that run only the store and a fake prover; one more process sends and simulates the
chain. Hosts are killed or stopped for longer than their leases, and the server crashes.

Requirements. No share is lost, early or confirmed twice, and another host takes over a silent host's claims promptly.

Injected fault: `expired_claims` (queries.sql) did not check whether a claim had expired, so that hosts took each
other's claims. The short form reported: "lost: 134 (= 0)" and "confirmed: 26 (= 160)".
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
from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.support.postgres import Cluster, find_binaries
from tests.unit.store.conformance.backends import PostgresBackend
from tests.unit.store.fixtures import ROUND, make_posted_share

ROOT: Final = Path(__file__).parents[2]
_EVENT_KINDS: Final = frozenset({"stored", "stale", "early"})
HOST_NAMES: Final = ("red", "green", "blue")
SLACK_SECONDS: Final = 5.0
"""Seconds after its lease within which a silent host's claims are taken over."""


class ProverHost:
    """A prover process, with the events of all its runs."""

    def __init__(self, backend: PostgresBackend, name: str, lease: float) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "tests.campaign.prover_host", *backend.locator[1:], name, str(lease)]
        self._process: asyncio.subprocess.Process | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self.reported: list[tuple[str, int]] = []

    async def start(self) -> None:
        """Start the process; its name may still be in use by its previous run for a moment."""
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT
            )
            assert self._process.stdout is not None
            if await self._process.stdout.readline():
                break
            await self._process.wait()
            await asyncio.sleep(0.1)
        self._reader_task = asyncio.create_task(self._read_events(self._process.stdout))

    async def _read_events(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            what, *rest = line.decode().split()
            if what in _EVENT_KINDS and line.endswith(b"\n"):  # the log uses the same stream
                self.reported.append((what, int(rest[0])))

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process, as a power failure would."""
        assert self._process is not None
        assert self._reader_task is not None
        self.send_signal(signal.SIGKILL)
        await self._process.wait()
        await self._reader_task


class SimulatedSender:
    """Sends messages and simulates the chain; records what it confirms, how late and how often."""

    def __init__(self, store: PostgresStore, due: dict[bytes, float]) -> None:
        self._store = store
        self._due_times = due
        self.confirmed: Counter[bytes] = Counter()
        self.early_reveals = 0
        self.max_lateness = 0.0
        self._height = 0

    async def run(self) -> None:
        """Send prepared messages forever and confirm them in blocks."""
        while True:
            try:
                await self._send_prepared()
            except StoreError:
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.05)

    async def _send_prepared(self) -> None:
        if not await self._store.renew_sender_lease():
            await self._store.acquire_sender_lease()
        sent = await self._store.list_unconfirmed()
        now = time.time()
        spent = []
        for message in sent:
            if await self._store.mark_sending(message.share_id, height=self._height, endpoint="node"):
                self.early_reveals += now < self._due_times[message.nullifier]
                if not self.confirmed[message.nullifier]:
                    self.max_lateness = max(self.max_lateness, now - self._due_times[message.nullifier])
                    self.confirmed[message.nullifier] += 1
                spent.append((ROUND, message.nullifier))
        self._height += 1
        if spent:
            await self._store.apply_block(self._height, spent, now=now)


async def run(setting: CampaignRun) -> Findings:
    """Run the hosts, disrupt them, and check the promises."""
    findings = Findings()
    findings.require_equal(
        "requirements are installed", "yes" if find_binaries() is not None else "no PostgreSQL", "yes"
    )
    if not findings.is_held:
        return findings
    cluster = Cluster()
    try:
        cluster.start()
        await _run_faults(setting, findings, cluster)
    finally:
        cluster.remove()
    return findings


async def _run_faults(setting: CampaignRun, findings: Findings, cluster: Cluster) -> None:
    shares, lease = setting.scale(2_000, 160), setting.scale(10.0, 1.0)
    backend = PostgresBackend(cluster.url, "hosts")
    rng = setting.seeded_random("hurts")
    store = backend.create_store(SystemClock(), print, host="sender", lease=lease)
    await store.open()
    due: dict[bytes, float] = {}
    sender = SimulatedSender(store, due)
    hosts = [ProverHost(backend, name, lease) for name in HOST_NAMES]
    faults: Counter[str] = Counter()
    async with _run_hosts(hosts, sender):
        span, start = setting.scale(400, 12), int(time.time()) + 1
        for number in range(shares):
            posted = make_posted_share(number, submit_at=start + rng.randrange(span))
            due[posted.nullifier] = posted.share.submit_at
            await store.enqueue(posted.share, posted.nullifier, now=time.time())
        started_at, max_silence = time.monotonic(), 0.0
        with _claim_counter(backend) as count_claims:
            for number in range(setting.scale(100, 4)):
                await asyncio.sleep(rng.uniform(0.2, setting.scale(3.0, 0.8)))
                disruption, seconds = await _disrupt_host(count_claims, hosts[number % 3], rng, lease, number)
                faults[disruption] += 1
                max_silence = max(max_silence, seconds)
        cluster.stop(signal.SIGQUIT)
        cluster.start()
        restarted_at = time.monotonic()
        await _wait_until_writable(store)
        findings.require_at_most(
            "seconds until a host writes again after the server's crash", time.monotonic() - restarted_at, 10
        )
        deadline = start + span + 4 * lease + setting.scale(60, 60)
        while len(sender.confirmed) < shares and time.time() < deadline:
            await asyncio.sleep(0.1)
        findings.record_figure("seconds", time.monotonic() - started_at)
    counts = await store.count_shares()
    await store.close()
    event_counts = Counter(event for host in hosts for event, _ in host.reported)
    stored = Counter(share_id for host in hosts for event, share_id in host.reported if event == "stored")
    findings.require_at_most(
        "seconds until another host has a silent host's shares", max_silence, lease + SLACK_SECONDS
    )
    for what, number in faults.items():
        findings.record_figure(what, number)
    findings.record_figure("late writes that matched no row", event_counts["stale"])
    findings.require_equal("lost", shares - len(sender.confirmed), 0)
    findings.require_equal("early", sender.early_reveals + event_counts["early"], 0)
    findings.require_equal("messages stored twice for one share", sum(n > 1 for n in stored.values()), 0)
    findings.require_equal("confirmed", counts[ROUND].get(ShareState.SUBMITTED, 0), shares)
    findings.record_figure("seconds from due to sent, maximum", sender.max_lateness)


ClaimCounter = Callable[[str], Awaitable[int]]
"""Returns the number of shares claimed by a host, read from the database."""


async def _disrupt_host(
    count_claims: ClaimCounter, host: ProverHost, rng: random.Random, lease: float, number: int
) -> tuple[str, float]:
    """Kill or stop a host, mostly for longer than its lease, preferably while it has claims.

    Returns:
        What was done, and after how many seconds the host had no claims (0 if it resumed earlier).
    """
    kill, is_long = number % 2 == 0, number < 2 or rng.random() < 0.7
    deadline = time.monotonic() + 2
    host.send_signal(signal.SIGSTOP)
    while not await count_claims(host.name) and time.monotonic() < deadline:
        host.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.05)
        host.send_signal(signal.SIGSTOP)
    silent_since, has_claims = time.monotonic(), "yes" if await count_claims(host.name) else "none"
    if kill:
        await host.kill()
    if not is_long:
        await asyncio.sleep(lease * 0.3)
    while is_long and await count_claims(host.name) and time.monotonic() < silent_since + 10 * lease:
        await asyncio.sleep(0.05)
    seconds = time.monotonic() - silent_since if is_long else 0
    if kill:
        await host.start()
    else:
        host.send_signal(signal.SIGCONT)
    duration = "more" if is_long else "less"
    return f"SIG{'KILL' if kill else 'STOP'} for {duration} than its lease, claimed shares: {has_claims}", seconds


@contextlib.contextmanager
def _claim_counter(backend: PostgresBackend) -> Iterator[ClaimCounter]:
    """Yield a function that counts a host's claims over a separate connection."""
    with backend.connect() as conn:

        def query_count(host: str) -> int:
            row = conn.execute("SELECT count(*) FROM claims WHERE host = %s", (host,)).fetchone()
            return 0 if row is None else int(row[0])

        async def count_claims(host: str) -> int:
            return await asyncio.to_thread(query_count, host)

        yield count_claims


async def _wait_until_writable(store: PostgresStore) -> None:
    """Wait until the store accepts a write again."""
    while True:
        with contextlib.suppress(StoreError):
            await store.set_meta("campaign", "after")
            return
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _run_hosts(hosts: list[ProverHost], sender: SimulatedSender) -> AsyncIterator[None]:
    """Run hosts and sender; kill them afterwards."""
    sending = asyncio.create_task(sender.run())
    started: list[ProverHost] = []
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
                host.send_signal(signal.SIGCONT)
            await host.kill()


CAMPAIGN = Campaign("hosts", run)
