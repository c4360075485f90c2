"""SIGKILL at every write of one share's life, from an empty database to its erasure.

Method. strace kills the service when its writer is about to make its n-th pwrite64, fdatasync, fsync or ftruncate, for
each n in a share's life. Then the service is restarted and the wallet posts again if it had no response.

Requirements. The share is counted once, not early, and erased from every file, and the database is sound after a
clean shutdown.

A kill does not lose data that the kernel already has; a power failure does. Therefore a trace is checked for the order
of calls: the fdatasync of the WAL that contains a share's row ends before its response begins, and that of its message
before the first byte of the broadcast.

Injected fault: the migrations without their transaction. The short form reported: "not restarted after: pwrite64
91, pwrite64 42 (= none)". And `PRAGMA synchronous = NORMAL`: "responses before the fdatasync of their row: 3 (= 0)",
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
from functools import partial
from pathlib import Path

import httpx

from devnet.ballot import SHARE_COUNT, Ballot
from tests.campaign import syscalls
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.promise_check import ShareLedger, check_promises
from tests.campaign.syscalls import SystemCall
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, run_chain
from tests.support.process import find_free_port

LANE_COUNT = 3
"""Number of concurrent helpers; each is mostly idle."""
QUICK_POINT_COUNT = 6
TRACED_SHARES = 3
"""Number of traced shares."""
TIMEOUT_SECONDS = 240.0
"""Timeout of operations that take two seconds on an idle machine."""
KillPoint = tuple[str, int]


@dataclass(slots=True)
class KillStatistics:
    """Results of the kills so far."""

    killed: int = 0
    survived: int = 0
    unconfirmed: int = 0
    secrets_left: int = 0
    not_started: list[str] = field(default_factory=list)
    corrupt_databases: list[str] = field(default_factory=list)
    statuses: set[int] = field(default_factory=set)


@dataclass(slots=True)
class KillEnvironment:
    """A chain with one vote, whose 16 shares are posted to 16 helpers."""

    chain: DevChain
    vote: Ballot
    position: int
    ledger: ShareLedger
    directory: Path
    rng: random.Random

    def create_helper(self, name: str) -> HelperProcess:
        directory = self.directory / name
        port = find_free_port()
        settings = {"port": port, "max_concurrent_proofs": 1}
        helper = HelperProcess(directory, self.chain.http, self.chain, program=STAND_IN_PROGRAM, helper=settings)
        helper.ready_data = {"url": f"http://127.0.0.1:{port}"}
        return helper


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    if not syscalls.is_strace_installed():
        findings.require_equal("strace is installed", "no", "yes")
        return findings
    async with _create_environment(setting, "trace") as env:
        all_points = await _trace_lifecycle(env, findings)
        await check_promises(findings, env.chain, env.ledger)
    chosen = all_points
    if setting.is_quick:
        step = -(-len(all_points) // QUICK_POINT_COUNT)
        chosen = all_points[setting.seeded_random("offset").randrange(step) :: step]
    statistics = KillStatistics()
    for number, batch in enumerate(_split_batches(chosen)):
        async with _create_environment(setting, f"batch-{number}") as env:
            await _run_lanes(env, batch, statistics)
            await check_promises(findings, env.chain, env.ledger)
    _report(findings, statistics, len(all_points), len(chosen))
    return findings


def _report(findings: Findings, statistics: KillStatistics, point_count: int, chosen: int) -> None:
    findings.record_figure("writes of a share", point_count)
    findings.record_figure("runs that ended before their write", statistics.survived)
    findings.require_at_least("kills", statistics.killed, 0.8 * chosen)
    findings.require_none("not restarted after", statistics.not_started)
    findings.require_equal("shares not confirmed after a kill", statistics.unconfirmed, 0)
    findings.require_equal("witnesses left on disk", statistics.secrets_left, 0)
    findings.require_none("corrupt databases", statistics.corrupt_databases)
    findings.require_equal("exit status at the end", " ".join(map(str, sorted(statistics.statuses))), "0")


def _split_batches(chosen: Sequence[KillPoint]) -> list[Sequence[KillPoint]]:
    return [chosen[start : start + SHARE_COUNT] for start in range(0, len(chosen), SHARE_COUNT)]


@contextlib.asynccontextmanager
async def _create_environment(setting: CampaignRun, name: str) -> AsyncIterator[KillEnvironment]:
    """Create a young chain, so that no helper has many blocks to read."""
    directory = setting.directory / name
    async with run_chain(directory, "--block-seconds", "0.5", "--stand-in-proofs") as chain:
        round_id = await chain.open_round()
        rng = setting.seeded_random(name)
        ((vote, position),) = await WalletGroup(chain, list, rng).cast_votes(round_id, 1)
        yield KillEnvironment(chain, vote, position, ShareLedger(), directory, rng)


# ---------------------------------------------------------------- order of calls


async def _trace_lifecycle(env: KillEnvironment, findings: Findings) -> list[KillPoint]:
    """Trace a few shares in one helper; return every write of the first share as a kill point."""
    trace = env.directory / "trace"
    helper = env.create_helper("traced")
    helper.spawn(wrapper=syscalls.trace_command(trace))
    try:
        await helper.wait_until_listening()
        for index in range(TRACED_SHARES):
            await _post_share(env, helper, index)
            await helper.wait_for("has erased a share", partial(_wait_until_erased, env, helper, index))
            if index == 0:
                lines = trace.read_text(errors="replace").count("\n")
        assert await helper.stop() == 0
        calls = await syscalls.read_calls(trace, helper.pid)
    finally:
        await helper.kill()
    late_answers = late_broadcasts = traced = 0
    for index, response in zip(range(TRACED_SHARES), _wallet_response_calls(calls), strict=True):
        share = env.vote.shares[index]
        late_answers += not _is_wal_synced(calls, share.blind, response)
        late_broadcasts += not _is_wal_synced(
            calls, b"\x04\x0a\x20" + share.nullifier, _broadcast_call(calls, share.nullifier)
        )
        traced += 1
    findings.record_figure("shares traced", traced)
    findings.require_equal("responses before the fdatasync of their row", late_answers, 0)
    findings.require_equal("broadcasts before the fdatasync of their message", late_broadcasts, 0)
    return syscalls.kill_points([call for call in calls if call.ended_at < lines], helper.db.name)


def _wallet_response_calls(calls: Sequence[SystemCall]) -> list[SystemCall]:
    """Return the calls that sent responses to wallets, in order."""
    return [call for call in calls if call.file.startswith("socket:") and b'"queued"' in call.data]


def _broadcast_call(calls: Sequence[SystemCall], nullifier: bytes) -> SystemCall:
    """Return the call that sent the first byte of the request with this nullifier.

    The head may be sent before the body that contains the nullifier.
    """
    name = base64.b64encode(nullifier)
    sent = [call for call in calls if call.file.startswith("socket:")]
    body = next(call for call in sent if name in call.data)
    before = [call for call in sent if call.file == body.file and call.began_at <= body.began_at]
    return next(call for call in reversed(before) if b"/reveal-share" in call.data)


def _is_wal_synced(calls: Sequence[SystemCall], needle: bytes, sending: SystemCall) -> bool:
    """Return whether the WAL with these bytes was synced between their write and the sending."""
    written = next(call for call in calls if call.file.endswith("-wal") and needle in call.data)
    return any(
        call.name in ("fdatasync", "fsync")
        and call.file == written.file
        and written.ended_at < call.began_at
        and call.ended_at < sending.began_at
        for call in calls
    )


# ---------------------------------------------------------------- kills


async def _run_lanes(env: KillEnvironment, batch: Sequence[KillPoint], statistics: KillStatistics) -> None:
    queue = iter(enumerate(batch))

    async def run_lane() -> None:
        for index, point in queue:
            await _run_kill(env, index, point, statistics)

    await asyncio.gather(*(run_lane() for _ in range(LANE_COUNT)))


async def _run_kill(env: KillEnvironment, index: int, point: KillPoint, statistics: KillStatistics) -> None:
    """Run one share's life with a kill at this point."""
    helper = env.create_helper("{}-{}".format(*point))
    helper.spawn(wrapper=syscalls.kill_command(*point))
    try:
        posting = asyncio.create_task(_post_share(env, helper, index))
        try:
            if await _wait_for_kill(env, helper, index, point):
                statistics.killed += 1
                if (problem := await _find_restart_problem(helper)) is not None:
                    statistics.not_started.append("{} {}".format(*point) + f" ({problem})")
                    return
            else:
                statistics.survived += 1
            await posting
        finally:
            posting.cancel()
        try:
            is_erased = partial(_wait_until_erased, env, helper, index)
            await helper.wait_for("has confirmed and erased its share", is_erased, TIMEOUT_SECONDS)
        except AssertionError:
            statistics.unconfirmed += 1
        statistics.statuses.add(await helper.stop())
    finally:
        await helper.kill()
    share = env.vote.shares[index]
    secrets = (share.blind, share.c1, share.c2, b"".join(env.vote.share_comms))
    statistics.secrets_left += any(secret in helper.bytes_on_disk() for secret in secrets)
    if (result := helper.storage.check_integrity()) != "ok":
        statistics.corrupt_databases.append(f"{point}: {result}")


async def _find_restart_problem(helper: HelperProcess) -> str | None:
    """Restart the helper without intervention. Return why it does not listen, None if it does."""
    helper.spawn()
    try:
        await helper.wait_until_listening()
    except AssertionError as error:
        return str(error)
    return None


async def _wait_for_kill(env: KillEnvironment, helper: HelperProcess, index: int, point: KillPoint) -> bool:
    """Wait for the kill; return False if the share was finished first."""
    async with helper.timeout("is killed or has erased its share"):
        while True:
            assert helper.process is not None
            status = helper.process.poll()
            if status is not None:
                assert status == -signal.SIGKILL, f"{point}: ended with {status}\n{helper.log_tail()}"
                return True
            if await _wait_until_erased(env, helper, index):
                return False
            await asyncio.sleep(0.05)


async def _post_share(env: KillEnvironment, helper: HelperProcess, index: int) -> None:
    """Post a share until it is acknowledged, across restarts of its helper."""
    wallets = WalletGroup(env.chain, lambda: [helper.url], env.rng)
    wallets.ledger = env.ledger
    await wallets.post_shares(
        [(env.vote, env.position)], lambda: 0, posters=1, timeout_seconds=TIMEOUT_SECONDS, indices=[index]
    )


async def _wait_until_erased(env: KillEnvironment, helper: HelperProcess, index: int) -> bool:
    """Return whether a share is confirmed and its witness is in no file."""
    share = env.vote.shares[index]
    with contextlib.suppress(httpx.HTTPError, FileNotFoundError):
        if share.nullifier.hex() in env.ledger.acknowledged_at:
            confirmed = await helper.share_status(env.vote.round_id, share.nullifier) == "confirmed"
            return confirmed and share.blind not in helper.bytes_on_disk()
    return False
