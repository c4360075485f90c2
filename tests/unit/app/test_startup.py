"""What a service gets from who runs it."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from helper.app.service import Service
from helper.app.startup import run_service


class Standing:
    """A service that only starts."""

    def __init__(self) -> None:
        self.url = "http://127.0.0.1:1"

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        """Nothing is under way."""

    async def run(self, *, started: Callable[[str], None], listener: socket.socket | None) -> None:
        assert listener is None
        started(self.url)


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
async def test_what_is_loaded_is_not_searched_for_dead_cycles_once_the_service_listens() -> None:
    frozen: list[int] = []
    await run_service(cast("Service", Standing()), started=lambda _: frozen.append(gc.get_freeze_count()))
    assert frozen[0] > 10_000
