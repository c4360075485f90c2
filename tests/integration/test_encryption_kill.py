"""SIGKILL during `db encrypt` and `db decrypt`: the file is as before or complete, and its next use erases old rows."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.store.db_copy.file_encryption import rewrite_file
from helper.store.row_encryption import UNENCRYPTED, RowEncryption
from helper.store.sqlite.snapshot import read_contents
from helper.store.sqlite.store import SqliteStore
from tests.campaign.syscalls import is_strace_installed, kill_command, kill_points, read_calls, trace_command
from tests.support.clock import FakeClock
from tests.support.process import TIMEOUT_SECONDS
from tests.unit.store.conformance.backends import make_file_encryption
from tests.unit.store.fixtures import enqueue_and_prepare, enqueue_shares, select_shares
from tests.unit.store.test_erasure import count_occurrences
from tests.unit.store.test_file_encryption import secret_bytes

pytestmark = pytest.mark.skipif(not is_strace_installed(), reason="needs strace")

KEY = b"k" * 32
ENCRYPTION = make_file_encryption([KEY])
SHARES = range(12)
POINTS = 10
"""Number of kills of each command, at calls that are spread over all calls."""


def run(command: str, path: Path, key_file: Path, prefix: Sequence[str]) -> subprocess.Popen[bytes]:
    flags = ("--db", str(path), "--key-file", str(key_file), "--yes")
    process = subprocess.Popen([*prefix, sys.executable, "-m", "helper", "db", command, *flags], stderr=subprocess.PIPE)
    process.communicate(timeout=TIMEOUT_SECONDS)
    return process


def read_shares(path: Path) -> tuple[bool, list[object]]:
    """Whether the file is encrypted, and all its shares."""
    contents = read_contents(path, FakeClock(), ENCRYPTION)
    assert contents.damaged == 0
    return contents.encrypted, list(select_shares(path, encryption=ENCRYPTION).shares)


async def open_and_close(path: Path, encryption: RowEncryption) -> None:
    """Open the database as the helper does at its start."""
    store = SqliteStore(path, encryption=encryption)
    await store.open()
    await store.close()


@pytest.mark.parametrize("command", ["encrypt", "decrypt"])
async def test_killed_command_leaves_a_complete_file(command: str, tmp_path: Path) -> None:
    key_file = tmp_path / "store.key"
    key_file.touch(0o600)
    key_file.write_text(KEY.hex())
    original = tmp_path / "original.db"
    store = SqliteStore(original, encryption=UNENCRYPTED if command == "encrypt" else ENCRYPTION)
    await store.open()
    await enqueue_and_prepare(store, SHARES[0])
    await enqueue_shares(store, *SHARES[1:])
    await store.close()
    _, shares = read_shares(original)
    assert len(shares) == len(SHARES)

    path, trace = tmp_path / "queue.db", tmp_path / "trace"
    shutil.copy(original, path)
    traced = run(command, path, key_file, trace_command(trace))
    assert traced.returncode == 0
    points = kill_points(await read_calls(trace, traced.pid), str(path))
    assert len(points) > POINTS
    outcomes = set()
    for call, number in points[:: len(points) // POINTS]:
        for file in tmp_path.glob("queue.db*"):
            file.unlink()
        shutil.copy(original, path)
        killed = run(command, path, key_file, kill_command(call, number))
        assert killed.returncode == -signal.SIGKILL, (call, number)
        is_encrypted, left = read_shares(path)
        assert left == shares, (call, number)
        is_complete = is_encrypted == (command == "encrypt")
        outcomes.add(is_complete)
        if is_complete:
            await open_and_close(path, ENCRYPTION if is_encrypted else UNENCRYPTED)
        else:
            assert rewrite_file(path, SystemClock(), ENCRYPTION, encrypt=command == "encrypt").is_erased
        assert read_shares(path) == (command == "encrypt", shares)
        if command == "encrypt":
            assert count_occurrences(path, secret_bytes(*SHARES)) == {}, (call, number)
    assert outcomes == {False, True}, "kills before and after the commit"
