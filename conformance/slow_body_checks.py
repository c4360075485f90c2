"""Checks of bodies that arrive slowly or not at all, and of the receipt of their attempt. They run concurrently."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from conformance.check_failures import CheckFailed, CheckSkipped, require
from conformance.checks import CheckList, Level, Phase
from conformance.http_requests import ATTEMPT_HEADER, JSON_TYPE, ConnectionEnded, RawConnection, Reply, open_raw
from conformance.refusals import Reason, refused
from conformance.session import Session
from conformance.shares import TestShare, encode

_RECEIPT: Final = "protocol-now §2: the 408 receipt"
_ROW_3: Final = "protocol-now §12 row 3"
_ROW_4: Final = "protocol-now §12 row 4"
PATIENCE_SECONDS: Final = 75.0
"""Longest wait for the end of a slow body. The original waits 30 s by default."""
_LATE_SECONDS: Final = 2.0
"""Seconds in which a faulty helper would store a share after its receipt."""
_TRICKLE_SECONDS: Final = 25.0
"""Duration of a slow body that must be accepted: below the 30 s that a body may take."""
_TRICKLE_PIECES: Final = 50

checks = CheckList()


def _new_token() -> str:
    return secrets.token_hex(32)


_CODE: Final = "request_body_timeout"
_MEMBERS: Final = ("dispatch", "attempt")
"""Members of a receipt that no other error has."""


def _receipt(token: str) -> dict[str, object]:
    return {"error": {"version": 1, "code": _CODE, "dispatch": "not_started", "attempt": token}}


def _receipt_bytes(token: str) -> bytes:
    return encode(_receipt(token))


@dataclass(frozen=True, slots=True)
class _Stalled:
    """The end of a request whose body stalled.

    Attributes:
        reply: the response; None if the connection was closed without one, as some proxies do.
        seconds: from the last byte of the request to its end.
    """

    reply: Reply | None
    seconds: float

    @property
    def has_receipt(self) -> bool:
        """Whether the response is a receipt, correct or not: a JSON-RPC error of a node has other members."""
        value = self.reply.json() if self.reply is not None else None
        error = value.get("error") if isinstance(value, dict) else None
        return isinstance(error, dict) and (error.get("code") == _CODE or not error.keys().isdisjoint(_MEMBERS))

    def receipt(self) -> Reply:
        """The response with the receipt. Receipts are optional: earlier versions of the original give none.

        Raises:
            CheckSkipped: there is no receipt.
        """
        if self.reply is None or not self.has_receipt:
            raise CheckSkipped(f"the helper gives no receipts: {self}")
        return self.reply

    def __str__(self) -> str:
        """The response on one line."""
        return str(self.reply or "closed without a response")


async def _stall(
    session: Session, headers: Sequence[tuple[str, str]], *, content: bytes | None = None, late: bytes = b""
) -> _Stalled:
    """Post the first bytes of a share, send nothing more, and wait for the response. Then send `late`."""
    whole = encode(session.invented().body(0))
    first = whole[: len(whole) // 2] if content is None else content
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(
            connection.share_request(first, headers, length=len(whole) if content is None else len(first) + 1)
        )
        stalled = await _wait_for_end(session, connection)
        if late:
            await connection.send(late)
            await session.clock.sleep(_LATE_SECONDS)
        return stalled


async def _wait_for_end(session: Session, connection: RawConnection) -> _Stalled:
    started = session.clock.monotonic()
    reply: Reply | None = None
    with suppress(ConnectionEnded):
        reply = await connection.response(PATIENCE_SECONDS)
    return _Stalled(reply, session.clock.monotonic() - started)


async def _stall_with_token(session: Session) -> tuple[_Stalled, str]:
    """Stall with a valid token; done once for all checks of the receipt."""
    token = _new_token()
    return await _stall(session, [(ATTEMPT_HEADER, token)]), token


async def _get_receipt(session: Session) -> tuple[Reply, str]:
    """The receipt of half a body, and the token."""
    stalled, token = await session.once(_stall_with_token)
    return stalled.receipt(), token


@checks.should("SLOW-001", "half a body with a token is 408 with a receipt", _ROW_3, phase=Phase.SLOW)
async def _(session: Session) -> str:
    stalled, _ = await session.once(_stall_with_token)
    seen = f"half a body with a token → {stalled} after {stalled.seconds:.0f} s"
    return require(stalled.has_receipt, seen)


@checks.must("SLOW-002", "the receipt has exactly its fields and the token", _ROW_4, phase=Phase.SLOW)
async def _(session: Session) -> str:
    reply, token = await _get_receipt(session)
    value = reply.json()
    is_exact = value == _receipt(token) and type(value["error"]["version"]) is int
    require(reply.status == 408 and is_exact, f"half a body with a token → {reply}")
    return f"408 {reply.body.decode(errors='replace')}"


@checks.should("SLOW-003", "the receipt has exactly the documented bytes", _RECEIPT, phase=Phase.SLOW)
async def _(session: Session) -> str:
    reply, token = await _get_receipt(session)
    # Go's JSON encoder appends a line feed.
    require(reply.body.rstrip(b"\n") == _receipt_bytes(token), f"half a body with a token → {reply}")
    return f"408 {reply.body.decode(errors='replace')}"


@checks.must("SLOW-004", "the receipt is application/json", _RECEIPT, phase=Phase.SLOW)
async def _(session: Session) -> str:
    reply, _ = await _get_receipt(session)
    require(reply.status == 408 and reply.media_type == JSON_TYPE, f"half a body with a token → {reply}")
    return f"408 {reply.header('content-type')}"


@checks.must("SLOW-005", "the receipt may not be stored", _ROW_4, phase=Phase.SLOW)
async def _(session: Session) -> str:
    reply, _ = await _get_receipt(session)
    control = reply.header("cache-control")
    require(reply.status == 408 and control.lower() == "no-store", f"{reply.status}, Cache-Control: {control}")
    return f"408, Cache-Control: {control}"


@checks.must("SLOW-006", "the token is in no header of the receipt", _ROW_4, phase=Phase.SLOW)
async def _(session: Session) -> str:
    reply, token = await _get_receipt(session)
    names = [name for name, value in reply.headers if token in value]
    require(reply.status == 408 and not names, f"{reply.status}, token in {', '.join(names) or 'no header'}")
    return "408, token in the body only"


@checks.must("SLOW-007", "the body timeout is at least 10 s", "protocol-now §2: deadline", phase=Phase.SLOW)
async def _(session: Session) -> str:
    stalled, _ = await session.once(_stall_with_token)
    # A helper may time out a stalled body before the 30 s are over.
    seen = f"half a body → {stalled} after {stalled.seconds:.1f} s"
    return require(stalled.seconds >= 9.5, seen)


@checks.must("SLOW-008", "half a body with a token is refused", "protocol-now §2: 400 or 408", phase=Phase.SLOW)
async def _(session: Session) -> str:
    stalled, _ = await session.once(_stall_with_token)
    sent = "half a body with a token"
    if stalled.reply is None or stalled.reply.status == 503:
        raise CheckFailed(f"{sent} → {stalled}")
    return refused(sent, stalled.reply, Reason.TIMEOUT)


@checks.should(
    "SLOW-009",
    "half a body without a token gets 503 with a short Retry-After",
    "wallets: 400 is final to zkool",
    phase=Phase.SLOW,
)
async def _(session: Session) -> str:
    stalled = await _stall(session, [])
    seen = f"half a body without a token → {stalled}"
    reply = stalled.reply
    return require(reply is not None and reply.status == 503 and reply.header("retry-after") in ("1", "2"), seen)


@dataclass(frozen=True, slots=True)
class _NoReceipt:
    """Attempt headers that are not a valid token, for which there must be no receipt."""

    number: int
    name: str
    values: tuple[str, ...]

    async def __call__(self, session: Session) -> str:
        stalled = await _stall(session, [(ATTEMPT_HEADER, value) for value in self.values])
        sent = f"half a body with {self.name}"
        require(not stalled.has_receipt, f"{sent} → {stalled}")
        return f"{sent} → {stalled}" if stalled.reply is None else refused(sent, stalled.reply, Reason.TIMEOUT)


_LOWER: Final = "0123456789abcdef" * 4
_NO_RECEIPTS: Final = (
    _NoReceipt(10, "no token", ()),
    _NoReceipt(11, "a token in upper case", (_LOWER.upper(),)),
    _NoReceipt(12, "two tokens", (_LOWER, "ab" * 32)),
    _NoReceipt(13, "the same token twice", (_LOWER, _LOWER)),
    _NoReceipt(14, "a token of 63 characters", (_LOWER[:63],)),
    _NoReceipt(15, "a token of 65 characters", (_LOWER + "0",)),
    _NoReceipt(16, "a token that is not hex", (_LOWER[:63] + "g",)),
    _NoReceipt(17, "an empty token", ("",)),
    _NoReceipt(18, "two tokens in one header", (f"{_LOWER},{_LOWER}",)),
)
_TOKENS: Final = "protocol-now §2: token missing, twice, upper case, short"
checks.add_cases("SLOW", "half a body with {} gets no receipt", _NO_RECEIPTS, _TOKENS, phase=Phase.SLOW)


@checks.must("SLOW-020", "a body with one byte missing is 408", _ROW_3, phase=Phase.SLOW, shares=1, needs_shares=True)
async def _(session: Session) -> str:
    """The JSON is complete, so a faulty helper could already have stored the share."""
    share, token = session.take(), _new_token()
    content = encode(share.body(session.time_for(share)))
    reply = (await _stall(session, [(ATTEMPT_HEADER, token)], content=content)).receipt()
    return require(reply.status == 408 and reply.json() == _receipt(token), f"all but one byte → {reply}")


@dataclass(frozen=True, slots=True)
class _AfterRefusal:
    """A complete share in a body with one byte missing. After the response and `late`, the share must not be known."""

    number: int
    name: str
    late: bytes = b""

    async def __call__(self, session: Session) -> str:
        share, headers = session.take(), [(ATTEMPT_HEADER, _new_token())]
        content = encode(share.body(session.time_for(share)))
        stalled = await _stall(session, headers, content=content, late=self.late)
        if stalled.reply is None or stalled.reply.is_accepted:
            raise CheckSkipped(f"all but one byte → {stalled}: not refused")
        seen = refused("all but one byte", stalled.reply, Reason.TIMEOUT)
        return await _require_unknown(session, share, f"{seen}{', then the byte' if self.late else ''}")


async def _require_unknown(session: Session, share: TestShare, sent: str) -> str:
    """Require that a share was not stored."""
    reply = await session.post_share(share)
    return require(reply.outcome == "queued", f"{sent}, then the whole share → {reply}")


_AFTER: Final = (
    _AfterRefusal(21, "after a receipt the share is not known"),
    _AfterRefusal(26, "the missing byte after a receipt stores nothing", b" "),
)
_POSTING: Final[dict[str, Any]] = {"phase": Phase.SLOW, "shares": 1, "needs_shares": True}
checks.add_cases("SLOW", "{}", _AFTER, "protocol-now §2: meaning of the receipt", **_POSTING)


@checks.must("SLOW-022", "a slow body in chunks gets its receipt", _ROW_3, phase=Phase.SLOW)
async def _(session: Session) -> str:
    token = _new_token()
    content = encode(session.invented().body())[:600]
    async with open_raw(session.client.address, session.client.token) as connection:
        head = [("Content-Type", JSON_TYPE), ("Transfer-Encoding", "chunked"), (ATTEMPT_HEADER, token)]
        await connection.send(connection.head(head) + b"%x\r\n%s\r\n" % (len(content), content))
        reply = (await _wait_for_end(session, connection)).receipt()
    return require(reply.status == 408 and reply.json() == _receipt(token), f"a chunk and no end → {reply}")


@checks.must(
    "SLOW-023",
    "a body that takes 25 s is accepted",
    "protocol-now §12 row 29",
    phase=Phase.SLOW,
    shares=1,
    needs_shares=True,
)
async def _(session: Session) -> str:
    share = session.take()
    due, posted_at = session.time_for(share), session.clock.now()
    async with open_raw(session.client.address, session.client.token) as connection:
        await _trickle(session, connection, encode(share.body(due)))
        reply = await connection.response()
    require(reply.is_accepted, f"a body over 25 s → {reply}")
    session.record_accepted(share, due, posted_at)
    return f"a body over 25 s → {reply}"


async def _trickle(session: Session, connection: RawConnection, content: bytes) -> None:
    """Send a share evenly over 25 s."""
    request = connection.share_request(content)
    head_end = request.index(b"\r\n\r\n") + 4
    await connection.send(request[:head_end])
    size = -(-len(content) // _TRICKLE_PIECES)
    for start in range(0, len(content), size):
        await session.clock.sleep(_TRICKLE_SECONDS / _TRICKLE_PIECES)
        await connection.send(content[start : start + size])


@checks.should(
    "SLOW-024",
    "an incomplete head is closed within 75 s",
    "protocol-now §11: separate head deadline",
    phase=Phase.SLOW,
)
async def _(session: Session) -> str:
    async with open_raw(session.client.address, session.client.token) as connection:
        await connection.send(b"POST /shielded-vote/v1/shares HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        is_closed = await connection.is_closed(PATIENCE_SECONDS)
    require(is_closed, f"half a head: still open after {PATIENCE_SECONDS:.0f} s")
    return "half a head: closed"


@dataclass(frozen=True, slots=True)
class _Disconnect:
    """A complete share in a body that does not end before a disconnect. The share must not be known."""

    number: int
    name: str
    make: Callable[[RawConnection, bytes], bytes]
    level: Level = "should"

    async def __call__(self, session: Session) -> str:
        share = session.take()
        content = encode(share.body(session.time_for(share)))
        async with open_raw(session.client.address, session.client.token) as connection:
            await connection.send(self.make(connection, content))
            await session.clock.sleep(1)
        return await _require_unknown(session, share, f"all but {self.name} and a disconnect")


def _without_last_byte(connection: RawConnection, content: bytes) -> bytes:
    return connection.share_request(content, length=len(content) + 1)


def _without_last_chunk(connection: RawConnection, content: bytes) -> bytes:
    head = connection.head([("Content-Type", JSON_TYPE), ("Transfer-Encoding", "chunked")])
    return head + b"%x\r\n%s\r\n" % (len(content), content)


_DISCONNECTS: Final = (
    _Disconnect(25, "the last byte", _without_last_byte),
    _Disconnect(27, "the last chunk", _without_last_chunk),
)
checks.add_cases("SLOW", "a disconnect before {} stores nothing", _DISCONNECTS, "RFC 9112 §8", **_POSTING)
