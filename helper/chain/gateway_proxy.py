"""Wallets' own requests for the chain, passed on to its nodes: each to the first node that is fresh.

The passage asks nothing by itself, and its failures change nothing of what the helper thinks of a node: neither the
nodes nor wallets can slow reveals down by it. Its connections are its own.
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

_AWAY: Final = frozenset({429, 502, 503, 504})
"""What a node answers that can not answer: another may."""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request for a node.

    Attributes:
        method: GET or POST.
        target: path and query, encoded.
        body: the JSON of a POST.
    """

    method: str
    target: str
    body: bytes | None = None


class PossiblySent(ChainError):
    """A POST may have arrived and its answer was lost: whoever sent it must look before sending it again."""


class GatewayProxy:
    """The way to the nodes.

    Args:
        endpoints: says which nodes are fresh.
        timeout: seconds until the head of an answer, and between two pieces of it.
        connections: to each node at once.
        limit: bytes of the longest answer.
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
    async def ask(self, question: ProxyRequest) -> AsyncIterator[Streamed]:
        """A node's answer, as it comes.

        A GET goes on to the next node until one answers; the last one's answer is given whatever it is. A POST goes on
        only while nothing was sent.

        Raises:
            ChainUnavailable: no node is fresh, or none answered; nothing of a POST was sent.
            MaybeSent: a POST may have been sent.
            ChainAnswerError: what came is no answer (to a GET).
        """
        async with AsyncExitStack() as stack:
            yield await self._answer(question, stack)

    async def _answer(self, question: ProxyRequest, stack: AsyncExitStack) -> Streamed:
        """The first answer that will do; `stack` holds what is to be closed after it."""
        error: ChainError = ChainUnavailable("no node is in step with the chain")
        order = self._order()
        for endpoint in order:
            await stack.aclose()
            node = self._nodes[endpoint]
            stream = node.stream(question.method, question.target, question.body, limit=self._limit)
            try:
                answer = await stack.enter_async_context(stream)
            except ChainError as found:
                error = found
                if _may_have_arrived(question, found):
                    raise PossiblySent(str(found)) from None
                continue
            if question.method == "GET" and answer.status in _AWAY and endpoint is not order[-1]:
                continue
            return answer
        raise error

    def _order(self) -> list[Node]:
        """The fresh nodes, best first; those that keep one of these requests waiting come last."""
        return sorted(self._endpoints.fresh, key=lambda endpoint: self._nodes[endpoint].slow)


def _may_have_arrived(question: ProxyRequest, error: ChainError) -> bool:
    """Whether another node must not be asked any more."""
    return question.method != "GET" and not (isinstance(error, Unanswered) and not error.sent)
