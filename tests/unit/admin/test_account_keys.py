"""ADR-036 signatures, and private keys exported by the key tool."""

from __future__ import annotations

import base64
import json

import ecdsa
import pytest

from admin import account_keys
from admin.account_keys import CURVE_ORDER, KeyArmorError, PassphraseError, open_key_armor
from admin.registration_request import SignatureRefusedError, validator_address
from tests.conftest import RECORDED

ENTRIES = json.loads((RECORDED / "adr036.json").read_text())


def decode_entry(entry: dict[str, str]) -> tuple[bytes, str, bytes, bytes]:
    return (
        entry["data"].encode(),
        entry["signer"],
        base64.b64decode(entry["pub_key"]),
        base64.b64decode(entry["signature"]),
    )


@pytest.mark.rule("R16")
@pytest.mark.parametrize("entry", ENTRIES)
def test_verify_accepts_recorded_key_tool_signature(entry: dict[str, str]) -> None:
    data, signer, pub_key, signature = decode_entry(entry)
    account_keys.verify_signature(data, signer=signer, pub_key=pub_key, signature=signature)


@pytest.mark.rule("R16")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("what", ["data", "signer", "pub_key", "signature"])
def test_verify_with_any_byte_changed_fails(entry: dict[str, str], what: str) -> None:
    data, signer, pub_key, signature = decode_entry(entry)
    fields: dict[str, bytes] = {"data": data, "signer": signer.encode(), "pub_key": pub_key, "signature": signature}
    for at in range(len(fields[what])):
        changed = bytearray(fields[what])
        changed[at] ^= 1
        changed_fields = {**fields, what: bytes(changed)}
        changed_signer = changed_fields["signer"].decode("latin-1")
        with pytest.raises(SignatureRefusedError):
            account_keys.verify_signature(
                changed_fields["data"],
                signer=changed_signer,
                pub_key=changed_fields["pub_key"],
                signature=changed_fields["signature"],
            )


def test_verify_signature_with_high_s_is_refused() -> None:
    data, signer, pub_key, signature = decode_entry(ENTRIES[0])
    upper = CURVE_ORDER - int.from_bytes(signature[32:], "big")
    with pytest.raises(SignatureRefusedError, match="upper half"):
        account_keys.verify_signature(
            data, signer=signer, pub_key=pub_key, signature=signature[:32] + upper.to_bytes(32, "big")
        )


@pytest.mark.parametrize(
    "signature", [b"", bytes(63), bytes(65), bytes(64), b"\xff" * 32 + bytes(32), CURVE_ORDER.to_bytes(32, "big") * 2]
)
def test_verify_malformed_signature_is_refused(signature: bytes) -> None:
    data, signer, pub_key, _ = decode_entry(ENTRIES[0])
    with pytest.raises(SignatureRefusedError):
        account_keys.verify_signature(data, signer=signer, pub_key=pub_key, signature=signature)


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
    data, signer, _, signature = decode_entry(ENTRIES[0])
    with pytest.raises(SignatureRefusedError, match="pub_key"):
        account_keys.verify_signature(data, signer=signer, pub_key=pub_key, signature=signature)


def test_verify_requires_address_of_key_and_chain() -> None:
    data, signer, pub_key, signature = decode_entry(ENTRIES[0])
    other = account_keys.address_of(pub_key, "cosmos")
    with pytest.raises(SignatureRefusedError, match="begin with sv1"):
        account_keys.verify_signature(data, signer=other, pub_key=pub_key, signature=signature)
    other_signer, *_ = account_keys.sign_data(b"", b"\x07" * 32)
    with pytest.raises(SignatureRefusedError, match="not the key"):
        account_keys.verify_signature(data, signer=other_signer, pub_key=pub_key, signature=signature)
    with pytest.raises(SignatureRefusedError):
        account_keys.verify_signature(data, signer=signer.upper(), pub_key=pub_key, signature=signature)


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
