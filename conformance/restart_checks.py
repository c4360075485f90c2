"""Checks of the state after a restart of the helper with the given command.

One scenario posts shares, runs the command while more arrive, and waits for the reveals. The checks evaluate it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any, Final

from conformance.check_failures import MAX_SEEN_CHARACTERS, CheckFailed, CheckSkipped, require, shorten
from conformance.checks import CheckList, Phase
from conformance.dev_chain import Reveal
from conformance.http_requests import Reply
from conformance.session import Session, describe_many
from conformance.shares import TestShare, encode
from conformance.status_checks import STATUS_PATH

COMMAND_SECONDS: Final = 180.0
"""Limit of the command, and of the time until the helper is ready again."""
_WAIT_SECONDS: Final = 15
"""Seconds until the reveal of the shares that wait during the restart."""
_CROWD: Final = 32

_R9: Final = "protocol R9; draft: Availability and Fault Tolerance"
_NEEDS: Final[dict[str, Any]] = {"phase": Phase.RESTART, "needs_restart": True, "needs_shares": True}
_ON_CHAIN: Final[dict[str, Any]] = {**_NEEDS, "needs_chain": True}

checks = CheckList()


@dataclass(slots=True)
class _Scenario:
    """What was posted before the restart, and the responses after it.

    Attributes:
        restarted_at: when the command was started, Unix seconds.
        seconds: from the command to the first status ok; None if there was none.
        output: what the command wrote, if it failed.
        waiting: response to a repeat of each share that was waiting.
        posted: responses to the shares that were posted during the restart.
        concurrent: response to a repeat of each share that was accepted during the restart.
        due: time of the waiting shares that were to be revealed; None without a dev chain.
        timed: these shares.
        revealed: a share that was counted before the restart.
        revealed_status: its status after the restart.
        revealed_again: response to a repeat of it.
        late: response to a share that is new after the restart.
        counted: reveals of the shares that were to be revealed.
        sent: times at which the node got reveals, by nullifier, Unix seconds.
    """

    restarted_at: float = 0.0
    seconds: float | None = None
    output: str = ""
    waiting: list[Reply] = field(default_factory=list)
    posted: list[Reply] = field(default_factory=list)
    concurrent: list[Reply] = field(default_factory=list)
    due: int | None = None
    timed: list[TestShare] = field(default_factory=list)
    revealed: TestShare | None = None
    revealed_status: Reply | None = None
    revealed_again: Reply | None = None
    late: Reply | None = None
    counted: list[Reveal] = field(default_factory=list)
    sent: dict[bytes, list[float]] = field(default_factory=dict)


async def _run(session: Session) -> _Scenario:
    scenario = _Scenario()
    if session.has_chain:
        scenario.revealed = await _reveal_one(session)
        scenario.due = int(session.clock.now()) + _WAIT_SECONDS
        scenario.timed = session.take_many(4)
    far = session.take_many(4)
    for share in scenario.timed:
        await session.post_share(share, scenario.due)
    waiting = [share for share in far if (await session.post_share(share)).is_accepted]
    concurrent = session.take_many(_CROWD) if session.has_chain else []
    await _restart(session, scenario, concurrent)
    if scenario.seconds is None:
        return scenario
    scenario.waiting = [await session.client.post(encode(share.body(session.time_for(share)))) for share in waiting]
    accepted = {posted.share.nullifier for posted in session.accepted}
    survivors = [share for share in concurrent if share.nullifier in accepted]
    scenario.concurrent = [
        await session.client.post(encode(share.body(session.time_for(share)))) for share in survivors
    ]
    if scenario.revealed is not None:
        scenario.revealed_status = await _confirmed_status(session, scenario.revealed)
        scenario.revealed_again = await session.client.post(encode(scenario.revealed.body(0)))
        scenario.late = await session.post_share(session.take())
        await _watch(session, scenario)
    return scenario


async def _reveal_one(session: Session) -> TestShare:
    """Post a share that is due at once, and wait until it is confirmed."""
    share = session.take()
    await session.post_share(share, 0)

    async def is_confirmed() -> bool:
        return (await session.share_status(share)).is_confirmed

    if not await session.wait_for(is_confirmed, session.reveal_seconds):
        raise CheckSkipped("no share was confirmed before the restart")
    return share


async def _restart(session: Session, scenario: _Scenario, concurrent: Sequence[TestShare]) -> None:
    """Run the command while shares arrive, and wait until the helper is ready."""
    assert session.restart_command is not None
    posting = [asyncio.ensure_future(_post_until_down(session, share)) for share in concurrent]
    for posted in asyncio.as_completed(posting):  # start the command while most of them are in flight
        reply = await posted
        if reply is not None and reply.is_accepted:
            break
    started, scenario.restarted_at = session.clock.monotonic(), session.clock.now()
    with TemporaryFile() as output:  # of a pipe, a helper that the command starts in the background keeps the end
        process = await asyncio.create_subprocess_shell(
            session.restart_command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            text = f"the command took more than {COMMAND_SECONDS:.0f} s"
        else:
            output.seek(0)
            text = output.read(MAX_SEEN_CHARACTERS).decode(errors="replace").strip()
    scenario.posted = [reply for reply in await asyncio.gather(*posting) if reply is not None]
    if process.returncode:
        scenario.output = f"exit code {process.returncode}: {text}"
        return
    if await session.wait_for(lambda: _is_ready(session), COMMAND_SECONDS):
        scenario.seconds = session.clock.monotonic() - started


async def _post_until_down(session: Session, share: TestShare) -> Reply | None:
    """Post a share. It is not a failure if the helper is down: then there is no response."""
    with suppress(CheckFailed):
        return await session.post_share(share)
    return None


async def _is_ready(session: Session) -> bool:
    try:
        return (await session.client.get(STATUS_PATH)).outcome == "ok"
    except CheckFailed:
        return False


async def _confirmed_status(session: Session, share: TestShare) -> Reply:
    """The status of a revealed share; a helper may read the chain first."""
    reply = await session.share_status(share)

    async def is_confirmed() -> bool:
        nonlocal reply
        reply = await session.share_status(share)
        return reply.is_confirmed

    await session.wait_for(is_confirmed, 30)
    return reply


async def _watch(session: Session, scenario: _Scenario) -> None:
    """Wait until the waiting shares are counted, and read when they were sent."""
    assert scenario.due is not None
    nullifiers = {share.nullifier for share in scenario.timed}

    async def are_counted() -> bool:
        reveals = await session.chain.reveals(session.round.round_id)
        scenario.counted = [reveal for reveal in reveals if reveal.nullifier in nullifiers]
        return {reveal.nullifier for reveal in scenario.counted} == nullifiers

    await session.wait_for(are_counted, max(0.0, scenario.due - session.clock.now()) + session.reveal_seconds)
    for entry in await session.chain.requests_after(session.log_start):
        if entry["nullifier"]:
            scenario.sent.setdefault(bytes.fromhex(entry["nullifier"]), []).append(entry["time"])


async def _restarted(session: Session) -> _Scenario:
    """The scenario; raises CheckSkipped if the helper did not restart."""
    scenario = await session.once(_run)
    if scenario.seconds is None:
        raise CheckSkipped("the helper did not restart")
    return scenario


@checks.must("RESTART-001", "the helper is ready again within 180 s", "protocol R9", shares=48, **_NEEDS)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    require(scenario.seconds is not None, shorten(scenario.output or f"not ready after {COMMAND_SECONDS:.0f} s"))
    return f"ready {scenario.seconds:.1f} s after the command was started"


@checks.must("RESTART-002", "a waiting share is still known", _R9, **_NEEDS)
async def _(session: Session) -> str:
    return _require_duplicates("waiting", (await _restarted(session)).waiting)


@checks.must(
    "RESTART-003", "a share accepted during the restart is still known", "protocol §2: a 200 promises", **_ON_CHAIN
)
async def _(session: Session) -> str:
    scenario = await _restarted(session)
    replies = scenario.concurrent
    if not replies:
        posted = describe_many(scenario.posted) or "no response"
        raise CheckSkipped(f"no share was accepted while the command ran: {posted}")
    return _require_duplicates("accepted during the restart", replies)


@checks.must("RESTART-004", "a waiting share is counted once after the restart", _R9, **_ON_CHAIN)
async def _(session: Session) -> str:
    scenario = await _restarted(session)
    counts = [sum(reveal.nullifier == share.nullifier for reveal in scenario.counted) for share in scenario.timed]
    require(counts == [1] * len(counts), f"waiting shares were counted {counts} times")
    return f"{len(counts)} waiting shares counted once"


@checks.must("RESTART-005", "no waiting share is sent before its time", "protocol R4, R9", **_ON_CHAIN)
async def _(session: Session) -> str:
    scenario = await _restarted(session)
    due = scenario.due or 0
    if not any(scenario.sent.get(share.nullifier) for share in scenario.timed):
        raise CheckSkipped("no waiting share was sent")
    early = [
        due - min(times)
        for share in scenario.timed
        if (times := scenario.sent.get(share.nullifier)) and min(times) < due
    ]
    require(not early, f"{len(early)} sent up to {max(early, default=0):.1f} s early")
    return f"{len(scenario.timed)} waiting shares, none early"


@checks.must("RESTART-006", "a revealed share is still confirmed", "protocol-now §12 row 7", **_ON_CHAIN)
async def _(session: Session) -> str:
    reply = (await _restarted(session)).revealed_status
    return require(reply is not None and reply.is_confirmed, f"GET share-status of a revealed share → {reply}")


@checks.must("RESTART-007", "a revealed share is still `duplicate`", "protocol §2: it stays duplicate", **_ON_CHAIN)
async def _(session: Session) -> str:
    reply = (await _restarted(session)).revealed_again
    return require(reply is not None and reply.outcome == "duplicate", f"POST of a revealed share → {reply}")


@checks.must("RESTART-008", "a revealed share is not sent again", "protocol R12", **_ON_CHAIN)
async def _(session: Session) -> str:
    scenario = await _restarted(session)
    assert scenario.revealed is not None
    sent = [time for time in scenario.sent.get(scenario.revealed.nullifier, []) if time > scenario.restarted_at]
    require(not sent, f"a revealed share was sent {len(sent)} times after the restart")
    return "not sent again"


@checks.must("RESTART-009", "a new share is queued after the restart", "protocol R9", **_ON_CHAIN)
async def _(session: Session) -> str:
    reply = (await _restarted(session)).late
    return require(reply is not None and reply.outcome == "queued", f"POST of a new share → {reply}")


def _require_duplicates(what: str, replies: Sequence[Reply]) -> str:
    is_met = bool(replies) and {reply.outcome for reply in replies} == {"duplicate"}
    return require(is_met, f"repeats of shares {what} → {describe_many(replies) or 'none accepted'}")
