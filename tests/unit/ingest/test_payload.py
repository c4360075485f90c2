"""Payload parsing: valid payloads are accepted; errors name the invalid field."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helper.core.share import Share, ShareState
from helper.ingest.payload import parse_hex32, queue_status_body
from helper.ingest.schema import PayloadError
from tests.unit.ingest.admission_fixtures import PAYLOADS, ROUND_ID, create_body, create_payload, parse_share

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


def replace_with_json(name: str, json_text: str) -> bytes:
    """The same with a text that need not be JSON."""
    return json.dumps(replace_field(name, "@@")).replace('"@@"', json_text).encode()


def refusal_text(data: bytes | dict[str, Any]) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        parse_share(data if isinstance(data, bytes) else json.dumps(data).encode())
    return caught.value


def encode_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


@pytest.mark.parametrize("recorded", PAYLOADS, ids=lambda p: str(p["enc_share"]["share_index"]))
def test_parse_share_recorded_payload_keeps_all_values(recorded: dict[str, Any]) -> None:
    share = parse_share(json.dumps(recorded).encode())
    assert share == Share(
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


@pytest.mark.rule("R1")
def test_parse_share_returns_wallets_submit_at() -> None:
    assert parse_share(create_body(submit_at=1_795_268_100)).submit_at == 1_795_268_100


@pytest.mark.rule("R2")
@pytest.mark.parametrize("changes", [{}, {"submit_at": 0}, {"submit_at": None}])
def test_parse_share_without_submit_at_returns_zero(changes: dict[str, Any]) -> None:
    assert parse_share(create_body(**changes)).submit_at == 0


@pytest.mark.parametrize("index", [None, 0, "absent"])
def test_parse_share_without_share_index_returns_zero(index: Any) -> None:
    payload = replace_field("enc_share.share_index", index)
    if index == "absent":
        del payload["enc_share"]["share_index"]
    assert parse_share(json.dumps(payload).encode()).share_index == 0


def test_parse_share_unknown_fields_are_ignored() -> None:
    extra = create_payload(share_index=9, all_enc_shares="x", more={"a": [1]})
    assert parse_share(json.dumps(extra).encode()) == parse_share(create_body())


@pytest.mark.rule("W3")
def test_parse_share_with_the_fields_of_wallet_library_is_accepted() -> None:
    names = [
        "vote_round_id",
        "shares_hash",
        "proposal_id",
        "vote_decision",
        "enc_share",
        "share_index",
        "tree_position",
    ]
    names += ["share_comms", "primary_blind", "submit_at"]
    payload = create_payload(share_index=create_payload()["enc_share"]["share_index"], submit_at=1_800_000_000)
    share = parse_share(json.dumps({name: payload[name] for name in names}).encode())
    assert share == parse_share(json.dumps(payload).encode())
    assert (share.submit_at, len(payload["enc_share"])) == (1_800_000_000, 3)


def test_parse_share_upper_case_round_id_is_accepted() -> None:
    assert parse_share(create_body(vote_round_id=ROUND_ID.hex().upper())).round_id == ROUND_ID


def test_parse_share_repeated_name_last_value_counts() -> None:
    text = create_body().replace(b'"proposal_id": 1', b'"proposal_id": 2, "proposal_id": 1')
    assert text != create_body()
    assert parse_share(text).proposal_id == 1


@pytest.mark.parametrize("name", [*REQUIRED, "enc_share.c1", "enc_share.c2"])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_parse_share_missing_field_is_named(name: str, how: str) -> None:
    payload = replace_field(name, None)
    if how == "absent":
        inner, _, last = name.rpartition(".")
        del (payload[inner] if inner else payload)[last]
    error = refusal_text(payload)
    assert (error.field, error.message) == (name, "is missing")


@pytest.mark.parametrize("name", [*REQUIRED, *INTEGERS, "enc_share.c1", "share_comms[7]"])
@pytest.mark.parametrize("value", [True, 1.5, {"a": 1}, [1, 2], "text", -1, [[[[[[]]]]]]])
def test_parse_share_wrong_type_is_named(name: str, value: Any) -> None:
    assert refusal_text(replace_field(name, value)).field.startswith(name)


@pytest.mark.parametrize(("name", "most"), INTEGERS.items())
def test_parse_share_integer_out_of_range_is_refused(name: str, most: int) -> None:
    parse_share(json.dumps(replace_field(name, most)).encode())
    minimum = 1 if name == "proposal_id" else 0
    parse_share(json.dumps(replace_field(name, minimum)).encode())
    for value in (most + 1, minimum - 1, 2**64, -(2**63) - 1, 10**40):
        assert refusal_text(replace_field(name, value)).field == name


@pytest.mark.parametrize("name", [*INTEGERS, *REQUIRED, "enc_share.c2", "share_comms[3]"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "01", "'x'", '"\\ud800"', "[" * 2000, "nul"])
def test_parse_share_invalid_json_names_field(name: str, text: str) -> None:
    assert refusal_text(replace_with_json(name, text)).field.startswith(name.partition("[")[0])


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("text", ["1.0", "1e0", '"1"', "true", "[1]", "18446744073709551616"])
def test_parse_share_noncanonical_integer_is_refused(name: str, text: str) -> None:
    assert refusal_text(replace_with_json(name, text)).field == name


@pytest.mark.parametrize("name", VALUE_FIELDS)
@pytest.mark.parametrize("length", [0, 1, 31, 33, 64, 3_000])
def test_parse_share_wrong_length_is_reported(name: str, length: int) -> None:
    error = refusal_text(replace_field(name, encode_base64(bytes(length))))
    assert (error.field, error.message) == (name, f"must be 32 bytes, not {length}")


@pytest.mark.parametrize("name", VALUE_FIELDS)
@pytest.mark.parametrize(
    "encoded",
    [
        encode_base64(b"\xff" * 32).rstrip("="),
        encode_base64(b"\xff" * 32).replace("/", "_"),
        encode_base64(b"\xff" * 32) + "\n",
        "\r\n" + encode_base64(b"\xff" * 32),
        " " + encode_base64(b"\xff" * 32),
        encode_base64(b"\xff" * 32) + "=",
        encode_base64(bytes(32))[:-2] + "B=",
        "é" * 44,
        "=" * 44,
    ],
)
def test_parse_share_noncanonical_base64_is_refused(name: str, encoded: str) -> None:
    error = refusal_text(replace_field(name, encoded))
    assert error.field == name
    assert "base64" in error.message


@pytest.mark.parametrize("count", [0, 1, 15, 17, 300])
def test_parse_share_wrong_number_of_commitments_is_refused(count: int) -> None:
    error = refusal_text(create_payload(share_comms=[encode_base64(bytes(32))] * count))
    assert (error.field, error.message) == ("share_comms", f"must have 16 entries, not {count}")


@pytest.mark.parametrize(
    "value", ["", "ab", "0" * 63, "0" * 65, "g" * 64, " " * 64, "0x" + "0" * 62, "0" * 62 + "é", "٣" * 64]
)
def test_parse_share_invalid_round_id_is_refused(value: str) -> None:
    assert refusal_text(create_payload(vote_round_id=value)).field == "vote_round_id"


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b'"x"', b"12", b"true", b"\xff\xfe", b"{", b"\xef\xbb\xbf{}"])
def test_parse_share_body_without_object_is_refused(data: bytes) -> None:
    assert refusal_text(data).field == "body"


def test_parse_share_invalid_utf8_names_field() -> None:
    data = create_body().replace(PAYLOADS[0]["primary_blind"][:4].encode(), b"\xc3\x28\xff\xff", 1)
    error = refusal_text(data)
    assert (error.field, error.message) == ("primary_blind", "is not UTF-8")


def test_parse_share_truncated_body_is_refused() -> None:
    complete = create_body()
    for length in range(0, len(complete), 7):
        refusal_text(complete[:length])
    refusal_text(complete[:-1])


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


@settings(deadline=None)
@given(st.data())
def test_parse_share_any_mutation_raises_only_wire_error(data: st.DataObject) -> None:
    mutable = bytearray(create_body())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(mutable) - 1))
        mutable[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    _parse_or_refuse(bytes(mutable))


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
