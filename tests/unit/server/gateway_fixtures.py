"""A helper with a gateway to two fake nodes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from helper.chain.gateway_proxy import GatewayProxy
from helper.server.body_reader import BodyReader
from helper.server.gateway_routes import Gateway, GatewayLimits
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import FakeNetwork, FakeNode
from tests.unit.server.wallet_fixtures import WalletApp


class GatewayHarness:
    """A helper with a gateway to two nodes, first and second."""

    def __init__(self, *, body_reader: BodyReader | None = None, **limits: Any) -> None:
        self.clock = FakeClock()
        self.first, self.second = FakeNode(self.clock), FakeNode(self.clock)
        self.network = FakeNetwork(first=self.first, second=self.second)
        self.endpoints = self.network.create_node_pool(self.clock)
        self.refusals: Counter[int] = Counter()
        self.gateway = Gateway(
            GatewayProxy(self.endpoints, timeout=0.3, limit=1 << 16, transport=self.network),
            body_reader=body_reader,
            limits=GatewayLimits(**limits),
        )
        self.wallets = WalletApp(
            refusals=self.refusals,
            body_reader=body_reader or BodyReader(),
            more_routes=self.gateway.routes(),
        )
        self.client = self.wallets.create_client()

    def requested_paths(self) -> list[list[str]]:
        """Requests to each node since the last call."""
        requests = [list(node.requests) for node in (self.first, self.second)]
        for node in (self.first, self.second):
            node.requests.clear()
        return requests

    def set_response(self, path: str, make: Callable[[httpx.Request], httpx.Response], *nodes: FakeNode) -> None:
        """Set the response of nodes (default the first) to paths with this segment."""
        for node in nodes or (self.first,):
            node.faults[path] = make


@contextlib.asynccontextmanager
async def running_gateway(**settings: Any) -> AsyncIterator[GatewayHarness]:
    harness = GatewayHarness(**settings)
    await harness.endpoints.probe_all()
    harness.requested_paths()
    async with harness.client:
        try:
            yield harness
        finally:
            await harness.gateway.aclose()
            await harness.endpoints.aclose()
