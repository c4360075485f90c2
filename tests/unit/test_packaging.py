"""Secret files in the source tree reach neither the build context of images nor `dist/`.

`tests/deploy/test_containers.py` builds the image and searches its layers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.planted_secrets import (
    NAMES,
    PLANTED_NAMES,
    REPO_ROOT,
    SECRET,
    copy_sources_with_secrets,
    find_files_with,
)

BUILDAH = [path for path in (shutil.which("buildah"),) if path]


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    copy = tmp_path / "tree"
    copy_sources_with_secrets(copy)
    return copy


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("program", BUILDAH)
def test_build_context_contains_sources_without_planted_secrets(
    program: str, source_tree: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    (tmp_path / "Containerfile").write_text("FROM scratch\nCOPY . /context/\n")
    buildah = [program, "--root", str(storage), "--runroot", str(tmp_path / "run"), "--storage-driver", "vfs"]
    command = [*buildah, "bud", "--isolation", "chroot", "-f", str(tmp_path / "Containerfile"), str(source_tree)]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stderr
        (context,) = (storage / "vfs" / "dir").glob("*/context")
        assert find_files_with(SECRET, context) == []
        packages = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["tool"]["maturin"]["python-packages"]
        assert {"Makefile", "ui_dist", "requirements", *packages} <= {path.name for path in context.iterdir()}
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def test_image_final_stage_copies_only_hashes() -> None:
    text = (REPO_ROOT / "deploy" / "container" / "Containerfile").read_text()
    *_, final = re.split(r"^FROM ", text, flags=re.MULTILINE)
    copies = re.findall(r"^(?:COPY|ADD)\b.*", final, re.MULTILINE)
    assert copies == ["COPY --from=build /src/SHA256SUMS /opt/svote-helper.sha256"]
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
    assert find_files_with(SECRET, dist) == []
    packed = {str(path.relative_to(dist)) for path in (dist / "deploy").rglob("*") if path.is_file()}
    planted = {f"deploy/container/{name}" for name in PLANTED_NAMES}
    deployed = {str(path.relative_to(source_tree)) for path in (source_tree / "deploy").rglob("*") if path.is_file()}
    assert packed == deployed - planted


@pytest.mark.parametrize("name", NAMES)
def test_ignore_files_name_every_credential(name: str) -> None:
    assert name in (REPO_ROOT / ".gitignore").read_text().splitlines()
    assert f"**/{name}" in (REPO_ROOT / ".dockerignore").read_text().splitlines()
