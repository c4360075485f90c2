"""Limits of a listener's connections. Fast to import, because commands do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_PIPELINED: Final = 1
"""Maximum parsed requests of a connection that wait for an earlier response.

A parsed request takes up to thirty times the memory of its bytes, so additional requests wait unparsed.
"""
MAX_BODY_PIECES: Final = 256
"""Pieces of one body: its chunks, and the parts into which it is split because they look like the end of a head.

Each takes about as much time as 1 KiB of data. More are allowed if they have `MIN_PIECE_BYTES` bytes on average.
"""
MIN_PIECE_BYTES: Final = 256
READ_BYTES: Final = 16 << 10
"""Maximum bytes of one read, and of a connection's unparsed data: nothing is read while requests wait."""

MAX_UNSENT_BYTES: Final = 32 << 20
"""Bytes of responses that all clients together may leave unread. Above it the longest-stalled connection is aborted."""

SEND_BUFFER_BYTES: Final = 64 << 10
"""Size of the kernel's send buffer of a connection, which the kernel doubles.

By default it grows to several megabytes, and a few hundred clients that read nothing hold a gigabyte of the kernel.
"""

LINGER_SECONDS: Final = 3.0
"""Seconds in which the rest of a body is discarded after a response that closes the connection.

Closing with bytes unread resets the connection, and the client may lose the response. Allows for bytes that are on
their way over a slow connection.
"""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        head_seconds: from the connection, or a request's first byte, to the end of its headers.
        body_seconds: from the end of the headers to the end of the body. Longer than the time limits of `BodyReader`,
            which responds to a slow body; this one closes the connection if the application does not read the body.
        half_closed_seconds: for the response to a client that has closed its sending side. A disconnected client cannot
            be distinguished from such a client, so this also limits how long its requests run.
        stalled_seconds: a connection is dropped if the client reads nothing of a waiting response for this long.
        max_head_bytes: size of a request line with its headers; also of the chunk framing and trailers of a body.
        max_headers: number of headers and trailers of one request.
        max_connections: concurrent connections. For one more, the server closes the slowest, or refuses the new one.
        eviction_seconds: a connection whose request, or the wait for it, began within this time is not closed for a new
            one. Allows for a wallet over Tor that sends nothing at first.
    """

    head_seconds: float = 8.5
    body_seconds: float = 65.0
    half_closed_seconds: float = 10.0
    stalled_seconds: float = 10.0
    max_head_bytes: int = 64 << 10
    max_headers: int = 100
    max_connections: int = 4096
    eviction_seconds: float = 4.0
