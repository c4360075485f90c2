"""A user without read access to the helper's files gets a specific exit code."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helper.config.settings_file import find_file
from tests.unit.cli.test_main import run_command

ORIGINAL_ACCESS = os.access


def deny_access(path: object, mode: int) -> bool:
    """Replace `os.access` for a user without access to the helper's files."""
    return not str(path).endswith((".toml", ".db")) and ORIGINAL_ACCESS(str(path), mode)


@pytest.mark.parametrize(
    "command",
    [
        "queue stats --config helper.toml",
        "queue retry --yes --config helper.toml",
        "rounds --config helper.toml",
        "config validate helper.toml",
        "config show --config helper.toml",
        "db check --config helper.toml",
        "queue stats --db queue.db",
        "queue list --round abcdef --db queue.db",
        "queue retry --yes --db queue.db",
        "queue purge --yes --round abcdef --db queue.db",
        "chain rescan --from 1 --db queue.db",
    ],
)
def test_permission_denied_exits_4(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", deny_access)
    (name,) = (name for name in ("helper.toml", "queue.db") if name in command)
    Path(name).touch()
    assert run_command(*command.split()) == 4
    assert capsys.readouterr().err in {f"no permission to {verb} {name}\n" for verb in ("read", "change")}


@pytest.mark.parametrize("command", ["config show --config hidden/helper.toml", "queue stats --db hidden/queue.db"])
def test_file_in_inaccessible_directory_exits_4(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "stat", deny_status)
    hidden = Path(command.rsplit(maxsplit=1)[-1])
    assert run_command(*command.split()) == 4
    assert capsys.readouterr().err == f"no permission to read {hidden}\n"
    monkeypatch.setattr("helper.config.settings_file.DEFAULT_FILES", (hidden,))
    assert find_file(None, {}) == hidden, "other settings would be those of another helper"


def deny_status(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
    """Replace `Path.stat` for a user without access to the directory `hidden`."""
    if "hidden" in path.parts:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.stat(path, follow_symlinks=follow_symlinks)  # noqa: PTH116
