"""`svote-helper version`: shows version information."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import typer

from helper.cli.options import JsonOption
from helper.cli.output import emit_json

app = typer.Typer()


@app.command()
def version(json: JsonOption = False) -> None:
    """Show the versions of the helper, its circuits, Python and SQLite."""
    versions = collect_versions()
    if json:
        emit_json(versions)
        return
    typer.echo(f"svote-helper {versions['version']}")
    for name, circuit in versions["circuits"].items():
        typer.echo(f"circuit {name}: {circuit['crate']}, fingerprint {circuit['fingerprint']}")
    typer.echo(f"python {versions['python']}, sqlite {versions['sqlite']}")


def collect_versions() -> dict[str, Any]:
    """Collect the versions as plain JSON values."""
    # imported here, so that the help loads no native code
    from helper.circuits.registry import circuit_infos  # noqa: PLC0415
    from helper.store import sqlite_version  # noqa: PLC0415

    return {
        "version": package_version(),
        "circuits": {
            name: {
                "fingerprint": info.fingerprint,
                "crate": info.crate,
                "k": info.k,
                "proof_bytes": info.proof_bytes,
            }
            for name, info in circuit_infos().items()
        },
        "python": platform.python_version(),
        "sqlite": sqlite_version(),
    }


def package_version() -> str:
    """Return the version of the installed package, or "unknown" if it is not installed."""
    try:
        return metadata.version("svote-helper")
    except metadata.PackageNotFoundError:
        return "unknown"
