"""Checks of refusals that depend on the hashes, the chain and the round: each alters a valid share consistently."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import proofs
from conformance.check_failures import CheckSkipped, require
from conformance.checks import CheckList
from conformance.dev_chain import ChainRound
from conformance.http_requests import ATTEMPT_HEADER, Reply
from conformance.refusals import Reason, refused
from conformance.session import Session
from conformance.shares import Body, TestShare, decode32, encode, encode32

_R13: Final = "protocol R13; draft: Server Role 1"
_CHOICE: Final = "protocol-now §3a: proposal and option exist in that round"
_KEY: Final = "protocol §2: everything under a key is bound by hashes"
_ROUND: Final = "protocol §2: round not ACTIVE; protocol-now §0: 409"
_R3: Final = "protocol R3; draft: submit_at ≤ vote_end_time"
_NOTICE_SECONDS: Final = 30.0
"""Time limit for a helper to detect the end of a round, in seconds."""
_LATER: Final = "wallets: any 4xx ends a vote of older ZODL for iOS, a share of zkool; three wallets wait 5 s"
_HOLD_SECONDS: Final = 4.0
"""Time limit for a refusal that may pass, in seconds: wallets wait 5 s with the connection."""

checks = CheckList()

Alter = Callable[[Body, TestShare], None]


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """A well-formed share whose parts do not match, which must be refused. `alter` gets a share of another vote too."""

    number: int
    name: str
    alter: Alter

    async def __call__(self, session: Session) -> str:
        other = session.share_of_other_vote()
        reply = await session.post_altered(lambda share, due: _altered(share, due, self.alter, other))
        return refused(f"POST with {self.name}", reply, Reason.CONTENT)


def _altered(share: TestShare, due: int, alter: Alter, other: TestShare) -> Body:
    body = share.body(due)
    alter(body, other)
    return body


def _alter_element(body: Body, name: str) -> None:
    body[name] = encode32(_other_element(decode32(body[name])))


def _other_element(element: bytes) -> bytes:
    """Another canonical field element."""
    return bytes([element[0] ^ 1, *element[1:]])


def _index_of(body: Body) -> int:
    """The index of a share, which a wallet may leave out if it is 0."""
    return int(body["enc_share"].get("share_index", 0))


def _alter_comm(body: Body, index: int) -> None:
    comms = body["share_comms"]
    comms[index % 16] = encode32(_other_element(decode32(comms[index % 16])))


def _swap_comms(body: Body, _: TestShare) -> None:
    comms = body["share_comms"]
    comms[0], comms[15] = comms[15], comms[0]


def _swap_points(body: Body, _: TestShare) -> None:
    sealed = body["enc_share"]
    sealed["c1"], sealed["c2"] = sealed["c2"], sealed["c1"]


def _negate(name: str) -> Alter:
    def alter(body: Body, _: TestShare) -> None:
        point = decode32(body["enc_share"][name])
        body["enc_share"][name] = encode32(point[:31] + bytes([point[31] ^ 0x80]))

    return alter


def _take_points(body: Body, other: TestShare) -> None:
    body["enc_share"] = {**other.body()["enc_share"], "share_index": _index_of(body)}


def _next_index(body: Body, _: TestShare) -> None:
    body["enc_share"]["share_index"] = body["share_index"] = (_index_of(body) + 1) % 16


def _with_own_hash(body: Body, _: TestShare) -> None:
    """An altered commitment of another share, under a hash that matches: only the leaf differs."""
    _alter_comm(body, _index_of(body) + 1)
    body["shares_hash"] = encode32(proofs.shares_hash(b"".join(map(decode32, body["share_comms"]))))


def _replace(name: str, value: Callable[[Body, TestShare], object]) -> Alter:
    def alter(body: Body, other: TestShare) -> None:
        body[name] = value(body, other)

    return alter


_MISMATCHES: Final = (
    _Mismatch(1, "another shares_hash", lambda body, _: _alter_element(body, "shares_hash")),
    _Mismatch(2, "another primary_blind", lambda body, _: _alter_element(body, "primary_blind")),
    _Mismatch(3, "another commitment of this share", lambda body, _: _alter_comm(body, _index_of(body))),
    _Mismatch(4, "another commitment of another share", lambda body, _: _alter_comm(body, _index_of(body) + 1)),
    _Mismatch(5, "two commitments exchanged", _swap_comms),
    _Mismatch(6, "c1 and c2 exchanged", _swap_points),
    _Mismatch(7, "c1 negated", _negate("c1")),
    _Mismatch(8, "c2 negated", _negate("c2")),
    _Mismatch(9, "the ciphertext of another vote", _take_points),
    _Mismatch(10, "the index of another share", _next_index),
    _Mismatch(11, "a commitment and a hash of its own", _with_own_hash),
    _Mismatch(12, "another option", _replace("vote_decision", lambda body, _: 1 - body["vote_decision"] % 2)),
    _Mismatch(
        13,
        "another proposal",
        _replace("proposal_id", lambda body, _: 3 - body["proposal_id"] if body["proposal_id"] < 3 else 1),
    ),
    _Mismatch(
        14, "the position of another vote", _replace("tree_position", lambda _, other: other.fields["tree_position"])
    ),
    _Mismatch(15, "the position before", _replace("tree_position", lambda body, _: body["tree_position"] - 1)),
    _Mismatch(
        16, "the blind of another share", _replace("primary_blind", lambda _, other: other.fields["primary_blind"])
    ),
    _Mismatch(
        17, "the commitments of another vote", _replace("share_comms", lambda _, other: other.body()["share_comms"])
    ),
)
checks.add_cases("HASH", "refuses a share with {}", _MISMATCHES, _R13, needs_shares=True)


@dataclass(frozen=True, slots=True)
class _Ambiguous:
    """Different content with the key of a stored share. The response is neither `queued` nor `duplicate`."""

    number: int
    name: str
    alter: Alter

    async def __call__(self, session: Session) -> str:
        share = session.take()
        first = await session.post_share(share)
        require(first.is_accepted, f"first POST → {first}")
        body = _altered(share, session.time_for(share), self.alter, session.template)
        reply = await session.client.post(encode(body))
        seen = refused(f"POST → {first.outcome}, then with {self.name}", reply, Reason.CONTENT, Reason.CONFLICT)
        again = await session.post_share(share)
        require(again.outcome == "duplicate", f"{seen}, then unaltered again → {again}")
        return seen


_AMBIGUITIES: Final = (
    _Ambiguous(1, "another blind", lambda body, _: _alter_element(body, "primary_blind")),
    _Ambiguous(2, "another ciphertext", _negate("c2")),
    _Ambiguous(3, "another shares_hash", lambda body, _: _alter_element(body, "shares_hash")),
    _Ambiguous(4, "another option", _replace("vote_decision", lambda body, _: 1 - body["vote_decision"] % 2)),
    _Ambiguous(5, "commitments of its own", _with_own_hash),
    _Ambiguous(6, "c1 and c2 exchanged", _swap_points),
)
checks.add_cases("KEY", "refuses the key of a known share with {}", _AMBIGUITIES, _KEY, shares=1, needs_shares=True)


@checks.must("KEY-007", "a refused share does not block its key", _KEY, shares=1, needs_shares=True)
async def _(session: Session) -> str:
    share = session.take()
    body = share.body(session.time_for(share))
    _alter_element(body, "primary_blind")
    refusal = await session.client.post(encode(body))
    refused("POST with another blind", refusal, Reason.CONTENT)
    reply = await session.post_share(share)
    return require(reply.outcome == "queued", f"POST with another blind → {refusal.status}, then unaltered → {reply}")


@checks.must("ROUND-001", "an unknown round is refused", "protocol §2: unknown round 400", needs_shares=True)
async def _(session: Session) -> str:
    reply = await _post_once(session, session.invented())
    return refused("POST for an unknown round", reply, Reason.ROUND, Reason.CONTENT, Reason.LATER)


@checks.must("ROUND-002", "a share of another round is refused", _R13, needs_chain=True, needs_shares=True)
async def _(session: Session) -> str:
    other = await session.once(_open_other_round)
    reply = await _post_once(session, session.template, vote_round_id=other.round_id.hex())
    return refused("POST for another active round", reply, Reason.CONTENT, Reason.LATER)


@checks.must(
    "ROUND-003", "a position beyond the tree is not queued", "protocol §2: held at most 2 s", needs_shares=True
)
async def _(session: Session) -> str:
    reply = await _post_once(session, session.template, tree_position=(1 << 24) - 1)
    seen = refused("POST with the last position", reply, Reason.CONTENT, Reason.LATER)
    return require(reply.seconds < 10, f"{seen} after {reply.seconds:.1f} s")


@checks.should("ROUND-010", "a share that may pass later gets 503 with a short Retry-After", _LATER, needs_shares=True)
async def _(session: Session) -> str:
    reply = await _post_once(session, session.invented())
    seen = f"POST for an unknown round → {reply} after {reply.seconds:.1f} s"
    return require(
        reply.status == 503 and reply.header("retry-after") in ("1", "2") and reply.seconds < _HOLD_SECONDS, seen
    )


@checks.should("ROUND-011", "with an attempt header, it is asked for again", _LATER, needs_shares=True)
async def _(session: Session) -> str:
    reply = await _post_once(session, session.invented(), {ATTEMPT_HEADER: secrets.token_hex(32)})
    seen = f"POST for an unknown round, with an attempt → {reply}"
    return require(reply.asks_to_repeat and reply.header("retry-after") in ("1", "2"), seen)


async def _post_once(
    session: Session, share: TestShare, headers: Mapping[str, str] | None = None, **changes: object
) -> Reply:
    """Post a share that may be refused temporarily, and do not repeat it."""
    return await session.client.send(
        "POST",
        "/shielded-vote/v1/shares",
        content=encode(share.body(session.time_for(share), **changes)),
        headers={"Content-Type": "application/json", **(headers or {})},
        is_patient=False,
    )


@checks.must(
    "ROUND-004", "a proposal that the round does not have is refused", _CHOICE, needs_chain=True, needs_shares=True
)
async def _(session: Session) -> str:
    return await _post_invalid_choice(session, proposal_id=9, vote_decision=1)


@checks.must(
    "ROUND-005", "an option that the proposal does not have is refused", _CHOICE, needs_chain=True, needs_shares=True
)
async def _(session: Session) -> str:
    return await _post_invalid_choice(session, proposal_id=1, vote_decision=5)


async def _post_invalid_choice(session: Session, *, proposal_id: int, vote_decision: int) -> str:
    """Post a share of a vote that is on the chain, for a choice that does not exist."""
    share = await session.cast_known_vote(proposal_id=proposal_id, vote_decision=vote_decision)
    reply = await session.client.post(encode(share.body(session.time_for(share))))
    return refused(f"POST for proposal {proposal_id}, option {vote_decision}", reply, Reason.CONTENT)


@checks.must("ROUND-006", "a new share of an ended round is refused", _ROUND, needs_chain=True, needs_shares=True)
async def _(session: Session) -> str:
    ended = await session.once(_end_round)
    require(ended.is_refused, f"POST {_NOTICE_SECONDS:.0f} s after the end of the round → {ended.last}")
    return refused("POST after the end", ended.last, Reason.CLOSED, Reason.TIME)


@checks.must(
    "ROUND-007",
    "a known share of an ended round is not queued again",
    "protocol-now §12 row 11",
    needs_chain=True,
    needs_shares=True,
)
async def _(session: Session) -> str:
    reply, seen = await _post_known_after_end(session)
    return seen if reply.outcome == "duplicate" else refused(seen, reply, Reason.CLOSED, Reason.TIME)


@checks.should(
    "ROUND-008",
    "a known share of an ended round is `duplicate`",
    "protocol-now §12 row 11",
    needs_chain=True,
    needs_shares=True,
)
async def _(session: Session) -> str:
    reply, seen = await _post_known_after_end(session)
    return require(reply.outcome == "duplicate", seen)


async def _post_known_after_end(session: Session) -> tuple[Reply, str]:
    ended = await session.once(_end_round)
    reply = await session.client.post(encode(ended.known.body(session.time_for(ended.known))))
    return reply, f"POST of a known share after the end → {reply}"


@checks.must(
    "ROUND-009",
    "a share for option 0 of another proposal is accepted",
    "protocol §2: vote_decision 0..7",
    needs_chain=True,
    needs_shares=True,
)
async def _(session: Session) -> str:
    share = await session.cast_known_vote(proposal_id=2, vote_decision=0)
    reply = await session.post_share(share)
    return require(reply.is_accepted, f"POST for proposal 2, option 0 → {reply}")


@dataclass(frozen=True, slots=True)
class _EndedRound:
    """A round that was ended: a share accepted before, whether new ones are refused, and the last response to one."""

    known: TestShare
    is_refused: bool
    last: Reply


async def _open_other_round(session: Session) -> ChainRound:
    return await session.open_round()


async def _end_round(session: Session) -> _EndedRound:
    """Create a separate round, and end it after the helper has accepted a share of it."""
    chain_round = await session.open_round()
    shares = await session.cast_votes(chain_round, 4)
    known = shares.pop()
    first = await session.post_until_accepted(known)
    require(first.is_accepted, f"POST of a valid share of a second round → {first}")
    await session.end_round(chain_round.round_id)
    last: Reply | None = None

    async def is_refused() -> bool:
        nonlocal last
        if not shares:
            return False
        share = shares.pop()
        last = await session.client.post(encode(share.body(session.time_for(share))))
        return not last.is_accepted and last.status != 503

    is_over = await session.wait_for(is_refused, _NOTICE_SECONDS)
    assert last is not None
    return _EndedRound(known, is_over, last)


@dataclass(frozen=True, slots=True)
class _LateTime:
    """A `submit_at` after the end of the round, which must be refused."""

    number: int
    name: str
    seconds_after_end: int

    async def __call__(self, session: Session) -> str:
        time = session.end + self.seconds_after_end
        reply = await session.post_refusable(lambda share, _: share.body(time))
        return refused(f"POST with submit_at {self.name}", reply, Reason.TIME)


_LATE_TIMES: Final = (_LateTime(1, "1 s after the end", 1), _LateTime(2, "a year after the end", 31_536_000))
checks.add_cases("TIME", "refuses submit_at {}", _LATE_TIMES, _R3, needs_shares=True)


@checks.must("TIME-003", "submit_at in milliseconds is refused", _R3, needs_shares=True)
async def _(session: Session) -> str:
    time = int(session.clock.now() * 1000)
    reply = await session.post_refusable(lambda share, _: share.body(time))
    return refused("POST with submit_at in milliseconds", reply, Reason.TIME)


@checks.must(
    "TIME-004",
    "submit_at equal to the end gets a definite response",
    "protocol-now §12 row 10",
    shares=1,
    needs_shares=True,
)
async def _(session: Session) -> str:
    share, end = _take_free(session), session.end
    reply = await session.post_share(share, end)
    seen = "POST with submit_at = end"
    return f"{seen} → {reply}" if reply.is_accepted else refused(seen, reply, Reason.TIME)


@checks.must(
    "TIME-005", "submit_at 1 s before the end is accepted", "protocol-now §12 row 10", shares=1, needs_shares=True
)
async def _(session: Session) -> str:
    share, end = _take_free(session), session.end
    reply = await session.post_share(share, end - 1)
    return require(reply.is_accepted, f"POST with submit_at = end - 1 → {reply}")


@checks.must(
    "TIME-006",
    "a late share that is known stays `duplicate`",
    "protocol R10: for any submit_at",
    shares=1,
    needs_shares=True,
)
async def _(session: Session) -> str:
    share, end = session.take(), session.end
    first = await session.post_share(share)
    again = await session.client.post(encode(share.body(end + 60)))
    # The original helper checks the time first.
    require(first.is_accepted, f"POST → {first}")
    seen = f"POST → {first.outcome}, again with a late submit_at"
    return f"{seen} → {again}" if again.outcome == "duplicate" else refused(seen, again, Reason.TIME)


def _take_free(session: Session) -> TestShare:
    """A share whose time the check may choose."""
    share = session.take()
    if share.submit_at is not None:
        raise CheckSkipped("would change the time of a real share")
    return share
