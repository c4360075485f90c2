"""Hosts that share a queue in PostgreSQL."""

from __future__ import annotations

import contextlib
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx

from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess


def create_key_file(directory: Path) -> str:
    """Create the key of a shared queue; returns its path."""
    keys = directory / "keys"
    keys.touch(0o600)
    keys.write_text(token_hex(32))
    return str(keys)


class SharedQueueHosts:
    """Hosts by name, with the same key and schema. `store` has more settings of this section."""

    def __init__(
        self, directory: Path, http: httpx.AsyncClient, chain: DevChain, /, *, nodes: int = 1, **store: object
    ) -> None:
        self._directory = directory
        self._processes: tuple[httpx.AsyncClient, DevChain] = (http, chain)
        self._nodes = nodes
        self._store = {"key_file": create_key_file(directory), "schema_name": f"hosts_{token_hex(6)}", **store}
        self.schema_name = str(self._store["schema_name"])
        self.all_hosts: dict[str, HelperProcess] = {}

    def create_host(self, name: str, **sections: dict[str, Any]) -> HelperProcess:
        store = {**self._store, "host": name, **sections.pop("store", {})}
        settings: dict[str, Any] = {**sections, "program": STAND_IN_PROGRAM, "nodes": self._nodes}
        host = HelperProcess(self._directory / name, *self._processes, store=store, **settings)
        self.all_hosts[name] = host
        return host

    async def kill_all(self) -> None:
        for host in self.all_hosts.values():
            if host.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    await host.kill()
