"""ADR-036 signatures, and private keys exported by the key tool."""

from __future__ import annotations

import base64
import json
from typing import Any

import ecdsa
import pytest

from admin import account_keys
from admin.account_keys import CURVE_ORDER, KeyArmorError, PassphraseError, open_key_armor
from admin.registration_request import SignatureRefusedError, validator_address
from tests.conftest import RECORDED

ENTRIES = json.loads((RECORDED / "adr036.json").read_text())


def decode_entry(entry: dict[str, str]) -> dict[str, Any]:
    keys = {name: base64.b64decode(entry[name]) for name in ("pub_key", "signature")}
    return {"data": entry["data"].encode(), "signer": entry["signer"], **keys}


FIRST = decode_entry(ENTRIES[0])


def verify(entry: dict[str, Any] = FIRST, **changed: Any) -> None:
    account_keys.verify_signature(**{**entry, **changed})


@pytest.mark.rule("R16")
@pytest.mark.parametrize("entry", ENTRIES)
def test_verify_accepts_recorded_key_tool_signature(entry: dict[str, str]) -> None:
    verify(decode_entry(entry))


@pytest.mark.rule("R16")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("what", ["data", "signer", "pub_key", "signature"])
def test_verify_with_any_byte_changed_fails(entry: dict[str, str], what: str) -> None:
    fields, is_text = decode_entry(entry), what == "signer"
    value = fields[what].encode() if is_text else fields[what]
    for at in range(len(value)):
        changed = bytearray(value)
        changed[at] ^= 1
        with pytest.raises(SignatureRefusedError):
            verify(fields, **{what: changed.decode("latin-1") if is_text else bytes(changed)})


def test_verify_signature_with_high_s_is_refused() -> None:
    signature = FIRST["signature"]
    upper = CURVE_ORDER - int.from_bytes(signature[32:], "big")
    with pytest.raises(SignatureRefusedError, match="upper half"):
        verify(signature=signature[:32] + upper.to_bytes(32, "big"))


@pytest.mark.parametrize(
    "signature", [b"", bytes(63), bytes(65), bytes(64), b"\xff" * 32 + bytes(32), CURVE_ORDER.to_bytes(32, "big") * 2]
)
def test_verify_malformed_signature_is_refused(signature: bytes) -> None:
    with pytest.raises(SignatureRefusedError):
        verify(signature=signature)


@pytest.mark.parametrize(
    "pub_key",
    [
        b"",
        bytes(33),
        b"\x02" + bytes(32),
        b"\x02" + b"\xff" * 32,
        b"\x02" + (5).to_bytes(32, "big"),
        b"\x04" + bytes(32),
        b"\x02" * 65,
    ],
)
def test_verify_malformed_key_is_refused(pub_key: bytes) -> None:
    with pytest.raises(SignatureRefusedError, match="pub_key"):
        verify(pub_key=pub_key)


def test_verify_requires_address_of_key_and_chain() -> None:
    with pytest.raises(SignatureRefusedError, match="begin with sv1"):
        verify(signer=account_keys.address_of(FIRST["pub_key"], "cosmos"))
    other_signer, *_ = account_keys.sign_data(b"", b"\x07" * 32)
    with pytest.raises(SignatureRefusedError, match="not the key"):
        verify(signer=other_signer)
    with pytest.raises(SignatureRefusedError):
        verify(signer=FIRST["signer"].upper())


def test_sign_equals_wallet_signature() -> None:
    signer, pub_key, signature = account_keys.sign_data(b"text", b"\x07" * 32)
    account_keys.verify_signature(b"text", signer=signer, pub_key=pub_key, signature=signature)
    assert account_keys.sign_data(b"text", b"\x07" * 32) == (signer, pub_key, signature)
    for wrong in (b"", bytes(32), CURVE_ORDER.to_bytes(32, "big"), bytes(33)):
        with pytest.raises(ValueError, match="private key"):
            account_keys.sign_data(b"text", wrong)


def test_sign_with_the_ecdsa_package_disabled_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the private key reached the ecdsa package")

    for name in ("from_string", "from_secret_exponent", "sign_digest_deterministic", "sign_digest"):
        monkeypatch.setattr(ecdsa.SigningKey, name, refuse)
    signer, pub_key, signature = account_keys.sign_data(b"text", b"\x07" * 32)
    account_keys.verify_signature(b"text", signer=signer, pub_key=pub_key, signature=signature)


def test_validator_address_differs_only_in_prefix() -> None:
    account = "sv1p2amg2qs5ze7h6hz85vqzwwg300sdunsvremn3"
    assert validator_address(account) == "svvaloper1p2amg2qs5ze7h6hz85vqzwwg300sdunsy3l6em"
    for wrong in ("", "sv1", account[:-1], account + "q", account.upper(), "cosmos1" + account[3:]):
        with pytest.raises(ValueError, match="address"):
            validator_address(wrong)


KEY = bytes(range(1, 33))
PASSPHRASE = "correct horse"
ARGON2_ARMOR = """-----BEGIN TENDERMINT PRIVATE KEY-----
kdf: argon2
salt: 92F870A017A0CE7FE3DA75E134843BF3
type: secp256k1

U5lKC4AzGGyHLXq2uEpVtXACE//McYgu9l1utg2FgyXNcO6/Dsj5lwIcN3zXP5f2
tQ5qlps=
=oXaP
-----END TENDERMINT PRIVATE KEY-----
"""
BCRYPT_ARMOR = """-----BEGIN TENDERMINT PRIVATE KEY-----
kdf: bcrypt
type: secp256k1
salt: 0102030405060708090A0B0C0D0E0F10

jMlOzVrwBiRTigc2vr6n/X93KPQTlDfAVey56gKEEcOH6GbnxZE//evSmnNis2E9
71GEyNqVCnRw3Tb9BaltiSctORMDVYg7KdhPchc=
=mMIw
-----END TENDERMINT PRIVATE KEY-----
"""


@pytest.mark.parametrize("exported", [ARGON2_ARMOR, BCRYPT_ARMOR], ids=["argon2", "bcrypt"])
def test_open_armored_key_returns_key(exported: str) -> None:
    assert open_key_armor(exported, PASSPHRASE) == KEY
    assert open_key_armor("\n" + exported.replace("\n", "\r\n"), PASSPHRASE) == KEY


@pytest.mark.parametrize("exported", [ARGON2_ARMOR, BCRYPT_ARMOR], ids=["argon2", "bcrypt"])
def test_open_armored_key_with_wrong_passphrase_is_refused(exported: str) -> None:
    for passphrase in ("", "Correct horse", PASSPHRASE + " "):
        with pytest.raises(PassphraseError):
            open_key_armor(exported, passphrase)


def test_open_armored_key_with_changed_letter_is_refused() -> None:
    with pytest.raises(PassphraseError):
        open_key_armor(ARGON2_ARMOR.replace("U5lK", "U5lL"), PASSPHRASE)
    with pytest.raises(PassphraseError):
        open_key_armor(ARGON2_ARMOR.replace("salt: 92", "salt: 93"), PASSPHRASE)


@pytest.mark.parametrize(
    ("exported", "error"),
    [
        (ARGON2_ARMOR.replace("argon2", "scrypt"), "function: scrypt"),
        (ARGON2_ARMOR.replace("kdf: argon2\n", ""), "function: None"),
        (ARGON2_ARMOR.replace("secp256k1", "ed25519"), "of type ed25519"),
        (ARGON2_ARMOR.replace("salt: 92", "salt: zz"), "damaged"),
        (ARGON2_ARMOR.replace("salt: 92F870A017A0CE7FE3DA75E134843BF3", "salt: 92"), "too short"),
        (ARGON2_ARMOR.replace("tQ5qlps=", "tQ5qlp="), "damaged"),
        (ARGON2_ARMOR.replace("TENDERMINT PRIVATE", "RSA PRIVATE"), "not a private key"),
        (ARGON2_ARMOR[:150], "not a private key"),
        ("", "not a private key"),
    ],
)
def test_open_malformed_armor_is_distinguished_from_wrong_passphrase(exported: str, error: str) -> None:
    with pytest.raises(KeyArmorError, match=error) as refused:
        open_key_armor(exported, PASSPHRASE)
    assert not isinstance(refused.value, PassphraseError)
