"""The nodes as those ask them who must never be in the way of a reveal: visitors of the page, and the archive.

Visitors may cause questions about staking, rounds and tallies as often as they like, and an archive asks about every
reveal of the chain. So what goes wrong with these sets no node aside for reveals and makes none look slow, and their
connections, few of them, are their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import httpx

from helper.chain.node_http import TIMEOUT
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import ChainClient, HeightGoneError
from helper.errors import ChainAnswerError, ChainError, ChainUnavailable

T = TypeVar("T")

CONNECTIONS: Final = 8
"""To each node at once."""


class ReadOnlyNodePool:
    """The fresh nodes, without a word in who is fresh.

    Args:
        endpoints: says which nodes are fresh.
        timeout: seconds that one node may take.
        transport: replaces the network in tests.
    """

    def __init__(
        self, endpoints: NodePool, *, timeout: float = TIMEOUT, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._endpoints = endpoints
        self._clients = {
            endpoint: ChainClient(endpoint.client.url, timeout=timeout, transport=transport, connections=CONNECTIONS)
            for endpoint in endpoints.all
        }

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]]) -> T:
        """Ask the fresh nodes in order until one answers; those that keep one of these questions waiting come last.

        Raises:
            HeightGoneError: every node that was asked says that it has the height no more.
            ChainAnswerError: what came was no answer.
            ChainUnavailable: nothing came.
        """
        clients = [self._clients[endpoint] for endpoint in self._endpoints.fresh]
        errors: dict[str, ChainError] = {}
        for client in sorted(clients, key=lambda client: client.slow):
            try:
                return await fn(client)
            except ChainError as error:
                errors[client.name] = error
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        said = f"no node answered ({reasons or 'none is in step'})"
        gone = [error for error in errors.values() if isinstance(error, HeightGoneError)]
        if gone and len(gone) == len(errors):
            raise HeightGoneError(said, min((error.lowest for error in gone if error.lowest is not None), default=None))
        answered = any(isinstance(error, ChainAnswerError) for error in errors.values())
        raise (ChainAnswerError if answered else ChainUnavailable)(said)
