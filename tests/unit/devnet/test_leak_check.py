"""The search of the request log finds a value in every encoding, but only before its time."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import quote

import pytest

from devnet.leak_check import SensitiveValue, find_leaks
from devnet.request_log import readable_body

SECRET = bytes.fromhex("fbff3e9a00ffd37b61d9f0c1aabbccddeeff00112233445566778899fefdfcfb")
DUE_TIME = 1_800_000_000.0
SECRET_BASE64 = base64.b64encode(SECRET).decode()
KEY = "0102" + "ab" * 32


def log_entry(path: str = "/x", body: bytes = b"", *, time: float = DUE_TIME - 1) -> dict[str, Any]:
    return {"time": time, "path": path, "body": readable_body(body)}


REQUESTS = {
    "hex in the path": log_entry(f"/tx/{SECRET.hex()}"),
    "upper-case hex": log_entry(f"/tx/{SECRET.hex().upper()}"),
    "inside longer hex": log_entry(f"/abci_query?data=0x{KEY}{SECRET.hex()}"),
    "base64, encoded for a query": log_entry(f"/y?n={quote(SECRET_BASE64, safe='')}"),
    "base64 for URLs": log_entry(f"/y?n={base64.urlsafe_b64encode(SECRET).decode()}"),
    "in a JSON body": log_entry(body=b'{"share_nullifier":"%s","proof":"%s"}' % (SECRET_BASE64.encode(), b"A" * 6000)),
    "hex in a body": log_entry(body=b'{"n":"%s"}' % SECRET.hex().encode()),
    "raw in a body": log_entry(body=b"\x04\x0a\x20" + SECRET),
    "raw, percent-encoded": log_entry(f"/y?n={quote(SECRET)}"),
    **{
        f"base64 at offset {offset} of a transaction": log_entry(
            body=b'{"tx":"%s"}' % base64.b64encode(bytes(offset) + SECRET + bytes(5000))
        )
        for offset in (1, 2, 3)
    },
}


@pytest.mark.parametrize("encoding", REQUESTS)
def test_leak_check_finds_value_in_every_encoding(encoding: str) -> None:
    needle = SensitiveValue("nullifier", SECRET, DUE_TIME)
    (leak,) = find_leaks([log_entry(), REQUESTS[encoding], log_entry("/z")], [needle])
    assert leak.sensitive_value is needle
    assert leak.request is REQUESTS[encoding]
    late = {**REQUESTS[encoding], "time": DUE_TIME}
    assert find_leaks([late], [needle]) == []
    other = SensitiveValue("nullifier", SECRET[::-1], DUE_TIME)
    assert find_leaks([REQUESTS[encoding]], [other]) == []


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (log_entry("/leaf/70123"), True),
        (log_entry("/leaf?position=70123&x=1"), True),
        (log_entry(body=b'{"tree_position":70123}'), True),
        (log_entry("/leaf/701234"), False),
        (log_entry(f"/tx/a70123{'b' * 58}"), False),
        (log_entry("/leaves?from_height=7&to_height=123"), False),
    ],
)
def test_leak_check_finds_position_only_as_separate_number(request_: dict[str, Any], named: bool) -> None:
    assert len(find_leaks([request_], [SensitiveValue("position", 70123, DUE_TIME)])) == named


def test_request_log_keeps_body_and_shortens_proof() -> None:
    body = b'{"share_nullifier":"%s","proof":"%s","proposal_id":1}' % (SECRET_BASE64.encode(), b"A" * 6000)
    readable = readable_body(body)
    assert readable == body.decode().replace("A" * 6000, "A" * 1024 + "...")
