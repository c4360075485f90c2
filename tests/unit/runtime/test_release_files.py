"""Signed releases: signature, list of files, comparison with the installed files, and the native module."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helper.errors import ReleaseError
from helper.runtime import release_files
from helper.runtime.release_files import check_native_module, compare_installed, read_release
from tests.support.release import (
    COMMIT,
    SIGNER,
    SignedRelease,
    create_key,
    create_signed_release,
    sign_sums,
    write_allowed_signers,
    write_sums,
)

NATIVE = "proofs/_native.abi3.so"
FILES = {
    "helper/__init__.py": b"",
    "helper/core/share.py": b"SHARES = 16\n",
    "proofs/__init__.py": b"",
    NATIVE: b"\x7fELF" + bytes(100),
    "svote_helper-1.0.0.dist-info/METADATA": b"Name: svote-helper\n",
}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A directory of installed packages, as an installer leaves it."""
    directory = tmp_path / "site-packages"
    installer_files = {
        "svote_helper-1.0.0.dist-info/RECORD": b"helper/__init__.py,,\n",
        "svote_helper-1.0.0.dist-info/INSTALLER": b"pip\n",
        "helper/__pycache__/__init__.cpython-311.pyc": b"compiled",
        "another_package/module.py": b"",
    }
    for name, content in {**FILES, **installer_files}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture
def signed(tmp_path: Path, packages: Path) -> SignedRelease:
    return create_signed_release(tmp_path, packages, list(FILES))


def test_signed_release_with_its_files_matches(signed: SignedRelease, packages: Path) -> None:
    release = read_release(signed.manifest, signed.signers)
    assert (release.version, release.commit, release.signer) == ("1.0.0", COMMIT, SIGNER)
    installed = compare_installed(release, packages)
    assert installed.is_equal
    assert installed.matching == len(FILES)


def test_compare_names_changed_missing_and_unlisted_files(signed: SignedRelease, packages: Path) -> None:
    (packages / "helper/core/share.py").write_bytes(b"SHARES = 17\n")
    (packages / "proofs/__init__.py").unlink()
    (packages / "proofs/_native.cpython-311-x86_64-linux-gnu.so").write_bytes(b"loaded first")
    (packages / "helper/planted.pyc").write_bytes(b"a module without source")
    installed = compare_installed(read_release(signed.manifest, None), packages)
    assert not installed.is_equal
    assert installed.matching == len(FILES) - 2
    assert installed.changed == ("helper/core/share.py",)
    assert installed.missing == ("proofs/__init__.py",)
    assert installed.unlisted == ("helper/planted.pyc", "proofs/_native.cpython-311-x86_64-linux-gnu.so")


def sign_with_another_key(signed: SignedRelease) -> None:
    sign_sums(signed.manifest.parent, create_key(signed.key.with_name("other")))


def sign_for_another_purpose(signed: SignedRelease) -> None:
    sign_sums(signed.manifest.parent, signed.key, namespace="git")


def change_after_signing(signed: SignedRelease) -> None:
    change_list(signed)
    write_sums(signed.manifest.parent)


def change_list(signed: SignedRelease) -> None:
    content = json.loads(signed.manifest.read_text())
    content["files"][NATIVE] = "00" * 32
    signed.manifest.write_text(json.dumps(content))


def expire_key(signed: SignedRelease) -> None:
    write_allowed_signers(signed.signers, signed.key, options='valid-before="20200101"')


def forbid_namespace(signed: SignedRelease) -> None:
    write_allowed_signers(signed.signers, signed.key, options='namespaces="git"')


def remove_signature(signed: SignedRelease) -> None:
    signed.manifest.with_name("SHA256SUMS.sig").unlink()


def remove_signers(signed: SignedRelease) -> None:
    signed.signers.unlink()


def use_newer_schema(signed: SignedRelease) -> None:
    content = json.loads(signed.manifest.read_text())
    signed.manifest.write_text(json.dumps({**content, "schema": 2}))
    write_sums(signed.manifest.parent)
    sign_sums(signed.manifest.parent, signed.key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sign_with_another_key, "not a signature of SHA256SUMS by a key in"),
        (sign_for_another_purpose, "not a signature of SHA256SUMS by a key in"),
        (change_after_signing, "not a signature of SHA256SUMS by a key in"),
        (expire_key, "not a signature of SHA256SUMS by a key in"),
        (forbid_namespace, "not a signature of SHA256SUMS by a key in"),
        (change_list, "does not match the hash in"),
        (remove_signature, "SHA256SUMS.sig cannot be read: No such file"),
        (remove_signers, "allowed_signers cannot be read: No such file"),
        (use_newer_schema, "schema 2 is unknown to this version"),
    ],
)
def test_release_that_is_not_verified_is_refused(
    signed: SignedRelease, change: Callable[[SignedRelease], None], message: str
) -> None:
    change(signed)
    with pytest.raises(ReleaseError, match=message):
        read_release(signed.manifest, signed.signers)


def test_release_without_ssh_keygen_is_refused(signed: SignedRelease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(signed.key.parent))
    with pytest.raises(ReleaseError, match="ssh-keygen cannot check the signature"):
        read_release(signed.manifest, signed.signers)


def test_native_module_check_refuses_any_other_file(
    signed: SignedRelease, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_files, "packages_directory", lambda: packages)
    release = read_release(signed.manifest, signed.signers)
    check_native_module(release, packages / NATIVE)
    other = packages / "proofs/_native.cpython-311-x86_64-linux-gnu.so"
    shutil.copy(packages / NATIVE, other)
    for path in (other, Path("/elsewhere/_native.so")):
        with pytest.raises(ReleaseError, match="does not match the signed release"):
            check_native_module(release, path)
    (packages / NATIVE).write_bytes(b"replaced while the service runs")
    with pytest.raises(ReleaseError, match="does not match the signed release"):
        check_native_module(release, packages / NATIVE)
