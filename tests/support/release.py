"""A small release in a directory: packages, their list and its signature by a test key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from helper.runtime.release_files import MANIFEST_NAME, MANIFEST_SCHEMA, SIGNATURE_NAMESPACE, SUMS_NAME

ROOT = Path(__file__).parents[2]
SIGNER = "release@example.org"
COMMIT = "5d2a" * 10


def create_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True)
    return path


def write_allowed_signers(path: Path, key: Path, *, options: str = "") -> Path:
    public = key.with_suffix(".pub").read_text()
    path.write_text(f"{SIGNER} {options}{' ' if options else ''}{public}")
    return path


def sign_sums(directory: Path, key: Path, *, namespace: str = SIGNATURE_NAMESPACE) -> None:
    (directory / f"{SUMS_NAME}.sig").unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", namespace, str(directory / SUMS_NAME)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def write_release(directory: Path, packages: Path, names: list[str]) -> Path:
    """Write the list of files of a release, without a signature. Returns its path."""
    directory.mkdir(exist_ok=True)
    files = {name: sha256((packages / name).read_bytes()).hexdigest() for name in names}
    manifest = directory / MANIFEST_NAME
    manifest.write_text(json.dumps({"schema": MANIFEST_SCHEMA, "version": "1.0.0", "commit": COMMIT, "files": files}))
    write_sums(directory)
    return manifest


def write_sums(directory: Path) -> None:
    digest = sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
    (directory / SUMS_NAME).write_text(f"{digest}  {MANIFEST_NAME}\n")


@dataclass(frozen=True)
class SignedRelease:
    """A signed release."""

    manifest: Path
    signers: Path
    key: Path


def create_signed_release(directory: Path, packages: Path, names: list[str]) -> SignedRelease:
    key = create_key(directory / "key")
    manifest = write_release(directory / "release", packages, names)
    sign_sums(manifest.parent, key)
    return SignedRelease(manifest, write_allowed_signers(directory / "allowed_signers", key), key)


def build_wheel(dist: Path, source: Path = ROOT, **env: str) -> Path:
    """Run `make wheel` in a source tree with the environment of the tests. Returns the directory with its output."""
    venv = Path(sys.prefix)
    command = ["make", f"--old-file={venv}/.deps", "wheel", f"VENV={venv}", f"DIST={dist}"]
    completed = subprocess.run(
        command, cwd=source, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return dist


def sign_release(dist: Path, signers: Path) -> None:
    """Add to a wheel what `make release` adds, and allow the key that signed it.

    The wheel is not that of `make release`, which takes minutes.
    """
    signers.mkdir()
    key = create_key(signers / "key")
    describe = [sys.executable, "-m", "scripts.release", "--describe", "--dist", str(dist), "--key", str(key)]
    subprocess.run(describe, cwd=ROOT, check=True, capture_output=True)
    write_allowed_signers(signers / "allowed_signers", key)
