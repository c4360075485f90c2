"""Dependencies that the caller passes to a service."""

from __future__ import annotations

import gc
import platform
import socket
import subprocess
import sys
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


HEAP_SCRIPT = """
import resource
from pathlib import Path
from helper.app.startup import return_freed_memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

return_freed_memory()
bytearray(8 << 20)  # with the default, similar ones are in the heap from now on
before = resident_bytes()
held = [(bytearray(300_000), bytes(1000)) for _ in range(100)]
full = resident_bytes()
held = [small for _, small in held]
print(full - before > 25e6, resident_bytes() - before < 5e6)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps the memory")
def test_memory_of_large_buffers_is_returned_when_they_are_freed() -> None:
    completed = subprocess.run([sys.executable, "-c", HEAP_SCRIPT], capture_output=True, check=True, text=True)
    assert completed.stdout.split() == ["True", "True"]
