"""The file with the keys of a shared database."""

from __future__ import annotations

from pathlib import Path

import pytest

from helper.errors import StoreError
from helper.store.keyring import Keyring, read_keyring

FIRST, SECOND = "ab" * 32, "01" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    return keys


def test_first_key_seals_and_all_keys_open(key_file: Path) -> None:
    key_file.write_text(f"# this week's\n{FIRST}\n\n  {SECOND}  \n")
    keyring = read_keyring(key_file)
    assert Keyring([bytes.fromhex(FIRST)]).decrypt(keyring.encrypt(b"x")) == b"x"
    assert keyring.decrypt(Keyring([bytes.fromhex(SECOND)]).encrypt(b"y")) == b"y"


@pytest.mark.parametrize("bad", ["", "\n# none\n", FIRST[:-2], FIRST + "00", "zz" * 32, "ab " * 32, "\udcff"])
def test_invalid_key_file_is_refused_without_quoting_it(key_file: Path, bad: str) -> None:
    key_file.write_bytes(bad.encode("utf-8", "surrogateescape"))
    with pytest.raises(StoreError, match=r"no key|not a key|not text") as refused:
        read_keyring(key_file)
    assert not bad.strip() or bad.strip() not in str(refused.value)


def test_key_file_readable_by_others_is_refused(key_file: Path) -> None:
    key_file.write_text(FIRST)
    key_file.chmod(0o640)
    with pytest.raises(StoreError, match=r"users other .* \(mode 0640\)"):
        read_keyring(key_file)


def test_systemd_credential_may_have_mask_of_access_control_list(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file.write_text(FIRST)
    key_file.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "other"))
    with pytest.raises(StoreError, match=r"mode 0440"):
        read_keyring(key_file)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_keyring(key_file).key_ids == Keyring([bytes.fromhex(FIRST)]).key_ids


def test_missing_key_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        read_keyring(tmp_path / "none")


def test_key_file_of_other_owner_advises_chown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match="cannot be read: Permission denied") as caught:
        read_keyring(tmp_path / "key")
    assert "openssl" not in caught.value.advice, "pending shares are lost without the old key"
    assert "chown" in caught.value.advice
