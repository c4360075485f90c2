"""Commands run as root act as the owner of the directory and never follow links of the owner."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import anyio
import pytest

from helper.runtime.process_security import acting_as_owner
from helper.server.listening import listen_unix
from helper.store.backup import write_unencrypted_file
from tests.unit.cli.test_db import create_database
from tests.unit.cli.test_main import run_command
from tests.unit.store.fixtures import ROUND

REPO_ROOT = Path(__file__).parents[3]
SERVICE_UID = 65534
"""An unprivileged user: nobody."""
OTHER_UID = 65533
"""Another unprivileged user."""
PASSPHRASE = "correct horse battery"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(autouse=True)
def _passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", PASSPHRASE)


@pytest.fixture
def directory() -> Iterator[Path]:
    """The service user's directory. Others can reach it, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="service-"))
    os.chown(directory, SERVICE_UID, SERVICE_UID)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def database(directory: Path) -> Path:
    """The service's database with two shares, closed."""
    path = directory / "queue.db"
    anyio.run(create_database, path, 1, 2)
    for file in directory.iterdir():
        os.chown(file, SERVICE_UID, SERVICE_UID)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file owned by root that a planted link points to."""
    file = tmp_path / "shadow"
    file.write_text("secret of root\n")
    file.chmod(0o600)
    return file


def is_unchanged(target: Path) -> bool:
    info = target.stat()
    state = (target.read_text(), info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode))
    return state == ("secret of root\n", 0, 0, 0o600)


def file_owners(directory: Path) -> dict[str, int]:
    return {file.name: file.lstat().st_uid for file in directory.iterdir()}


def plant_link(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    os.chown(link, SERVICE_UID, SERVICE_UID, follow_symlinks=False)


def create_backup(database: Path, directory: Path) -> Path:
    output = directory / "backup.age"
    assert run_command("db", "backup", "--db", str(database), "--output", str(output)) == 0
    return output


@pytest.mark.parametrize(
    "command",
    [
        "queue retry --yes --db DB",
        f"queue purge --yes --round {ROUND.hex()} --db DB",
        "chain rescan --from 1 --db DB",
        "queue export --move --yes --output OUT --db DB",
        "db migrate --no-backup --yes --db DB",
        "db restore BACKUP --force --db DB",
        "db copy --yes --from DB --to OUT",
        "db copy --yes --from OTHER --to DB",
        "db copy --undo --yes --from DB",
        "db copy --erase --yes --from DB",
    ],
)
@pytest.mark.parametrize("suffix", [".lock", ""], ids=["lock", "database"])
def test_root_command_with_planted_link_keeps_target_unchanged(
    command: str, suffix: str, database: Path, tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.db"
    shutil.copy(database, other)
    places = {"DB": database, "OTHER": other, "OUT": tmp_path / "out"}
    if "BACKUP" in command:
        places["BACKUP"] = create_backup(database, tmp_path)
    plant_link(Path(f"{database}{suffix}"), target)
    before = set(tmp_path.iterdir())

    code = run_command(*(str(places.get(argument, argument)) for argument in command.split()))

    assert code != 0, "a link is refused"
    assert is_unchanged(target), capsys.readouterr().err
    assert not {file.name for file in set(tmp_path.iterdir()) - before} & {"shadow.lock", "shadow-wal"}
    assert (os.geteuid(), os.getegid()) == (0, 0)


def test_root_command_leaves_service_as_owner_of_all_files(database: Path, directory: Path, tmp_path: Path) -> None:
    (directory / "queue.db.lock").unlink()
    assert run_command("queue", "retry", "--yes", "--db", str(database)) == 0
    assert run_command("queue", "stats", "--db", str(database)) == 0
    assert run_command("db", "migrate", "--no-backup", "--yes", "--db", str(database)) == 0
    backup = create_backup(database, directory)
    assert run_command("db", "restore", str(backup), "--force", "--db", str(database)) == 0
    assert run_command("db", "check", "--db", str(database)) == 0
    assert run_command("db", "copy", "--yes", "--from", str(database), "--to", str(directory / "copy.db")) == 0
    assert (
        run_command("queue", "export", "--output", str(directory / "shares"), "--db", str(directory / "copy.db")) == 0
    )
    assert set(file_owners(directory).values()) == {SERVICE_UID}, file_owners(directory)
    assert {"copy.db", "copy.db.lock", "shares", "backup.age", "queue.db.before-restore-1"} <= set(
        file_owners(directory)
    )
    output = create_backup(database, tmp_path)
    assert output.stat().st_uid == 0, "files that root creates in other directories belong to root"


def test_unencrypted_file_of_root_belongs_to_the_owner_of_the_directory(directory: Path) -> None:
    write_unencrypted_file(directory / "shares", lambda file: file.write(b"shares"))
    assert file_owners(directory) == {"shares": SERVICE_UID}


_RUN_AND_REPORT_READS = """
import os, sys
from helper.cli.main import main

def report(event, arguments):
    name = str(arguments[0]) if arguments else ""
    if os.geteuid() and (event == "import" or (event == "open" and name.startswith(sys.argv[1]))):
        os.write(2, f"as the owner: {event} {name}\\n".encode())
        os._exit(99)

sys.addaudithook(report)
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "command",
    [
        "queue list --db DB",
        "queue retry --yes --db DB",
        "queue export --output OUT --db DB",
        "db check --db DB",
        "db backup --output OUT --db DB",
        "db restore BACKUP --force --db DB",
        "db encrypt --key-file KEY --yes --db DB",
        "db copy --yes --from DB --to OUT",
        "config init --output OUT",
    ],
)
def test_root_command_reads_nothing_of_the_installation_as_the_owner(
    command: str, database: Path, directory: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("ab" * 32)
    places = {"DB": database, "OUT": directory / "out", "KEY": key}
    if "BACKUP" in command:
        places["BACKUP"] = create_backup(database, tmp_path)
    arguments = [str(places.get(word, word)) for word in command.split()]
    script = [sys.executable, "-c", _RUN_AND_REPORT_READS, f"{REPO_ROOT}/"]
    done = subprocess.run([*script, *arguments], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_root_command_records_root_as_the_actor(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "export", "--output", str(database.parent / "shares"), "--db", str(database)) == 0
    capsys.readouterr()
    assert run_command("queue", "audit", "--json", "--db", str(database)) == 0
    assert '"uid":0,"who":"root"' in capsys.readouterr().out


def test_root_files_are_created_with_owner_rights(
    database: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that changes between two steps then gives no access that the owner does not have."""
    user_ids = set()
    fsync = os.fsync

    def record(fd: int) -> None:
        user_ids.add(os.geteuid())
        fsync(fd)

    monkeypatch.setattr("os.fsync", record)
    backup = create_backup(database, directory)
    assert run_command("db", "restore", str(backup), "--force", "--db", str(database)) == 0
    assert user_ids == {SERVICE_UID}


@pytest.mark.parametrize("command", ["config init --force --output OUT", "db backup --output OUT --db DB"])
def test_root_output_through_planted_link_is_refused(
    command: str, database: Path, directory: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = directory / "output"
    plant_link(output, target)
    places = {"OUT": str(output), "DB": str(database)}
    assert run_command(*(places.get(argument, argument) for argument in command.split())) != 0
    assert "contains a symbolic link of user 65534" in capsys.readouterr().err
    assert is_unchanged(target)


def test_serve_as_root_in_the_directory_of_another_user_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SVOTE_HELPER_CHAIN_ENDPOINTS", "http://127.0.0.1:1")
    assert run_command("serve", "--db", str(directory / "queue.db")) == 1
    assert f"{directory} belongs to user {SERVICE_UID}" in capsys.readouterr().err
    assert not list(directory.iterdir())


def test_settings_of_another_user_in_a_directory_of_all_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    Path("helper.toml").write_text(f'[helper]\ndb_path = "{directory}/trap.db"\n')
    os.chown("helper.toml", OTHER_UID, OTHER_UID)
    assert run_command("queue", "list") == 5, "only its owner and root can write to the directory"
    directory.chmod(0o1777)
    for command in (("queue", "list"), ("serve",), ("doctor", "--skip-proof")):
        capsys.readouterr()
        assert run_command(*command) == 1
        assert f"belongs to user {OTHER_UID}" in capsys.readouterr().err
    assert run_command("queue", "list", "--config", "helper.toml") == 5
    Path("helper.toml").unlink()
    for name in ("svote-helper.db", "helper.sock"):
        assert run_command("queue", "list") == 5
        Path(name).touch()
        os.chown(name, OTHER_UID, OTHER_UID)
        assert run_command("queue", "list") == 1
        assert f"{name} belongs to user {OTHER_UID}" in capsys.readouterr().err
        Path(name).unlink()


def test_acting_as_owner_of_own_directory_stays_root(tmp_path: Path) -> None:
    with acting_as_owner(tmp_path / "file"):
        assert os.geteuid() == 0


def test_acting_as_owner_without_directory_is_refused(tmp_path: Path) -> None:
    """A link that appears later at the missing path would be followed with the rights of root."""
    with pytest.raises(FileNotFoundError, match="no such directory"), acting_as_owner(tmp_path / "none" / "file"):
        pass


def test_acting_as_owner_follows_links_of_root(directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    groups = os.getgroups()
    with acting_as_owner(link / "file") as resolved:
        assert resolved == directory / "file"
        assert (os.getuid(), os.geteuid()) == (0, SERVICE_UID)
        with acting_as_owner(tmp_path / "file"):
            assert os.geteuid() == SERVICE_UID, "root's privileges do not return within the call"
        with pytest.raises(PermissionError):
            (tmp_path / "file").touch()
    assert (os.geteuid(), os.getegid(), os.getgroups()) == (0, 0, groups)


def test_acting_as_owner_through_circular_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("../" + tmp_path.name + "/a")
    with pytest.raises(OSError, match="symbolic links"), acting_as_owner(tmp_path / "a"):
        pass


class PathSwapper:
    """Simulates a user who swaps a directory and a link to another user's one during root's system calls."""

    def __init__(self, location: Path, target: Path) -> None:
        self._place, self._real = location, location.with_name("real")
        self._link = location.with_name("link")
        self._real.mkdir()
        os.chown(self._real, SERVICE_UID, SERVICE_UID)
        plant_link(self._link, target)
        self._call = {name: getattr(os, name) for name in ("rename", "unlink")}
        self.is_link = False
        self._real.rename(location)

    def swap(self) -> None:
        hidden = self._real if not self.is_link else self._link
        self._call["rename"](self._place, hidden)
        self._call["rename"](self._link if not self.is_link else self._real, self._place)
        self.is_link = not self.is_link


FILE_CALLS = ("open", "stat", "lstat", "fstat", "readlink", "seteuid")


def test_acting_as_owner_while_directory_and_link_swap_is_never_a_third_user(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests every choice of up to two swaps among the system calls that root makes before the body."""
    victim = Path(tempfile.mkdtemp(prefix="victim-"))
    os.chown(victim, OTHER_UID, OTHER_UID)
    swapper = PathSwapper(directory / "place", victim)
    pending: list[int] = []
    calls = 0

    def wrap_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if pending and calls == pending[0]:
                pending.pop(0)
                with root_privileges():
                    swapper.swap()
            return original(*args, **options)

        return call

    originals = {name: getattr(os, name) for name in FILE_CALLS}

    @contextmanager
    def root_privileges() -> Iterator[None]:
        before = os.geteuid()
        originals["seteuid"](0)
        try:
            yield
        finally:
            originals["seteuid"](before)

    def attempt() -> int | None:
        try:
            with acting_as_owner(directory / "place" / "file"):
                effective_uid = os.geteuid()
                with suppress(PermissionError), open(directory / "place" / "file", "a"):  # noqa: PTH123
                    pass
                return effective_uid
        except OSError:
            return None

    for name in FILE_CALLS:
        monkeypatch.setattr(os, name, wrap_call(originals[name]))
    try:
        assert attempt() == SERVICE_UID
        most, outcomes = calls, set()
        for number in (1, 2):
            for chosen in combinations(range(1, most + 1), number):
                for begins_as_link in (False, True):
                    if swapper.is_link != begins_as_link:
                        swapper.swap()
                    pending, calls = list(chosen), 0
                    outcomes.add(attempt())
                    assert not list(victim.iterdir()), (chosen, begins_as_link)
        assert outcomes == {SERVICE_UID, None}
    finally:
        monkeypatch.undo()
        shutil.rmtree(victim)


@pytest.mark.parametrize("owner", [0, OTHER_UID], ids=["root", "third user"])
def test_acting_as_owner_below_directory_of_third_user_is_refused(directory: Path, owner: int) -> None:
    """The third user could replace the inner directory with a link at any time."""
    inner = directory / "inner"
    inner.mkdir()
    os.chown(inner, owner, owner)
    with (
        pytest.raises(PermissionError, match=f"inside a directory of user {SERVICE_UID}"),
        acting_as_owner(inner / "file"),
    ):
        pass
    assert os.geteuid() == 0


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o775, True), (0o1777, False), (0o755, False)])
def test_acting_as_owner_in_directory_of_root_depends_on_who_may_write(
    directory: Path, mode: int, is_refused: bool
) -> None:
    os.chown(directory, 0, 0)
    directory.chmod(mode)
    refusal = pytest.raises(PermissionError, match="chmod go-w") if is_refused else nullcontext()
    with refusal, acting_as_owner(directory / "file") as resolved:
        assert (resolved, os.geteuid()) == (directory / "file", 0)


def test_control_socket_is_never_changed_by_its_path(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chmod(path: Path, mode: int) -> None:
        pytest.fail(f"{path} may be a link by now ({mode:o})")

    monkeypatch.setattr(Path, "chmod", chmod)
    before = os.umask(0)
    try:
        with listen_unix(directory / "helper.sock"):
            assert stat.S_IMODE((directory / "helper.sock").stat().st_mode) == 0o600
    finally:
        os.umask(before)
