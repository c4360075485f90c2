"""Signatures of rounds in the published configuration: real ones, and entries that are not authenticated."""

from __future__ import annotations

import base64
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from admin.published_config import authenticate_rounds, encode_layout, parse_config, parse_static
from helper.chain.chain_data import RoundAuthentication
from tests.conftest import RECORDED
from tests.unit.admin.fixtures import AdminStack

pytestmark = pytest.mark.rule("R16")

PUBLISHED = RECORDED.parent / "voting-config"
ROUND_ID = bytes(range(32))
LAYOUT = encode_layout({"pir_depth": 19, "tier0_layers": 12, "tier1_layers": 7, "poly_len": 4096})
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(2, 34)))
KEYS = {"one": KEY.public_key().public_bytes_raw()}
EA_PK = bytes(range(32, 64))
MESSAGE = b"zcash-shielded-vote:round-auth:v2" + ROUND_ID + EA_PK + bytes.fromhex("130000000c0000000700000000100000")


def sign(key: Ed25519PrivateKey = KEY, message: bytes = MESSAGE, **changed: Any) -> dict[str, Any]:
    sig = base64.b64encode(key.sign(message)).decode()
    return {"key_id": "one", "alg": "ed25519", "sig": sig, **changed}


def entry(*signatures: Any, **changed: Any) -> dict[str, Any]:
    return {
        "auth_version": 2,
        "ea_pk": base64.b64encode(EA_PK).decode(),
        "signatures": list(signatures) or [sign()],
        **changed,
    }


def authenticate(value: Any, layout: bytes | None = LAYOUT) -> RoundAuthentication:
    return authenticate_rounds({ROUND_ID.hex(): value}, layout, KEYS)[ROUND_ID]


def read_published(config: str, static: str) -> dict[str, RoundAuthentication]:
    """Authentications of a published configuration, by the first 8 characters of the round id."""
    keys = parse_static((PUBLISHED / f"{static}.json").read_bytes())
    assert keys is not None
    parsed = parse_config((PUBLISHED / f"{config}.json").read_bytes(), keys)
    return {round_id.hex()[:8]: result for round_id, result in parsed.rounds.items()}


@pytest.mark.parametrize("static", ["static", "static-v2"])
def test_authenticate_rounds_of_production(static: str) -> None:
    results = read_published("production", static)
    # 16eef7eb also has a signature of version 1; 3fda6c83 has auth_version 1.
    assert results.pop("3fda6c83") is RoundAuthentication.UNSUPPORTED_VERSION
    assert results == dict.fromkeys(
        ("16eef7eb", "1d45a2cb", "37934291", "95cc21e4", "c2761962", "e6b5a7ef", "ed288153"),
        RoundAuthentication.AUTHENTICATED,
    )


def test_authenticate_rounds_of_stage() -> None:
    assert read_published("stage", "stage-static-v2") == {
        "003ced61": RoundAuthentication.AUTHENTICATED,
        "0199de7a": RoundAuthentication.UNSUPPORTED_VERSION,
        "06dd699b": RoundAuthentication.AUTHENTICATED,
        "0a4a9613": RoundAuthentication.UNSUPPORTED_VERSION,
    }


def test_authenticate_rounds_of_production_with_keys_of_stage_authenticates_none() -> None:
    assert RoundAuthentication.AUTHENTICATED not in read_published("production", "stage-static-v2").values()


def test_authenticate_one_valid_signature_among_invalid_ones_is_sufficient() -> None:
    broken: list[Any] = [None, "x", {}, sign(sig="?"), sign(sig=7), sign(key_id=[]), sign(key_id="unknown"), sign()]
    assert authenticate(entry(*broken)) is RoundAuthentication.AUTHENTICATED


NOT_VALID: dict[str, Callable[[], Any]] = {
    "no object": lambda: ["x"],
    "another key": lambda: entry(sign(OTHER_KEY)),
    "an unknown key": lambda: entry(sign(key_id="two")),
    "another algorithm": lambda: entry(sign(alg="ed448")),
    "another round": lambda: entry(sign(message=MESSAGE.replace(ROUND_ID, bytes(32)))),
    "another authority key": lambda: entry(ea_pk=base64.b64encode(bytes(32)).decode()),
    "a short authority key": lambda: entry(ea_pk=base64.b64encode(bytes(31)).decode()),
    "no authority key": lambda: entry(ea_pk=None),
    "version 1": lambda: entry(sign(message=EA_PK)),
    "a short signature": lambda: entry(sign(sig=base64.b64encode(KEY.sign(MESSAGE)[:63]).decode())),
    "signatures that are no list": lambda: entry(signatures={}),
    "no signature": lambda: entry(signatures=[]),
}


@pytest.mark.parametrize("case", NOT_VALID)
def test_authenticate_without_valid_signature(case: str) -> None:
    assert authenticate(NOT_VALID[case]()) is RoundAuthentication.NO_VALID_SIGNATURE


@pytest.mark.parametrize("version", [None, 1, 3, 2.0, "2", [2]])
def test_authenticate_other_version_is_unsupported(version: Any) -> None:
    assert authenticate(entry(auth_version=version)) is RoundAuthentication.UNSUPPORTED_VERSION


def test_authenticate_without_or_with_another_layout_has_no_valid_signature() -> None:
    other = encode_layout({"pir_depth": 19, "tier0_layers": 12, "tier1_layers": 7, "poly_len": 4097})
    assert authenticate(entry()) is RoundAuthentication.AUTHENTICATED
    for layout in (None, other):
        assert authenticate(entry(), layout) is RoundAuthentication.NO_VALID_SIGNATURE


def test_authenticate_omits_names_that_are_not_round_ids() -> None:
    names = (ROUND_ID.hex().upper(), ROUND_ID.hex()[1:], f"{ROUND_ID.hex()}\n", "", "é" * 64)
    assert authenticate_rounds(dict.fromkeys(names, entry()), LAYOUT, KEYS) == {}


# What is signed

ENTRY = {
    "round_id": ROUND_ID.hex(),
    "ea_pk": base64.b64encode(EA_PK).decode(),
    "auth_version": 2,
    "pir_layout": {"poly_len": 4096, "pir_depth": 19, "tier1_layers": 7, "tier0_layers": 12},
}


async def test_manager_gets_the_message_that_wallets_verify(stack: AdminStack) -> None:
    response = await stack.client.post("/sign-config-entry", json={**ENTRY, "signatures": []})
    assert response.status_code == 200
    message = base64.b64decode(response.json()["canonical_payload_b64"])
    assert message == MESSAGE
    assert response.json() == {
        "canonical_payload_b64": base64.b64encode(MESSAGE).decode(),
        "signed_payload_hash": sha256(MESSAGE).hexdigest(),
        "auth_version": 2,
    }
    assert authenticate(entry(sign(message=message))) is RoundAuthentication.AUTHENTICATED


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"round_id": ROUND_ID.hex().upper()}, "round_id"),
        ({"round_id": 7}, "round_id"),
        ({"ea_pk": base64.b64encode(EA_PK[:31]).decode()}, "ea_pk"),
        ({"auth_version": 1}, "auth_version"),
        ({"auth_version": True}, "auth_version"),
        ({"pir_layout": None}, "pir_layout"),
        ({"pir_layout": {"pir_depth": 19}}, "pir_layout"),
        ({"pir_layout": [19, 12, 7, 4096]}, "pir_layout"),
    ],
)
async def test_invalid_entry_is_400(stack: AdminStack, changed: dict[str, Any], message: str) -> None:
    response = await stack.client.post("/sign-config-entry", json={**ENTRY, **changed})
    assert response.status_code == 400
    assert message in response.json()["error"]


async def test_entry_that_is_no_object_is_400(stack: AdminStack) -> None:
    for content in (b"", b"[]", b"\xff", b'{"auth_version": NaN}'):
        assert (await stack.client.post("/sign-config-entry", content=content)).status_code == 400
