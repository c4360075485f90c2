"""Honest clients in a process of their own: `python -m tests.campaign.honest_clients PORT COUNT < REQUESTS`.

`REQUESTS` has one request per line, which are sent in turn. Prints the responses by status and their times. In the
process of an attack, the time of a response would contain the pauses of the attack.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from tests.campaign.attack_clients import RawRequest, ReusedConnection

CONNECTIONS = 4
PAUSE_SECONDS = 0.02
"""Seconds between two requests of a connection."""


async def run_honest_clients(port: int, requests: Sequence[RawRequest], count: int) -> tuple[Counter[int], list[float]]:
    """Send `count` of the requests in turn; return responses by status (0 for none) and seconds."""
    lines = [json.dumps({**asdict(request), "body": request.body.decode()}) for request in requests]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(port), str(count)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate("\n".join(lines).encode())
    statuses, seconds = json.loads(output)
    return Counter({int(status): number for status, number in statuses.items()}), seconds


async def _send_requests(port: int, requests: Iterable[RawRequest]) -> tuple[Counter[int], list[float]]:
    statuses, seconds = Counter[int](), list[float]()

    async def run_client() -> None:
        connection = ReusedConnection(port)
        for request in requests:
            started_at = time.monotonic()
            response = await connection.send(request)
            seconds.append(time.monotonic() - started_at)
            statuses[response.status if response else 0] += 1
            await asyncio.sleep(PAUSE_SECONDS)
        connection.close()

    await asyncio.gather(*(run_client() for _ in range(CONNECTIONS)))
    return statuses, seconds


def _read_requests() -> list[RawRequest]:
    values = map(json.loads, sys.stdin)
    return [RawRequest(**{**value, "body": value["body"].encode()}) for value in values]


if __name__ == "__main__":
    port, count = map(int, sys.argv[1:])
    in_turn = itertools.islice(itertools.cycle(_read_requests()), count)
    print(json.dumps(asyncio.run(_send_requests(port, in_turn))))
