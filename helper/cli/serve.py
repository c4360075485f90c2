"""`svote-helper serve`: run the helper in the foreground until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from helper.cli.options import ConfigOption
from helper.cli.output import print_message

app = typer.Typer()


@contextlib.contextmanager
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


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Listen address (default: [helper] host).")] = None,
    port: Annotated[int | None, typer.Option(help="Port (default: [helper] port); 0 selects a free port.")] = None,
    db: Annotated[Path | None, typer.Option("--db", help="Database file (default: [helper] db_path).")] = None,
    role: Annotated[
        str | None, typer.Option(help="Role: all, api, prover or sender (default: [helper] role).", show_default=False)
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the base URL to this file, as JSON, once the service listens.")
    ] = None,
) -> None:
    """Accept shares from wallets and reveal each at its due time."""
    with _defer_garbage_collection():
        # imported here, so that the help loads nothing else
        from helper.cli.settings import read_settings  # noqa: PLC0415

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
        # imported after the settings were validated, so that errors in them are reported without loading native code
        from helper.store.factory import refuse_host_in_use, refuse_unsuitable_disk  # noqa: PLC0415

        if not settings.helper.disable:
            refuse_unsuitable_disk(settings)
            refuse_host_in_use(settings)

        import uvloop  # noqa: PLC0415

        from helper.app.service import Service  # noqa: PLC0415
        from helper.app.startup import create_service, run_service  # noqa: PLC0415
        from helper.clock import SystemClock  # noqa: PLC0415
        from helper.observability.log_config import configure  # noqa: PLC0415
        from helper.observability.sentry import create_reporter  # noqa: PLC0415
        from helper.runtime.systemd import (  # noqa: PLC0415
            ServiceManager,
            adopt_inherited_listener,
            is_journal,
            priority_prefix,
        )

    clock = SystemClock()
    reporter = create_reporter(settings.helper.sentry_dsn, clock) if settings.helper.sentry_dsn else None
    configure(
        settings.log.level,
        settings.log.format,
        report=reporter.report if reporter is not None else None,
        prefix=priority_prefix if is_journal(os.environ, sys.stderr) else None,
    )

    service = create_service(settings)

    def on_started(url: str) -> None:
        if isinstance(service, Service) and service.new_database:
            print_message(f"created a new, empty queue: {service.new_database}")
        print_message(f"listening on {url}")
        if ready_file is not None:
            partial = ready_file.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            with partial.open("x", encoding="utf-8") as file:  # never through an existing link
                file.write(json.dumps({"url": url, "socket": str(settings.socket_path)}) + "\n")
            partial.replace(ready_file)

    manager = ServiceManager(os.environ, os.getpid(), clock)
    listener = adopt_inherited_listener(os.environ, os.getpid())
    try:
        uvloop.run(run_service(service, on_started=on_started, wallet_socket=listener, service_manager=manager))
    finally:
        if reporter is not None:
            reporter.close()
