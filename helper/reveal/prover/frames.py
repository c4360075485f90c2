"""Wire format between the service and a prover worker: length-prefixed JSON objects.

A frame is a length (four bytes, big-endian) and that many bytes of JSON; bytes values are hex-encoded. There is no
version field, because both ends come from the same wheel.
"""

from __future__ import annotations

import struct
from typing import IO, Any

import orjson

HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 20
"""Maximum size of a frame in bytes; real frames have up to about 10 kB (a proof)."""

Frame = dict[str, Any]


def encode_frame(frame: Frame) -> bytes:
    """Encode a frame with its header."""
    body = orjson.dumps(frame, default=_hex)
    return HEADER.pack(len(body)) + body


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(type(value).__name__)


def body_length(header: bytes) -> int:
    """Return the number of bytes that follow a header.

    Raises:
        ValueError: the frame is longer than `MAX_FRAME_BYTES`.
    """
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame too long: {length} bytes")
    return int(length)


def decode_frame(body: bytes) -> Frame:
    """Decode a frame from its body (without the header).

    Raises:
        ValueError: the body is not a JSON object.
    """
    frame = orjson.loads(body)
    if not isinstance(frame, dict):
        raise ValueError("frame is not a JSON object")
    return frame


def read_frame(stream: IO[bytes]) -> Frame | None:
    """Read one frame from a blocking stream; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length = body_length(header)
    body = stream.read(length)
    return decode_frame(body) if len(body) == length else None
