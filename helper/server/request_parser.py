"""Parses HTTP/1.1 requests of one connection, one at a time, within limits. Pure: no input or output, and no time.

llhttp (httptools) defines what is a valid request. It cannot stop in the middle of its input, so the input is cut into
pieces of which none ends more than one request, and the caller decides after each piece whether to continue.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Final, Protocol
from urllib.parse import unquote

import httptools

from helper.core.refusals import Refusal
from helper.server.connection_limits import (
    MAX_BODY_PIECES,
    MAX_EXPECT_BYTES,
    MAX_TARGET_BYTES,
    MIN_PIECE_BYTES,
    ConnectionLimits,
)

Headers = list[tuple[bytes, bytes]]

_HEAD_END: Final = b"\n\r\n"
"""The end of every request head, and of every chunked body, that llhttp accepts."""
_LINE_ENDS: Final = re.compile(rb"[\r\n]+")
_FRAMING_HEADERS: Final = frozenset({b"content-length", b"transfer-encoding"})


class InvalidRequestError(Exception):
    """A request is refused for good, and its connection is closed."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, message)


@dataclass(slots=True)
class RequestHead:
    """The head of a request.

    Attributes:
        method: as received.
        raw_path: path of the target, without the query.
        path: the same, percent-decoded.
        query: query of the target, without the question mark.
        http_version: "1.1" or "1.0".
        headers: names in lower case, and values, in the order of arrival.
        content_length: length of the body; 0 if it is chunked or there is none.
        expects_continue: whether the client waits for a 100 response. It may omit the announced body after a final one.
        keep_alive: whether another request may follow; reset when that changes.
    """

    method: str
    raw_path: bytes
    path: str
    query: bytes
    http_version: str
    headers: Headers
    content_length: int
    expects_continue: bool
    keep_alive: bool


class ParsedRequest(Protocol):
    """Receives the body of a request."""

    def add_body(self, part: bytes) -> None:
        """Store a part of the body."""
        ...

    def end_body(self) -> None:
        """Mark the body as complete."""
        ...


class RequestParser:
    """Parses requests, piece by piece.

    Args:
        limits: limits on the size of heads and of the framing of bodies.
        begin_request: creates a request when its head is complete.
    """

    _request: ParsedRequest

    def __init__(self, limits: ConnectionLimits, begin_request: Callable[[RequestHead], ParsedRequest]) -> None:
        self._limits = limits
        self._begin_request = begin_request
        self._parser = httptools.HttpRequestParser(self)
        self._is_in_head = True  # or between two requests
        self._keep_alive = False  # whether another request may follow the current one
        self._is_upgrade = False  # llhttp reports the head's end as that of the request
        self._target = b""
        self._headers: Headers = []
        self._header_count = 0
        self._unreported_bytes = 0  # since the last end of a head or part of a body
        self._body_bytes = self._body_pieces = self._trailer_bytes = self._content_length = 0

    def close(self) -> None:
        """Release the parser, which refers to this object, the connection, and what was received."""
        del self._parser, self._begin_request, self._headers

    def feed(self, data: bytes, at: int) -> int:
        """Parse the piece that begins at `at`. It ends at most one request, and nothing follows that request's end.

        Returns:
            The end of the piece.

        Raises:
            InvalidRequestError: the request is invalid or exceeds a limit. Do not feed any more.
        """
        end = self._piece_end(data, at)
        self._unreported_bytes += end - at
        try:
            self._feed_piece(data[at:end])
        except httptools.HttpParserError as error:
            raise _invalid_request(error) from None
        self._check_size(self._unreported_bytes)
        return end

    def _feed_piece(self, piece: bytes) -> None:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            self._parser.feed_data(piece[upgrade.args[0] :])  # line ends with which the body begins

    def _ignore_upgrade(self) -> None:
        """Replace the parser with one that parses only the body of the current request.

        No upgrade is supported, and a server may ignore the header (RFC 9110, section 7.8). llhttp cannot ignore it: it
        ends the request at its head. The new parser is fed a head with the framing headers of the request, so llhttp
        applies the same rules to the body as it does without an upgrade.
        """
        framing = [header for header in self._headers if header[0] in _FRAMING_HEADERS]
        lines = [b"POST / HTTP/1.1", b"connection: close", *(b"%b: %b" % header for header in framing), b"", b""]
        self._is_upgrade = False
        self._parser = httptools.HttpRequestParser(
            SimpleNamespace(
                on_chunk_header=self.on_chunk_header, on_body=self.on_body, on_message_complete=self.on_message_complete
            )
        )
        self._parser.feed_data(b"\r\n".join(lines))

    # ------------------------------------------------------------------ pieces

    def _piece_end(self, data: bytes, at: int) -> int:
        """End of the piece that begins at `at`: the rest of a body of known length, or the next end of a head."""
        if not self._is_in_head:
            left = self._content_length - self._body_bytes
            if left > 0:
                return min(at + left, len(data))
            if at:  # what a read begins with is no piece of its own
                self._count_body_piece()
        if data.startswith((b"\n", b"\r\n"), at) and (line_ends := _LINE_ENDS.match(data, at)) is not None:
            # The first ones may end a head that began earlier; the others are empty lines before the next request.
            return line_ends.end()
        head_end = data.find(_HEAD_END, at)
        return head_end + len(_HEAD_END) if head_end >= 0 else len(data)

    def _count_body_piece(self) -> None:
        self._body_pieces += 1
        if self._body_pieces > MAX_BODY_PIECES and self._body_pieces * MIN_PIECE_BYTES > self._body_bytes:
            raise InvalidRequestError(HTTPStatus.BAD_REQUEST, f"body: has more than {MAX_BODY_PIECES} small chunks")

    def _check_size(self, size: int) -> None:
        """Refuse a head, or the chunk framing or trailers of a body, of more bytes than permitted."""
        if size > self._limits.max_head_bytes:
            raise InvalidRequestError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"headers: are larger than {self._limits.max_head_bytes} bytes",
            )

    # ------------------------------------------------------------------ callbacks of httptools

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._is_in_head, self._is_upgrade = True, False
        self._target, self._headers = b"", []
        self._header_count = 0

    def on_url(self, part: bytes) -> None:
        """Store a part of the target."""
        self._target += part
        if len(self._target) > MAX_TARGET_BYTES:
            raise InvalidRequestError(
                HTTPStatus.REQUEST_URI_TOO_LONG, f"target: is longer than {MAX_TARGET_BYTES} bytes"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Drop a trailer, because it is not a header (RFC 9110, section 6.5)."""
        self._header_count += 1
        if self._header_count > self._limits.max_headers:
            raise InvalidRequestError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: more than {self._limits.max_headers} headers"
            )
        if self._is_in_head:
            self._headers.append((name.lower(), value.rstrip(b" \t")))
        else:
            self._trailer_bytes += len(name) + len(value)
            self._check_size(self._trailer_bytes)

    def on_headers_complete(self) -> None:
        """Report the head.

        Raises:
            InvalidRequestError: the version is not supported, the method is CONNECT, which llhttp handles as an
                upgrade, or `Host` is missing or repeated (RFC 9112, section 3.2).
        """
        self._check_size(self._unreported_bytes)
        head = self._create_head()
        if self._is_upgrade and head.method == "CONNECT":
            raise InvalidRequestError(HTTPStatus.BAD_REQUEST, "CONNECT is not supported")
        self._is_in_head, self._unreported_bytes = False, 0
        self._body_bytes = self._body_pieces = self._trailer_bytes = 0
        self._content_length, self._keep_alive = head.content_length, head.keep_alive
        self._request = self._begin_request(head)

    def on_chunk_header(self) -> None:
        """Count a chunk of the body."""
        self._count_body_piece()

    def on_body(self, part: bytes) -> None:
        """Report a part of the body."""
        self._unreported_bytes = 0
        self._body_bytes += len(part)
        self._request.add_body(part)

    def on_message_complete(self) -> None:
        """Report the end of the request, unless its body is yet to be parsed.

        Raises:
            InvalidRequestError: a trailer has ended the connection. llhttp would refuse the next request, which a proxy
                may send for another client.
        """
        if not self._is_upgrade:
            if self._keep_alive and not self._parser.should_keep_alive():
                raise InvalidRequestError(HTTPStatus.BAD_REQUEST, "trailers: Connection is not permitted")
            self._is_in_head, self._unreported_bytes = True, 0
            self._request.end_body()
            # the connection stays open and must not hold the request in memory
            self._target, self._headers = b"", []
            del self._request

    # ------------------------------------------------------------------ head

    def _create_head(self) -> RequestHead:
        self._is_upgrade = self._parser.should_upgrade()
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):  # llhttp takes a line without a version for HTTP/0.9
            raise InvalidRequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.0 and HTTP/1.1 are supported")
        host_count = content_length = 0
        is_chunked = expects_continue = False
        for name, value in self._headers:
            if name == b"host":
                host_count += 1
            elif name == b"content-length":
                content_length = int(value)
            elif name == b"transfer-encoding":
                is_chunked = True
            elif name == b"expect" and len(value) <= MAX_EXPECT_BYTES:  # a list
                expects_continue |= b"100-continue" in map(bytes.strip, value.lower().split(b","))
        if host_count != 1 and (host_count or version != "1.0"):
            raise InvalidRequestError(HTTPStatus.BAD_REQUEST, "headers: exactly one Host is required")
        expects_continue &= version != "1.0"  # its client would take the 100 for its response (RFC 9110, 10.1.1)
        url = httptools.parse_url(self._target)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        return RequestHead(
            method=self._parser.get_method().decode("ascii"),
            raw_path=raw_path,
            path=unquote(path) if "%" in path else path,
            query=url.query or b"",
            http_version=version,
            headers=self._headers,
            content_length=0 if is_chunked else content_length,
            expects_continue=expects_continue,
            keep_alive=version == "1.1"
            and not self._is_upgrade
            and not expects_continue
            and self._parser.should_keep_alive(),
        )


def _invalid_request(error: httptools.HttpParserError) -> InvalidRequestError:
    cause = error.__context__  # httptools raises its error instead of the callback's exception
    if isinstance(cause, InvalidRequestError):
        return cause
    return InvalidRequestError(HTTPStatus.BAD_REQUEST, "invalid HTTP/1.1 request")
