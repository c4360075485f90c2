"""Payloads: all values are kept, and no input raises another error. `payload_bodies` has the invalid fields."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import proofs
from helper.core.share import Share, ShareState
from helper.ingest.payload import PayloadError, parse_hex32, queue_status_body
from helper.ingest.validator import checked_share
from tests.unit.ingest.admission_fixtures import PAYLOADS, ROUND_ID, parse_share

REQUIRED = (
    "shares_hash",
    "proposal_id",
    "vote_decision",
    "enc_share",
    "tree_position",
    "vote_round_id",
    "share_comms",
    "primary_blind",
)
VALUE_FIELDS = (
    "shares_hash",
    "primary_blind",
    "enc_share.c1",
    "enc_share.c2",
    "share_comms[0]",
    "share_comms[15]",
)
INTEGERS = {
    "proposal_id": 50,
    "vote_decision": 7,
    "tree_position": 2**24 - 1,
    "submit_at": 2**63 - 1,
    "enc_share.share_index": 15,
}


def replace_field(name: str, value: Any) -> dict[str, Any]:
    """The first payload with one field, named as in errors, replaced."""
    payload: dict[str, Any] = json.loads(json.dumps(PAYLOADS[0]))
    if name.startswith("enc_share."):
        payload["enc_share"][name.removeprefix("enc_share.")] = value
    elif name.startswith("share_comms["):
        payload["share_comms"][int(name[12:-1])] = value
    else:
        payload[name] = value
    return payload


def refusal_text(data: bytes | dict[str, Any]) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
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


def test_parse_share_error_contains_no_value() -> None:
    secret = "c2VjcmV0LXZhbHVl"  # no response contains a witness value
    for name in (*VALUE_FIELDS, "vote_round_id", *INTEGERS):
        assert secret not in str(refusal_text(replace_field(name, secret)))
    assert "sec" not in str(refusal_text(b'{"sec": nope}'))


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary().map(encode_base64)
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=18) | st.dictionaries(st.text(), inner, max_size=4)
)
_names = st.sampled_from([*REQUIRED, *INTEGERS, *VALUE_FIELDS, "all_enc_shares", "share_index"])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(_names, _json), min_size=1, max_size=4))
def test_parse_share_any_field_value_raises_only_wire_error(changes: list[tuple[str, Any]]) -> None:
    payload = PAYLOADS[1]
    for name, value in changes:
        if "." not in name and "[" not in name:
            payload = {**payload, name: value}
        else:
            payload = {**payload, name.partition("[")[0].partition(".")[0]: value}
    _parse_or_refuse(json.dumps(payload).encode())


@given(st.binary(max_size=200))
def test_parse_share_any_bytes_raise_only_wire_error(data: bytes) -> None:
    _parse_or_refuse(data)


def _parse_or_refuse(data: bytes) -> None:
    try:
        share = parse_share(data)
    except PayloadError:
        return
    assert len(share.share_comms) == 512
    assert 1 <= share.proposal_id <= 50


def test_parse_hex32_upper_case_is_refused() -> None:
    assert parse_hex32("nullifier", "0a" * 32) == b"\x0a" * 32
    for text in ("0A" * 32, "0a" * 31, "0a" * 33, "zz" * 32, "", "0a" * 31 + "0 ", "٣" * 64):
        with pytest.raises(PayloadError, match="nullifier"):
            parse_hex32("nullifier", text)


@pytest.mark.rule("N13")
def test_queue_status_pending_counts_all_unfinished_shares() -> None:
    counts = {
        ROUND_ID: {
            ShareState.RECEIVED: 4,
            ShareState.WITNESSED: 2,
            ShareState.BROADCAST: 1,
            ShareState.SUBMITTED: 8,
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
