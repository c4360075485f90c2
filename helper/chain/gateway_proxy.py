"""Forwards wallets' own requests to the chain to the first fresh node.

The proxy sends no requests of its own and uses separate connections. Its errors do not affect the health of a node, so
neither nodes nor wallets can delay reveals through it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import httpx

from helper.chain.node import Node
from helper.chain.node_http import LARGE, TIMEOUT, NodeHttp, Streamed, Unanswered
from helper.chain.node_pool import NodePool
from helper.errors import ChainError, ChainUnavailable

_RETRY_STATUSES: Final = frozenset({429, 502, 503, 504})
"""Statuses after which a GET is sent to another node."""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request to forward.

    Attributes:
        method: GET or POST.
        target: path and query, encoded.
        body: JSON body of a POST.
    """

    method: str
    target: str
    body: bytes | None = None


class PossiblySent(ChainError):
    """A POST may have arrived, but its answer was lost: check its effect before sending it again."""


class GatewayProxy:
    """Forwards requests to the nodes of a pool.

    Args:
        endpoints: the node pool.
        timeout: maximum seconds until the response head, and between two pieces of the body.
        connections: maximum number of connections to each node.
        limit: maximum length of an answer in bytes.
        transport: replaces the network in tests.
    """

    def __init__(
        self,
        endpoints: NodePool,
        *,
        timeout: float = TIMEOUT,
        connections: int = 128,
        limit: int = LARGE,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._limit = limit
        self._nodes = {
            endpoint: NodeHttp(endpoint.client.url, timeout=timeout, connections=connections, transport=transport)
            for endpoint in endpoints.all
        }

    async def aclose(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            await node.aclose()

    @asynccontextmanager
    async def ask(self, request: ProxyRequest) -> AsyncIterator[Streamed]:
        """Forward a request and stream the answer.

        A GET is sent to the next node until one answers; the answer of the last node is returned whatever its status. A
        POST is sent to another node only if nothing was sent yet.

        Raises:
            ChainUnavailable: no node is fresh, or none answered; nothing of a POST was sent.
            PossiblySent: a POST may have been sent.
            ChainAnswerError: the answer to a GET is invalid.
        """
        async with AsyncExitStack() as stack:
            yield await self._answer(request, stack)

    async def _answer(self, request: ProxyRequest, stack: AsyncExitStack) -> Streamed:
        """Return the first usable answer; `stack` closes it."""
        error: ChainError = ChainUnavailable("no chain node is in sync")
        order = self._order()
        for endpoint in order:
            await stack.aclose()
            node = self._nodes[endpoint]
            stream = node.stream(request.method, request.target, request.body, limit=self._limit)
            try:
                answer = await stack.enter_async_context(stream)
            except ChainError as caught:
                error = caught
                if _may_have_arrived(request, caught):
                    raise PossiblySent(str(caught)) from None
                continue
            if request.method == "GET" and answer.status in _RETRY_STATUSES and endpoint is not order[-1]:
                continue
            return answer
        raise error

    def _order(self) -> list[Node]:
        """The fresh nodes in order. Those with a slow request in progress come last."""
        return sorted(self._endpoints.fresh, key=lambda endpoint: self._nodes[endpoint].slow)


def _may_have_arrived(request: ProxyRequest, error: ChainError) -> bool:
    """Whether a POST may have been sent, so that it must not go to another node."""
    return request.method != "GET" and not (isinstance(error, Unanswered) and not error.sent)
