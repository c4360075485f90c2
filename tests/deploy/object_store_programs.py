"""Object stores of other makes than moto, installed from package registries into `build/object-stores`."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parents[2] / "build" / "object-stores"
INSTALL_SECONDS: Final = 1800.0
"""Time limit of an installation. Compiling versitygw takes about four minutes of CPU."""
VERSITYGW_VERSION: Final = "v1.8.0"
"""The first version whose conditional writes are atomic. `go install` checks the hashes with the checksum database."""
S3RVER_VERSION: Final = "3.7.1"


def install_versitygw(version: str = VERSITYGW_VERSION) -> Path:
    """Return the program of the Versity S3 Gateway, compiled if necessary."""
    directory = DIRECTORY / f"versitygw-{version}"
    program = directory / "versitygw"

    def install() -> None:
        package = f"github.com/versity/versitygw/cmd/versitygw@{version}"
        _run("go", "install", package, GOBIN=str(directory), GOFLAGS="-buildvcs=false")

    _install_once(program, install)
    return program


def install_s3rver() -> Path:
    """Return the program of s3rver, which has no conditional writes."""
    directory = DIRECTORY / f"s3rver-{S3RVER_VERSION}"
    program = directory / "node_modules" / ".bin" / "s3rver"
    package = f"s3rver@{S3RVER_VERSION}"
    _install_once(
        program, lambda: _run("npm", "install", "--no-fund", "--no-audit", "--prefix", str(directory), package)
    )
    return program


def versitygw_command(program: Path, *, versions: bool = False) -> tuple[str, ...]:
    """Return the command of a server for `ObjectStoreProcess`."""
    versioning = ("--versioning-dir", "{data}-versions") if versions else ()
    return (str(program), "--port", "127.0.0.1:{port}", "--quiet", "posix", *versioning, "{data}")


def _install_once(program: Path, install: Callable[[], None]) -> None:
    """Install a program unless it exists; one process at a time."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            install()
        assert program.exists()


def _run(*command: str, **env: str) -> None:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS, env={**os.environ, **env}
    )
    assert result.returncode == 0, f"{' '.join(command)}:\n{result.stderr[-4000:]}"
