"""Transactions and JSON as the chain writes them."""

from __future__ import annotations

import re

import pytest

from devnet.blocks import rfc3339_nano
from devnet.gojson import GoJsonError, dumps, omit_zero, parse_object
from devnet.tx import (
    Cast,
    Delegation,
    EndRound,
    NewRound,
    Reveal,
    TxError,
    create_competing_transaction,
    decode,
    encode,
    tx_hash,
)
from tests.conftest import read_recorded_lines
from tests.support.payloads import reveal_fields


def test_recorded_reveals_encode_to_their_recorded_hashes() -> None:
    for row in read_recorded_lines("reveals.jsonl"):
        reveal = Reveal(**reveal_fields(row["request"]))
        raw = encode(reveal)
        assert raw[0] == 0x04
        assert tx_hash(raw).hex().upper() == row["response"]["tx_hash"]
        assert decode(raw) == reveal
        other = create_competing_transaction(raw)
        assert tx_hash(other) != tx_hash(raw)
        assert decode(other) == reveal


@pytest.mark.parametrize(
    "message",
    [
        Delegation(b"\1" * 32, (b"\2" * 32, b"\3" * 32)),
        Cast(b"\1" * 32, b"\2" * 32, (b"\3" * 32,)),
        NewRound({"vote_round_id": "aa", "proposals": []}),
        EndRound(b"\1" * 32),
    ],
)
def test_messages_round_trip(message: Delegation | Cast | NewRound | EndRound) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("raw", [b"", b"\x09abc", b"\x04\xff\xff", b"\x01{", b"\x7f[]", b"\x7f{}"])
def test_decode_other_bytes_is_refused(raw: bytes) -> None:
    with pytest.raises(TxError):
        decode(raw)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{nope", "invalid character 'n' looking for beginning of object key string"),
        (b"", "EOF"),
        (b'{"a":1', "unexpected end of JSON input"),
        (b'{"a" 1}', "invalid character '1' after object key"),
        (b'{"a":x}', "invalid character 'x' looking for beginning of value"),
        (b"{} x", "invalid character 'x' after top-level value"),
        (b"[1]", "cannot unmarshal array"),
        (b"[" * 100_000, "max depth"),
    ],
)
def test_decode_non_object_body_is_refused_with_go_error_text(body: bytes, message: str) -> None:
    with pytest.raises(GoJsonError, match=re.escape(message)):
        parse_object(body)


def test_json_omits_zero_values_and_escapes_html() -> None:
    shown = omit_zero({"a": 0, "b": "", "c": [], "d": None, "e": "<&>", "f": 1})
    assert dumps(shown) == b'{"e":"\\u003c\\u0026\\u003e","f":1}'


def test_times_have_no_trailing_zeros() -> None:
    assert rfc3339_nano(1_795_268_003_562_910_317) == "2026-11-21T13:33:23.562910317Z"
    assert rfc3339_nano(1_795_268_003_500_000_000) == "2026-11-21T13:33:23.5Z"
    assert rfc3339_nano(1_795_268_003_000_000_000) == "2026-11-21T13:33:23Z"
