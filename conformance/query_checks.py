"""Checks of `share-status`, `queue-status` and `queue-summary`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import proofs
from conformance.check_failures import CheckSkipped, require
from conformance.checks import CheckList
from conformance.http_requests import JSON_TYPE, PREFIX, Reply
from conformance.refusals import Reason, refused
from conformance.session import Session, describe_many
from conformance.status_checks import ORIGIN, require_any_origin

_STATUS: Final = "protocol-now §12 row 7"
_SUMMARY: Final = "protocol-now §3: queue-summary"
_LIBRARY_SECONDS: Final = 5.0
"""Seconds that wallet library 5.3.0 waits for share-status."""
_HOUR: Final = 3600
_DAY: Final = 24 * _HOUR
_COUNTS: Final = ("submitted", "pending_future", "overdue_pending", "processing", "failed")

checks = CheckList()


def _require_pending(sent: str, reply: Reply) -> str:
    return require(reply.is_pending, f"{sent} → {reply}")


async def _query_unknown(session: Session) -> Reply:
    share = session.invented()
    return await session.client.get(session.status_path(share.round_id, share.nullifier))


@checks.must("SHARE-001", "an unknown share is pending", "protocol §2: unknown is 200 pending")
async def _(session: Session) -> str:
    return _require_pending("GET share-status of an unknown share", await _query_unknown(session))


@checks.must(
    "SHARE-002",
    "an unknown share of a known round is pending",
    "protocol §2: unknown is 200 pending",
    needs_shares=True,
)
async def _(session: Session) -> str:
    reply = await session.client.get(session.status_path(session.template.round_id, proofs.random_field()))
    return _require_pending("GET share-status of an unknown share", reply)


@checks.must("SHARE-003", "a waiting share is pending", _STATUS, shares=1, needs_shares=True)
async def _(session: Session) -> str:
    share = session.take()
    first = await session.post_share(share)
    require(first.is_accepted, f"POST → {first}")
    reply = await session.share_status(share)
    if share.submit_at is not None and reply.is_confirmed:
        return f"GET share-status → {reply}"
    return _require_pending("POST, then GET share-status", reply)


@checks.must("SHARE-004", "share-status is application/json", "wallet 5.3.0: share-status")
async def _(session: Session) -> str:
    reply = await _query_unknown(session)
    return require(reply.media_type == JSON_TYPE, f"GET share-status → {reply}")


@checks.must("SHARE-005", "share-status responds within 5 s", "wallet 5.3.0: share-status, 5 s")
async def _(session: Session) -> str:
    reply = await _query_unknown(session)
    return require(reply.seconds < _LIBRARY_SECONDS, f"GET share-status → {reply.status} after {reply.seconds:.2f} s")


@checks.must("SHARE-006", "64 queries at once get responses within 5 s", "wallet 5.3.0: 4 in flight a share")
async def _(session: Session) -> str:
    replies = await asyncio.gather(*(_query_unknown(session) for _ in range(64)))
    slowest = max(reply.seconds for reply in replies)
    is_met = all(reply.is_pending for reply in replies) and slowest < _LIBRARY_SECONDS
    return require(is_met, f"64 × GET share-status: slowest {slowest:.2f} s, {describe_many(replies)}")


@dataclass(frozen=True, slots=True)
class _Malformed:
    """A malformed parameter of share-status, which must be refused."""

    number: int
    name: str
    round_text: str
    nullifier_text: str

    async def __call__(self, session: Session) -> str:
        reply = await session.client.get(f"{PREFIX}/share-status/{self.round_text}/{self.nullifier_text}")
        return refused(f"GET share-status with {self.name}", reply, Reason.CONTENT)


_ID: Final = "12" * 32
_MALFORMED: Final = (
    _Malformed(10, "a nullifier of 63 characters", _ID, _ID[:63]),
    _Malformed(11, "a nullifier of 66 characters", _ID, _ID + "12"),
    _Malformed(12, "a nullifier that is not hex", _ID, "zz" * 32),
    _Malformed(13, "a nullifier with 0x", _ID, "0x" + _ID[:62]),
    _Malformed(14, "a round id of 62 characters", _ID[:62], _ID),
    _Malformed(15, "a round id that is not hex", "zz" * 32, _ID),
    _Malformed(16, "a round id of one character", "1", _ID),
    _Malformed(17, "a nullifier in base64", _ID, "EhISEhISEhISEhISEhISEhISEhISEhISEhISEhISEhI="),
)
checks.add_cases("SHARE", "refuses {}", _MALFORMED, "protocol §2: malformed 400")


@checks.should("SHARE-018", "upper-case hex is accepted", "protocol-now §3a: upper-case hex accepted")
async def _(session: Session) -> str:
    reply = await session.client.get(f"{PREFIX}/share-status/{'AB' * 32}/{'CD' * 32}")
    return require(reply.is_pending, f"GET share-status in upper case → {reply}")


@checks.should("SHARE-019", "an unknown share is not 200", "wallets: zkool takes every 200 for confirmed")
async def _(session: Session) -> str:
    reply = await _query_unknown(session)
    return require(reply.status != 200, f"GET share-status of an unknown share → {reply}")


@checks.should("QUEUE-001", "queue-status is counts by round, or 404", "protocol §2: queue-status")
async def _(session: Session) -> str:
    reply = await session.client.get(f"{PREFIX}/queue-status")
    return require(_is_object(reply) or reply.status == 404, f"GET queue-status → {reply}")


def _is_object(reply: Reply) -> bool:
    """Whether the optional route is served. Other servers respond 404 or with a page of their web application."""
    return reply.status == 200 and isinstance(reply.json(), dict)


async def _get_counts(session: Session) -> dict[str, Any]:
    """The counts of the round of the shares."""
    reply = await session.client.get(f"{PREFIX}/queue-status")
    if not _is_object(reply):
        raise CheckSkipped(f"queue-status is not served: {reply}")
    counts = reply.json().get(session.template.round_id.hex(), {})
    return counts if isinstance(counts, dict) else {}


@checks.must(
    "QUEUE-002", "queue-status has total, pending, submitted, failed", "protocol §2: queue-status", needs_shares=True
)
async def _(session: Session) -> str:
    counts = await _get_counts(session)
    names = ("total", "pending", "submitted", "failed")
    return require(all(type(counts.get(name)) is int for name in names), f"queue-status of the round: {counts}")


@checks.should(
    "QUEUE-003", "pending is the sum of ready, not_yet_due and processing", "protocol-now §12 row 13", needs_shares=True
)
async def _(session: Session) -> str:
    counts = await _get_counts(session)
    parts = [counts.get(name) for name in ("ready", "not_yet_due", "processing")]
    is_sum = all(type(part) is int for part in parts) and sum(p for p in parts if p) == counts.get("pending")
    return require(is_sum, f"queue-status of the round: {counts}")


@checks.must("QUEUE-004", "an accepted share is counted", "protocol §2: queue-status", shares=1, needs_shares=True)
async def _(session: Session) -> str:
    before = await _get_counts(session)
    first = await session.post_share(session.take())
    after = await _get_counts(session)
    require(first.outcome == "queued", f"POST → {first}")
    grown = after.get("total", 0) - before.get("total", 0)
    return require(grown >= 1, f"queue-status before {before}, after a POST {after}")


@checks.must("QUEUE-005", "queue-status without the token is 401", "protocol §2: queue-status", needs_token=True)
async def _(session: Session) -> str:
    path = f"{PREFIX}/queue-status"
    served = await session.client.get(path)
    if not _is_object(served):
        raise CheckSkipped(f"queue-status is not served: {served}")
    reply = await session.client.get(path, token="")
    return require(reply.status == 401, f"GET queue-status without token → {reply}")


async def _get_summary(session: Session) -> tuple[Reply, dict[str, Any]]:
    path = f"{PREFIX}/queue-summary/{session.template.round_id.hex()}"
    reply = await session.client.get(path, {"Origin": ORIGIN})
    if not _is_object(reply):
        raise CheckSkipped(f"queue-summary is not served: {reply}")
    return reply, reply.json()


@checks.should("SUMMARY-001", "queue-summary is served without token", "protocol-now §12 row 12", needs_shares=True)
async def _(session: Session) -> str:
    reply = await session.client.get(f"{PREFIX}/queue-summary/{session.template.round_id.hex()}", token="")
    return require(_is_object(reply), f"GET queue-summary → {reply}")


@checks.must(
    "SUMMARY-002", "queue-summary allows every origin", "protocol-now §3: requested by the browser", needs_shares=True
)
async def _(session: Session) -> str:
    reply, _ = await _get_summary(session)
    return require_any_origin("GET queue-summary", reply)


@checks.must("SUMMARY-003", "queue-summary has the documented numbers", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    _, value = await _get_summary(session)
    names = ("bucket_seconds", "created_at_time", "vote_end_time", "generated_at", "last_minute_start")
    wrong = [name for name in names if type(value.get(name)) is not int]
    require(not wrong, f"missing or not an integer: {', '.join(wrong)}")
    return "all integers"


@checks.should("SUMMARY-004", "queue-summary has ready, not_yet_due, processing", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    _, value = await _get_summary(session)
    wrong = [name for name in ("ready", "not_yet_due", "processing") if type(value.get(name)) is not int]
    require(not wrong, f"missing or not an integer: {', '.join(wrong)}")
    return "all integers"


@checks.must("SUMMARY-005", "the response has the requested round id", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    _, value = await _get_summary(session)
    return require(value.get("round_id") == session.template.round_id.hex(), f"round_id {value.get('round_id')}")


@checks.must("SUMMARY-006", "every total is the sum of its counts", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    _, value = await _get_summary(session)
    buckets = value.get("buckets") or []
    wrong = [bucket for bucket in buckets if sum(bucket.get(name, 0) for name in _COUNTS) != bucket.get("total")]
    require(not wrong, f"{len(wrong)} of {len(buckets)} buckets: {wrong[:1]}")
    return f"{len(buckets)} buckets"


@checks.must("SUMMARY-007", "buckets are contiguous and end with the round", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    _, value = await _get_summary(session)
    buckets = value.get("buckets") or []
    require(buckets, "no buckets")
    gaps = [b for a, b in pairwise(buckets) if a["end"] != b["start"]]
    end = buckets[-1]["end"]
    require(not gaps and end == value["vote_end_time"], f"{len(gaps)} gaps, end {end} of {value['vote_end_time']}")
    return f"{len(buckets)} buckets to {end}"


@checks.should("SUMMARY-008", "the width of buckets follows the round's length", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    _, value = await _get_summary(session)
    duration = value["vote_end_time"] - value["created_at_time"]
    widths = ((21 * _DAY, 6 * _HOUR), (7 * _DAY, 3 * _HOUR), (_DAY, _HOUR), (_HOUR, 900))
    width = next((width for minimum, width in widths if duration >= minimum), 60)
    require(value["bucket_seconds"] == width, f"round of {duration} s: buckets of {value['bucket_seconds']} s")
    return f"round of {duration} s: buckets of {width} s"


@checks.should("SUMMARY-009", "last_minute_start is that of the wallets", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    _, value = await _get_summary(session)
    end, start = value["vote_end_time"], value["last_minute_start"]
    expected = end - min((end - value["created_at_time"]) * 2 / 5, 6 * _HOUR)
    require(abs(start - expected) <= 1, f"last_minute_start {start}, expected {expected:.0f}")
    return f"last_minute_start {end - start} s before the end"


@checks.must("SUMMARY-010", "generated_at is recent", "protocol-now §3: stale", needs_shares=True)
async def _(session: Session) -> str:
    _, value = await _get_summary(session)
    age = session.clock.now() - value["generated_at"]
    # The queue monitor's limit. The clocks may differ.
    limit = max(300, 2 * value["bucket_seconds"])
    return require(abs(age) <= limit, f"generated {age:.0f} s ago")


@checks.should("SUMMARY-011", "an unknown round is 404", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    await _get_summary(session)
    reply = await session.client.get(f"{PREFIX}/queue-summary/{proofs.random_field().hex()}")
    return require(reply.status == 404, f"GET queue-summary of an unknown round → {reply}")


@checks.must("SUMMARY-012", "a malformed round is 400 or 404", _SUMMARY, needs_shares=True)
async def _(session: Session) -> str:
    await _get_summary(session)
    reply = await session.client.get(f"{PREFIX}/queue-summary/zz")
    return require(reply.status in (400, 404), f"GET queue-summary/zz → {reply}")
