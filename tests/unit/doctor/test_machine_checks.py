"""Checks of the machine: disk, file modes, page files, process limits, addresses, tokens, SQLite."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from helper.clock import SystemClock
from helper.config.sections import Config, UiSection
from helper.doctor import CheckResult, Level, database, machine, publication
from helper.doctor.machine import check_address, check_modes, check_socket
from helper.doctor.publication import evaluate_tokens
from helper.runtime.process_security import ProcessLimits, get_process_limits
from helper.store.sqlite.opening import find_file_system_type, is_unsuitable

PLENTY = 10 << 30
NOW = 1_790_000_000.0


def levels(findings: list[CheckResult]) -> dict[str, Level]:
    return {finding.subject: finding.level for finding in findings}


# The disk


def test_check_disk_leaves_no_files(tmp_path: Path) -> None:
    assert {"disk space", "fsync"} <= levels(database.check_disk(tmp_path / "q.db", SystemClock())).keys()
    assert list(tmp_path.iterdir()) == []
    assert levels(database.check_disk(tmp_path / "none" / "q.db", SystemClock())) == {"disk space": Level.FAIL}


def test_check_disk_unsuitable_or_not_writable_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "measure_fsync", Mock(side_effect=OSError(28, "No space left on device")))
    monkeypatch.setattr(database, "find_file_system_type", lambda *_: "nfs4")
    _, *failed = database.check_disk(tmp_path / "q.db", SystemClock())
    messages = [f"cannot write to {tmp_path}: No space left on device", f"{tmp_path} is on nfs4"]
    assert [(check.level, check.message) for check in failed] == [(Level.FAIL, message) for message in messages]


@pytest.mark.parametrize(
    ("result", "level"),
    [
        (database.evaluate_space(Path("/srv"), PLENTY, 9), Level.OK),
        (database.evaluate_space(Path("/srv"), PLENTY, None), Level.OK),
        (database.evaluate_space(Path("/srv"), 100 << 20, 9), Level.WARN),
        (database.evaluate_space(Path("/srv"), 1 << 20, 9), Level.FAIL),
        (database.evaluate_space(Path("/srv"), PLENTY, 0), Level.FAIL),
        (database.evaluate_fsync(0.01), Level.OK),
        (database.evaluate_fsync(0.2), Level.WARN),
        (database.evaluate_fsync(2.5), Level.FAIL),
    ],
)
def test_levels_of_space_and_fsync(result: CheckResult, level: Level) -> None:
    assert (result.level, bool(result.advice)) == (level, level is not Level.OK)


def test_network_file_system_is_unsuitable() -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nhost:/x /srv/net nfs4 rw 0 0\n/dev/sdb /srv/net/a\\040b xfs rw 0 0\n\nnonsense\n"
    assert find_file_system_type(Path("/srv/net/helper"), mounts) == "nfs4"
    assert find_file_system_type(Path("/srv/net/a b/helper"), mounts) == "xfs"
    assert find_file_system_type(Path("/srv/network"), mounts) == "ext4"
    assert find_file_system_type(Path("/srv"), "") == ""
    unsafe = "nfs4 virtiofs fuse.mergerfs fuse.rclone fuse.s3fs fuse.glusterfs fuse.grpcfuse fakeowner vboxsf lustre"
    for kind in unsafe.split():
        assert is_unsuitable(kind)
    for kind in ("ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "fuseblk", "fuse.fuse-overlayfs", ""):
        assert not is_unsuitable(kind)


@pytest.mark.parametrize(("days_left", "level"), [(None, Level.OK), (15, Level.OK), (13, Level.WARN)])
def test_shared_database_whose_certificate_expires_soon_is_a_warning(
    days_left: float | None, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires_at = None if days_left is None else NOW + days_left * 86_400
    monkeypatch.setattr(database, "connect_shared_database", lambda _config: expires_at)
    result = database.check_shared_database(Config(), now=NOW, running=False)
    assert (result.level, result.facts.get("certificate_expires")) == (level, expires_at)


# Files


def test_file_modes_reports_files_accessible_to_others(tmp_path: Path) -> None:
    database, settings = tmp_path / "queue.db", tmp_path / "helper.toml"
    for path, mode in ((database, 0o600), (Path(f"{database}-wal"), 0o640), (settings, 0o644)):
        path.touch()
        path.chmod(mode)
    tmp_path.chmod(0o700)
    wal, readable = check_modes([database], [tmp_path / "helper.sock", settings])
    assert (wal.level, wal.advice) == (Level.WARN, f"chmod 600 {database}-wal")
    assert readable.facts == {"path": str(settings), "mode": "644"}
    (wal,) = check_modes([database], [])
    Path(f"{database}-wal").chmod(0o600)
    tmp_path.chmod(0o777)
    (directory,) = check_modes([database], [])
    assert directory.advice == f"chmod o-w {tmp_path}"
    tmp_path.chmod(0o1777)
    assert levels(check_modes([database], [])) == {"file modes": Level.OK}, "as /tmp: others can delete nothing"
    tmp_path.chmod(0o700)
    (fine,) = check_modes([database], [tmp_path / "helper.sock"])
    assert (fine.level, fine.facts) == (Level.OK, {"files": 2})


# The page


def test_page_without_an_index_fails(tmp_path: Path) -> None:
    for page, level in (
        (UiSection(enable=False, dist_path=str(tmp_path)), Level.OK),
        (UiSection(enable=True, dist_path=str(tmp_path)), Level.FAIL),
        (UiSection(enable=True), Level.OK),
    ):
        assert publication.check_page(Config(ui=page)).level is level


# The process


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        ((0, False), Level.OK),
        ((0, None), Level.OK),
        ((0, True), Level.FAIL),
        ((-1, False), Level.FAIL),
    ],
)
def test_evaluate_cores_levels(facts: tuple[int, bool | None], level: Level) -> None:
    for pattern in ("|/usr/lib/systemd/systemd-coredump %P", "core", None):
        limits = ProcessLimits(9, *facts, open_files=[])
        assert machine.evaluate_cores(limits, pattern, process_name="the helper").level is level


@pytest.mark.parametrize(
    ("limits", "raised", "level"),
    [
        ([1024, 4352], False, Level.OK),
        ([1024, 4351], False, Level.WARN),
        ([1024, -1], False, Level.OK),
        ([1024, 8000], True, Level.WARN),
        ([4352, 8000], True, Level.OK),
    ],
)
def test_evaluate_open_files_levels(limits: list[int], raised: bool, level: Level) -> None:
    assert machine.evaluate_open_files(limits, 4352, raised=raised).level is level


@pytest.mark.parametrize(
    ("text", "level"), [("128\n", Level.WARN), ("4095\n", Level.WARN), ("4096\n", Level.OK), ("", Level.OK)]
)
def test_evaluate_accept_queue_levels(tmp_path: Path, text: str, level: Level) -> None:
    (tmp_path / "somaxconn").write_text(text)
    result = machine.evaluate_accept_queue(machine.read_number(tmp_path / "somaxconn"), 4096)
    assert result.level is level
    assert ("sysctl -w net.core.somaxconn=4096" in result.advice) == (level is Level.WARN)


def test_evaluate_memory_levels(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1024 kB\nMemFree: much\n")
    numbers = [machine.read_number(tmp_path / "meminfo", f"Mem{name}:") for name in ("Available", "Free", "None")]
    assert numbers == [1024, None, None]
    assert machine.evaluate_memory(1 << 20, 2, running=False).level is Level.WARN
    assert machine.evaluate_memory(1 << 20, 2, running=True).level is Level.OK
    assert machine.evaluate_memory(1 << 30, 2, running=False).level is Level.OK
    assert machine.evaluate_memory(None, 2, running=False).level is Level.OK


def test_process_facts_have_expected_types() -> None:
    facts = get_process_limits()
    assert isinstance(facts.dumpable, bool)
    assert len(facts.open_files) == 2
    assert facts.core_bytes >= -1


# Addresses and tokens


def test_listen_address_in_use_fails() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        occupied = check_address("the wallet API", "127.0.0.1", port, "[helper]")
        assert occupied.level is Level.FAIL
        assert f"127.0.0.1:{port}: Address already in use" in occupied.message
        assert "svote-helper.socket" in occupied.advice, "systemd listens for a helper that is stopped"
    assert check_address("x", "127.0.0.1", port, "[helper]").level is Level.OK
    assert check_address("x", "192.0.2.1", 0, "[helper]").level is Level.FAIL
    assert "not an address" in check_address("x", "no-such-host.invalid", 0, "[helper]").message


def test_wallet_socket_needs_directory_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "wallets.sock"
    missing = check_socket(path)
    assert (missing.level, "svote-helper-onion.socket" in missing.advice) == (Level.FAIL, True)
    path.parent.mkdir()
    assert check_socket(path).level is Level.OK
    with socket.socket(socket.AF_UNIX) as service_manager:
        service_manager.bind(str(path))
        assert check_socket(path).level is Level.OK
        link = path.with_name("link")
        link.symlink_to(path)
        assert "is not a socket" in check_socket(link).message, "it would not be bound"
    path.unlink()
    assert "is not a socket" in check_socket(link).message
    path.touch()
    assert "is not a socket" in check_socket(path).message


@pytest.mark.parametrize(
    ("token", "level"),
    [
        ("", Level.OK),
        ("secret", Level.WARN),
        ("a" * 100, Level.WARN),
        ("abababababababababababab", Level.WARN),
        ("9f86d081884c7d659a2feaa0c55ad015", Level.OK),
    ],
)
def test_evaluate_tokens_levels(token: str, level: Level) -> None:
    wallets, operators = evaluate_tokens(token, "")
    assert wallets.level is level
    assert operators.level is Level.OK
    assert not token or token not in repr(wallets)
    same = evaluate_tokens(token, token)
    assert (len(same) == 1) is bool(token)
    assert not token or same[0].level is Level.FAIL
