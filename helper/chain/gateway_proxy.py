"""Forwards chain requests from wallets to the first usable node.

The proxy sends no requests of its own and uses separate connections. Its errors do not affect the health of a node, so
neither nodes nor wallets can delay reveals through it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Final

import anyio
import httpx

from helper.chain.node import Node
from helper.chain.node_http import (
    DEFAULT_TIMEOUT_SECONDS,
    STREAM_LIMIT_BYTES,
    UNAVAILABLE_STATUSES,
    NodeHttp,
    NoResponse,
    StreamedResponse,
    StreamRequest,
)
from helper.chain.node_pool import NodePool
from helper.chain.rest_client import reports_unready_keys
from helper.core.refusals import PauseReason
from helper.errors import ChainError, ChainUnavailable

_POST_FAILURE_STATUSES: Final = frozenset({502, 503, 504})
"""Statuses of a POST after which other nodes get the next POSTs."""
POST_PAUSE_SECONDS: Final = 30.0
"""Seconds for which a node that failed a POST is tried last. Wallets repeat a transaction within 4 s."""
_RECEIVE_BUFFER_BYTES: Final = 32 << 10
"""Size of the kernel's receive buffer for a response. The kernel doubles it.

uvloop reads all that the kernel has received before a reader can pause it. With the kernel's default of several
megabytes, each response that its client reads slowly would hold as much memory.
"""


class PossiblySent(ChainError):
    """A POST may have arrived, but its response was lost.

    Check its effect before sending it again.
    """


class GatewayProxy:
    """Forwards requests to the nodes of a pool.

    Args:
        timeout: default of `StreamRequest.timeout`; also for a GET while there is another node to query.
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
        self._post_failed_at: dict[Node, float] = {}  # in event loop time

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    @asynccontextmanager
    async def forward(self, request: StreamRequest) -> AsyncIterator[StreamedResponse]:
        """Forward a request and stream the response.

        A GET is sent to the next node until one responds; the response of the last node is returned
        regardless of its status. A POST is sent to another node only if nothing was sent yet, or if the node says that
        it processed nothing because its verifying keys are not ready. Nodes that failed a POST get the next ones last.

        Raises:
            ChainUnavailable: no node is usable, or none responded; no byte of a POST was sent.
            PossiblySent: a POST may have been sent.
            ChainResponseError: the response to a GET is invalid.
        """
        async with AsyncExitStack() as stack:
            yield await self._fetch_response(request, stack)

    async def _fetch_response(self, request: StreamRequest, stack: AsyncExitStack) -> StreamedResponse:
        """Return the first usable response; `stack` closes it."""
        error: ChainError = ChainUnavailable(PauseReason.NO_NODE_IN_SYNC)
        is_post = request.method != "GET"
        order = self._ordered_nodes(is_post=is_post)
        for node in order:
            await stack.aclose()
            is_last = node is order[-1]
            tried = request if is_post or is_last else replace(request, timeout=None)
            stream = self._clients[node].stream(tried, limit=self._limit)
            try:
                response = await stack.enter_async_context(stream)
                is_final = await self._is_final(node, response, is_post=is_post)
            except ChainError as caught:
                error = caught
                if is_post:
                    self._post_failed_at[node] = anyio.current_time()
                    if not (isinstance(caught, NoResponse) and not caught.sent):
                        raise PossiblySent(str(caught)) from None
                continue
            if is_final or is_last:
                return response
        raise error

    async def _is_final(self, node: Node, response: StreamedResponse, *, is_post: bool) -> bool:
        """Whether a response is returned even if there is another node to ask. Records failures of POSTs."""
        if not is_post:
            return response.status not in UNAVAILABLE_STATUSES
        if response.status not in _POST_FAILURE_STATUSES:
            self._post_failed_at.pop(node, None)
            return True
        self._post_failed_at[node] = anyio.current_time()
        body = await response.read_short() if response.status == HTTPStatus.SERVICE_UNAVAILABLE else None
        return body is None or not reports_unready_keys(body)

    def _ordered_nodes(self, *, is_post: bool) -> list[Node]:
        """The usable nodes in order. Those with a slow request in progress, or that failed a POST, come last."""
        now = anyio.current_time()

        def rank(node: Node) -> tuple[bool, bool]:
            failed_at = self._post_failed_at.get(node) if is_post else None
            return failed_at is not None and now - failed_at < POST_PAUSE_SECONDS, self._clients[node].is_slow

        return sorted(self._node_pool.usable_nodes, key=rank)
