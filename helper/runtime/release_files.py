"""The files of a release: their signed list, and the installed files compared with it.

`make release` writes `release.json`, the SHA-256 of every installed file. `SHA256SUMS` has the hash of `release.json`,
and `SHA256SUMS.sig` is its signature by `ssh-keygen -Y sign`. The keys that may sign are in an allowed signers file
(ssh-keygen(1)), which comes from the operator and not from the release.

This detects a wrong, mixed or damaged installation. It does not protect against a user who can write the installed
files, because that user can also replace this module.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Final

import orjson

from helper.core.json_records import fact
from helper.core.text_forms import clean_text
from helper.errors import ReleaseError

MANIFEST_NAME: Final = "release.json"
SUMS_NAME: Final = "SHA256SUMS"
SIGNATURE_NAME: Final = "SHA256SUMS.sig"
SIGNATURE_NAMESPACE: Final = "svote-helper-release"
"""Namespace of the signature. A signature that the same key made for another purpose is not valid here."""
MANIFEST_SCHEMA: Final = 1
SSH_KEYGEN_SECONDS: Final = 10.0
_INSTALLER_SUFFIX: Final = ".dist-info"
_READ_AGAIN: Final = "Copy the files of one release again: release.json, SHA256SUMS and SHA256SUMS.sig."


@dataclass(frozen=True, slots=True)
class Release:
    """A release whose list of files was read.

    Attributes:
        commit: git commit from which it was built.
        files: SHA-256 (hex) of each installed file, by its path relative to the directory of the packages.
        signer: principal whose key signed it, None if the signature was not checked.
    """

    version: str
    commit: str
    files: Mapping[str, str]
    signer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFiles:
    """Comparison of the installed files with a release. All paths are relative to the directory of the packages."""

    matching: int = fact("Number of installed files that match.")
    changed: Sequence[str] = fact("Installed files with different content.")
    missing: Sequence[str] = fact("Files of the release that are not installed.")
    unlisted: Sequence[str] = fact("Installed files that are not part of the release. Python might import them.")

    @property
    def is_equal(self) -> bool:
        """Whether exactly the files of the release are installed."""
        return not (self.changed or self.missing or self.unlisted)


def read_release(manifest: Path, allowed_signers: Path | None) -> Release:
    """Read the list of files of a release, and check it against `SHA256SUMS` and its signature in the same directory.

    Args:
        allowed_signers: file with the keys that may sign, None to accept a release without checking its signature.

    Raises:
        ReleaseError: a file is missing or invalid, a hash differs, or no allowed key has signed the release.
    """
    content = _read(manifest)
    sums_path = manifest.with_name(SUMS_NAME)
    sums = _read(sums_path)
    signer = None
    if allowed_signers is not None:
        signer = _verify_signature(sums, manifest.with_name(SIGNATURE_NAME), allowed_signers)
    if f"{sha256(content).hexdigest()}  {MANIFEST_NAME}".encode() not in sums.splitlines():
        raise ReleaseError(f"{manifest} does not match the hash in {sums_path}", advice=_READ_AGAIN)
    try:
        value = orjson.loads(content)
        if value["schema"] != MANIFEST_SCHEMA:
            raise ValueError(f"schema {value['schema']} is unknown to this version")
        files = {_refuse_outside(str(path)): str(digest) for path, digest in value["files"].items()}
        return Release(clean_text(str(value["version"])), clean_text(str(value["commit"])), files, signer)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ReleaseError(f"{manifest} is not a list of the files of a release: {error!r}") from error


def _refuse_outside(path: str) -> str:
    """Return a path; raise ValueError if it can be outside the directory."""
    if ".." in Path(path).parts or Path(path).is_absolute() or not path.isprintable():
        raise ValueError("a path is outside the directory, or not printable")
    return path


def packages_directory() -> Path:
    """Return the directory that contains the packages of this installation."""
    return Path(__file__).resolve().parents[2]


def compare_installed(release: Release, directory: Path) -> InstalledFiles:
    """Compare the files in the directory of the packages with a release.

    Compiled modules (`__pycache__`) and the records of the installer are not part of a release and are ignored.
    """
    digests = {path: hash_file(directory / path) for path in release.files}
    folders = {path.partition("/")[0] for path in release.files if "/" in path}
    installed = {
        str(file.relative_to(directory))
        for folder in folders
        if not folder.endswith(_INSTALLER_SUFFIX)
        for file in (directory / folder).rglob("*")
        if not file.is_dir() and not (file.suffix == ".pyc" and file.parent.name == "__pycache__")
    }
    changed = [path for path, digest in digests.items() if digest not in (None, release.files[path])]
    missing = [path for path, digest in digests.items() if digest is None]
    return InstalledFiles(
        matching=len(digests) - len(changed) - len(missing),
        changed=tuple(sorted(changed)),
        missing=tuple(sorted(missing)),
        unlisted=tuple(sorted(installed - release.files.keys())),
    )


def check_native_module(release: Release, path: Path) -> None:
    """Check the file from which this process loaded the native module, and from which provers load it.

    Raises:
        ReleaseError: it does not match the release.
    """
    path, directory = path.resolve(), packages_directory()
    name = str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)
    digest = release.files.get(name)
    if digest is None or hash_file(path) != digest:
        raise ReleaseError(
            f"the native module {path} does not match the signed release",
            advice="Install the wheel of the release again, and set [prover] release_manifest to its release.json. "
            "`svote-helper version --verify` lists all files that differ.",
        )


def _verify_signature(content: bytes, signature: Path, allowed_signers: Path) -> str:
    """Return the principal that signed `content`. Raises ReleaseError if no allowed key has."""
    _read(signature)
    _read(allowed_signers)
    found = _ssh_keygen("find-principals", "-f", str(allowed_signers), "-s", str(signature))
    for principal in found.stdout.decode(errors="replace").splitlines():
        arguments = ("-f", str(allowed_signers), "-I", principal, "-n", SIGNATURE_NAMESPACE, "-s", str(signature))
        if not _ssh_keygen("verify", *arguments, content=content).returncode:
            return principal
    raise ReleaseError(
        f"{signature} is not a signature of {SUMS_NAME} by a key in {allowed_signers}",
        advice="Compare the key in the allowed signers file with the key that the publisher announces. "
        "Do not use files whose signature is not valid.",
    )


def _ssh_keygen(action: str, *arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(  # noqa: S603 - the arguments are paths from the settings, without a shell
            ["ssh-keygen", "-Y", action, *arguments],  # noqa: S607 - its location depends on the system
            input=content,
            capture_output=True,
            check=False,
            timeout=SSH_KEYGEN_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(
            f"ssh-keygen cannot check the signature: {error}", advice="Install the OpenSSH client (8.2 or newer)."
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReleaseError(f"{path} cannot be read: {error.strerror}", advice=_READ_AGAIN) from error


def hash_file(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it does not exist or cannot be read."""
    try:
        with path.open("rb") as file:
            return file_digest(file, sha256).hexdigest()
    except OSError:
        return None
