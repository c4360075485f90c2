"""Checks of HTTP/1.1: connections, pipelining, chunks, 100-continue, and requests with more than one interpretation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from conformance.check_failures import CheckFailed, require
from conformance.checks import CheckList, Level
from conformance.http_requests import JSON_TYPE, PREFIX, RawConnection, Reply, encode_chunks, open_raw
from conformance.refusals import Reason, refused
from conformance.session import Session
from conformance.shares import TestShare, encode
from conformance.status_checks import STATUS_PATH

_HTTP: Final = "RFC 9112"
_QUIET_SECONDS: Final = 2.0
"""Seconds without a byte after which no further response is expected."""

checks = CheckList()


def _body_of(session: Session, share: TestShare) -> bytes:
    return encode(share.body(session.time_for(share)))


def _record(session: Session, share: TestShare, reply: Reply) -> None:
    if reply.is_accepted:
        session.record_accepted(share, session.time_for(share), session.clock.now())


@checks.must("CONN-001", "Connection: close gets a response and a close", f"{_HTTP} §9.6", shares=1, needs_shares=True)
async def _(session: Session) -> str:
    share = session.take()
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(connection.share_request(_body_of(session, share), [("Connection", "close")]))
        reply = await connection.response()
        _record(session, share, reply)
        is_closed = await connection.is_closed()
    return require(reply.is_accepted and is_closed, f"POST with Connection: close → {reply}, closed: {is_closed}")


@checks.must("CONN-002", "several shares on one connection", f"{_HTTP} §9.3", shares=4, needs_shares=True)
async def _(session: Session) -> str:
    outcomes: list[str] = []
    async with open_raw(session.client.address, session.client.token) as connection:
        for share in session.take_many(4):
            await connection.send(connection.share_request(_body_of(session, share)))
            reply = await connection.response()
            _record(session, share, reply)
            outcomes.append(reply.outcome)
            if reply.header("connection").lower() == "close":
                break
    return require(set(outcomes) == {"queued"}, f"{len(outcomes)} shares on one connection → {', '.join(outcomes)}")


@checks.must("CONN-003", "a refusal does not break the connection's next request", f"{_HTTP} §9.3")
async def _(session: Session) -> str:
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(connection.share_request(b"{}"))
        first = await connection.response()
        seen = refused("POST {}", first, Reason.CONTENT)
        if first.header("connection").lower() == "close":
            return f"{seen} with Connection: close"
        await connection.send(connection.head(method="GET", path=STATUS_PATH))
        second = await connection.response()
    return require(second.status == 200, f"{seen}, then GET status → {second}")


@checks.should("CONN-004", "pipelined requests get responses in order", f"{_HTTP} §9.3.2")
async def _(session: Session) -> str:
    async with open_raw(session.client.address, session.client.token) as connection:
        malformed = connection.head(method="GET", path=f"{PREFIX}/share-status/00/00")
        await connection.send(connection.head(method="GET", path=STATUS_PATH) + malformed)
        statuses = [(await connection.response()).status for _ in range(2)]
    return require(statuses == [200, 400], f"GET status and GET share-status/00/00 in one write → {statuses}")


@checks.should("CONN-005", "pipelined shares are both stored", f"{_HTTP} §9.3.2", shares=2, needs_shares=True)
async def _(session: Session) -> str:
    shares = session.take_many(2)
    outcomes: list[str] = []
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(b"".join(connection.share_request(_body_of(session, share)) for share in shares))
        for share in shares:
            reply = await connection.response()
            _record(session, share, reply)
            outcomes.append(reply.outcome)
    return require(outcomes == ["queued"] * 2, f"2 shares in one write → {', '.join(outcomes)}")


@dataclass(frozen=True, slots=True)
class _Framing:
    """A variant of HTTP/1.1 framing for the same share, which must be accepted."""

    number: int
    name: str
    make: Callable[[RawConnection, bytes], bytes]
    level: Level = "must"
    source: str = _HTTP

    async def __call__(self, session: Session) -> str:
        share = session.take()
        async with open_raw(session.client.address, session.client.token) as connection:
            await connection.send(self.make(connection, _body_of(session, share)))
            reply = await connection.response()
        _record(session, share, reply)
        return require(reply.outcome == "queued", f"POST {self.name} → {reply}")


def _chunked_head(connection: RawConnection, *more: tuple[str, str]) -> bytes:
    return connection.head([("Content-Type", JSON_TYPE), ("Transfer-Encoding", "chunked"), *more])


def _with_extensions(connection: RawConnection, content: bytes) -> bytes:
    middle = len(content) // 2
    parts = (content[:middle], content[middle:])
    chunks = b"".join(b"%X;note=1\r\n%s\r\n" % (len(part), part) for part in parts)
    return _chunked_head(connection, ("Trailer", "X-Note")) + chunks + b"0\r\nX-Note: 1\r\n\r\n"


def _lower_case(connection: RawConnection, content: bytes) -> bytes:
    return (
        connection.head([("content-type", JSON_TYPE), ("content-length", str(len(content))), ("accept", "*/*")])
        + content
    )


_FRAMINGS: Final = (
    _Framing(
        10,
        "in one chunk",
        lambda c, content: _chunked_head(c) + encode_chunks(content, len(content)),
        source=f"{_HTTP} §7.1",
    ),
    _Framing(
        11,
        "in chunks of 512 bytes",
        lambda c, content: _chunked_head(c) + encode_chunks(content, 512),
        source=f"{_HTTP} §7.1",
    ),
    _Framing(12, "with chunk extensions and a trailer", _with_extensions, "should", f"{_HTTP} §7.1.1"),
    _Framing(13, "with lower-case header names", _lower_case, source="RFC 9110 §5.1"),
    _Framing(
        14,
        "as HTTP/1.0",
        lambda c, content: (
            c.head([("Content-Type", JSON_TYPE), ("Content-Length", str(len(content)))], version="1.0") + content
        ),
        "should",
        f"{_HTTP} §2.3",
    ),
    _Framing(
        15, "after an empty line", lambda c, content: b"\r\n" + c.share_request(content), "should", f"{_HTTP} §2.2"
    ),
)
checks.add_cases("CONN", "accepts a share {}", _FRAMINGS, shares=1, needs_shares=True)


@checks.must("CONN-020", "Expect: 100-continue does not hang", "RFC 9110 §10.1.1", shares=1, needs_shares=True)
async def _(session: Session) -> str:
    share = session.take()
    content = _body_of(session, share)
    async with open_raw(session.client.address, session.client.token) as connection:
        request = connection.share_request(content, [("Expect", "100-continue")])
        await connection.send(request[: -len(content)])
        # A client sends its body after a while even without a 100 response.
        interim = await connection.interim_status(_QUIET_SECONDS)
        if interim is not None and interim >= 200:
            raise CheckFailed(f"POST with Expect: 100-continue → {interim} before the body")
        await connection.send(content)
        reply = await connection.response()
    _record(session, share, reply)
    return require(reply.outcome == "queued", f"POST with Expect: 100-continue → {interim}, then {reply}")


@checks.should("CONN-021", "Expect: 100-continue gets 100", "RFC 9110 §10.1.1")
async def _(session: Session) -> str:
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(connection.share_request(b"", [("Expect", "100-continue")], length=2))
        interim = await connection.interim_status(_QUIET_SECONDS)
    return require(interim == 100, f"POST with Expect: 100-continue → {interim}")


@checks.should("CONN-022", "a half-closed connection gets its response", f"{_HTTP} §9.6", shares=1, needs_shares=True)
async def _(session: Session) -> str:
    share = session.take()
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(connection.share_request(_body_of(session, share)))
        connection.close_sending()
        reply = await connection.response()
    _record(session, share, reply)
    return require(reply.is_accepted, f"POST, then the sending side closed → {reply}")


@checks.must(
    "CONN-023",
    "a disconnect after the request loses nothing",
    "protocol-now §11: resets after a complete request",
    shares=1,
    needs_shares=True,
)
async def _(session: Session) -> str:
    share = session.take()
    content = _body_of(session, share)
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(connection.share_request(content))
    reply = await session.post_share(share, body=content)
    return require(reply.is_accepted, f"POST and a disconnect, then the same again → {reply}")


@dataclass(frozen=True, slots=True)
class _Smuggled:
    """A request with a second one hidden in it, which must get no response."""

    number: int
    name: str
    make: Callable[[RawConnection, bytes], bytes]
    level: Level = "must"

    async def __call__(self, session: Session) -> str:
        async with open_raw(session.client.address, session.client.token) as connection:
            hidden = connection.head(method="GET", path=STATUS_PATH)
            await connection.send(self.make(connection, hidden))
            replies = await connection.responses(_QUIET_SECONDS)
        statuses = [reply.status for reply in replies]
        seen = f"{self.name} → {statuses or 'no response'}"
        return require(200 not in statuses and len(statuses) <= 1, seen)


def _post_head(connection: RawConnection, *headers: tuple[str, str]) -> bytes:
    return connection.head([("Content-Type", JSON_TYPE), *headers])


def _both_lengths(connection: RawConnection, hidden: bytes) -> bytes:
    """`Content-Length` covers the hidden request, `Transfer-Encoding` ends before it."""
    body = b"0\r\n\r\n" + hidden
    return _post_head(connection, ("Content-Length", str(len(body))), ("Transfer-Encoding", "chunked")) + body


def _two_lengths(connection: RawConnection, hidden: bytes) -> bytes:
    body = b"{}" + hidden
    return _post_head(connection, ("Content-Length", "2"), ("Content-Length", str(len(body)))) + body


def _odd_encoding(value: str) -> Callable[[RawConnection, bytes], bytes]:
    def make(connection: RawConnection, hidden: bytes) -> bytes:
        body = b"0\r\n\r\n" + hidden
        return _post_head(connection, ("Content-Length", str(len(body))), ("Transfer-Encoding", value)) + body

    return make


def _raw_header(line: bytes, body_start: bytes = b"0\r\n\r\n") -> Callable[[RawConnection, bytes], bytes]:
    def make(connection: RawConnection, hidden: bytes) -> bytes:
        return _post_head(connection)[:-2] + line + b"\r\n\r\n" + body_start + hidden

    return make


_SMUGGLED: Final = (
    # Go's net/http, the server of the original, ignores Content-Length and keeps the connection.
    _Smuggled(1, "Content-Length and Transfer-Encoding", _both_lengths, "should"),
    _Smuggled(2, "two different Content-Lengths", _two_lengths),
    _Smuggled(3, "Transfer-Encoding: xchunked", _odd_encoding("xchunked")),
    _Smuggled(4, "Transfer-Encoding: chunked, identity", _odd_encoding("chunked, identity")),
    _Smuggled(5, "a space before the colon of Transfer-Encoding", _raw_header(b"Transfer-Encoding : chunked")),
    _Smuggled(6, "a Content-Length with a plus sign", _raw_header(b"Content-Length: +2", b"{}")),
    _Smuggled(7, "a negative Content-Length", _raw_header(b"Content-Length: -1", b"")),
    _Smuggled(8, "a Content-Length in hex", _raw_header(b"Content-Length: 0x2", b"{}")),
    _Smuggled(9, "a list of two Content-Lengths", _raw_header(b"Content-Length: 2, 3", b"{}")),
    _Smuggled(
        10,
        "a chunk size that overflows 64 bits",
        _raw_header(b"Transfer-Encoding: chunked", b"10000000000000002\r\n{}\r\n0\r\n\r\n"),
    ),
    _Smuggled(11, "a chunk size with 0x", _raw_header(b"Transfer-Encoding: chunked", b"0x2\r\n{}\r\n0\r\n\r\n")),
    _Smuggled(12, "a NUL in a header", _raw_header(b"X-Note: a\0b\r\nContent-Length: 2", b"{}")),
)
checks.add_cases("SMUGGLE", "gets one response at most: {}", _SMUGGLED, f"{_HTTP} §6.3, §11.2")


@checks.should("SMUGGLE-020", "a request without Host is refused", f"{_HTTP} §3.2")
async def _(session: Session) -> str:
    async with open_raw(session.client.address, session.client.token) as connection:
        path = f"{session.client.address.path}{STATUS_PATH}"
        await connection.send(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        return await _require_refused("GET without Host", connection)


@checks.must("SMUGGLE-021", "data that is not HTTP is refused or the connection closed", f"{_HTTP} §2.2")
async def _(session: Session) -> str:
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n")
        return await _require_refused("a TLS ClientHello", connection)


async def _require_refused(sent: str, connection: RawConnection) -> str:
    """Require a 4xx, or that the connection is closed."""
    statuses = [reply.status for reply in await connection.responses(_QUIET_SECONDS)]
    if not statuses:
        is_closed = await connection.is_closed(_QUIET_SECONDS)
        return require(is_closed, f"{sent} → no response, closed: {is_closed}")
    return require(all(400 <= status < 500 for status in statuses), f"{sent} → {statuses}")
