"""Reads connection input in bounded sizes and splits it after each request head."""

from __future__ import annotations

import asyncio
import re
from typing import ClassVar, Final

from helper.server.connection_limits import READ_BYTES

_HEAD_END: Final = b"\n\r\n"
"""The end of every request head that llhttp accepts."""
_LINE_ENDS: Final = re.compile(rb"[\r\n]+")


class SmallReads(asyncio.BufferedProtocol):
    """Forwards a transport's events to a connection, with reads of at most `READ_BYTES`.

    By default a read returns up to 256,000 bytes, and each connection may hold one. Unread data stays in the kernel's
    buffers, which are bounded. All connections share one buffer: a read is delivered before the next one begins.
    """

    _buffer: ClassVar = memoryview(bytearray(READ_BYTES))

    def __init__(self, connection: asyncio.Protocol) -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (required by the protocol)
        """Return the buffer for the next read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver a copy of the bytes read."""
        self._connection.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        """Forward to the connection."""
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        """Forward to the connection."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Forward to the connection."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward to the connection."""
        self._connection.connection_lost(exc)


def ends_at_most_one_head(data: bytes) -> bool:
    """Whether received bytes contain at most one end of a request head, and thus are one piece."""
    # In a posted share the last line feed ends the head; this is much faster than a search through the body.
    last = data.rfind(b"\n")
    return last < 0 or (not data.startswith((b"\n", b"\r\n")) and data.find(_HEAD_END) + 2 == last)


def piece_end(data: bytes, at: int) -> int:
    """End of the piece that begins at `at`: after the next end of a request head.

    Line ends at the start are a separate piece, because the first ones may end a head that began in an earlier read.
    The others are empty lines before the next request.
    """
    if data.startswith((b"\n", b"\r\n"), at) and (line_ends := _LINE_ENDS.match(data, at)) is not None:
        return line_ends.end()
    head_end = data.find(_HEAD_END, at)
    return head_end + len(_HEAD_END) if head_end >= 0 else len(data)
