"""Dependencies that the caller passes to a service."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from structlog.testing import capture_logs

from helper.app import startup
from helper.app.service import Service
from helper.app.startup import YOUNG_OBJECTS, run_service


class StartOnlyService:
    """A service that only starts."""

    def __init__(self) -> None:
        self.url = "http://127.0.0.1:1"

    def get_status(self) -> bool:
        return True

    def stop(self) -> None:
        pass

    async def run(self, *, on_started: Callable[[str], None], wallet_socket: socket.socket | None) -> None:
        assert wallet_socket is None
        on_started(self.url)


@pytest.fixture
def unfrozen_gc() -> Iterator[None]:
    gc.unfreeze()
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen_gc")
async def test_run_service_hardens_process_and_configures_garbage_collection_before_listening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "harden_process", lambda: ["core files cannot be disabled"])
    started: list[tuple[int, int]] = []
    with capture_logs() as logs:
        await run_service(
            cast("Service", StartOnlyService()),
            on_started=lambda _: started.append((gc.get_freeze_count(), gc.get_threshold()[0])),
        )
    assert [log["reason"] for log in logs] == ["core files cannot be disabled"], "also without a queue"
    frozen, threshold = started[0]
    assert frozen > 10_000
    assert threshold == YOUNG_OBJECTS
