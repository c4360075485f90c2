"""Runs docs/operations.md from installation to recovery: installs the wheel, starts, breaks and repairs ten things.

The commands of the page run in its order, and their output is compared with the page. Three things differ from the
page: the directories and ports; pip, which is replaced by uv for speed; and systemctl, which is replaced by
`fake_systemctl` because systemd does not run in a test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.acceptance.document_commands import (
    TIMEOUT_SECONDS,
    CommandBlock,
    CommandResult,
    DocumentedCommand,
    DocumentShell,
    parse_blocks,
)
from tests.support.process import find_free_port
from tests.support.release import create_key, write_allowed_signers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"
BIN = Path(sys.executable).parent
FAKE_SYSTEMCTL = Path(__file__).with_name("fake_systemctl.py")
FAULT_COUNT = 10
DISK_FULL_FAULT = "8"
"""The fault that needs its own file system. It is skipped if this user may not mount one."""
SYSTEM_FOLDERS = ("/etc/systemd/system", "/etc/sysusers.d", "/usr/local/bin", "/var/lib/svote-helper", "/run")
SIGNERS_FOLDER = "/etc/svote-release"
FOLDERS = (*SYSTEM_FOLDERS, "/opt/svote-helper", "/etc/svote-helper", "/var/backups/svote-helper", SIGNERS_FOLDER)
RETRY_SECONDS = 1.0
"""Interval between two attempts, in seconds. Each attempt takes CPU time from the helper's startup."""


@dataclass
class DocumentedMachine:
    """The machine that the page describes, in a directory.

    Attributes:
        directory: working directory of the machine.
        shell: shell for all commands.
        has_own_disk: whether the database directory is a separate file system that can be filled.
    """

    directory: Path
    shell: DocumentShell
    has_own_disk: bool

    def run_block(self, block: CommandBlock) -> None:
        """Run a block. Every command must succeed and print what the page shows."""
        for command in block.commands:
            result = self.shell.run_command(command)
            assert result.exit_code == 0, self._describe_failure(command, result, f"exit status {result.exit_code}")
            missing = self.shell.first_missing_line(command, result)
            assert missing is None, self._describe_failure(command, result, f"not printed: {missing}")

    def repeat_until(self, block: CommandBlock, *, succeeds: bool) -> None:
        """Repeat a block until every command prints what the page shows and has the expected exit status."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for command in block.commands:
            while True:
                result = self.shell.run_command(command)
                missing = self.shell.first_missing_line(command, result)
                if missing is None and (result.exit_code == 0) == succeeds:
                    break
                reason = f"not printed: {missing}" if missing else f"exit status {result.exit_code}"
                assert time.monotonic() < deadline, self._describe_failure(command, result, reason)
                time.sleep(RETRY_SECONDS)

    def _describe_failure(self, command: DocumentedCommand, result: CommandResult, reason: str) -> str:
        journal = self.directory / "run" / "svote-helper" / "journal"
        log = journal.read_text(errors="replace")[-3000:] if journal.exists() else ""
        return f"{command.command_line}\n{reason}\nit printed:\n{result.output}\njournal:\n{log}"


def build_wheel(directory: Path) -> Path:
    """Run `make wheel` with this environment into another directory."""
    dist, venv = directory / "dist", BIN.parent
    command = ["make", f"--old-file={venv}/.deps", "wheel", f"VENV={venv}", f"DIST={dist}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
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


def write_executable(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[DocumentedMachine]:
    """A machine without an installation, with its own directories and free ports."""
    dist = build_wheel(tmp_path)
    places = {name: str(tmp_path / name.strip("/")) for name in FOLDERS}
    for name in SYSTEM_FOLDERS:
        Path(places[name]).mkdir(parents=True)
    sign_release(dist, Path(places[SIGNERS_FOLDER]))
    (tmp_path / "places.json").write_text(json.dumps(places))
    rest, rpc = find_free_port(2), find_free_port(2)
    ports = {"8090": find_free_port(), "11317": rest, "11318": rest + 1, "36657": rpc, "36658": rpc + 1}
    tools = tmp_path / "tools"
    tools.mkdir()
    write_executable(tools / "systemctl", f'exec {sys.executable} -I {FAKE_SYSTEMCTL} {tmp_path}/places.json "$@"')
    write_executable(tools / "systemd-sysusers", "exit 0")
    environment = "/opt/svote-helper"
    replacements = {
        f"python3 -m venv {environment}": f"{sys.executable} -m venv --without-pip {places[environment]}",
        f"{environment}/bin/pip install": f"{BIN}/uv pip install --offline --python {places[environment]}",
        "svote-helper devnet": f"svote-helper devnet --rest-port {rest} --rpc-port {rpc}",
    }
    env = {
        "PATH": f"{places['/usr/local/bin']}:{tools}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", str(tmp_path)),
        "SVOTE_HELPER_CONFIG": f"{places['/etc/svote-helper']}/helper.toml",
        "SVOTE_HELPER_HELPER_PORT": str(ports["8090"]),
        # Faster start-ups: keys for one prover only, and no lower priority than concurrent tests.
        "SVOTE_HELPER_HELPER_MAX_CONCURRENT_PROOFS": "1",
        "SVOTE_HELPER_PROVER_NICE": "0",
    }
    shell = DocumentShell(dist, env, {**places, **replacements, **{name: str(port) for name, port in ports.items()}})
    with mount_small_disk(Path(places["/var/lib/svote-helper"])) as fillable:
        try:
            yield DocumentedMachine(tmp_path, shell, fillable)
        finally:
            subprocess.run([tools / "systemctl", "stop", "svote-helper"], env=env, check=False, capture_output=True)
            with suppress(OSError, ValueError):  # the program that occupies the port, if the page was interrupted
                os.kill(int(Path(places["/var/lib/svote-helper"], "other.pid").read_text()), signal.SIGTERM)


@contextmanager
def mount_small_disk(directory: Path) -> Iterator[bool]:
    """Mount a small file system if this user may mount one. Yields whether it is mounted."""
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1g,mode=700", "tmpfs", str(directory)],
            check=False,
            capture_output=True,
        ).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def run_in_background(shell: DocumentShell, block: CommandBlock) -> Iterator[None]:
    """Run the program of a block in the background. Yields when it listens."""
    (command,) = block.commands
    with shell.start_background(command) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the process exited during startup"
        yield


def test_operations_page_commands_work(machine: DocumentedMachine) -> None:
    blocks = parse_blocks(PAGE)
    by_name = {(block.kind, block.name): block for block in blocks}
    faults = [block.name for block in blocks if block.kind == "cause"]
    assert faults == [str(number) for number in range(1, FAULT_COUNT + 1)]
    healthy = by_name["until", "healthy"]
    with ExitStack() as stack:
        for block in blocks:
            if block.kind == "background":
                stack.enter_context(run_in_background(machine.shell, block))
            elif block.kind == "do":
                machine.run_block(block)
            elif block.kind == "until":
                machine.repeat_until(block, succeeds=True)
            elif block.kind == "cause":
                if block.name == DISK_FULL_FAULT and not machine.has_own_disk:
                    continue
                machine.run_block(block)
                machine.repeat_until(by_name["see", block.name], succeeds=False)
                machine.run_block(by_name["fix", block.name])
                machine.repeat_until(healthy, succeeds=True)
