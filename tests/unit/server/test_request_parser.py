"""The request parser against h11 as the reference: what is accepted, refused, and where requests end."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import h11
import pytest

from helper.server.connection_limits import ConnectionLimits
from helper.server.request_parser import InvalidRequestError, RequestHead, RequestParser

LIMITS = ConnectionLimits()
REQUESTS = 3000


@dataclass
class Parsed:
    """What was found in the bytes of one connection.

    Attributes:
        requests: complete requests: method, target, headers and body.
        is_refused: whether the bytes behind them are no request.
    """

    requests: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]] = field(default_factory=list)
    is_refused: bool = False
    reason: str = ""

    def add(self, method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        # h11 returns the transfer coding in lower case
        lines = [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in headers]
        self.requests.append((method, target, lines, body))


class Sink:
    def __init__(self, head: RequestHead, target: bytes) -> None:
        self.head, self.target = head, target
        self.body = b""
        self.is_complete = False

    def add_body(self, part: bytes) -> None:
        assert not self.is_complete
        self.body += part

    def end_body(self) -> None:
        assert not self.is_complete
        self.is_complete = True


def parse(segments: Sequence[bytes]) -> Parsed:
    """Parse as a connection does: until a request after which the connection closes, or one that is refused."""
    result, begun = Parsed(), list[Sink]()

    def begin(head: RequestHead) -> Sink:
        assert not begun, "the piece before ended a head"
        begun.append(Sink(head, parser._target))
        return begun[0]

    parser = RequestParser(LIMITS, begin)
    try:
        for segment in segments:
            at = 0
            while at < len(segment):
                at = parser.feed(segment, at)
                if begun and begun[0].is_complete:
                    request = begun.pop()
                    head = request.head
                    result.add(head.method.encode(), request.target, head.headers, request.body)
                    if not head.keep_alive:
                        return result
    except InvalidRequestError as error:
        result.is_refused, result.reason = True, str(error)
    return result


def parse_with_h11(data: bytes) -> Parsed:
    result = Parsed()
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    head: h11.Request | None = None
    body = b""
    try:
        while True:
            event = connection.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED) and head is None:
                return result
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                result.add(head.method, head.target, head.headers, body)
                if {(b"connection", b"Upgrade"), (b"upgrade", b"h2c")} <= set(head.headers):
                    return result  # it is the last request of a connection, which h11 leaves to its caller
                head = None
                connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.states[h11.CLIENT] is not h11.DONE:
                    return result
                connection.start_next_cycle()
            else:
                return result
    except h11.RemoteProtocolError as error:
        result.is_refused, result.reason = True, str(error)
        return result


METHODS = [b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"BREW", b"get", b"", b"CONNECT"]
TARGETS = [b"/", b"/a/b?c=%20d", b"*", b"http://x/y", b"/\xff", b"/a b", b"", b"x", b"/a#b", b"//", b"http://x", b"/%"]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1.10", b"HTTP/0.9", b""]
LINE_ENDS = [b"\r\n"] * 30 + [b"\n", b"\r", b"\r\r\n", b"\n\r\n"]
SPACES = [b" "] * 30 + [b"  ", b"\t", b""]
HEADERS = [
    b"Host: x",
    b"Host:",
    b"Host : x",
    b"Content-Length: 5",
    b"Content-Length: 5",
    b"Content-Length: 0",
    b"Content-Length: +5",
    b"Content-Length: 5, 5",
    b"Content-Length: 05",
    b"Content-Length: 0x5",
    b"Content-Length: -1",
    b"Content-Length:",
    b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: Chunked",
    b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked, gzip",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: \x0bchunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding:",
    b" Transfer-Encoding: chunked",
    b"Transfer_Encoding: chunked",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: Upgrade",
    b"Upgrade: h2c",
    b"Expect: 100-continue",
    b"Expect: other",
    b"X: \xe4\xf6",
    b"X: \x00",
    b"X: a\rb",
    b"X:",
    b"X",
    b": x",
    b"X Y: z",
    b"X:  padded  ",
    b"X: a\x01b",
]
BODIES = [
    b"",
    b"hello",
    b"hello",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5;a=b\r\nhello\r\n0\r\n\r\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"5\r\nhello0\r\n\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"-5\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\nX: y\r\n\r\n",
    b"5\r\nhello\r\n0\r\nContent-Length: 3\r\n\r\n",
    b"0\r\n\r\n",
    b"000\r\n\r\n",
    b"ffffffffffffffffff\r\n",
    b"5\r\n\n\r\nab\r\n0\r\n\r\n",
    b"\r\n",
]
FOLLOWING = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"


VALID_HEADERS = [
    b"Connection: close",
    b"Connection: keep-alive",
    b"Expect: other",
    b"X: \xe4\xf6",
    b"X:",
    b"X:  padded  ",
]
VALID_FRAMING = [
    (b"", b""),
    (b"Content-Length: 0\r\n", b""),
    (b"Content-Length: 5\r\n", b"hello"),
    (b"Content-Length: 05\r\n", b"\n\r\nab"),
    (b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: Chunked\r\n", b"5;a=b\r\n\n\r\nab\r\n0\r\nX: y\r\n\r\n"),
]


def generate_valid(source: random.Random) -> bytes:
    """A valid request."""
    line = b"%b %b %b" % (source.choice(METHODS[:5]), source.choice(TARGETS[:2]), source.choice(VERSIONS[:2]))
    framing, body = source.choice(VALID_FRAMING)
    lines = [line, b"Host: x", *source.choices(VALID_HEADERS, k=source.randrange(3))]
    return b"\r\n".join([*lines, framing]) + b"\r\n" + body


def generate_odd(source: random.Random) -> bytes:
    """A request that may be invalid in several ways."""
    is_odd = source.random() < 0.4
    method, target, version = (source.choice(parts if is_odd else parts[:2]) for parts in (METHODS, TARGETS, VERSIONS))
    headers = source.choices(HEADERS, k=source.choice([0, 1, 1, 2, 2, 3]))
    if source.random() < 0.9:
        headers.insert(source.randint(0, len(headers)), b"Host: x")
    lines = [method + source.choice(SPACES) + target + source.choice(SPACES) + version, *headers, b""]
    data = b"".join(line + source.choice(LINE_ENDS) for line in lines) + source.choice(BODIES)
    if source.random() < 0.2:
        at = source.randrange(len(data))
        data = data[:at] + bytes([source.choice(b"\r\n\t \x00\x7f:,;0aG/")]) + data[at + source.randint(0, 1) :]
    return data


def split_everywhere(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


H11_IS_STRICTER = ("illegal request line", "no request line received", "Only Transfer-Encoding: chunked is supported")
"""More than one space in a request line, a line feed before it, and other codings under `chunked`: all harmless."""


def compare(source: random.Random) -> None:
    """Compare the parsers on the bytes of one connection. Every way to split them gives the same result."""
    valid = [generate_valid(source) for _ in range(source.randrange(3))]
    odd = generate_odd(source) if source.random() < 0.8 else b""
    data = b"".join([*valid, odd, source.choice([b"", FOLLOWING, b"\r\n" + FOLLOWING][: 3 if odd else 2])])
    ours, theirs = parse([data]), parse_with_h11(data)
    assert parse(split_everywhere(data)) == ours, data
    cut = source.randrange(len(data) + 1)
    assert parse([data[:cut], data[cut:]]) == ours, data
    common = min(len(ours.requests), len(theirs.requests))
    assert ours.requests[:common] == theirs.requests[:common], data
    if not odd:
        assert (ours.requests, ours.is_refused) == (theirs.requests, theirs.is_refused), data
    elif len(ours.requests) > common:
        assert theirs.is_refused, data
        assert theirs.reason.startswith(H11_IS_STRICTER), (theirs.reason, data)
    elif len(theirs.requests) > common:
        assert ours.is_refused, data


def test_requests_are_parsed_as_by_h11_or_refused() -> None:
    source = random.Random("requests")
    for _ in range(REQUESTS):
        compare(source)


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_head_is_refused_only_above_its_limits(excess: int) -> None:
    line, last = b"GET / HTTP/1.1\r\n", b"\r\n"
    many = b"Host:\r\n" + b"a:\r\n" * (LIMITS.max_headers - 1 + excess)
    fixed = line + b"Host:\r\nX: \r\n" + last
    large = b"Host:\r\nX: " + b"a" * (LIMITS.max_head_bytes - len(fixed) + excess) + b"\r\n"
    for headers in (many, large):
        assert parse([line + headers + last]).is_refused == (excess > 0)


def test_chunk_that_arrives_in_many_reads_is_one_piece() -> None:
    head = b"POST / HTTP/1.1\r\nHost:\r\nTransfer-Encoding: chunked\r\n\r\n200\r\n"
    body = b"a" * 512
    parsed = parse([head, *(body[at : at + 1] for at in range(512)), b"\r\n0\r\n\r\n"])
    assert [request[3] for request in parsed.requests] == [body]
