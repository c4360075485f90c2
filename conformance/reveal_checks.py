"""Checks of reveals on a dev chain: when shares are revealed, how often, and what `share-status` reports.

One scenario posts shares with different times and waits for their reveals. The checks evaluate it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from conformance.check_failures import CheckSkipped, require
from conformance.checks import CheckList, Phase
from conformance.dev_chain import Reveal
from conformance.http_requests import Reply
from conformance.refusals import Reason, refused
from conformance.session import Session
from conformance.shares import TestShare, decode32, encode

PROMPT_SECONDS: Final = 10.0
"""Seconds after its time within which a share should be counted."""
_CONFIRM_SECONDS: Final = 30.0
"""Seconds after its block within which `share-status` must be confirmed. Wallets poll every 15 to 30 s."""
_LEAD_SECONDS: Final = 6
"""Seconds until the first shares are due, enough to post all of them."""
_LEAD_POSTS: Final = 60
"""The same for a slow helper, in durations of a post."""
_MAX_LEAD_SECONDS: Final = 60
_REPEATED: Final = "repeated with 0"
_REPEATED_LATER: Final = "repeated with a later time"
_REPEATED_LATER_SECONDS: Final = 5
"""Seconds by which the repeated share is due later than the others."""
_GRACE_SECONDS: Final = 5.0
"""Seconds that a helper may need to notice that a share was counted."""
_IN_FLIGHT_SECONDS: Final = 1.0
"""Seconds that a reveal may need to reach the node."""
_POLL_SECONDS: Final = 0.25
_MANY: Final = 16

checks = CheckList()

_NEEDS: Final[dict[str, Any]] = {"phase": Phase.REVEAL, "needs_chain": True, "needs_shares": True}


@dataclass(slots=True)
class _Timed:
    """A share of the scenario.

    Attributes:
        share: the share.
        kind: why it is in the scenario.
        due: Unix second from which it must be revealed.
        earliest: Unix second from which it may be revealed.
        response: response to its first POST.
        counted: its reveals that counted.
        sent: times at which the node got a reveal of it, Unix seconds.
        again: response to a repeat after its reveal.
        status: last response of `share-status`.
        confirmed_at: Unix seconds of this response.
    """

    share: TestShare
    kind: str
    due: float
    earliest: float
    response: Reply
    counted: list[Reveal] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    again: Reply | None = None
    status: Reply | None = None
    confirmed_at: float = 0.0

    @property
    def delay(self) -> float | None:
        """Seconds from its time to its block."""
        return self.counted[0].time - self.due if self.counted else None

    @property
    def known_at(self) -> float:
        """Unix seconds after which the helper must know that it is counted: it has said so, and has had time."""
        return max(self.counted[0].time + _GRACE_SECONDS / 2, self.confirmed_at + _IN_FLIGHT_SECONDS)


@dataclass(frozen=True, slots=True)
class _Scenario:
    """What happened to the shares of the scenario.

    Attributes:
        shares: shares that became due.
        too_early: shares that were confirmed before the chain had counted them.
        before_due: outcomes of `share-status` of a share before it was due.
        others: reveals of shares that were never posted unaltered.
    """

    shares: Sequence[_Timed]
    too_early: Sequence[str]
    before_due: Sequence[str]
    others: Sequence[Reveal]

    def of_kind(self, *kinds: str) -> list[_Timed]:
        """The shares of some kinds."""
        return [timed for timed in self.shares if timed.kind in kinds]


async def _run(session: Session) -> _Scenario:
    """Post the shares, and wait until all are counted, confirmed and not sent again."""
    timed = await _post_all(session)
    too_early, before_due = await _watch(session, timed)
    await _wait_until_confirmed(session, timed)
    for each in timed:
        each.again = await session.client.post(encode(each.share.body(0)))
    await session.clock.sleep(_GRACE_SECONDS)
    await _add_broadcasts(session, timed)
    posted = {posted.share.nullifier for posted in session.accepted}
    reveals = await session.chain.reveals(session.round.round_id)
    unposted = {share.nullifier for share in session.all_shares} - posted
    others = [
        reveal for reveal in reveals if reveal.nullifier in unposted and reveal.nullifier not in _elsewhere(session)
    ]
    return _Scenario(timed, too_early, before_due, others)


async def _post_all(session: Session) -> list[_Timed]:
    timed: list[_Timed] = []

    async def post(kind: str, due: int | None, *, is_given: bool = True, share: TestShare | None = None) -> TestShare:
        share, posted_at = share or session.take(), session.clock.now()
        body = share.body(due) if is_given else share.body()
        response = await session.post_share(share, due or 0, body=body)
        due_at = max(due or 0, posted_at)
        timed.append(_Timed(share, kind, due_at, posted_at if kind == _REPEATED else due_at, response))
        return share

    option_0 = await session.cast_known_vote(proposal_id=2, vote_decision=0)
    first = int(session.clock.now()) + await _lead_seconds(session)
    for _ in range(2):
        await post("timed", first)
    moved_back = await post(_REPEATED, first + _REPEATED_LATER_SECONDS)
    moved_on = await post(_REPEATED_LATER, first)
    for _ in range(_MANY):
        await post("same second", first + 1)
    session.record_accepted(moved_back, 0, session.clock.now())
    await session.client.post(encode(moved_back.body(0)))
    await session.client.post(encode(moved_on.body(first + 1200)))
    for _ in range(2):
        await post("zero", 0)
    await post("absent", None, is_given=False)
    await post("past", int(session.clock.now()) - 3600)
    await post("one", 1)
    await post("option 0 of another proposal", 0, share=option_0)
    return timed


async def _lead_seconds(session: Session) -> int:
    """Seconds in which the shares of the scenario can be posted before they are due: measured with another one."""
    started = session.clock.monotonic()
    await session.post_share(session.take())
    duration = session.clock.monotonic() - started
    return min(max(_LEAD_SECONDS, int(_LEAD_POSTS * duration)), _MAX_LEAD_SECONDS)


async def _watch(session: Session, timed: Sequence[_Timed]) -> tuple[list[str], list[str]]:
    """Follow the chain until every share is counted or overdue. Polls the status of one share."""
    too_early: list[str] = []
    before_due: list[str] = []
    watched = [each for each in timed if each.kind == "timed"][1:]
    ends_at = max(each.due for each in timed) + session.reveal_seconds
    while session.clock.now() < ends_at:
        for each in watched:
            asked_at = session.clock.now()
            reply = await session.share_status(each.share)
            counted = {reveal.nullifier for reveal in await session.chain.reveals(session.round.round_id)}
            if reply.is_confirmed and each.share.nullifier not in counted:
                too_early.append(f"{each.kind}: confirmed {asked_at - each.due:+.1f} s from its time")
            if asked_at < each.due:
                before_due.append(reply.outcome)
        await _add_counted(session, timed)
        if all(each.counted for each in timed if each.response.is_accepted):
            break
        await session.clock.sleep(_POLL_SECONDS)
    return too_early, before_due


async def _add_counted(session: Session, timed: Sequence[_Timed]) -> None:
    reveals: Mapping[bytes, list[Reveal]] = defaultdict(list)
    for reveal in await session.chain.reveals(session.round.round_id):
        reveals[reveal.nullifier].append(reveal)
    for each in timed:
        each.counted = reveals[each.share.nullifier]


async def _wait_until_confirmed(session: Session, timed: Sequence[_Timed]) -> None:
    waiting = [each for each in timed if each.counted]

    async def are_confirmed() -> bool:
        for each in waiting:
            if each.status is None or not each.status.is_confirmed:
                each.status = await session.share_status(each.share)
                each.confirmed_at = session.clock.now()
        return all(each.status is not None and each.status.is_confirmed for each in waiting)

    await session.wait_for(are_confirmed, _CONFIRM_SECONDS)


async def _add_broadcasts(session: Session, timed: Sequence[_Timed]) -> None:
    """Add the times at which the node got reveals of these shares."""
    by_nullifier = {each.share.nullifier.hex(): each for each in timed}
    for entry in await session.chain.requests_after(session.log_start):
        each = by_nullifier.get(entry["nullifier"] or "")
        if each is not None:
            each.sent.append(entry["time"])


def _elsewhere(session: Session) -> set[bytes]:
    return {share.nullifier for share in session.revealed_elsewhere}


def _name(timed: Sequence[_Timed]) -> str:
    return ", ".join(sorted({each.kind for each in timed})) or "none"


async def _require_counted(session: Session, *kinds: str) -> str:
    """Require that all shares of some kinds are counted once within the limit."""
    scenario = await session.once(_run)
    chosen = scenario.of_kind(*kinds)
    wrong = [each for each in chosen if len(each.counted) != 1 or (each.delay or 0) > session.reveal_seconds]
    delays = [each.delay for each in chosen if each.delay is not None]
    slowest = f"{max(delays):.1f} s" if delays else "never"
    require(
        not wrong,
        f"{len(wrong)} of {len(chosen)} shares not counted once within {session.reveal_seconds:.0f} s: {_name(wrong)}",
    )
    return f"{len(chosen)} shares counted once, the last {slowest} after its time"


@checks.must(
    "CHAIN-001",
    "every share is counted exactly once, in time",
    "protocol R1; draft: Server Role 6",
    shares=26,
    **_NEEDS,
)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    return await _require_counted(session, *{each.kind for each in scenario.shares})


@checks.must("CHAIN-002", "no share is sent before its submit_at", "protocol R4", **_NEEDS)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    sent = [each for each in scenario.shares if each.sent]
    early = [(each.earliest - min(each.sent), each) for each in sent if min(each.sent) < each.earliest]
    earliest = max([by for by, _ in early], default=0)
    require(not early, f"{len(early)} sent up to {earliest:.1f} s early: {_name([each for _, each in early])}")
    if not sent:
        raise CheckSkipped("no share was sent")
    first = min(min(each.sent) - each.earliest for each in sent)
    return f"the earliest was sent {first:.2f} s after its time"


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A kind of share that must be counted in time."""

    number: int
    name: str
    source: str
    kind: str

    async def __call__(self, session: Session) -> str:
        return await _require_counted(session, self.kind)


_PROMPT: Final = (
    _Prompt(3, "submit_at 0 is revealed at once", "protocol R2", "zero"),
    _Prompt(4, "a missing submit_at is revealed at once", "protocol R2", "absent"),
    _Prompt(5, "a submit_at in the past is revealed at once", "protocol R2", "past"),
    _Prompt(6, "submit_at 1 is revealed at once", "protocol-now §12 row 10", "one"),
    _Prompt(
        7,
        "a repeat with submit_at 0 does not delay",
        "protocol R10: the stored time, or the earlier one",
        _REPEATED,
    ),
    _Prompt(8, "a repeat with a later time does not delay", "protocol R10: the stored time is kept", _REPEATED_LATER),
)
checks.add_cases("CHAIN", "{}", _PROMPT, **_NEEDS)


@checks.should("CHAIN-009", "every share is counted within 10 s", "protocol R6: no delay", **_NEEDS)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    delays = [each.delay for each in scenario.shares if each.delay is not None]
    require(
        len(delays) == len(scenario.shares) and max(delays) < PROMPT_SECONDS, f"slowest: {max(delays, default=0):.1f} s"
    )
    return f"slowest: {max(delays):.1f} s after its time"


@checks.must("CHAIN-010", "a waiting share is pending", "protocol-now §12 row 7", **_NEEDS)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    outcomes = set(scenario.before_due)
    if not outcomes:
        raise CheckSkipped("the shares were due before all of them were posted")
    require(outcomes == {"pending"}, f"share-status before its time: {', '.join(sorted(outcomes))}")
    return f"{len(scenario.before_due)} × pending"


@checks.must(
    "CHAIN-011", "no share is confirmed before the chain counted it", "protocol §6.2; protocol-now §12 row 7", **_NEEDS
)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    require(not scenario.too_early, "; ".join(scenario.too_early[:3]))
    if not any(each.status is not None and each.status.is_confirmed for each in scenario.shares):
        raise CheckSkipped("no share was confirmed")
    return "confirmed only after its block"


@checks.must("CHAIN-012", "a counted share is confirmed within 30 s", "protocol-now §12 row 7", **_NEEDS)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    counted = [each for each in scenario.shares if each.counted]
    late = [each for each in counted if each.status is None or not each.status.is_confirmed]
    require(
        counted and not late,
        f"{len(late)} of {len(counted)} not confirmed: {late[0].status if late else 'none counted'}",
    )
    return f"{len(counted)} shares confirmed"


@checks.must("CHAIN-013", "a revealed share is still `duplicate`", "protocol §2: it stays duplicate", **_NEEDS)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    counted = [each for each in scenario.shares if each.counted]
    wrong = [each.again for each in counted if each.again is None or each.again.outcome != "duplicate"]
    require(counted and not wrong, f"{len(wrong)} of {len(counted)}: {wrong[0] if wrong else 'none counted'}")
    return f"{len(counted)} repeats → duplicate"


@checks.must(
    "CHAIN-014", "a counted share is not sent again", "protocol R12; draft: Duplicate Share Handling", **_NEEDS
)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    counted = [each for each in scenario.shares if each.counted]
    again = [each for each in counted if max(each.sent, default=0.0) > each.known_at]
    latest = max((max(each.sent) - each.counted[0].time for each in again), default=0)
    require(not again, f"{len(again)} sent up to {latest:.1f} s after their block")
    if not counted:
        raise CheckSkipped("no share was counted")
    return "no reveal after the share's block"


@checks.must("CHAIN-015", "a reveal has the ciphertext and choice of its share", "protocol §4: reveal-share", **_NEEDS)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    counted = [each for each in scenario.shares if each.counted]
    wrong = [each for each in counted if not _has_content(each.counted[0], each.share)]
    require(counted and not wrong, f"{len(wrong)} of {len(counted)} reveals differ from their share")
    return f"{len(counted)} reveals"


def _has_content(reveal: Reveal, share: TestShare) -> bool:
    sealed = share.fields["enc_share"]
    enc_share = decode32(sealed["c1"]) + decode32(sealed["c2"])
    choice = (share.fields["proposal_id"], share.fields["vote_decision"])
    return reveal.enc_share == enc_share and (reveal.proposal_id, reveal.vote_decision) == choice


@checks.must("CHAIN-016", "no refused or unposted share is revealed", "protocol §2: refusals", **_NEEDS)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    require(not scenario.others, f"{len(scenario.others)} reveals of shares that were not accepted")
    return "no reveal of another share"


@checks.should(
    "CHAIN-017",
    "shares of one second are not sent in the order of arrival",
    "protocol-now §12 row 26; draft: Temporal Mixing",
    **_NEEDS,
)
async def _(session: Session) -> str:
    scenario = await session.once(_run)
    posted = [each for each in scenario.of_kind("same second") if each.sent]
    if len(posted) < _MANY:
        raise CheckSkipped(f"only {len(posted)} of {_MANY} shares of one second were sent")
    order = sorted(range(_MANY), key=lambda number: min(posted[number].sent))
    require(order != list(range(_MANY)), f"{_MANY} shares of one second: sent in the order of arrival")
    return f"{_MANY} shares of one second: sent as {', '.join(str(number + 1) for number in order)}"


@checks.must(
    "CHAIN-018", "a share that another helper revealed is confirmed", "protocol-now §12 row 7", shares=1, **_NEEDS
)
async def _(session: Session) -> str:
    share = await session.once(_reveal_elsewhere)
    reply: Reply | None = None

    async def is_confirmed() -> bool:
        nonlocal reply
        reply = await session.share_status(share)
        return reply.is_confirmed

    is_met = await session.wait_for(is_confirmed, _CONFIRM_SECONDS)
    require(is_met, f"revealed by another helper, share-status after {_CONFIRM_SECONDS:.0f} s → {reply}")
    return f"revealed by another helper → {reply}"


@checks.must(
    "CHAIN-019",
    "a share revealed elsewhere is not revealed again",
    "protocol R12; draft: Duplicate Share Handling",
    **_NEEDS,
)
async def _(session: Session) -> str:
    share = await session.once(_reveal_elsewhere)

    async def is_confirmed() -> bool:
        return (await session.share_status(share)).is_confirmed

    require(await session.wait_for(is_confirmed, _CONFIRM_SECONDS), "revealed by another helper: not confirmed")
    reply = await session.client.post(encode(share.body(0)))
    await session.clock.sleep(_GRACE_SECONDS)
    entries = await session.chain.requests_after(session.log_start)
    sent = [entry for entry in entries if entry["nullifier"] == share.nullifier.hex()]
    seen = f"revealed by another helper, then POST → {reply}, sent {len(sent)} times"
    # The draft lets a server refuse it; wallets have its confirmation already.
    require(not sent, seen)
    return seen if reply.is_accepted else refused(seen, reply, Reason.CONFLICT)


async def _reveal_elsewhere(session: Session) -> TestShare:
    """Add a reveal to the chain whose share the helper under test does not have."""
    share = session.take()
    sealed = share.fields["enc_share"]
    session.revealed_elsewhere.append(share)
    await session.chain.reveal_elsewhere(
        {
            "round_id": share.round_id.hex(),
            "nullifier": share.nullifier.hex(),
            "enc_share": (decode32(sealed["c1"]) + decode32(sealed["c2"])).hex(),
            "proposal_id": share.fields["proposal_id"],
            "vote_decision": share.fields["vote_decision"],
        }
    )
    return share
