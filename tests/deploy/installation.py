"""Runs blocks of docs/operations.md in a booted system, and what the tests of one share: a chain, votes, requests."""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.acceptance.document_commands import CommandBlock, DocumentShell, parse_blocks
from tests.deploy.commands import run
from tests.deploy.debian_root import BUILD, GLIBC_MINOR, PYTHON
from tests.deploy.machine import PATH, BootedMachine
from tests.support.release import ROOT

PAGE = ROOT / "docs" / "operations.md"
SERVICE = "svote-helper"
SHARES_PER_VOTE = 16
STATE = "/var/lib/svote-helper"
DIST = Path("/srv/dist")
"""Directory of the wheel in the system: the working directory of the page."""
WHEELS = "/srv/wheels"
CHAIN = "http://127.0.0.1:11317"
API = "http://127.0.0.1:8090/shielded-vote/v1"
ONE_PROVER = "[Service]\nEnvironment=SVOTE_HELPER_HELPER_MAX_CONCURRENT_PROOFS=1\n"
INSTALL_BLOCKS = ("signature", "install", "manifest")
CONFIGURE_BLOCKS = ("configure",)
DOWNLOAD_SECONDS = 1800.0


class Installation:
    """The program of the page in a system that runs.

    Args:
        inside: its path in the system.
    """

    def __init__(self, machine: BootedMachine, dist: Path, *, inside: Path = DIST) -> None:
        self.machine = machine
        env = {"PATH": PATH, "HOME": "/root"}
        self.page = DocumentShell(dist, env, {}, prefix=machine.prefix, inside=inside, read_journal=self.read_journal)
        self.blocks = parse_blocks(PAGE)

    def read_journal(self, *options: str) -> str:
        """Return the journal of the service; with options, as journalctl prints it."""
        return self.machine.run("journalctl", "--no-pager", f"--unit={SERVICE}", *(options or ("--output=cat",))).stdout

    def run_blocks(self, *names: str, kinds: Sequence[str] = ("do",)) -> None:
        by_name = {block.name: block for block in self.blocks if block.kind in kinds}
        for name in names:
            self.page.run_block(by_name[name])

    def wait_until_ready(self) -> None:
        """Wait for what the page shows of a helper that is ready."""
        self.page.repeat_until(self.block("until", "healthy"), succeeds=True)

    def block(self, kind: str, name: str) -> CommandBlock:
        (block,) = (block for block in self.blocks if (block.kind, block.name) == (kind, name))
        return block

    def start_chain(self, *program: str) -> None:
        """Start the practice chain of the page as a service of its own, which outlives the commands of a test.

        Args:
            program: runs the command line of this product; the one of the page by default.
        """
        (command,) = self.block("background", "chain").commands
        ready = "/run/chain.ready"
        name, *words = command.command_line.split()
        self.machine.run(
            "systemd-run", "--unit=chain", "--collect", *(program or (name,)), *words, "--ready-file", ready
        )
        self.machine.wait_until(f"test -s {ready}")

    def limit_provers(self) -> None:
        """Let the unit start one prover, which is faster than one for each core."""
        self.machine.write(f"/etc/systemd/system/{SERVICE}.service.d/provers.conf", ONE_PROVER)

    def install_unit(self) -> None:
        """Install, enable and start the unit as the page does, with one prover. Wait until the helper is ready."""
        self.limit_provers()
        self.run_blocks("unit")
        self.wait_until_ready()

    @contextmanager
    def override(self, text: str) -> Iterator[None]:
        """Restart the service with a drop-in file, as `systemctl edit` writes it, and without it at the end."""
        file = f"/etc/systemd/system/{SERVICE}.service.d/override.conf"
        self.machine.write(file, text)
        try:
            self.machine.sh(f"systemctl daemon-reload && systemctl restart {SERVICE}")
            self.wait_until_ready()
            yield
        finally:
            self.machine.sh(f"rm {file} && systemctl daemon-reload && systemctl restart {SERVICE}")

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
        assert output.count("queued") == SHARES_PER_VOTE, output

    def count_confirmed(self) -> int:
        """Return the number of reveals of this helper on the chain."""
        return int(json.loads(self.machine.sh("svote-helper queue stats --json"))["total"]["submitted"])

    def wait_for_confirmed(self, count: int) -> None:
        """Wait until the chain has this number of reveals of this helper."""
        self.machine.wait_until(
            f"svote-helper queue stats --json | grep -q '\"submitted\":{count}[,}}]'", timeout=300, interval=0.5
        )

    def main_pid(self) -> int:
        return int(self.machine.properties(SERVICE, "MainPID")["MainPID"])


def copy_dist(dist: Path, directory: Path) -> Path:
    """Copy the output of `make wheel` to a directory of one test, which writes to it. Returns the copy."""
    return Path(shutil.copytree(dist, directory / "dist"))


def prepare_machine(machine: BootedMachine, signers: Path) -> None:
    """Give the system what is there before the page begins: the packages' index, and the publisher's key."""
    machine.write("/etc/pip.conf", pip_configuration(WHEELS))
    machine.write("/etc/svote-release/allowed_signers", (signers / "allowed_signers").read_text())


def pip_configuration(*directories: str) -> str:
    """Return settings of pip that find packages only in directories."""
    return f"[global]\nno-index = true\nfind-links = {' '.join(directories)}\n"


def download_wheels(requirements: Path) -> Path:
    """Return a directory with the wheels of pinned requirements for the Python of the Debian root.

    pip of this machine downloads them once, as it is configured here.
    """
    directory = BUILD / f"wheels-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]}"
    with (BUILD / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            unfinished = directory.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            _run_pip_download(requirements, unfinished)
            unfinished.rename(directory)
    return directory


def _run_pip_download(requirements: Path, directory: Path) -> None:
    machine = platform.machine()
    tags = [f"manylinux_2_{minor}" for minor in range(5, GLIBC_MINOR + 1)]
    tags += ["manylinux1", "manylinux2010", "manylinux2014"]
    options = [f"--python-version={PYTHON}", "--implementation=cp", "--only-binary=:all:", "--no-deps"]
    options += [f"--abi={abi}" for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none")]
    options += [f"--platform={tag}_{machine}" for tag in tags]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", *options]
    run([*command, f"--requirement={requirements}", f"--dest={directory}"], timeout=DOWNLOAD_SECONDS)
