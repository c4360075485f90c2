"""`svote-helper serve`: run the helper in the foreground until SIGTERM or SIGINT."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from helper.cli.command_inputs import read_settings
from helper.cli.conventions import ConfigOption, print_message
from helper.store.factory import check_before_start


@contextmanager
def _defer_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block, and exempt its objects afterwards.

    Imports create many objects that are used until the end, and little garbage: full passes over them take 20 to 40 ms.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Listen address (default: [helper] host).")] = None,
    port: Annotated[int | None, typer.Option(help="Port (default: [helper] port); 0 selects a free port.")] = None,
    db: Annotated[Path | None, typer.Option("--db", help="Database file (default: [helper] db_path).")] = None,
    role: Annotated[str | None, typer.Option(help="Role: all, api, prover or sender (default: [helper] role).")] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the base URL to this file, as JSON, once the service listens.")
    ] = None,
) -> None:
    """Accept shares from wallets and reveal each at its due time."""
    flags = {
        "helper.host": host,
        "helper.port": port,
        "helper.db_path": None if db is None else str(db),
        "helper.role": role,
    }
    settings = read_settings(config, flags).config
    other_services = (not settings.admin.disable, settings.ui.enable, settings.gateway.enable)
    if settings.helper.disable and not any(other_services):
        print_message("the helper is disabled ([helper] disable = true), and no other service is enabled")
        return
    settings.require_nodes()
    if not settings.helper.disable:
        check_before_start(settings)
    with _defer_garbage_collection():
        # Imported after these checks, which a second service on the same database fails within a second.
        from helper.app.startup import serve_until_signal  # noqa: PLC0415
    serve_until_signal(settings, announce=print_message, ready_file=ready_file)
