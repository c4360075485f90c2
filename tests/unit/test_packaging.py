"""Secret files in the source tree reach neither images nor `dist/`.

Tests cannot fetch base images: the container file is built on fakes, whose `make` and `pip` copy every file that
they can access.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helper.config.discovery import CREDENTIALS
from helper.object_store.credentials import SYSTEMD_CREDENTIAL as S3_CREDENTIALS

REPO_ROOT = Path(__file__).parents[2]
SECRET = "planted-7f3a9c"
NAMES = (*CREDENTIALS.values(), "store-key", S3_CREDENTIALS)
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
BUILDAH = [path for path in (shutil.which("buildah"),) if path]
PROGRAMS = ("sh", "cp", "mkdir", "rm", "install", "chmod")

MAKE = """#!/bin/sh
mkdir dist
for entry in * .[!.]*; do [ "$entry" = dist ] || cp -r "$entry" dist/; done
: > dist/svote_helper-0.whl
"""
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
cp /bin/pip "$3/bin/pip"
"""
PIP = """#!/bin/sh
for last; do :; done
cp -r "${last%/*}" /opt/svote-helper/taken
"""


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """A copy of the sources, with secrets in every plausible place."""
    copy = tmp_path / "tree"
    shutil.copytree(
        REPO_ROOT, copy, ignore=shutil.ignore_patterns(*BUILT_FILES, "docs", "tests", "ui", "bench"), symlinks=True
    )
    (copy / "docs").mkdir()
    shutil.copy(REPO_ROOT / "docs" / "operations.md", copy / "docs")
    for directory in FOLDERS:
        for name in (*NAMES, "helper.toml", "queue.db", "queue.db-wal"):
            (copy / directory / name).write_text(SECRET)
    return copy


def files_with_secret(directory: Path) -> list[Path]:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def create_fake_programs(directory: Path) -> None:
    """Create the files of a base image: a shell, some programs of this machine, and fake programs."""
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", linked):
            (directory / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, directory / library[1:])
        (directory / "bin").mkdir(exist_ok=True)
        shutil.copy(program, directory / "bin" / name)
    for name, text in {"make": MAKE, "python": PYTHON, "pip": PIP, "apt-get": "#!/bin/sh\n"}.items():
        write_executable(directory / "bin" / name, text)
    for name in ("tmp", "opt", "mnt", "var/lib", "var/tmp", "etc"):
        (directory / name).mkdir(parents=True, exist_ok=True)


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[list[str]]:
    """The buildah command, with a separate storage in which every layer is a directory."""
    (program,) = BUILDAH
    storage = tmp_path / "storage"
    yield [program, "--root", str(storage), "--runroot", str(tmp_path / "run"), "--storage-driver", "vfs"]
    shutil.rmtree(storage, ignore_errors=True)


@pytest.mark.skipif(not BUILDAH, reason="needs buildah")
def test_image_planted_secrets_are_in_no_layer(source_tree: Path, tmp_path: Path, buildah: list[str]) -> None:
    base = tmp_path / "base"
    create_fake_programs(base)
    (tmp_path / "Base").write_text("FROM scratch\nCOPY . /\n")
    bases = re.findall(
        r"^(?:FROM|ARG \w+=)\s*([a-z./]+:[\w.-]+)", (source_tree / "deploy/container/Containerfile").read_text(), re.M
    )
    assert len(bases) == 2
    build = [*buildah, "bud", "--isolation", "chroot", "--pull-never", "--layers"]
    names = [option for name in bases for option in ("-t", name if "/" in name else f"docker.io/library/{name}")]
    completed = subprocess.run(
        [*build, *names, "-f", str(tmp_path / "Base"), str(base)], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    file = source_tree / "deploy" / "container" / "Containerfile"
    completed = subprocess.run(
        [*build, "-t", "svote-helper", "-f", str(file), str(source_tree)], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    layers = tmp_path / "storage" / "vfs" / "dir"
    assert files_with_secret(layers) == []
    installed = {path.name for path in layers.glob("*/opt/svote-helper/taken")}
    assert installed, "the fake pip has installed the built files"


def test_image_final_stage_copies_nothing() -> None:
    text = (REPO_ROOT / "deploy" / "container" / "Containerfile").read_text()
    *_, final = re.split(r"^FROM ", text, flags=re.MULTILINE)
    assert re.findall(r"^(?:COPY|ADD)\b.*", final, re.MULTILINE) == []
    assert "--mount=type=bind,from=build" in final


def test_make_wheel_leaves_planted_secrets_out(source_tree: Path, tmp_path: Path) -> None:
    dist, venv = tmp_path / "dist", tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    write_executable(venv / "bin" / "maturin", "#!/bin/sh\n")
    for old in ("deploy/container/operator-token", "svote_helper-0.whl"):
        (dist / old).parent.mkdir(parents=True, exist_ok=True)
        (dist / old).write_text(SECRET if "token" in old else "")
    command = ["make", f"--old-file={venv}/.deps", "wheel", f"VENV={venv}", f"DIST={dist}"]
    completed = subprocess.run(command, cwd=source_tree, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert files_with_secret(dist) == []
    packed = {str(path.relative_to(dist)) for path in (dist / "deploy").rglob("*") if path.is_file()}
    planted = {f"deploy/container/{name}" for name in (*NAMES, "helper.toml", "queue.db", "queue.db-wal")}
    deployed = {str(path.relative_to(source_tree)) for path in (source_tree / "deploy").rglob("*") if path.is_file()}
    assert packed == deployed - planted


@pytest.mark.parametrize("name", NAMES)
def test_ignore_files_name_every_credential(name: str) -> None:
    assert name in (REPO_ROOT / ".gitignore").read_text().splitlines()
    assert f"**/{name}" in (REPO_ROOT / ".dockerignore").read_text().splitlines()
