"""A copy of the sources with secret files in every plausible place, and a search for these secrets."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from helper.config.settings_file import CREDENTIALS, FILE_CREDENTIALS

REPO_ROOT = Path(__file__).parents[2]
SECRET = "planted-7f3a9c"
NAMES = (*CREDENTIALS.values(), *FILE_CREDENTIALS.values())
PLANTED_NAMES = (*NAMES, "helper.toml", "queue.db", "queue.db-wal")
FOLDERS = ("deploy/container", ".", "helper", "proofs", "requirements", "ui_dist")
BUILT_FILES = (
    ".git",
    ".venv",
    "target",
    "node_modules",
    "build",
    "dist",
    "*.so",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
)


def copy_sources_with_secrets(copy: Path) -> None:
    """Copy what images and `dist/` are built from, and add files that contain `SECRET`."""
    shutil.copytree(
        REPO_ROOT, copy, ignore=shutil.ignore_patterns(*BUILT_FILES, "docs", "tests", "ui", "bench"), symlinks=True
    )
    (copy / "docs").mkdir()
    shutil.copy(REPO_ROOT / "docs" / "operations.md", copy / "docs")
    for directory in FOLDERS:
        for name in PLANTED_NAMES:
            (copy / directory / name).write_text(SECRET)


def find_files_with(text: str, directory: Path) -> list[Path]:
    """Return the regular files below a directory that contain these bytes."""
    command = ["grep", "--recursive", "--text", "--fixed-strings", "--files-with-matches", "--", text, str(directory)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    return [Path(line) for line in found.stdout.splitlines()]
