"""Upgrades a helper with pending shares to a version with a newer schema as the page describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helper.store.sqlite.schema import latest_version
from tests.deploy.installation import (
    CONFIGURE_BLOCKS,
    DIST,
    SERVICE,
    SHARES_PER_VOTE,
    STATE,
    WHEELS,
    Installation,
    copy_dist,
    pip_configuration,
)
from tests.deploy.machine import BootedMachine

pytestmark = pytest.mark.timeout(1200)

NEW_DIST = Path("/srv/dist-new")
SPREAD_SECONDS = 90
READ_SCHEMA = (
    f"import sqlite3; database = sqlite3.connect('file:{STATE}/queue.db?mode=ro', uri=True);"
    "print(*database.execute('PRAGMA user_version').fetchone())"
)
VALIDATOR = "validator-of-the-test"
REGISTER = (
    "umask 077; openssl rand -hex 32 > /run/validator.key;"
    f"svote-helper admin register --key-file /run/validator.key --moniker {VALIDATOR} --url https://vote.example.org"
)


@pytest.fixture
def old_and_new(
    installed: tuple[Path, ...], dist: Path, newer_dist: Path, wheels: Path, tmp_path: Path
) -> Iterator[tuple[Installation, Installation]]:
    """A system with this wheel, and the same system for commands in the directory of the newer one."""
    old_copy, new_copy = (copy_dist(source, tmp_path / source.name) for source in (dist, newer_dist))
    binds = {str(DIST): old_copy, str(NEW_DIST): new_copy, WHEELS: wheels}
    with BootedMachine(installed, binds) as machine:
        machine.write("/etc/pip.conf", pip_configuration(WHEELS))
        # The chain does not depend on the installation that is upgraded.
        machine.sh("mv /opt/svote-helper /opt/chain && rm /usr/local/bin/svote-helper")
        old = Installation(machine, old_copy)
        old.start_chain("/opt/chain/bin/python", "-m", "helper")
        old.run_blocks("install", *CONFIGURE_BLOCKS)
        old.limit_provers()
        old.run_blocks("unit")
        machine.wait_until("svote-helper healthcheck")
        yield old, Installation(machine, new_copy, inside=NEW_DIST)


def read_schema(machine: BootedMachine) -> int:
    return int(machine.run("python3", "-c", READ_SCHEMA).stdout)


def test_upgrade_with_pending_shares(old_and_new: tuple[Installation, Installation]) -> None:
    old, new = old_and_new
    machine = old.machine
    assert read_schema(machine) == latest_version()
    old.vote(old.create_round(), spread=SPREAD_SECONDS)
    machine.sh(REGISTER)
    new.run_blocks("passphrase", kinds=["backup"])
    new.run_blocks("backup", "install", "switch", kinds=["upgrade"])
    new.wait_until_ready()
    assert machine.sh("readlink -f /usr/local/bin/svote-helper").strip() == "/opt/svote-helper-2/bin/svote-helper"
    assert new.count_confirmed() < SHARES_PER_VOTE, "shares were pending during the upgrade"
    assert read_schema(machine) == latest_version() + 1
    new.wait_for_confirmed(SHARES_PER_VOTE)
    assert machine.properties(SERVICE, "NRestarts") == {"NRestarts": "0"}

    machine.run("systemctl", "stop", SERVICE)
    machine.sh("ln -sfn svote-helper-1 /opt/svote-helper")
    machine.run("systemctl", "start", SERVICE, check=False)
    assert "was written by a newer version" in new.read_journal()

    new.run_blocks("rollback", kinds=["upgrade"])
    new.wait_until_ready()
    assert read_schema(machine) == latest_version()
    new.wait_for_confirmed(SHARES_PER_VOTE)
    machine.wait_until(f"svote-helper admin pending | grep {VALIDATOR}")
    assert machine.sh("readlink -f /usr/local/bin/svote-helper").strip() == "/opt/svote-helper-1/bin/svote-helper"
