"""`svote-helper devnet`: run the embedded vote chain."""

from __future__ import annotations

import typer

from devnet.cli import devnet

app = typer.Typer()
app.command()(devnet)
