"""`svote-helper version`: shows version information, and compares the installed files with a signed release."""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from helper.cli.conventions import ConfigOption, ExitCode, JsonOption, emit, fail
from helper.core.json_records import HEX_32, fact
from helper.runtime.release_files import InstalledFiles, compare_installed, packages_directory, read_release

SHOWN_FILES: Final = 10
"""Maximum number of files of each kind that the text output lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitVersion:
    """A circuit."""

    fingerprint: str = fact("Fingerprint of the verifying key, hex.", pattern=HEX_32)
    crate: str = fact("Name and version of the published crate.")
    k: int = fact("log2 of the number of rows.")
    proof_bytes: int = fact("Size of a proof in bytes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRelease(InstalledFiles):
    """Comparison of the installed files with a release. Paths are relative to the directory of the packages."""

    version: str = fact("Version of the release.")
    commit: str = fact("Git commit from which the release was built.", pattern="^[0-9a-f]{40,64}$")
    signer: str | None = fact("Principal whose key signed the release; null if the signature was not checked.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """`version`."""

    version: str = fact("Version of the helper.")
    circuits: Mapping[str, CircuitVersion] = fact(
        "Circuits by name. Empty with --verify if the installed files differ."
    )
    python: str = fact("Python version.")
    sqlite: str = fact("SQLite version.")
    release: InstalledRelease | None = fact("Result of --verify; absent without it.", optional=True)


def version(
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the installed files with the signed list of a release.")
    ] = False,
    manifest: Annotated[
        Path | None,
        typer.Option(
            "--manifest",
            readable=False,
            help="release.json of the release, next to its SHA256SUMS and SHA256SUMS.sig "
            "(default: [prover] release_manifest).",
        ),
    ] = None,
    allowed_signers: Annotated[
        Path | None,
        typer.Option(
            "--allowed-signers",
            readable=False,
            help="File with the keys that may sign a release (default: [prover] allowed_signers).",
        ),
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show the versions of the helper, its circuits, Python and SQLite.

    With --verify, first check that the list of files is signed by an allowed key and that exactly these files are
    installed. Exit code 1: it is not. Exit code 3: the files match, but no file of allowed signers is configured, so
    the signature was not checked. Native code is loaded only if the files match.
    """
    release = _verify(manifest, allowed_signers, config) if verify else None
    is_equal = release is None or release.is_equal
    is_checked = release is None or release.signer is not None
    code = ExitCode.FAILURE if not is_equal else ExitCode.OK if is_checked else ExitCode.DEGRADED
    emit(collect_versions(release), _print_versions, json=json, code=code)


def collect_versions(release: InstalledRelease | None) -> Versions:
    """Collect the versions. If the installed files differ from the release, `circuits` is empty."""
    circuits: dict[str, CircuitVersion] = {}
    if release is None or release.is_equal:
        # Imported here, because a changed file must not run before it is reported.
        from helper.circuits import GENERATIONS  # noqa: PLC0415

        circuits = {
            info.name: CircuitVersion(
                fingerprint=info.fingerprint, crate=info.crate, k=info.k, proof_bytes=info.proof_bytes
            )
            for info in (generation.info for generation in GENERATIONS.values())
        }
    return Versions(
        version=metadata.version("svote-helper"),
        circuits=circuits,
        python=platform.python_version(),
        sqlite=sqlite3.sqlite_version,
        release=release,
    )


def _verify(manifest: Path | None, allowed_signers: Path | None, config: Path | None) -> InstalledRelease:
    if manifest is None or allowed_signers is None:
        # Imported here, because the settings take as long to load as all the rest of this command.
        from helper.cli.command_inputs import read_settings  # noqa: PLC0415

        settings = read_settings(config, {}).config.prover
        manifest = manifest or (Path(settings.release_manifest) if settings.release_manifest else None)
        allowed_signers = allowed_signers or (Path(settings.allowed_signers) if settings.allowed_signers else None)
    if manifest is None:
        fail("--verify requires --manifest or [prover] release_manifest", ExitCode.USAGE)
    release = read_release(manifest, allowed_signers)
    files = compare_installed(release, packages_directory())
    return InstalledRelease(version=release.version, commit=release.commit, signer=release.signer, **asdict(files))


def _print_versions(versions: Mapping[str, Any]) -> None:
    typer.echo(f"svote-helper {versions['version']}")
    for name, circuit in versions["circuits"].items():
        typer.echo(f"circuit {name}: {circuit['crate']}, fingerprint {circuit['fingerprint']}")
    typer.echo(f"python {versions['python']}, sqlite {versions['sqlite']}")
    if "release" in versions:
        _print_release(versions["release"])


def _print_release(release: Mapping[str, Any]) -> None:
    signature = f"signed by {release['signer']}" if release["signer"] else "signature not checked"
    typer.echo(f"release {release['version']}, commit {release['commit'][:12]}, {signature}")
    typer.echo(f"{release['matching']} files match")
    differing = {kind: release[kind] for kind in ("changed", "missing", "unlisted") if release[kind]}
    for kind, files in differing.items():
        for file in files[:SHOWN_FILES]:
            typer.echo(f"{kind}: {file}")
        if len(files) > SHOWN_FILES:
            typer.echo(f"{kind}: {len(files) - SHOWN_FILES} more")
    if differing:
        typer.echo("the installed files are not those of the release: install its wheel again")
    elif not release["signer"]:
        typer.echo("the signature was not checked: specify --allowed-signers or [prover] allowed_signers")
