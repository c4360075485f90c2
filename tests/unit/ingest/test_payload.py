"""Payloads: all values are kept, and no input raises another error. `payload_bodies` has the invalid fields."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import proofs
from helper.core.share import SHARE_FIELDS, SHARE_JSON, Share, ShareState, share_from_payload, share_to_payload
from helper.core.share_fields import IntegerField, ShareField
from helper.errors import ShareRefused
from helper.ingest.validator import checked_share, invalid_share
from helper.server.wallet_routes import parse_hex32, queue_status_body
from tests.unit.ingest.admission_fixtures import PAYLOADS, ROUND_ID, parse_share

NAMES = [field.json_name for field in SHARE_FIELDS]
IN_FORM = ("missing", "type", "count", "not-hex", "not-base64", "length", "range")
"""Reasons about the form of a value, which the schema describes too."""
ABSENT = object()


def replace_field(name: str, value: Any) -> dict[str, Any]:
    """The first payload with one field, named as in errors, replaced or absent."""
    return set_value(json.loads(json.dumps(PAYLOADS[0])), name, value)


def set_value(payload: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.rpartition(".")
    holder = payload[outer] if outer else payload
    holder[inner] = value
    if value is ABSENT:
        del holder[inner]
    return payload


def refusal_text(data: bytes | dict[str, Any]) -> ShareRefused:
    with pytest.raises(ShareRefused) as caught:
        parse_share(data if isinstance(data, bytes) else json.dumps(data).encode())
    return caught.value


def encode_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


@pytest.mark.parametrize("recorded", PAYLOADS, ids=lambda p: str(p["enc_share"]["share_index"]))
def test_recorded_payload_keeps_all_values(recorded: dict[str, Any]) -> None:
    (result,) = proofs.read_shares([json.dumps(recorded).encode()])
    assert checked_share(result).share == Share(
        round_id=bytes.fromhex(recorded["vote_round_id"]),
        share_index=recorded["enc_share"]["share_index"],
        proposal_id=recorded["proposal_id"],
        vote_decision=recorded["vote_decision"],
        tree_position=recorded["tree_position"],
        submit_at=0,
        shares_hash=base64.b64decode(recorded["shares_hash"]),
        share_comms=b"".join(base64.b64decode(c) for c in recorded["share_comms"]),
        primary_blind=base64.b64decode(recorded["primary_blind"]),
        c1=base64.b64decode(recorded["enc_share"]["c1"]),
        c2=base64.b64decode(recorded["enc_share"]["c2"]),
    )


def make_values(field: ShareField) -> Iterator[Any]:
    """Values of all types, and those at the limits of the field."""
    yield from (ABSENT, None, True, 1.5, "1", [], {}, -1, 0, 1)
    yield from (encode_base64(bytes(length)) for length in (0, 31, 32, 33))
    yield from ("0a" * 32, "0A" * 32, "0a" * 31, "0g" * 32, encode_base64(bytes(32))[:-2] + "B=")
    yield from ([encode_base64(bytes(32))] * count for count in (15, 16, 17))
    if isinstance(field.type, IntegerField):
        yield from (field.type.minimum - 1, field.type.minimum, field.type.maximum, field.type.maximum + 1)


@pytest.mark.parametrize("field", SHARE_FIELDS, ids=lambda field: field.json_name)
def test_native_validation_agrees_with_the_table(field: ShareField) -> None:
    schema = jsonschema_rs.Draft202012Validator(SHARE_JSON.schema())
    payloads = [replace_field(field.json_name, value) for value in make_values(field)]

    results = proofs.read_shares([json.dumps(payload).encode() for payload in payloads])

    for payload, result in zip(payloads, results, strict=True):
        is_in_form = isinstance(result, proofs.ReadShare) or result.reason not in IN_FORM
        assert is_in_form == schema.is_valid(payload), (payload, result)
        if isinstance(result, proofs.InvalidShare) and not is_in_form:
            assert result.field == field.json_name
            assert invalid_share(result).field == field.json_name


def test_native_validation_reads_fields_in_the_order_of_the_table() -> None:
    payload, fields = json.loads(json.dumps(PAYLOADS[0])), []
    for name in reversed(NAMES):
        (result,) = proofs.read_shares([json.dumps(set_value(payload, name, [])).encode()])
        assert isinstance(result, proofs.InvalidShare)
        fields.append(result.field)
    assert fields == NAMES[::-1]


def test_share_equals_share_of_its_payload() -> None:
    share = parse_share(json.dumps(PAYLOADS[0]).encode())

    assert share_from_payload(share_to_payload(share)) == share
    for name in NAMES:
        with pytest.raises(ValueError, match=f"{name} is missing or invalid"):
            share_from_payload(replace_field(name, "c2VjcmV0"))


def test_parse_share_error_contains_no_value() -> None:
    secret = "c2VjcmV0LXZhbHVl"  # no response contains a witness value
    for name in NAMES:
        assert secret not in str(refusal_text(replace_field(name, secret)))
    assert "sec" not in str(refusal_text(b'{"sec": nope}'))


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary().map(encode_base64)
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=18) | st.dictionaries(st.text(), inner, max_size=4)
)
_names = st.sampled_from([*NAMES, "enc_share", "all_enc_shares", "share_index"])


@given(st.lists(st.tuples(_names, _json), min_size=1, max_size=4))
def test_parse_share_any_field_value_raises_only_wire_error(changes: list[tuple[str, Any]]) -> None:
    payload = PAYLOADS[1]
    for name, value in changes:
        payload = {**payload, name.partition(".")[0]: value}
    _parse_or_refuse(json.dumps(payload).encode())


@given(st.binary(max_size=200))
def test_parse_share_any_bytes_raise_only_wire_error(data: bytes) -> None:
    _parse_or_refuse(data)


def _parse_or_refuse(data: bytes) -> None:
    try:
        share = parse_share(data)
    except ShareRefused:
        return
    assert len(share.share_comms) == 512
    assert 1 <= share.proposal_id <= 50


def test_parse_hex32_takes_64_hex_characters_of_either_case() -> None:
    assert parse_hex32("nullifier", "0a" * 32) == parse_hex32("nullifier", "0A" * 32) == b"\x0a" * 32
    for text in ("0a" * 31, "0a" * 33, "zz" * 32, "", "0a" * 31 + "0 ", "٣" * 64):
        with pytest.raises(ShareRefused) as refused:
            parse_hex32("nullifier", text)
        assert refused.value.field == "nullifier"


@pytest.mark.rule("N13")
def test_queue_status_pending_counts_all_unfinished_shares() -> None:
    counts = {
        ROUND_ID: {
            ShareState.WAITING: 4,
            ShareState.PROVING: 2,
            ShareState.SENT: 1,
            ShareState.CONFIRMED: 8,
            ShareState.FAILED: 3,
        }
    }
    expected = {
        "total": 18,
        "pending": 7,
        "ready": 3,
        "not_yet_due": 1,
        "processing": 3,
        "submitted": 8,
        "failed": 3,
    }
    assert queue_status_body(counts, {ROUND_ID: 3}) == {ROUND_ID.hex(): expected}
    assert queue_status_body(counts, {}) == {ROUND_ID.hex(): {**expected, "ready": 0, "not_yet_due": 4}}
    later = queue_status_body(counts, {ROUND_ID: 9})[ROUND_ID.hex()]
    assert (later["ready"], later["not_yet_due"]) == (4, 0), "read separately: never below zero"
