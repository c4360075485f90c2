"""Runs blocks of docs/operations.md in a booted system, and what the tests of one share: a chain, votes, requests."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.acceptance.document_commands import CommandBlock, DocumentedMachine, DocumentShell, parse_blocks
from tests.deploy.debian_root import GLIBC_MINOR, PYTHON
from tests.deploy.machine import PATH, BootedMachine
from tests.support.release import ROOT

PAGE = ROOT / "docs" / "operations.md"
SERVICE = "svote-helper"
STATE = "/var/lib/svote-helper"
DIST = Path("/srv/dist")
"""Directory of the wheel in the system: the working directory of the page."""
WHEELS = "/srv/wheels"
CHAIN = "http://127.0.0.1:11317"
API = "http://127.0.0.1:8090/shielded-vote/v1"
INSTALL_BLOCKS = ("signature", "install", "manifest")
CONFIGURE_BLOCKS = ("configure", "gateway")


class Installation:
    """The program of the page in a system that runs.

    Args:
        machine: the system.
        dist: directory of this machine that is `DIST` in the system.
    """

    def __init__(self, machine: BootedMachine, dist: Path) -> None:
        self.machine = machine
        shell = DocumentShell(dist, {"PATH": PATH, "HOME": "/root"}, {}, prefix=machine.prefix, inside=DIST)
        self.page = DocumentedMachine(shell, self._read_journal)
        self.blocks = parse_blocks(PAGE)

    def _read_journal(self) -> str:
        return self.machine.run("journalctl", "--no-pager", "--unit", SERVICE, "-o", "cat", check=False).stdout

    def run_blocks(self, *names: str, kinds: Sequence[str] = ("do",)) -> None:
        """Run blocks of the page by their names."""
        by_name = {block.name: block for block in self.blocks if block.kind in kinds}
        for name in names:
            self.page.run_block(by_name[name])

    def wait_until_ready(self) -> None:
        """Wait for what the page shows of a helper that is ready."""
        self.page.repeat_until(self.block("until", "healthy"), succeeds=True)

    def block(self, kind: str, name: str) -> CommandBlock:
        """Return a block of the page."""
        (block,) = (block for block in self.blocks if (block.kind, block.name) == (kind, name))
        return block

    def start_chain(self) -> None:
        """Start the practice chain of the page as a service of its own, which outlives the commands of a test."""
        (command,) = self.block("background", "chain").commands
        ready = "/run/chain.ready"
        words = command.command_line.split()
        self.machine.run("systemd-run", "--unit=chain", "--collect", *words, "--ready-file", ready)
        self.machine.wait_until(f"test -s {ready}")

    def install_unit(self) -> None:
        """Install, enable and start the unit as the page does, and wait until the helper is ready."""
        self.run_blocks("unit")
        self.wait_until_ready()

    def override(self, unit: str, text: str) -> None:
        """Add a drop-in file to a unit, as `systemctl edit` does."""
        self.machine.write(f"/etc/systemd/system/{unit}.d/override.conf", text)
        self.machine.run("systemctl", "daemon-reload")

    def create_round(self) -> str:
        """Create a round on the chain, and wait until the helper knows it."""
        created = json.loads(self.machine.sh(f"curl -sS {CHAIN}/devnet/rounds -d '{{\"status\": 1}}'"))
        round_id = str(created["vote_round_id"])
        self.machine.wait_until(f"curl -sS {API}/round/{round_id} | grep -q '\"status\":1'")
        return round_id

    def vote(self, round_id: str, *, spread: int = 0) -> None:
        """Cast a vote of 16 shares. They are due within `spread` seconds."""
        base = API.removesuffix("/shielded-vote/v1")
        options = f"--proposal 1 --decision 1 --spread {spread} --base {base}"
        output = self.machine.sh(f"svote-helper wallet vote {round_id} {options}")
        assert len(re.findall("queued", output)) == 16, output

    def counts(self) -> dict[str, int]:
        """Return the number of shares by state."""
        total: dict[str, Any] = json.loads(self.machine.sh("svote-helper queue stats --json"))["total"]
        return {name: number for name, number in total.items() if isinstance(number, int)}

    def wait_for_confirmed(self, count: int, *, timeout: float = 120) -> None:
        """Wait until the chain has this number of reveals of this helper."""
        self.machine.wait_until(
            f"svote-helper queue stats --json | grep -q '\"submitted\":{count}[,}}]'", timeout=timeout, interval=0.5
        )

    def main_pid(self) -> int:
        """Return the process id of the service in the system."""
        return int(self.machine.properties(SERVICE, "MainPID")["MainPID"])


def copy_dist(dist: Path, directory: Path) -> Path:
    """Copy the output of `make wheel` to a directory of one test, which writes to it. Returns the copy."""
    return Path(shutil.copytree(dist, directory / "dist"))


def prepare_machine(machine: BootedMachine, signers: Path) -> None:
    """Give the system what is there before the page begins: the packages' index, and the publisher's key."""
    machine.write("/etc/pip.conf", f"[global]\nno-index = true\nfind-links = {WHEELS}\n")
    machine.write("/etc/svote-release/allowed_signers", (signers / "allowed_signers").read_text())


def download_wheels(requirements: Path, directory: Path) -> None:
    """Download the wheels of pinned requirements for the Python of the Debian root, as pip of this machine is set."""
    machine = platform.machine()
    tags = [f"manylinux_2_{minor}" for minor in range(5, GLIBC_MINOR + 1)]
    tags += ["manylinux1", "manylinux2010", "manylinux2014"]
    options = [f"--python-version={PYTHON}", "--implementation=cp", "--only-binary=:all:", "--no-deps"]
    options += [f"--abi={abi}" for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none")]
    options += [f"--platform={tag}_{machine}" for tag in tags]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", *options]
    completed = subprocess.run(
        [*command, f"--requirement={requirements}", f"--dest={directory}"], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
