"""Shared parts of the tests in a booted system: the Debian root, the wheel, the packages it needs, an installation.

`make test ARGS='tests/deploy'` installs the Debian packages that the tests need. Without root or one of the programs,
tests are skipped, or fail if SVOTE_REQUIRE_DEPLOY is set (`prerequisites`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helper.store.sqlite.schema import latest_version
from tests.deploy.debian_root import BUILD, debian_root
from tests.deploy.installation import (
    CONFIGURE_BLOCKS,
    DIST,
    INSTALL_BLOCKS,
    WHEELS,
    Installation,
    copy_dist,
    download_wheels,
    prepare_machine,
)
from tests.deploy.machine import BootedMachine
from tests.deploy.prerequisites import require_programs, require_root
from tests.support.release import build_wheel, sign_release

os.environ.pop("SSL_CERT_DIR", None)  # these tests download

PROGRAMS = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container"} | dict.fromkeys(
    ("nsenter", "setpriv"), "util-linux"
)
"""Programs and their Debian packages."""
MIGRATIONS = "helper/store/sqlite/migrations"


@pytest.fixture(scope="session")
def debian() -> Path:
    """A Debian root directory, which nobody writes to."""
    require_root("mount file systems and boot a container")
    require_programs(PROGRAMS)
    return debian_root()


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of `make wheel`, described and signed as by `make release`, with `signers` next to it."""
    directory = tmp_path_factory.mktemp("wheel") / "dist"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_wheel(directory)
    sign_release(directory, directory.parent / "signers")
    return directory


@pytest.fixture(scope="session")
def newer_dist(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same release with one more version of the schema, signed with another key."""
    directory = Path(shutil.copytree(dist, tmp_path_factory.mktemp("newer") / "newer"))
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(f"{MIGRATIONS}/{latest_version() + 1:04}_more.sql", "CREATE TABLE more (n INTEGER) STRICT;\n")
    sign_release(directory, directory.parent / "signers")
    return directory


@pytest.fixture(scope="session")
def wheels(dist: Path) -> Path:
    """Directory with the wheels of the pinned requirements, for the Python of the Debian root."""
    return download_wheels(dist / "requirements.txt")


@pytest.fixture(scope="session")
def installed(
    debian: Path, dist: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, ...]]:
    """The layers of a root in which the page has been run from the installation to the list of files."""
    copy = copy_dist(dist, tmp_path_factory.mktemp("installed"))
    with BootedMachine([debian], {str(DIST): copy, WHEELS: wheels}) as machine:
        prepare_machine(machine, dist.parent / "signers")
        Installation(machine, copy).run_blocks(*INSTALL_BLOCKS)
        machine.shut_down()
        yield machine.upper, debian


@pytest.fixture
def blank(debian: Path, dist: Path, wheels: Path, tmp_path: Path) -> Iterator[Installation]:
    """A system without an installation."""
    copy = copy_dist(dist, tmp_path)
    with BootedMachine([debian], {str(DIST): copy, WHEELS: wheels}) as machine:
        prepare_machine(machine, dist.parent / "signers")
        yield Installation(machine, copy)


@contextmanager
def run_unit(installed: tuple[Path, ...], dist: Path, wheels: Path, directory: Path) -> Iterator[Installation]:
    copy = copy_dist(dist, directory)
    with BootedMachine(installed, {str(DIST): copy, WHEELS: wheels}) as machine:
        installation = Installation(machine, copy)
        installation.start_chain()
        installation.run_blocks(*CONFIGURE_BLOCKS)
        installation.install_unit()
        yield installation


@pytest.fixture
def running(installed: tuple[Path, ...], dist: Path, wheels: Path, tmp_path: Path) -> Iterator[Installation]:
    """A system in which the unit runs, as the page shows, with the practice chain."""
    with run_unit(installed, dist, wheels, tmp_path) as installation:
        yield installation


@pytest.fixture(scope="session")
def shared(
    installed: tuple[Path, ...], dist: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Like `running`, for tests that leave the system as they find it."""
    with run_unit(installed, dist, wheels, tmp_path_factory.mktemp("shared")) as installation:
        yield installation
