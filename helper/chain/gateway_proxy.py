"""Forwards chain requests from wallets to the first usable node.

The proxy sends no requests of its own and uses separate connections. Its errors do not affect the health of a node, so
neither nodes nor wallets can delay reveals through it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx

from helper.chain.node import Node
from helper.chain.node_http import DEFAULT_TIMEOUT_SECONDS, STREAM_LIMIT_BYTES, NodeHttp, NoResponse, StreamedResponse
from helper.chain.node_pool import NodePool
from helper.errors import ChainError, ChainUnavailable

_RETRY_STATUSES: Final = frozenset({429, 502, 503, 504})
"""Statuses after which a GET is sent to another node."""
_RECEIVE_BUFFER_BYTES: Final = 128 << 10
"""Size of the kernel's receive buffer for a response. The kernel doubles it.

uvloop reads all that the kernel has received before a reader can pause it. With the kernel's default of several
megabytes, each response that its client reads slowly would hold as much memory.
"""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request to forward.

    Attributes:
        method: GET or POST.
        target: path and query, encoded.
        body: JSON body of a POST.
        headers: additional headers.
        timeout: maximum seconds until the response head, and between two chunks of the body; None for the default.
    """

    method: str
    target: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None


class PossiblySent(ChainError):
    """A POST may have arrived, but its response was lost.

    Check its effect before sending it again.
    """


class GatewayProxy:
    """Forwards requests to the nodes of a pool.

    Args:
        timeout: default of `ProxyRequest.timeout`; also for a GET while there is another node to query.
        connections: maximum number of connections to each node.
        limit: maximum length of a response in bytes.
        transport: replaces the network in tests.
    """

    def __init__(
        self,
        node_pool: NodePool,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        connections: int = 128,
        limit: int = STREAM_LIMIT_BYTES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._node_pool = node_pool
        self._timeout = timeout
        self._limit = limit
        self._clients = {
            node: NodeHttp(
                node.client.url,
                timeout=timeout,
                connections=connections,
                transport=transport,
                receive_buffer=_RECEIVE_BUFFER_BYTES,
            )
            for node in node_pool.nodes
        }

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    @asynccontextmanager
    async def forward(self, request: ProxyRequest) -> AsyncIterator[StreamedResponse]:
        """Forward a request and stream the response.

        A GET is sent to the next node until one responds; the response of the last node is returned
        regardless of its status. A POST is sent to another node only if nothing was sent yet.

        Raises:
            ChainUnavailable: no node is usable, or none responded; no byte of a POST was sent.
            PossiblySent: a POST may have been sent.
            ChainResponseError: the response to a GET is invalid.
        """
        async with AsyncExitStack() as stack:
            yield await self._fetch_response(request, stack)

    async def _fetch_response(self, request: ProxyRequest, stack: AsyncExitStack) -> StreamedResponse:
        """Return the first usable response; `stack` closes it."""
        error: ChainError = ChainUnavailable("no chain node is in sync")
        order = self._ordered_nodes()
        for node in order:
            await stack.aclose()
            is_last = node is order[-1]
            stream = self._clients[node].stream(
                request.method,
                request.target,
                request.body,
                limit=self._limit,
                headers=request.headers,
                timeout=self._timeout if request.method == "GET" and not is_last else request.timeout,
            )
            try:
                response = await stack.enter_async_context(stream)
            except ChainError as caught:
                error = caught
                if _may_have_arrived(request, caught):
                    raise PossiblySent(str(caught)) from None
                continue
            if request.method == "GET" and response.status in _RETRY_STATUSES and not is_last:
                continue
            return response
        raise error

    def _ordered_nodes(self) -> list[Node]:
        """The usable nodes in order. Those with a slow request in progress come last."""
        return sorted(self._node_pool.usable_nodes, key=lambda node: self._clients[node].is_slow)


def _may_have_arrived(request: ProxyRequest, error: ChainError) -> bool:
    """Whether a POST may have been sent, so that it must not go to another node."""
    return request.method != "GET" and not (isinstance(error, NoResponse) and not error.sent)
