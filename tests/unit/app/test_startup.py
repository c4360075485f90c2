"""Dependencies that the caller passes to a service."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from helper.app.service import Service
from helper.app.startup import run_service


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
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen_gc")
async def test_run_service_freezes_startup_objects_before_listening() -> None:
    frozen: list[int] = []
    await run_service(cast("Service", StartOnlyService()), on_started=lambda _: frozen.append(gc.get_freeze_count()))
    assert frozen[0] > 10_000
