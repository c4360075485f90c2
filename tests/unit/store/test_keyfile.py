"""The file with the keys of a shared database."""

from __future__ import annotations

from pathlib import Path

import pytest

from helper.errors import StoreError
from helper.store.postgres.keyring import Keyring, read_keyring

FIRST, SECOND = "ab" * 32, "01" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    made.touch(0o600)
    return made


def test_the_first_key_seals_and_all_open(file: Path) -> None:
    file.write_text(f"# this week's\n{FIRST}\n\n  {SECOND}  \n")
    seals = read_keyring(file)
    assert Keyring([bytes.fromhex(FIRST)]).open(seals.seal(b"x")) == b"x"
    assert seals.open(Keyring([bytes.fromhex(SECOND)]).seal(b"y")) == b"y"


@pytest.mark.parametrize("bad", ["", "\n# none\n", FIRST[:-2], FIRST + "00", "zz" * 32, "ab " * 32, "\udcff"])
def test_anything_else_is_refused_and_not_quoted(file: Path, bad: str) -> None:
    file.write_bytes(bad.encode("utf-8", "surrogateescape"))
    with pytest.raises(StoreError, match=r"no key|not a key|not text") as told:
        read_keyring(file)
    assert not bad.strip() or bad.strip() not in str(told.value)


def test_a_file_that_others_may_read_is_refused(file: Path) -> None:
    file.write_text(FIRST)
    file.chmod(0o640)
    with pytest.raises(StoreError, match=r"users other .* \(mode 0640\)"):
        read_keyring(file)


def test_a_file_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        read_keyring(tmp_path / "none")


def test_a_file_of_somebody_else_is_to_be_handed_over_and_not_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match="cannot be read: Permission denied") as caught:
        read_keyring(tmp_path / "key")
    assert "openssl" not in caught.value.advice, "shares that wait are lost with the old key"
    assert "chown" in caught.value.advice
