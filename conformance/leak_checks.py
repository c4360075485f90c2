"""Checks that the helper's requests reveal nothing to a node of the dev chain before shares are due.

Two kinds: no request contains data of a waiting share (judged at the end, over the whole run), and no arrival causes a
request (requests of a quiet period are compared with those of a period with many arrivals).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import proofs
from conformance.check_failures import CheckSkipped, require
from conformance.checks import CheckList, Phase
from conformance.http_requests import JSON_TYPE, SHARES_PATH, Reply
from conformance.refusals import Reason, refused
from conformance.session import Session
from conformance.shares import TestShare, decode32, encode
from devnet.leak_check import SensitiveValue, find_leaks

_ROW: Final = "protocol §4: the helper's own requests leak"
_MIN_BLOCKS: Final = 8
_MIN_SECONDS: Final = 3.0
"""Minimum length of a period."""
_ARRIVALS_PER_BLOCK: Final = 4
"""Arrivals per block: more than the permitted difference of one request per block."""
_ARRIVALS: Final = _MIN_BLOCKS * _ARRIVALS_PER_BLOCK
_SETTLE_BLOCKS: Final = 2
_LAST_SHARES: Final = 4

checks = CheckList()

Kinds = Counter[tuple[str, str, str]]
"""Number of requests by port, method and route."""


@dataclass(frozen=True, slots=True)
class _Period:
    """Requests of a period, its number of blocks and seconds, and the number of arrivals."""

    kinds: Kinds
    blocks: int
    seconds: float
    arrivals: int

    def expected(self, kind: tuple[str, str, str], other: _Period) -> float:
        """Requests of a kind in another period at the rate of this one: per block or per second, whichever is more."""
        return self.kinds[kind] * max(other.blocks / max(self.blocks, 1), other.seconds / self.seconds)


async def _measure(session: Session, arrive: Callable[[], Awaitable[object]] | None) -> _Period:
    """Count requests over some blocks; `arrive` is called several times per block."""
    chain, clock = session.chain, session.clock
    start = await chain.height()
    started = clock.monotonic()
    before = await _last_entry(session)
    arrivals = 0
    running: list[asyncio.Future[object]] = []
    pause = await session.once(_block_seconds) / _ARRIVALS_PER_BLOCK
    planned = 0 if arrive is None else _ARRIVALS
    while (  # on a busy machine, blocks may come faster than arrivals
        arrivals < planned or await chain.height() < start + _MIN_BLOCKS or clock.monotonic() < started + _MIN_SECONDS
    ):
        if arrive is not None and arrivals < planned:
            arrivals += 1
            running.append(asyncio.ensure_future(arrive()))
        await clock.sleep(pause)
    await asyncio.gather(*running)
    blocks, seconds = await chain.height() - start, clock.monotonic() - started
    entries = await chain.requests_after(before)
    return _Period(
        Counter((entry["port"], entry["method"], entry["route"]) for entry in entries), blocks, seconds, arrivals
    )


async def _last_entry(session: Session) -> int:
    entries = await session.chain.requests_after(session.log_start)
    return int(entries[-1]["seq"]) if entries else session.log_start


async def _block_seconds(session: Session) -> float:
    """Seconds between blocks, measured."""
    start, started = await session.chain.height(), session.clock.monotonic()
    while await session.chain.height() < start + _SETTLE_BLOCKS:
        await session.clock.sleep(0.05)
    return (session.clock.monotonic() - started) / _SETTLE_BLOCKS


async def _measure_quiet(session: Session) -> _Period:
    return await _measure(session, None)


async def _post(session: Session, content: bytes) -> Reply:
    headers = {"Content-Type": JSON_TYPE}
    return await session.client.send("POST", SHARES_PATH, content=content, headers=headers, is_patient=False)


async def _new_share(session: Session) -> None:
    reply = await session.post_share(session.take())
    require(reply.outcome == "queued", f"POST of a new share → {reply}")


async def _duplicate(session: Session) -> None:
    known = await session.once(_known_share)
    reply = await _post(session, encode(known.body(session.time_for(known))))
    require(reply.outcome == "duplicate", f"POST of a known share → {reply}")


async def _known_share(session: Session) -> TestShare:
    share = session.take()
    reply = await session.post_share(share)
    require(reply.is_accepted, f"POST of a new share → {reply}")
    return share


async def _beyond_tree(session: Session) -> None:
    """A share whose position is not in the tree yet, as that of a vote whose block the helper has not read."""
    share = session.template
    position = share.fields["tree_position"] + 100_000 + session.next_number()
    reply = await _post(session, encode(share.body(session.time_for(share), tree_position=position)))
    refused("POST beyond the tree", reply, Reason.CONTENT, Reason.LATER)


async def _unknown_round(session: Session) -> None:
    share = session.invented()
    reply = await _post(session, encode(share.body(session.time_for(share))))
    refused("POST for an unknown round", reply, Reason.ROUND, Reason.CONTENT, Reason.LATER)


async def _invalid(session: Session) -> None:
    share = session.template
    reply = await _post(session, encode(share.body(session.time_for(share), primary_blind="")))
    refused("POST without a blind", reply, Reason.CONTENT)


async def _status_of_waiting(session: Session) -> None:
    reply = await session.share_status(await session.once(_known_share))
    require(reply.is_pending, f"GET share-status of a waiting share → {reply}")


async def _status_of_unknown(session: Session) -> None:
    reply = await session.client.get(session.status_path(session.template.round_id, proofs.random_field()))
    require(reply.is_pending, f"GET share-status of an unknown share → {reply}")


@dataclass(frozen=True, slots=True)
class _NoRequest:
    """Arrivals of one kind, which must cause no request to the node."""

    number: int
    name: str
    arrive: Callable[[Session], Awaitable[None]]
    shares: int = 0

    async def __call__(self, session: Session) -> str:
        quiet = await session.once(_measure_quiet)
        busy = await _measure(session, lambda: self.arrive(session))
        # the number of requests of a kind may differ by one per block, and by a quarter if there are many
        allowed = max(quiet.blocks, busy.blocks) + 2 + max(quiet.kinds.values(), default=0) // 4
        if allowed >= busy.arrivals:
            raise CheckSkipped(f"too many requests without arrivals to compare: {max(quiet.kinds.values())} of a kind")
        more = {kind: round(count - quiet.expected(kind, busy)) for kind, count in busy.kinds.items()}
        caused = {" ".join(kind): count for kind, count in more.items() if count > allowed}
        seen = f"{busy.arrivals} × {self.name} in {busy.blocks} blocks: requests to the node"
        require(not caused, f"{seen} +{caused}")
        return f"{seen} as without ({sum(busy.kinds.values())}, {sum(quiet.kinds.values())} in {quiet.blocks} blocks)"


for _kind in (
    _NoRequest(1, "a new share", _new_share, _ARRIVALS),
    _NoRequest(2, "a repeat", _duplicate, 1),
    _NoRequest(3, "a share beyond the known tree", _beyond_tree),
    _NoRequest(4, "a share of an unknown round", _unknown_round),
    _NoRequest(5, "an invalid share", _invalid),
    _NoRequest(6, "share-status of a waiting share", _status_of_waiting, 1),
    _NoRequest(7, "share-status of an unknown share", _status_of_unknown),
):
    checks.must(
        f"LEAK-{_kind.number:03}",
        f"no request to the node is caused by {_kind.name}",
        _ROW,
        phase=Phase.QUIET,
        shares=_kind.shares,
        needs_shares=True,
        needs_chain=True,
    )(_kind)


@dataclass(frozen=True, slots=True)
class _NoData:
    """Data of shares that no request may contain too early."""

    number: int
    kind: str
    name: str

    async def __call__(self, session: Session) -> str:
        leaks = await session.once(_find_leaks)
        found = leaks[self.kind]
        require(not found, f"{found} requests contain {self.name}")
        return f"no request contains {self.name}"


async def _find_leaks(session: Session) -> Mapping[str, int]:
    """Number of requests that contained data too early, by kind of data. Some more shares arrive before."""
    for share in session.take_many(_LAST_SHARES):
        await session.post_share(share)
        await session.share_status(share)
    await session.clock.sleep(2 * await session.once(_block_seconds))
    values = list(_sensitive_values(session))
    first: dict[tuple[str, str], dict[str, Any]] = {}
    entries = await session.chain.requests_after(session.log_start)
    if not entries:
        raise CheckSkipped("the helper sent no request to the dev chain")
    for entry in entries:
        first.setdefault((entry["path"], entry["body"]), entry)
    leaks = await asyncio.to_thread(find_leaks, list(first.values()), values)
    return Counter(leak.sensitive_value.kind for leak in leaks)


def _sensitive_values(session: Session) -> Iterator[SensitiveValue]:
    due = {posted.share.nullifier: posted.due_at for posted in session.accepted}
    elsewhere = {share.nullifier for share in session.revealed_elsewhere}
    for share in session.all_shares:
        # A share that was never accepted has no due time.
        at = 0.0 if share.nullifier in elsewhere else due.get(share.nullifier, math.inf)
        sealed = share.fields["enc_share"]
        yield SensitiveValue("nullifier", share.nullifier, at)
        yield SensitiveValue("ciphertext", decode32(sealed["c1"]), at)
        yield SensitiveValue("ciphertext", decode32(sealed["c2"]), at)
        yield SensitiveValue("blind", decode32(share.fields["primary_blind"]), math.inf)
    for share in {share.commitment: share for share in session.all_shares}.values():
        yield SensitiveValue("commitment", share.commitment, math.inf)
        yield SensitiveValue("hash", decode32(share.fields["shares_hash"]), math.inf)
        if share.round_id == session.round.round_id:  # positions of other rounds can equal heights
            yield SensitiveValue("position", share.fields["tree_position"], math.inf)
        for comm in share.fields["share_comms"]:
            yield SensitiveValue("hash", decode32(comm), math.inf)
    known = {share.nullifier for share in session.all_shares}
    for nullifier in session.asked_nullifiers:
        if nullifier not in known:
            yield SensitiveValue("nullifier", nullifier, math.inf)


_DATA: Final = (
    _NoData(20, "nullifier", "the nullifier of a share that is not due"),
    _NoData(21, "ciphertext", "the ciphertext of a share that is not due"),
    _NoData(22, "position", "the position of a vote"),
    _NoData(23, "commitment", "a vote commitment"),
    _NoData(24, "hash", "a shares_hash or share commitment"),
    _NoData(25, "blind", "a blind"),
)
_NEEDS: Final[dict[str, Any]] = {"phase": Phase.END, "needs_shares": True, "needs_chain": True}
checks.add_cases("LEAK", "no request contains {}", _DATA, _ROW, shares=_LAST_SHARES, **_NEEDS)
