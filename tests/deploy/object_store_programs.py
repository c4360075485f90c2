"""Object stores of other makes than moto, installed from package registries into `build/object-stores`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.deploy.commands import run

DIRECTORY: Final = Path(__file__).parents[2] / "build" / "object-stores"
INSTALL_SECONDS: Final = 1800.0
"""Time limit of an installation. Compiling versitygw takes about four minutes of CPU."""
VERSITYGW_VERSION: Final = "v1.8.0"
"""The first version whose conditional writes are atomic. `go install` checks the hashes with the checksum database."""
S3RVER_VERSION: Final = "3.7.1"


def install_versitygw() -> Path:
    """Return the program of the Versity S3 Gateway, compiled if necessary."""
    directory = DIRECTORY / f"versitygw-{VERSITYGW_VERSION}"
    package = f"github.com/versity/versitygw/cmd/versitygw@{VERSITYGW_VERSION}"
    env = {"GOBIN": str(directory), "GOFLAGS": "-buildvcs=false"}
    return _install_once(directory / "versitygw", ["go", "install", package], **env)


def install_s3rver() -> Path:
    """Return the program of s3rver, which has no conditional writes."""
    directory = DIRECTORY / f"s3rver-{S3RVER_VERSION}"
    command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(directory), f"s3rver@{S3RVER_VERSION}"]
    return _install_once(directory / "node_modules" / ".bin" / "s3rver", command)


def versitygw_command(program: Path, *, versions: bool = False) -> tuple[str, ...]:
    """Return the command of a server for `ObjectStoreProcess`."""
    versioning = ("--versioning-dir", "{data}-versions") if versions else ()
    return (str(program), "--port", "127.0.0.1:{port}", "--quiet", "posix", *versioning, "{data}")


def _install_once(program: Path, command: Sequence[str], **env: str) -> Path:
    """Install a program with a command unless it exists; one process at a time. Returns the program."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            run(command, {**os.environ, **env}, timeout=INSTALL_SECONDS)
        assert program.exists()
    return program
