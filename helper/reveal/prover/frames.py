"""The line between the service and a prover worker: JSON objects with a length in front.

A frame is four bytes of length (big-endian) and that many bytes of JSON; bytes values travel as hex. Both ends
are ours and come from the same wheel, so there is no version in it.
"""

from __future__ import annotations

import struct
from typing import IO, Any

import orjson

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 20
"""Bytes; the largest real frame, a proof, is about 10 kB."""

Frame = dict[str, Any]


def encode(frame: Frame) -> bytes:
    """The frame's bytes, header first."""
    body = orjson.dumps(frame, default=_hex)
    return HEADER.pack(len(body)) + body


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(type(value).__name__)


def body_length(header: bytes) -> int:
    """How many bytes follow this header.

    Raises:
        ValueError: more than any frame of ours has.
    """
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    return int(length)


def decode(body: bytes) -> Frame:
    """The frame in these bytes (without the header).

    Raises:
        ValueError: not a JSON object.
    """
    frame = orjson.loads(body)
    if not isinstance(frame, dict):
        raise ValueError("a frame that is no object")
    return frame


def read(stream: IO[bytes]) -> Frame | None:
    """Read one frame from a blocking stream; None when the other end is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length = body_length(header)
    body = stream.read(length)
    return decode(body) if len(body) == length else None
