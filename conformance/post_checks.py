"""Checks of posts that a helper must accept: wallets' bodies, other JSON of the same share, headers, repeats."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Final

from conformance.check_failures import require
from conformance.checks import CheckList, Level
from conformance.http_requests import (
    ATTEMPT_HEADER,
    JSON_TYPE,
    MAX_REPLY_BYTES,
    TOKEN_HEADER,
    Headers,
    Reply,
)
from conformance.refusals import Reason, refused
from conformance.session import MakeBody, Session, describe_many
from conformance.shares import Body, TestShare, encode
from conformance.status_checks import ORIGIN, require_any_origin

_LIBRARY: Final = "wallet 5.3.0: a share's JSON"
_RESPONSE: Final = "wallet 5.3.0: responses to POST shares"
_UNKNOWN_FIELDS: Final = "protocol §2: unknown fields are ignored"
_RFC_JSON: Final = "RFC 8259"
_R10: Final = "protocol R10"
_TOKEN: Final = "0123456789abcdef" * 4
VIZOR_SECONDS: Final = 5.0
"""Seconds that the Vizor wallet waits for the response to a share."""

checks = CheckList()


@dataclass(frozen=True, slots=True)
class _Variant:
    """A variant of a valid post, which must be accepted."""

    number: int
    name: str
    source: str
    make: MakeBody
    headers: Headers = ()
    level: Level = "must"

    async def __call__(self, session: Session) -> str:
        share = session.take()
        due = session.time_for(share)
        reply = await session.post_share(share, due, body=self.make(share, due), headers=self.headers)
        seen = f"POST ({self.name}) → {reply}"
        return require(reply.status == 200 and reply.outcome == "queued", seen)


def _library(share: TestShare, due: int) -> Body:
    return share.body(due)


def _vizor(share: TestShare, due: int) -> Body:
    body = _without_top_index(share, due)
    if share.all_enc_shares is not None:
        body["all_enc_shares"] = list(share.all_enc_shares)
    return body


def _without_top_index(share: TestShare, due: int) -> Body:
    body = share.body(due)
    body.pop("share_index", None)
    return body


def _with_other_top_index(share: TestShare, due: int) -> Body:
    return share.body(due, share_index=(share.index + 1) % 16)


def _with_unknown_fields(share: TestShare, due: int) -> Body:
    return share.body(due, x_note="text", x_list=[1, [2, {}]], x_object={"primary_blind": 1}, x_null=None)


def _with_unknown_inner_field(share: TestShare, due: int) -> Body:
    body = share.body(due)
    body["enc_share"]["x_note"] = "text"
    return body


def _reversed(share: TestShare, due: int) -> Body:
    return dict(reversed(share.body(due).items()))


def _indented(share: TestShare, due: int) -> bytes:
    return json.dumps(share.body(due), indent=2).encode() + b"\r\n"


def _with_escaped_slashes(share: TestShare, due: int) -> bytes:
    return encode(share.body(due)).replace(b"/", b"\\/")


def _with_escaped_name(share: TestShare, due: int) -> bytes:
    return encode(share.body(due)).replace(b'"primary_blind"', b'"\\u0070rimary_blind"')


def _with_other_letters(share: TestShare, due: int) -> bytes:
    return json.dumps(share.body(due, x_note="Zürich 投票 🗳"), ensure_ascii=False).encode()


def _with_upper_case_round(share: TestShare, due: int) -> Body:
    return share.body(due, vote_round_id=share.fields["vote_round_id"].upper())


def _padded(size: int) -> MakeBody:
    def make(share: TestShare, due: int) -> bytes:
        bare = encode(share.body(due, x_padding=""))
        return encode(share.body(due, x_padding="p" * (size - len(bare))))

    return make


_VARIANTS: Final = (
    _Variant(1, "body of wallet library 5.3.0", _LIBRARY, _library),
    _Variant(2, "body of the Vizor wallet, with all_enc_shares", "protocol §2: all_enc_shares", _vizor),
    _Variant(3, "without the share_index at the top", "protocol §2: POST shares", _without_top_index),
    _Variant(4, "another share_index at the top", _UNKNOWN_FIELDS, _with_other_top_index, level="should"),
    _Variant(5, "unknown fields of every type", _UNKNOWN_FIELDS, _with_unknown_fields),
    _Variant(6, "an unknown field in enc_share", _UNKNOWN_FIELDS, _with_unknown_inner_field),
    _Variant(7, "fields in another order", _RFC_JSON, _reversed),
    _Variant(8, "indented JSON with line breaks", _RFC_JSON, _indented),
    _Variant(9, "escaped slashes in base64", _RFC_JSON, _with_escaped_slashes),
    _Variant(10, "an escaped letter in a name", _RFC_JSON, _with_escaped_name, level="should"),
    _Variant(11, "letters of other scripts in an unknown field", _RFC_JSON, _with_other_letters),
    _Variant(12, "round id in upper case", "protocol §2: vote_round_id is hex", _with_upper_case_round, level="should"),
    _Variant(
        13, "Content-Type with charset", "RFC 9110 §8.3", _library, {"Content-Type": "application/json; charset=utf-8"}
    ),
    _Variant(
        14, "Content-Type in other case", "RFC 9110 §8.3", _library, {"Content-Type": "Application/JSON;Charset=UTF-8"}
    ),
    _Variant(
        15,
        "User-Agent, Accept and Accept-Encoding",
        _LIBRARY,
        _library,
        {"User-Agent": "wallet/5.3.0", "Accept": "*/*", "Accept-Encoding": "gzip, br"},
    ),
    _Variant(16, "with Origin, as from a browser", "protocol §2: CORS", _library, {"Origin": ORIGIN}),
    _Variant(
        17, "with one attempt token", "protocol-now §2: X-Vote-Ingress-Attempt-V1", _library, {ATTEMPT_HEADER: _TOKEN}
    ),
    _Variant(
        18, "with an invalid attempt token", "protocol-now §2: token invalid", _library, {ATTEMPT_HEADER: "token"}
    ),
    _Variant(
        19,
        "with two attempt tokens",
        "protocol-now §2: token twice",
        _library,
        [(ATTEMPT_HEADER, _TOKEN), (ATTEMPT_HEADER, _TOKEN)],
    ),
    _Variant(
        20,
        "with forwarding headers of a client",
        "protocol-now §12 row 29",
        _library,
        {"X-Forwarded-For": "203.0.113.9, 198.51.100.7", "Forwarded": "for=203.0.113.9"},
    ),
    _Variant(21, "64 KiB with an unknown field", "protocol §2: body at most 1 MiB", _padded(64 << 10)),
    _Variant(
        22, "exactly 1 MiB with an unknown field", "protocol §2: body at most 1 MiB", _padded(1 << 20), level="should"
    ),
)
checks.add_cases("POST", "accepts: {}", _VARIANTS, shares=1, needs_shares=True)


@checks.must(
    "POST-023",
    "accepts: share 0 without enc_share.share_index",
    "protocol §2: absent for 0",
    shares=1,
    needs_shares=True,
)
async def _(session: Session) -> str:
    share = session.take(index=0)
    body = share.body(session.time_for(share))
    body.pop("share_index", None)
    body["enc_share"].pop("share_index", None)
    reply = await session.post_share(share, body=body)
    return require(reply.outcome == "queued", f"POST of share 0 without share_index → {reply}")


async def _post_one(session: Session) -> Reply:
    return await session.post_share(session.take())


@checks.must("POST-030", "the response is application/json", _RESPONSE, shares=1, needs_shares=True)
async def _(session: Session) -> str:
    reply = await _post_one(session)
    return require(reply.status == 200 and reply.media_type == JSON_TYPE, f"POST → {reply}")


@checks.must("POST-031", "the response has CORS headers", "protocol §2: CORS", shares=1, needs_shares=True)
async def _(session: Session) -> str:
    reply = await session.post_share(session.take(), headers={"Origin": ORIGIN})
    require(reply.is_accepted, f"POST → {reply}")
    return require_any_origin(f"POST → {reply.status}", reply)


@checks.must(
    "POST-032", "the response takes at most 5 s", "protocol §2: Vizor, 5 s per POST", shares=1, needs_shares=True
)
async def _(session: Session) -> str:
    reply = await _post_one(session)
    return require(
        reply.is_accepted and reply.seconds < VIZOR_SECONDS, f"POST → {reply.status} after {reply.seconds:.2f} s"
    )


@checks.must("POST-033", "the response is at most 256 KiB", _RESPONSE, shares=1, needs_shares=True)
async def _(session: Session) -> str:
    reply = await _post_one(session)
    return require(
        reply.is_accepted and len(reply.body) <= MAX_REPLY_BYTES, f"POST → {reply.status}, {len(reply.body)} bytes"
    )


@checks.should("POST-034", "the response may not be cached", "RFC 9111 §4.4", shares=1, needs_shares=True)
async def _(session: Session) -> str:
    reply = await _post_one(session)
    control = reply.header("cache-control").lower()
    require(reply.is_accepted and "max-age" not in control and "public" not in control, f"Cache-Control: {control}")
    return f"POST → {reply.status}, Cache-Control {control or 'missing'}"


@dataclass(frozen=True, slots=True)
class _Repeat:
    """Another post of an accepted share, which must be `duplicate`."""

    number: int
    name: str
    make: MakeBody
    level: Level = "must"

    async def __call__(self, session: Session) -> str:
        share = session.take()
        due = session.time_for(share)
        first = await session.post_share(share, due)
        require(first.outcome == "queued", f"first POST → {first}")
        body, posted_at = self.make(share, due), session.clock.now()
        again = await session.client.post(body if isinstance(body, bytes) else encode(body))
        seen = f"POST → {first.outcome}, again ({self.name}) → {again}"
        require(again.status == 200 and again.outcome == "duplicate", seen)
        session.record_accepted(share, body.get("submit_at", 0) if isinstance(body, dict) else due, posted_at)
        return seen


_REPEATS: Final = (
    _Repeat(1, "the same bytes", _library),
    _Repeat(2, "submit_at 0", lambda share, _: share.body(0)),
    _Repeat(3, "without submit_at", lambda share, _: share.body()),
    _Repeat(4, "an earlier submit_at", lambda share, due: share.body(max(due - 600, 1))),
    _Repeat(5, "a later submit_at", lambda share, due: share.body(due + 1)),
    _Repeat(6, "fields in another order", _reversed),
    _Repeat(7, "with unknown fields", _with_unknown_fields),
    _Repeat(8, "indented", _indented),
    _Repeat(9, "as another wallet sends it", _vizor),
)
checks.add_cases("DUP", "a repeat is `duplicate`: {}", _REPEATS, _R10, shares=1, needs_shares=True)


@checks.must("DUP-010", "of 10 posts at once, one is queued", _R10, shares=1, needs_shares=True)
async def _(session: Session) -> str:
    share = session.take()
    due = session.time_for(share)
    replies = await asyncio.gather(*(session.post_share(share, due) for _ in range(10)))
    outcomes = sorted(reply.outcome for reply in replies)
    return require(outcomes == ["duplicate"] * 9 + ["queued"], f"10 posts at once → {describe_many(replies)}")


@checks.must("DUP-011", "10 repeats change nothing", _R10, shares=1, needs_shares=True)
async def _(session: Session) -> str:
    share = session.take()
    first = await session.post_share(share)
    replies = [await session.post_share(share) for _ in range(10)]
    require(first.outcome == "queued" and {reply.outcome for reply in replies} == {"duplicate"}, describe_many(replies))
    return f"POST → {first.outcome}, then {describe_many(replies)}"


@checks.must("TOKEN-001", "a share without the token is 401", "protocol §2: X-Helper-Token", needs_token=True)
async def _(session: Session) -> str:
    return await _post_with_token(session, "")


@checks.must("TOKEN-002", "a share with another token is 401", "protocol §2: X-Helper-Token", needs_token=True)
async def _(session: Session) -> str:
    return await _post_with_token(session, "not-" + session.client.token)


@checks.must("TOKEN-003", "a beginning of the token is 401", "protocol §2: X-Helper-Token", needs_token=True)
async def _(session: Session) -> str:
    return await _post_with_token(session, session.client.token[:-1])


@checks.must("TOKEN-004", "share-status without the token is 401", "protocol §2: share-status", needs_token=True)
async def _(session: Session) -> str:
    share = session.invented()
    reply = await session.client.get(session.status_path(share.round_id, share.nullifier), token="")
    return refused("GET share-status without token", reply, Reason.TOKEN)


@checks.must("TOKEN-005", "the token is not in a refusal", "protocol §6.9: secrets in logs", needs_token=True)
async def _(session: Session) -> str:
    reply = await session.client.post(b"{}", token="not-" + session.client.token)
    require(session.client.token.encode() not in reply.body, f"POST with another token → {reply.status} with the token")
    return refused("without the token: POST with another one", reply, Reason.TOKEN)


@checks.must("TOKEN-006", "a token with more characters gets 401", "protocol §2: X-Helper-Token", needs_token=True)
async def _(session: Session) -> str:
    return await _post_with_token(session, session.client.token + "0")


async def _post_with_token(session: Session, token: str) -> str:
    headers = {TOKEN_HEADER: token} if token else {}
    reply = await session.client.post(encode(session.invented().body()), headers, token="")
    return refused("POST", reply, Reason.TOKEN)
