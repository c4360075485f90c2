"""Dependencies that the caller passes to a service."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from typing import cast

import pytest

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
async def test_run_service_configures_garbage_collection_before_listening() -> None:
    started: list[tuple[int, int]] = []
    await run_service(
        cast("Service", StartOnlyService()),
        on_started=lambda _: started.append((gc.get_freeze_count(), gc.get_threshold()[0])),
    )
    frozen, threshold = started[0]
    assert frozen > 10_000
    assert threshold == YOUNG_OBJECTS
