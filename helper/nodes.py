"""The chain's nodes as the settings want them used."""

from __future__ import annotations

from collections.abc import Sequence

from helper.chain.failover import Endpoint, Endpoints, make_endpoints
from helper.clock import Clock
from helper.config import Config


def nodes_of(config: Config, clock: Clock, nodes: Sequence[Endpoint] | None = None) -> Endpoints:
    """What asks them, best first; `nodes` instead of connections to those that the settings name."""
    chain = config.chain
    if nodes is None:
        nodes = make_endpoints(config.chain_endpoints, config.chain_rpc, timeout=chain.timeout_seconds)
    return Endpoints(
        nodes,
        clock=clock,
        chain_id=chain.chain_id or None,
        stale_after=chain.stale_seconds,
        clock_skew=chain.clock_skew_seconds,
    )
