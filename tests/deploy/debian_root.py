"""Makes a Debian root directory with debootstrap, for the tests that boot it or use it as a base image.

The directory is cached in `build/deploy/` for each list of packages. Nobody writes to it: boot an overlay of it, or
import a copy. It has the registry settings of this machine: its Debian mirror, and the options of apt and pip.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import shutil
import ssl
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.deploy.commands import run

REPO_ROOT = Path(__file__).parents[2]
BUILD = REPO_ROOT / "build" / "deploy"
SUITE = "bookworm"
PYTHON = "3.11"
"""Version of its package python3."""
GLIBC_MINOR = 36
"""Minor version of its C library, 2.36."""
DEFAULT_MIRROR = "http://deb.debian.org/debian"
PACKAGES = (
    "ca-certificates",
    "curl",
    "dbus",
    "iproute2",
    "openssh-client",
    "openssl",
    "procps",
    "python3",
    "python3-venv",
    "systemd",
    "systemd-sysv",
    "tor",
)
"""A small server: systemd, and what docs/operations.md uses."""
APT_OPTIONS = (
    "Acquire::http",
    "Acquire::https",
    "Acquire::Retries",
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
)
TIMEOUT_SECONDS = 900.0


def debian_root(packages: Iterable[str] = PACKAGES) -> Path:
    """Return the root directory with these packages; make it if it is not cached (2 minutes)."""
    names = sorted(packages)
    digest = hashlib.sha256("\n".join([SUITE, *names]).encode()).hexdigest()[:12]
    root = BUILD / f"root-{digest}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "root.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            unfinished = root.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            _run_debootstrap(unfinished, names)
            _copy_registry_settings(unfinished)
            unfinished.rename(root)
    return root


def _run_debootstrap(directory: Path, packages: list[str]) -> None:
    mirror, proxy = _configured_mirror(), _apt_option("Acquire::http::Proxy")
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", SUITE, str(directory), mirror]
    run(command, {**os.environ, **({"http_proxy": proxy} if proxy else {})}, timeout=TIMEOUT_SECONDS)
    shutil.rmtree(directory / "var/cache/apt/archives", ignore_errors=True)
    (directory / "var/cache/apt/archives/partial").mkdir(parents=True)


def _configured_mirror() -> str:
    """Return the mirror of this suite that apt of this machine uses; Debian's if it uses none."""
    command = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Identifier: Packages"]
    for line in run(command).splitlines():
        codename, _, uri = line.partition(" ")
        if codename == SUITE:
            return uri
    return DEFAULT_MIRROR


def _apt_option(name: str) -> str:
    return run(["apt-config", "shell", "value", name]).strip().removeprefix("value=").strip("'")


def _copy_registry_settings(root: Path) -> None:
    """Give the root the certificate authorities of this machine, and its network options of apt and pip."""
    options = run(["apt-config", "dump", *APT_OPTIONS])
    (root / "etc/apt/apt.conf.d/90host").write_text(options)
    settings = _pip_settings()
    certificates = (
        settings.pop("cert", None) or os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    )
    if certificates and Path(certificates).is_file():
        shutil.copyfile(certificates, root / "etc/ssl/certs/ca-certificates.crt")
    if "://" not in settings.get("find-links", ""):
        settings.pop("find-links", None)  # a directory of this machine
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (root / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]))


def _pip_settings() -> dict[str, str]:
    """Return the options of pip for all its commands, from its files and its environment variables."""
    settings: dict[str, str] = {}
    for line in run([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in ("global", ":env:"):
            settings[option] = str(ast.literal_eval(value)).replace("\n", "\n    ")
    return settings
