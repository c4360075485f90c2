"""Runs docs/operations.md from installation to recovery: installs the wheel, starts, breaks and repairs ten things.

The commands of the page run in its order, and their output is compared with the page. Three things differ from the
page: the directories and ports; pip, which is replaced by uv for speed; and systemctl, which is replaced by
`fake_systemctl`. `tests/deploy` runs the same commands without these replacements, in a system that systemd has booted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.acceptance.document_commands import DocumentShell, parse_blocks, run_page
from tests.support.process import find_free_port
from tests.support.release import build_wheel, sign_release

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


def write_executable(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def machine_and_disk(tmp_path: Path) -> Iterator[tuple[DocumentShell, bool]]:
    """A machine without an installation, with its own directories and free ports.

    The second value states whether the directory of the database is a file system of its own that can be filled.
    """
    dist = build_wheel(tmp_path / "dist")
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
    names = {**places, **replacements, **{name: str(port) for name, port in ports.items()}}
    shell = DocumentShell(dist, env, names, read_journal=partial(read_journal, tmp_path / "run/svote-helper/journal"))
    with mount_small_disk(Path(places["/var/lib/svote-helper"])) as fillable:
        try:
            yield shell, fillable
        finally:
            subprocess.run([tools / "systemctl", "stop", "svote-helper"], env=env, check=False, capture_output=True)
            with suppress(OSError, ValueError):  # the program that occupies the port, if the page was interrupted
                os.kill(int(Path(places["/var/lib/svote-helper"], "other.pid").read_text()), signal.SIGTERM)


def read_journal(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


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


def test_operations_page_commands_work(machine_and_disk: tuple[DocumentShell, bool]) -> None:
    blocks = parse_blocks(PAGE)
    faults = [block.name for block in blocks if block.kind == "cause"]
    assert faults == [str(number) for number in range(1, FAULT_COUNT + 1)]
    shell, has_own_disk = machine_and_disk
    run_page(shell, blocks, skipped_faults=() if has_own_disk else (DISK_FULL_FAULT,))
