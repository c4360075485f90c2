"""Compare the response times of new and of known shares: `python -m bench.known_shares [--quick]`.

Over one connection, new shares and shares that were posted before are posted alternately, in random order within each
pair, so that drift of the machine affects both alike. Prints JSON with the medians and all runs. `auc` is the
probability that a known share takes longer than a new one: 0.5 means that the times do not distinguish them, 0 or 1
that they always do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

from bench.accept import MAX_CONCURRENT_VOTES, PRODUCTION_SETTINGS, ROUND_SECONDS, cast_votes, interleave_bodies
from tests.support.harness import run_chain_and_helper

NEW, KNOWN = "queued", "duplicate"
DISTANCE = 64
"""Minimum number of shares between the first and the second POST of a share, so that no CPU cache contains it."""


class ShareConnection:
    """A kept-alive connection that measures response times."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self._head = f"POST /shielded-vote/v1/shares HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: "
        self._socket = socket.create_connection((address.hostname, address.port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> ShareConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def post(self, body: str, expected: str) -> float:
        """Post a share. Returns the seconds until the response arrived.

        Raises:
            SystemExit: the response has another status.
        """
        request = f"{self._head}{len(body)}\r\n\r\n{body}".encode()
        started_at = time.perf_counter()
        self._socket.sendall(request)
        response = self._socket.recv(1 << 14)
        seconds = time.perf_counter() - started_at
        while not response.endswith(b"}"):
            response += self._socket.recv(1 << 14)
        if json.loads(response.partition(b"\r\n\r\n")[2]) != {"status": expected}:
            raise SystemExit(f"not {expected}: {response.decode()}")
        return seconds


def time_responses(url: str, bodies: Sequence[str], rng: random.Random) -> dict[str, list[float]]:
    """Post each body, and another time after at least `DISTANCE` others. Returns the response times in seconds."""
    seconds: dict[str, list[float]] = {NEW: [], KNOWN: []}
    with ShareConnection(url) as connection:
        for body in bodies[:DISTANCE]:
            connection.post(body, NEW)
        for number in range(DISTANCE, len(bodies)):
            pair = [(NEW, bodies[number]), (KNOWN, bodies[number - DISTANCE])]
            rng.shuffle(pair)
            for status, body in pair:
                seconds[status].append(connection.post(body, status))
    return seconds


def compare(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Compute the figures of one run."""
    new, known = sorted(seconds[NEW]), sorted(seconds[KNOWN])
    first, _, third = quantiles(new, n=4)
    below = sum(bisect_left(new, value) + bisect_right(new, value) for value in known) / 2
    return {
        "new_p50_ms": 1e3 * median(new),
        "known_p50_ms": 1e3 * median(known),
        "ratio": median(known) / median(new),
        "difference_per_iqr": (median(known) - median(new)) / (third - first),
        "auc": below / (len(new) * len(known)),
    }


async def measure(shares: int) -> dict[str, float]:
    """Run once with this many new shares."""
    with tempfile.TemporaryDirectory() as name:
        flags = ("--block-seconds", "1")
        async with run_chain_and_helper(Path(name), *flags, **PRODUCTION_SETTINGS) as (chain, helper):
            round_id = await chain.open_round(seconds=ROUND_SECONDS)
            votes = -(-(shares + DISTANCE) // (8 * MAX_CONCURRENT_VOTES)) * MAX_CONCURRENT_VOTES
            cast = await cast_votes(chain, round_id, votes)
            await helper.wait_for_leaf(round_id, max(position for _, position in cast))
            bodies = interleave_bodies(cast)[: shares + DISTANCE]
            return compare(await asyncio.to_thread(time_responses, helper.url, bodies, random.Random(7)))


def main() -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of 400 shares")
    options = parser.parse_args()
    shares, runs = (400, 1) if options.quick else (3_000, options.runs)
    results: list[dict[str, Any]] = [asyncio.run(measure(shares)) for _ in range(runs)]
    figures = {name: round(median(run[name] for run in results), 4) for name in results[0]}
    print(json.dumps({"name": "known-shares", "median": figures, "runs": results}))


if __name__ == "__main__":
    main()
