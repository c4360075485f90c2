"""Read-only access to the nodes for requests that must never delay a reveal.

Visitors of the status page can cause requests about staking, rounds and tallies at any rate, and the archive reads
every reveal of the chain. Therefore, errors of these requests do not put nodes into backoff, slow ones do not make a
node count as slow, and they use a small number of separate connections.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import httpx

from helper.chain.node_http import DEFAULT_TIMEOUT_SECONDS
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import ChainClient, HeightPrunedError
from helper.errors import ChainError, ChainResponseError, ChainUnavailable

T = TypeVar("T")

MAX_CONNECTIONS: Final = 8
"""Maximum number of connections to each node."""


class ReadOnlyNodePool:
    """Calls the usable nodes of a pool without affecting their health.

    Args:
        timeout: timeout of a call to one node, in seconds.
        transport: replaces the network in tests.

    Attributes:
        node_pool: the node pool, whose health decides which nodes are called.
    """

    def __init__(
        self,
        node_pool: NodePool,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.node_pool = node_pool
        self._clients = {
            node: ChainClient(node.client.url, timeout=timeout, transport=transport, connections=MAX_CONNECTIONS)
            for node in node_pool.nodes
        }

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]]) -> T:
        """Call `fn` with the client of each usable node in order until one succeeds. Slow ones come last.

        Raises:
            HeightPrunedError: every usable node has pruned the height.
            ChainResponseError: no node succeeded, and at least one returned an invalid response.
            ChainUnavailable: no node responded.
        """
        clients = [self._clients[node] for node in self.node_pool.usable_nodes]
        errors: dict[str, ChainError] = {}
        for client in sorted(clients, key=lambda client: client.is_slow):
            try:
                return await fn(client)
            except ChainError as error:
                errors[client.name] = error
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        message = f"no chain node responded ({reasons or 'none is in sync'})"
        pruned = [error for error in errors.values() if isinstance(error, HeightPrunedError)]
        if pruned and len(pruned) == len(errors):
            raise HeightPrunedError(
                message, min((error.lowest_height for error in pruned if error.lowest_height is not None), default=None)
            )
        has_response = any(isinstance(error, ChainResponseError) for error in errors.values())
        raise (ChainResponseError if has_response else ChainUnavailable)(message)
