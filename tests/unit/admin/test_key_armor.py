"""Keys in the export format of the chain's key tool. Both were made by cosmos-sdk 0.53 from the bytes 1 to 32."""

from __future__ import annotations

import pytest

from admin.key_armor import KeyArmorError, PassphraseError, open_key_armor

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
