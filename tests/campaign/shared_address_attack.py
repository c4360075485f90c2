"""Hostile clients with the wallets' address: `python -m tests.campaign.shared_address_attack PORT SECONDS CLIENTS`.

A third of the clients hold slow connections, a third send bytes that are not HTTP, a third flood the helper with
invalid shares, half of them over kept-alive connections. Prints counts as JSON: connections that the server closed
before their time limit, and responses by status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import sys
import time
from collections import Counter

from tests.campaign.attack_clients import (
    CONNECTION_ERRORS,
    HOST,
    INVALID_REQUESTS,
    SLOW_MODES,
    ReusedConnection,
    hold_slow_connection,
)

CONNECTIONS_PER_SLOW_CLIENT = 130
"""34 of 100 clients hold 4,420 connections, more than the server permits."""
SHORTEST_LIMIT_SECONDS = 8.0
"""Below the server's shortest time limit (8.5 s for a head): a connection that lasted less was closed for another."""
REOPEN_SECONDS = 10.0
"""Maximum pause until a slow client opens a connection again that was closed."""
PAUSE_SECONDS = 0.05
"""Pause of each garbage and flood client between two requests; without one the clients use the helper's processor."""


class Attack:
    """The hostile clients of one run.

    Attributes:
        counts: connections by kind, and responses by kind and status.
    """

    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self._end = time.monotonic() + seconds
        self._rng = random.Random(port)
        self.counts: Counter[str] = Counter()

    async def run(self, clients: int) -> None:
        kinds = [(self._hold_slow, self._send_garbage, self._flood)[number % 3] for number in range(clients)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(kind(number)) for number, kind in enumerate(kinds)]
            await asyncio.sleep(self._end - time.monotonic())
            for task in tasks:
                task.cancel()

    async def _hold_slow(self, number: int) -> None:
        async def hold(mode: str) -> None:
            await asyncio.sleep(self._rng.random() * 2)
            while time.monotonic() < self._end:
                lasted = await hold_slow_connection(self._port, HOST, mode)
                self.counts["slow connections"] += 1
                self.counts["slow connections closed early"] += lasted < SHORTEST_LIMIT_SECONDS
                await asyncio.sleep(self._rng.random() * REOPEN_SECONDS)

        modes = (SLOW_MODES[(number + index) % len(SLOW_MODES)] for index in range(CONNECTIONS_PER_SLOW_CLIENT))
        await asyncio.gather(*map(hold, modes))

    async def _send_garbage(self, _number: int) -> None:
        while time.monotonic() < self._end:
            with contextlib.suppress(*CONNECTION_ERRORS):
                reader, writer = await asyncio.open_connection(HOST, self._port)
                try:
                    writer.write(self._rng.randbytes(self._rng.randrange(1, 4096)) + b"\r\n\r\n")
                    status = (await reader.read(64)).split(b" ", 2)[1:2]
                    self.counts[f"garbage {status[0].decode() if status else 'no response'}"] += 1
                finally:
                    writer.close()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _flood(self, number: int) -> None:
        connection = ReusedConnection(self._port)
        try:
            while time.monotonic() < self._end:
                response = await connection.send(self._rng.choice(INVALID_REQUESTS))
                self.counts[f"flood {response.status if response else 'no response'}"] += 1
                if number % 2:
                    connection.close()
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            connection.close()


async def _run(port: int, seconds: float, clients: int) -> dict[str, int]:
    attack = Attack(port, seconds)
    await attack.run(clients)
    return dict(attack.counts)


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _port, _seconds, _clients = sys.argv[1:]
    print(json.dumps(asyncio.run(_run(int(_port), float(_seconds), int(_clients)))))
