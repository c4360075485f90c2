"""Checks of bodies that are not shares: broken JSON, other encodings, sizes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from conformance.check_failures import require
from conformance.checks import CheckList, Level
from conformance.http_requests import (
    SHARES_PATH,
    ConnectionEnded,
    Headers,
    RawConnection,
    Reply,
    encode_chunks,
    open_raw,
)
from conformance.refusals import Reason, refused
from conformance.session import Session
from conformance.shares import TestShare, encode
from conformance.status_checks import STATUS_PATH

_BODY: Final = "protocol §2: parse 400"
_RFC_JSON: Final = "RFC 8259"
_LIMIT: Final = "protocol §2: body at most 1 MiB"
_MAX_BYTES: Final = 1 << 20

checks = CheckList()

Make = Callable[[TestShare, int], bytes]


@dataclass(frozen=True, slots=True)
class _Body:
    """A body that must be refused; if `can_be_accepted`, any definite response is right."""

    number: int
    name: str
    make: Make
    source: str = _BODY
    level: Level = "must"
    headers: Headers = ()
    reason: Reason = Reason.CONTENT
    can_be_accepted: bool = False

    async def __call__(self, session: Session) -> str:
        if self.needs_shares:
            reply = await session.post_refusable(self.make, self.headers)
        else:
            reply = await session.client.post(self.make(session.invented(), 0), self.headers)
        sent = f"POST ({self.name})"
        return f"{sent} → {reply}" if self.can_be_accepted and reply.is_accepted else refused(sent, reply, self.reason)

    @property
    def needs_shares(self) -> bool:
        """Whether the body contains a share that a lenient helper would accept."""
        return self.number >= 20


def _fixed(content: bytes) -> Make:
    return lambda _share, _time: content


def _share_json(share: TestShare, time: int) -> bytes:
    return encode(share.body(time))


def _with_duplicate(share: TestShare, time: int) -> bytes:
    """The proposal twice: another one first, which a reader of the first one would use."""
    return _share_json(share, time).replace(b"{", b'{"proposal_id":2,', 1)


def _with_duplicate_last(share: TestShare, time: int) -> bytes:
    return _share_json(share, time)[:-1] + b',"proposal_id":2}'


def _with_member(text: bytes) -> Make:
    return lambda share, time: _share_json(share, time)[:-1] + b"," + text + b"}"


def _with_bad_utf8_in(name: bytes) -> Make:
    return lambda share, time: _share_json(share, time)[:-1] + b',"' + name + b'":"\xff\xfe"}'


_BODIES: Final = (
    _Body(1, "empty", _fixed(b"")),
    _Body(2, "text", _fixed(b"share")),
    _Body(3, "an array", _fixed(b"[]")),
    _Body(4, "a string", _fixed(b'"share"')),
    _Body(5, "a number", _fixed(b"1")),
    _Body(6, "null", _fixed(b"null")),
    _Body(7, "true", _fixed(b"true")),
    _Body(8, "an empty object", _fixed(b"{}")),
    _Body(9, "spaces only", _fixed(b"  \r\n ")),
    _Body(
        10,
        "a form",
        _fixed(b"vote_round_id=1&proposal_id=1"),
        headers={"Content-Type": "application/x-www-form-urlencoded"},
        reason=Reason.CODING,
    ),
    _Body(11, "random bytes", _fixed(bytes(range(256)))),
    _Body(12, "10,000 nested arrays", _fixed(b"[" * 10_000 + b"]" * 10_000)),
    _Body(13, "100,000 nested objects", _fixed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)),
    _Body(20, "an incomplete object", lambda share, time: _share_json(share, time)[:-1]),
    _Body(21, "half a share", lambda share, time: _share_json(share, time)[: len(_share_json(share, time)) // 2]),
    _Body(
        22,
        "text after the object",
        lambda share, time: _share_json(share, time) + b" x",
        source="protocol-now §3a: nothing after it",
    ),
    _Body(
        23, "two objects", lambda share, time: _share_json(share, time) * 2, source="protocol-now §3a: one JSON object"
    ),
    _Body(24, "the share in an array", lambda share, time: b"[" + _share_json(share, time) + b"]"),
    _Body(25, "the share as a string", lambda share, time: json.dumps(_share_json(share, time).decode()).encode()),
    _Body(26, "a trailing comma", lambda share, time: _share_json(share, time)[:-1] + b",}", source=_RFC_JSON),
    _Body(27, "single quotes", lambda share, time: _share_json(share, time).replace(b'"', b"'"), source=_RFC_JSON),
    _Body(
        28,
        "names without quotes",
        lambda share, time: _share_json(share, time).replace(b'"submit_at"', b"submit_at"),
        source=_RFC_JSON,
    ),
    _Body(29, "a comment", lambda share, time: b"/* share */" + _share_json(share, time), source=_RFC_JSON),
    _Body(30, "NaN in an unknown field", _with_member(b'"x":NaN'), source=_RFC_JSON),
    _Body(31, "a control character in an unknown field", _with_member(b'"x":"\x01"'), source=_RFC_JSON),
    _Body(32, "UTF-16", lambda share, time: _share_json(share, time).decode().encode("utf-16"), source=_RFC_JSON),
    _Body(
        33,
        "UTF-16 with charset",
        lambda share, time: _share_json(share, time).decode().encode("utf-16-le"),
        _RFC_JSON,
        headers={"Content-Type": "application/json; charset=utf-16le"},
        reason=Reason.CODING,
    ),
    _Body(
        34,
        "gzip",
        lambda share, time: gzip.compress(_share_json(share, time)),
        headers={"Content-Encoding": "gzip"},
        reason=Reason.CODING,
    ),
    _Body(
        35,
        "a zero before a number",
        lambda share, time: _share_json(share, time).replace(b'"proposal_id":', b'"proposal_id":0'),
        source=_RFC_JSON,
    ),
    _Body(
        36,
        "the proposal twice, another one last",
        _with_duplicate_last,
        source="RFC 8259 §4: names should be unique",
        level="should",
    ),
    _Body(
        37,
        "1 MiB + 1",
        lambda share, time: _share_json(share, time).ljust(_MAX_BYTES + 1),
        _LIMIT,
        reason=Reason.SIZE,
    ),
    _Body(
        38,
        "1 MiB + 1 in an unknown field",
        lambda share, time: encode(share.body(time, x="p" * _MAX_BYTES)),
        _LIMIT,
        reason=Reason.SIZE,
    ),
)


def _tolerated(number: int, name: str, make: Make, source: str = _RFC_JSON) -> _Body:
    return _Body(number, name, make, source, can_be_accepted=True)


_TOLERATED: Final = (
    _tolerated(
        50, "a byte order mark", lambda share, time: b"\xef\xbb\xbf" + _share_json(share, time), "RFC 8259 §8.1"
    ),
    _tolerated(51, "the proposal twice, the right one last", _with_duplicate, "RFC 8259 §4: names should be unique"),
    _tolerated(52, "bytes that are not UTF-8 in an unknown field", _with_bad_utf8_in(b"x_note")),
    _tolerated(53, "half a surrogate pair in an unknown field", _with_member(b'"x_note":"\\ud800"')),
    _tolerated(54, "a number of 400 digits in an unknown field", _with_member(b'"x_note":' + b"9" * 400)),
    _tolerated(55, "1e999 in an unknown field", _with_member(b'"x_note":1e999')),
    _tolerated(56, "a NUL character in an unknown field", _with_member(b'"x_note":"\\u0000"')),
    _tolerated(57, "1,000 nested arrays in an unknown field", _with_member(b'"x_note":' + b"[" * 1000 + b"]" * 1000)),
    _tolerated(58, "5,000 unknown fields", _with_member(b",".join(b'"x%d":%d' % (n, n) for n in range(5000)))),
)
for _body in (*_BODIES, *_TOLERATED):
    checks.add(
        _body.level,
        f"JSON-{_body.number:03}",
        f"{'gets a definite response' if _body.can_be_accepted else 'refuses'}: {_body.name}",
        _body.source,
        shares=1 if _body.can_be_accepted else 0,
        needs_shares=_body.needs_shares,
    )(_body)


@checks.must("SIZE-001", "chunks of more than 1 MiB are refused", _LIMIT)
async def _(session: Session) -> str:
    content = b" " * (2 * _MAX_BYTES)
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(
            connection.head([("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")])
            + encode_chunks(content, 16 << 10)
        )
        return _too_large("POST of 2 MiB in chunks", await _read_response(connection))


async def _read_response(connection: RawConnection) -> Reply | None:
    """The response; None if the helper closed the connection before reading everything, which can lose it."""
    try:
        return await connection.response()
    except ConnectionEnded:
        return None


def _too_large(sent: str, reply: Reply | None) -> str:
    return f"{sent} → closed" if reply is None else refused(sent, reply, Reason.SIZE)


@checks.should("SIZE-002", "Content-Length 1 GiB is refused before the body is sent", _LIMIT)
async def _(session: Session) -> str:
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(connection.share_request(b"{}", length=1 << 30))
        return _too_large("POST with Content-Length 1 GiB", await _read_response(connection))


@checks.must("SIZE-003", "headers of 256 KiB are refused or ignored", "RFC 6585 §5")
async def _(session: Session) -> str:
    return await _post_large_head(session, [("X-Padding", "p" * (256 << 10))], SHARES_PATH)


@checks.must("SIZE-004", "5,000 headers are refused or ignored", "RFC 6585 §5")
async def _(session: Session) -> str:
    return await _post_large_head(session, [(f"X-{number}", "1") for number in range(5000)], SHARES_PATH)


@checks.must("SIZE-005", "a path of 100 KiB causes no server error", "RFC 9110 §15.5.15")
async def _(session: Session) -> str:
    return await _post_large_head(session, [], f"{STATUS_PATH}/{'p' * (100 << 10)}")


@checks.must("SIZE-006", "8 MiB are refused, whether read or not", _LIMIT, needs_shares=True)
async def _(session: Session) -> str:
    share = session.refusable()
    content = _share_json(share, session.time_for(share)).ljust(8 * _MAX_BYTES)
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(connection.share_request(content))
        reply = await _read_response(connection)
    return _too_large("POST of 8 MiB", reply and session.settle(share, reply))


@checks.must("SIZE-007", "the helper still responds after these requests", "protocol-now §12 row 6")
async def _(session: Session) -> str:
    reply = await session.client.get(STATUS_PATH)
    return require(reply.status == 200, f"GET status → {reply}")


async def _post_large_head(session: Session, headers: list[tuple[str, str]], path: str) -> str:
    """A head that is too large is refused or ignored, but causes no 5xx. The share in it is never valid."""
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(connection.head([*headers, ("Content-Length", "2")], path=path) + b"{}")
        try:
            reply: Reply | None = await connection.response()
        except ConnectionEnded:
            reply = None
    return require(reply is None or reply.status < 500, f"POST with a large head → {reply or 'closed'}")
