"""Build a release from the newest commit: `make release`, or twice to compare the results: `make release-check`.

`dist/` gets the wheel with its requirements (`make wheel`), `release.json` (the hash of every installed file),
`sbom.cdx.json`, `provenance.json`, `SHA256SUMS`, and with a key `SHA256SUMS.sig`. All of them depend only on the commit
and the toolchain, not on the directory, the day or the user: the sources are exported from git, times are that of the
commit, and paths in the native module are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from helper.runtime.release_files import (
    MANIFEST_NAME,
    MANIFEST_SCHEMA,
    SIGNATURE_NAME,
    SIGNATURE_NAMESPACE,
    SUMS_NAME,
)

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "release"
BUILD_COMMAND: Final = "make release"
SBOM_NAME: Final = "sbom.cdx.json"
PROVENANCE_NAME: Final = "provenance.json"
BUILD_TYPE: Final = "urn:svote-helper:build:make-release:v1"
"""Type of the build in the provenance: `make release` of this repository, as this module implements it."""
BUILDER: Final = "urn:svote-helper:builder:local"
"""The builder in the provenance: the machine of the signer. There is no hosted builder."""
LOCK_FILES: Final = ("requirements/dev.txt", "proofs/Cargo.lock", "ui/package-lock.json")
_OTHER_DAY: Final = "+40d"
"""Time of the second build of `--check`, relative to now."""
_RUSTC: Final = '#!/bin/sh\nunset LD_PRELOAD\nexec "%s/bin/rustc" "$@"\n'
"""Runs rustc with the real time: with libfaketime 0.9.10, rustc 1.95 hangs, because its allocator reads the clock while
the library is being initialized. Build scripts, cargo, maturin and make have the other time."""

_RECORD: Final = re.compile(r"^[^/]+\.dist-info/RECORD$")


class ReleaseBuildError(Exception):
    """A release could not be built."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that is released.

    Attributes:
        id: its git id (hex).
        epoch: its time, Unix seconds.
    """

    id: str
    epoch: int


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="output directory; it is replaced")
    parser.add_argument("--key", type=Path, help="SSH key that signs the release; without it, it is not signed")
    parser.add_argument("--check", action="store_true", help="build twice in temporary directories and compare")
    parser.add_argument("--describe", action="store_true", help="only add the other files to the wheel in --dist")
    arguments = parser.parse_args()
    try:
        commit = read_commit(ROOT)
        if arguments.check:
            check_reproducible(commit)
            return
        if not arguments.describe:
            require_committed(ROOT)
            build_wheel(commit, BUILD / "source", BUILD / "target", arguments.dist)
        write_descriptions(ROOT if arguments.describe else BUILD / "source", arguments.dist, commit)
        sign(arguments.dist, arguments.key)
    except (ReleaseBuildError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}")


def read_commit(repository: Path) -> Commit:
    """Return the newest commit."""
    commit, epoch = _run("git", "-C", str(repository), "log", "-1", "--format=%H %ct").split()
    return Commit(commit, int(epoch))


def require_committed(repository: Path) -> None:
    """Raise ReleaseBuildError if the work tree differs from the newest commit, which is what is built."""
    changes = _run("git", "-C", str(repository), "status", "--porcelain").splitlines()
    if changes:
        raise ReleaseBuildError(
            f"the work tree has {len(changes)} uncommitted changes, which would not be in the release: commit them"
        )


def export_sources(commit: Commit, directory: Path) -> None:
    """Replace a directory by the files of a commit.

    Their times are now, not that of the commit, because cargo would otherwise consider its output of a later commit
    up to date.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "-c", "tar.umask=022", "archive", "--format=tar", commit.id],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        if hasattr(tarfile, "tar_filter"):  # not in Python before 3.11.4
            tar.extraction_filter = tarfile.tar_filter
        tar.extractall(directory)  # noqa: S202 (git has just written it)
    for path in directory.rglob("*"):
        os.utime(path)


def build_wheel(
    commit: Commit,
    source: Path,
    target: Path,
    dist: Path,
    *,
    prefix: Sequence[str] = (),
    more_environment: Mapping[str, str] | None = None,
) -> None:
    """Export the sources and run `make wheel` there.

    Args:
        commit: the commit to build.
        source: directory for the sources; it is replaced.
        target: directory for compiled Rust code.
        dist: output directory; it is replaced.
        prefix: a command that runs the build.
        more_environment: added to the environment.
    """
    export_sources(commit, source)
    shutil.rmtree(dist, ignore_errors=True)
    _run("cargo", "fetch", "--locked", f"--manifest-path={source / 'proofs' / 'Cargo.toml'}")
    venv = Path(sys.prefix)
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": str(commit.epoch),
        "CARGO_TARGET_DIR": str(target),
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(remapped_paths(source, target)),
        "CARGO_INCREMENTAL": "0",
        **(more_environment or {}),
    }
    command = [*prefix, "make", f"--old-file={venv}/.deps", "wheel", f"VENV={venv}", f"DIST={dist.resolve()}"]
    subprocess.run(command, cwd=source, env=environment, check=True)


def remapped_paths(source: Path, target: Path) -> list[str]:
    """Return the options of rustc that replace the paths of this machine in the native module."""
    cargo_home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    # Later options have precedence, so the general ones come first.
    paths = [(cargo_home, "/cargo"), (_sysroot(), "/rust")]
    paths += [(registry, "/cargo/registry/src") for registry in sorted((cargo_home / "registry" / "src").glob("*"))]
    paths += [(source, "/svote-helper"), (target, "/target")]
    return [f"--remap-path-prefix={path}={name}" for path, name in paths]


def _sysroot() -> Path:
    """Return the directory of the Rust toolchain."""
    return Path(_run("rustc", "--print", "sysroot").strip())


def write_descriptions(source: Path, dist: Path, commit: Commit) -> None:
    """Add `release.json`, the bill of materials, the provenance and `SHA256SUMS` to the wheel.

    Args:
        source: directory of the sources.
        dist: directory with the wheel.
        commit: the commit that was built.
    """
    from scripts.sbom import create_sbom  # noqa: PLC0415 - not needed to build

    wheel = find_wheel(dist)
    version = wheel.name.split("-")[1]
    for name in (MANIFEST_NAME, SBOM_NAME, PROVENANCE_NAME, SUMS_NAME, SIGNATURE_NAME):
        (dist / name).unlink(missing_ok=True)
    _write_json(dist / MANIFEST_NAME, create_manifest(wheel, version, commit))
    sbom = create_sbom(
        source, version=version, wheel=wheel, wheel_sha256=_hash(wheel), commit=commit.id, epoch=commit.epoch
    )
    (dist / SBOM_NAME).write_text(sbom)
    _write_json(dist / PROVENANCE_NAME, create_provenance(source, dist, commit))
    files = sorted(str(path.relative_to(dist)) for path in dist.rglob("*") if path.is_file())
    (dist / SUMS_NAME).write_text("".join(f"{_hash(dist / name)}  {name}\n" for name in files))


def find_wheel(dist: Path) -> Path:
    """Return the only wheel in a directory."""
    wheels = list(dist.glob("svote_helper-*.whl"))
    if len(wheels) != 1:
        raise ReleaseBuildError(f"{dist} contains {len(wheels)} wheels of svote-helper instead of one")
    return wheels[0]


def create_manifest(wheel: Path, version: str, commit: Commit) -> dict[str, Any]:
    """Return the content of `release.json`: the hash of every file that the wheel installs.

    `RECORD` is left out, because installers change it.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/") and not _RECORD.match(name)]
        if any(name.partition("/")[0].endswith(".data") for name in names):
            raise ReleaseBuildError("the wheel has a .data directory, whose files are installed elsewhere")
        files = {name: sha256(archive.read(name)).hexdigest() for name in sorted(names)}
    return {"schema": MANIFEST_SCHEMA, "version": version, "commit": commit.id, "wheel": wheel.name, "files": files}


def create_provenance(source: Path, dist: Path, commit: Commit) -> dict[str, Any]:
    """Return the provenance: an in-toto statement with a SLSA provenance predicate (slsa.dev/provenance/v1).

    It has no times of the build and no name of the machine, so that two builds of a commit are equal.
    """
    subjects = sorted(path for path in dist.rglob("*") if path.is_file())
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": str(path.relative_to(dist)), "digest": {"sha256": _hash(path)}} for path in subjects],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"command": BUILD_COMMAND, "commit": commit.id},
                "internalParameters": {
                    "sourceDateEpoch": commit.epoch,
                    "remappedPaths": ["/cargo", "/cargo/registry/src", "/rust", "/svote-helper", "/target"],
                },
                "resolvedDependencies": [
                    {"uri": "git+svote-helper", "digest": {"gitCommit": commit.id}},
                    *({"uri": f"file:{name}", "digest": {"sha256": _hash(source / name)}} for name in LOCK_FILES),
                ],
            },
            "runDetails": {"builder": {"id": BUILDER, "version": _toolchain()}},
        },
    }


def sign(dist: Path, key: Path | None) -> None:
    """Sign `SHA256SUMS` with an SSH key; without one, report that the release is not signed."""
    sums = dist / SUMS_NAME
    (dist / SIGNATURE_NAME).unlink(missing_ok=True)
    if key is None:
        print(
            f"{dist} is NOT signed: no key was given. Sign it with `{BUILD_COMMAND} KEY=FILE`, or\n"
            f"ssh-keygen -Y sign -f FILE -n {SIGNATURE_NAMESPACE} {sums}",
            file=sys.stderr,
        )
        return
    subprocess.run(["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", SIGNATURE_NAMESPACE, str(sums)], check=True)


def check_reproducible(commit: Commit) -> None:
    """Build twice, in directories of different length, on different days, with different time zones and umasks.

    Raises ReleaseBuildError if the results differ.
    """
    require_committed(ROOT)
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        hashes: list[str] = []
        manifests: list[dict[str, str]] = []
        rustc = Path(name) / "rustc"
        rustc.write_text(_RUSTC % _sysroot())
        rustc.chmod(0o755)
        builds = (
            ("a", "UTC", 0o022, ()),
            ("another/and/longer/path", "Asia/Kathmandu", 0o077, ("faketime", "-f", _OTHER_DAY)),
        )
        for folder, zone, mask, prefix in builds:
            directory = Path(name) / folder
            previous = os.umask(mask)
            try:
                dist = directory / "dist"
                more = {"TZ": zone, "HOSTNAME": folder, "RUSTC": str(rustc)}
                source, target = directory / "source", directory / "target"
                build_wheel(commit, source, target, dist, prefix=prefix, more_environment=more)
                write_descriptions(source, dist, commit)
            finally:
                os.umask(previous)
            hashes.append((dist / SUMS_NAME).read_text())
            manifests.append(json.loads((dist / MANIFEST_NAME).read_text())["files"])
            print(f"built in {directory}: {sha256(hashes[-1].encode()).hexdigest()}  {SUMS_NAME}", flush=True)
            shutil.rmtree(directory / "target")
    files = {line[66:] for line in set(hashes[0].splitlines()) ^ set(hashes[1].splitlines())}
    installed = {name for name, _ in set(manifests[0].items()) ^ set(manifests[1].items())}
    if files:
        raise ReleaseBuildError("the two builds differ in these files:\n" + "\n".join(sorted(files | installed)))
    print(f"both builds of {commit.id} are equal: {len(hashes[0].splitlines())} files")


def _toolchain() -> dict[str, str]:
    """Return the versions of the tools that influence the result."""
    return {
        "python": platform.python_version(),
        "maturin": metadata.version("maturin"),
        "rustc": _run("rustc", "--version").strip(),
        "cargo": _run("cargo", "--version").strip(),
        "linker": _run("cc", "--version").splitlines()[0],
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
