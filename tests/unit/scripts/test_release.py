"""Release files: list of files, bill of materials, provenance, hashes and signature, from a small wheel."""

from __future__ import annotations

import json
import subprocess
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from helper.runtime.release_files import compare_installed, read_release
from scripts import release
from scripts.release import Commit, ReleaseBuildError
from tests.support.release import SIGNER, create_key, write_allowed_signers

COMMIT = Commit("5d2a" * 10, 1_700_000_000)
FILES = {
    "helper/__init__.py": b"",
    "proofs/_native.abi3.so": b"\x7fELF",
    "svote_helper-1.0.0.dist-info/METADATA": b"Name: svote-helper\n",
    "svote_helper-1.0.0.dist-info/RECORD": b"helper/__init__.py,sha256=...,0\n",
}


def write_wheel(dist: Path, files: dict[str, bytes]) -> Path:
    dist.mkdir(exist_ok=True)
    wheel = dist / "svote_helper-1.0.0-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A described release, without a signature."""
    directory = tmp_path_factory.mktemp("release") / "dist"
    write_wheel(directory, FILES)
    (directory / "deploy").mkdir()
    (directory / "deploy" / "unit").write_text("[Service]\n")
    release.write_descriptions(release.ROOT, directory, COMMIT)
    return directory


def read(dist: Path, name: str) -> Any:
    return json.loads((dist / name).read_text())


def test_sums_list_every_file_and_sha256sum_accepts_them(dist: Path) -> None:
    listed = {line.partition("  ")[2] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    files = {str(path.relative_to(dist)) for path in dist.rglob("*") if path.is_file()}
    assert listed == files - {"SHA256SUMS"}
    assert listed >= {"release.json", "sbom.cdx.json", "provenance.json", "deploy/unit"}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=dist, check=True)


def test_signed_release_is_verified_against_installed_files(dist: Path, tmp_path: Path) -> None:
    key = create_key(tmp_path / "key")
    release.sign(dist, key)
    read_back = read_release(dist / "release.json", write_allowed_signers(tmp_path / "signers", key))
    assert (read_back.signer, read_back.commit, read_back.version) == (SIGNER, COMMIT.id, "1.0.0")
    with zipfile.ZipFile(release.find_wheel(dist)) as archive:
        archive.extractall(tmp_path / "site-packages")
    installed = compare_installed(read_back, tmp_path / "site-packages")
    assert (installed.is_equal, installed.matching) == (True, len(FILES) - 1), "RECORD is left out"


def test_sign_without_key_removes_the_old_signature_and_says_so(dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dist / "SHA256SUMS.sig").write_text("of another release")
    release.sign(dist, None)
    assert not (dist / "SHA256SUMS.sig").exists()
    assert "is NOT signed: no key was given" in capsys.readouterr().err


def test_provenance_names_commit_toolchain_and_every_file(dist: Path) -> None:
    provenance = read(dist, "provenance.json")
    assert provenance["predicateType"] == "https://slsa.dev/provenance/v1"
    digests = {subject["name"]: subject["digest"]["sha256"] for subject in provenance["subject"]}
    wheel = release.find_wheel(dist)
    assert digests[wheel.name] == sha256(wheel.read_bytes()).hexdigest()
    assert digests.keys() >= {"release.json", "sbom.cdx.json", "deploy/unit"}
    definition = provenance["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"command": "make release", "commit": COMMIT.id}
    assert definition["internalParameters"]["sourceDateEpoch"] == COMMIT.epoch
    assert definition["resolvedDependencies"][0]["digest"] == {"gitCommit": COMMIT.id}
    versions = provenance["predicate"]["runDetails"]["builder"]["version"]
    assert versions["rustc"].startswith("rustc 1.")
    assert str(Path.home()) not in (dist / "provenance.json").read_text()


def test_sbom_has_python_rust_and_npm_components(dist: Path) -> None:
    sbom = read(dist, "sbom.cdx.json")
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    components = {component["purl"].partition("@")[0]: component for component in sbom["components"]}
    assert components["pkg:pypi/pydantic"]["scope"] == "required"
    assert components["pkg:pypi/psycopg"]["scope"] == "optional"
    assert components["pkg:cargo/halo2_proofs"]["hashes"][0]["alg"] == "SHA-256"
    assert components["pkg:npm/preact"]["hashes"][0]["alg"] == "SHA-512"
    absent = ("pkg:pypi/pytest", "pkg:cargo/vote-commitment-tree", "pkg:npm/vite", "pkg:pypi/colorama")
    assert not components.keys() & set(absent), "tools and tests are not part of the release"
    edges = {entry["ref"]: entry.get("dependsOn", []) for entry in sbom["dependencies"]}
    direct = edges[sbom["metadata"]["component"]["bom-ref"]]
    assert {ref.partition("@")[0] for ref in direct} >= {
        "pkg:pypi/pydantic",
        "pkg:pypi/psycopg",
        "pkg:cargo/svote-proofs",
        "pkg:npm/preact",
    }
    assert {ref for refs in edges.values() for ref in refs} <= {c["bom-ref"] for c in sbom["components"]}
    assert str(Path.home()) not in (dist / "sbom.cdx.json").read_text()


def test_descriptions_of_the_same_wheel_are_equal(dist: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path, {})
    release.find_wheel(tmp_path).write_bytes(release.find_wheel(dist).read_bytes())
    release.write_descriptions(release.ROOT, tmp_path, COMMIT)
    for name in ("release.json", "sbom.cdx.json"):
        assert (tmp_path / name).read_bytes() == (dist / name).read_bytes()


def test_wheel_with_a_data_directory_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, {**FILES, "svote_helper-1.0.0.data/scripts/tool": b""})
    with pytest.raises(ReleaseBuildError, match=r"\.data directory"):
        release.create_manifest(wheel, "1.0.0", COMMIT)


def test_find_wheel_with_two_wheels_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path, FILES)
    (tmp_path / "svote_helper-0.9.0-cp311-abi3-linux_x86_64.whl").touch()
    with pytest.raises(ReleaseBuildError, match="contains 2 wheels"):
        release.find_wheel(tmp_path)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "repository"
    directory.mkdir()
    (directory / "module.py").write_text("VALUE = 1\n")
    (directory / "program").write_text("#!/bin/sh\n")
    (directory / "program").chmod(0o700)
    (directory / ".gitignore").write_text("secret\n")
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "First")):
        subprocess.run(["git", *command], cwd=directory, check=True)
    monkeypatch.setattr(release, "ROOT", directory)
    return directory


def test_export_has_only_the_files_of_the_commit_with_equal_modes(repository: Path, tmp_path: Path) -> None:
    commit = release.read_commit(repository)
    (repository / "secret").write_text("ignored by git")
    (repository / "module.py").write_text("VALUE = 2\n")
    target = tmp_path / "source"
    target.mkdir()
    (target / "old").touch()
    before = (target / "old").stat().st_mtime
    release.export_sources(commit, target)
    exported = {path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in target.iterdir()}
    assert exported == {
        "module.py": ("VALUE = 1\n", 0o644),
        "program": ("#!/bin/sh\n", 0o755),
        ".gitignore": ("secret\n", 0o644),
    }
    assert all(path.stat().st_mtime >= before for path in target.iterdir()), "older files are not compiled again"


@pytest.mark.parametrize("name", ["module.py", "new.py"])
def test_uncommitted_changes_are_refused(repository: Path, name: str) -> None:
    release.require_committed(repository)
    (repository / name).write_text("VALUE = 3\n")
    with pytest.raises(ReleaseBuildError, match="1 uncommitted changes"):
        release.require_committed(repository)


def test_remapped_paths_put_the_most_specific_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CARGO_HOME", str(tmp_path))
    (tmp_path / "registry" / "src" / "index-1").mkdir(parents=True)
    options = release.remapped_paths(Path("/build/source"), Path("/build/target"))
    assert options[0] == f"--remap-path-prefix={tmp_path}=/cargo"
    assert options[2:] == [
        f"--remap-path-prefix={tmp_path}/registry/src/index-1=/cargo/registry/src",
        "--remap-path-prefix=/build/source=/svote-helper",
        "--remap-path-prefix=/build/target=/target",
    ]
