"""Read-only access to the nodes for requests that must never delay a reveal.

Visitors of the page cause requests about staking, rounds and tallies at any rate, and the archive reads every reveal of
the chain. Therefore errors of these requests do not put nodes into backoff, slow ones do not make a node count as slow,
and they use a small number of separate connections.
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
"""Maximum number of connections to each node."""


class ReadOnlyNodePool:
    """Calls the fresh nodes of a pool without affecting their health.

    Args:
        endpoints: the node pool.
        timeout: timeout of a call to one node, in seconds.
        transport: replaces the network in tests.

    Attributes:
        endpoints: the node pool, whose health decides which nodes are called.
    """

    def __init__(
        self, endpoints: NodePool, *, timeout: float = TIMEOUT, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.endpoints = endpoints
        self._clients = {
            endpoint: ChainClient(endpoint.client.url, timeout=timeout, transport=transport, connections=CONNECTIONS)
            for endpoint in endpoints.all
        }

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]]) -> T:
        """Call `fn` with the client of each fresh node in order until one succeeds. Slow ones come last.

        Raises:
            HeightGoneError: every fresh node has pruned the height.
            ChainAnswerError: no node succeeded, and at least one returned an invalid answer.
            ChainUnavailable: no node answered.
        """
        clients = [self._clients[endpoint] for endpoint in self.endpoints.fresh]
        errors: dict[str, ChainError] = {}
        for client in sorted(clients, key=lambda client: client.slow):
            try:
                return await fn(client)
            except ChainError as error:
                errors[client.name] = error
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        message = f"no chain node answered ({reasons or 'none is in sync'})"
        gone = [error for error in errors.values() if isinstance(error, HeightGoneError)]
        if gone and len(gone) == len(errors):
            raise HeightGoneError(
                message, min((error.lowest for error in gone if error.lowest is not None), default=None)
            )
        answered = any(isinstance(error, ChainAnswerError) for error in errors.values())
        raise (ChainAnswerError if answered else ChainUnavailable)(message)
