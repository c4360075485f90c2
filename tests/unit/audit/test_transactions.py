"""Transactions of a round are read as the chain reads them."""

from __future__ import annotations

import pytest

from audit.transactions import Cast, decode
from helper.errors import AuditError

ROUND = bytes(range(32))
VOTE = b"\x03\x0a\x20" + b"a" * 32 + b"\x12\x20" + b"b" * 32 + b"\x1a\x20" + b"c" * 32 + b"\x32\x20" + ROUND


def proposal(varint: bytes) -> bytes:
    return b"\x20" + varint


@pytest.mark.parametrize(
    "rest",
    [
        proposal(b"\x07"),
        proposal(b"\x09") + proposal(b"\x07"),  # the last one counts
        proposal(b"\x87\x80\x80\x80\x10"),  # bit 32 is ignored
        proposal(b"\x07") + b"\x99\x01" + bytes(8),  # unknown fields: 64 bits,
        proposal(b"\x07") + b"\x9d\x01" + bytes(4),  # 32 bits,
        proposal(b"\x07") + b"\x9a\x01\x02ab" + b"\x98\x01\x01",  # a byte string and a number,
        proposal(b"\x07") + b"\x9b\x01\x9c\x01",  # an empty group,
        proposal(b"\x07") + b"\x9b\x01\x0b\x0a\x02\x0cx\x0c\x08\x01\x9c\x01",  # one with a group and fields
    ],
)
def test_decode_vote(rest: bytes) -> None:
    assert decode(VOTE + rest, ROUND) == Cast(ROUND, (b"b" * 32, b"c" * 32), b"a" * 32, 7)


@pytest.mark.parametrize(
    "rest",
    [
        *(b"\x22\x01a", b"\x25" + bytes(4), b"\x9d\x01" + bytes(3), b"\x9a\x01\x02a", b"\x80" * 11),
        *(b"\x9b\x01", b"\x9b\x01\x0b\x0c", b"\x9c\x01", b"\x9b\x01\x0e\x9c\x01"),  # groups
    ],
)
def test_decode_refuses_other_encodings(rest: bytes) -> None:
    with pytest.raises(AuditError):
        decode(VOTE + rest, ROUND)


@pytest.mark.parametrize("raw", [b"", b"\x09" + ROUND, b"\x03", b"\x06", VOTE.replace(ROUND, bytes(32))])
def test_decode_ignores_transactions_of_no_round(raw: bytes) -> None:
    """An evidence file may contain any transaction."""
    assert decode(raw, ROUND) is None
