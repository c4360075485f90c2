"""The search of the request log finds a value in every dress, and only before its time."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import quote

import pytest

from devnet.leak_check import Needle, named_early
from devnet.requestlog import readable

SECRET = bytes.fromhex("fbff3e9a00ffd37b61d9f0c1aabbccddeeff00112233445566778899fefdfcfb")
DUE = 1_800_000_000.0
B64 = base64.b64encode(SECRET).decode()
KEY = "0102" + "ab" * 32


def entry(path: str = "/x", body: bytes = b"", *, time: float = DUE - 1) -> dict[str, Any]:
    return {"time": time, "path": path, "body": readable(body)}


REQUESTS = {
    "hex in the path": entry(f"/tx/{SECRET.hex()}"),
    "upper-case hex": entry(f"/tx/{SECRET.hex().upper()}"),
    "inside longer hex": entry(f"/abci_query?data=0x{KEY}{SECRET.hex()}"),
    "base64, encoded for a query": entry(f"/y?n={quote(B64, safe='')}"),
    "base64 for URLs": entry(f"/y?n={base64.urlsafe_b64encode(SECRET).decode()}"),
    "in a JSON body": entry(body=b'{"share_nullifier":"%s","proof":"%s"}' % (B64.encode(), b"A" * 6000)),
    "hex in a body": entry(body=b'{"n":"%s"}' % SECRET.hex().encode()),
    "raw in a body": entry(body=b"\x04\x0a\x20" + SECRET),
    "raw, percent-encoded": entry(f"/y?n={quote(SECRET)}"),
    **{
        f"base64 at offset {offset} of a transaction": entry(
            body=b'{"tx":"%s"}' % base64.b64encode(bytes(offset) + SECRET + bytes(5000))
        )
        for offset in (1, 2, 3)
    },
}


@pytest.mark.parametrize("dress", REQUESTS)
def test_a_value_is_found_in_every_dress(dress: str) -> None:
    needle = Needle("nullifier", SECRET, DUE)
    (found,) = named_early([entry(), REQUESTS[dress], entry("/z")], [needle])
    assert found.needle is needle
    assert found.entry is REQUESTS[dress]
    late = {**REQUESTS[dress], "time": DUE}
    assert named_early([late], [needle]) == []
    other = Needle("nullifier", SECRET[::-1], DUE)
    assert named_early([REQUESTS[dress]], [other]) == []


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (entry("/leaf/70123"), True),
        (entry("/leaf?position=70123&x=1"), True),
        (entry(body=b'{"tree_position":70123}'), True),
        (entry("/leaf/701234"), False),
        (entry(f"/tx/a70123{'b' * 58}"), False),
        (entry("/leaves?from_height=7&to_height=123"), False),
    ],
)
def test_a_position_is_found_where_it_stands_by_itself(request_: dict[str, Any], named: bool) -> None:
    assert len(named_early([request_], [Needle("position", 70123, DUE)])) == named


def test_the_log_keeps_a_body_but_for_the_length_of_its_proof() -> None:
    body = b'{"share_nullifier":"%s","proof":"%s","proposal_id":1}' % (B64.encode(), b"A" * 6000)
    kept = readable(body)
    assert kept == body.decode().replace("A" * 6000, "A" * 1024 + "...")
