"""Three hosts with copies of a queue and a lease in an object store, under faults.

Method. The hosts are processes whose wall clocks are up to 5 s wrong (`lease_host.py`). They are killed and stopped,
and the object store becomes slow and unreachable.

Requirements. At most one host holds the lease at any time, no send begins without a lease check after the share was
claimed, and a lost holder is replaced promptly.

Injected fault: a host decided by its own wall clock, from the time that the holder had written, that a lease had
expired. The short form reported: "moments with two holders: 1 (= 0)", "sends that began while another host held the
lease: 57 (= 0)" and "SIGKILL: seconds until a host sends: 6.0605 (≤ 6)".
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

from tests.campaign.campaign import Campaign, CampaignRun, Findings
from tests.support.s3 import CREDENTIALS_ENV, ObjectStoreProcess, run_object_store

ROOT: Final = Path(__file__).parents[2]
CLOCK_SKEWS: Final = {"red": -5.0, "green": 0.0, "blue": 5.0}
SLACK_SECONDS: Final = 5.0
"""Seconds after the end of a lost lease within which another host sends."""
FAULT_KINDS: Final = ("SIGKILL", "SIGSTOP", "503", "slow", "lost responses")


@dataclass(frozen=True, slots=True)
class SendRecord:
    """Times of a send: claim, lease check after the claim (0 for none), and first byte."""

    claimed_at: float
    lease_checked_at: float
    sent_at: float


class SenderHost:
    """A process that sends while it holds the lease, with the events of all its runs."""

    def __init__(self, store: ObjectStoreProcess, directory: Path, name: str, lease: float) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "tests.campaign.lease_host", store.url, str(directory / name), name]
        self._command += [str(CLOCK_SKEWS[name]), str(lease)]
        self._log = directory / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self.held_spans: dict[tuple[int, int], list[float]] = {}  # (run, fencing token) -> first and last moment
        self.sent: list[SendRecord] = []
        self.last_report = 0.0
        self.start_count = 0

    async def start(self) -> None:
        """Start the process and wait until it is ready."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **CREDENTIALS_ENV},
            )
        assert self._process.stdout is not None
        self.start_count += 1
        opened = asyncio.Event()
        self._reader_task = asyncio.create_task(self._read_events(self._process.stdout, opened))
        async with asyncio.timeout(60):
            await opened.wait()

    async def _read_events(self, lines: asyncio.StreamReader, opened: asyncio.Event) -> None:
        while (line := await lines.readline()).endswith(b"\n"):
            what, *rest = line.decode().split()
            if what == "open":
                opened.set()
            elif what == "held":
                self.last_report = float(rest[1])
                self.held_spans.setdefault((self.start_count, int(rest[0])), [self.last_report, self.last_report])[
                    1
                ] = self.last_report
            elif what == "sent":
                self.sent.append(SendRecord(*map(float, rest)))

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process, as a power failure would."""
        assert self._process is not None
        assert self._reader_task is not None
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        await self._process.wait()
        await self._reader_task


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    lease, fault_count = setting.scale(10.0, 1.0), setting.scale(40, len(FAULT_KINDS))
    started_at = time.monotonic()
    async with run_object_store(setting.directory) as store, _run_hosts(store, setting.directory, lease) as hosts:
        await _wait_until("a host sends", lambda: _current_holder(hosts) is not None)
        for kind in itertools.islice(itertools.cycle(FAULT_KINDS), fault_count):
            seconds = await _disrupt_hosts(kind, hosts, store, lease)
            findings.require_at_most(f"{kind}: seconds until a host sends", seconds, lease + SLACK_SECONDS)
        duration = time.monotonic() - started_at
    findings.record_figure("seconds", duration)
    _check_reports(findings, hosts, fault_count)
    return findings


def _check_reports(findings: Findings, hosts: list[SenderHost], fault_count: int) -> None:
    spans = [(span[0], span[1], host.name) for host in hosts for span in host.held_spans.values()]
    fences = [fence for host in hosts for _, fence in host.held_spans]
    others: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for first, last, name in spans:
        for other in CLOCK_SKEWS:
            if other != name:
                others[other].append((first, last))
    sent = [(host.name, send) for host in hosts for send in host.sent]
    findings.require_equal("moments with two holders", _count_overlaps([(first, last) for first, last, _ in spans]), 0)
    findings.require_equal("fencing tokens used by two terms", len(fences) - len(set(fences)), 0)
    findings.require_at_least("lease terms", len(spans), 2)
    findings.require_at_least("sends", len(sent), 20)
    unchecked = sum(not send.claimed_at <= send.lease_checked_at <= send.sent_at for _, send in sent)
    findings.require_equal("sends without a lease check after the claim", unchecked, 0)
    conflicting = sum(_is_within(send.lease_checked_at, others[name]) for name, send in sent)
    findings.require_equal("sends that began while another host held the lease", conflicting, 0)
    late = sum(_is_within(send.sent_at, others[name]) for name, send in sent)
    findings.require_at_most("sends in progress when their host was stopped", late, fault_count)


def _count_overlaps(spans: list[tuple[float, float]]) -> int:
    """Count the spans that begin before all earlier ones have ended."""
    overlaps, until = 0, 0.0
    for first, last in sorted(spans):
        overlaps += first <= until
        until = max(until, last)
    return overlaps


def _is_within(moment: float, spans: list[tuple[float, float]]) -> bool:
    return any(first <= moment <= last for first, last in spans)


def _current_holder(hosts: list[SenderHost], since: float = 0.0) -> SenderHost | None:
    latest = max(hosts, key=lambda host: host.last_report)
    return latest if latest.last_report > since else None


async def _disrupt_hosts(kind: str, hosts: list[SenderHost], store: ObjectStoreProcess, lease: float) -> float:
    """Disrupt the hosts; return the seconds until a host sends again."""
    holder = _current_holder(hosts)
    assert holder is not None
    started_at = time.monotonic()
    if kind == "SIGKILL":
        await holder.kill()
        await _wait_until("another host holds the lease", lambda: _current_holder(hosts, started_at) is not None)
        seconds = time.monotonic() - started_at
        await holder.start()
        return seconds
    if kind == "SIGSTOP":
        holder.send_signal(signal.SIGSTOP)
        try:
            await _wait_until(
                "another host holds the lease",
                lambda: _current_holder(_other_hosts(hosts, holder), started_at) is not None,
            )
        finally:
            holder.send_signal(signal.SIGCONT)
        return time.monotonic() - started_at
    faults: dict[str, dict[str, float]] = {
        "503": {"unavailable": 10**6},
        "slow": {"delay": lease / 8},
        "lost responses": {"lost_response": 10**6},
    }
    await store.set_faults(**faults[kind])
    await asyncio.sleep(1.5 * lease)
    await store.set_faults()
    ended_at = time.monotonic()
    await _wait_until("a host sends", lambda: _current_holder(hosts, ended_at) is not None)
    return time.monotonic() - ended_at


def _other_hosts(hosts: list[SenderHost], excluded: SenderHost) -> list[SenderHost]:
    return [host for host in hosts if host is not excluded]


async def _wait_until(description: str, condition: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(90):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited 90 s until {description}") from None


@contextlib.asynccontextmanager
async def _run_hosts(store: ObjectStoreProcess, directory: Path, lease: float) -> AsyncIterator[list[SenderHost]]:
    """Run hosts; kill them afterwards."""
    hosts = [SenderHost(store, directory, name, lease) for name in CLOCK_SKEWS]
    try:
        await asyncio.gather(*(host.start() for host in hosts))
        yield hosts
    finally:
        await asyncio.gather(*(host.kill() for host in hosts if host.start_count))


CAMPAIGN = Campaign("lease", run)
