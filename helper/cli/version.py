"""`svote-helper version`: what this is and what it stands on."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import typer

from helper.cli.output import emit_json
from helper.cli.settings import JsonOption

app = typer.Typer()


@app.command()
def version(json: JsonOption = False) -> None:
    """Tell the versions of the helper, its circuits, Python and SQLite."""
    facts = collect()
    if json:
        emit_json(facts)
        return
    typer.echo(f"svote-helper {facts['version']}")
    for name, circuit in facts["circuits"].items():
        typer.echo(f"circuit {name}: {circuit['crate']}, fingerprint {circuit['fingerprint']}")
    typer.echo(f"python {facts['python']}, sqlite {facts['sqlite']}")


def collect() -> dict[str, Any]:
    """All of it as plain JSON values."""
    # loaded here, so that the help does not load native code
    from helper.store import sqlite_version  # noqa: PLC0415
    from proofs import CIRCUITS  # noqa: PLC0415

    return {
        "version": package_version(),
        "circuits": {
            name: {
                "fingerprint": info.fingerprint,
                "crate": info.crate,
                "k": info.k,
                "proof_bytes": info.proof_bytes,
            }
            for name, info in CIRCUITS.items()
        },
        "python": platform.python_version(),
        "sqlite": sqlite_version(),
    }


def package_version() -> str:
    """The version of the installed package; "unknown" where the sources run without being installed."""
    try:
        return metadata.version("svote-helper")
    except metadata.PackageNotFoundError:
        return "unknown"
